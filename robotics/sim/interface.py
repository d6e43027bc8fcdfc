"""The meaning of the numbers that a policy and a robot exchange, and results of a rollout.

Two states of the same size fit each other without an error, even if their entries mean different things. So a simulator
reports what it knows, a policy is saved with what it was trained with, a dataset has its own metadata, and whenever two
of them meet they are compared.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from mmrl.errors import UserError
from mmrl.files import read_json_object
from robotics.sim.episodes import views_of

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

    from robotics.sim.episodes import RobotSim


@dataclass(frozen=True)
class Look:
    """One scene after a control step, delayed if its variant has an observation delay."""

    measured: NDArray[np.float64]  # (nsensordata,)
    frame: NDArray[np.uint8] | None  # (H, W, 3) RGB
    views: NDArray[np.uint8] | None  # (V, H, W, 3) RGB of the further cameras


@dataclass(frozen=True)
class SceneObservation:
    """Observation of R scenes; the arrays belong to the caller."""

    scenes: NDArray[np.int64]  # (R,) number of the scene in each row, ascending
    qpos: NDArray[np.float64]  # (R, nq)
    qvel: NDArray[np.float64]  # (R, nv)
    sensordata: NDArray[np.float64]  # (R, nsensordata) of this state
    measured: NDArray[np.float64]  # (R, nsensordata) sensor values with the scene's observation delay
    frames: NDArray[np.uint8] | None  # (R, H, W, 3) RGB, delayed as `measured`; None without images
    views: NDArray[np.uint8] | None = None  # (R, V, H, W, 3) RGB of the further cameras, delayed too
    earlier: list[list[Look]] = field(default_factory=list)
    """R lists with the last control steps of the chunk, at most the past's, oldest first; empty if the episode has
    ended. There are no lists without a past, nor at the beginning of an episode."""

    def of(self, scenes: ArrayLike) -> SceneObservation:
        """Rows of some scenes (ascending numbers) without `earlier`; shares memory if these are all scenes."""
        wanted = np.asarray(scenes, np.int64)
        if np.array_equal(wanted, self.scenes):
            return self
        rows = np.searchsorted(self.scenes, wanted)
        frames, views = (None if part is None else part[rows] for part in (self.frames, self.views))
        numbers = (self.qpos[rows], self.qvel[rows], self.sensordata[rows], self.measured[rows])
        return SceneObservation(wanted, *numbers, frames, views)


@dataclass(frozen=True)
class Chunk:
    """Outcome of a chunk of K actions in each of L scenes; control steps after the end of an episode do not count."""

    scenes: NDArray[np.int64]  # (L,) number of the scene in each row, ascending
    rewards: NDArray[np.float64]  # (L, K); 0 after the end, NaN throughout where the scene failed
    dones: NDArray[np.bool_]  # (L, K); True at the control step that ended the episode
    solved: NDArray[np.bool_]  # (L,) whether the task reported an end, also if episodes go on after it
    steps: NDArray[np.int64]  # (L,) control steps that count; 0 where the scene failed
    truncated: NDArray[np.bool_]  # (L,) whether the horizon was reached without the task's end
    failed: NDArray[np.bool_]  # (L,) whether MuJoCo warned, which is no failure of the policy
    observation: SceneObservation  # at the end of the chunk or of the episode; a row for every scene
    recorded: dict[int, NDArray[np.uint8]] = field(default_factory=dict)  # (steps, H, W, 3) by recorded scene


@dataclass(frozen=True)
class SceneSteps:
    """K control steps of one scene."""

    actions: NDArray[np.float64]  # (K, nu) controls
    qpos: NDArray[np.float64]  # (K, nq) positions after each control step
    qvel: NDArray[np.float64]  # (K, nv) velocities after each control step
    sensordata: NDArray[np.float64]  # (K, nsensordata) sensor values after each control step


FACTS = ("state", "actions", "cameras", "control_hz", "action_bounds")
"""Names of the facts that are compared."""
RATE_TOLERANCE = 1e-3
"""Relative tolerance of equal rates, since some are stored with three decimals."""


@dataclass(frozen=True)
class RobotInterface:
    """Names and order of the entries of a state and an action, cameras, and control rate; None = unknown."""

    state: tuple[str, ...] | None = None
    """Names of the entries of the state, in order."""
    actions: tuple[str, ...] | None = None
    """Names of the entries of an action, in order."""
    cameras: tuple[str, ...] | None = None
    """Names of the cameras, the camera of `images` first, then the additional ones; "" if a camera has no name."""
    control_hz: float | None = None
    """Control steps per second."""

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read the file of a policy's folder; raises UserError if it contains something else."""
        entries = read_json_object(path)
        unknown = sorted(set(entries) - {"state", "actions", "cameras", "control_hz"})
        if unknown:
            raise UserError(
                f"{path} has unknown entries {', '.join(unknown)}; known: state, actions, cameras and control_hz"
            )
        names: dict[str, Any] = {}
        for name in ("state", "actions", "cameras"):
            found = entries.get(name)
            if found is not None and not (isinstance(found, list) and all(isinstance(one, str) for one in found)):
                raise UserError(f"{path}: {name} is {found!r:.80}; expected a list of names, or null")
            names[name] = None if found is None else tuple(found)
        rate = entries.get("control_hz")
        if rate is not None and as_rate(rate) is None:
            raise UserError(f"{path}: control_hz is {rate!r:.80}; expected control steps per second above 0, or null")
        return cls(control_hz=as_rate(rate), **names)

    def as_dict(self) -> dict[str, Any]:
        """Plain entries."""
        return {name: list(part) if isinstance(part, tuple) else part for name, part in asdict(self).items()}

    def differences(self, other: RobotInterface) -> dict[str, str]:
        """Explanations of facts that differ, by name; "{0}" and "{1}" in them are placeholders for the two sides."""
        found = {}
        for name, what in (("state", "the state"), ("actions", "an action")):
            own, theirs = getattr(self, name), getattr(other, name)
            if own and theirs and own != theirs:
                found[name] = _first_difference(own, theirs, what)
        # only the cameras that both have: a policy may see fewer than a simulator draws
        cameras = zip(self.cameras or (), other.cameras or (), strict=False)
        wrong = [(own, theirs) for own, theirs in cameras if own and theirs and own != theirs]
        if wrong:
            found["cameras"] = f"{{0}} has the camera {wrong[0][0]!r} in a position where {{1}} has {wrong[0][1]!r}"
        if self.control_hz and other.control_hz and not same_rate(self.control_hz, other.control_hz):
            found["control_hz"] = (
                f"{{0}} has {self.control_hz:g} control steps per second, {{1}} has {other.control_hz:g}"
            )
        return found

    def unnamed_in(self, other: RobotInterface) -> list[str]:
        """Names of facts known here but not there, which cannot be compared."""
        named = {"state": self.state, "actions": self.actions, "control_hz": self.control_hz}
        return [name for name, part in named.items() if part and not getattr(other, name)]


def interface_of(sim: RobotSim) -> RobotInterface:
    """Facts that a simulator reports; see `RobotSim`."""
    about = sim.describe()
    # the control rate first: a frame rate is only a good guess for it
    rate = getattr(sim, "control_hz", None) or about.get("control_hz") or about.get("render_fps")
    camera = getattr(sim, "camera", None) or about.get("camera") or about.get("image_key") or ""
    state, actions = (getattr(sim, f"{part}_names", None) for part in ("state", "action"))
    return RobotInterface(
        state=_names(state, sim.state_size),
        actions=_names(actions, sim.action_size),
        cameras=(str(camera), *views_of(sim)) if sim.image_size else None,
        control_hz=as_rate(rate),
    )


def read_sizes(policy: Any) -> Any:
    """`image_size` and `state_size` of a policy's observations, as far as it states them; None = it reads none."""
    config = getattr(policy, "config", None)
    # policies with an encoder keep the sizes in it
    return getattr(policy, "observation_sizes", None) or getattr(config, "encoder", config)


def size_hint(size: tuple[int, int]) -> str:
    """How a simulator gets images of (H, W) pixels: `sim.image_size` is the side of a square."""
    if size[0] == size[1]:
        return f"set sim.image_size={size[0]}"
    return (
        "images that are not square need sim.kind gymnasium and a camera of that size, with sim.options.adapter "
        "{size: null}, which keeps it"
    )


def seen_part(interface: RobotInterface, policy: Any) -> RobotInterface:
    """An interface without the parts that a policy does not read and that need not match."""
    sizes = read_sizes(policy)
    unread = {"state": "state_size", "cameras": "image_size"}
    gone = [name for name, size in unread.items() if hasattr(sizes, size) and getattr(sizes, size) is None]
    return replace(interface, **dict.fromkeys(gone))


def as_rate(value: Any) -> float | None:
    """A number above 0 as a rate; None for anything else."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if number and math.isfinite(value) and value > 0 else None


def same_rate(first: float, second: float) -> bool:
    """Whether two rates are equal."""
    return math.isclose(first, second, rel_tol=RATE_TOLERANCE)


def _names(found: Any, size: int) -> tuple[str, ...] | None:
    """The names, if there are as many as entries and none is empty or repeated."""
    if not isinstance(found, Sequence) or isinstance(found, str) or len(found) != size:
        return None
    names = tuple(str(name) for name in found)
    return names if names and all(names) and len(set(names)) == len(names) else None


def _first_difference(own: tuple[str, ...], theirs: tuple[str, ...], what: str) -> str:
    if len(own) != len(theirs):
        return f"{what} of {{0}} has {len(own)} entries, but {len(theirs)} in {{1}}"
    place = next(index for index, (one, other) in enumerate(zip(own, theirs, strict=True)) if one != other)
    order = ", with the same names in a different order" if set(own) == set(theirs) else ""
    return f"entry {place} of {what} is {own[place]!r} in {{0}} and {theirs[place]!r} in {{1}}{order}"
