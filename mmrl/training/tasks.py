"""The endless, seeded, resumable order in which a run visits its tasks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, Generic, TypeVar

import torch

from mmrl.errors import UserError
from mmrl.training.processes import make_generator

TaskT = TypeVar("TaskT")


class TaskStream(Generic[TaskT]):
    """Visits every task once an epoch, in an order that follows from (seed, epoch) alone."""

    def __init__(
        self,
        tasks: Sequence[TaskT],
        seed: int,
        *,
        fingerprint: Callable[[], str] | None = None,
        shuffle: bool = True,
    ) -> None:
        if not tasks:
            raise UserError("there are no training tasks")
        self.tasks = tasks
        self.seed = seed
        self.shuffle = shuffle
        self._fingerprint = fingerprint
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

    @cached_property
    def contents(self) -> str | None:
        """Digest of the tasks' contents; None where nobody gave one."""
        return None if self._fingerprint is None else self._fingerprint()

    def state_dict(self) -> dict[str, Any]:
        """Position in the endless order, and what the tasks are."""
        return {"position": self.position, "size": len(self.tasks), "contents": self.contents}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at a saved position."""
        if state["size"] != len(self.tasks):
            raise UserError(
                f"the checkpoint was made with {state['size']} training tasks, now there are {len(self.tasks)}; "
                "resume needs the same data"
            )
        saved = state.get("contents")  # the first release kept none
        if saved is not None and self.contents is not None and saved != self.contents:
            raise UserError(
                f"the checkpoint was made with other training tasks: as many ({len(self.tasks)}), but their contents "
                f"differ (digest {saved}, now {self.contents}); resume needs the same data; to train this model on "
                "other data, start a run with model.path=<checkpoint>/model and another output_dir"
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
