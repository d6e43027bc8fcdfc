"""What stands between a recipe and the engine that samples for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

import torch

__all__ = ["Sampler"]

WeightsT = TypeVar("WeightsT", contravariant=True)
TaskT = TypeVar("TaskT", contravariant=True)
SamplesT = TypeVar("SamplesT", covariant=True)


class Sampler(Protocol[WeightsT, TaskT, SamplesT]):
    """Draws samples: from the policy in this process, from an inference engine, or from workers on other machines.

    A recipe calls `load` before it samples in each step and never looks behind the protocol, so that the engine can be
    exchanged without a change to the recipe.
    """

    def load(self, weights: WeightsT, version: int) -> None:
        """Sample with these weights from now on.

        Args:
            weights: the policy, unwrapped. An engine in the same process may keep a reference, others copy.
            version: steps that the weights have been trained for; an engine that copies need not copy a version twice.
        """
        ...

    def sample(self, tasks: Sequence[TaskT], n: int, generator: torch.Generator) -> SamplesT:
        """Draw samples with the weights loaded last.

        Args:
            tasks: what is sampled for, in the form that the engine reads, such as encoded prompts.
            n: samples of each task.
            generator: CPU generator, the only source of randomness; an engine that takes a seed draws it from this.

        Returns:
            The samples of task 0, then those of task 1, and so on.
        """
        ...
