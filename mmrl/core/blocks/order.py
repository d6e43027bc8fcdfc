"""Choice of the tasks that come next."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mmrl.core.block import Block
from mmrl.core.blocks.advantage import Advantage
from mmrl.core.state import ObjectiveState


@dataclass(frozen=True)
class TaskOrder(Block):
    """Chooses the tasks that come next."""

    def state(self, tasks: Sequence[Any] = ()) -> Any:
        """See `Block.state`; the state may depend on the training tasks."""
        return None

    def __call__(self, tasks: int, count: int, state: ObjectiveState, generator: torch.Generator) -> Tensor | None:
        """Draw tasks.

        Args:
            tasks: Number of training tasks.
            count: Number of tasks to draw.
            state: State of the objective's blocks.
            generator: CPU generator of this draw, the same in every process.

        Returns:
            Their indices (count,) int64; None for each task once per epoch, reshuffled every epoch.
        """
        raise NotImplementedError

    def conflicts(self, advantage: Advantage) -> Iterator[str]:
        """Yield why the order does not go with an estimator of advantages."""
        yield from ()


@dataclass(frozen=True)
class Epochs(TaskOrder):
    """Each task once per epoch, reshuffled every epoch."""

    kind = "epochs"

    def __call__(self, tasks: int, count: int, state: ObjectiveState, generator: torch.Generator) -> Tensor | None:
        return None

    def formula(self) -> str:
        return ""
