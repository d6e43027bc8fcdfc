"""Signs: compute "7 f 5 g 2", in which each letter is an operation that only the rewards reveal. Text only.

A model that learned from worked answers with random operations computes well, and is right one time in three for each
letter of a problem, regardless of its numbers. So difficulty is the number of letters, and a policy learns which letter
means which operation. With a fraction of the letters' own operations (`guessed` below 1) it begins to learn sooner.

A judge and a meta judge of countdown without models: criteria that are computed, added one after the other.

The rubric is a list of criteria, a line each. The judge gives the share that an answer meets, and the meta judge adds
the next criterion once most answers earn most of what there is, as MPO's does against answers that only please the
judge.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np

from mmrl.files import write_atomically
from mmrl.rewards.answers import Chat, read_answer
from mmrl.vlm.toy.countdown import TEST_FOLD, evaluate


def _value(answer: str | None) -> tuple[float, list[int]]:
    try:
        value, numbers = evaluate(answer or "")
    except ValueError:
        return float("nan"), []
    return float(value), sorted(numbers)


CRITERIA: dict[str, Callable[[str | None, str, int], bool]] = {
    "it has an answer": lambda answer, numbers, target: answer is not None,
    "the answer is an expression": lambda answer, numbers, target: bool(_value(answer)[1]),
    "it uses each number once": lambda answer, numbers, target: _value(answer)[1] == sorted(map(int, numbers.split())),
    "it has the target's value": lambda answer, numbers, target: _value(answer)[0] == target,
}
"""Checks of an answer, given numbers and target, from the weakest to the strongest."""


def judge(
    prompts: Sequence[Chat],
    completions: Sequence[Chat],
    *,
    rubric: Sequence[str],
    numbers: Sequence[str],
    target: Sequence[int],
    **_: Any,
) -> list[float]:
    """Fraction of the rubric's criteria that an answer meets."""
    scores = []
    for asked, said, text, given, goal in zip(prompts, completions, rubric, numbers, target, strict=True):
        checks = [CRITERIA[line](read_answer(said, asked), given, goal) for line in text.splitlines()]
        scores.append(sum(checks) / len(checks))
    return scores


def stricter(rubric: str, samples: Sequence[Mapping[str, Any]], *, enough: float = 0.7) -> str:
    """The rubric with the next criterion added if the mean reward is at least `enough`."""
    missing = [line for line in CRITERIA if line not in rubric.splitlines()]
    mean = sum(sample["reward"] for sample in samples) / max(len(samples), 1)
    return f"{rubric}\n{missing[0]}" if missing and mean >= enough else rubric


MEANING = {"f": "+", "g": "-", "h": "*", "k": "-", "m": "*", "p": "+"}
"""Operation of each letter."""
LARGEST_VALUE = 60
"""Maximum intermediate result; the minimum is 0."""
QUESTION = "Compute {sum}."
MASK_TOKEN = "<|mask|>"


def build_problems(
    path: str | Path,
    *,
    count: int = 1000,
    split: str = "train",
    steps: Sequence[int] = (1, 2, 3),
    guessed: float = 0.0,
    hinted: float = 0.0,
    seed: int = 0,
) -> Path:
    """Write problems, each with a worked answer.

    Args:
        path: JSONL file to write; columns problem, answer, completion (the worked answer), steps (number of letters),
            hints (the steps of the worked answer) and teacher_responses (the worked answer alone).
        count: number of problems.
        split: "train" or "test", which are disjoint.
        steps: how many letters a problem has, drawn evenly.
        guessed: fraction of the operations of worked answers that are drawn at random instead of the letter's.
        hinted: fraction of the problems that end in the first steps of the worked answer, from one to all.
        seed: random seed.

    Returns:
        The file.

    Raises:
        ValueError: an unknown split or a problem without a letter.
    """
    if split not in ("train", "test"):
        raise ValueError(f"split is '{split}'; allowed: train, test")
    if not steps or min(steps) < 1:
        raise ValueError(f"steps is {list(steps)}; a problem needs at least one letter")
    rng, rows = np.random.default_rng([seed, split == "test"]), list[dict[str, Any]]()
    while len(rows) < count:
        row = _problem(rng, int(rng.choice(list(steps))), guessed)
        if row is not None and _is_held_out(row["problem"]) == (split == "test"):
            if rng.random() < hinted:
                row["problem"] = " ".join([row["problem"], *row["hints"][: rng.integers(1, len(row["hints"]) + 1)]])
            rows.append({"id": f"{Path(path).stem}-{len(rows):05d}", **row})
    write_atomically(Path(path), "".join(f"{json.dumps(row)}\n" for row in rows))
    return Path(path)


def build_model(path: str | Path, *, mask: bool = False, **options: Any) -> Path:
    """Build a tiny random Qwen3 for these problems, in which each number is one token; see `build_tiny_generic`.

    Args:
        path: folder to write.
        mask: whether the tokenizer has a mask token, as recipes of masked-diffusion models need.
        options: further options of `build_tiny_generic`.

    Returns:
        The folder.
    """
    from transformers import AutoTokenizer

    from mmrl.vlm.toy.tiny_generic import build_tiny_generic

    tokens = [str(number) for number in range(10, LARGEST_VALUE + 1)] + [MASK_TOKEN] * mask
    folder = build_tiny_generic(path, corpus=[QUESTION] * 100, tokens=tokens, **options)
    if mask:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        tokenizer.mask_token = MASK_TOKEN
        tokenizer.save_pretrained(folder)
    return folder


def _problem(rng: np.random.Generator, letters: int, guessed: float) -> dict[str, Any] | None:
    """A problem and its worked answer; None if a result leaves the range."""
    numbers = [int(number) for number in rng.integers(1, 10, letters + 1)]
    drawn = [str(letter) for letter in rng.choice(list(MEANING), letters)]
    value, shown, hints = numbers[0], str(numbers[0]), list[str]()
    for letter, number in zip(drawn, numbers[1:], strict=True):
        sign = str(rng.choice(list("+-*"))) if rng.random() < guessed else MEANING[letter]
        result = {"+": value + number, "-": value - number, "*": value * number}[sign]
        if not 0 <= result <= LARGEST_VALUE:
            return None
        hints.append(f"{value}{sign}{number}={result}")
        value, shown = result, f"{shown} {letter} {number}"
    worked = f"<think>{' '.join(hints)}</think><answer>{value}</answer>"
    return {
        "problem": QUESTION.format(sum=shown),
        "answer": str(value),
        "completion": worked,
        "steps": str(letters),
        "hints": hints,
        "teacher_responses": [{"model": "worked", "text": worked}],
    }


def _is_held_out(problem: str) -> bool:
    return int.from_bytes(blake2b(problem.encode(), digest_size=8).digest()) % TEST_FOLD == 0
