"""Plans of image and video runs against runs, released sizes and the command."""

import pytest
import torch

from diffusion.diffusion_plan import PUBLISHED, footprint
from mmrl.cli import main
from mmrl.hub.compat import ensure_torchvision
from tests.contracts.options import with_changes
from tests.diffusion.runs import run_config
from tests.peaks import check_plan, measured_peaks

BILLIONS = {
    "stabilityai/stable-diffusion-3.5-medium": 2.24,
    "stabilityai/stable-diffusion-3.5-large": 8.06,
    "stabilityai/stable-diffusion-xl-base-1.0": 2.57,
    "black-forest-labs/FLUX.1-dev": 11.90,
    "black-forest-labs/FLUX.1-Kontext-dev": 11.90,
    "black-forest-labs/FLUX.2-klein-base-4B": 3.88,
    "black-forest-labs/FLUX.2-klein-base-9B": 9.08,
    "Qwen/Qwen-Image": 20.43,
    "Wan-AI/Wan2.1-T2V-1.3B-Diffusers": 1.42,
    "Wan-AI/Wan2.1-T2V-14B-Diffusers": 14.29,
}
"""Parameters of the released networks, by the sizes of their files."""
RUNS = {
    "flow_grpo": {},
    "flow_grpo full": {"model.lora.enabled": False, "trainer.micro_batch": 2},
    "flow_grpo bf16": {"trainer.mixed_precision": "bf16", "model.gradient_checkpointing": True},
    "awm": {"model.lora.enabled": False, "trainer.micro_batch": 3},
    "diffusion_nft": {"trainer.micro_batch": 4},
}


def test_the_command_counts_parts(tmp_path, capsys):
    config = run_config("awm", tmp_path, micro_batch=2)
    file = tmp_path / "run.yaml"
    file.write_text(
        f"""
recipe: awm
output_dir: {tmp_path}/run
model: {{path: {config.model.path}, max_sequence_length: 1, lora: {{enabled: false}}}}
data: {{path: {tmp_path}/prompts.txt}}
eval_data: {{held_out: {{path: {tmp_path}/prompts.txt}}}}
rewards: [{{name: caption_colour}}]
heldout_rewards: [{{name: jpeg_incompressibility}}]
timesteps: {{count: 3}}
trainer: {{tasks_per_step: 2, samples_per_task: 4, micro_batch: 2}}
"""
    )
    assert main(["train", str(file), "--dry-run", "--gpu-memory", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    title = next(line for line in lines if line.startswith("1 GPU, computed for"))
    assert "8 images per step and 3 noisy versions of each, the update of 2 images per micro-batch" in title
    sizes = {line.split("  ")[1].strip(): line.split() for line in lines if line.endswith(("GB", "update", "sampling"))}
    assert {"reference", "weight averages", "latents and states", "activations"} <= set(sizes)
    assert not (tmp_path / "run").exists()


def test_weights_and_averages_follow_the_configuration(tmp_path):
    config = with_changes(run_config("awm", tmp_path), {"model.lora.enabled": False, "eval_ema.decay": 0.9})
    plan = footprint(config)
    held = {part.name: part.bytes for part in plan.parts}
    weights = held["weights, trained"]
    assert held["gradients"] == weights
    assert held["weight averages"] == 2 * weights  # the anchor's and the evaluation's
    assert held["reference"] == weights + held.get("weights, frozen", 0)
    state = {part.name: part.bytes for part in footprint(config, passes=False).parts}
    assert state == {name: held.get(name, 0) for name in state}


def test_a_model_that_is_not_there_yet_is_built_or_refused(tmp_path, capsys):
    words = ["train", "configs/diffusion/shapes_awm.yaml", "--dry-run", f"model.path={tmp_path}/none"]
    assert main(words) == 2
    assert "these can be planned without a folder: stabilityai/" in capsys.readouterr().err
    assert main([*words, "model.build=diffusion.toy.shapes.building:build_pipeline"]) == 0
    assert (tmp_path / "none/model_index.json").is_file()


@pytest.mark.slow
def test_architectures_have_the_released_number_of_parameters():
    ensure_torchvision()
    import diffusers

    for name, known in PUBLISHED.items():
        kind, values = known["network"]
        with torch.device("meta"):
            network = getattr(diffusers, kind)(**values)
        assert sum(weight.numel() for weight in network.parameters()) / 1e9 == pytest.approx(BILLIONS[name], abs=0.006)


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_a_plan_is_the_measured_peak_of_a_run(name, tmp_path):
    """Peaks of tensors on the CPU, while a transformer of a million weights draws 32 x 32 latents and learns."""
    from diffusion.toy.shapes import building

    sizes = {"size": 64, "patch": 2, "layers": 4, "heads": 4, "head_width": 32, "text_width": 64, "pooled_width": 32}
    path = building.build_pipeline(str(tmp_path / "model"), vocab_size=700, **sizes)
    config = run_config(name.split()[0], tmp_path)
    config = with_changes(config, {"model.path": str(path)} | RUNS[name])
    check_plan(footprint(config), measured_peaks(config, tmp_path / "run")[0])
