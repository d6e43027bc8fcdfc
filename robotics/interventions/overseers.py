"""Who watches the policy: a person with a device, or a script with the task's expert.

At every control step an overseer sees what the policy wants to do and decides whether its own action is executed.

The scripted rules: `distance` takes over when actions were far from the expert's, `random` for a fraction of the time.
A verdict is kept for `duration` control steps and is wrong with the probability `flip`. With `environment`, a person or
script inside the environment replaces actions itself.

Source of the rules: RLIF, arXiv 2311.12996, section 5; pd-perry/RLIF examples/train_rlif_main.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from mmrl.errors import UserError
from mmrl.fields import bounded, choice, only_with, rare
from robotics.interventions.devices import AXES, DEVICES, GRIPPER, TAKE_OVER, Device
from robotics.policies.policy_loading import bounds_of
from robotics.scenes.expert_check import experts_of
from robotics.sim.interface import interface_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from robotics.sim.episodes import EpisodeSpec, RobotSim

RULES, INSIDE = ("distance", "random"), "environment"
PEOPLE = tuple(DEVICES)
KINDS = (*RULES, INSIDE, *PEOPLE)
NAMES = {prefix + name: name for name in AXES for prefix in ("", "d", "delta_")}
NAMES |= {"drx": "roll", "dry": "pitch", "drz": "yaw", GRIPPER: GRIPPER}
"""Names of action entries whose axis is known."""


@dataclass
class OverseerConfig:
    """Who watches the policy and takes over."""

    kind: str = choice("distance", KINDS)
    """distance: a script that takes over when the policy's actions differ from those of the task's expert; random: a
    script that takes over at random; environment: wrappers of the environment, as SERL's and gym-hil's, which replace
    actions and say so in `info`; keyboard, gamepad or spacemouse: a person, who needs `interventions.live`."""
    threshold: float = only_with(bounded(0.5, above=0), kind="distance")
    """Root mean square difference of actions in -1..1, averaged over `duration` steps, beyond which it takes over."""
    rate: float = only_with(bounded(0.3, at_least=0, at_most=1), kind="random")
    """Probability with which the script acts for the next `duration` control steps."""
    quality: float = only_with(bounded(1.0, at_least=0, at_most=1), kind=RULES)
    """Fraction of its interventions in which the script acts as the expert; in the others it moves at random."""
    flip: float = rare(only_with(bounded(0.05, at_least=0, at_most=1), kind=RULES))
    """Probability that the script decides the opposite of its rule."""
    duration: int = rare(only_with(bounded(4, at_least=1), kind=RULES))
    """Control steps until the script decides again."""
    axes: list[str] = rare(only_with(field(default_factory=list), kind=PEOPLE))
    """Axis of the device for each entry of an action: x, y, z, roll, pitch, yaw, gripper, or none. A minus sign before
    a name reverses it. Default: by the names of the simulator's actions."""
    speed: float = only_with(bounded(1.0, above=0, at_most=1), kind=PEOPLE)
    """Action at the end of an axis, on the scale 0..1."""


@dataclass(frozen=True)
class Verdict:
    """An overseer's decision about L live rows at one control step."""

    actions: NDArray[np.float32]
    """(L, A) its own actions in -1..1, read where it acts; in a journal, the executed actions."""
    acts: NDArray[np.bool_]
    """(L,) whether it acts instead of the policy."""
    presses: tuple[str, ...] = ()
    """Presses that concern the episode: success, failure, redo or quit."""


class Overseer(Protocol):
    """Watches episodes and takes over; it has no random numbers but those of the seeds."""

    def begin(self, sim: RobotSim, episodes: Sequence[EpisodeSpec], seeds: Sequence[int]) -> None:
        """Begin R episodes, each with its own seed; the policy is in control."""
        ...

    def watch(self, proposed: NDArray[np.float32], recalled: Verdict | None = None) -> Verdict:
        """Decide about the policy's actions (L, A) in the live rows; `recalled` is a decision that has been made."""
        ...


class ScriptedOverseer:
    """Takes over by a rule and acts as the task's expert."""

    def __init__(self, config: OverseerConfig) -> None:
        if config.kind not in RULES:
            raise UserError(f"overseer.kind is {config.kind}; a scripted overseer is one of {', '.join(RULES)}")
        self.config = config

    def begin(self, sim: RobotSim, episodes: Sequence[EpisodeSpec], seeds: Sequence[int]) -> None:
        """Begin R episodes; raises UserError if the simulator has no experts."""
        self._sim = sim
        self._expert = experts_of(sim, episodes)
        self._rows = [_Watching(self.config, np.random.default_rng(seed)) for seed in seeds]

    def watch(self, proposed: NDArray[np.float32], recalled: Verdict | None = None) -> Verdict:
        """Decide by the rule; a decision that has been made does not change what the script decides later."""
        actions = np.array(self._expert(), np.float32)
        rows = [self._rows[row] for row in self._sim.live]
        for place, row in enumerate(rows):
            row.see(proposed[place] - actions[place])
            if row.acts and row.direction is not None:
                actions[place] = row.direction
        return Verdict(actions, np.array([row.acts for row in rows]))


@dataclass
class _Watching:
    """One row of a scripted overseer."""

    config: OverseerConfig
    rng: np.random.Generator
    acts: bool = False
    direction: NDArray[np.float32] | None = None
    """(A,) in which a bad intervention moves; None in a good one, which does as the expert."""

    def __post_init__(self) -> None:
        # since the last verdict; of the first steps of an episode, the rule of the distance knows too little
        self.errors = [0.0] * (self.config.duration - 1) if self.config.kind == "random" else []

    def see(self, difference: NDArray[np.float32]) -> None:
        """Note how far the policy's action is from the expert's (A,), and decide if a decision is due."""
        config, rng = self.config, self.rng
        self.errors.append(float(np.sqrt(np.mean(difference**2))))
        if len(self.errors) < config.duration:
            return
        # a mean, because a single step that differs, as at a turn, is no reason
        far = float(np.mean(self.errors)) > config.threshold
        wants = bool(rng.random() < config.rate) if config.kind == "random" else far
        wants ^= bool(rng.random() < config.flip)
        self.errors = []
        if wants and not self.acts:
            good = rng.random() < config.quality
            self.direction = None if good else rng.uniform(-1.0, 1.0, len(difference)).astype(np.float32)
        self.acts = wants


class InsideOverseer:
    """Acts inside the environment, which reports after a control step what it executed instead."""

    def begin(self, sim: RobotSim, episodes: Sequence[EpisodeSpec], seeds: Sequence[int]) -> None:
        """Begin R episodes; raises UserError if the simulator cannot report executed actions."""
        if not hasattr(sim, "allow_people"):
            raise UserError(f"overseer.kind is {INSIDE}, which needs sim.kind=gymnasium")
        sim.allow_people()

    def watch(self, proposed: NDArray[np.float32], recalled: Verdict | None = None) -> Verdict:
        """Leave the policy's actions to the environment."""
        return Verdict(proposed, np.zeros(len(proposed), bool))


class Person:
    """A person with a device, who watches one episode at a time.

    A press of take_over gives the person control, the next one hands it back. Every episode begins with the policy in
    control. While the person has control, the axes of the device are the action, and an axis at rest is 0 in the
    environment's units; the gripper keeps its last command until it is pressed.

    Args:
        device: polled once per control step.
        config: the axes of the action's entries, and the speed.
    """

    def __init__(self, device: Device, config: OverseerConfig | None = None) -> None:
        self.device = device
        self.config = config or OverseerConfig(kind="keyboard")

    def begin(self, sim: RobotSim, episodes: Sequence[EpisodeSpec], seeds: Sequence[int]) -> None:
        """Begin an episode; raises UserError for several, or if the axes of the actions are unknown."""
        if len(episodes) != 1:
            raise UserError(f"a person watches one episode at a time, not {len(episodes)}")
        self._entries = axes_of(sim, self.config.axes)
        self._rest, bounds = np.zeros(sim.action_size, np.float32), bounds_of(sim)
        if bounds is not None:
            rest = bounds.to_sim(torch.zeros(sim.action_size)).numpy()
            self._rest = np.where(np.abs(rest) <= 1, rest, self._rest)
        self._acts = False
        self._last: NDArray[np.float32] | None = None
        # what was pressed before an episode does not concern it
        self.device.poll()

    def watch(self, proposed: NDArray[np.float32], recalled: Verdict | None = None) -> Verdict:
        """Take what the person did since the last control step, or what was recalled of it."""
        verdict = self._polled(proposed[0]) if recalled is None else recalled
        self._acts = bool(verdict.acts[0])
        self._last = verdict.actions[0] if self._acts or recalled is not None else proposed[0]
        return verdict

    def _polled(self, proposed: NDArray[np.float32]) -> Verdict:
        given, acts = self.device.poll(), self._acts
        # taking over must not drop what the robot holds, so the last command stays in force
        grip = proposed if self._last is None else self._last
        for press in given.presses:
            if press == TAKE_OVER:
                acts = not acts
            elif press == GRIPPER and acts:
                grip = np.where(grip > 0, -1.0, 1.0)
        moved = [side * self.config.speed * given.axes.get(axis, 0.0) for axis, side in self._entries]
        action = np.where([axis == GRIPPER for axis, _ in self._entries], grip, np.clip(self._rest + moved, -1.0, 1.0))
        ending = tuple(press for press in given.presses if press not in (TAKE_OVER, GRIPPER))
        return Verdict(action.astype(np.float32)[None], np.array([acts]), ending)


def axes_of(sim: RobotSim, given: Sequence[str] = ()) -> list[tuple[str, float]]:
    """Axis and sign of each entry of an action; the person leaves entries with the axis none at rest.

    Args:
        sim: the simulator, which may name its actions.
        given: `overseer.axes`; empty = by these names.

    Raises:
        UserError: the names are missing or unknown, or there are not as many as entries.
    """
    known, allowed = interface_of(sim).actions, (*AXES, GRIPPER, "none")
    where = "interventions.overseer.axes"
    if given and len(given) != sim.action_size:
        raise UserError(f"{where} lists {len(given)} axes, but an action has {sim.action_size} entries")
    axes = list(given or [NAMES.get(name, "") for name in known or ()])
    if not axes or "" in axes:
        said = f"names its actions {', '.join(known)}" if known else f"does not name the {sim.action_size} entries"
        raise UserError(
            f"the simulator {said}{'' if known else ' of its actions'}, so the axes of a device are not known; set "
            f"{where} to one of {', '.join(allowed)} for each entry"
        )
    entries = [(name.removeprefix("-"), -1.0 if name.startswith("-") else 1.0) for name in axes]
    wrong = [name for name, _ in entries if name not in allowed]
    if wrong:
        raise UserError(f"{where} has {wrong[0]!r}; allowed: {', '.join(allowed)}")
    return entries


def open_overseer(config: OverseerConfig) -> Overseer:
    """Open the overseer, with its device if it is a person; raises UserError."""
    if config.kind == INSIDE:
        return InsideOverseer()
    return Person(DEVICES[config.kind](), config) if config.kind in PEOPLE else ScriptedOverseer(config)
