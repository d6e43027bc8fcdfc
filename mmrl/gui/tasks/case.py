"""What all tasks share: a case of a task, what its expert sees, and the moves that experts are made of."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from random import Random
from typing import Any

from mmrl.gui.elements import Element

Move = tuple[str, dict[str, Any]]
"""Name and arguments of an action; points in pixels of the picture."""


@dataclass(frozen=True)
class Case:
    """One case of a task."""

    instruction: str
    config: Mapping[str, Any]
    """What the page is built from; plain data, with `title` and `wanted`."""


@dataclass(frozen=True)
class View:
    """What an expert sees: more than an agent."""

    elements: Mapping[str, Element]
    """Visible ones by key."""
    report: Mapping[str, Any] = field(default_factory=dict)
    """What the page says of itself: its state, a pop-up, how long it still loads."""

    @property
    def state(self) -> Mapping[str, Any]:
        """The page's own state."""
        state: Mapping[str, Any] = self.report["state"]
        return state


@dataclass(frozen=True)
class TaskKind:
    """A task that comes in cases."""

    make: Callable[[Random, int, int], Case]
    """Case for (source of choices, sub-goals, distractors)."""
    expert: Callable[[Case, View], Move]
    """Next move of somebody who knows the page; any state of it that can be mended leads on to success."""
    most_goals: int
    """Most sub-goals of a case."""
    summary: str
    page: str = ""
    """Its page in this folder; empty: that of its own name."""


def click(view: View, key: str) -> Move:
    """A click on the middle of a control."""
    x, y = view.elements[key].center
    return "click", {"x": x, "y": y}


def fill(view: View, key: str, text: str) -> Move | None:
    """The next move towards a text in a field; None where it is there."""
    field_ = view.elements[key]
    if field_.value == text:
        return None
    if not field_.focused:
        return click(view, key)
    if field_.value and not field_.all_selected:
        return "key", {"key": "Control+a"}
    return "type", {"text": text}


def pick(view: View, key: str, option: str) -> Move | None:
    """The next move towards an option of a native select: open it, then type the option and Enter."""
    if view.elements[key].value == option:
        return None
    if not view.elements[key].focused:
        return click(view, key)
    return "type", {"text": f"{option}\n"}
