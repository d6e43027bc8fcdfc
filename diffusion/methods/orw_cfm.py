"""ORW-CFM-W2, online reward-weighted flow matching (Fan et al., ICLR 2025; public code markerthu/orw-cfm).

Images drawn with `last_policy` are matched again with weights that depend on their rewards. A bound on the Wasserstein
distance to the start model keeps the policy from collapsing onto the best image:

    L = mean w |v - (noise - x_0)|^2 + alpha mean |v - v_ref|^2,    w = exp(tau R).

For L-Lipschitz velocities, W_2^2(p, p_ref) is at most e^{2L} times the integral of E |v - v_ref|^2 over time, which the
second term bounds. The paper's time runs from noise to image; here it runs from image to noise.

The defaults follow the paper: tau 0.5, alpha 1, raw rewards, no normalisation; `last_policy` is refreshed every
`refresh_every` steps (10 000 in the public CIFAR script, 1 here). If tau times the range of R is far below 1, all
weights are nearly equal and the model mostly distils itself. For this case, `normalize_weights` divides by the mean
weight and `center` subtracts the mean reward of each prompt. For CIFAR, the public code couples noise and images by
optimal transport within a minibatch; here they are independent, as in its Stable Diffusion 3 code.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from diffusion.diffusion_config import OWN_LOSS, DiffusionConfig, MatchingParts
from diffusion.diffusion_recipe import DiffusionRecipe
from diffusion.matching.velocity import FlowMatching
from diffusion.models.ema import EMAWeights
from mmrl.core.blocks.advantage import group_center
from mmrl.core.loss import Denominators, mean_metric
from mmrl.core.objectives.objective import LossOutput
from mmrl.core.payload import numbers
from mmrl.core.rollouts import Rollouts
from mmrl.fields import bounded, choice, rare
from mmrl.training.objectives import ObjectiveConfig
from mmrl.training.processes import merge_lists
from mmrl.training.recipe import Step


@dataclass
class OrwSettings:
    """Weights of the images and of the distance to the start model."""

    weighting: str = choice("exp", lambda: WEIGHTS)
    """exp: exp(tau A); linear: 1 + A, at least 0; indicator: 1 if A > 0, else 0; advantage: A itself."""
    tau: float = 0.5
    """Inverse temperature of `exp`."""
    normalize_weights: bool = False
    """Divide the weights by the mean of their absolute values over the step."""
    center: bool = False
    """Subtract the mean reward of the prompt from each reward."""
    refresh_every: int = rare(bounded(1, at_least=1))
    """Steps between refreshes of the sampling policy."""


@dataclass
class OrwConfig(MatchingParts, DiffusionConfig):  # type: ignore[misc]  # the trainer is a narrower one
    """An ORW-CFM-W2 run; `objective.kl.coef` is alpha."""

    compares_samples: ClassVar[bool] = False
    replaced_blocks: ClassVar[tuple[str, ...]] = ("advantage", "order", "scaling", *OWN_LOSS)
    orw: OrwSettings = field(default_factory=OrwSettings)
    """Weights of the images."""
    objective: ObjectiveConfig = field(default_factory=lambda: ObjectiveConfig(preset="flow_grpo", kl={"coef": 1.0}))
    """Weight alpha of the distance to the start model, as kl.coef."""

    def validate(self) -> None:
        """Check that the parts fit together; raises ValueError."""
        super().validate()
        if self.orw.center and self.trainer.samples_per_task < 2:
            raise ValueError("orw.center compares the images of a prompt; trainer.samples_per_task must be at least 2")


class OrwRecipe(DiffusionRecipe):
    """Reward-weighted matching of the policy's own images; see the module docstring. AC-Flow adds a critic."""

    config: Any
    process: FlowMatching
    own_loss = "orw_cfm_w2"
    target = "(noise - x_0)"
    """The target velocity, for the formula."""

    def __init__(self, config: DiffusionConfig) -> None:
        super().__init__(config)
        self.process = FlowMatching(self.policy, self.config.sampler, self.config.timesteps)
        refreshed = self.config.orw.refresh_every > 1  # otherwise the policy itself draws, and no copy is needed
        self.last_policy = self.parts["last_policy"] = EMAWeights(self.policy, enabled=refreshed)

    @property
    def sampling_average(self) -> EMAWeights:
        """The weights of the last refresh."""
        return self.last_policy

    def advantages(self, rollouts: Rollouts, accelerator: Accelerator, step: Step) -> Rollouts:
        """Weights (B, T) of the matching errors, computed from the rewards and stored as advantages."""
        reward = rollouts.reward
        if self.config.orw.center:
            # over scored rows only: NaN must not reach the mean of its group
            reward = group_center(reward, rollouts.group, rollouts.scored)
        # one weight per image, the same at each of its T times
        return self.weighted(rollouts, reward.nan_to_num()[:, None].expand_as(rollouts.mask), accelerator)

    def weighted(self, rollouts: Rollouts, advantage: Tensor, accelerator: Accelerator) -> Rollouts:
        """Convert advantages A (B, T) to weights (B, T) of the matching errors, stored as `advantage`."""
        settings: OrwSettings = self.config.orw
        # exp(0) is 1, so untrained decisions have to be excluded before taking the mean
        weight = torch.where(rollouts.loss_mask > 0, WEIGHTS[settings.weighting](advantage, settings.tau), 0.0)
        if settings.normalize_weights:
            sums = merge_lists([numbers([weight.abs().sum(), rollouts.loss_mask.sum()])], accelerator)
            # over all processes: a weight must not depend on which other images its process has drawn
            # |w| and not w: signed weights may add up to 0
            mean = sum(total for total, _ in sums) / max(sum(count for _, count in sums), 1.0)
            weight = weight / max(mean, 1e-8)
        return rollouts.replace(advantage=weight.float())

    def loss(self, policy: nn.Module, minibatch: Rollouts, denominators: Denominators, step: Step) -> LossOutput:
        """Weighted matching error and the distance to the start model."""
        assert minibatch.advantage is not None
        matching = self.process.evaluate(policy, minibatch)
        error, mask = matching.errors, minibatch.loss_mask
        own = {"matching/error": mean_metric(error, mask), "matching/weight": mean_metric(minibatch.advantage, mask)}
        reference = self.process.reference_velocity(self.loss_reference, minibatch, matching.noisy)
        # no clip and no ratio: the weights are constants and each step draws new images
        output = matching.loss(minibatch.advantage * error, minibatch, denominators, reference, self.objective.kl_coef)
        return LossOutput(output.loss, output.metrics | own)

    def describe(self) -> str:
        """Formula of the loss with its constants."""
        weight = f"w = {self.config.orw.weighting}, tau {self.config.orw.tau:g}"
        loss = f"mean w |v - {self.target}|^2 + {self.objective.kl_coef:g} mean |v - v_ref|^2"
        return f"{loss}, {weight}{self.process.scaling}"

    def on_step_end(self, step: Step, metrics: Mapping[str, float]) -> None:
        """Refresh the sampling policy."""
        super().on_step_end(step, metrics)
        if (step.number + 1) % self.config.orw.refresh_every == 0:
            self.last_policy.copy_()


WEIGHTS: dict[str, Callable[[Tensor, float], Tensor]] = {
    "exp": lambda advantage, tau: (tau * advantage).exp(),
    "linear": lambda advantage, tau: (1 + advantage).clamp(min=0),
    "indicator": lambda advantage, tau: (advantage > 0).to(advantage.dtype),
    "advantage": lambda advantage, tau: advantage,
}
"""Weights of the matching errors (B, T) as functions of advantages A (B, T) and tau."""
