"""Distillation of any policy: weights of the teacher's parts, and the term that adds them to advantages and loss.

    A_it <- task A_it + reward (log q_it - logp_old_it),    loss <- loss + divergence * mean D(p, q)

with p the policy and q the teacher. A domain supplies the teacher's log-probabilities and the exact divergence.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from mmrl.core.blocks.foreign import SOURCE
from mmrl.core.loss import Denominators, mean_metric, token_mean
from mmrl.core.objectives.objective import PolicyOutputs
from mmrl.core.rollouts import Rollouts
from mmrl.fields import SET, bounded, only_with
from mmrl.runs.run_log import stopwatch
from mmrl.training.objectives import ObjectiveConfig
from mmrl.training.recipe import LossTerm, Passes, Scorer, Step, TermLoss

LOGP_TEACHER = "logp_teacher"
"""Extra (B, T) of rollouts: the teacher's log-probabilities."""


@dataclass
class DistilWeights:
    """Weights of the teacher's terms and of the rewards."""

    reward: float = bounded(1.0, at_least=0)
    """Weight of logp_teacher - logp_old in the advantage of each sampled decision, such as a token."""
    divergence: float = bounded(0.0, at_least=0)
    """Weight of the exact divergence from the teacher, over all tokens or between Gaussian actions."""
    beta: float = only_with(bounded(0.5, at_least=0, at_most=1), divergence=SET)
    """Kind of divergence: 0 is KL(teacher || policy), 1 is KL(policy || teacher), and values in between give the
    generalised Jensen-Shannon divergence with this mixture, which is not available for Gaussian actions."""
    task: float = bounded(0.0, at_least=0)
    """Weight of the objective's own advantages, computed from the rewards; 0 means learning only from the teacher."""

    def validate(self) -> None:
        """Check that something is learned; raises ValueError."""
        if not (self.reward or self.divergence):
            raise ValueError(
                "distil.reward and distil.divergence are both 0, so nothing is learned from the teacher; set at "
                "least one of them"
            )


def importance_weighted() -> ObjectiveConfig:
    """The importance-weighted loss without clipping and without a KL to the initial policy."""
    return ObjectiveConfig(clip={"kind": "unclipped"}, kl={"kind": "none"}, aggregation={"kind": "token_mean"})


class TeacherTerm(LossTerm):
    """Scores samples with a teacher, rewards agreement with it, and adds the exact divergence from it to the loss.

    Args:
        weights: of the parts.
        score: gives the teacher's log-probabilities of rows.
        divergence: exact divergence (B, T) of the policy from the teacher, given the policy, rows and their scores.
        outputs: what `divergence` reads of the scores besides log-probabilities.
        teacher: how the formula names it.
    """

    name = "distillation"

    def __init__(
        self,
        weights: DistilWeights,
        score: Scorer,
        divergence: Callable[[nn.Module, Rollouts, PolicyOutputs], Tensor],
        outputs: frozenset[str] = frozenset(),
        teacher: str = "the teacher",
    ) -> None:
        self.weights, self.teacher = weights, teacher
        self._score, self._divergence = score, divergence
        self.outputs = outputs if weights.divergence else frozenset()
        self.gradient = "always" if weights.divergence else "never"

    def prepare(self, passes: Passes, rollouts: Rollouts, step: Step) -> Rollouts:
        """Add the teacher's log-probabilities of the rows."""
        with stopwatch("teacher_logp"):
            logp = passes.scores(rollouts, frozenset({"logp"}), self._score).logp
        return rollouts.replace(extras={**rollouts.extras, LOGP_TEACHER: logp})

    def teach(self, rollouts: Rollouts) -> Rollouts:
        """Weight the objective's advantages, and add the teacher's reward of each sampled decision."""
        assert rollouts.advantage is not None
        gain = rollouts.extras[LOGP_TEACHER] - rollouts.logp_old
        advantage = self.weights.task * rollouts.advantage + self.weights.reward * gain
        # a decision that was not sampled or executed may have a log-probability that is no number to learn from
        return rollouts.replace(advantage=torch.where(_sampled(rollouts) > 0, advantage, 0.0))

    def __call__(
        self, policy: nn.Module, minibatch: Rollouts, scores: PolicyOutputs, counts: Denominators, step: Step
    ) -> TermLoss:
        """The weighted mean of the divergence over all decisions; the sampled one is a metric."""
        mask = minibatch.loss_mask
        gap = scores.logp.detach() - minibatch.extras[LOGP_TEACHER]
        metrics = {"distil/kl_sampled": mean_metric(gap, _sampled(minibatch))}
        if not self.weights.divergence:
            return TermLoss({}, metrics)
        divergence = self._divergence(policy, minibatch, scores)
        loss = self.weights.divergence * token_mean(divergence, mask, counts)
        return TermLoss({"loss/distillation": loss}, metrics | {"distil/divergence": mean_metric(divergence, mask)})

    def formula(self) -> str:
        """Formula of the teacher's terms in advantages and loss."""
        weights = self.weights
        parts = [f"{weights.task:g} A_it"] if weights.task or not weights.reward else []
        parts += [f"{weights.reward:g} (log q_it - logp_old_it)"] if weights.reward else []
        lines = [f"distillation, with q = {self.teacher}:", f"     A_it <- {' + '.join(parts)}"]
        if weights.divergence:
            lines += [f"          + {weights.divergence:g} * mean D(p, q; beta {weights.beta:g})"]
        return "\n".join(lines)


def _sampled(rollouts: Rollouts) -> Tensor:
    """(B, T), 1 for the trained decisions of samples; given answers have another source."""
    source = rollouts.extras.get(SOURCE)
    return rollouts.loss_mask if source is None else rollouts.loss_mask * (source == 0)[:, None]
