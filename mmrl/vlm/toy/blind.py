"""The accuracy of a strategy that reads a question's text but never its image, which looking has to beat."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

SEEN_OFTEN = 5
"""Times a hint must have been seen with a kind of question before its usual answer is used."""

Row = Mapping[str, Any]


@dataclass
class BlindStrategy:
    """Answers from the kind of question and its hint alone."""

    usual: dict[str, str] = field(default_factory=dict)
    """Most frequent answer of each kind."""
    given_hint: dict[tuple[str, str], str] = field(default_factory=dict)
    """Most frequent answer of each kind with a certain hint, where that was seen often."""
    copies: dict[str, bool] = field(default_factory=dict)
    """Kinds for which copying the hint is right more often than the usual answer."""

    def answer(self, row: Row) -> str:
        """The answer to one question."""
        kind, hint = str(row["kind"]), str(row["hint_text"])
        if (kind, hint) in self.given_hint:
            return self.given_hint[kind, hint]
        return hint if hint and self.copies.get(kind, False) else self.usual.get(kind, "")

    def share(self, rows: Sequence[Row]) -> float:
        """Share of questions that it answers right."""
        return sum(self.answer(row) == row["answer"] for row in rows) / max(len(rows), 1)


def fit_blind(rows: Sequence[Row]) -> BlindStrategy:
    """Learn the best answers from the text alone."""
    strategy = BlindStrategy()
    for kind in sorted({str(row["kind"]) for row in rows}):
        own = [row for row in rows if row["kind"] == kind]
        strategy.usual[kind] = _most_frequent(own)
        hinted = [row for row in own if row["hint_text"]]
        copied = sum(row["hint_text"] == row["answer"] for row in hinted)
        strategy.copies[kind] = copied > sum(row["answer"] == strategy.usual[kind] for row in hinted)
        for hint in sorted({str(row["hint_text"]) for row in own}):
            same = [row for row in own if row["hint_text"] == hint]
            if len(same) >= SEEN_OFTEN:
                strategy.given_hint[kind, hint] = _most_frequent(same)
    return strategy


def _most_frequent(rows: Iterable[Row]) -> str:
    counts = Counter(str(row["answer"]) for row in rows)
    return max(sorted(counts), key=counts.__getitem__)
