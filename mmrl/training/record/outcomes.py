"""What each task of an evaluation scored, so that evaluations of the same tasks can be compared in pairs."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mmrl.files import write_atomically
from mmrl.training.record.jsonlines import finite_or_none, read_jsonl


@dataclass
class Outcome:
    """Scores of one held-out task."""

    id: str
    """The task; the same in every evaluation of its split."""
    scores: dict[str, float]
    """Mean score of its samples by metric, such as accuracy/greedy; a sample that could not be scored is left out."""
    parts: dict[str, str] = field(default_factory=dict)
    """Value of each data column that the split is broken down by."""


def mean_outcomes(outcomes: Iterable[Outcome]) -> list[Outcome]:
    """Join the outcomes of each task: of its repeats and of several protocols."""
    joined: dict[str, Outcome] = {}
    collected: dict[str, dict[str, list[float]]] = {}
    for outcome in outcomes:
        joined.setdefault(outcome.id, Outcome(outcome.id, {}, dict(outcome.parts)))
        scores = collected.setdefault(outcome.id, {})
        for name, value in outcome.scores.items():
            if value == value:
                scores.setdefault(name, []).append(value)
    for task, scores in collected.items():
        joined[task].scores = {name: sum(values) / len(values) for name, values in scores.items()}
    return list(joined.values())


def write_outcomes(run_dir: Path, step: int, split: str, outcomes: Sequence[Outcome]) -> Path:
    """Write the outcomes of one evaluation; an earlier file of the same step and split is replaced."""
    path = _path(run_dir, step, split)
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = (json.dumps(finite_or_none(vars(outcome)), ensure_ascii=False, allow_nan=False) for outcome in outcomes)
    write_atomically(path, "".join(f"{line}\n" for line in lines))
    return path


def read_outcomes(run_dir: Path, step: int, split: str) -> dict[str, Outcome]:
    """Read the outcomes of one evaluation."""
    rows = read_jsonl(_path(run_dir, step, split))
    found = [_outcome(row) for row in rows if isinstance(row.get("id"), str)]
    return {outcome.id: outcome for outcome in found}


def _outcome(row: Mapping[str, object]) -> Outcome:
    scores, parts = row.get("scores"), row.get("parts")
    return Outcome(
        id=str(row["id"]),
        scores={name: float(value) for name, value in scores.items() if isinstance(value, int | float)}
        if isinstance(scores, dict)
        else {},
        parts={name: str(value) for name, value in parts.items()} if isinstance(parts, dict) else {},
    )


def _path(run_dir: Path, step: int, split: str) -> Path:
    return Path(run_dir) / "outcomes" / f"step-{step:06d}" / f"{split.replace('/', '.')}.jsonl"
