"""DiffusionNFT (arXiv 2509.16117; public code NVlabs/DiffusionNFT).

Images are drawn with a slowly moving `old` policy, without guidance or noise. On noisy versions of them, the new
velocity is mixed with the old one in both directions, v+ = b v + (1 - b) v_old and v- = (1 + b) v_old - b v; an image's
advantage determines how much v+ and v- have to predict it,

    L = mean (5 / b) [r |x+ - x_0|^2 / w+ + (1 - r) |x- - x_0|^2 / w-] + kl_coef mean |v - v_ref|^2,

with r = clip(A, +-5) / 10 + 1/2 and w the mean absolute error, a constant (`diffusion.matching.losses.nft_loss`). In
the public code the velocity distance to the start model is always part of the loss; here, `objective: {kl: {coef: 0}}`
removes it.

Two more losses on the same noisy versions compare the images of a prompt (`nft.loss`): DGPO's group preference and
CRD's centred reward; see `diffusion.matching.group_losses` for the formulas. Differences from their code: group sums
are computed with the policy before the update rather than the current one (identical with one update per step); CRD
centres over the images of a prompt, as in the paper, rather than over a micro-batch of all prompts; images and losses
use the same guidance scale, `sampler.guidance`, whereas DGPO draws with 4.5 and trains without guidance, and CRD's
reference uses 4.5. CRD's temperature 0 and DGPO's switch to images of the old policy after 200 steps are not
implemented.

Defaults follow the GenEval run: b = 1, second-order solver with 10 steps, every grid time except the last for each
image, `old` schedule 1, evaluation average 0.9.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from diffusion.diffusion_config import OWN_LOSS, DiffusionConfig, MatchingParts
from diffusion.diffusion_recipe import DiffusionRecipe
from diffusion.matching.group_losses import DISTANCES, MATCHING_LOSSES, reference_weight
from diffusion.matching.times import TimestepConfig
from diffusion.matching.velocity import FlowMatching, Matching
from diffusion.models.ema import NFT_SCHEDULES, EMAWeights, EvalEmaConfig, nft_old_decay
from diffusion.sampling.latent_sampler import LatentSamplerConfig
from mmrl.core.loss import Denominators, mean_metric
from mmrl.core.objectives.objective import LossOutput, PolicyOutputs
from mmrl.core.rollouts import Rollouts
from mmrl.fields import bounded, choice, rare
from mmrl.training.objectives import ObjectiveConfig, make_objective
from mmrl.training.recipe import LossTerm, Passes, Step

GAIN, CONSTANT = "group_gain", "group_constant"
"""Extras (B, T) of rollouts: the values that groups are compared by, and (numbered) the constants of each group."""


@dataclass
class NftSettings:
    """Options of the two-sided loss."""

    loss: str = choice("two_sided", lambda: MATCHING_LOSSES)
    """two_sided: DiffusionNFT; group_preference: DGPO, arXiv 2510.08425; centred_reward: CRD, arXiv 2603.14128."""
    beta: float = rare(bounded(1.0, above=0))
    """two_sided: distance of the mixtures from the old velocity, 0.1 for OCR and multiple rewards; centred_reward:
    scale of the implied reward; group_preference: strength of the preference, 10 in its code."""
    clip: float = rare(bounded(0.05, above=0))
    """Clip range of group_preference for exp(old error - error)."""
    temperature: float | None = rare(bounded(None, at_least=0.02))
    """Temperature of the means of centred_reward, weighted by softmax(+-reward / temperature); none = plain means."""
    distance: str = rare(choice("squared", DISTANCES))
    """How centred_reward compares the implied with the given reward: squared, or cross_entropy of their sigmoids."""
    moving_reference: bool = rare(False)
    """Compare with the old policy instead of the start model in group_preference."""
    kl_floor: float | None = rare(bounded(None, at_least=0))
    """Weight of the distance to the start model for the worst images; it grows with the advantage up to
    `objective.kl.coef`, 1e-4 to 0.1 in CRD's code. none = the same for all images."""
    old_schedule: int = rare(choice(1, lambda: NFT_SCHEDULES))
    """Decay of the old policy: 0 none, 1 min(0.001 step, 0.5), 2 min(0.0075 (step - 75), 0.999), 3
    min(0.25 + 0.005 step, 0.999) for CRD, 4 min(0.001 step, 0.3) for DGPO."""
    sampling_schedule: int | None = rare(choice(None, lambda: (None, *NFT_SCHEDULES)))
    """Decay of a separate sampling policy: 0 for the trained policy (DGPO), 2 for CRD; none = use the old policy."""
    advantage_mode: str = rare(choice("all", lambda: ADVANTAGE_MODES))
    """all, positive_only, negative_only, one_only (1 or 0) or binary (the sign). The loss divides by 10, so one_only
    weights images by 0.6 or 0.5, and binary by 0.6, 0.5 or 0.4."""

    def validate(self) -> None:
        """Reject options that the loss does not read; raises ValueError."""
        readers = {"clip": "group_preference", "moving_reference": "group_preference"}
        readers |= {"temperature": "centred_reward", "distance": "centred_reward"}
        for name, reader in readers.items():
            if self.loss != reader and getattr(self, name) != getattr(NftSettings, name):
                raise ValueError(f"nft.{name} is {getattr(self, name)}, but nft.loss '{self.loss}' does not read it")


@dataclass
class DiffusionNftConfig(MatchingParts, DiffusionConfig):  # type: ignore[misc]  # the trainer is a narrower one
    """A DiffusionNFT run."""

    replaced_blocks: ClassVar[tuple[str, ...]] = OWN_LOSS
    nft: NftSettings = rare(field(default_factory=NftSettings))
    """The two-sided loss."""
    sampler: LatentSamplerConfig = field(
        default_factory=lambda: LatentSamplerConfig(steps=10, guidance=1.0, solver="dpm")
    )
    """Sampling of images."""
    timesteps: TimestepConfig = field(default_factory=lambda: TimestepConfig(count=9, times="discrete", fraction=0.99))
    """The noisy versions."""
    objective: ObjectiveConfig = field(default_factory=lambda: ObjectiveConfig(preset="flow_grpo", kl={"coef": 1e-4}))
    """Advantage and the weight of the distance to the start model."""
    eval_ema: EvalEmaConfig = field(default_factory=lambda: EvalEmaConfig(decay=0.9))
    """Moving average that evaluations use."""

    def validate(self) -> None:
        """Check that the parts fit together; raises ValueError."""
        super().validate()
        floor, coef = self.nft.kl_floor, make_objective(self.objective).kl_coef
        if floor is not None and not floor <= coef > 0:
            raise ValueError(f"nft.kl_floor {floor:g} must be at most objective.kl.coef {coef:g}, which is not 0")


class DiffusionNftRecipe(DiffusionRecipe):
    """Velocity matching around an old policy; see the module docstring."""

    config: DiffusionNftConfig
    process: FlowMatching
    own_loss = "diffusion_nft"

    def __init__(self, config: DiffusionNftConfig) -> None:
        super().__init__(config)
        self.process = FlowMatching(self.policy, config.sampler, config.timesteps)
        settings = config.nft
        self.rule = MATCHING_LOSSES[settings.loss](
            settings.beta,
            settings.clip,
            settings.temperature,
            distance=settings.distance,
            moving=settings.moving_reference,
        )
        self.old = self.parts["old"] = EMAWeights(self.policy)
        # both averages are parts of the recipe, so that checkpoints hold them
        self.drawing = self.old
        if settings.sampling_schedule is not None:
            self.drawing = self.parts["drawing"] = EMAWeights(self.policy)
        self.terms = [GroupGains(self)] if self.rule.compares else []

    @property
    def sampling_average(self) -> EMAWeights:
        """The old policy, or a separate average with `sampling_schedule`."""
        return self.drawing

    def advantages(self, rollouts: Rollouts, accelerator: Accelerator, step: Step) -> Rollouts:
        """Advantages in the configured mode, and the group constants."""
        found = super().advantages(rollouts, accelerator, step)
        assert found.advantage is not None
        found = found.replace(advantage=ADVANTAGE_MODES[self.config.nft.advantage_mode](found.advantage))
        if not self.rule.compares:
            return found
        # here all rows of a group are together; minibatches and micro-batches may split them later
        constants = self.rule.constants(rollouts.extras[GAIN], found)
        numbered = {f"{CONSTANT}_{number}": constant for number, constant in enumerate(constants)}
        return found.replace(extras=found.extras | numbered)

    def loss(self, policy: nn.Module, minibatch: Rollouts, denominators: Denominators, step: Step) -> LossOutput:
        """The matching loss and the distance to the start model."""
        matching, old = self.matching(policy, minibatch)
        assert minibatch.advantage is not None
        # sorted: the rule expects its constants in the order in which it has made them
        names = sorted(name for name in minibatch.extras if name.startswith(CONSTANT))
        constants = [matching.decisions.gather(minibatch.extras[name]) for name in names]
        rows = self.rule.rows(matching, old, matching.decisions.gather(minibatch.advantage), constants)
        reference = self.process.reference_velocity(self.loss_reference, minibatch, matching.noisy)
        losses = matching.decisions.scatter(rows)
        floor, coef = self.config.nft.kl_floor, self.objective.kl_coef
        # up to 1 for the best images: the coefficient itself is applied in `matching.loss`
        weight = None if floor is None else reference_weight(minibatch.advantage, floor, coef)
        output = matching.loss(losses, minibatch, denominators, reference, coef, weight)
        kl_old = mean_metric(matching.distance(old).detach(), minibatch.loss_mask)
        return LossOutput(output.loss, output.metrics | {"policy/kl_old": kl_old})

    def matching(self, policy: nn.Module, rollouts: Rollouts) -> tuple[Matching, Tensor]:
        """Velocities of the policy and of the old policy (M, C, H, W) on the noisy versions of some rows."""
        versions = self.process.noisy(rollouts)
        with torch.no_grad(), self.old.applied():  # before the policy's own pass: its graph must not see a swap
            old = self.process.velocity(self.policy, rollouts, versions.rows)
        return self.process.evaluate(policy, rollouts, versions), old

    def describe(self) -> str:
        """Formula of the loss with its constants."""
        floor, coef = self.config.nft.kl_floor, f"{self.objective.kl_coef:g}"
        weight = coef if floor is None else f"[{floor:g} + ({coef} - {floor:g}) a]"
        return f"{self.rule.formula()} + {weight} mean |v - v_ref|^2"

    def on_step_end(self, step: Step, metrics: Mapping[str, float]) -> None:
        """Update the averages."""
        super().on_step_end(step, metrics)
        settings = self.config.nft
        self.old.update(nft_old_decay(step.number, settings.old_schedule))
        if settings.sampling_schedule is not None:
            self.drawing.update(nft_old_decay(step.number, settings.sampling_schedule))


class GroupGains(LossTerm):
    """Values by which the loss compares groups, from the policy at the start of the update."""

    name = "group_gains"
    gradient = "never"

    def __init__(self, recipe: DiffusionNftRecipe) -> None:
        self.recipe = recipe

    def prepare(self, passes: Passes, rollouts: Rollouts, step: Step) -> Rollouts:
        """Compare the policy with the old one or the start model on all noisy versions."""
        gain = passes.scores(rollouts, frozenset(), self._gains).logp
        return rollouts.replace(extras={**rollouts.extras, GAIN: gain})

    def _gains(self, policy: nn.Module, rollouts: Rollouts, outputs: frozenset[str]) -> PolicyOutputs:
        recipe = self.recipe
        matching, old = recipe.matching(policy, rollouts)
        reference = recipe.process.reference_velocity(recipe.loss_reference or recipe.start, rollouts, matching.noisy)
        assert reference is not None
        return PolicyOutputs(matching.decisions.scatter(recipe.rule.gain(matching, old, reference)))


ADVANTAGE_MODES: dict[str, Callable[[Tensor], Tensor]] = {
    "all": lambda advantage: advantage,
    "positive_only": lambda advantage: advantage.clamp(min=0),
    "negative_only": lambda advantage: advantage.clamp(max=0),
    "one_only": lambda advantage: (advantage > 0).to(advantage.dtype),
    "binary": lambda advantage: advantage.sign(),
}
"""Which advantages are used, as functions from (B, T) to (B, T)."""
