"""A run's progress in a notebook cell: one display that is replaced, instead of a line for each step."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Mapping
from html import escape
from typing import Any

EVERY_S = 1.0
"""Minimum number of seconds between two updates."""
LINES = 5
"""Number of evaluations that are shown."""


def in_notebook() -> bool:
    """Whether this process is a notebook kernel."""
    shell: Any = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return hasattr(shell, "kernel")


def reward_curve(metrics: Iterable[Mapping[str, Any]], width: int = 420, height: int = 90) -> str:
    """The mean reward over the steps as an SVG; empty if there are fewer than two steps."""
    points = [(row["step"], row["reward/mean"]) for row in metrics if isinstance(row.get("reward/mean"), int | float)]
    if len(points) < 2:
        return ""
    first, last = points[0][0], points[-1][0]
    values = [value for _, value in points]
    low, high = min(values), max(values)
    across, up = (width - 60) / max(last - first, 1), (height - 30) / ((high - low) or 1.0)
    places = ((5 + (step - first) * across, height - 20 - (value - low) * up) for step, value in points)
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    labels = ((width - 52, 14, f"{high:.3g}"), (width - 52, height - 20, f"{low:.3g}"))
    texts = [*labels, (5, height - 4, f"mean reward, steps {first} to {last}")]
    return (
        f'<svg width="{width}" height="{height}" role="img" aria-label="mean reward by step">'
        f'<polyline points="{path}" fill="none" stroke="#1f77b4" stroke-width="1.5"/>'
        + "".join(f'<text x="{x}" y="{y}" font-size="11" fill="currentColor">{text}</text>' for x, y, text in texts)
        + "</svg>"
    )


class NotebookSink:
    """A `mmrl.runs.tracking.Sink`: bar, time left, curve of the reward and evaluations.

    Args:
        total_steps: of the run.
        of_step: numbers of a step as text.
        of_evaluation: those of an evaluation.
    """

    def __init__(
        self,
        total_steps: int,
        of_step: Callable[[Mapping[str, float]], str],
        of_evaluation: Callable[[Mapping[str, float]], str],
    ) -> None:
        from IPython.display import display

        self._total, self._of_step, self._of_evaluation = total_steps, of_step, of_evaluation
        self._metrics: list[Mapping[str, Any]] = []
        self._evaluations: list[str] = []
        self._began = self._shown = time.monotonic()
        self._handle = display(self._html(), display_id=True)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show a step, unless the last update was less than a second ago."""
        self._metrics.append({"step": step, **metrics})
        if step >= self._total or time.monotonic() - self._shown >= EVERY_S:
            self._update()

    def evaluation(self, step: int, tag: str, split: str, metrics: Mapping[str, float]) -> None:
        """Show an evaluation."""
        self._evaluations.append(f"{tag}, {split}, step {step}: {self._of_evaluation(metrics)}")
        self._update()

    def truncate_after(self, step: int) -> None:
        """Forget steps that are repeated."""
        self._metrics = [row for row in self._metrics if row["step"] <= step]

    def close(self) -> None:
        """Show the latest state."""
        self._update()

    def _update(self) -> None:
        self._shown = time.monotonic()
        self._handle.update(self._html())

    def _html(self) -> Any:
        from IPython.display import HTML

        done = self._metrics[-1]["step"] if self._metrics else 0
        parts = [
            f"<progress value={done} max={self._total}></progress> step {done} of {self._total}{self._left(done)}",
            reward_curve(self._metrics),
            escape(self._of_step(self._metrics[-1])) if self._metrics else "",
            *(escape(line) for line in self._evaluations[-LINES:]),
        ]
        return HTML("".join(f"<div>{part}</div>" for part in parts if part))

    def _left(self, done: int) -> str:
        if not done or done >= self._total:
            return ""
        first = self._metrics[0]["step"]
        steps = done - first + 1
        seconds = (time.monotonic() - self._began) / steps * (self._total - done)
        return f", about {seconds / 60:.0f} min left" if seconds >= 90 else f", about {seconds:.0f} s left"
