"""Checks images against their captions, with descriptions in GenEval's format and stricter rules.

GenEval (djghosh13/geneval evaluation/evaluate_images.py) accepts more objects than were asked for and anything else in
the image, unless the description excludes it. Here every count is exact and nothing else may be there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from diffusion.toy.shapes import Detection, detect, parse_caption, relative_position
from mmrl.errors import UserError


@dataclass(frozen=True)
class GenevalVerdict:
    """Result of the rules for one image."""

    parts: tuple[float, ...]
    """Score of each thing that was asked for, 0..1."""
    correct: bool
    """Whether every part has the full score."""

    @property
    def graded(self) -> float:
        """Mean of the parts."""
        return sum(self.parts) / len(self.parts)


def shapes_geneval(
    prompts: Sequence[str],
    completions: Sequence[NDArray[np.uint8]],
    *,
    metadata: Sequence[Mapping[str, Any] | None] | None = None,
    strict: bool = False,
    compat: bool = False,
    **_: Any,
) -> list[float]:
    """Score how much of its caption an image (H, W, 3) uint8 shows: shapes, counts, colours, relation, nothing else.

    `metadata` is in GenEval's format; if missing, it is read from the caption. Option `strict`: 1 for a fully correct
    image, otherwise 0, instead of the mean of the parts. Option `compat`: a wrong relation gives 0.5 instead of 0, like
    the published reward, which adds a second part of 1.

    Source: after GenEval, arXiv 2310.11513, but stricter, see the module; graded as in yifan123/flow_grpo, except that
        a wrong count never gives less than 0, and the fraction of requested objects among those seen counts too.
    """
    verdicts = [
        judge_scene(detect(image), wanted["include"], compat=compat)
        for image, wanted in zip(completions, metadata_rows(prompts, metadata), strict=True)
    ]
    return [float(verdict.correct) if strict else verdict.graded for verdict in verdicts]


def shapes_geneval_strict(
    prompts: Sequence[str],
    completions: Sequence[NDArray[np.uint8]],
    *,
    metadata: Sequence[Mapping[str, Any] | None] | None = None,
    **_: Any,
) -> list[float]:
    """Give 1 to images that match their caption exactly and 0 to all others; see `shapes_geneval`."""
    return shapes_geneval(prompts, completions, metadata=metadata, strict=True)


def judge_scene(
    found: Sequence[Detection], include: Sequence[Mapping[str, Any]], *, compat: bool = False
) -> GenevalVerdict:
    """Compare the found objects with the caption's."""
    parts: list[float] = []
    matched: list[list[Detection] | None] = []
    for wanted in include:
        members = [item for item in found if item.shape == wanted["class"]]
        scores = _entry_scores(members, wanted)
        if "position" in wanted:
            right = min(scores) == 1.0
            scores += _relation_scores(members if right else None, wanted["position"], matched, compat=compat)
        matched.append(members if min(scores) == 1.0 else None)
        parts += scores
    precision = _precision(found, include)
    return GenevalVerdict((*parts, precision), correct=precision == 1.0 and None not in matched)


def metadata_rows(
    prompts: Sequence[str], metadata: Sequence[Mapping[str, Any] | None] | None
) -> list[Mapping[str, Any]]:
    """Each row's metadata, read from the prompt if missing."""
    given = [None] * len(prompts) if metadata is None else metadata
    rows = [parse_caption(prompt).metadata if row is None else row for prompt, row in zip(prompts, given, strict=True)]
    for row in rows:
        if not row.get("include"):
            raise UserError(f"the metadata asks for nothing; expected a list 'include' as in GenEval, not {row}")
    return rows


def _entry_scores(members: Sequence[Detection], wanted: Mapping[str, Any]) -> list[float]:
    """Count, and colour if one is asked for."""
    number = int(wanted["count"])
    scores = [_closeness(len(members), number)]
    if "color" in wanted:
        painted = sum(item.colour == wanted["color"] for item in members)
        scores.append(_closeness(painted, number) if len(members) == number else 0.0)
    return scores


def _closeness(seen: int, wanted: int) -> float:
    return max(0.0, 1.0 - abs(wanted - seen) / wanted)


def _relation_scores(
    members: Sequence[Detection] | None,
    position: Sequence[Any],
    matched: Sequence[Sequence[Detection] | None],
    *,
    compat: bool,
) -> list[float]:
    relation, target = position
    if not 0 <= target < len(matched):
        raise ValueError(f"position {list(position)} refers to an entry that does not come before it")
    others = matched[target]
    if members is None or others is None:
        return [0.0]
    holds = all(relation in relative_position(item.box, other.box) for item in members for other in others)
    return [1.0] if holds else ([0.0, 1.0] if compat else [0.0])


def _precision(found: Sequence[Detection], include: Sequence[Mapping[str, Any]]) -> float:
    """Fraction of the found objects that the caption asks for, in shape, colour and number; 0 if none was found."""
    left = Counter[tuple[str, str | None]]()
    for wanted in include:
        left[wanted["class"], wanted.get("color")] += int(wanted["count"])
    asked = 0
    for item in found:
        look = (item.shape, item.colour) if left[item.shape, item.colour] else (item.shape, None)
        if left[look] > 0:
            left[look] -= 1
            asked += 1
    return asked / len(found) if found else 0.0
