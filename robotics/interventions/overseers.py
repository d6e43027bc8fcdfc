"""Who watches the policy: a person with a device, or a script with the task's expert.

At every control step an overseer sees what the policy wants to do and decides whether its own action is executed.

The scripted rules: `distance` takes over when the policy's actions have been far from the expert's, `random` for a
given fraction of the time. A verdict is kept for `duration` control steps and is wrong with the probability `flip`.

Source of the rules: RLIF, arXiv 2311.12996, section 5; pd-perry/RLIF examples/train_rlif_main.py.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from mmrl.errors import UserError
from mmrl.fields import bounded, choice, only_with, rare
from robotics.interventions.devices import (
    AXES,
    DEVICES,
    FAILURE,
    GRIPPER,
    QUIT,
    REDO,
    SUCCESS,
    TAKE_OVER,
    Device,
    DeviceInput,
    open_device,
)
from robotics.sim.interface import interface_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from robotics.sim.episodes import EpisodeSpec, RobotSim

RULES = ("distance", "random")
PEOPLE = tuple(DEVICES)
KINDS = (*RULES, *PEOPLE)
NAMES = {
    **{name: name for name in AXES},
    **{f"d{name}": name for name in AXES},
    **{f"delta_{name}": name for name in AXES},
    **{"drx": "roll", "dry": "pitch", "drz": "yaw", "droll": "roll", "dpitch": "pitch", "dyaw": "yaw"},
    GRIPPER: GRIPPER,
}
"""Names of action entries whose axis is known."""


@dataclass
class OverseerConfig:
    """Who watches the policy and takes over."""

    kind: str = choice("distance", KINDS)
    """distance: a script that takes over when the policy's actions differ from those of the task's expert; random: a
    script that takes over at random; keyboard, gamepad or spacemouse: a person, who needs `interventions.live`."""
    threshold: float = only_with(bounded(0.5, above=0), kind="distance")
    """Root mean square difference of an action's entries, on the scale -1..1, beyond which the script takes over. It is
    averaged over the last `duration` control steps."""
    rate: float = only_with(bounded(0.3, at_least=0, at_most=1), kind="random")
    """Probability with which the script acts for the next `duration` control steps."""
    quality: float = only_with(bounded(1.0, at_least=0, at_most=1), kind=RULES)
    """Fraction of its interventions in which the script acts as the expert. In the others it moves in a random
    direction."""
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
    """(L, A) its own actions in -1..1; read where it acts."""
    acts: NDArray[np.bool_]
    """(L,) whether it acts instead of the policy."""
    presses: tuple[str, ...] = ()
    """Presses that concern the episode: success, failure, redo or quit."""
    given: DeviceInput | None = None
    """What a person's device gave, for the journal of the recording."""


class Overseer(Protocol):
    """Watches episodes and takes over; it has no random numbers but those of the seeds."""

    def begin(self, sim: RobotSim, episodes: Sequence[EpisodeSpec], seeds: Sequence[int]) -> None:
        """Begin R episodes, each with its own seed; the policy is in control."""
        ...

    def watch(self, proposed: NDArray[np.float32]) -> Verdict:
        """Decide about the policy's actions (L, A) in the live rows."""
        ...

    def show(self, image: NDArray[np.uint8] | None, text: str) -> None:
        """Show the first row to a person."""
        ...

    def close(self) -> None:
        """Release devices."""
        ...


class ScriptedOverseer:
    """Takes over by a rule and acts as the task's expert."""

    def __init__(self, config: OverseerConfig) -> None:
        if config.kind not in RULES:
            raise UserError(f"overseer.kind is {config.kind}; a scripted overseer is one of {', '.join(RULES)}")
        self.config = config

    def begin(self, sim: RobotSim, episodes: Sequence[EpisodeSpec], seeds: Sequence[int]) -> None:
        """Begin R episodes; raises UserError if the simulator has no experts."""
        self._sim, self._episodes = sim, episodes
        self._experts = _experts(sim, episodes)
        self._rows = [_Watching(np.random.default_rng(seed)) for seed in seeds]

    def watch(self, proposed: NDArray[np.float32]) -> Verdict:
        """Decide by the rule."""
        live = self._sim.live.tolist()
        actions = self._expert_actions(live)
        acts = np.zeros(len(live), bool)
        for place, row in enumerate(live):
            watching = self._rows[row]
            watching.see(float(np.sqrt(np.mean((proposed[place] - actions[place]) ** 2))), self.config)
            acts[place] = watching.acts
            if watching.acts and not watching.is_expert:
                actions[place] = watching.direction(actions.shape[1])
        return Verdict(actions, acts)

    def show(self, image: NDArray[np.uint8] | None, text: str) -> None:
        """A script needs no picture."""

    def close(self) -> None:
        """Nothing to release."""

    def _expert_actions(self, live: Sequence[int]) -> NDArray[np.float32]:
        known: Any = self._sim
        if not self._experts:
            return np.asarray(known.expert_actions(), np.float32)
        states = known.full_state()
        chosen = [self._experts[self._episodes[row].task].act(states[place]) for place, row in enumerate(live)]
        return np.stack(chosen)


@dataclass
class _Watching:
    """One row of a scripted overseer."""

    rng: np.random.Generator
    acts: bool = False
    is_expert: bool = True
    left: int = 0
    """Control steps until the next verdict."""
    errors: list[float] = field(default_factory=list)
    """Since the last verdict."""
    _way: NDArray[np.float32] | None = None

    def see(self, error: float, config: OverseerConfig) -> None:
        """Note the policy's distance from the expert, and decide if a decision is due."""
        self.errors.append(error)
        if self.left:
            self.left -= 1
            return
        if config.kind == "distance" and len(self.errors) < config.duration:
            return  # of the first steps of an episode too little is known
        if config.kind == "random":
            wants = bool(self.rng.random() < config.rate)
        else:
            # a mean, because a single step that differs, as at a turn, is no reason
            wants = float(np.mean(self.errors)) > config.threshold
        wants ^= bool(self.rng.random() < config.flip)
        self.errors = []
        self.left = config.duration - 1
        if wants and not self.acts:
            self.is_expert = bool(self.rng.random() < config.quality)
            self._way = None
        self.acts = wants

    def direction(self, size: int) -> NDArray[np.float32]:
        """(A,) the random direction of this intervention, each entry in -1..1."""
        if self._way is None:
            self._way = self.rng.uniform(-1.0, 1.0, size).astype(np.float32)
        return self._way


def _experts(sim: RobotSim, episodes: Sequence[EpisodeSpec]) -> dict[str, Any]:
    """The tabletop's experts by task; empty if the simulator has its own."""
    if hasattr(sim, "expert_actions"):
        return {}
    if not hasattr(sim, "full_state"):
        raise UserError(
            f"{type(sim).__name__} has no scripted expert; with sim.kind gymnasium set sim.options.adapter.expert, or "
            f"let a person watch: interventions.overseer.kind={', '.join(PEOPLE)}"
        )
    from robotics.scenes.experts import Expert

    return {task: Expert(task) for task in dict.fromkeys(episode.task for episode in episodes)}


class Person:
    """A person with a device, who watches one episode at a time.

    A press of take_over gives the person control, the next one hands it back. Every episode begins with the policy in
    control. While the person has control, the axes of the device are the action; the gripper keeps its last command
    until it is pressed.

    Args:
        device: polled once per control step.
        config: the axes of the action's entries, and the speed.
    """

    def __init__(self, device: Device, config: OverseerConfig | None = None) -> None:
        self.device = device
        self.config = config or OverseerConfig(kind="keyboard")
        self.recalled: deque[DeviceInput] = deque()
        """Inputs of an interrupted episode, which are taken before those of the device."""
        self._entries: list[tuple[str, float]] = []

    def begin(self, sim: RobotSim, episodes: Sequence[EpisodeSpec], seeds: Sequence[int]) -> None:
        """Begin an episode; raises UserError for several, or if the axes of the actions are unknown."""
        if len(episodes) != 1:
            raise UserError(f"a person watches one episode at a time, not {len(episodes)}")
        self._entries = axes_of(sim, self.config.axes)
        self._acts = False
        self._grip: float | None = None
        # what was pressed between two episodes concerns neither
        if not self.recalled:
            self.device.poll()

    def watch(self, proposed: NDArray[np.float32]) -> Verdict:
        """Poll the device."""
        given = self.recalled.popleft() if self.recalled else self.device.poll()
        ending: list[str] = []
        grips = [entry for entry, (axis, _) in enumerate(self._entries) if axis == GRIPPER]
        # taking over must not drop what the robot holds, so the last command stays in force
        grip = self._grip if self._grip is not None or not grips else _sign(proposed[0, grips[0]])
        for press in given.presses:
            if press == TAKE_OVER:
                self._acts = not self._acts
            elif press == GRIPPER and self._acts and grip is not None:
                grip = -grip
            elif press in (SUCCESS, FAILURE, REDO, QUIT):
                ending.append(press)
        action = np.zeros(proposed.shape[1], np.float32)
        for entry, (axis, side) in enumerate(self._entries):
            if axis == GRIPPER:
                action[entry] = grip or 0.0
            elif axis:
                action[entry] = np.clip(side * self.config.speed * given.axes.get(axis, 0.0), -1.0, 1.0)
        executed = action if self._acts else proposed[0]
        self._grip = _sign(executed[grips[0]]) if grips else None
        return Verdict(action[None], np.array([self._acts]), tuple(ending), given)

    def show(self, image: NDArray[np.uint8] | None, text: str) -> None:
        """Show the scene on the device."""
        self.device.show(image, text)

    def close(self) -> None:
        """Release the device."""
        self.device.close()


def axes_of(sim: RobotSim, given: Sequence[str] = ()) -> list[tuple[str, float]]:
    """Axis and sign of each entry of an action; an empty axis means that the person leaves the entry at 0.

    Args:
        sim: the simulator, which may name its actions.
        given: `overseer.axes`; empty = by these names.

    Raises:
        UserError: the names are missing or unknown, or there are not as many as entries.
    """
    known, allowed = interface_of(sim).actions, ", ".join((*AXES, GRIPPER, "none"))
    where = "interventions.overseer.axes"
    if given:
        if len(given) != sim.action_size:
            raise UserError(f"{where} lists {len(given)} axes, but an action has {sim.action_size} entries")
        entries = [(name.removeprefix("-"), -1.0 if name.startswith("-") else 1.0) for name in given]
        wrong = [name for name, _ in entries if name not in (*AXES, GRIPPER, "none")]
        if wrong:
            raise UserError(f"{where} has {wrong[0]!r}; allowed: {allowed}")
        return [("" if name == "none" else name, side) for name, side in entries]
    unknown = [name for name in known or () if name not in NAMES]
    if known is None or unknown:
        said = f"names its actions {', '.join(known)}" if known else f"does not name the {sim.action_size} entries"
        raise UserError(
            f"the simulator {said}{'' if known else ' of its actions'}, so the axes of a device are not known; set "
            f"{where} to one of {allowed} for each entry"
        )
    return [(NAMES[name], 1.0) for name in known]


def _sign(value: float) -> float:
    return 1.0 if value > 0 else -1.0


def open_overseer(config: OverseerConfig) -> Overseer:
    """Open the overseer, with its device if it is a person; raises UserError."""
    return ScriptedOverseer(config) if config.kind in RULES else Person(open_device(config.kind), config)
