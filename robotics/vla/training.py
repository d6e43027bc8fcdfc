"""Training from Python, optionally with your own policy and simulator."""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmrl.recipes import RecipeEntry, find_recipe
from mmrl.training.runs import train
from robotics.sim.episodes import RobotSim
from robotics.vla.policy import ActionPolicy

if TYPE_CHECKING:
    from robotics.vla.recipe import RobotConfig


def train_robot(
    config: RobotConfig, policy: ActionPolicy | None = None, sim: RobotSim | None = None, *, resume: bool = False
) -> Path:
    """Train a robot policy.

    Args:
        config: the run; `config.recipe` names the method.
        policy: trained instead of `config.model`; wrap a module of your own in a `ModuleAdapter`.
        sim: used instead of `config.sim`, and closed at the end.
        resume: continue the run in `config.output_dir`.

    Returns:
        The run folder.

    Raises:
        UserError: the configuration is wrong, or policy and simulator do not fit together.
        RunError: the run failed; its results so far are kept.
    """
    config.validate()
    entry = find_recipe(config.recipe)
    given = {name: value for name, value in (("policy", policy), ("sim", sim)) if value is not None}
    return train(_Given(entry, given), config, resume=resume)


@dataclasses.dataclass(frozen=True)
class _Given:
    """A recipe entry whose recipe is built with the given policy and simulator."""

    entry: RecipeEntry
    objects: dict[str, Any]

    def load_recipe_class(self) -> Any:
        recipe: Any = self.entry.load_recipe_class()
        return partial(recipe, **self.objects)
