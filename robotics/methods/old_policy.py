"""The policy that an update starts from, for objectives that compare the means of its steps with the policy's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from diffusion.models.ema import EMAWeights
from mmrl.core.rollouts import Rollouts
from mmrl.errors import UserError
from mmrl.training.recipe import LossTerm, Passes, Step

if TYPE_CHECKING:
    from robotics.policies.base.action_policy import ActionPolicy


class OldPolicy(LossTerm):
    """A copy of the trained weights, refreshed before each update.

    Raises:
        UserError: the policy's decisions are not Gaussians of fixed noise.
    """

    name = "old_policy"
    gradient = "never"

    def __init__(self, policy: ActionPolicy) -> None:
        if not policy.has_means:
            raise UserError(
                "the objective needs the exact divergence from the policy before the update, which only model.kind "
                "flow with noise: fixed scores"
            )
        self._policy = policy
        self._weights = EMAWeights(policy)

    def prepare(self, passes: Passes, rollouts: Rollouts, step: Step) -> Rollouts:
        """Copy the weights."""
        self._weights.copy_()
        return rollouts

    def means(self, *inputs: Any) -> Tensor:
        """Means of decisions under the copy; before the policy's own pass, whose graph must not see a swap."""
        with torch.no_grad(), self._weights.applied():
            means: Tensor = self._policy("means", *inputs)
        return means
