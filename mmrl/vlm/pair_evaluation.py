"""Held-out pairs: how often a policy, and its implicit reward, prefer the preferred side."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from mmrl.core.preference import PreferenceObjective
from mmrl.core.rollouts import Rollouts
from mmrl.training.loop.evaluation import Measure, Row, Trial, with_interval
from mmrl.training.record.outcomes import Outcome
from mmrl.training.record.samples import SampleRecord
from mmrl.vlm.payload import VlmPayload
from mmrl.vlm.task import VlmTask

ORDERS = {"logps/accuracies": "accuracy/likelier", "rewards/accuracies": "accuracy/rewards"}
"""Shares of pairs in the right order, and what evaluations call them."""


@dataclass
class PairMeasure(Measure[VlmTask]):
    """Order and margins of held-out pairs.

    The metrics are accuracy/likelier and, against the reference, accuracy/rewards, with Wilson intervals, the means of
    rewards/chosen, rewards/rejected, rewards/margins, logps/chosen and logps/rejected, and the count pairs/skipped.
    """

    make_pairs: Callable[[Sequence[VlmTask]], Rollouts | None]
    """Rollouts of questions with both sides, with the reference's log-probabilities; None where none can be used."""
    logp: Callable[[Rollouts], Tensor]
    """Log-probabilities (B, T) of rollouts under the policy."""
    objective: PreferenceObjective
    batch_tasks: int

    @property
    def batch_size(self) -> int:
        """Pairs that are scored together."""
        return self.batch_tasks

    def run(self, batch: Sequence[Trial[VlmTask]], start: int) -> list[Row]:
        """Score pairs; those that cannot be used are left out."""
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
                "prompt": payload.prompts[place].text,
                "sides": payload.texts[2 * place : 2 * place + 2],
                "numbers": {name: values[place] for name, values in columns.items()},
            }
            for place, task in enumerate(payload.tasks)
        ]

    def metrics(self, rows: Sequence[Row], tasks: Sequence[VlmTask]) -> dict[str, float]:
        """Shares in the right order with intervals, and means."""
        metrics = {"pairs/skipped": float(len(tasks) - len(rows))}
        for name in rows[0]["numbers"] if rows else ():
            values = [row["numbers"][name] for row in rows]
            if name in ORDERS:
                metrics |= with_interval(ORDERS[name], [[value] for value in values], None)
            else:
                metrics[name] = float(np.mean(values))
        return metrics

    def outcome(self, row: Row) -> Outcome:
        """Whether the pair is in the right order."""
        numbers = row["numbers"]
        return Outcome(row["task"].id, {label: numbers[name] for name, label in ORDERS.items() if name in numbers})

    def record(self, row: Row) -> SampleRecord:
        """Both sides, and whether they are in the right order."""
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
