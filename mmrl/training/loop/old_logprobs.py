"""The log-probabilities of the old policy, the denominator of the importance ratio, and where they come from."""

from __future__ import annotations

from enum import Enum

from torch import Tensor

from mmrl.core.rollouts import Rollouts
from mmrl.training.loop.settings import TrainerConfig


class OldLogProbs(Enum):
    """Source of `Rollouts.logp_old`; every step of a run uses the same one.

    The old policy is the one that the update starts from. Where a step takes one optimiser step only, the policy that
    the loss is computed with *is* the old one, so its own log-probabilities serve: the ratio is exactly 1 and a forward
    pass is saved. With several optimiser steps the old log-probabilities need a pass before the first of them.
    """

    SAMPLER = "sampler"
    """As recorded while sampling (`trainer.old_logp: sampler`); rounding in the sampler's kernels is in the ratio."""
    PASS_BEFORE_UPDATE = "pass_before_update"
    """A forward pass of the policy before the update (`trainer.old_logp: recompute`)."""
    UPDATE = "update"
    """The forward pass of the update itself (`recompute` with one optimiser step a rollout step)."""

    @classmethod
    def of(cls, trainer: TrainerConfig) -> OldLogProbs:
        """The source that a configuration asks for."""
        if trainer.old_logp == "sampler":
            return cls.SAMPLER
        return cls.UPDATE if trainer.single_update else cls.PASS_BEFORE_UPDATE

    def before_update(self, rollouts: Rollouts, logp: Tensor) -> Rollouts:
        """Put the log-probabilities (B, T) of a pass before the update in place, unless the sampler's are used."""
        return rollouts if self is OldLogProbs.SAMPLER else rollouts.replace(logp_old=logp)

    def in_update(self, minibatch: Rollouts, logp: Tensor) -> Rollouts:
        """Put the log-probabilities (B, T) of the update's own pass in place, where they are the old ones.

        Gradient: none flows into `logp_old`.
        """
        return minibatch.replace(logp_old=logp.detach()) if self is OldLogProbs.UPDATE else minibatch
