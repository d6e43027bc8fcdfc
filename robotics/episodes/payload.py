"""Sets of episodes, and the payload of robot rollouts: initial states per group, and one episode per row.

Shapes: N groups (initial states), B rows (episodes), C chunks of the longest episode, S state entries, D decisions of a
chunk (tokens, control steps or denoising steps), V further cameras, H x W pixels. Chunks beyond the end of an episode
are zero. The past observations that some policies use (`ActionPolicy.past`) are not stored.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mmrl.core.payload import Payload, per_decision, per_group, per_row, to_host
from mmrl.core.rollouts import Rollouts
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
    """Number of initial states per task."""
    first: int = rare(bounded(0, at_least=0))
    """Number of the first initial state."""
    split: str = choice("train", SPLITS)
    """train or held_out, which share no layout, or all: LIBERO's stored states in their order."""
    randomized: bool | None = None
    """Whether `sim.randomization` applies to these episodes; null = in training but not in evaluation."""


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
        raise UserError(f"unknown split {config.split}; this simulator has: {', '.join(splits)}")
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


@dataclass
class EpisodePayload(Payload):
    """Initial states of N groups, observations and actions of B episodes."""

    episodes: list[EpisodeSpec] = per_group()
    """The initial state and instruction of each group."""
    states: Tensor = per_decision()
    """(B, C, S) float32, observed before each chunk."""
    decisions: Tensor = per_decision()
    """(B, C, ...), the policy's decisions, in its own format."""
    steps: Tensor = per_decision()
    """(B, C) int64, number of executed control steps per chunk."""
    success: Tensor = per_row()
    """(B,) bool, whether the task was solved."""
    terminated: Tensor = per_row()
    """(B,) bool, whether the task itself ended the episode, with or without success."""
    failed: Tensor = per_row()
    """(B,) bool, whether the environment failed; such a row has no result."""
    last_reward: Tensor = per_row()
    """(B,) float32, the environment's own reward at the last control step."""
    last_state: Tensor = per_row()
    """(B, S) float32, at the end of the episode."""
    true_success: Tensor | None = per_row(default=None)
    """(B,) bool, the environment's own success, if `success` is the verdict of a classifier; None otherwise."""
    truncated: Tensor | None = per_row(default=None)
    """(B,) bool, whether a time limit ended the episode: the horizon, or a limit of the environment."""
    images: Tensor | None = per_decision(default=None)
    """(B, C, H, W, 3) uint8, observed before each chunk."""
    views: Tensor | None = per_decision(default=None)
    """(B, C, V, H, W, 3) uint8, observed before each chunk by the additional cameras."""
    last_image: Tensor | None = per_row(default=None)
    """(B, H, W, 3) uint8, at the end of the episode."""
    last_views: Tensor | None = per_row(default=None)
    """(B, V, H, W, 3) uint8, at the end of the episode by the additional cameras."""
    frames: list[NDArray[np.uint8] | None] = per_row(blank=None, default_factory=list)
    """Frames (F, H, W, 3) of every control step of each row; None or empty if only chunk ends were rendered."""
    object_poses: list[NDArray[np.float64] | None] = per_row(blank=None, default_factory=list)
    """(F, 4, 4) T_world_object of the object of the task, before each chunk and at the end; None or empty if the
    simulator does not report it."""
    full_states: Tensor | None = per_decision(default=None)
    """(B, C, F) float32, full state of the simulator before each chunk, for a critic; None if it is not reported."""
    last_full_state: Tensor | None = per_row(default=None)
    """(B, F) float32, full state at the end of the episode; None if the simulator reports none."""
    chunk_returns: Tensor | None = per_decision(default=None)
    """(B, C) float32, sum of the environment's own rewards over the control steps of each chunk."""
    chunk_last_rewards: Tensor | None = per_decision(default=None)
    """(B, C) float32, the environment's own reward at the last control step of each chunk."""
    seconds: Tensor | None = per_decision(default=None)
    """(B, C) float32, duration of each chunk, during which policy and simulator process all episodes; None if not
    requested."""
    reasons: list[str] = per_row(blank="", default_factory=list)
    """Why each row ended, if the environment reports it."""
    drawn: list[Mapping[str, Any] | None] = per_row(blank=None, default_factory=list)
    """Draw of the simulator's domain randomisation for each row; None or empty without one."""

    @property
    def lengths(self) -> Tensor:
        """(B,) int64, control steps of each episode."""
        return self.steps.sum(1)

    @property
    def returns(self) -> Tensor:
        """(B,) float32, sum of the environment's own rewards over all control steps; NaN for failed rows."""
        assert self.chunk_returns is not None
        # NaN and not 0: a failed environment earned nothing that is known
        return torch.where(self.failed, torch.nan, self.chunk_returns.sum(1))

    def frames_of(self, row: int) -> NDArray[np.uint8] | None:
        """Frames (F, H, W, 3) of an episode: all control steps if rendered, else chunk ends; None without images."""
        if self.frames and self.frames[row] is not None:
            return self.frames[row]
        if self.images is None or self.last_image is None:
            return None
        # rows are padded to the longest episode; a chunk that was reached has executed steps
        taken = int((self.steps[row] > 0).sum())
        return torch.cat([self.images[row, :taken], self.last_image[row][None]]).cpu().numpy()

    def unequal_starts(self, group: Tensor) -> tuple[int, str] | None:
        """The first row that starts differently from the first row of its group (B,), and what differs; else None."""
        numbers = group.tolist()
        firsts = [numbers.index(number) for number in numbers]
        named = [("the state", self.states), ("the image", self.images)]
        seen = {name: part[:, 0] for name, part in named if part is not None}
        failed, *parts = to_host([self.failed, *seen.values()])
        # a failed row has no start to compare, and neither has a group whose first row failed
        sound = ~(failed | failed[firsts])
        for name, part in zip(seen, parts, strict=True):
            apart = (part != part[firsts]).flatten(1).any(1) & sound
            if bool(apart.any()):
                return int(apart.int().argmax()), name
        return None

    def path(self, row: int) -> NDArray[np.float32]:
        """States (F, S) of an episode before each chunk and at the end."""
        taken = int((self.steps[row] > 0).sum())
        return torch.cat([self.states[row, :taken], self.last_state[row][None]]).cpu().numpy()

    def object_path(self, row: int) -> NDArray[np.float32] | None:
        """Positions (F, 3) of the object in metres, before each chunk and at the end; None if unknown."""
        poses = self.object_poses[row] if self.object_poses else None
        return None if poses is None else poses[:, :3, 3].astype(np.float32)


def about_episode(rollouts: Rollouts, row: int) -> dict[str, Any]:
    """An episode with its last image, as fields of `SampleRecord`."""
    from PIL import Image

    payload = EpisodePayload.of(rollouts)
    episode = payload.episodes[int(rollouts.group[row])]
    last = [] if payload.last_image is None else [Image.fromarray(payload.last_image[row].cpu().numpy())]
    return {
        "id": episode_id(episode),
        "prompt": episode.instruction,
        "response": f"{int(payload.lengths[row])} control steps",
        "outputs": last,
        "finish": _ending(payload, row),
        "correct": bool(payload.success[row]),
    }


def _ending(payload: EpisodePayload, row: int) -> str:
    if bool(payload.failed[row]):
        return "failed"
    if bool(payload.success[row]):
        return "success"
    return payload.reasons[row] or ("terminated" if bool(payload.terminated[row]) else "horizon")
