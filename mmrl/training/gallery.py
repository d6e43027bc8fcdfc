"""Rollouts as a report shows them: grouped by task, images inlined, the same questions before and after."""

from __future__ import annotations

import base64
import io
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmrl.training.samples import SampleRecord, read_samples, sample_steps

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["before_after", "sample_gallery"]

ROLLOUT_TASKS = 6
SAMPLES_PER_TASK = 8
COMPARED_TASKS = 12
TEXT_LIMIT = 4000
IMAGE_SIDE = 448

_REPEATED_MARK = re.compile(r"(<\|[^<>|]+\|>)\1+")
_MARK = re.compile(r"<\|[^<>|]+\|>")
_USER_TURN = re.compile(r"<\|im_start\|>user\n(.*?)<\|im_end\|>", re.DOTALL)
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ud800-\udfff]")


def sample_gallery(run_dir: Path) -> dict[str, Any] | None:
    """Rollouts of the last training step that kept some, task by task.

    Args:
        run_dir: The run folder.

    Returns:
        `note`, `rewards` (whether there are any) and `tasks`; None where the run kept no rollouts.
    """
    steps = sample_steps(run_dir, "train")
    groups = _by_task(read_samples(run_dir, steps[-1], "train")) if steps else {}
    if not groups:
        return None
    shown = list(groups.values())[:ROLLOUT_TASKS]
    rewards = any(record.reward is not None for group in shown for record in group)
    note = f"The first {len(shown)} of the {len(groups)} tasks kept from step {steps[-1]}, not selected."
    return {"note": note, "rewards": rewards, "tasks": [_rollout_task(group) for group in shown]}


def before_after(runs: Sequence[tuple[str, Path]]) -> dict[str, Any] | None:
    """Answers to the same held-out questions at the start of each run and at the end of the last.

    Args:
        runs: (name, folder) of each run, the first one first.

    Returns:
        `note`, `columns` and `tasks` with one side a column; None where fewer than two evaluations kept answers.
    """
    columns = _evaluation_columns(runs)
    if len(columns) < 2:
        return None
    last = columns[-1][1]
    kept = [(label, groups) for label, groups in columns if set(groups) & set(last)]
    shared = [task for task in last if sum(task in groups for _, groups in kept) > 1]
    if len(kept) < 2 or not shared:
        return None
    tasks = [
        {**_task_view(last[task][0]), "sides": [_side(groups.get(task)) for _, groups in kept]}
        for task in shared[:COMPARED_TASKS]
    ]
    note = f"The first {len(tasks)} of the {len(shared)} questions kept from both evaluations, not selected."
    return {"note": note, "columns": [label for label, _ in kept], "tasks": tasks}


def _evaluation_columns(runs: Sequence[tuple[str, Path]]) -> list[tuple[str, dict[str, list[SampleRecord]]]]:
    columns = []
    for index, (name, folder) in enumerate(runs):
        steps = sample_steps(folder, "eval")
        wanted = steps[:1] if index < len(runs) - 1 else [*steps[:1], *steps[1:][-1:]]
        for step in wanted:
            when = "before" if step == 0 else "after"
            label = f"{when} {name}" if len(runs) > 1 else f"{when} training"
            groups = _by_task(read_samples(folder, step, "eval"))
            if groups:
                columns.append((f"{label} (step {step})", groups))
    return columns


def _by_task(records: Sequence[SampleRecord]) -> dict[str, list[SampleRecord]]:
    groups: dict[str, list[SampleRecord]] = {}
    for record in records:
        groups.setdefault(str(record.id), []).append(record)
    return groups


def _rollout_task(group: Sequence[SampleRecord]) -> dict[str, Any]:
    terms = list(dict.fromkeys(term for record in group for term in record.terms))
    samples = [
        {
            "response": _readable(record.response),
            "reward": _show(record.reward),
            "terms": [_show(record.terms.get(term)) for term in terms],
            "advantage": _show(record.advantage, signed=True),
            "tone": _tone(record.advantage),
            "finish": record.finish or "–",
        }
        for record in group[:SAMPLES_PER_TASK]
    ]
    return {**_task_view(group[0]), "terms": terms, "samples": samples}


def _task_view(record: SampleRecord) -> dict[str, Any]:
    return {
        "id": _readable(str(record.id)),
        "question": _question(record.prompt),
        "prompt": _readable(record.prompt),
        "answer": None if record.answer in (None, "") else _readable(str(record.answer)),
        "images": [_data_uri(image) for image in record.images],
    }


def _side(group: Sequence[SampleRecord] | None) -> dict[str, Any] | None:
    if not group:
        return None
    record = group[0]
    remark = "" if record.reward is None else f"reward {_show(record.reward)}"
    return {"correct": record.correct, "remark": remark, "response": _readable(record.response)}


def _question(prompt: str) -> str:
    turns = _USER_TURN.findall(prompt)
    return _readable(_MARK.sub("", turns[-1]).strip() if turns else prompt)


def _readable(text: str) -> str:
    text = _REPEATED_MARK.sub(lambda run: f"{run[1]}×{len(run[0]) // len(run[1])}", text)
    text = _CONTROL.sub("\ufffd", text)
    hidden = len(text) - TEXT_LIMIT
    return text if hidden <= 0 else f"{text[:TEXT_LIMIT]}… ({hidden} more characters)"


def _show(value: float | None, signed: bool = False) -> str:
    if value is None or not math.isfinite(value):
        return "–"
    return f"{value:+.3f}" if signed else f"{value:.4g}"


def _tone(advantage: float | None) -> str:
    if advantage is None or not math.isfinite(advantage) or advantage == 0:
        return ""
    return "good" if advantage > 0 else "bad"


def _data_uri(image: Image) -> str:
    small = image if image.mode in ("RGB", "RGBA", "L") else image.convert("RGB")
    if max(small.size) > IMAGE_SIDE:
        small = small.copy()
        small.thumbnail((IMAGE_SIDE, IMAGE_SIDE))
    buffer = io.BytesIO()
    small.save(buffer, format="PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode("ascii")
