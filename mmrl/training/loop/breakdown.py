"""Which columns of the held-out data an evaluation is broken down by."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mmrl.training.record.metrics import metric_label

MOST_VALUES = 8
"""A column with more values than this is not broken down by unless it is asked for."""
LONGEST_VALUE = 40
NOT_PARTS = ("answer", "completion_lengths")
"""Columns that say what is right, not what kind of question it is."""


def parts_of_tasks(columns: Sequence[Mapping[str, Any]], by: Sequence[str] | None) -> list[dict[str, str]]:
    """Value of each task in the columns that the evaluation is broken down by."""
    names = list(dict.fromkeys(name for task in columns for name in task))
    missing = [name for name in by or () if name not in names]
    if missing and columns:
        raise ValueError(f"evaluation.by names '{missing[0]}'; columns of the data: {', '.join(names) or 'none'}")
    chosen = [name for name in names if _is_part(name, columns)] if by is None else list(by)
    return [{name: str(task[name]) for name in chosen if task.get(name) is not None} for task in columns]


def part_metric(metric: str, column: str, value: str) -> str:
    """Name of a metric over the tasks with one value of a column, such as accuracy/greedy/hint=wrong."""
    return f"{metric}/{metric_label(column)}={metric_label(value)}"


def _is_part(name: str, columns: Sequence[Mapping[str, Any]]) -> bool:
    if name in NOT_PARTS:
        return False
    values = [task[name] for task in columns if task.get(name) is not None]
    if not all(isinstance(value, str | bool) and len(str(value)) <= LONGEST_VALUE for value in values):
        return False
    different = len(set(values))
    return 2 <= different <= MOST_VALUES and len(values) >= 2 * different
