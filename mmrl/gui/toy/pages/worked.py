"""Worked answers to instructions about screens, for the supervised start of a model."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from mmrl.fields import bounded
from mmrl.gui.browser.page import Element
from mmrl.gui.toy.pages.instructions import LISTING, Instruction
from mmrl.gui.toy.pages.vocabulary import Function


@dataclass(frozen=True)
class WorkedSettings:
    """Options of worked answers."""

    listings: float = bounded(0.0, at_least=0, at_most=1)
    """Share of the rows that ask for all controls."""
    most_answers: int = bounded(1, at_least=1)
    """Answers name one to this many controls; those after the first are random. A model has to know answers of several
    points before AEPO can explore with them."""
    mistaken: float = bounded(0.0, at_least=0, at_most=1)
    """Share of the instructions by function whose first answer is another control of the function's family, or any
    other where none is visible: a confidently wrong start, as in AEPO's confidence trap."""


def worked_targets(
    instruction: Instruction,
    elements: Sequence[Element],
    functions: dict[str, Function],
    settings: WorkedSettings,
    draw: random.Random,
) -> list[Element]:
    """The controls that the worked answer to an instruction names."""
    targets = list(instruction.targets)
    if instruction.kind == LISTING or len(targets) > 1:
        return targets
    others = [item for item in elements if item.visible and item.name and item is not targets[0]]
    draw.shuffle(others)
    if instruction.kind == "function" and others and draw.random() < settings.mistaken:
        others.sort(key=lambda item: _family(item, functions) != _family(targets[0], functions))
        targets = [others.pop(0)]
        draw.shuffle(others)
    return targets + others[: draw.randint(1, settings.most_answers) - 1]


def _family(element: Element, functions: dict[str, Function]) -> str | None:
    function = functions.get(element.data.get("function", ""))
    return function.family if function else None
