"""Overrides that shorten a run, for configurations of reinforcement learning and of supervised learning alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def fitting(config: Any, overrides: Sequence[str]) -> list[str]:
    """Overrides with the places that a supervised configuration has for them, without the group size."""
    found = []
    for override in overrides:
        key = override.partition("=")[0]
        section = key.partition(".")[0]
        if key == "trainer.samples_per_task" and not hasattr(config.trainer, "samples_per_task"):
            continue
        moved = section in ("sampler", "rewards", "heldout_rewards") and not hasattr(config, section)
        found.append(f"evaluation.{override}" if moved else override)
    return found


def group_size(config: Any, most: int) -> str:
    """Override of the group size, at most so large."""
    return f"trainer.samples_per_task={min(getattr(config.trainer, 'samples_per_task', most), most)}"
