"""Overrides that shorten a run, for configurations of reinforcement learning and of supervised learning alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

OF_GROUPS = ("trainer.samples_per_task", "trainer.skip_steps_without_gradient")
"""Options of reinforcement learning, which supervised learning has no need of."""


def fitting(config: Any, overrides: Sequence[str]) -> list[str]:
    """Overrides moved to the sections of a supervised configuration, without those for sampled groups."""
    found = []
    for override in overrides:
        key = override.partition("=")[0]
        section, _, name = key.partition(".")
        if key in OF_GROUPS and not hasattr(config.trainer, name):
            continue
        moved = section in ("sampler", "rewards", "heldout_rewards") and not hasattr(config, section)
        found.append(f"evaluation.{override}" if moved else override)
    return found


def group_size(config: Any, most: int) -> str:
    """Override of the group size, at most so large."""
    return f"trainer.samples_per_task={min(getattr(config.trainer, 'samples_per_task', most), most)}"
