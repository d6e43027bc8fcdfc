"""DiffusionNFT (arXiv 2509.16117; public code NVlabs/DiffusionNFT).

Images are drawn with a slowly moving `old` policy, without guidance and without noise. On noisy versions of them the
new velocity is mixed with the old one in both directions, v+ = b v + (1 - b) v_old and v- = (1 + b) v_old - b v; an
image's advantage decides how much v+ and v- have to predict it,

    L = mean (5 / b) [r |x+ - x_0|^2 / w+ + (1 - r) |x- - x_0|^2 / w-] + kl_coef mean |v - v_ref|^2,

with r = clip(A, +-5) / 10 + 1/2 and w the mean absolute error, a constant (`diffusion.matching.losses.nft_loss`). The
velocity distance to the start model is always part of the loss there; here `objective: {kl: {coef: 0}}` leaves it out.

Defaults are those of the GenEval run: b = 1, second-order solver with 10 steps, every grid time but the last of each
image, `old` schedule 1, evaluation average 0.9.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from diffusion.config import OWN_LOSS, DiffusionConfig, MatchingParts
from diffusion.matching.losses import nft_loss, nft_weight
from diffusion.matching.times import TimestepConfig
from diffusion.matching.velocity import FlowMatching
from diffusion.models.ema import NFT_SCHEDULES, EMAWeights, EvalEmaConfig, nft_old_decay
from diffusion.recipe import DiffusionRecipe
from diffusion.sampling.sampler import SamplerConfig
from mmrl.core.loss import Denominators, mean_metric
from mmrl.core.objectives.objective import LossOutput
from mmrl.core.rollouts import Rollouts
from mmrl.fields import bounded, choice, rare
from mmrl.training.objectives import ObjectiveConfig
from mmrl.training.recipe import Step


@dataclass
class NftSettings:
    """Options of the two-sided loss."""

    beta: float = rare(bounded(1.0, above=0))
    """Distance of the mixtures from the old velocity; 0.1 for OCR and several rewards."""
    old_schedule: int = rare(choice(1, lambda: NFT_SCHEDULES))
    """Share of itself that the old policy keeps: 0 none, 1 min(0.001 step, 0.5), 2 min(0.0075 (step - 75), 0.999)."""
    advantage_mode: str = rare(choice("all", lambda: ADVANTAGE_MODES))
    """all, positive_only, negative_only, one_only (1 or 0) or binary (the sign)."""


@dataclass
class DiffusionNftConfig(MatchingParts, DiffusionConfig):  # type: ignore[misc]  # the trainer is a narrower one
    """A DiffusionNFT run."""

    replaced_blocks: ClassVar[tuple[str, ...]] = OWN_LOSS
    nft: NftSettings = rare(field(default_factory=NftSettings))
    """The two-sided loss."""
    sampler: SamplerConfig = field(default_factory=lambda: SamplerConfig(steps=10, guidance=1.0, solver="dpm"))
    """Sampling of images."""
    timesteps: TimestepConfig = field(default_factory=lambda: TimestepConfig(count=9, times="discrete", fraction=0.99))
    """The noisy versions."""
    objective: ObjectiveConfig = field(default_factory=lambda: ObjectiveConfig(preset="flow_grpo", kl={"coef": 1e-4}))
    """Advantage and the weight of the distance to the start model."""
    eval_ema: EvalEmaConfig = field(default_factory=lambda: EvalEmaConfig(decay=0.9))
    """Moving average that evaluations use."""


class DiffusionNftRecipe(DiffusionRecipe):
    """Two-sided matching around an old policy; see the module."""

    config: DiffusionNftConfig
    process: FlowMatching
    own_loss = "diffusion_nft"

    def __init__(self, config: DiffusionNftConfig) -> None:
        super().__init__(config)
        self.process = FlowMatching(self.policy, config.sampler, config.timesteps)
        self.old = self.parts["old"] = EMAWeights(self.policy)

    @property
    def sampling_average(self) -> EMAWeights:
        """The old policy."""
        return self.old

    def advantages(self, rollouts: Rollouts, accelerator: Accelerator, step: Step) -> Rollouts:
        """Advantages in the configured mode."""
        rollouts = super().advantages(rollouts, accelerator, step)
        assert rollouts.advantage is not None
        return rollouts.replace(advantage=ADVANTAGE_MODES[self.config.nft.advantage_mode](rollouts.advantage))

    def loss(self, policy: nn.Module, minibatch: Rollouts, denominators: Denominators, step: Step) -> LossOutput:
        """Two-sided matching loss and the distance to the start model."""
        versions = self.process.noisy(minibatch)
        with torch.no_grad(), self.old.applied():  # before the policy's own pass, whose graph must not see a swap
            old = self.process.velocity(self.policy, minibatch, versions.rows)
        matching = self.process.evaluate(policy, minibatch, versions)
        assert minibatch.advantage is not None
        weight = nft_weight(matching.decisions.gather(minibatch.advantage))
        rows = nft_loss(matching.velocity, old, matching.noisy, matching.clean, weight, self.config.nft.beta)
        reference = self.process.reference_velocity(self.loss_reference, minibatch, matching.noisy)
        losses = matching.decisions.scatter(rows)
        output = matching.loss(losses, minibatch, denominators, reference, self.objective.kl_coef)
        kl_old = mean_metric(matching.distance(old).detach(), minibatch.loss_mask)
        return LossOutput(output.loss, output.metrics | {"policy/kl_old": kl_old})

    def describe(self) -> str:
        """Formula of the loss with its constants."""
        beta, weight = self.config.nft.beta, self.objective.kl_coef
        return f"mean (5 / {beta:g}) [r |x+ - x_0|^2 / w+ + (1 - r) |x- - x_0|^2 / w-] + {weight:g} mean |v - v_ref|^2"

    def on_step_end(self, step: Step, metrics: Mapping[str, float]) -> None:
        """Move the averages."""
        super().on_step_end(step, metrics)
        self.old.update(nft_old_decay(step.number, self.config.nft.old_schedule))


ADVANTAGE_MODES: dict[str, Callable[[Tensor], Tensor]] = {
    "all": lambda advantage: advantage,
    "positive_only": lambda advantage: advantage.clamp(min=0),
    "negative_only": lambda advantage: advantage.clamp(max=0),
    "one_only": lambda advantage: (advantage > 0).to(advantage.dtype),
    "binary": lambda advantage: advantage.sign(),
}
"""Choice of the advantages that are used, from (B, T) to (B, T)."""
