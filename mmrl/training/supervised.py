"""Base of the recipes that learn from given data: a batch and a loss, without rewards."""

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
    """A batch and a loss: learning from given answers, demonstrations, images or pairs.

    A subclass supplies `batch`, and `loss` and `describe` where its loss is not the likelihood; `own_loss` names it.
    """

    objective: Any = None
    supervised: ClassVar[bool] = True

    @abstractmethod
    def batch(self, policy: PolicyT, tasks: Sequence[TaskT], streams: Streams, step: Step) -> Rollouts:
        """Make the rows of a step out of given data; see `Recipe.rollout`."""

    def loss(self, policy: nn.Module, minibatch: Rollouts, denominators: Denominators, step: Step) -> LossOutput:
        """Mean negative log-likelihood of the decisions."""
        scores = self.scores(policy, minibatch, self.loss_outputs)
        output = likelihood_loss(scores, minibatch, denominators)
        return self.plus_terms(output, policy, minibatch, scores, denominators, step)

    def rollout(self, policy: PolicyT, tasks: Sequence[TaskT], streams: Streams, step: Step) -> Rollouts:
        """The batch."""
        return self.batch(policy, tasks, streams, step)

    def score(self, rollouts: Rollouts, step: Step) -> Rollouts:
        """Given data has no reward."""
        return rollouts

    def advantages(self, rollouts: Rollouts, accelerator: Accelerator, step: Step) -> Rollouts:
        """Every row counts the same."""
        return rollouts

    @property
    def loss_outputs(self) -> frozenset[str]:
        """Log-probabilities, and what the terms read."""
        return frozenset({"logp"}).union(*(term.outputs for term in self.terms))

    def describe(self) -> str:
        """Formula of the loss."""
        return LIKELIHOOD if self.objective is None else str(self.objective.describe())
