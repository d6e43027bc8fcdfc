"""Plans of robot runs against runs, the released model and the command."""

import pytest
import torch

from mmrl.cli import main
from mmrl.config import load_run
from robotics.robot_plan import PUBLISHED, footprint
from tests.contracts.domains import domain_of
from tests.contracts.options import with_changes
from tests.peaks import check_plan, measured_peaks


def configuration(folder):
    file = folder / "run.yaml"
    file.write_text(
        f"""
recipe: robot_grpo
output_dir: {folder}/run
sim: {{kind: tabletop, tasks: [reach], horizon: 16}}
model: {{kind: small, chunk: 8}}
eval_data: {{held_out: {{split: held_out}}}}
trainer: {{tasks_per_step: 2, samples_per_task: 2, micro_batch: 2}}
"""
    )
    return file


def test_the_command_shows_a_policy_and_refuses_others(tmp_path, capsys):
    file = configuration(tmp_path)
    assert main(["train", str(file), "--dry-run"]) == 0
    said = capsys.readouterr().out  # not measured on a CPU: no peak
    assert "no estimate of the peak, because it also depends on libraries and buffers of a process on a CPU" in said
    assert " peak  " not in said
    assert main(["train", str(file), "--dry-run", "--gpu-memory", "80"]) == 0
    lines = capsys.readouterr().out.splitlines()
    title = next(line for line in lines if line.startswith("1 GPU, computed for"))
    assert "4 episodes of 16 steps, 2 observations each, 2 episodes per micro-batch" in title
    assert any(line.split()[:1] == ["acting"] and line.endswith("sampling") for line in lines)
    options = "model.options={folder: none, dtype: float32}"
    assert main(["train", str(file), "--dry-run", "model.kind=openvla", options]) == 2
    assert "these can be planned without a folder: openvla/openvla-7b" in capsys.readouterr().err
    assert main(["train", str(file), "--dry-run", "model.kind=lerobot", "model.options={folder: none}"]) == 0
    assert "no memory plan for a policy of model.kind lerobot" in capsys.readouterr().out


def test_a_world_model_has_its_average_and_no_reference(tmp_path):
    config = domain_of("flow3d").make_config("flow3d", tmp_path)
    plan = footprint(config)
    held = {part.name: part.bytes for part in plan.parts}
    assert held["weight averages"] == held["gradients"] == held["weights, trained"] == held["moments of AdamW"] / 2
    state = {part.name for part in footprint(config, passes=False).parts}
    assert set(held) - state == {"activations", "flow and noise of a batch"}
    assert "reference" not in state


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("flow3d", {"trainer.mixed_precision": "bf16"}),
        ("flow3d", {"model.body.kind": "unet_motion", "trainer.micro_batch": 2}),
        ("flow3d_awm", {"trainer.micro_batch": 4}),
    ],
)
def test_a_plan_is_the_measured_peak_of_a_world_model(name, changes, tmp_path):
    config = with_changes(domain_of(name).make_config(name, tmp_path), changes)
    check_plan(footprint(config), measured_peaks(config, tmp_path / "run")[0])


@pytest.mark.slow
def test_openvla_has_the_released_number_of_parameters():
    from mmrl.hub.compat import ensure_torchvision
    from robotics.policies.openvla.prismatic import Prismatic

    ensure_torchvision()
    with torch.device("meta"):
        network = Prismatic(PUBLISHED["openvla/openvla-7b"])
    assert sum(weight.numel() for weight in network.parameters()) / 1e9 == pytest.approx(7.54, abs=0.006)


@pytest.mark.slow
@pytest.mark.parametrize("micro", [0, 2])
def test_a_plan_is_the_measured_peak_of_an_update(micro, tmp_path):
    """Peaks of tensors on the CPU, while a small policy learns from whole episodes."""
    _, config = load_run(configuration(tmp_path), [f"trainer.micro_batch={micro}", "reward=potential"])
    peaks, _ = measured_peaks(config, tmp_path / "run")
    check_plan(footprint(config), {"update": peaks["update"]})
