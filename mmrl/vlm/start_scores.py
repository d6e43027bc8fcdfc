"""Log-probabilities that a policy gives to pairs before it is trained, kept by question."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from mmrl.core.rollouts import Rollouts
from mmrl.vlm.payload import VlmPayload
from mmrl.vlm.policy import VlmPolicy
from mmrl.vlm.task import VlmTask


class StartScores:
    """What the policy says at the start about both sides of each pair, a table by question.

    The reference of held-out pairs, and of training pairs where it is computed ahead. A table is filled once, before
    the first update, and is part of every checkpoint.
    """

    def __init__(self) -> None:
        self._tables: dict[str, dict[str, list[Tensor]]] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._tables

    def fill(
        self,
        name: str,
        policy: VlmPolicy,
        tasks: Sequence[VlmTask],
        make_pairs: Callable[[Sequence[VlmTask]], Rollouts | None],
        score: Callable[[VlmPolicy, Rollouts], Tensor],
        batch: int,
    ) -> None:
        """Score the pairs of a data set; an adapter is switched off, as for a reference.

        Args:
            name: of the table.
            policy: not yet trained.
            tasks: questions with both sides.
            make_pairs: rollouts of some questions, without those that cannot be used; None where none can.
            score: log-probabilities (B, T) of rollouts, without gradient.
            batch: questions scored together.
        """
        table: dict[str, list[Tensor]] = {}
        with torch.no_grad(), policy.disable_adapter() if policy.has_adapter else nullcontext():
            for start in range(0, len(tasks), batch):
                rollouts = make_pairs(tasks[start : start + batch])
                if rollouts is not None:
                    table |= _by_question(rollouts, score(policy, rollouts))
        self._tables[name] = table

    def of(self, name: str, rollouts: Rollouts) -> Tensor:
        """Log-probabilities (B, T) of the rows of some pairs, 0 behind each answer."""
        table = self._tables[name]
        payload = VlmPayload.of(rollouts)
        found = torch.zeros_like(rollouts.logp_old)
        placed: dict[int, int] = {}
        for row, group in enumerate(rollouts.group.tolist()):
            side = placed.get(group, 0)
            placed[group] = side + 1
            values = table[payload.tasks[group].id][side].to(found.device)
            found[row, : len(values)] = values
        return found

    def state_dict(self) -> dict[str, Any]:
        """The tables, each as the ids and lengths of its pairs and all numbers in one row."""
        state: dict[str, Any] = {}
        for name, table in self._tables.items():
            sides = [side for pair in table.values() for side in pair]
            numbers = torch.cat(sides) if sides else torch.zeros(0)
            state[name] = {"ids": list(table), "lengths": [len(side) for side in sides], "logp": numbers}
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore `state_dict`."""
        self._tables = {}
        for name, saved in state.items():
            sides = list(saved["logp"].split(saved["lengths"]))
            pairs = zip(saved["ids"], sides[::2], sides[1::2], strict=True)
            self._tables[name] = {key: [chosen, rejected] for key, chosen, rejected in pairs}


def _by_question(rollouts: Rollouts, logp: Tensor) -> dict[str, list[Tensor]]:
    tasks = VlmPayload.of(rollouts).tasks
    lengths = rollouts.lengths.tolist()
    table: dict[str, list[Tensor]] = {task.id: [] for task in tasks}
    for row, group in enumerate(rollouts.group.tolist()):
        table[tasks[group].id].append(logp[row, : lengths[row]].float().cpu())
    return table
