"""`mmrl evaluate` on copies of benchmarks with tiny models of real architectures: from command to tables and images."""

import json
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf
from PIL import Image

from mmrl.cli import main
from mmrl.config import load_run
from mmrl.errors import UserError
from mmrl.gui.benchmarks.benchmark_recipe import GroundingEvaluation
from mmrl.gui.benchmarks.benchmark_table import BENCHMARKS
from mmrl.gui.benchmarks.prompts import PRESETS, BenchmarkPrompt, begin_answer
from mmrl.gui.grounding.grounding_tasks import GroundingSettings
from mmrl.recipes import RECIPES
from mmrl.training.run import evaluate, train
from mmrl.vlm.methods.sft import SftConfig
from mmrl.vlm.model.processor import load_processor
from mmrl.vlm.toy.tiny import build_tiny_vlm
from mmrl.vlm.toy.tiny_generic import build_tiny
from tests.gui.benchmarks.copies import BOXES, COPIES, HEIGHT, WIDTH, write_json
from tests.vlm.builders import CORPUS
from tests.vlm.runs import run_config

torch.set_num_threads(1)
CONFIGS = Path(__file__).parents[3] / "configs" / "gui"
FIRST = "[[40, 30]]"
"""An answer in pixels of the resized screen, 308 x 196, that hits the first element only."""


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    return {
        family: build_tiny_vlm(root / family, family=family, corpus=CORPUS) for family in ("qwen2_5_vl", "qwen3_vl")
    }


def configured(tmp_path, model, *benchmarks, **options):
    """A file with an evaluation whose answers begin with FIRST; options are dotted."""
    values = {"recipe": "grounding_eval", "model.path": str(model), "sampler.max_new_tokens": 3, "prompt.prefix": FIRST}
    values |= {"output_dir": str(tmp_path / "out")}
    for name in benchmarks:
        values |= {f"eval_data.{name}.benchmark": name, f"eval_data.{name}.path": str(COPIES[name](tmp_path / name))}
    tree = OmegaConf.create()
    for key, value in (values | options).items():
        OmegaConf.update(tree, key, value)
    path = tmp_path / "eval.yaml"
    path.write_text(OmegaConf.to_yaml(tree))
    return path


def run(tmp_path, model, *benchmarks, **options):
    return evaluate(*load_run(configured(tmp_path, model, *benchmarks, **options)))


def test_the_command_writes_answers_tables_and_images(tmp_path, models, capsys):
    assert main(["evaluate", "--all", str(configured(tmp_path, models["qwen2_5_vl"], "screenspot"))]) == 0
    out = capsys.readouterr().out
    assert "screenspot/accuracy/first" in out
    result = json.loads((tmp_path / "out" / "results" / "screenspot.json").read_text())
    everything, *groups = result["table"]
    assert (everything["n"], everything["first"]) == (15, 3 / 15)
    assert result["macro"]["over"] == ["platform", "type"]
    assert result["macro"]["mean"] == pytest.approx(
        3 * (1 / 3) / 6
    )  # of three texts a platform one hits, of icons none
    assert {"group": {"type": "icon"}, "first": 0.0, "n": 6}.items() <= next(
        row for row in groups if row["group"] == {"type": "icon"}
    ).items()
    setting = result["setting"]
    assert (setting["coordinate_space"], setting["visual_tokens"], setting["factor"]) == ("abs_resized", 5600, 28)
    assert "{instruction}" in setting["user"]
    assert "not comparable" in (tmp_path / "out" / "results" / "screenspot.md").read_text()
    (hit, *_), (miss, *_) = (sorted((tmp_path / "out/images/screenspot").glob(f"{kind}-*")) for kind in ("hit", "miss"))
    for path in (hit, miss):
        assert Image.open(path).size == (2 * WIDTH, 2 * HEIGHT), "a small screen is enlarged"
    assert (tmp_path / "out" / "report.html").is_file()
    assert main(["evaluate", "--verify", str(tmp_path / "out"), "--row", "1,15"]) == 0
    out = capsys.readouterr().out
    assert "screenspot, greedy: 3 of 15 = 20.0%" in out
    assert "2 of 2 rows are the same" in out


@pytest.mark.parametrize("name", BENCHMARKS)
def test_every_benchmark_and_its_groups(name, tmp_path, models):
    metrics = run(tmp_path, models["qwen2_5_vl"], name)
    samples = metrics[f"{name}/n"]
    boxes = samples - 2 if name.startswith("osworld") else samples  # a polygon and a refusal, both missed
    hits = boxes / len(BOXES)
    assert metrics[f"{name}/accuracy/first"] == pytest.approx(hits / samples)
    assert metrics[f"{name}/accuracy/first/low"] < hits / samples < metrics[f"{name}/accuracy/first/high"]
    assert metrics[f"{name}/answers/wrong_format"] == 0.0
    column = BENCHMARKS[name].columns[0]
    assert any(key.startswith(f"{name}/accuracy/first/{column}=") for key in metrics)


def test_an_untrained_model_is_unreadable_and_nothing_is_left_out(tmp_path, models):
    metrics = run(tmp_path, models["qwen2_5_vl"], "screenspot_v2", **{"prompt.prefix": ""})
    assert metrics["screenspot_v2/n"] == 15
    assert metrics["screenspot_v2/answers/wrong_format"] == 1.0
    assert metrics["screenspot_v2/accuracy/first"] == 0.0


def test_thousandths_are_read_as_thousandths(tmp_path, models):
    options = {"prompt.preset": "rel1000", "prompt.prefix": "[[94, 150]]"}  # (30.08, 30) of 320 x 200
    metrics = run(tmp_path, models["qwen3_vl"], "screenspot_v2", **options)
    assert metrics["screenspot_v2/accuracy/first"] == pytest.approx(1 / 5)


@pytest.mark.parametrize("family", ["gemma3", "smolvlm"])
def test_a_processor_that_fixes_the_sides_of_images_keeps_its_size(family, tmp_path):
    folder = build_tiny(tmp_path / family, family=family, corpus=CORPUS)
    size = dict(load_processor(str(folder)).image_processor.size)
    options = {"prompt.preset": "rel1000", "eval_data.screenspot_v2.max_samples": 1}
    _, config = load_run(configured(tmp_path, folder, "screenspot_v2", **options))
    assert dict(GroundingEvaluation(config).policy.processor.image_processor.size) == size


def test_points_in_another_space_are_warned_of(tmp_path, models, caplog):
    copy = tmp_path / "many"
    options = {"prompt.prefix": "[[500, 500]]", "eval_data.mmbench_gui_l2.path": str(copy)}
    rows = json.loads((COPIES["mmbench_gui_l2"](copy) / "L2_annotations.json").read_text())
    write_json(copy / "L2_annotations.json", rows * 2)
    with caplog.at_level("WARNING", logger="mmrl"):
        metrics = run(tmp_path, models["qwen2_5_vl"], "mmbench_gui_l2", **options)
    assert metrics["mmbench_gui_l2/answers/outside"] == 1.0
    assert "100% of the first points are outside their screens; does the model write abs_resized" in caplog.text


def test_points_in_another_space_than_the_familys_have_to_be_confirmed(tmp_path, models):
    with pytest.raises(UserError, match=r"as abs_resized, .* rel1000 \(presets: rel1000, run\).* prompt.space"):
        run(tmp_path, models["qwen3_vl"], "screenspot_v2")


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_asks_both_families(preset, tmp_path, models):
    for family, folder in models.items():
        options = {
            "prompt.preset": preset,
            "prompt.space": str(PRESETS[preset].space),
            "eval_data.osworld_g.max_samples": 7,
        }
        metrics = run(tmp_path / family, folder, "osworld_g", **options)
        assert metrics["osworld_g/n"] == 7


def test_an_interrupted_evaluation_continues_with_the_remaining_rows(tmp_path, models, monkeypatch):
    from mmrl.gui.benchmarks.benchmark_recipe import GroundingMeasure

    options = {"evaluation.batch_tasks": 2}
    whole = run(tmp_path / "whole", models["qwen2_5_vl"], "screenspot", **options)
    asked, answer = [], GroundingMeasure._answer

    def stop_after_three(self, prompts):
        if len(asked) == 3:
            raise KeyboardInterrupt
        asked.append(len(prompts))
        return answer(self, prompts)

    monkeypatch.setattr(GroundingMeasure, "_answer", stop_after_three)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "cut", models["qwen2_5_vl"], "screenspot", **options)
    asked.clear()
    monkeypatch.setattr(GroundingMeasure, "_answer", lambda self, prompts: asked.append(1) or answer(self, prompts))
    again = run(tmp_path / "cut", models["qwen2_5_vl"], "screenspot", **options)
    assert len(asked) == 8 - 3
    assert again == pytest.approx(whole, nan_ok=True)
    asked.clear()
    run(tmp_path / "cut", models["qwen2_5_vl"], "screenspot", **options, **{"prompt.prefix": "[[41, 30]]"})
    assert len(asked) == 8  # another question: nothing is taken over


def test_the_model_sees_the_size_that_the_question_names(tmp_path, models):
    with pytest.raises(UserError, match=r"prompt.user never uses \{instruction\}"):
        run(tmp_path, models["qwen2_5_vl"], "screenspot", **{"prompt.user": "where"})
    # a budget of 32 tokens: 320 x 200 becomes 200 x 125 and then 196 x 112, which the processor must leave alone
    metrics = run(tmp_path, models["qwen2_5_vl"], "screenspot", visual_tokens=32, **{"prompt.prefix": "[[20, 17]]"})
    rows = next((tmp_path / "out" / "answers").glob("screenspot-*.protocol.json"))
    assert json.loads(rows.read_text())["visual_tokens"] == 32
    assert metrics["screenspot/accuracy/first"] == pytest.approx(1 / 5)


def test_the_beginning_of_an_answer_is_part_of_the_sequence(models):
    from mmrl.vlm.engine.vlm_policy import load_policy
    from mmrl.vlm.model.model_config import ModelConfig
    from tests.vlm.builders import make_task

    policy = load_policy(ModelConfig(path=str(models["qwen2_5_vl"])))
    prompt = policy.encode(make_task("one", "Sum?", [(64, 64)]))
    tokenizer = policy.processor.tokenizer
    begun, added = begin_answer(prompt, "[[20", policy.turns), tokenizer.encode("[[20", add_special_tokens=False)
    count = len(added)
    assert begun.input_ids.tolist() == [*prompt.input_ids.tolist(), *added]
    assert begun.position_ids[:, -count:].tolist() == [[prompt.next_position + i for i in range(count)]] * 3
    assert begun.next_position == prompt.next_position + count
    assert begun.text == f"{prompt.text}[[20"
    assert begun.mm_token_type_ids.shape == begun.input_ids.shape


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("eval_*.yaml")), ids=lambda path: path.stem)
def test_a_configuration_runs_on_a_tiny_model_and_copies(path, tmp_path, models):
    _, whole = load_run(path)
    family = "qwen3_vl" if "qwen3" in path.stem else "qwen2_5_vl"
    overrides = [f"output_dir={tmp_path / 'out'}", f"model.path={models[family]}", "model.dtype=float32"]
    overrides += ["sampler.max_new_tokens=2", "evaluation.images=1"]
    for name, data in whole.eval_data.items():
        overrides += [f"eval_data.{name}.path={COPIES[data.benchmark](tmp_path / name)}"]
    metrics = evaluate(*load_run(path, overrides))
    for name in whole.eval_data:
        assert metrics[f"{name}/n"] > 0


def test_a_run_folder_stands_for_its_best_checkpoint(tmp_path, models):
    run_dir = train(RECIPES["sft"], run_config(SftConfig, tmp_path, models["qwen2_5_vl"], steps=1, samples_per_task=1))
    metrics = run(tmp_path, run_dir, "screenspot_v2")
    assert metrics["screenspot_v2/accuracy/first"] == pytest.approx(1 / 5)
    result = json.loads((tmp_path / "out" / "results" / "screenspot_v2.json").read_text())
    assert result["setting"]["model"] == str(run_dir)
    digests = {
        json.loads(path.read_text())["weights"] for path in (tmp_path / "out" / "answers").glob("*.protocol.json")
    }
    run(tmp_path, models["qwen2_5_vl"], "screenspot_v2")
    after = {json.loads(path.read_text())["weights"] for path in (tmp_path / "out" / "answers").glob("*.protocol.json")}
    assert len(after) == len(digests) + 1  # the run's weights are not those that it started from


def test_the_question_of_a_run_is_taken_from_its_configuration(tmp_path):
    with pytest.raises(UserError, match=r"contains no config\.yaml"):
        BenchmarkPrompt("run").resolved(str(tmp_path))
    (tmp_path / "config.yaml").write_text("recipe: sft\n")
    with pytest.raises(UserError, match="no 'grounding' section"):
        BenchmarkPrompt("run").resolved(str(tmp_path))
    grounding = GroundingSettings(family="qwen3_vl", template="Where is {instruction}?", think=True)
    OmegaConf.save({"grounding": vars(grounding), "data": {"system_prompt": "Look {here}."}}, tmp_path / "config.yaml")
    found = BenchmarkPrompt("run").resolved(str(tmp_path))
    assert (found.user, found.space) == ("Where is {instruction}?", "rel1000")
    assert found.system.format(width=1, height=1) == f"Look {{here}}.\n{grounding.think_prompt}"


def test_training_is_refused_before_anything_is_loaded(capsys):
    assert main(["train", str(CONFIGS / "eval_all.yaml")]) == 2
    assert "only evaluates; use `mmrl evaluate" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("prompt.user='{instruction} {x}'", "it may only use height, instruction, width"),
        ("prompt.preset=nope", "allowed: points"),
        ("evaluation.parser=loose", "allowed: reference, robust"),
        ("eval_data.screenspot_v2.benchmark=screenspot3", "did you mean"),
    ],
)
def test_bad_options_are_refused_before_a_model_is_loaded(override, words):
    with pytest.raises(UserError, match=words):
        load_run(CONFIGS / "eval_screenspot_v2.yaml", [override])


def test_texts_are_replaced_one_by_one():
    chosen = BenchmarkPrompt("tool_call", user="find {instruction}", space="rel1000").resolved()
    assert (chosen.user, chosen.space) == ("find {instruction}", "rel1000")
    assert chosen.prefix == PRESETS["tool_call"].prefix
