"""Pairs of a preferred and a rejected response to a question, or single responses with a label, in TRL's columns.

A side is a text, or chat turns that end with one assistant turn; turns that repeat the question before it are dropped.

Source: huggingface/trl docs/source/dataset_formats.md (columns prompt, chosen, rejected, completion, label, images).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from torch import Tensor

from mmrl.core.objectives.pairwise import PreferenceObjective
from mmrl.core.rollouts import Rollouts
from mmrl.runs.records import Outcome, SampleRecord
from mmrl.runs.statistics import with_interval
from mmrl.training.evaluation import Measure, Row, Trial
from mmrl.vlm.data.dataset import LoadedTasks
from mmrl.vlm.data.messages import last_turn
from mmrl.vlm.data.prompt import Prompt, VlmPayload
from mmrl.vlm.data.task import TaskError, VlmTask, check_no_media, shortened
from mmrl.vlm.engine.vlm_policy import VlmPolicy


@dataclass(frozen=True)
class PairColumns:
    """Names of the columns of a pair."""

    chosen: str
    rejected: str
    scores: tuple[str, str] | None = None
    """Columns of the two scores, if the loss reads them."""
    single: tuple[str, str] | None = None
    """Columns of a single response and its label (true if desirable), if the loss learns from such rows."""


def has_sides(tasks: Sequence[VlmTask], columns: PairColumns) -> bool:
    """Whether a dataset has the columns of both responses."""
    return bool(tasks) and all(name in tasks[0].columns for name in (columns.chosen, columns.rejected))


def has_labels(tasks: Sequence[VlmTask], columns: PairColumns) -> bool:
    """Whether a dataset has single responses with labels instead of pairs."""
    return bool(tasks) and columns.single is not None and _is_single(tasks[0], columns)


def keep_pairs(loaded: LoadedTasks, columns: PairColumns) -> LoadedTasks:
    """Read both responses to each question, or its only one, as texts, and skip the unusable ones.

    Args:
        loaded: questions with the columns of both sides, or of an answer and its label.
        columns: their names.

    Returns:
        The good ones, with the texts in their columns.

    Raises:
        UserError: a pair is bad and bad rows are errors, or none is left.
    """
    tasks, loaded.tasks = loaded.tasks, []
    read = _read_single if has_labels(tasks, columns) else _read_pair
    loaded.take(tasks, lambda task: replace(task, columns={**task.columns, **read(task, columns)}))
    loaded.check_left("the pairs")
    return loaded


def names_of(task: VlmTask, columns: PairColumns) -> tuple[str, ...]:
    """Columns of the preferred and the rejected response to a question, or of its only response."""
    if columns.single is not None and _is_single(task, columns):
        return columns.single[:1]
    return columns.chosen, columns.rejected


def sides_of(task: VlmTask, columns: PairColumns) -> tuple[str, ...]:
    """The preferred and the rejected text of a question that `keep_pairs` read, or its only response."""
    return tuple(task.columns[name] for name in names_of(task, columns))


def marks_of(task: VlmTask, columns: PairColumns) -> tuple[float, ...]:
    """1 for each desirable response among `sides_of`, 0 for the others."""
    if columns.single is not None and _is_single(task, columns):
        return (float(task.columns[columns.single[1]]),)
    return 1.0, 0.0


def tokenise_sides(
    policy: VlmPolicy, task: VlmTask, prompt: Prompt, columns: PairColumns, longest: int | None
) -> list[list[int]]:
    """Tokens of each response with the end token, never truncated."""
    banned = set(policy.banned_ids.tolist())
    room = policy.positions - len(prompt)
    limit = room if longest is None else min(room, longest)
    found: list[list[int]] = []
    for name, text in zip(names_of(task, columns), sides_of(task, columns), strict=True):
        ids = policy.encode_answer(prompt, text)
        if len(ids) > limit:
            message = (
                f"column '{name}' has {len(ids)} tokens, but after its prompt there is only room for {limit}; pairs "
                "are "
            )
            raise TaskError("long_side", task.id, f"{message}never truncated: shorten it, or remove such rows")
        if marked := banned & set(ids):
            token = policy.processor.tokenizer.convert_ids_to_tokens(min(marked))
            raise TaskError(
                "media_in_side", task.id, f"column '{name}' contains {token}, which is not allowed in a response"
            )
        found.append(ids)
    if len(found) == 2 and found[0] == found[1]:
        raise TaskError(
            "equal_sides", task.id, f"both responses have the same tokens: {shortened(sides_of(task, columns)[0])!r}"
        )
    return found


def _is_single(task: VlmTask, columns: PairColumns) -> bool:
    sides = (columns.chosen, columns.rejected)
    return columns.single is not None and columns.single[1] in task.columns and not any(map(task.columns.get, sides))


def _read_single(task: VlmTask, columns: PairColumns) -> dict[str, Any]:
    assert columns.single is not None
    answer, label = columns.single
    text, value = _text_of(task, answer), task.columns.get(label)
    if value not in (0, 1) or not isinstance(value, bool | int):
        raise TaskError("bad_label", task.id, f"column '{label}' is {value!r}; expected true (desirable) or false")
    return {answer: text}


def _read_pair(task: VlmTask, columns: PairColumns) -> dict[str, Any]:
    names = (columns.chosen, columns.rejected)
    texts = {name: _text_of(task, name) for name in names}
    if texts[columns.chosen] == texts[columns.rejected]:
        shown = shortened(texts[columns.chosen])
        raise TaskError("equal_sides", task.id, f"'{names[0]}' and '{names[1]}' are the same text: {shown!r}")
    for name in columns.scores or ():
        value = task.columns.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            message = f"column '{name}' is {value!r}; the loss needs a finite score of each side"
            raise TaskError("missing_score", task.id, message)
    return dict(texts)


def _text_of(task: VlmTask, name: str) -> str:
    cell = task.columns.get(name)
    if cell is None:
        columns = ", ".join(key for key, value in task.columns.items() if value is not None) or "none"
        raise TaskError("missing_side", task.id, f"no response in column '{name}'; the row's other columns: {columns}")
    text = cell if isinstance(cell, str) else last_turn(task, name, cell)
    if not text.strip():
        raise TaskError("empty_side", task.id, f"the response in column '{name}' is empty")
    check_no_media(task, name, text, "media_in_side")
    return text


ORDERS = {"logps/accuracies": "accuracy/likelier", "rewards/accuracies": "accuracy/rewards"}
"""Fractions of pairs in the correct order, and their names in evaluations."""


@dataclass
class PairMeasure(Measure[VlmTask]):
    """Order and margins of held-out pairs.

    The metrics are accuracy/likelier and, against the reference, accuracy/rewards, with Wilson intervals, the means of
    rewards/chosen, rewards/rejected, rewards/margins, logps/chosen and logps/rejected, and the count pairs/skipped.
    """

    make_pairs: Callable[[Sequence[VlmTask]], Rollouts | None]
    """Rollouts of questions with both responses, with the reference's log-probabilities; None if no question is
    usable."""
    logp: Callable[[Rollouts], Tensor]
    """Log-probabilities (B, T) of rollouts under the policy."""
    objective: PreferenceObjective
    batch_tasks: int

    @property
    def batch_size(self) -> int:
        """Number of pairs scored together."""
        return self.batch_tasks

    def run(self, batch: Sequence[Trial[VlmTask]], start: int) -> list[Row]:
        """Score pairs, skipping unusable ones."""
        rollouts = self.make_pairs([trial.task for trial in batch])
        if rollouts is None:
            return []
        index_of = {trial.task.id: trial.index for trial in batch}
        logp = self.logp(rollouts)
        numbers = self.objective.pair_numbers(self.objective.pairs(logp, rollouts))
        columns = {name: values.tolist() for name, values in numbers.items()}
        payload = VlmPayload.of(rollouts)
        return [
            {
                "index": index_of[task.id],
                "repeat": 0,
                "task": task,
                "prompt": payload.prompts[index].text,
                "sides": payload.texts[2 * index : 2 * index + 2],
                "numbers": {name: values[index] for name, values in columns.items()},
            }
            for index, task in enumerate(payload.tasks)
        ]

    def metrics(self, rows: Sequence[Row], tasks: Sequence[VlmTask]) -> dict[str, float]:
        """Fractions in the correct order with intervals, and means."""
        metrics = {"pairs/skipped": float(len(tasks) - len(rows))}
        for name in rows[0]["numbers"] if rows else ():
            values = [row["numbers"][name] for row in rows]
            if name in ORDERS:
                metrics |= with_interval(ORDERS[name], [[value] for value in values], None)
            else:
                metrics[name] = float(np.mean(values))
        return metrics

    def outcome(self, row: Row) -> Outcome:
        """Whether the pair is in the correct order."""
        numbers = row["numbers"]
        return Outcome(row["task"].id, {label: numbers[name] for name, label in ORDERS.items() if name in numbers})

    def record(self, row: Row) -> SampleRecord:
        """Both responses, and whether they are in the correct order."""
        task: VlmTask = row["task"]
        numbers = row["numbers"]
        preferred, rejected = row["sides"]
        return SampleRecord(
            id=task.id,
            prompt=row["prompt"],
            response=f"preferred: {preferred}\nrejected: {rejected}",
            images=task.load_images(),
            reward=numbers.get("rewards/margins"),
            terms=dict(numbers),
            correct=bool(numbers.get("rewards/accuracies", numbers["logps/accuracies"])),
        )
