"""Questions about real handwritten digits: scenes of one to three digits that must be looked at and reasoned about.

The images are the UCI handwritten digits that scikit-learn ships (1797 scans of 8x8 pixels by 43 writers; E. Alpaydin
and C. Kaynak, UCI repository, 1998), enlarged and placed on textured backgrounds. Training and test scenes use
disjoint scans.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from mmrl.vlm.data.dataset import MakeRow, write_rows

CELL_PX = 56
"""Side of one digit's cell: four 28-pixel image tokens of Qwen2.5-VL."""
_REASONING = re.compile(r"<think>(.*?)</think>", re.DOTALL)
TEST_SCANS = 360
"""Scans held out for test scenes; the other 1437 are for training."""


@dataclass(frozen=True)
class Question:
    """One kind of question about the digits of a scene."""

    texts: tuple[str, ...]
    """Wordings, one drawn at random."""
    answer: Callable[[Sequence[int]], str]
    """Correct answer, from the digits from left to right."""
    min_digits: int = 1
    """Scenes with fewer digits do not get this question."""


@dataclass
class DigitScene:
    """Digits drawn side by side."""

    image: Image.Image
    digits: list[int]


def build_questions(
    path: str | Path,
    *,
    count: int = 1000,
    split: str = "train",
    max_digits: int = 3,
    kinds: Sequence[str] = ("read", "add", "largest", "smallest", "even", "above"),
    hint_share: float = 0.0,
    hint_rate: float = 1.0,
    show_hints: bool = True,
    noise: float | Sequence[float] = 0.1,
    readings: int = 1,
    scans: int = 0,
    seed: int = 0,
) -> Path:
    """Write questions about scenes as JSON lines next to their PNG images.

    Args:
        path: JSONL file to write; columns problem (with <image>), answer, images, completion, kind, hint (none,
            right or wrong), hint_text, digits (what the scene shows) and, with several strengths of noise, noise.
        count: number of questions.
        split: "train" or "test", which choose disjoint scans.
        max_digits: scenes have 1 to this many digits.
        kinds: keys of `QUESTIONS`, drawn evenly.
        hint_share: fraction of questions that carry a hint, a claimed answer that may be wrong.
        hint_rate: probability that a hint is right.
        show_hints: False leaves the hints out of the same scenes and questions.
        noise: strength of background texture and pixel noise, as a fraction of full contrast; given several, each scene
            draws one.
        readings: the reasoning in `completion` reads the digits 1 to this many times, a number drawn evenly.
        scans: use only the first so many scans of the split; 0 = all.
        seed: random seed.

    Returns:
        The file.

    Raises:
        ValueError: no strength of noise, or fewer than one reading.
    """
    if readings < 1:
        raise ValueError(f"readings is {readings}; the reasoning must read the digits at least once")
    if not isinstance(noise, int | float) and not len(noise):
        raise ValueError("noise is an empty list; set one or more strengths")
    options: dict[str, Any] = {"hint_share": hint_share, "hint_rate": hint_rate, "show_hints": show_hints}
    options |= {"max_digits": max_digits, "kinds": kinds, "noise": noise, "readings": readings, "scans": scans}
    return write_rows(Path(path), count, question_rows(split, seed, **options))


def question_rows(
    split: str,
    seed: int,
    *,
    max_digits: int,
    kinds: Sequence[str],
    hint_share: float,
    hint_rate: float,
    show_hints: bool,
    noise: float | Sequence[float],
    readings: int = 1,
    scans: int,
) -> MakeRow:
    """A function that draws the next question; arguments as for `build_questions`."""
    rng = np.random.default_rng([seed, 1 if split == "test" else 0])
    pool = scan_pool(split, scans)

    def make_row() -> tuple[Image.Image, dict[str, Any]]:
        kind = str(rng.choice(list(kinds)))
        question = QUESTIONS[kind]
        count = int(rng.integers(question.min_digits, max_digits + 1))
        strength = noise if isinstance(noise, int | float) else float(rng.choice(list(noise)))
        scene = draw_scene(rng, pool, count, strength)
        answer = question.answer(scene.digits)
        seen = " ".join(str(digit) for digit in scene.digits)
        claim = _claim(rng, question, scene.digits, hint_rate) if rng.random() < hint_share else ""
        wording = rng.choice(question.texts)
        claim = claim if show_hints else ""
        reasoning = " ".join([seen] * (int(rng.integers(1, readings + 1)) if readings > 1 else 1))
        return scene.image, {
            "problem": f"<image>{f'Hint: {claim}. ' if claim else ''}{wording}",
            "answer": answer,
            "completion": f"<think>{reasoning}</think><answer>{answer}</answer>",
            "kind": kind,
            "hint": "none" if not claim else "right" if claim == answer else "wrong",
            "hint_text": claim,
            "digits": seen,
            **({} if isinstance(noise, int | float) else {"noise": f"{strength:g}"}),
        }

    return make_row


def build_hints(
    path: str | Path,
    *,
    count: int = 1000,
    split: str = "train",
    digits: int = 1,
    hint: str = "none",
    hint_rate: float = 0.5,
    blind: bool = False,
    noise: float = 0.1,
    scans: int = 0,
    seed: int = 0,
) -> Path:
    """Write reading questions whose text contains a hint, so that copying competes with looking.

    Args:
        path: JSONL file to write; columns as in `build_questions`, plus hint_right.
        count: number of questions.
        split: "train" or "test", which choose disjoint scans.
        digits: digits to read in each scene.
        hint: "none" (the hint is ?), "mixed" (right with probability `hint_rate`, else ?),
            "noisy" (right with probability `hint_rate`, else wrong) or "wrong".
        hint_rate: see `hint`.
        blind: replace the image by a black one of the same size.
        noise: strength of background texture and pixel noise, as a fraction of full contrast.
        scans: use only the first so many scans of the split; 0 = all.
        seed: random seed.
    """
    if hint not in ("none", "mixed", "noisy", "wrong"):
        raise ValueError(f"hint is '{hint}'; allowed: none, mixed, noisy, wrong")
    rng = np.random.default_rng([seed, 3 if split == "test" else 2])
    pool = scan_pool(split, scans)

    def make_row() -> tuple[Image.Image, dict[str, Any]]:
        scene = draw_scene(rng, pool, digits, noise)
        answer = "".join(str(digit) for digit in scene.digits)
        shown, right = _hint(rng, answer, hint, hint_rate)
        image = Image.new("RGB", scene.image.size) if blind else scene.image
        return image, {
            "problem": f"<image>Hint: {shown}. Which number is shown?",
            "answer": answer,
            "completion": f"<think>{' '.join(answer)}</think><answer>{answer}</answer>",
            "hint_right": right,
        }

    return write_rows(Path(path), count, make_row)


def reads_digits(completions: Sequence[str], digits: Sequence[str], **_: Any) -> list[float]:
    """Reward 1 for a reasoning step that lists the digits of the scene in order, else 0."""
    said = [_REASONING.match(completion.strip()) for completion in completions]
    return [
        float(match is not None and match[1].split() == right.split())
        for match, right in zip(said, digits, strict=True)
    ]


def corpus() -> list[str]:
    """All words used by the questions, answers and roles, to train a tokenizer on."""
    numbers = [str(number) for number in range(28)]
    texts = [text for question in QUESTIONS.values() for text in question.texts]
    answers = [f"<think>{' '.join('0123456789')}</think><answer>{number}</answer>" for number in numbers]
    return [*(texts * 20), *(["Hint: ?. Which number is shown?"] * 20), *answers, "system user assistant"]


def build_model(path: str | Path, **options: Any) -> Path:
    """Build a tiny random model with the words of these questions; `options` are those of `build_tiny`."""
    from mmrl.vlm.toy.tiny_generic import build_tiny

    return build_tiny(path, corpus=corpus(), **options)


def _claim(rng: np.random.Generator, question: Question, digits: Sequence[int], rate: float) -> str:
    """The right answer with probability `rate`, else the answer to other digits."""
    answer = question.answer(digits)
    claim = answer
    if rng.random() >= rate:
        while claim == answer:
            claim = question.answer([int(digit) for digit in rng.integers(0, 10, len(digits))])
    return claim


def _hint(rng: np.random.Generator, answer: str, kind: str, rate: float) -> tuple[str, bool]:
    right = kind in ("mixed", "noisy") and bool(rng.random() < rate)
    if right:
        return answer, True
    if kind in ("none", "mixed"):
        return "?", False
    wrong = [str((int(digit) + int(rng.integers(1, 10))) % 10) for digit in answer]
    return "".join(wrong), False


@functools.cache
def scans_and_labels() -> tuple[np.ndarray, np.ndarray]:
    """(1797, 8, 8) scans in [0, 1] and their (1797,) digits."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    return digits.images / 16.0, digits.target


def scan_pool(split: str, scans: int = 0) -> np.ndarray:
    """Indices of the "train" or "test" scans; the first `scans` of them, 0 for all."""
    if split not in ("train", "test"):
        raise ValueError(f"split is '{split}'; allowed: train, test")
    order = np.random.default_rng(1998).permutation(len(scans_and_labels()[0]))
    pool = order[:TEST_SCANS] if split == "test" else order[TEST_SCANS:]
    return pool[:scans] if scans else pool


def draw_scene(rng: np.random.Generator, pool: np.ndarray, digits: int, noise: float) -> DigitScene:
    """Draw a scene of some digits side by side.

    Args:
        rng: chooses scans, sizes, places and background.
        pool: places of the scans to choose from, see `scan_pool`.
        digits: how many.
        noise: strength of background texture and pixel noise, as a fraction of full contrast.
    """
    images, labels = scans_and_labels()
    chosen = rng.choice(pool, size=digits)
    canvas = texture(rng, CELL_PX, CELL_PX * digits) * noise
    for place, index in enumerate(chosen):
        left = place * CELL_PX
        canvas[:, left : left + CELL_PX] += _enlarge(rng, images[index])
    canvas += rng.normal(0.0, 0.2 * noise, canvas.shape)
    ink = np.clip(canvas, 0.0, 1.0)
    light, dark = rng.uniform(0.75, 1.0, 3), rng.uniform(0.0, 0.25, 3)
    pixels = dark + ink[..., None] * (light - dark)
    return DigitScene(Image.fromarray((pixels * 255).astype(np.uint8)), [int(labels[index]) for index in chosen])


def _enlarge(rng: np.random.Generator, scan: np.ndarray) -> np.ndarray:
    side = int(rng.integers(50, CELL_PX + 1))
    glyph = Image.fromarray((scan * 255).astype(np.uint8)).resize((side, side), Image.Resampling.BICUBIC)
    cell = np.zeros((CELL_PX, CELL_PX))
    top, left = rng.integers(0, CELL_PX - side + 1, 2)
    cell[top : top + side, left : left + side] = np.asarray(glyph) / 255.0
    return cell


def texture(rng: np.random.Generator, height: int, width: int) -> np.ndarray:
    """Smooth stripes or clouds in [0, 1]."""
    if rng.random() < 0.5:
        angle, period = rng.uniform(0, np.pi), rng.uniform(6, 20)
        y, x = np.mgrid[0:height, 0:width]
        return np.asarray(0.5 + 0.5 * np.sin(2 * np.pi * (x * np.cos(angle) + y * np.sin(angle)) / period))
    coarse = Image.fromarray((rng.random((height // 14, max(width // 14, 1))) * 255).astype(np.uint8))
    return np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC)) / 255.0


QUESTIONS: dict[str, Question] = {
    "read": Question(
        ("Which digits are shown, from left to right?", "Read the digits from left to right."),
        lambda digits: "".join(str(digit) for digit in digits),
    ),
    "add": Question(
        ("What is the sum of the digits?", "Add up all the digits."),
        lambda digits: str(sum(digits)),
        min_digits=2,
    ),
    "largest": Question(
        ("Which digit is the largest?", "What is the largest digit?"),
        lambda digits: str(max(digits)),
        min_digits=2,
    ),
    "smallest": Question(
        ("Which digit is the smallest?", "What is the smallest digit?"),
        lambda digits: str(min(digits)),
        min_digits=2,
    ),
    "even": Question(
        ("How many digits are even?", "Count the even digits."),
        lambda digits: str(sum(digit % 2 == 0 for digit in digits)),
    ),
    "above": Question(
        ("How many digits are greater than 4?", "Count the digits above 4."),
        lambda digits: str(sum(digit > 4 for digit in digits)),
    ),
}


def build_pairs(
    path: str | Path,
    *,
    count: int = 1000,
    split: str = "train",
    max_digits: int = 3,
    kinds: Sequence[str] = tuple(QUESTIONS),
    misread: float = 0.5,
    swapped: float = 0.0,
    noise: float = 0.1,
    scans: int = 0,
    seed: int = 0,
) -> Path:
    """Write questions about scenes with a correct and an incorrect worked answer, in TRL's columns.

    Args:
        path: JSONL file to write; columns prompt (with <image>), images, chosen, rejected, and answer, kind, digits.
        count: number of pairs.
        split: "train" or "test", which choose disjoint scans.
        max_digits: scenes have 1 to this many digits.
        kinds: keys of `QUESTIONS`, drawn evenly.
        misread: fraction of wrong answers that misread a digit and answer accordingly; the others read all digits right
            and answer wrong.
        swapped: fraction of pairs whose sides are swapped, as noisy labels are.
        noise: strength of background texture and pixel noise, as a fraction of full contrast.
        scans: use only the first so many scans of the split; 0 = all.
        seed: random seed.

    Returns:
        The file.
    """
    hints: dict[str, Any] = {"hint_share": 0.0, "hint_rate": 1.0, "show_hints": False}
    next_question = question_rows(split, seed, max_digits=max_digits, kinds=kinds, noise=noise, scans=scans, **hints)
    rng = np.random.default_rng([seed, 5 if split == "test" else 4])

    def make_row() -> tuple[Image.Image, dict[str, Any]]:
        image, row = next_question()
        digits = [int(digit) for digit in row["digits"].split()]
        sides = [row["completion"], _wrong_answer(rng, row["kind"], digits, misread)]
        if rng.random() < swapped:
            sides.reverse()
        kept = {key: row[key] for key in ("answer", "kind", "digits")}
        return image, {"prompt": row["problem"], "chosen": sides[0], "rejected": sides[1], **kept}

    return write_rows(Path(path), count, make_row)


def _wrong_answer(rng: np.random.Generator, kind: str, digits: Sequence[int], misread: float) -> str:
    """A worked answer with one digit misread, or with all digits right and another scene's answer."""
    question = QUESTIONS[kind]
    other = list(digits)
    index = int(rng.integers(len(digits)))
    other[index] = (digits[index] + int(rng.integers(1, 10))) % 10
    if rng.random() < misread:
        return _worked(other, question.answer(other))
    answer = right = question.answer(digits)
    while answer == right:
        answer = question.answer([int(digit) for digit in rng.integers(0, 10, len(digits))])
    return _worked(digits, answer)


def _worked(digits: Sequence[int], answer: str) -> str:
    return f"<think>{' '.join(map(str, digits))}</think><answer>{answer}</answer>"
