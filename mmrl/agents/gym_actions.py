"""Actions that an agent wrote as members of a Gymnasium action space."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from mmrl.agents.actions import Action
from mmrl.errors import UserError


class NotExecutableError(ValueError):
    """An action that the environment does not have; the message is for the agent."""


class ActionReader(Protocol):
    """Turns actions into members of a space."""

    @property
    def actions(self) -> Mapping[str, str]:
        """Names of the actions, with a sentence about their arguments."""
        ...

    def read(self, action: Action) -> Any:
        """The member of the space; raises NotExecutableError."""
        ...

    def write(self, value: Any) -> Action:
        """The action that `read` turns into a member of the space."""
        ...


class NamedActions:
    """A Discrete space: one name an action."""

    def __init__(self, space: Any, names: Sequence[str] | None) -> None:
        count, start = int(space.n), int(getattr(space, "start", 0))
        names = [str(start + place) for place in range(count)] if names is None else [str(name) for name in names]
        if len(names) != count or len(set(names)) < count:
            raise UserError(
                f"environment.adapter.action_names has {len(names)} names, {len(set(names))} of them different; the "
                f"environment has {count} actions"
            )
        self._numbers = {name: start + place for place, name in enumerate(names)}

    @property
    def actions(self) -> Mapping[str, str]:
        """Names without arguments."""
        return dict.fromkeys(self._numbers, "")

    def read(self, action: Action) -> int:
        """The number of a name."""
        if action.name not in self._numbers:
            names = ", ".join(list(self._numbers)[:50])
            raise NotExecutableError(f"There is no action {action.name[:60]!r}; the actions are: {names}.")
        if action.arguments:
            raise NotExecutableError(f"The action {action.name} takes no arguments.")
        return self._numbers[action.name]

    def write(self, value: Any) -> Action:
        """The name of a number."""
        return Action(next(name for name, number in self._numbers.items() if number == int(value)))


class TextAction:
    """A Text space: the argument `text` of any action; without one the action's name."""

    def __init__(self, space: Any) -> None:
        self._space = space

    @property
    def actions(self) -> Mapping[str, str]:
        """Nothing is fixed."""
        return {}

    def read(self, action: Action) -> str:
        """The text, within the space's characters and lengths."""
        text = action.arguments.get("text", action.name)
        if set(action.arguments) - {"text"} or not isinstance(text, str):
            raise NotExecutableError("The action is a text, with no arguments beside it.")
        if text not in self._space:
            low, high = self._space.min_length, self._space.max_length
            raise NotExecutableError(f"The text must have {low} to {high} characters, of those that are allowed.")
        return text

    def write(self, value: Any) -> Action:
        """The text as an argument."""
        return Action("type", {"text": str(value)})


class ArgumentActions:
    """A Dict of Discrete, Box and Text spaces: its entries are the action's arguments; a Box alone is `value`."""

    def __init__(self, spaces: Mapping[str, Any], alone: bool) -> None:
        self._spaces, self._alone = dict(spaces), alone
        for name, space in self._spaces.items():
            if type(space).__name__ not in READERS:
                raise UserError(
                    f"the action's entry {name!r} is {space!r:.120}; an agent can write {', '.join(READERS)}"
                )

    @property
    def actions(self) -> Mapping[str, str]:
        """One action, whatever its name."""
        return {"act": ", ".join(f"{name}: {_described(space)}" for name, space in self._spaces.items())}

    def read(self, action: Action) -> Any:
        """The arguments, each within its space."""
        wanted, given = set(self._spaces), set(action.arguments)
        if wanted != given:
            found = ", ".join(sorted(given)) or "none"
            raise NotExecutableError(f"The action needs the arguments {', '.join(self._spaces)}; given: {found}.")
        values = {}
        for name, space in self._spaces.items():
            values[name] = READERS[type(space).__name__](space, action.arguments[name])
            if values[name] is None or not space.contains(values[name]):
                raise NotExecutableError(f"The argument {name} must be {_described(space)}.")
        return values["value"] if self._alone else values

    def write(self, value: Any) -> Action:
        """The entries as arguments."""
        entries = {"value": value} if self._alone else dict(value)
        plain = {name: part.tolist() if hasattr(part, "tolist") else part for name, part in entries.items()}
        return Action("act", plain)


def action_reader(space: Any, names: Sequence[str] | None) -> ActionReader:
    """Find the reader of a space, which is recognised by the name of its class."""
    kind = type(space).__name__
    if kind == "Discrete":
        return NamedActions(space, names)
    if names is not None:
        raise UserError(f"environment.adapter.action_names is for Discrete actions; this environment's are {kind}")
    if kind == "Text":
        return TextAction(space)
    if kind == "Dict":
        return ArgumentActions(space.spaces, alone=False)
    return ArgumentActions({"value": space}, alone=True)


def _described(space: Any) -> str:
    kind = type(space).__name__
    if kind == "Discrete":
        start = int(getattr(space, "start", 0))
        return f"a whole number from {start} to {start + int(space.n) - 1}"
    if kind == "Text":
        return f"a text of {space.min_length} to {space.max_length} characters"
    low, high = (np.unique(side).tolist() for side in (space.low, space.high))
    limits = f" from {low[0]:g} to {high[0]:g}" if len(low) == len(high) == 1 else " within their bounds"
    return f"a number{limits}" if space.shape == () else f"a list of numbers of the shape {space.shape}{limits}"


def _whole(space: Any, value: Any) -> Any:
    return np.int64(value) if type(value) is int and abs(value) < 2**62 else None


def _text(space: Any, value: Any) -> Any:
    return value if isinstance(value, str) else None


def _numbers(space: Any, value: Any) -> Any:
    if not _all_numbers(value):
        return None
    try:
        array = np.asarray(value, np.float64)
    except (TypeError, ValueError, OverflowError):
        return None
    if array.shape != space.shape or (space.dtype.kind in "iu" and (array != np.round(array)).any()):
        return None
    # Bounds are compared before a cast could wrap a number around.
    return array.astype(space.dtype) if ((array >= space.low) & (array <= space.high)).all() else None


def _all_numbers(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(_all_numbers, value))
    return type(value) in (int, float)


READERS = {"Discrete": _whole, "Box": _numbers, "Text": _text}
