"""Memory of a tiny run, to compare with its plan."""

from pathlib import Path
from typing import Any

import pytest
from accelerate.state import AcceleratorState

from mmrl.core.rollouts import Rollouts
from mmrl.recipes import RECIPES
from mmrl.training.plan import Allocations, Plan
from mmrl.training.processes import make_accelerator, seed_everything
from mmrl.training.trainer import Trainer

WITHIN = 0.15
"""Largest error of a planned peak, as a share of the measured one."""


def measured_peaks(config: Any, folder: Path) -> tuple[dict[str, int], Rollouts]:
    """Most bytes of tensors on the CPU in sampling and update of the second step of a run, and what it has sampled."""
    config.validate()
    seed_everything(0)
    AcceleratorState._reset_state()
    peaks: dict[str, int] = {}
    sampled: list[Rollouts] = []
    try:
        accelerator = make_accelerator(config.trainer.mixed_precision)
        with Allocations() as allocations:
            recipe = RECIPES[config.recipe].load_recipe_class()(config)
            trainer = Trainer(recipe, config, folder, accelerator, None)
            trainer.train_step()  # makes the moments
            for phase, owner, method in (("sampling", recipe, "rollout"), ("update", trainer.updater, "update")):
                before = getattr(owner, method)

                def noted(*args: Any, phase: str = phase, before: Any = before) -> Any:
                    allocations.restart()
                    found = before(*args)
                    peaks[phase] = allocations.peak
                    if phase == "sampling":
                        sampled.append(found)
                    return found

                setattr(owner, method, noted)
            trainer.train_step()
            recipe.close()
    finally:
        AcceleratorState._reset_state()
    return peaks, sampled[0]


def check_plan(plan: Plan, peaks: dict[str, int]) -> None:
    """Compare a plan with the peaks of a run."""
    for phase, measured in peaks.items():
        assert plan.held("always") + plan.held(phase) == pytest.approx(measured, rel=WITHIN), (phase, plan.parts)
