"""Choosing one of several answers by comparing two at a time; pure functions of a judge's verdicts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Verdict:
    """A judge's preference between answers a and b, asked in both orders."""

    shown_first: int | None
    """1 or 2 where a was shown as number 1; None where the judgement could not be read."""
    shown_second: int | None
    """1 or 2 where a was shown as number 2."""

    @property
    def wins(self) -> float:
        """Share of the two orders in which a is preferred; an unreadable judgement counts half."""
        first = 0.5 if self.shown_first is None else float(self.shown_first == 1)
        second = 0.5 if self.shown_second is None else float(self.shown_second == 2)
        return (first + second) / 2

    @property
    def agrees(self) -> bool:
        """Whether both orders prefer the same answer."""
        return None not in (self.shown_first, self.shown_second) and self.shown_first != self.shown_second


@dataclass(frozen=True)
class Match:
    """Two different answers to one question that are to be compared."""

    question: int
    a: int
    b: int


Compare = Callable[[Sequence[Match]], Sequence[Verdict]]
"""A judge: the verdict of each match."""


def choose(votes: Sequence[Sequence[int]], protocol: str, compare: Compare) -> list[int]:
    """Choose one answer to each question.

    round_robin compares every two different answers. Their scores are those of all responses compared with one
    another, equal ones drawn: answer i with v_i votes has sum_j v_j wins(i, j) + (v_i - 1) / 2. knockout compares
    neighbours, and the winners again, until one is left. Draws go to the answer with more votes, then to the earlier.
    """
    return PROTOCOLS[protocol](votes, compare)


def majority(votes: Sequence[int]) -> int:
    """Index of the answer with the most votes, the first of equals."""
    return max(range(len(votes)), key=lambda index: (votes[index], -index))


def _round_robin(votes: Sequence[Sequence[int]], compare: Compare) -> list[int]:
    matches = [Match(n, a, b) for n, own in enumerate(votes) for b in range(len(own)) for a in range(b)]
    scores = [[(count - 1) / 2 for count in own] for own in votes]
    for match, verdict in zip(matches, compare(matches) if matches else [], strict=True):
        own = votes[match.question]
        scores[match.question][match.a] += own[match.b] * verdict.wins
        scores[match.question][match.b] += own[match.a] * (1 - verdict.wins)
    return [
        max(range(len(own)), key=lambda index: (score[index], own[index], -index))
        for own, score in zip(votes, scores, strict=True)
    ]


def _knockout(votes: Sequence[Sequence[int]], compare: Compare) -> list[int]:
    left = [list(range(len(own))) for own in votes]
    while matches := [Match(n, *own[k : k + 2]) for n, own in enumerate(left) for k in range(0, len(own) - 1, 2)]:
        beaten = {
            (match.question, _loser(match, verdict, votes[match.question]))
            for match, verdict in zip(matches, compare(matches), strict=True)
        }
        left = [[index for index in own if (n, index) not in beaten] for n, own in enumerate(left)]
    return [own[0] for own in left]


def _loser(match: Match, verdict: Verdict, votes: Sequence[int]) -> int:
    if verdict.wins == 0.5:
        return match.a if votes[match.b] > votes[match.a] else match.b
    return match.b if verdict.wins > 0.5 else match.a


PROTOCOLS: dict[str, Callable[[Sequence[Sequence[int]], Compare], list[int]]] = {
    "round_robin": _round_robin,
    "knockout": _knockout,
}
