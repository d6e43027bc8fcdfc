"""Common parts of all tasks: cases, the expert's view, and its basic moves."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from random import Random
from typing import Any

from mmrl.gui.browser.page import Element

Move = tuple[str, dict[str, Any]]
"""Name and arguments of an action; points in pixels of the screenshot."""


@dataclass(frozen=True)
class Case:
    """One case of a task."""

    instruction: str
    config: Mapping[str, Any]
    """Data of the page, with `title` and `wanted`."""


@dataclass(frozen=True)
class View:
    """The expert's view, which contains more than an agent sees."""

    elements: Mapping[str, Element]
    """Visible ones by key."""
    report: Mapping[str, Any] = field(default_factory=dict)
    """The page's report: its state, a pop-up, remaining load time."""

    @property
    def state(self) -> Mapping[str, Any]:
        """The page's own state."""
        state: Mapping[str, Any] = self.report["state"]
        return state


@dataclass(frozen=True)
class TaskKind:
    """A kind of task."""

    make: Callable[[Random, int, int], Case]
    """(random choices, sub-goals, distractors) to a case."""
    expert: Callable[[Case, View], Move]
    """(case, view) to the next move; it recovers from any state that can be recovered."""
    most_goals: int
    """Maximum number of sub-goals of a case."""
    summary: str
    page: str = ""
    """Its page in this folder. Default: the page with the task's name."""


def click(view: View, key: str) -> Move:
    """A click on the center of a control."""
    x, y = view.elements[key].center
    return "click", {"x": x, "y": y}


def fill(view: View, key: str, text: str) -> Move | None:
    """The next move towards entering a text in a field; None if it is done."""
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
