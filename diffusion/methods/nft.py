"""DiffusionNFT (arXiv 2509.16117; public code NVlabs/DiffusionNFT).

Images are drawn with a slowly moving `old` policy, without guidance or noise. On noisy versions of them, the new
velocity is mixed with the old one in both directions, v+ = b v + (1 - b) v_old and v- = (1 + b) v_old - b v; an image's
advantage determines how much v+ and v- have to predict it,

    L = mean (5 / b) [r |x+ - x_0|^2 / w+ + (1 - r) |x- - x_0|^2 / w-] + kl_coef mean |v - v_ref|^2,

with r = clip(A, +-5) / 10 + 1/2 and w the mean absolute error, a constant (`diffusion.matching.losses.nft_loss`). In
the public code the velocity distance to the start model is always part of the loss; here, `objective: {kl: {coef: 0}}`
removes it.

Two more losses on the same noisy versions compare the images of a prompt (`nft.loss`): DGPO's group preference and
CRD's centred reward; see `diffusion.methods.nft` for the formulas. Differences from their code: group sums
are computed with the policy before the update rather than the current one (identical with one update per step); CRD
centres over the images of a prompt, as in the paper, rather than over a micro-batch of all prompts; images and losses
use the same guidance scale, `sampler.guidance`, whereas DGPO draws with 4.5 and trains without guidance, and CRD's
reference uses 4.5. CRD's temperature 0 and DGPO's switch to images of the old policy after 200 steps are not
implemented.

Defaults follow the GenEval run: b = 1, second-order solver with 10 steps, every grid time except the last for each
image, `old` schedule 1, evaluation average 0.9.

Losses of noisy versions that move the policy away from an old one: each image alone, or compared with its group.

With the velocities v of the policy, v_old and v_ref, the target u and the advantage A of an image, the row losses are

* two_sided (DiffusionNFT): `diffusion.matching.losses.nft_loss`
* group_preference (DGPO): w_g A l, where l = mean |v - u|^2 and w_g = sigmoid(beta mean_g A (l - l_ref)); constant
  if exp(l_old - l) has left 1 +- clip on the side towards which A moves it
* centred_reward (CRD): (5 / beta) [beta (R - mean_g R) - (a - mean_g a)]^2, where R = |v_old - u|^2 / w_old -
  |v - u|^2 / w is the reward that the policy implies, w the mean absolute error, a constant, and a = A / 10 + 1/2; or
  the cross-entropy of the same two differences, -(5 / beta) [p log q + (1 - p) log (1 - q)], where p = sigmoid(a -
  mean_g a) and q = sigmoid(beta (R - mean_g R))

w_g and the group means are computed with the policy at the start of the update and then stay constant. This needs an
extra pass, but allows micro-batches to split groups.

Shapes: B images, T noisy versions of each, M of the B * T with mask 1.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.nn import functional

from diffusion.diffusion_config import OWN_LOSS, DiffusionConfig, MatchingParts
from diffusion.diffusion_recipe import DiffusionRecipe
from diffusion.matching.losses import NFT_ADVANTAGE_LIMIT, NFT_ERROR_FLOOR, NoisyRows, nft_loss, nft_weight
from diffusion.matching.times import TimestepConfig
from diffusion.matching.velocity import FlowMatching, Matching
from diffusion.models.ema import NFT_SCHEDULES, EMAWeights, EvalEmaConfig, nft_old_decay
from diffusion.sampling.latent_sampler import LatentSamplerConfig
from mmrl.core.blocks.advantage import group_sum
from mmrl.core.loss import Denominators, mean_metric
from mmrl.core.objectives.objective import LossOutput, PolicyOutputs
from mmrl.core.rollouts import Rollouts
from mmrl.fields import bounded, choice, only_with, rare
from mmrl.training.objectives import ObjectiveConfig, make_objective
from mmrl.training.recipe import LossTerm, Passes, Step

DISTANCES = ("squared", "cross_entropy")
"""How CRD compares the implied reward with the given one."""


class MatchingLoss(ABC):
    """Loss of noisy versions, given the velocity of an old policy."""

    compares: ClassVar[bool] = False
    """Whether the loss has group constants; see `gain` and `constants`."""

    def __init__(
        self, beta: float, clip: float, temperature: float | None, *, distance: str = DISTANCES[0], moving: bool = False
    ) -> None:
        self.beta = beta
        self.clip = clip
        self.temperature = temperature
        self.distance = distance
        self.moving = moving

    @abstractmethod
    def rows(self, matching: Matching, old: Tensor, advantage: Tensor, constants: Sequence[Tensor]) -> Tensor:
        """Losses (M,) for the old velocity (M, ...), the advantages (M,) and the `constants` of their groups (M,)."""

    def gain(self, matching: Matching, old: Tensor, reference: Tensor) -> Tensor:
        """Values (M,) for `constants`, from velocities (M, ...) of the old policy and the reference."""
        raise NotImplementedError

    def constants(self, gain: Tensor, rollouts: Rollouts) -> list[Tensor]:
        """Constants of the update, each (B, T)."""
        raise NotImplementedError

    @abstractmethod
    def formula(self) -> str:
        """The loss with its constants."""


class TwoSided(MatchingLoss):
    """DiffusionNFT, arXiv 2509.16117."""

    def rows(self, matching: Matching, old: Tensor, advantage: Tensor, constants: Sequence[Tensor]) -> Tensor:
        return nft_loss(matching.velocity, old, matching.noisy, matching.clean, nft_weight(advantage), self.beta)

    def formula(self) -> str:
        return f"mean (5 / {self.beta:g}) [r |x+ - x_0|^2 / w+ + (1 - r) |x- - x_0|^2 / w-]"


class MatchingPreference(MatchingLoss):
    """DGPO, arXiv 2510.08425; X-GenGroup/Flow-Factory src/flow_factory/trainers/dgpo.py."""

    compares = True

    def rows(self, matching: Matching, old: Tensor, advantage: Tensor, constants: Sequence[Tensor]) -> Tensor:
        error = matching.error
        # exp(l_old - l), with the negative error as log-likelihood
        ratio = (matching.error_of(old) - error).detach().exp()
        # clipped only on the side towards which the advantage moves the ratio, as in PPO
        outside = torch.where(advantage > 0, ratio > 1 + self.clip, ratio < 1 - self.clip)
        # detached, not dropped: the row keeps its value in the mean and only loses its gradient
        return constants[0] * advantage * torch.where(outside, error.detach(), error)

    def gain(self, matching: Matching, old: Tensor, reference: Tensor) -> Tensor:
        return matching.error - matching.error_of(old if self.moving else reference)

    def constants(self, gain: Tensor, rollouts: Rollouts) -> list[Tensor]:
        assert rollouts.advantage is not None
        # a constant of the update, from the policy at its start; see the module docstring
        return [torch.sigmoid(self.beta * group_means(rollouts.advantage * gain, rollouts))]

    def formula(self) -> str:
        gain = "l - l_old" if self.moving else "l - l_ref"
        return f"mean w_g A l, w_g = sigmoid({self.beta:g} mean_g A ({gain})), exp(l_old - l) in 1 +- {self.clip:g}"


class CentredReward(MatchingLoss):
    """CRD, arXiv 2603.14128; X-GenGroup/Flow-Factory src/flow_factory/trainers/crd.py.

    With a temperature T the loss is the mean of two, centred by means with weights softmax(a / T) and softmax(-a / T).
    Squares are centred by the mean of the two means, which has the same gradient.
    """

    compares = True

    def rows(self, matching: Matching, old: Tensor, advantage: Tensor, constants: Sequence[Tensor]) -> Tensor:
        reward, wanted = self.beta * implied_reward(matching, old), nft_weight(advantage)
        if self.distance == "squared":
            # centred by constants, so the gradient flows through the row's own implied reward only
            return NFT_ADVANTAGE_LIMIT / self.beta * (reward - wanted - constants[0]).square()
        # `constants` has returned them in pairs: mean implied reward and mean given reward for each side
        found = [
            functional.binary_cross_entropy_with_logits(reward - own, torch.sigmoid(wanted - given), reduction="none")
            # see `constants`: even entries are means of R, odd ones means of a
            for own, given in zip(constants[::2], constants[1::2], strict=True)
        ]
        return NFT_ADVANTAGE_LIMIT / self.beta * torch.stack(found).mean(0)

    def gain(self, matching: Matching, old: Tensor, reference: Tensor) -> Tensor:
        return implied_reward(matching, old)

    def constants(self, gain: Tensor, rollouts: Rollouts) -> list[Tensor]:
        assert rollouts.advantage is not None
        wanted, sides = nft_weight(rollouts.advantage), list[Tensor | None]([None])
        if self.temperature is not None:
            sides = [(sign * wanted / self.temperature).exp() for sign in (1, -1)]  # at most exp(1 / T)
        if self.distance == "squared":
            # one difference is enough: the mean of a difference is the difference of the means
            off = self.beta * gain - wanted
            return [torch.stack([group_means(off, rollouts, side) for side in sides]).mean(0)]
        # the order that `rows` unpacks
        return [group_means(x, rollouts, side) for side in sides for x in (self.beta * gain, wanted)]

    def formula(self) -> str:
        weighted = "" if self.temperature is None else f", means by softmax(+-a / {self.temperature:g})"
        reward, wanted = f"{self.beta:g} (R - mean_g R)", "a - mean_g a"
        if self.distance == "squared":
            return f"mean (5 / {self.beta:g}) [{reward} - ({wanted})]^2{weighted}"
        return f"mean (5 / {self.beta:g}) cross-entropy of sigmoid({wanted}) and sigmoid({reward}){weighted}"


def reference_weight(advantage: Tensor, floor: float, coef: float) -> Tensor:
    """Weight of the distance to the start model: floor / coef at an advantage of -5, rising to 1 at 5 (CRD)."""
    # divided by coef, because the caller multiplies the distance by coef again
    least = floor / coef
    return least + nft_weight(advantage) * (1 - least)


def implied_reward(matching: Matching, old: Tensor) -> Tensor:
    """Reward (M,) float32 implied by the policy, computed in float64: how much closer it is than the old velocity."""
    new = _scaled_error(matching.velocity, matching.noisy)
    # the difference of two errors that are nearly equal at first, hence float64
    return (_scaled_error(old, matching.noisy).detach() - new).float()


def group_means(x: Tensor, rollouts: Rollouts, weight: Tensor | None = None) -> Tensor:
    """Weighted mean (B, T) of x (B, T) over the trained rows of each row's group, at each t; 0 if there are none."""
    share = rollouts.loss_mask if weight is None else rollouts.loss_mask * weight
    groups = rollouts.num_rows  # an upper bound, so that the host need not wait for the exact number
    # `where` and not a product: an untrained NaN times 0 would be NaN
    total = group_sum(torch.where(share > 0, share * x, 0.0), rollouts.group, groups)
    count = group_sum(share, rollouts.group, groups)
    # back to one value per row: all rows of a group share the mean
    return torch.where(count > 0, total / count, 0.0)[rollouts.group]


def _scaled_error(velocity: Tensor, noisy: NoisyRows) -> Tensor:
    """Squared error of velocities divided by their mean absolute error (M,) float64."""
    miss = (velocity.double() - noisy.target.double()).flatten(1)
    # detached as in `nft_loss`: it only scales, and a gradient would reward large errors
    return miss.square().mean(1) / miss.detach().abs().mean(1).clamp(min=NFT_ERROR_FLOOR)


MATCHING_LOSSES: dict[str, type[MatchingLoss]] = {
    "two_sided": TwoSided,
    "group_preference": MatchingPreference,
    "centred_reward": CentredReward,
}


GAIN, CONSTANT = "group_gain", "group_constant"
"""Extras (B, T) of rollouts: the values that groups are compared by, and (numbered) the constants of each group."""


@dataclass
class NftSettings:
    """Options of the two-sided loss."""

    loss: str = choice("two_sided", lambda: MATCHING_LOSSES)
    """two_sided: DiffusionNFT; group_preference: DGPO, arXiv 2510.08425; centred_reward: CRD, arXiv 2603.14128."""
    beta: float = rare(bounded(1.0, above=0))
    """two_sided: distance between the mixtures and the old velocity, 0.1 for OCR and multiple rewards; centred_reward:
    scale of the implied reward; group_preference: strength of the preference, 10 in its code."""
    clip: float = rare(only_with(bounded(0.05, above=0), loss="group_preference"))
    """Clip range of group_preference for exp(old error - error)."""
    temperature: float | None = rare(only_with(bounded(None, at_least=0.02), loss="centred_reward"))
    """Temperature of the means of centred_reward, weighted by softmax(+-reward / temperature); null = plain means."""
    distance: str = rare(only_with(choice("squared", DISTANCES), loss="centred_reward"))
    """How centred_reward compares the implied with the given reward: squared, or cross_entropy of their sigmoids."""
    moving_reference: bool = rare(only_with(False, loss="group_preference"))
    """Compare with the old policy instead of the start model in group_preference."""
    kl_floor: float | None = rare(bounded(None, at_least=0))
    """Weight of the distance to the start model for the worst images; it grows with the advantage up to
    `objective.kl.coef`, 1e-4 to 0.1 in CRD's code. null = the same for all images."""
    old_schedule: int = rare(choice(1, lambda: NFT_SCHEDULES))
    """Decay of the old policy: 0 none, 1 min(0.001 step, 0.5), 2 min(0.0075 (step - 75), 0.999), 3
    min(0.25 + 0.005 step, 0.999) for CRD, 4 min(0.001 step, 0.3) for DGPO."""
    sampling_schedule: int | None = rare(choice(None, lambda: (None, *NFT_SCHEDULES)))
    """Decay of a separate sampling policy: 0 for the trained policy (DGPO), 2 for CRD; null = use the old policy."""
    advantage_mode: str = rare(choice("all", lambda: ADVANTAGE_MODES))
    """all, positive_only, negative_only, one_only (1 or 0) or binary (the sign). The loss divides by 10, so one_only
    weights images by 0.6 or 0.5, and binary by 0.6, 0.5 or 0.4."""


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
            raise ValueError(
                f"nft.kl_floor is {floor:g}; must be at most objective.kl.coef={coef:g}, which must be above 0"
            )


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
        # (B, T) tables back to the M trained rows, in the order of `matching`
        constants = [matching.decisions.gather(minibatch.extras[name]) for name in names]
        rows = self.rule.rows(matching, old, matching.decisions.gather(minibatch.advantage), constants)
        reference = self.process.reference_velocity(self.loss_reference, minibatch, matching.noisy)
        losses = matching.decisions.scatter(rows)
        floor, coef = self.config.nft.kl_floor, self.objective.kl_coef
        # up to 1 for the best images: the coefficient itself is applied in `matching.loss`
        weight = None if floor is None else reference_weight(minibatch.advantage, floor, coef)
        output = matching.loss(losses, minibatch, denominators, reference, coef, weight)
        # how far the policy has left the old one, which draws its images unless there is a separate average
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
        return f"{self.rule.formula()} + {weight} mean |v - v_ref|^2{self.process.scaling}"

    def on_step_end(self, step: Step, metrics: Mapping[str, float]) -> None:
        """Update the averages."""
        # the averages move after the evaluation average, each from the same updated weights
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
        # no outputs but the gains: `logp` carries them through the passes in chunks
        gain = passes.scores(rollouts, frozenset(), self._gains).logp
        return rollouts.replace(extras={**rollouts.extras, GAIN: gain})

    def _gains(self, policy: nn.Module, rollouts: Rollouts, outputs: frozenset[str]) -> PolicyOutputs:
        recipe = self.recipe
        matching, old = recipe.matching(policy, rollouts)
        # even without a KL term the loss compares with the start model
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
