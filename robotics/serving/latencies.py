"""Latencies of answers, and reasons of refusals."""

from __future__ import annotations

from collections import Counter, deque

import numpy as np

KEPT = 10_000
"""Latest latencies from which quantiles are taken."""
MOST_REASONS = 50


class AnswerCounts:
    """Counts answers and refusals, and keeps the latest latencies."""

    def __init__(self) -> None:
        self.answers = 0
        self.rows = 0
        self.rows = 0  # sum of the batch sizes
        self.refused: Counter[str] = Counter()  # by reason
        self._infer_ms: deque[float] = deque(maxlen=KEPT)
        self._total_ms: deque[float] = deque(maxlen=KEPT)

    def add(self, infer_ms: float, total_ms: float, batch_size: int) -> None:
        """Count an answer."""
        self.answers += 1
        self.rows += batch_size
        self._infer_ms.append(infer_ms)
        self._total_ms.append(total_ms)

    def refuse(self, reason: str) -> bool:
        """Count a refusal; returns whether to log it: the first of each kind, with a limit on kinds."""
        kind = reason if reason in self.refused or len(self.refused) < MOST_REASONS else "further reasons"
        self.refused[kind] += 1
        return self.refused[kind] == 1

    def summary(self) -> str:
        """One line, such as `12 answers, 1 refused; policy median 4.1, 95 % 5.0, largest 6.2 ms; with waiting ...`."""
        text = f"{self.answers} answers"
        if self.refused:
            text += f", {self.refused.total()} refused"
        if not self.answers:
            return text
        batch = f"; {self.rows / self.answers:.1f} observations a call" if self.rows > self.answers else ""
        return f"{text}; policy {_quantiles(self._infer_ms)}; in all {_quantiles(self._total_ms)}{batch}"


def _quantiles(values: deque[float]) -> str:
    middle, high, largest = np.quantile(values, [0.5, 0.95, 1.0])
    return f"median {middle:.1f}, 95 % {high:.1f}, largest {largest:.1f} ms"
