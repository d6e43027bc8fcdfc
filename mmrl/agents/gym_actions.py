"""Actions of an agent as members of a Gymnasium action space."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from mmrl.agents.actions import Action
from mmrl.errors import UserError


class NotExecutableError(ValueError):
    """An action that the environment does not have; the message is for the agent."""


class NamedActions:
    """A Discrete space: each action has a name and no arguments."""

    def __init__(self, space: Any, names: Sequence[str] | None) -> None:
        count, start = int(space.n), int(getattr(space, "start", 0))
        names = [str(start + index) for index in range(count)] if names is None else [str(name) for name in names]
        if len(names) != count or len(set(names)) < count:
            raise UserError(
                f"environment.adapter.action_names has {len(names)} names, {len(set(names))} of them different; the "
                f"environment has {count} actions"
            )
        self._numbers = {name: start + index for index, name in enumerate(names)}
        self.actions: Mapping[str, str] = dict.fromkeys(names, "")
        """Names, with a sentence about the arguments."""

    def read(self, action: Action) -> int:
        """The number of a name; raises NotExecutableError."""
        if action.name not in self._numbers:
            names = ", ".join(list(self._numbers)[:50])
            raise NotExecutableError(f"There is no action {action.name[:60]!r}; the actions are: {names}.")
        if action.arguments:
            raise NotExecutableError(f"The action {action.name} takes no arguments.")
        return self._numbers[action.name]

    def write(self, value: Any) -> Action:
        """The action that `read` turns into a number."""
        return Action(next(name for name, number in self._numbers.items() if number == int(value)))


class TextAction:
    """A Text space: the argument `text` of any action; without one the action's name."""

    def __init__(self, space: Any) -> None:
        self._space = space
        self.actions: Mapping[str, str] = {}

    def read(self, action: Action) -> str:
        """The text, within the space's characters and lengths; raises NotExecutableError."""
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
    """A Dict of Discrete, Box and Text spaces: its entries are the action's arguments; a single Box is `value`."""

    def __init__(self, spaces: Mapping[str, Any], single: bool) -> None:
        self._spaces, self._single = dict(spaces), single
        for name, space in self._spaces.items():
            if type(space).__name__ not in CONVERTERS:
                raise UserError(
                    f"the action's entry {name!r} is {space!r:.120}; an agent can write {', '.join(CONVERTERS)}"
                )
        described = (f"{name}: {_described(space)}" for name, space in self._spaces.items())
        self.actions: Mapping[str, str] = {"act": ", ".join(described)}

    def read(self, action: Action) -> Any:
        """The arguments, each within its space; raises NotExecutableError."""
        if set(self._spaces) != set(action.arguments):
            given = ", ".join(sorted(action.arguments)) or "none"
            raise NotExecutableError(f"The action needs the arguments {', '.join(self._spaces)}; given: {given}.")
        values = {}
        for name, space in self._spaces.items():
            values[name] = CONVERTERS[type(space).__name__](space, action.arguments[name])
            if values[name] is None or not space.contains(values[name]):
                raise NotExecutableError(f"The argument {name} must be {_described(space)}.")
        return values["value"] if self._single else values

    def write(self, value: Any) -> Action:
        """The entries as arguments of an action."""
        entries = {"value": value} if self._single else dict(value)
        plain = {name: part.tolist() if hasattr(part, "tolist") else part for name, part in entries.items()}
        return Action("act", plain)


ActionReader: TypeAlias = NamedActions | TextAction | ArgumentActions


def action_reader(space: Any, names: Sequence[str] | None) -> ActionReader:
    """The reader of a space, which is recognised by the name of its class."""
    kind = type(space).__name__
    if kind == "Discrete":
        return NamedActions(space, names)
    if names is not None:
        raise UserError(f"environment.adapter.action_names is for Discrete actions; this environment's are {kind}")
    if kind == "Text":
        return TextAction(space)
    if kind == "Dict":
        return ArgumentActions(space.spaces, single=False)
    return ArgumentActions({"value": space}, single=True)


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


def _numbers(space: Any, value: Any) -> Any:
    def all_numbers(part: Any) -> bool:
        return all(map(all_numbers, part)) if isinstance(part, (list, tuple)) else type(part) in (int, float)

    if not all_numbers(value):
        return None
    try:
        array = np.asarray(value, np.float64)
    except (TypeError, ValueError, OverflowError):
        return None
    if array.shape != space.shape or (space.dtype.kind in "iu" and (array != np.round(array)).any()):
        return None
    # Bounds are compared before a cast could wrap a number around.
    return array.astype(space.dtype) if ((array >= space.low) & (array <= space.high)).all() else None


CONVERTERS = {
    "Discrete": lambda space, value: np.int64(value) if type(value) is int and abs(value) < 2**62 else None,
    "Box": _numbers,
    "Text": lambda space, value: value if isinstance(value, str) else None,
}
"""(space, argument) to a member of the space, or None."""
