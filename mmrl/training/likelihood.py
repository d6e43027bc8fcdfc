"""Maximum likelihood of given answers."""

from __future__ import annotations

from mmrl.core.catalogue import get
from mmrl.core.loss import Denominators, mean_metric
from mmrl.core.objectives.objective import LossOutput, PolicyOutputs
from mmrl.core.rollouts import Rollouts

OBJECTIVE = get("sft")


def likelihood_loss(scores: PolicyOutputs, minibatch: Rollouts, denominators: Denominators) -> LossOutput:
    """Mean negative log-likelihood of the decisions; with advantage 1 the plain policy gradient is its gradient."""
    given = minibatch.replace(logp_old=scores.logp.detach(), advantage=minibatch.mask)
    output = OBJECTIVE.loss(scores, given, denominators)
    nll = mean_metric(-scores.logp, minibatch.loss_mask)
    return LossOutput(output.loss, {"loss/total": output.metrics["loss/total"], "loss/nll": nll})
