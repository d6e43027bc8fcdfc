"""Maximum likelihood of answers that were given instead of sampled."""

from __future__ import annotations

from typing import ClassVar

from accelerate import Accelerator
from torch import nn

from mmrl.core.aggregation import Denominators
from mmrl.core.catalogue import get
from mmrl.core.metrics import mean_metric
from mmrl.core.objective import LossOutput
from mmrl.core.rollouts import Rollouts
from mmrl.training.loop.old_logprobs import OldLogProbs
from mmrl.training.loop.recipe import PolicyT, Recipe, TaskT

OBJECTIVE = get("sft")


class LikelihoodRecipe(Recipe[PolicyT, TaskT]):
    """The supervised stages of a recipe; to be inherited before the recipe of the domain.

    With advantage 1 the plain policy gradient is that of the negative log-likelihood.
    """

    uses_rewards: ClassVar[bool] = False

    def advantages(self, rollouts: Rollouts, accelerator: Accelerator) -> Rollouts:
        """Every token of an answer is wanted equally."""
        return rollouts.replace(advantage=rollouts.mask.clone())

    @property
    def old_logprobs(self) -> OldLogProbs:
        """Answers that were given have no old policy: the ratio is 1 in every update."""
        return OldLogProbs.UPDATE

    def loss(self, policy: nn.Module, minibatch: Rollouts, denominators: Denominators) -> LossOutput:
        """Mean negative log-likelihood of the answers' tokens; the metrics of a policy gradient are left out."""
        scores = self.scores(policy, minibatch, self.loss_outputs)
        output = OBJECTIVE.loss(scores, self.old_logprobs.in_update(minibatch, scores.logp), denominators)
        nll = mean_metric(-scores.logp, minibatch.loss_mask)
        return LossOutput(output.loss, {"loss/total": output.metrics["loss/total"], "loss/nll": nll})
