"""Sets of episodes for training and evaluation: tasks of a simulator at numbered initial states."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from mmrl.errors import UserError
from mmrl.fields import bounded, choice, rare
from robotics.sim.episodes import EpisodeSpec

SPLITS = ("train", "held_out", "all")


@dataclass
class EpisodeSetConfig:
    """A set of initial states."""

    tasks: list[str] = field(default_factory=list)
    """Names of the simulator's tasks; empty = all."""
    layouts: int = bounded(50, at_least=1)
    """Initial states of each task."""
    first: int = rare(bounded(0, at_least=0))
    """Number of the first of them."""
    split: str = choice("train", SPLITS)
    """train or held_out, which share no layout, or all, the stored states of LIBERO in their order."""
    randomized: bool | None = None
    """Whether `sim.randomization` applies to these episodes; none = in training, but not in evaluation."""


def list_episodes(
    config: EpisodeSetConfig, known: Mapping[str, str], splits: Mapping[str, int | None], randomized: bool = True
) -> list[EpisodeSpec]:
    """Layouts x tasks episodes of a set, one of each task in turn, so that the first ones cover all tasks.

    `known` has the simulator's instructions by task, `splits` its numbers of layouts (None for any number);
    `randomized` is whether domain randomisation applies where the set leaves it open. UserError where the simulator
    lacks a task, split or layout.
    """
    unknown = [name for name in config.tasks if name not in known]
    if unknown:
        raise UserError(f"unknown task {', '.join(unknown)}; this simulator has: {', '.join(known)}")
    if config.split not in splits:
        raise UserError(f"there is no split {config.split}; this simulator has: {', '.join(splits)}")
    count = splits[config.split]
    if count is not None and config.first + config.layouts > count:
        raise UserError(
            f"first={config.first} and layouts={config.layouts} exceed the {count} layouts of the split {config.split}"
        )
    names = config.tasks or list(known)
    layouts = range(config.first, config.first + config.layouts)
    found = [EpisodeSpec(name, known[name], layout, config.split) for layout in layouts for name in names]
    applies = randomized if config.randomized is None else config.randomized
    return found if applies else [replace(episode, draw=None) for episode in found]


def episode_id(episode: EpisodeSpec) -> str:
    """Name of an initial state, such as `reach/held_out/7`."""
    return f"{episode.task}/{episode.split}/{episode.layout}"


def task_of_id(name: str) -> str:
    """Task of an initial state's name, `reach` of `reach/held_out/7`."""
    return name.rsplit("/", 2)[0]


def own_draw(episode: EpisodeSpec, member: int) -> EpisodeSpec:
    """The initial state with the domain randomisation's draw of one member of its group."""
    return episode if episode.draw is None else replace(episode, draw=member)
