"""Base class of recipes that learn from given data: a batch and a loss, without rewards."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

from accelerate import Accelerator
from torch import nn

from mmrl.core.loss import Denominators
from mmrl.core.objectives.objective import LossOutput
from mmrl.core.rollouts import Rollouts
from mmrl.training.objectives import LIKELIHOOD, likelihood_loss
from mmrl.training.processes import Streams
from mmrl.training.recipe import PolicyT, Recipe, Step, TaskT


class SupervisedRecipe(Recipe[PolicyT, TaskT]):
    """A batch and a loss: learning from reference answers, demonstrations, images or pairs.

    A subclass supplies `batch`, and also `loss` and `describe` if its loss is not the likelihood; `own_loss` is the
    name of that loss.
    """

    objective: Any = None
    supervised: ClassVar[bool] = True
    no_signal = "no sample had a token or an action to learn"

    @abstractmethod
    def batch(self, policy: PolicyT, tasks: Sequence[TaskT], streams: Streams, step: Step) -> Rollouts:
        """Build the rows of a step from given data; see `Recipe.rollout`."""

    def loss(self, policy: nn.Module, minibatch: Rollouts, denominators: Denominators, step: Step) -> LossOutput:
        """Mean negative log-likelihood of the decisions."""
        scores = self.scores(policy, minibatch, self.loss_outputs)
        output = likelihood_loss(scores, minibatch, denominators)
        return self.plus_terms(output, policy, minibatch, scores, denominators, step)

    def rollout(self, policy: PolicyT, tasks: Sequence[TaskT], streams: Streams, step: Step) -> Rollouts:
        """The batch."""
        return self.batch(policy, tasks, streams, step)

    def score(self, rollouts: Rollouts, step: Step) -> Rollouts:
        """Return the rows unchanged: given data has no reward."""
        return rollouts

    def advantages(self, rollouts: Rollouts, accelerator: Accelerator, step: Step) -> Rollouts:
        """Give every row the same weight."""
        return rollouts

    @property
    def loss_outputs(self) -> frozenset[str]:
        """Log-probabilities, and the outputs that the terms need."""
        return frozenset({"logp"}).union(*(term.outputs for term in self.terms))

    def describe(self) -> str:
        """Formula of the loss."""
        return LIKELIHOOD if self.objective is None else str(self.objective.describe())
