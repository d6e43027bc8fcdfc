"""Scenes of coloured shapes, their captions, and their descriptions in GenEval's layout."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mmrl.errors import UserError
from mmrl.files import write_atomically

COLOURS: dict[str, tuple[int, int, int]] = {
    "red": (220, 45, 45),
    "green": (40, 165, 70),
    "blue": (45, 85, 220),
    "yellow": (235, 195, 30),
}
"""RGB 0..255 of each colour."""
SHAPES = ("circle", "square", "triangle")
NUMBERS = {1: "a", 2: "two", 3: "three"}
RELATIONS: dict[str, tuple[int, int]] = {"left of": (-1, 0), "right of": (1, 0), "above": (0, -1), "below": (0, 1)}
"""Direction (x, y) from the second object to the first; y points down."""


@dataclass(frozen=True)
class ShapeGroup:
    """Objects that look alike."""

    colour: str
    """Key of `COLOURS`."""
    shape: str
    """Entry of `SHAPES`."""
    count: int = 1
    """Number of them, 1 to 3."""

    def __post_init__(self) -> None:
        for name, value, allowed in (
            ("colour", self.colour, list(COLOURS)),
            ("shape", self.shape, list(SHAPES)),
            ("count", self.count, list(NUMBERS)),
        ):
            if value not in allowed:
                raise UserError(f"{name} {value!r} is not one of {', '.join(map(str, allowed))}")

    @property
    def phrase(self) -> str:
        """The group in words, "three green triangles"."""
        return f"{NUMBERS[self.count]} {self.colour} {self.shape}{'s' if self.count > 1 else ''}"


@dataclass(frozen=True)
class Scene:
    """One or two groups of objects and, for two single objects, perhaps a relation between them."""

    groups: tuple[ShapeGroup, ...]
    """One or two groups; two differ in shape, as a count of shapes could not tell them apart otherwise."""
    relation: str | None = None
    """Key of `RELATIONS`: direction of the first object from the second."""

    def __post_init__(self) -> None:
        shapes = {group.shape for group in self.groups}
        if len(self.groups) not in (1, 2) or len(shapes) < len(self.groups):
            raise UserError(f"a scene has one group, or two groups of different shapes, not {self.groups}")
        if self.relation is None:
            return
        if self.relation not in RELATIONS:
            raise UserError(f"relation {self.relation!r} is not one of {', '.join(RELATIONS)}")
        if [group.count for group in self.groups] != [1, 1]:
            raise UserError(f"relation {self.relation!r} needs two single objects, not {self.groups}")

    @property
    def kind(self) -> str:
        """Key of `KINDS`."""
        if self.relation:
            return "position"
        if any(group.count > 1 for group in self.groups):
            return "count"
        return "two" if len(self.groups) == 2 else "single"

    @property
    def objects(self) -> list[ShapeGroup]:
        """Every object on its own, in the order of the caption."""
        return [ShapeGroup(group.colour, group.shape) for group in self.groups for _ in range(group.count)]

    @property
    def caption(self) -> str:
        """The scene in words; `parse_caption` reads it back."""
        return f" {self.relation or 'and'} ".join(group.phrase for group in self.groups)

    @property
    def metadata(self) -> dict[str, Any]:
        """The scene in the layout of GenEval's prompt files; a related object follows the one it refers to.

        Source: djghosh13/geneval prompts/evaluation_metadata.jsonl.
        """
        groups = reversed(self.groups) if self.relation else self.groups
        include: list[dict[str, Any]] = [
            {"class": group.shape, "count": group.count, "color": group.colour} for group in groups
        ]
        if self.relation:
            include[1]["position"] = [self.relation, 0]
        described: dict[str, Any] = {"tag": GENEVAL_TAGS[self.kind], "include": include, "prompt": self.caption}
        if self.kind == "count":
            described["exclude"] = [{"class": group.shape, "count": group.count + 1} for group in self.groups]
        return described


def all_scenes(kinds: Sequence[str] | None = None) -> list[Scene]:
    """List every scene of the given kinds.

    Args:
        kinds: keys of `KINDS`; None = all.

    Returns:
        12 single, 72 two, 24 count and 288 position scenes, kind by kind in a fixed order.

    Raises:
        UserError: a kind does not exist.
    """
    kinds = list(KINDS) if kinds is None else list(kinds)
    unknown = [kind for kind in kinds if kind not in KINDS]
    if unknown:
        raise UserError(f"unknown kind of scene {unknown[0]!r}; known: {', '.join(KINDS)}")
    return [scene for kind in kinds for scene in KINDS[kind]()]


def parse_caption(caption: str) -> Scene:
    """Read a caption back.

    Args:
        caption: such as "a red circle left of a blue square"; case and spaces do not matter.

    Returns:
        The scene that has this caption.

    Raises:
        UserError: the text is not such a caption.
    """
    link = "|".join(["and", *RELATIONS])
    parts = re.split(rf" ({link}) ", " ".join(caption.lower().split()))
    groups = [_parse_phrase(phrase, caption) for phrase in parts[::2]]
    relation = parts[1] if len(parts) > 1 and parts[1] != "and" else None
    return Scene(tuple(groups), relation)


def split_scenes(
    scenes: Sequence[Scene], *, held_out_share: float = 0.2, seed: int = 0
) -> tuple[list[Scene], list[Scene]]:
    """Divide scenes into those for training and those whose captions are held out.

    Args:
        scenes: distinct scenes.
        held_out_share: fraction of each kind that is held out, rounded to the nearest number; between 0 and 1.
        seed: seed of the choice.

    Returns:
        Training and held-out scenes, each in the given order.

    Raises:
        UserError: the share is out of range or a scene occurs twice.
    """
    if not 0.0 <= held_out_share <= 1.0:
        raise UserError(f"held_out_share={held_out_share} must be between 0 and 1")
    if len(set(scenes)) < len(scenes):
        raise UserError("a scene occurs twice, so it could be both trained on and held out")
    rng = np.random.default_rng(seed)
    held_out: set[Scene] = set()
    for kind in KINDS:
        members = [scene for scene in scenes if scene.kind == kind]
        chosen = rng.permutation(len(members))[: round(held_out_share * len(members))]
        held_out.update(members[index] for index in chosen)
    return [scene for scene in scenes if scene not in held_out], [scene for scene in scenes if scene in held_out]


def write_prompt_file(path: Path | str, scenes: Sequence[Scene]) -> Path:
    """Write captions and descriptions as JSON lines with the columns prompt and metadata.

    Args:
        path: file to write; created with its folder.
        scenes: one line each.

    Returns:
        The file.
    """
    path = Path(path)
    lines = [json.dumps({"prompt": scene.caption, "metadata": scene.metadata}) for scene in scenes]
    write_atomically(path, "".join(line + "\n" for line in lines))
    return path


def _parse_phrase(phrase: str, caption: str) -> ShapeGroup:
    counts = {word: count for count, word in NUMBERS.items()}
    words = phrase.split()
    if len(words) == 3 and words[0] in counts:
        shape = words[2].removesuffix("s") if words[0] != "a" else words[2]
        if words[1] in COLOURS and shape in SHAPES:
            return ShapeGroup(words[1], shape, counts[words[0]])
    raise UserError(
        f"cannot read {phrase!r} in the caption {caption!r}; expected a number ({', '.join(counts)}), a colour "
        f"({', '.join(COLOURS)}) and a shape ({', '.join(SHAPES)}), or two of these joined by and, "
        f"{', '.join(RELATIONS)}"
    )


def _looks() -> list[tuple[str, str]]:
    return list(itertools.product(COLOURS, SHAPES))


def _single_scenes() -> list[Scene]:
    return [Scene((ShapeGroup(*look),)) for look in _looks()]


def _two_scenes() -> list[Scene]:
    pairs = itertools.permutations(_looks(), 2)
    return [
        Scene((ShapeGroup(*one), ShapeGroup(*other)))
        for one, other in pairs
        if one[0] != other[0] and one[1] != other[1]
    ]


def _count_scenes() -> list[Scene]:
    return [Scene((ShapeGroup(*look, count),)) for look in _looks() for count in (2, 3)]


def _position_scenes() -> list[Scene]:
    return [Scene(scene.groups, relation) for scene in _two_scenes() for relation in RELATIONS]


GENEVAL_TAGS = {"single": "colors", "two": "color_attr", "count": "counting", "position": "position"}
KINDS: Mapping[str, Callable[[], list[Scene]]] = {
    "single": _single_scenes,
    "two": _two_scenes,
    "count": _count_scenes,
    "position": _position_scenes,
}
