"""ORW-CFM-W2, online reward-weighted flow matching (Fan et al., ICLR 2025; public code markerthu/orw-cfm).

Images drawn with `last_policy` are matched again, each weighted by its reward, and a bound on the Wasserstein distance
to the start model keeps the policy from collapsing onto the best image:

    L = mean w |v - (noise - x_0)|^2 + alpha mean |v - v_ref|^2,    w = exp(tau R).

W_2^2(p, p_ref) is at most e^{2L} times the integral of E |v - v_ref|^2 over time for L-Lipschitz velocities, which is
what the second term bounds. The paper's time runs from noise to image; here it runs the other way.

Faithful defaults: tau 0.5, alpha 1, raw rewards, no normalisation; `last_policy` is refreshed every `refresh_every`
steps (10 000 in the public CIFAR script, 1 here). With tau times the range of R far below 1 all weights are nearly
equal and the model mostly distils itself: `normalize_weights` divides by the mean weight, `center` subtracts each
prompt's mean reward. The public code couples noise and images by optimal transport within a minibatch for CIFAR; here
they are independent, as for its Stable Diffusion 3.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from diffusion.ema import EMAWeights
from diffusion.flow_matching import FlowMatchingConfig, FlowMatchingRecipe, mean_over_decisions
from mmrl.core.aggregation import Denominators
from mmrl.core.groups import group_center
from mmrl.core.metrics import Metric, mean_metric
from mmrl.core.objective import LossOutput
from mmrl.core.rollouts import Rollouts
from mmrl.fields import bounded, choice
from mmrl.training.loop.distributed import merge_lists
from mmrl.training.loop.objectives import ObjectiveConfig

__all__ = ["WEIGHTS", "OrwConfig", "OrwRecipe", "OrwSettings"]


@dataclass
class OrwSettings:
    """Weights of the images and of the distance to the start model."""

    weighting: str = choice("exp", lambda: WEIGHTS)
    """exp: exp(tau A); linear: 1 + A, at least 0; indicator: 1 where A > 0; advantage: A itself, of either sign."""
    tau: float = 0.5
    """Inverse temperature of `exp`."""
    normalize_weights: bool = False
    """Divide the weights by their mean over the step (of their absolute values)."""
    center: bool = False
    """Subtract from each reward the mean of its prompt."""
    refresh_every: int = bounded(1, at_least=1)
    """Steps after which images are drawn with the policy as it is then."""


def _objective() -> ObjectiveConfig:
    return ObjectiveConfig(preset="flow_grpo", kl={"coef": 1.0})


@dataclass
class OrwConfig(FlowMatchingConfig):
    """An ORW-CFM-W2 run; `objective.kl.coef` is alpha."""

    compares_samples: ClassVar[bool] = False
    orw: OrwSettings = field(default_factory=OrwSettings)
    """Weights of the images."""
    objective: ObjectiveConfig = field(default_factory=_objective)
    """Weight alpha of the distance to the start model, as kl_coef."""

    def validate(self) -> None:
        """Check that the parts fit together; raises ValueError."""
        super().validate()
        if self.orw.center and self.trainer.samples_per_task < 2:
            raise ValueError("orw.center compares the images of a prompt; trainer.samples_per_task must be at least 2")
        if self.combine != "sum":
            raise ValueError(f"combine is '{self.combine}'; weights are made of summed rewards, use sum")


class OrwRecipe(FlowMatchingRecipe):
    """Reward-weighted matching of the policy's own images; see the module."""

    config: OrwConfig
    loss_name: ClassVar[str | None] = "orw_cfm_w2"
    has_loss_terms: ClassVar[bool] = True

    def __init__(self, config: OrwConfig) -> None:
        super().__init__(config)
        self.last_policy = EMAWeights(self.policy) if config.orw.refresh_every > 1 else None

    def sampling_weights(self) -> AbstractContextManager[None]:
        """Those of the last refresh."""
        return nullcontext() if self.last_policy is None else self.last_policy.applied()

    def advantages(self, rollouts: Rollouts, accelerator: Accelerator) -> Rollouts:
        """Weights (B, T) of the matching errors in the place of advantages."""
        worth = self.worth(rollouts, accelerator)
        weight = WEIGHTS[self.config.orw.weighting](worth, self.config.orw.tau)
        weight = torch.where(rollouts.loss_mask > 0, weight, 0.0)
        if self.config.orw.normalize_weights:
            sums = merge_lists([(float(weight.abs().sum()), float(rollouts.loss_mask.sum()))], accelerator)
            mean = sum(total for total, _ in sums) / max(sum(count for _, count in sums), 1.0)
            weight = weight / max(mean, 1e-8)
        return rollouts.replace(advantage=weight.float())

    def worth(self, rollouts: Rollouts, accelerator: Accelerator) -> Tensor:
        """What the weights are made of (B, T): the reward, less its prompt's mean with `center`."""
        reward = rollouts.reward
        if self.config.orw.center:
            reward = group_center(reward, rollouts.group, rollouts.scored)
        return reward.nan_to_num()[:, None].expand_as(rollouts.mask)

    def loss(self, policy: nn.Module, minibatch: Rollouts, denominators: Denominators) -> LossOutput:
        """Weighted matching error and the distance to the start model."""
        matching = self.matched(policy, minibatch)
        mask = minibatch.loss_mask
        assert minibatch.advantage is not None
        error = matching.placed(matching.error)
        policy_term = mean_over_decisions(minibatch.advantage * error, minibatch, denominators)
        anchor, metrics = self.reference_term(matching, minibatch, denominators)
        metrics |= {
            "loss/policy": Metric.summed(policy_term.detach()),
            "loss/total": Metric.summed((policy_term + anchor).detach()),
            "matching/error": mean_metric(error, mask),
            "matching/weight": mean_metric(minibatch.advantage, mask),
        }
        return LossOutput(policy_term + anchor, metrics)

    def describe(self) -> str:
        """Formula of the loss with its constants."""
        orw = self.config.orw
        weight = f"w = {orw.weighting}, tau {orw.tau:g}"
        return f"mean w |v - (noise - x_0)|^2 + {self.objective.kl_coef:g} mean |v - v_ref|^2, {weight}"

    def on_step_end(self, step: int, metrics: Mapping[str, float]) -> None:
        """Refresh the sampling policy."""
        super().on_step_end(step, metrics)
        if self.last_policy is not None and step % self.config.orw.refresh_every == 0:
            self.last_policy.update(0.0)

    def state_dict(self) -> dict[str, Any]:
        """Counts and the sampling policy."""
        last = None if self.last_policy is None else self.last_policy.state_dict()
        return super().state_dict() | {"last_policy": last}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore `state_dict`."""
        super().load_state_dict(state)
        if self.last_policy is not None and state["last_policy"] is not None:
            self.last_policy.load_state_dict(state["last_policy"])


WEIGHTS: dict[str, Callable[[Tensor, float], Tensor]] = {
    "exp": lambda worth, tau: (tau * worth).exp(),
    "linear": lambda worth, tau: (1 + worth).clamp(min=0),
    "indicator": lambda worth, tau: (worth > 0).to(worth.dtype),
    "advantage": lambda worth, tau: worth,
}
"""From the worth A (B, T) of images to the weights of their matching errors."""
