"""The controls of a page: boxes, roles and accessible names from its DOM, with a test of visibility."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmrl.gui.grounding.coords import Box, Point

if TYPE_CHECKING:
    from mmrl.gui.browser.page import GuardedPage


@dataclass(frozen=True)
class Element:
    """A control of a page."""

    key: str
    """Its `data-key`, which the suite's own pages give to every control; empty elsewhere."""
    tag: str
    role: str
    """ARIA role, given or that of the tag."""
    name: str
    """Accessible name: aria-labelledby, aria-label, label, contents, then alt, title or placeholder."""
    text: str
    """Its visible text."""
    box: Box
    """Visible part in pixels of the screenshot; of a wrapped link the largest line."""
    hidden: str = ""
    """Why it cannot be clicked: style, outside (the window or a frame), covered; empty for a visible one."""
    visible_share: float = 1.0
    """Visible share of its area."""
    icon_only: bool = False
    """Whether it shows an icon and no text."""
    type: str = ""
    """Type of an input."""
    disabled: bool = False
    checked: bool = False
    value: str = ""
    row: str = ""
    """`data-row` of the row or card that contains it."""
    focused: bool = False
    all_selected: bool = False
    """Whether typing would replace its whole text."""
    data: Mapping[str, str] = field(default_factory=dict)
    """Its data attributes."""

    @property
    def visible(self) -> bool:
        """Whether a click on its center reaches it."""
        return not self.hidden

    @property
    def center(self) -> Point:
        """Center of its visible part in pixels of the screenshot."""
        return self.box.center


def read_elements(page: GuardedPage) -> list[Element]:
    """The controls of a page in document order, invisible ones included, with boxes in pixels of the screenshot."""
    entries: list[dict[str, Any]] = json.loads(page.evaluate(_script()))
    return [Element(**entry | {"box": Box(*(edge * page.scale for edge in entry["box"]))}) for entry in entries]


@cache
def _script() -> str:
    return Path(__file__).with_name("read_elements.js").read_text(encoding="utf-8")
