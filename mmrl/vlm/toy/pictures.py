"""Pictures of shapes, fruit and handwritten digits, with questions in plain English whose answers are one word.

Colour pictures of 64 x 64 pixels for a pretrained language model that learns to see. A hint in the question may be
right or wrong, so that copying competes with looking; fruit comes in all colours. The digits are those of
`mmrl.vlm.toy.digits`.

A question about something else ("general") has the language model's own answer, so that a model that has learned to
look does not answer everything with what it sees.

Splits: "train" shows neither the held-out combinations (such as a big yellow star on the left) nor the test scans;
"fresh" shows new pictures of the same combinations with test scans, "heldout" asks about held-out combinations only.
"""

from __future__ import annotations

import itertools
import math
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw

from mmrl.rewards.answers import Chat, completion_text, without_prompt
from mmrl.vlm.data.dataset import write_media_rows
from mmrl.vlm.toy.digits import scan_pool, scans_and_labels

SIDE_PX = 64
GRID = 4
"""Cells per side; each cell is one image token of `mmrl.vlm.toy.from_language`."""
UP = 3
"""Pictures are drawn this many times larger and then reduced."""
NOTHING = -1
SPLITS = ("train", "fresh", "heldout")

COLOURS = {
    "red": (220, 40, 40),
    "green": (40, 170, 60),
    "blue": (50, 80, 225),
    "yellow": (240, 220, 50),
    "purple": (150, 50, 190),
    "orange": (245, 140, 30),
    "white": (240, 240, 240),
}
SHAPES = ("circle", "square", "triangle", "star", "cross", "ring")
FRUITS = ("banana", "apple", "carrot", "leaf", "cherry", "pear")
SIZES = ("small", "big")
SIDES = ("left", "right")
COUNTS = ("one", "two", "three", "four", "five")
DIGITS = tuple("0123456789")
GROUPS: dict[str, tuple[str, ...]] = {
    "colour": tuple(COLOURS),
    "thing": (*SHAPES, *FRUITS),
    "size": SIZES,
    "side": SIDES,
    "count": COUNTS,
    "digit": DIGITS,
}
"""Words that a cell of a picture may show; it shows at most one of each group."""

QUESTIONS = {
    "colour": (
        "What colour is the {thing}?",
        "Which colour does the {thing} have?",
        "Name the colour of the {thing}.",
        "Tell me the colour of the {thing}.",
    ),
    "shape": (
        "What shape is the {colour} object?",
        "Which shape is {colour}?",
        "Name the {colour} shape.",
        "What is the {colour} thing in the picture?",
    ),
    "position": (
        "Is the {thing} on the left or on the right?",
        "On which side is the {thing}, left or right?",
        "Where do you see the {thing}, left or right?",
    ),
    "size": ("Is the {thing} big or small?", "How large is the {thing}, big or small?"),
    "count": ("How many {things} are there?", "How many {things} do you see?", "Count the {things}."),
    "digit": ("Which digit is shown?", "What number do you see?", "Read the digit."),
    "fruit": ("What is in the picture?", "What is this?", "What does the picture show?"),
}
"""Wordings of each kind of question."""
ANSWERS: dict[str, Sequence[str]] = {
    **{"colour": tuple(COLOURS), "shape": SHAPES, "position": SIDES, "size": SIZES},
    **{"count": COUNTS, "digit": DIGITS, "fruit": FRUITS},
}
"""Correct answers to each kind of question; drawn uniformly."""
HINTS = {
    "front": "Hint: it is {hint}. {question}",
    "friend": "My friend says that it is {hint}. {question}",
    "behind": "{question} I think that it is {hint}.",
}
"""Positions of a hint."""

GENERAL = (
    ("What is the capital of France?", "The capital of France is Paris.", "Paris"),
    ("What is the capital of Japan?", "The capital of Japan is Tokyo.", "Tokyo"),
    ("What is the capital of Germany?", "The capital of Germany is Berlin.", "Berlin"),
    ("What is the capital of Egypt?", "The capital of Egypt is Cairo.", "Cairo"),
    ("What is the capital of England?", "The capital of England is London.", "London"),
    ("What is the capital of Russia?", "The capital of Russia is Moscow.", "Moscow"),
    ("What is the capital of China?", "The capital of China is Beijing.", "Beijing"),
    ("How many days are in a week?", "A week is approximately 7 days.", "7"),
    ("What is the opposite of big?", "The opposite of big is small.", "small"),
    ("What is the opposite of hot?", "The opposite of hot is cold.", "cold"),
    ("What is the chemical symbol for gold?", "The chemical symbol for gold is Au.", "Au"),
    ("Which star does the Earth orbit?", "The Earth orbits the Sun.", "Sun"),
)
"""Questions that need no picture, how SmolLM2-135M-Instruct begins its answer, and the correct word. They are short
because the longest row determines the cost of a step."""
GENERAL_HELD_OUT = (
    ("What is the capital of India?", "The capital of India is New Delhi.", "Delhi"),
    ("What is the capital of Greece?", "The capital of Greece is Athens.", "Athens"),
    ("What is the capital of Canada?", "The capital of Canada is Ottawa, Canada.", "Ottawa"),
    ("What is the capital of Australia?", "The capital of Australia is Canberra.", "Canberra"),
    ("What is the opposite of up?", "The opposite of up is down.", "down"),
    ("Who discovered gravity?", "The discovery of gravity is attributed to Sir Isaac Newton.", "Newton"),
    ("What is the chemical formula of water?", "The chemical formula of water is H2O.", "H2O"),
    ("Which planet is known as the Red Planet?", "The Red Planet is actually Mars.", "Mars"),
    ("What is the capital of Poland?", "The capital of Poland is Warsaw.", "Warsaw"),
    ("What is the capital of Austria?", "The capital of Austria is Vienna.", "Vienna"),
    ("What is the capital of Norway?", "The capital of Norway is Oslo.", "Oslo"),
    ("What is the opposite of day?", "The opposite of day is night.", "night"),
    ("What is the chemical symbol for oxygen?", "The chemical symbol for oxygen is O.", "O"),
    ("What is the chemical symbol for iron?", "The chemical symbol for iron is Fe.", "Fe"),
    (
        "Which is the largest planet of the solar system?",
        "The largest planet of the solar system is Jupiter.",
        "Jupiter",
    ),
    ("Which language is spoken in Brazil?", "The language spoken in Brazil is Portuguese.", "Portuguese"),
)
"""More such questions, for "fresh" and "heldout"."""
SHOWN = ("own", "blank", "other", "none")
"""Pictures that a question may have: its own, a black one, that of another question of its kind, or none."""


def build_questions(
    path: str | Path,
    *,
    count: int = 1000,
    split: str = "train",
    kinds: Sequence[str] = tuple(QUESTIONS),
    general: float = 0.0,
    hint_share: float = 0.0,
    hint_rate: float = 1.0,
    shown: str = "own",
    seed: int = 0,
) -> Path:
    """Write questions about pictures as JSON lines next to their PNG images.

    The questions of a seed stay the same with other hints and other pictures.

    Args:
        path: JSONL file to write; columns problem (with <image>), answer, images, completion, kind, hint (none, right
            or wrong), hint_place (none, front, friend or behind) and hint_text.
        count: number of questions.
        split: one of `SPLITS`.
        kinds: keys of `QUESTIONS`, drawn evenly.
        general: fraction of questions about something else than the picture.
        hint_share: fraction of the other questions that carry a hint, at one of three places.
        hint_rate: probability that a hint is right.
        shown: one of `SHOWN`.
        seed: of questions, pictures and hints.

    Returns:
        The file.

    Raises:
        ValueError: an unknown split or picture.
    """
    if shown not in SHOWN:
        raise ValueError(f"shown is '{shown}'; allowed: {', '.join(SHOWN)}")
    draws = [random.Random(f"{part} {split} {seed}") for part in ("scene", "hint", "other")]
    facts = GENERAL if split == "train" else GENERAL_HELD_OUT
    # in turn, since a short file of independent draws would have some of them twice
    general_questions = itertools.cycle(random.Random(f"general {split} {seed}").sample(facts, len(facts)))

    def save(folder: Path, stem: str) -> dict[str, Any]:
        row, image = _question(draws, general_questions, split, kinds, general, hint_share, hint_rate, shown)
        if image is None:
            return {**row, "images": []}
        image.save(folder / f"{stem}.png", compress_level=1)
        return {**row, "problem": f"<image>{row['problem']}", "images": [f"{Path(path).stem}/{stem}.png"]}

    return write_media_rows(Path(path), count, save)


def _question(
    draws: Sequence[random.Random],
    facts: Iterator[tuple[str, str, str]],
    split: str,
    kinds: Sequence[str],
    general: float,
    hint_share: float,
    hint_rate: float,
    shown: str,
) -> tuple[dict[str, Any], Image.Image | None]:
    """Columns of a question, and its picture."""
    rng, hints, others = draws
    scene = draw_scene(rng, split, rng.choice(kinds))
    row = {"problem": scene.question, "answer": scene.answer, "completion": scene.answer, "kind": scene.kind}
    row |= {"hint": "none", "hint_place": "none", "hint_text": ""}
    if rng.random() < general:
        asked, said, word = next(facts)
        row |= {"problem": asked, "answer": word, "completion": said, "kind": "general"}
    elif hints.random() < hint_share:
        row |= _hint(hints, scene, hint_rate)
    if shown == "own":
        return row, scene.image
    if shown == "other":
        return row, draw_scene(others, split, scene.kind).image
    return row, Image.new("RGB", scene.image.size) if shown == "blank" else None


def _hint(rng: random.Random, scene: Scene, rate: float) -> dict[str, str]:
    """Columns that a hint changes."""
    right, place = rng.random() < rate, rng.choice(tuple(HINTS))
    hint = scene.answer if right else rng.choice([word for word in ANSWERS[scene.kind] if word != scene.answer])
    problem = HINTS[place].format(hint=hint, question=scene.question)
    return {"problem": problem, "hint": "right" if right else "wrong", "hint_place": place, "hint_text": hint}


def names_answer(
    prompts: Sequence[Chat],
    completions: Sequence[Chat],
    *,
    answer: Sequence[str],
    kind: Sequence[str],
    **_: Any,
) -> list[float]:
    """Reward 1 for a text with the correct word and none of the other answers to its kind of question, else 0."""
    rewards = []
    for asked, said, right, about in zip(prompts, completions, answer, kind, strict=True):
        words = set(re.findall(r"\w+", without_prompt(completion_text(said), asked).lower()))
        rewards.append(float(words & {right.lower(), *ANSWERS.get(about, ())} == {right.lower()}))
    return rewards


@dataclass
class Scene:
    """A picture and a question about it."""

    image: Image.Image
    kind: str
    question: str
    answer: str
    cells: dict[str, list[int]]
    """Index in `GROUPS` of what each of the 16 cells shows, row by row; NOTHING if it shows none of a group."""


@dataclass(frozen=True)
class _Object:
    colour: str
    thing: str
    size: str = ""
    side: str = ""


class _Canvas:
    """A picture while it is drawn, and what its cells show."""

    def __init__(self, rng: random.Random) -> None:
        grey = rng.randint(0, 50)
        self.ground = tuple(grey + rng.randint(0, 12) for _ in range(3))
        self.image = Image.new("RGB", (SIDE_PX * UP, SIDE_PX * UP), self.ground)
        self.rng = rng
        self.cells = {group: [NOTHING] * GRID**2 for group in GROUPS}

    def paint(self, colour: str) -> tuple[int, ...]:
        """A shade of a colour."""
        return tuple(max(0, min(255, part + self.rng.randint(-18, 18))) for part in COLOURS[colour])

    def fill(self, **shown: str) -> None:
        """Record in all cells what the picture shows as a whole."""
        for group, word in shown.items():
            self.cells[group] = [GROUPS[group].index(word)] * GRID**2

    def put(self, what: _Object, x: float, y: float, radius: float) -> None:
        """Draw an object around a point, and record it in the cells of which it covers enough."""
        draw_object(ImageDraw.Draw(self.image), what.thing, (x * UP, y * UP, radius * UP), self.paint(what.colour),
                    self.ground)  # fmt: skip
        cell = SIDE_PX / GRID
        for place in range(GRID**2):
            top, left = divmod(place, GRID)
            width = min(x + radius, cell * (left + 1)) - max(x - radius, cell * left)
            height = min(y + radius, cell * (top + 1)) - max(y - radius, cell * top)
            if min(width, height) > 0 and width * height >= min(cell**2, 4 * radius**2) / 4:
                for group, word in vars(what).items():
                    if word:
                        self.cells[group][place] = GROUPS[group].index(word)

    def picture(self) -> Image.Image:
        """The reduced picture, with some noise."""
        small = np.asarray(self.image.resize((SIDE_PX, SIDE_PX), Image.Resampling.BILINEAR), np.int16)
        grain = np.frombuffer(self.rng.randbytes(SIDE_PX**2), np.uint8).reshape(SIDE_PX, SIDE_PX, 1) % 13
        return Image.fromarray(np.clip(small + grain - 6, 0, 255).astype(np.uint8))


def draw_scene(rng: random.Random, split: str = "train", kind: str | None = None) -> Scene:
    """Draw a picture and a question about it.

    Args:
        rng: draws everything.
        split: one of `SPLITS`.
        kind: key of `QUESTIONS`; None draws one.
    """
    if split not in SPLITS:
        raise ValueError(f"split is '{split}'; allowed: {', '.join(SPLITS)}")
    kind = kind or rng.choice(tuple(QUESTIONS))
    canvas = _Canvas(rng)
    draw = {"count": _draw_count, "digit": _draw_digit, "fruit": _draw_fruit}.get(kind, _draw_objects)
    asked, answer = draw(canvas, kind, split)
    names = {"colour": asked.colour, "thing": asked.thing, "things": _plural(asked.thing)}
    return Scene(canvas.picture(), kind, rng.choice(QUESTIONS[kind]).format(**names), answer, canvas.cells)


def _plural(name: str) -> str:
    return f"{name}es" if name.endswith("s") else f"{name}s"


def _is_held_out(*words: str) -> bool:
    """Whether a combination is held out, one in six; every colour is seen with every thing elsewhere."""
    weights = {"big": 2, "right": 3}
    places = {word: place for words in (*ANSWERS.values(), FRUITS) for place, word in enumerate(words)} | weights
    return sum(places[word] for word in words) % 6 == 0


def _draw_one(rng: random.Random, held: bool, answers: Mapping[str, str], things: Sequence[str]) -> _Object:
    """An object whose combination is held out or not; `answers` fixes some of its words."""
    while True:
        drawn = {"colour": rng.choice(tuple(COLOURS)), "thing": rng.choice(things)}
        drawn |= {"size": rng.choice(SIZES), "side": rng.choice(SIDES), **answers}
        if _is_held_out(*drawn.values()) == held:
            return _Object(**drawn)


def _draw_objects(canvas: _Canvas, kind: str, split: str) -> tuple[_Object, str]:
    """One or two shapes, of which one is asked about."""
    rng, group = canvas.rng, {"shape": "thing", "position": "side"}.get(kind, kind)
    asked = _draw_one(rng, split == "heldout", {group: rng.choice(ANSWERS[kind])}, SHAPES)
    objects = [asked]
    if kind == "position" or rng.random() < 0.75:
        other = asked
        while other.colour == asked.colour or other.thing == asked.thing:
            side = SIDES[1 - SIDES.index(asked.side)]
            other = _draw_one(rng, False, {"side": side}, SHAPES)
        objects.append(other)
    for what in objects:
        radius = rng.uniform(11, 14) if what.size == "big" else rng.uniform(5.5, 7.5)
        x = rng.uniform(radius + 1, max(radius + 1.5, SIDE_PX / 2 - 1 - radius))
        x = x if what.side == "left" else SIDE_PX - x
        canvas.put(what, x, rng.uniform(radius + 2, SIDE_PX - 2 - radius), radius)
    return asked, str(getattr(asked, group))


def _draw_count(canvas: _Canvas, kind: str, split: str) -> tuple[_Object, str]:
    """One to five equal shapes."""
    rng, answer = canvas.rng, canvas.rng.choice(COUNTS)
    while True:
        what = _Object(rng.choice(tuple(COLOURS)), rng.choice(SHAPES))
        if _is_held_out(answer, what.colour, what.thing) == (split == "heldout"):
            break
    for place in rng.sample(range(9), COUNTS.index(answer) + 1):
        x, y = (11 + 21 * part + rng.uniform(-2, 2) for part in divmod(place, 3))
        canvas.put(what, x, y, rng.uniform(6, 8.5))
    canvas.fill(count=answer)
    return what, answer


def _draw_digit(canvas: _Canvas, kind: str, split: str) -> tuple[_Object, str]:
    """A handwritten digit."""
    images, labels = scans_and_labels()
    rng, answer = canvas.rng, canvas.rng.choice(DIGITS)
    pool = scan_pool("train" if split == "train" else "test")
    scan = rng.choice(pool[labels[pool] == int(answer)])
    ink = Image.fromarray((images[scan] * 255).astype(np.uint8))
    ink = ink.resize((rng.randint(44, 60) * UP,) * 2, Image.Resampling.BICUBIC)
    colour, room = rng.choice(tuple(COLOURS)), SIDE_PX * UP - ink.width
    canvas.image.paste(canvas.paint(colour), (rng.randint(0, room), rng.randint(0, room)), ink)
    canvas.fill(digit=answer, colour=colour)
    return _Object(colour, "digit"), answer


def _draw_fruit(canvas: _Canvas, kind: str, split: str) -> tuple[_Object, str]:
    """A fruit in any colour."""
    rng, answer = canvas.rng, canvas.rng.choice(FRUITS)
    while True:
        colour, side = rng.choice(tuple(COLOURS)), rng.choice(SIDES)
        if _is_held_out(colour, answer, side) == (split == "heldout"):
            break
    radius = rng.uniform(15, 22)
    edge, middle = 1.15 * radius + 2, SIDE_PX / 2
    x = rng.uniform(min(edge, middle - 1), middle - 0.5)
    y = rng.uniform(edge, SIDE_PX - edge)
    canvas.put(_Object(colour, answer), x if side == "left" else SIDE_PX - x, y, radius)
    return _Object(colour, answer), answer


def draw_object(
    draw: ImageDraw.ImageDraw,
    name: str,
    place: tuple[float, float, float],
    colour: tuple[int, ...],
    ground: tuple[int, ...],
) -> None:
    """Draw a shape or a fruit.

    Args:
        draw: where.
        name: one of `SHAPES` or `FRUITS`.
        place: x and y of its middle, and its radius in pixels.
        colour: its colour.
        ground: colour behind it.
    """
    x, y, radius = place

    def points(*corners: tuple[float, float]) -> list[tuple[float, float]]:
        return [(x + radius * u, y + radius * v) for u, v in corners]

    def box(left: float, top: float, right: float, bottom: float) -> list[tuple[float, float]]:
        return points((left, top), (right, bottom))

    def line(*corners: tuple[float, float], ink: tuple[int, int, int] = STALK, width: float = 0.16) -> None:
        draw.line(points(*corners), fill=ink, width=max(2, int(width * radius)))

    if name == "circle":
        draw.ellipse(box(-1, -1, 1, 1), fill=colour)
    elif name == "square":
        draw.rectangle(box(-0.88, -0.88, 0.88, 0.88), fill=colour)
    elif name == "cross":
        draw.rectangle(box(-1, -0.33, 1, 0.33), fill=colour)
        draw.rectangle(box(-0.33, -1, 0.33, 1), fill=colour)
    elif name == "ring":
        draw.ellipse(box(-1, -1, 1, 1), outline=colour, width=max(2, int(0.4 * radius)))
    elif name == "banana":
        draw.chord(box(-1.2, -1.3, 1.2, 0.9), 10, 170, fill=colour)
        draw.ellipse(box(-0.95, -1.2, 0.95, 0.35), fill=ground)
    elif name == "apple":
        draw.ellipse(box(-0.9, -0.6, 0.1, 0.9), fill=colour)
        draw.ellipse(box(-0.1, -0.6, 0.9, 0.9), fill=colour)
        line((0, -0.5), (0.25, -1.1))
    elif name == "carrot":
        draw.polygon(points((-0.45, -0.4), (0.45, -0.4), (0, 1.3)), fill=colour)
        for end in (-0.4, 0, 0.4):
            line((0, -0.4), (end, -1.2), ink=GREEN)
    elif name == "leaf":
        draw.polygon(points(*LEAF), fill=colour)
        line((0, -0.8), (0, 1.3), ink=DARK_GREEN)
    elif name == "cherry":
        line((-0.5, 0.5), (0.2, -1.1), (0.6, 0.5), ink=GREEN)
        draw.ellipse(box(-1, 0.1, -0.1, 1), fill=colour)
        draw.ellipse(box(0.15, 0.1, 1.05, 1), fill=colour)
    elif name == "pear":
        draw.ellipse(box(-0.8, -0.1, 0.8, 1.1), fill=colour)
        draw.ellipse(box(-0.42, -0.9, 0.42, 0.5), fill=colour)
        line((0, -0.8), (0.2, -1.25))
    else:
        draw.polygon(points(*(STAR if name == "star" else ((0, -1), (1, 0.85), (-1, 0.85)))), fill=colour)


STALK, GREEN, DARK_GREEN = (120, 80, 40), (50, 140, 55), (20, 60, 20)
LEAF = ((0, -1.1), (0.5, -0.5), (0.6, 0.1), (0.3, 0.6), (0, 0.8), (-0.3, 0.6), (-0.6, 0.1), (-0.5, -0.5))
STAR = tuple(
    (reach * math.sin(math.pi * tip / 5), -reach * math.cos(math.pi * tip / 5))
    for tip in range(10)
    for reach in ((1.1, 0.45)[tip % 2],)
)
