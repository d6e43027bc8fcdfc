"""The meaning of the numbers that a policy and a robot exchange: names and order of entries, cameras, control rate.

Two states of the same size fit each other without an error, even if their entries mean different things. So a simulator
reports what it knows, a policy is saved with what it was trained with, a dataset has its own metadata, and whenever two
of them meet they are compared.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from mmrl.errors import UserError
from mmrl.files import read_json_object
from robotics.sim.episodes import views_of

if TYPE_CHECKING:
    from robotics.sim.episodes import RobotSim

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
    """Names of the cameras, that of `images` first, then the additional ones; "" if a camera has no name."""
    control_hz: float | None = None
    """Control steps per second."""

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read the file of a policy's folder; raises UserError if it holds something else."""
        entries = read_json_object(path)
        unknown = sorted(set(entries) - {"state", "actions", "cameras", "control_hz"})
        if unknown:
            raise UserError(f"{path} has {', '.join(unknown)}; known are state, actions, cameras and control_hz")
        names: dict[str, Any] = {}
        for name in ("state", "actions", "cameras"):
            found = entries.get(name)
            if found is not None and not (isinstance(found, list) and all(isinstance(one, str) for one in found)):
                raise UserError(f"{path}: {name} is {found!r:.80}; expected a list of names, or null")
            names[name] = None if found is None else tuple(found)
        rate = entries.get("control_hz")
        if rate is not None and as_rate(rate) is None:
            raise UserError(f"{path}: control_hz is {rate!r:.80}; expected control steps a second above 0, or null")
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
            found["cameras"] = f"where {{0}} has the camera {wrong[0][0]!r}, {{1}} has {wrong[0][1]!r}"
        if self.control_hz and other.control_hz and not same_rate(self.control_hz, other.control_hz):
            found["control_hz"] = f"{{0}} has {self.control_hz:g} control steps a second, {{1}} {other.control_hz:g}"
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


def seen_part(interface: RobotInterface, policy: Any) -> RobotInterface:
    """An interface without the parts that a policy does not read and that need not match."""
    config = getattr(policy, "config", None)
    sizes = getattr(config, "encoder", config)
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
        return f"{what} of {{0}} has {len(own)} entries, that of {{1}} {len(theirs)}"
    place = next(index for index, (one, other) in enumerate(zip(own, theirs, strict=True)) if one != other)
    order = ", the same names in another order" if set(own) == set(theirs) else ""
    return f"entry {place} of {what} is {own[place]!r} in {{0}} and {theirs[place]!r} in {{1}}{order}"
