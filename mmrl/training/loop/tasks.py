"""The endless, seeded, resumable order in which a run visits its tasks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import torch

from mmrl.errors import UserError
from mmrl.training.loop.seeds import make_generator

__all__ = ["TaskStream"]

TaskT = TypeVar("TaskT")


class TaskStream(Generic[TaskT]):
    """Visits every task once an epoch, in an order that follows from (seed, epoch) alone.

    Args:
        tasks: the training tasks.
        seed: seed of the run.
        shuffle: whether epochs are permuted; otherwise the given order repeats.

    Raises:
        UserError: there are no tasks.
    """

    def __init__(self, tasks: Sequence[TaskT], seed: int, *, shuffle: bool = True) -> None:
        if not tasks:
            raise UserError("there are no training tasks")
        self.tasks = tasks
        self.seed = seed
        self.shuffle = shuffle
        self.position = 0
        self._order: tuple[int, list[int]] | None = None

    @property
    def epoch(self) -> float:
        """Passes over the tasks so far."""
        return self.position / len(self.tasks)

    def next(self, count: int) -> list[TaskT]:
        """Return the next `count` tasks; epochs follow each other without a gap."""
        drawn = [self._at(self.position + offset) for offset in range(count)]
        self.position += count
        return drawn

    def state_dict(self) -> dict[str, Any]:
        """Position in the endless order."""
        return {"position": self.position, "size": len(self.tasks)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at a saved position.

        Raises:
            UserError: the data has another number of tasks than the run that was saved.
        """
        if state["size"] != len(self.tasks):
            raise UserError(
                f"the checkpoint was made with {state['size']} training tasks, now there are {len(self.tasks)}; "
                "resume needs the same data"
            )
        self.position = int(state["position"])

    def _at(self, position: int) -> TaskT:
        epoch, index = divmod(position, len(self.tasks))
        if not self.shuffle:
            return self.tasks[index]
        if self._order is None or self._order[0] != epoch:
            generator = make_generator(self.seed, "task-order", epoch)
            self._order = (epoch, torch.randperm(len(self.tasks), generator=generator).tolist())
        return self.tasks[self._order[1][index]]
