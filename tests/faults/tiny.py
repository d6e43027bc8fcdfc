"""A run of every recipe that takes a second or two: tiny models, five steps, evaluations and checkpoints between."""

import dataclasses
from pathlib import Path
from typing import Any

from mmrl.config import save
from mmrl.recipes import RECIPES
from tests.contracts.domains import domain_of

__all__ = ["STEPS", "write_run"]

ROOT = Path(__file__).parents[2]
STEPS = 5
ISOLATED = ("papo", "sft", "ddpo")
"""Recipes whose rewards run in worker processes, so that kills leave some behind."""


def write_run(recipe: str, folder: Path) -> Path:
    """Write a recipe's configuration, data and model.

    Args:
        recipe: name in `RECIPES`.
        folder: where they go.

    Returns:
        The YAML file.
    """
    config = domain_of(recipe).make_config(recipe, folder / "data")
    config.trainer.steps = STEPS
    config.checkpoint = dataclasses.replace(config.checkpoint, every=2, keep=2)
    room = max((room for room in ROOMS if RECIPES[recipe].target.startswith(f"{room}.")), key=len)
    ROOMS[room](config, folder / "data")
    config.evaluation = dataclasses.replace(config.evaluation, every=2, records=2)
    config.validate()
    path = folder / "run.yaml"
    save(config, path)
    return path


def _vlm(config: Any, folder: Path) -> None:
    from mmrl.rewards import RewardConfig

    config.eval_data = {"held_out": dataclasses.replace(config.data)}
    config.evaluation.max_tasks = 3
    isolate = config.recipe in ISOLATED
    scoring = getattr(config, "scoring", config)
    scoring.rewards = [
        RewardConfig(name=f"{ROOT}/tests/vlm/user_reward.py:letters", isolate=isolate),
        RewardConfig(name="exact", weight=0.5 if scoring is config else 1.0),
    ]


def _gui(config: Any, folder: Path) -> None:
    config.eval_data = {"held_out": dataclasses.replace(config.data)}
    config.grounding.seen = ["held_out"]
    config.evaluation.max_tasks = 3


def _tspo(config: Any, folder: Path) -> None:
    config.eval_data = {"held_out": dataclasses.replace(config.data)}


def _agents(config: Any, folder: Path) -> None:
    from mmrl.agents.environments.agent_tasks import TaskSetConfig

    config.eval_data = {"held_out": TaskSetConfig(seeds=3, first_seed=100)}
    config.evaluation = dataclasses.replace(config.evaluation, videos=1)


def _diffusion(config: Any, folder: Path) -> None:
    from diffusion.data.prompts import PromptConfig
    from mmrl.rewards import RewardConfig
    from tests.diffusion.runs import write_prompts

    config.eval_data = {"held_out": PromptConfig(path=str(write_prompts(folder / "held_out.txt")))}
    config.evaluation = dataclasses.replace(config.evaluation, samples=1)
    scoring = config if hasattr(config, "sampler") else config.evaluation
    scoring.sampler.eval_steps = 2
    if config.recipe in ISOLATED:
        scoring.rewards += [RewardConfig(name=f"{ROOT}/tests/faults/user_rewards.py:brightness")]


def _robotics(config: Any, folder: Path) -> None:
    from robotics.episodes.payload import EpisodeSetConfig

    if config.recipe == "robot_success":
        return  # it is evaluated on recorded images, not on episodes
    config.eval_data = {"held_out": EpisodeSetConfig(tasks=["right", "left"], split="held_out", layouts=2)}
    config.evaluation = dataclasses.replace(config.evaluation, videos=1)


def _flow3d(config: Any, folder: Path) -> None:
    options = {**config.data.options, "count": 4, "seed": 1}
    config.eval_data = {"held_out": dataclasses.replace(config.data, options=options)}


ROOMS = {
    "mmrl.vlm": _vlm,
    "mmrl.masked": _vlm,
    "mmrl.vlm.tspo": _tspo,
    "mmrl.gui": _gui,
    "mmrl.agents": _agents,
    "diffusion": _diffusion,
    "robotics": _robotics,
    "robotics.flow3d": _flow3d,
}
