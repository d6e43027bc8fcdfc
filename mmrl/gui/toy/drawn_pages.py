"""Generated pages drawn with Pillow: the contents, themes and instructions of `mmrl.gui.toy.pages` without a browser.

For tests and machines without Chromium. Boxes are exact, and words, themes and templates are split as for the browser's
screens; Pillow cannot render the vector icons, so every control shows its label.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

from mmrl.gui.browser.page import Element
from mmrl.gui.grounding.coords import Box, Size
from mmrl.gui.grounding.samples import AnyOf, GroundingSample, write_samples
from mmrl.gui.toy.pages.composer import LAYOUTS, SPLITS, Control, Field, PageModel, compose
from mmrl.gui.toy.pages.instructions import instructions_for
from mmrl.gui.toy.pages.vocabulary import functions

SCALES = (1.0, 0.875, 1.4)


@dataclass
class _Sheet:
    """An image under construction, with the controls so far."""

    page: PageModel
    size: Size
    scale: float
    elements: list[Element] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.image = Image.new("RGB", self.size, self.page.theme.background)
        self.draw = ImageDraw.Draw(self.image)
        self.font = ImageFont.load_default(self.page.font_px * self.scale)
        self.pad = round(self.page.padding_px * self.scale)
        self.height = round(self.page.font_px * self.scale * 1.3) + 2 * self.pad

    def width_of(self, text: str) -> int:
        """Width in pixels of a control with this text."""
        return round(self.draw.textlength(text, self.font)) + 4 * self.pad + 4

    def control(self, control: Control, left: int, top: int, row: str = "") -> int:
        """Draw a button or link if it fits; returns its right edge either way."""
        theme, primary = self.page.theme, control.look == "primary"
        box = (left, top, left + self.width_of(control.label), top + self.height)
        if self._fits(box):
            fill = theme.accent if primary else theme.background if control.look == "plain" else theme.surface
            self.draw.rounded_rectangle(box, theme.radius_px * self.scale, fill, theme.border)
            self._text(control.label, box, theme.on_accent if primary else theme.text)
            role = "link" if control.tag == "a" else "button"
            self._add(box, control.tag, role, control.label, row, control.function)
        return box[2]

    def entry(self, entry: Field, left: int, top: int, width: int) -> None:
        """Draw an input with its label before it."""
        start = left + width // 2
        end = start + self.height if entry.kind == "box" else left + width
        box = (start, top, end, top + self.height)
        if not self._fits(box):
            return
        self._text(entry.label, (left, top, start, top + self.height), self.page.theme.text)
        self.draw.rectangle(box, self.page.theme.surface, self.page.theme.border)
        if entry.kind != "box":
            self._text(entry.value, box, self.page.theme.text)
        elif entry.value:
            self.draw.line([(start + 3, top + 3), (end - 3, top + self.height - 3)], self.page.theme.accent, 2)
        tag, role = ENTRIES[entry.kind]
        self._add(box, tag, role, entry.label, "", "")

    def label(self, text: str, left: int, top: int) -> int:
        """Write plain text; returns its right edge."""
        box = (left, top, left + self.width_of(text), top + self.height)
        self._text(text, box, self.page.theme.text)
        return box[2]

    def line(self, controls: Sequence[Control], left: int, top: int) -> int:
        """Draw controls in lines, wrapping at the edge; returns the top of the next line."""
        x = left
        for control in controls:
            if x > left and x + self.width_of(control.label) > self.size[0]:
                x, top = left, top + self.height + self.pad
            x = self.control(control, x, top) + 2 * self.pad
        return top + self.height + 2 * self.pad

    def column(self, controls: Sequence[Control], left: int, top: int) -> int:
        """Draw controls in a column; returns the top of the next one."""
        for control in controls:
            self.control(control, left, top)
            top += self.height + self.pad
        return top

    def rows(self, left: int, top: int, right: int) -> int:
        """Draw the entries of a list, each with its controls at the right."""
        for row in self.page.rows:
            self.label(row.name, left, top)
            x = right - sum(self.width_of(control.label) + self.pad for control in row.controls)
            for control in row.controls:
                x = self.control(control, x, top, row.name) + self.pad
            top += self.height + self.pad
        return top

    def fields(self, left: int, top: int, width: int) -> int:
        """Draw inputs in a column."""
        for entry in self.page.fields:
            self.entry(entry, left, top, width)
            top += self.height + self.pad
        return top

    def _fits(self, box: tuple[int, int, int, int]) -> bool:
        """Whether a box is inside the image and covers no control."""
        inside = box[0] >= 0 and box[1] >= 0 and box[2] < self.size[0] and box[3] < self.size[1]
        return inside and not any(_overlap(box, element.box) for element in self.elements)

    def _text(self, text: str, box: tuple[int, int, int, int], fill: str) -> None:
        self.draw.text((box[0] + 2 * self.pad + 2, (box[1] + box[3]) / 2), text, fill, self.font, anchor="lm")

    def _add(self, box: tuple[int, int, int, int], tag: str, role: str, name: str, row: str, function: str) -> None:
        data = {"function": function} if function else {}
        text = "" if tag in ("input", "select") else name
        self.elements.append(Element("", tag, role, name, text, Box(*box), row=row, data=data))


def draw_page(page: PageModel, size: Size, scale: float = 1.0) -> tuple[Image.Image, list[Element]]:
    """Draw a page of size (width, height) in pixels, by a template of its split that its layout determines."""
    sheet = _Sheet(page, size, scale)
    layouts = LAYOUTS["train"] if page.layout in LAYOUTS["train"] else LAYOUTS["test"]
    templates = TEMPLATES["train" if page.layout in LAYOUTS["train"] else "test"]
    templates[layouts.index(page.layout) % len(templates)](sheet)
    return sheet.image, sheet.elements


def page_samples(
    count: int,
    *,
    seed: int = 0,
    split: str = "train",
    size: Size = (448, 336),
    language: str = "en",
    all_boxes: bool = False,
) -> Iterator[GroundingSample]:
    """Draw pages with an instruction each; the same seed gives the same pixels.

    Args:
        count: samples.
        seed: of all random choices.
        split: train; layouts: words of train on templates and themes of test; test: shares nothing with train.
        size: (width, height) in pixels.
        language: of labels and instructions: en, de or es.
        all_boxes: keep ambiguous instructions, with all boxes; they are omitted otherwise.
    """
    given = number = 0
    while given < count:
        draw = random.Random(f"drawn/{split}/{seed}/{number}")
        number += 1
        scale = draw.choice(SCALES)
        page = compose(draw, split, round(size[0] / scale), language)
        image, elements = draw_page(page, size, scale)
        words = SPLITS[split][1]
        known = dict(functions(words, language))
        found = instructions_for(elements, known, language, words, draw, all_boxes=all_boxes)
        if not found:
            continue
        kind = draw.choice(sorted({item.kind for item in found}))
        chosen = draw.choice([item for item in found if item.kind == kind])
        first, boxes = chosen.targets[0], tuple(target.box for target in chosen.targets)
        meta: dict[str, object] = {"kind": kind, "role": first.role, "name": first.name, "layout": page.layout}
        meta |= {"theme": page.theme.name, "scale": scale}
        given += 1
        target = boxes[0] if len(boxes) == 1 else AnyOf(boxes)
        yield GroundingSample(image, size, chosen.text, target, meta=meta)


def build_pages(path: str | Path, *, count: int = 1000, seed: int = 0, split: str = "train", **options: object) -> Path:
    """Write `page_samples` as JSON lines, with PNG images next to them."""
    return write_samples(path, page_samples(count, seed=seed, split=split, **options))  # type: ignore[arg-type]


def _overlap(box: tuple[int, int, int, int], other: Box) -> bool:
    return box[0] <= other.x2 and other.x1 <= box[2] and box[1] <= other.y2 and other.y1 <= box[3]


def _bar(sheet: _Sheet) -> None:
    """Toolbar, list, and actions below it."""
    right = sheet.size[0] - sheet.pad - 2
    top = sheet.line(sheet.page.toolbar, sheet.pad, sheet.pad)
    top = sheet.rows(sheet.pad, top, right)
    sheet.line([*sheet.page.actions, *sheet.page.links], sheet.pad, top)


def _form(sheet: _Sheet) -> None:
    """Title, inputs, and controls below them."""
    sheet.label(sheet.page.title, sheet.pad, sheet.pad)
    top = sheet.fields(sheet.pad, sheet.pad + sheet.height, sheet.size[0] * 3 // 4)
    top = sheet.line(sheet.page.actions, sheet.pad, top + sheet.pad)
    sheet.line(sheet.page.toolbar, sheet.pad, top)


def _side(sheet: _Sheet) -> None:
    """Navigation at the left, a list next to it, and actions below the list."""
    navigation = [*sheet.page.navigation, *sheet.page.toolbar]
    left = sheet.pad + max(sheet.width_of(control.label) for control in navigation) + 3 * sheet.pad
    sheet.column(navigation, sheet.pad, sheet.pad)
    top = sheet.rows(left, sheet.pad, sheet.size[0] - sheet.pad - 2)
    sheet.line(sheet.page.actions, left, top + sheet.pad)


def _columns(sheet: _Sheet) -> None:
    """Inputs at the left, actions in a column at the right."""
    left = sheet.size[0] * 3 // 5
    sheet.label(sheet.page.title, left, sheet.pad)
    sheet.fields(sheet.pad, sheet.pad, left - 2 * sheet.pad)
    sheet.column([*sheet.page.actions, *sheet.page.navigation], left, sheet.pad + sheet.height)


ENTRIES = {"text": ("input", "textbox"), "select": ("select", "combobox"), "box": ("input", "checkbox")}
"""Kind of field to tag and role."""

TEMPLATES: dict[str, tuple[Callable[[_Sheet], None], ...]] = {"train": (_bar, _form), "test": (_side, _columns)}
"""Page templates by split; no template is in both splits."""
