"""False details for right answers, the details that a critique lists, and how well the two agree; needs no model.

    altered = insert_errors("3 cats and 2 dogs", rng)           # "3 cats and 7 dogs", ["number 2"]
    critique_score("number 2", altered.errors)                  # 1.0
    critique_score("number 1; number 2", altered.errors)        # 0.5

Critic-V has GPT-4o put 1 to 5 false details into an answer and scores a critique by the Jaccard index of what it lists
and what was put in, plus a tenth of GPT's mark from 0 to 10, rounded to two decimals. Here both are rules: the built-in
details are an answer's numbers, and two details are the same where their texts are, apart from case, spaces and closing
punctuation. Other ways to put errors in and a judge are the user's own functions.

Source: Zhang et al., Critic-V, arXiv 2411.18203; kyrieLei/Critic-V data_utils/inject, data_utils/score_compute.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mmrl.rewards.answers import Chat, completion_text, final_part, normalise

MOST_ERRORS = 5
"""Most false details in an answer, as in the paper."""
NUMBER = re.compile(r"\d+")
HEADING = re.compile(r"^\s*#+\s*critique\s*:?", re.IGNORECASE)
BULLET = re.compile(r"^\s*(?:[-*\u2022]|\d+[.)])\s+")
NOTHING = ("", "none", "nothing", "no errors", "no error", "no weaknesses", "correct")
"""Normalised critiques that find nothing wrong."""


@dataclass(frozen=True)
class Altered:
    """An answer with false details."""

    text: str
    errors: list[str]
    """The false details as a critique should list them."""


Insert = Callable[[str, int, np.random.Generator], Altered]
"""Puts up to a number of errors into a right answer; raises ValueError if it cannot put in any."""


def alter_numbers(answer: str, count: int, rng: np.random.Generator) -> Altered:
    """Replace some of an answer's numbers by others with as many digits; the k-th number is the detail "number k"."""
    found = list(NUMBER.finditer(answer))
    if not found:
        raise ValueError(f"the answer {answer!r:.80} has no number, which the built-in errors replace")
    indices = sorted(int(index) for index in rng.choice(len(found), min(count, len(found)), replace=False))
    text, end = "", 0
    for index in indices:
        text += answer[end : found[index].start()] + _other_number(found[index][0], rng)
        end = found[index].end()
    return Altered(text + answer[end:], [f"number {index + 1}" for index in indices])


def insert_errors(
    answer: str,
    rng: np.random.Generator,
    *,
    least: int = 1,
    most: int = MOST_ERRORS,
    insert: Insert = alter_numbers,
) -> Altered:
    """Put false details into a right answer.

    Args:
        answer: the right answer.
        rng: draws their number, evenly from least to most, and the details.
        least: fewest errors; 0 may leave the answer as it is.
        most: most errors.
        insert: puts them in.

    Raises:
        ValueError: the bounds are no bounds, the answer offers no detail, or nothing was changed.
    """
    if not 0 <= least <= most or most < 1:
        raise ValueError(f"least={least} and most={most} must be 0 <= least <= most, and most at least 1")
    count = int(rng.integers(least, most + 1))
    if count == 0:
        return Altered(answer, [])
    altered = insert(answer, count, rng)
    if not altered.errors or altered.text == answer:
        raise ValueError(f"no error was put into {answer!r:.80}; a false answer differs from the right one")
    return altered


def listed_details(critique: str) -> list[str]:
    """Details that a critique criticises: its lines, or parts between semicolons, without bullets."""
    body = HEADING.sub("", final_part(critique) or "")
    items = [normalise(BULLET.sub("", line)) for line in re.split(r"[;\n]", body)]
    return list(dict.fromkeys(item for item in items if item not in NOTHING))


def is_satisfied(critique: str) -> bool:
    """Whether a critique finds nothing wrong: it lists nothing, or has the word "correct" and not "incorrect".

    Source: kyrieLei/Critic-V inference/reason_critic.py (its stopping rule).
    """
    text = critique.lower()
    return not listed_details(critique) or ("correct" in text and "incorrect" not in text)


def jaccard(listed: Sequence[str], inserted: Sequence[str]) -> float:
    """Intersection over union of the two lists; 1 if both are empty."""
    found, wanted = set(map(normalise, listed)), set(map(normalise, inserted))
    return len(found & wanted) / len(found | wanted) if found or wanted else 1.0


def f1(listed: Sequence[str], inserted: Sequence[str]) -> float:
    """Harmonic mean of precision and recall, 2 |A and B| / (|A| + |B|); 1 if both are empty."""
    found, wanted = set(map(normalise, listed)), set(map(normalise, inserted))
    return 2 * len(found & wanted) / (len(found) + len(wanted)) if found or wanted else 1.0


def critique_score(critique: str, inserted: Sequence[str], mark: float = 0.0) -> float:
    """Score of a critique: Jaccard index plus a tenth of a judge's mark, rounded to two decimals.

    Args:
        critique: text.
        inserted: the false details of the answer.
        mark: of a judge, from 0 to 10; 0 without one.

    Raises:
        ValueError: the mark is out of range.
    """
    if not 0 <= mark <= 10:
        raise ValueError(f"the judge's mark is {mark}; marks are from 0 to 10")
    return round(jaccard(listed_details(critique), inserted) + 0.1 * mark, 2)


def jaccard_reward(
    completions: Sequence[Chat], inserted: Sequence[Sequence[str] | None] | None = None, **_: Any
) -> list[float | None]:
    """Reward a critique by the Jaccard index of its listed details and the false ones in the column `inserted`.

    Rows without that column are questions of another kind and are not scored.
    """
    return _score_all(jaccard, completions, inserted)


def f1_reward(
    completions: Sequence[Chat], inserted: Sequence[Sequence[str] | None] | None = None, **_: Any
) -> list[float | None]:
    """Reward a critique by the F1 of the false details that it lists; otherwise as `jaccard_reward`."""
    return _score_all(f1, completions, inserted)


def _score_all(
    measure: Callable[[Sequence[str], Sequence[str]], float],
    critiques: Sequence[Chat],
    inserted: Sequence[Sequence[str] | None] | None,
) -> list[float | None]:
    wanted = [None] * len(critiques) if inserted is None else inserted
    if bad := next((errors for errors in wanted if not isinstance(errors, list | tuple | None)), None):
        raise ValueError(f"column 'inserted' is {bad!r:.80}; expected the list of an answer's false details")
    pairs = zip(critiques, wanted, strict=True)
    return [
        None if errors is None else measure(listed_details(completion_text(text)), errors) for text, errors in pairs
    ]


def _other_number(number: str, rng: np.random.Generator) -> str:
    """Another number with as many digits; the first digit of a long one is not 0."""
    low, high = (0, 10) if len(number) == 1 else (10 ** (len(number) - 1), 10 ** len(number))
    if len(number) > 18:  # more than an int64 holds: its last digit
        return number[:-1] + _other_number(number[-1], rng)
    drawn = int(rng.integers(low, high - 1))
    return str(drawn + (drawn >= int(number)))
