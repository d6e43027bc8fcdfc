"""Memory plans against runs, published sizes and the command."""

import dataclasses
import os
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from mmrl.cli import main
from mmrl.config import load_run
from mmrl.errors import UserError
from mmrl.recipes import find_recipe
from mmrl.training import run
from mmrl.training.plan import Allocations, Machine, Part, Plan, machine_of
from mmrl.vlm.data.prompt import VlmPayload
from mmrl.vlm.vlm_plan import PUBLISHED, footprint, outlined
from tests.contracts.domains import domain_of, tiny_vlm
from tests.contracts.options import with_changes
from tests.peaks import WITHIN, check_plan, measured_peaks

BILLIONS = {
    "Qwen/Qwen2.5-VL-3B-Instruct": 3.75,
    "Qwen/Qwen2.5-VL-7B-Instruct": 8.29,
    "Qwen/Qwen3-VL-2B-Instruct": 2.13,
    "Qwen/Qwen3-VL-8B-Instruct": 8.77,
    "Qwen/Qwen3-4B-Instruct-2507": 4.02,
}
"""Parameters of the released models, by their model cards."""
RUNS = {
    "full": {},
    "checkpointing": {"model.gradient_checkpointing": True},
    "lora": {"model.lora.enabled": True},
    "micro": {"trainer.micro_batch": 4, "objective.kl": {"kind": "k3", "coef": 0.1}},
    "bf16": {"trainer.mixed_precision": "bf16"},
}


def test_allocations_are_those_of_storages():
    with Allocations() as allocations:
        first = torch.empty(1000)
        second = first + 1
        view = first[10:]
        assert allocations.alive == 8000
        del first
        assert allocations.alive == 8000
        del view, second
        assert allocations.alive == 0
        assert allocations.peak == 8000
        allocations.restart()
        assert allocations.peak == 0


def test_a_peak_is_the_larger_phase_and_divided_parts_shrink():
    parts = (Part("a", 8e9), Part("b", 4e9, divided=True), Part("c", 1e9, "sampling"), Part("d", 3e9, "update"))
    plan = Plan(parts, ())
    assert (plan.peak(), plan.peak(4)) == (15e9, 12e9)
    assert plan.fits(80)
    assert not plan.fits(15)


@pytest.fixture
def file(tmp_path):
    """A run's configuration."""
    path = tmp_path / "run.yaml"
    (tmp_path / "questions.jsonl").write_text('{"question": "What is 7?", "answer": "7"}\n')
    path.write_text(
        f"""
recipe: vlm
output_dir: {tmp_path}/run
model: {{path: {tiny_vlm()}, max_prompt_tokens: 64}}
data: {{path: {tmp_path}/questions.jsonl}}
rewards: [{{name: exact}}]
sampler: {{max_new_tokens: 16}}
trainer: {{tasks_per_step: 2, samples_per_task: 4, learning_rate: 1.0e-4}}
""",
        encoding="utf-8",
    )
    return path


def test_the_command_shows_the_parts_and_what_would_fit(file, tmp_path, capsys):
    assert main(["train", str(file), "--dry-run", "--gpu-memory", "0.003"]) == 0
    lines = capsys.readouterr().out.splitlines()
    title = next(line for line in lines if line.startswith("1 GPU, computed for"))
    # of the data just read, not of model.max_prompt_tokens=64
    tokens = int(title.partition("prompts of ")[2].split()[0])
    assert 5 < tokens < 64
    assert "responses of 16, 8 rows in 2 prompts per pass" in title
    assert any(line.split()[:2] == ["moments", "of"] for line in lines)
    assert any("does not fit into 0.003 GB" in line for line in lines)
    changes = [line.split("=")[0].strip() for line in lines if "=" in line]
    assert changes[:2] == ["trainer.micro_batch", "model.gradient_checkpointing"]
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("share", "said"), [(0.99, "does not fit on the GPU"), (1.01, "loading")])
def test_a_run_that_is_larger_than_its_gpu_loads_nothing(share, said, file, capsys, monkeypatch):
    def load(*_):
        raise UserError("loading")

    gpu = SimpleNamespace(total_memory=int(share * footprint(load_run(file)[1], passes=False).peak()))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    monkeypatch.setattr("mmrl.training.plan.CHANGES", (("model.lora.enabled", True),))
    monkeypatch.setattr(run, "_start", lambda *_, **__: SimpleNamespace(device=torch.device("cuda"), num_processes=1))
    monkeypatch.setattr(run, "_check_processes", lambda *_: None)
    monkeypatch.setattr(run, "_build", load)
    before = torch.get_rng_state()
    assert main(["train", str(file)]) == 2
    assert torch.equal(torch.get_rng_state(), before)
    complaint = capsys.readouterr().err
    assert said in complaint
    assert ("model.lora.enabled=true" in complaint) == (share < 1)


def test_weights_gradients_and_moments_are_those_of_the_parameters(tmp_path):
    config = domain_of("vlm").make_config("vlm", tmp_path)
    plan = footprint(config)
    held = {part.name: part.bytes for part in plan.parts}
    with torch.device("meta"):
        weights = sum(weight.nbytes for weight in outlined(config.model).parameters())
    assert held["weights, trained"] == held["gradients"] == weights
    assert held["moments of AdamW"] == 2 * weights
    state = {part.name: part.bytes for part in footprint(config, passes=False).parts}
    assert state == {name: held[name] for name in state}
    assert {"weights, trained", "moments of AdamW", "gradients"} <= set(state)
    assert not {"activations", "keys and values of prompts", "keys and values of responses"} & set(state)
    config.trainer.sharding, config.trainer.gathered = "fsdp2", "bf16"
    parts = {part.name: part for part in footprint(config).parts}
    assert parts["weights, trained, gathered in bf16"].on(8) == weights / 2
    assert parts["moments of AdamW"].on(8) == weights / 4
    adapted = footprint(with_changes(config, {"model.lora.enabled": True}))
    assert next(part.bytes for part in adapted.parts if part.name == "weights, frozen") >= weights


def test_a_plan_of_given_pairs_has_both_sides(tmp_path):
    config = domain_of("preference").make_config("preference", tmp_path)
    config.max_side_tokens, config.trainer.tasks_per_step = 12, 4
    plan = footprint(config)
    assert plan.assumed[1:3] == ("responses of 12", "8 rows in 4 prompts per pass")


def test_a_model_may_be_the_run_of_the_stage_before(file, tmp_path, capsys, monkeypatch):
    stage, step = tmp_path / "stage", tmp_path / "stage/checkpoints/step-000001"
    step.mkdir(parents=True)
    (stage / "config.yaml").touch()
    (step / "model").symlink_to(tiny_vlm())
    monkeypatch.setattr("mmrl.runs.export.chosen_checkpoint", lambda run: step)
    words = ["train", str(file), "--dry-run", "--gpu-memory=80"]
    assert main(words) == 0
    plan = capsys.readouterr().out.partition("1 GPU,")[2]
    assert main([*words, f"model.path={stage}"]) == 0
    assert capsys.readouterr().out.partition("1 GPU,")[2] == plan


def test_a_dry_run_says_that_a_recipe_has_no_plan_and_refuses_memory_without_one(tmp_path, capsys):
    assert main(["train", "configs/vlm/needle_tspo.yaml", "--dry-run"]) == 0
    assert "memory: there is no plan for the recipe 'tspo'" in capsys.readouterr().out
    assert main(["train", "configs/vlm/digits_grpo.yaml", "--gpu-memory", "80"]) == 2
    assert "--dry-run" in capsys.readouterr().err
    assert main(["train", "configs/vlm/digits_grpo.yaml", "--dry-run", "--gpu-tflops", "989"]) == 2
    assert "trainer.steps" in capsys.readouterr().err


def test_without_a_gpu_the_plan_is_of_this_machine_and_of_its_process(file, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("mmrl.training.plan.machine_bytes", lambda: 12_000_000_000)
    assert main(["train", str(file), "--dry-run"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("this machine's CPU, computed for prompts of") for line in lines)
    libraries = next(line.split() for line in lines if "libraries, data and tokenizer" in line)
    assert 0.1 < float(libraries[-2]) < 12
    assert lines[-1].endswith("fits into 12 GB")


def test_a_gpu_of_this_machine_is_planned_for(monkeypatch):
    gpu = SimpleNamespace(total_memory=140_000_000_000, name="H200")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    assert machine_of(None, 2) == Machine("2 GPUs like this H200", 140.0, 2)
    assert machine_of(24.0, 1) == Machine("1 GPU", 24.0, 1)


UNKNOWN = {
    "images": ({}, "images or videos in the passes of the vision tower"),
    "papo": ({"recipe": "papo"}, "the recipe 'papo' adds"),
    "agent": ({"recipe": "agent"}, "the recipe 'agent' adds"),
}


@pytest.mark.parametrize("case", UNKNOWN)
def test_no_peak_is_named_where_something_is_unknown(case, tmp_path):
    changes, why = UNKNOWN[case]
    name = changes.get("recipe", "vlm")
    config = domain_of(name).make_config(name, tmp_path)
    config.recipe = name
    lines = [*run.dry_run(find_recipe(name), config, 80.0)]
    (said,) = [line for line in lines if "no estimate of the peak" in line]
    assert why in said
    assert any("moments of AdamW" in line for line in lines)
    assert not any(line.startswith("  peak") for line in lines)
    # what is certain can still be too much
    assert "even the known parts do not fit into 1e-06 GB" in "\n".join(run.dry_run(find_recipe(name), config, 1e-6))


@pytest.mark.slow
@pytest.mark.parametrize("name", PUBLISHED)
def test_architectures_have_the_published_number_of_parameters(name):
    from mmrl.vlm.model.model_config import ModelConfig

    with torch.device("meta"):
        network = outlined(ModelConfig(path=name))
    assert sum(weight.numel() for weight in network.parameters()) / 1e9 == pytest.approx(BILLIONS[name], abs=0.006)


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_a_plan_is_the_measured_peak_of_a_run(name, tmp_path):
    """Peaks of tensors on the CPU, while a policy of a million weights samples and learns."""
    from mmrl.vlm.toy.tiny import build_tiny_vlm
    from tests.vlm.builders import CORPUS

    sizes = {"hidden": 128, "intermediate": 384, "layers": 4, "heads": 4, "kv_heads": 2, "max_positions": 512}
    path = build_tiny_vlm(tmp_path / "model", corpus=CORPUS, vision_depth=1, **sizes)
    config = domain_of("vlm").make_config("vlm", tmp_path)
    config.model.path, config.model.freeze_vision = str(path), "lora" not in name
    config.sampler.max_new_tokens = 48
    config.trainer.tasks_per_step, config.trainer.samples_per_task = 4, 8
    config = with_changes(config, RUNS[name])
    peaks, rollouts = measured_peaks(config, tmp_path / "run")
    prompts, answers = VlmPayload.of(rollouts).prompts, rollouts.num_decisions
    config = dataclasses.replace(config, sampler=dataclasses.replace(config.sampler, max_new_tokens=answers))
    check_plan(footprint(config, prompt_tokens=round(sum(map(len, prompts)) / len(prompts))), peaks)


PROCESSES = {
    "full": [],
    "bf16": ["trainer.mixed_precision=bf16"],
    "lora": ["model.lora.enabled=true", "trainer.mixed_precision=bf16"],
}


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads the memory of a process")
@pytest.mark.parametrize("name", PROCESSES)
def test_a_plan_on_a_cpu_is_the_memory_of_the_process(name, tmp_path):
    """The largest resident memory of a process that takes two steps with a language model of 60 million weights."""
    from mmrl.vlm.toy.signs import build_model

    sizes = {"hidden": 640, "intermediate": 1920, "layers": 10, "heads": 10, "kv_heads": 5, "max_positions": 256}
    model = build_model(tmp_path / "model", **sizes)
    (tmp_path / "user.py").write_text(
        "def differs(completions, **columns):\n    return [sum(map(ord, str(t))) % 97 / 97 for t in completions]\n"
    )
    words = [
        *("configs/text/signs_grpo.yaml", f"model.path={model}", f"output_dir={tmp_path}/run", "eval_data={}"),
        *(f"data.path={tmp_path}/data.jsonl", "data.build_options={count: 64, steps: [3], seed: 3}"),
        f"rewards=[{{name: differs, function: '{tmp_path}/user.py:differs'}}]",
        *("trainer.steps=2", "trainer.tasks_per_step=4", "trainer.threads=1", "evaluation.by=null"),
        *("evaluation.every=0", "evaluation.at_start=false", "evaluation.at_end=false", *PROCESSES[name]),
    ]
    command = [sys.executable, "-m", "mmrl.cli", "train", *words]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    said = child.stdout.read()
    _, status, usage = os.wait4(child.pid, 0)
    assert status == 0, said
    plan = subprocess.run([*command, "--dry-run"], capture_output=True, text=True, check=True).stdout
    peak = re.search(r"peak +([0-9.]+) GB", plan)
    assert peak, plan
    assert float(peak[1]) * 1e9 == pytest.approx(usage.ru_maxrss * 1024, rel=WITHIN), plan
