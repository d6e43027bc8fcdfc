"""The interface between a recipe and the engine that samples for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

from mmrl.training.processes import Streams

WeightsT = TypeVar("WeightsT", contravariant=True)
TaskT = TypeVar("TaskT", contravariant=True)
SamplesT = TypeVar("SamplesT", covariant=True)


class Sampler(Protocol[WeightsT, TaskT, SamplesT]):
    """Draws samples: from the policy in this process, from an inference engine, or from workers on other machines.

    A recipe calls `load` before it samples in each step and never looks behind the protocol, so that the engine can be
    exchanged without a change to the recipe.
    """

    def load(self, weights: WeightsT, version: int) -> None:
        """Sample with these weights from now on."""
        ...

    def close(self) -> None:
        """Free what the sampler started; it is not used again."""
        ...

    def sample(self, tasks: Sequence[TaskT], n: int, streams: Streams) -> SamplesT:
        """Draw samples with the weights loaded last."""
        ...
