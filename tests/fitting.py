"""Configurations that tests run: the first file of each recipe, overrides that shorten its run, and experiments."""

import functools
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from mmrl.comparison.experiment import ExperimentConfig
from mmrl.comparison.reproduce import EXPERIMENTS, measured

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


def first_of_each_recipe(paths: Sequence[Path]) -> list[Any]:
    """Parameters of a test that runs each file; those whose recipe an earlier file runs are for the slow tests."""
    seen: set[str] = set()
    found = []
    for path in paths:
        recipe = recipe_of(path)
        found.append(pytest.param(path, id=path.stem, marks=pytest.mark.slow if recipe in seen else ()))
        seen.add(recipe)
    return found


def recipe_of(path: Path) -> str:
    """Name of the recipe of a file, or of the file that it extends."""
    values = yaml.safe_load(path.read_text(encoding="utf-8"))
    return str(values["recipe"]) if "recipe" in values else recipe_of(path.parent / values["extends"])


def experiments_with(part: str) -> list[str]:
    """Names of the experiments whose files have a dotted key: reading them all takes seconds at each collection."""
    first, _, second = part.partition(".")
    key = re.compile(rf"^{first}:" + (rf"\n(?:  .*\n)*?  {second}:" if second else ""), re.MULTILINE)
    return [path.stem for path in sorted(EXPERIMENTS.glob("*.yaml")) if key.search(path.read_text(encoding="utf-8"))]


@functools.cache
def measured_experiments() -> dict[str, ExperimentConfig]:
    """`measured`, once for all tests, which change nothing in it."""
    return measured()
