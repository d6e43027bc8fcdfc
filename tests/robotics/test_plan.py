"""Plans of robot runs against runs, the released model and the command."""

from __future__ import annotations

import pytest
import torch
from accelerate.state import AcceleratorState

from mmrl.cli import main
from mmrl.config import load_run
from mmrl.recipes import RECIPES
from mmrl.training.plan import Allocations
from mmrl.training.processes import make_accelerator, seed_everything
from mmrl.training.trainer import Trainer
from robotics.plan import PUBLISHED, footprint

WITHIN = 0.15
"""Largest error of a planned peak, as a share of the measured one."""


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
    lines = capsys.readouterr().out.splitlines()
    title = next(line for line in lines if line.startswith("1 GPU, computed for"))
    assert "4 episodes of 16 steps, 2 observations each, 2 episodes at once" in title
    assert any(line.split()[:1] == ["acting"] and line.endswith(" s") for line in lines)
    options = "model.options={folder: none, dtype: float32}"
    assert main(["train", str(file), "--dry-run", "model.kind=openvla", options]) == 2
    assert "known without a folder: openvla/openvla-7b" in capsys.readouterr().err


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
def test_a_plan_is_the_measured_peak_of_an_update(micro, tmp_path, request):
    """Peaks of tensors on the CPU, while a small policy learns from whole episodes."""
    _, config = load_run(configuration(tmp_path), [f"trainer.micro_batch={micro}", "reward=potential"])
    seed_everything(0)
    AcceleratorState._reset_state()
    request.addfinalizer(AcceleratorState._reset_state)
    peaks = []
    with Allocations() as allocations:
        recipe = RECIPES["robot_grpo"].load_recipe_class()(config)
        trainer = Trainer(recipe, config, tmp_path / "run", make_accelerator("none"), None)
        trainer.train_step()  # makes the moments
        before = trainer.updater.update

        def noted(*args):
            allocations.restart()
            found = before(*args)
            peaks.append(allocations.peak)
            return found

        trainer.updater.update = noted
        trainer.train_step()
        recipe.close()
    plan = footprint(config)
    assert plan.held("always") + plan.held("update") == pytest.approx(peaks[0], rel=WITHIN), plan.parts
