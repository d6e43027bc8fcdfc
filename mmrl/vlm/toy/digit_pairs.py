"""Pairs of a right and a wrong answer to questions about digits, for preference optimisation."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from mmrl.vlm.data.media_rows import write_rows
from mmrl.vlm.toy.digits import QUESTIONS, question_rows


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
    """Write questions about scenes with a right and a wrong worked answer, in TRL's columns.

    Args:
        path: JSONL file to write; columns prompt (with <image>), images, chosen, rejected, and answer, kind, digits.
        count: number of pairs.
        split: "train" or "test", which choose disjoint scans.
        max_digits: scenes have 1 to this many digits.
        kinds: keys of `QUESTIONS`, drawn evenly.
        misread: share of wrong answers that misread a digit and answer accordingly; the others read all digits right
            and answer wrong.
        swapped: share of pairs whose sides are swapped, as noisy labels are.
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
