"""Instructions that exactly one visible control of a page fulfils.

Three kinds: by name, by function, and by position. Ambiguous instructions are omitted, or with `all_boxes` kept with
all boxes.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mmrl.gui.browser.page import Element
from mmrl.gui.grounding.coords import Box
from mmrl.gui.toy.pages.vocabulary import Function

KINDS = ("name", "function", "relation")
LISTING = "listing"
"""Kind of an instruction that asks for all controls."""
MIN_VISIBLE = 0.5
"""Minimum visible fraction of a target's area; a less visible control can still make an instruction ambiguous."""


Sentences = dict[str, tuple[str, ...]]


@dataclass(frozen=True)
class Instruction:
    """An instruction and the controls that fulfil it."""

    text: str
    kind: str
    """One of `KINDS`, or `LISTING`."""
    targets: tuple[Element, ...]
    """One control, or all that fulfil the instruction."""


def instructions_for(
    elements: Sequence[Element],
    functions: dict[str, Function],
    language: str,
    words: str,
    draw: random.Random,
    *,
    all_boxes: bool = False,
) -> list[Instruction]:
    """Write the instructions of a page."""
    visible = [element for element in elements if element.visible and not element.disabled and element.name]
    found: list[Instruction | None] = []
    for element in filter(lambda element: element.visible_share >= MIN_VISIBLE, visible):
        found.append(_by_name(element, visible, SENTENCES[words][language], draw))
        found.append(_by_function(element, visible, functions, draw))
        found.append(_by_place(element, visible, SENTENCES[words][language], draw))
    return [item for item in found if item is not None and (all_boxes or len(item.targets) == 1)]


def listing_for(elements: Sequence[Element], language: str, words: str, draw: random.Random) -> Instruction:
    """The instruction that asks for every usable control, sorted by name so that the order is predictable."""
    usable = [element for element in elements if element.visible and not element.disabled and element.name]
    targets = tuple(sorted(usable, key=lambda element: element.name))
    return Instruction(draw.choice(SENTENCES[words][language][LISTING]), LISTING, targets)


def _by_name(element: Element, visible: list[Element], sentences: Sentences, draw: random.Random) -> Instruction:
    same = tuple(other for other in visible if other.name.casefold() == element.name.casefold())
    return Instruction(draw.choice(sentences["name"]).format(name=element.name), "name", same)


def _by_function(
    element: Element, visible: list[Element], functions: dict[str, Function], draw: random.Random
) -> Instruction | None:
    name = element.data.get("function", "")
    if name not in functions:
        return None
    same = tuple(other for other in visible if other.data.get("function") == name)
    phrase = draw.choice(functions[name].phrases)
    return Instruction(f"{phrase[0].upper()}{phrase[1:]}.", "function", same)


def _by_place(
    element: Element, visible: list[Element], sentences: Sentences, draw: random.Random
) -> Instruction | None:
    """Describe a control by its row if that has a name, else relative to a control whose text is unique."""
    if element.row:
        same = tuple(other for other in visible if other.row == element.row and other.name == element.name)
        return Instruction(draw.choice(sentences["row"]).format(row=element.row, name=element.name), "relation", same)
    choices = []
    for anchor in visible:
        unique = sum(other.name.casefold() == anchor.name.casefold() for other in visible) == 1
        if anchor is element or not unique or anchor.icon_only or not anchor.text:
            continue
        choices += [(side, anchor) for side in SIDES if _nearest(side, anchor, visible) is element]
    if not choices:
        return None
    side, anchor = draw.choice(choices)
    return Instruction(draw.choice(sentences[side]).format(name=anchor.name), "relation", (element,))


def _nearest(side: str, anchor: Element, visible: list[Element]) -> Element | None:
    """The control next to an anchor on one side; None where that is ambiguous."""
    gap, overlap = SIDES[side]
    beside = [
        (gap(anchor.box, other.box), other)
        for other in visible
        if other is not anchor and gap(anchor.box, other.box) >= -1 and overlap(anchor.box, other.box) > 0
    ]
    if not beside:
        return None
    distance, nearest = min(beside, key=lambda pair: pair[0])
    aligned = overlap(anchor.box, nearest.box) >= 0.5 * min(_extent(side, anchor.box), _extent(side, nearest.box))
    # The second nearest must be behind the nearest, not beside it.
    rivals = [other for d, other in beside if other is not nearest and gap(nearest.box, other.box) < -1]
    reach = 1.5 * max(_extent(side, anchor.box), _extent(side, nearest.box)) + 60
    return nearest if aligned and not rivals and distance <= reach else None


def _extent(side: str, box: Box) -> float:
    return box.y2 - box.y1 if side in ("left", "right") else box.x2 - box.x1


def _rows_overlap(first: Box, second: Box) -> float:
    return min(first.y2, second.y2) - max(first.y1, second.y1)


def _columns_overlap(first: Box, second: Box) -> float:
    return min(first.x2, second.x2) - max(first.x1, second.x1)


Measure = Callable[[Box, Box], float]
SIDES: dict[str, tuple[Measure, Measure]] = {
    "right": (lambda a, b: b.x1 - a.x2, _rows_overlap),
    "left": (lambda a, b: a.x1 - b.x2, _rows_overlap),
    "below": (lambda a, b: b.y1 - a.y2, _columns_overlap),
    "above": (lambda a, b: a.y1 - b.y2, _columns_overlap),
}
"""Side to the distance of a control from the anchor, negative on other sides, and their overlap across."""

SENTENCES: dict[str, dict[str, Sentences]] = {
    "train": {
        "en": {
            "name": ('Click "{name}".', 'Press "{name}".'),
            "row": ('In the row of {row}, click "{name}".',),
            "right": ('Click what stands directly right of "{name}".',),
            "left": ('Click what stands directly left of "{name}".',),
            "below": ('Click what stands directly below "{name}".',),
            "above": ('Click what stands directly above "{name}".',),
            "listing": ("List every control on this screen.",),
        },
        "de": {
            "name": ('Klicke auf "{name}".', 'Drücke "{name}".'),
            "row": ('Klicke in der Zeile von {row} auf "{name}".',),
            "right": ('Klicke auf das, was direkt rechts von "{name}" steht.',),
            "left": ('Klicke auf das, was direkt links von "{name}" steht.',),
            "below": ('Klicke auf das, was direkt unter "{name}" steht.',),
            "above": ('Klicke auf das, was direkt über "{name}" steht.',),
            "listing": ("Nenne alle Bedienelemente dieses Bildschirms.",),
        },
        "es": {
            "name": ('Haz clic en "{name}".', 'Pulsa "{name}".'),
            "row": ('En la fila de {row}, haz clic en "{name}".',),
            "right": ('Haz clic en lo que está justo a la derecha de "{name}".',),
            "left": ('Haz clic en lo que está justo a la izquierda de "{name}".',),
            "below": ('Haz clic en lo que está justo debajo de "{name}".',),
            "above": ('Haz clic en lo que está justo encima de "{name}".',),
            "listing": ("Enumera todos los controles de esta pantalla.",),
        },
    },
    "test": {
        "en": {
            "name": ('Find the control called "{name}" and activate it.',),
            "row": ('Use "{name}" for the entry {row}.',),
            "right": ('Select the neighbour of "{name}" on its right.',),
            "left": ('Select the neighbour of "{name}" on its left.',),
            "below": ('Select the neighbour of "{name}" underneath it.',),
            "above": ('Select the neighbour of "{name}" on top of it.',),
            "listing": ("What can be clicked here? Name all of it.",),
        },
        "de": {
            "name": ('Suche das Element mit dem Namen "{name}" und betätige es.',),
            "row": ('Wende "{name}" auf den Eintrag {row} an.',),
            "right": ('Wähle den rechten Nachbarn von "{name}".',),
            "left": ('Wähle den linken Nachbarn von "{name}".',),
            "below": ('Wähle den unteren Nachbarn von "{name}".',),
            "above": ('Wähle den oberen Nachbarn von "{name}".',),
            "listing": ("Was lässt sich hier anklicken? Zähle alles auf.",),
        },
        "es": {
            "name": ('Encuentra el control llamado "{name}" y actívalo.',),
            "row": ('Usa "{name}" para la entrada {row}.',),
            "right": ('Elige el vecino de "{name}" por la derecha.',),
            "left": ('Elige el vecino de "{name}" por la izquierda.',),
            "below": ('Elige el vecino de "{name}" por abajo.',),
            "above": ('Elige el vecino de "{name}" por arriba.',),
            "listing": ("¿Qué se puede pulsar aquí? Dilo todo.",),
        },
    },
}
"""Sentences by split and language."""
