"""Importance ratios between new and old policy, and the clipping rules of the policy loss.

Below, d = logp - logp_old, limited to +-20. "sequence" and "sequence_full" have equal values, and equal gradients when
the advantage is constant in a row and rows are averaged; only "sequence" stays meaningful with advantages that differ
inside a row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, TypeAlias

import torch

from mmrl.core.block import Block
from mmrl.core.blocks.advantage import Advantage, group_count, group_sum
from mmrl.core.loss import PolicyOutputs, masked_mean, masked_sum, required, turn_segments
from mmrl.core.payload import take_rows
from mmrl.core.rollouts import Rollouts
from mmrl.fields import bounded, choice, rare

if TYPE_CHECKING:
    from torch import Tensor

LOG_RATIO_LIMIT = 20.0

# as in volcengine/verl compute_policy_loss_gspo
SEQUENCE_LOG_RATIO_LIMIT = 10.0


@dataclass(frozen=True)
class Ratio(Block):
    """Log importance ratio of each decision."""

    level: ClassVar[str] = "row"
    """Scope of one ratio: "decision" or "row"."""
    row_gradient: ClassVar[bool] = False
    """Whether the ratio of a row carries the gradient of all its decisions, so that the advantage must be per row,
    too."""

    @property
    def limited(self) -> bool:
        """Whether the log-ratio is bounded, so that it is safe to exponentiate."""
        return True

    def __call__(self, logp: Tensor, logp_old: Tensor, mask: Tensor) -> Tensor:
        """Log-ratios (B, T) in nats of logp to logp_old, 0 where the mask is 0 (row level: the row's value).

        Gradient: through logp only.
        """
        # masked first: padding may hold any value, and the row-level ratios below sum over it
        difference = torch.where(mask > 0, logp - logp_old.detach(), 0.0)
        # exp(20) is far beyond every clip bound, and still finite after products with advantages in float32
        return self.of(difference.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT), logp, mask)

    def of(self, difference: Tensor, logp: Tensor, mask: Tensor) -> Tensor:
        """The ratio from the limited differences d (B, T)."""
        raise NotImplementedError

    def formula(self) -> str:
        return f"r_it = exp({self.rule()})"

    def rule(self) -> str:
        """The exponent of the formula."""
        raise NotImplementedError

    def conflicts(self, advantage: Advantage) -> Iterator[str]:
        """Yield reasons why the ratio is incompatible with an estimator."""
        if self.row_gradient and advantage.level != "row":
            yield (
                f"ratio '{self.kind}' is one number per row, but advantage '{advantage.kind}' varies within a "
                "row. Use ratio 'token' or 'sequence'."
            )


@dataclass(frozen=True)
class TokenRatio(Ratio):
    """The ratio of each decision (PPO, arXiv 1707.06347)."""

    kind = "token"
    level = "decision"

    def of(self, difference: Tensor, logp: Tensor, mask: Tensor) -> Tensor:
        return difference

    def rule(self) -> str:
        return "logp_it - logp_old_it"


@dataclass(frozen=True)
class SequenceRatio(Ratio):
    """The row mean of d as a value, limited to at most 10, with the gradient of the decision's own logp.

    Source: GSPO, arXiv 2507.18071, section 4.3; volcengine/verl compute_policy_loss_gspo.
    """

    kind = "sequence"

    def of(self, difference: Tensor, logp: Tensor, mask: Tensor) -> Tensor:
        # own is 0 in value: every decision has the ratio of its row, but the gradient of its own logp
        own = torch.where(mask > 0, logp - logp.detach(), 0.0)
        mean = masked_mean(difference, mask)[:, None]
        # above the limit the clamp also stops the gradient
        return (own + mean.detach()).clamp(max=SEQUENCE_LOG_RATIO_LIMIT)

    def rule(self) -> str:
        return "logp_it - stopgrad(logp_it) + stopgrad(mean_t (logp_it - logp_old_it))"


@dataclass(frozen=True)
class SequenceFullRatio(Ratio):
    """The row mean of d, with its full gradient.

    Source: GSPO, arXiv 2507.18071, eq. 5-7; huggingface/trl importance_sampling_level.
    """

    kind = "sequence_full"
    row_gradient = True

    def of(self, difference: Tensor, logp: Tensor, mask: Tensor) -> Tensor:
        return masked_mean(difference, mask)[:, None].expand_as(difference)

    def rule(self) -> str:
        return "mean_t (logp_it - logp_old_it)"


@dataclass(frozen=True)
class SequenceProductRatio(Ratio):
    """The row sum of d, limited to +-20, with its full gradient (huggingface/trl RLOO)."""

    kind = "sequence_product"
    row_gradient = True
    limit: float | None = rare(bounded(LOG_RATIO_LIMIT, above=0))
    """Maximum magnitude of the sum; no gradient beyond it. null disables it, for losses that do not exponentiate."""

    @property
    def limited(self) -> bool:
        return self.limit is not None

    def of(self, difference: Tensor, logp: Tensor, mask: Tensor) -> Tensor:
        total = masked_sum(difference, mask)[:, None]
        if self.limit is not None:
            # a sum over a long row easily leaves the range of exp, although each d is limited
            total = total.clamp(-self.limit, self.limit)
        return total.expand_as(difference)

    def rule(self) -> str:
        return "sum_t (logp_it - logp_old_it)"


Loss: TypeAlias = "tuple[Tensor, dict[str, Tensor]]"
"""The loss (B, T), to be minimised, and (B, T) indicators to be averaged over the mask, by metric name."""


def clipped_loss(
    log_ratio: Tensor, advantage: Tensor, low: float = 0.2, high: float = 0.2, dual: float | None = None
) -> Tensor:
    """Clipped surrogate max(-A r, -A clip(r, 1 - low, 1 + high)), with an optional dual clip.

    Args:
        log_ratio: (B, T) nats, logp - logp_old or a sequence-level ratio.
        advantage: (B, T), constant.
        low: The ratio is bounded below by 1 - low.
        high: The ratio is bounded above by 1 + high.
        dual: Upper bound -A * dual on the loss for negative advantages; None disables it.

    Returns:
        (B, T), to be minimised.

    Gradient: none where the clipped branch is the larger one; with the dual clip, none where A < 0 and r > dual.

    Source: PPO, arXiv 1707.06347, eq. 7; separate bounds: DAPO, arXiv 2503.14476, eq. 10; dual clip:
        arXiv 1912.09729, eq. 5.
    """
    ratio, advantage = log_ratio.exp(), advantage.detach()
    bounded_ratio = ratio.clamp(1.0 - low, 1.0 + high)
    # the paper maximises the minimum of two surrogates; negated, that is the maximum of two losses
    loss = torch.maximum(-advantage * ratio, -advantage * bounded_ratio)
    if dual is None:
        return loss
    # for A < 0 the loss grows with r without bound, since the clip only acts below 1 - low
    capped = torch.minimum(loss, -advantage * dual)
    return torch.where(advantage < 0, capped, loss)


def policy_loss(
    logp: Tensor,
    logp_old: Tensor,
    advantage: Tensor,
    mask: Tensor,
    clip: Clip | None = None,
    ratio: Ratio | None = None,
) -> Loss:
    """Policy loss for any clip rule and ratio, without `Rollouts`.

    Args:
        logp: (B, T) nats, under the policy being trained.
        logp_old: (B, T) nats, under the policy the step started from.
        advantage: (B, T) or (B, 1).
        mask: (B, T) {0, 1}, the decisions that are trained.
        clip: Clip rule; None is `PpoClip()`.
        ratio: Level of the ratio; None is `TokenRatio()`.

    Returns:
        The loss (B, T), to be minimised, and indicators (B, T) by metric name.
    """
    log_ratio = (ratio or TokenRatio())(logp, logp_old, mask)
    # broadcast (B, 1) to all decisions, and drop what is not trained
    advantage = torch.where(mask > 0, advantage.expand_as(mask), 0.0)
    return (clip or PpoClip())(log_ratio, logp, advantage)


@dataclass(frozen=True)
class Clip(Block):
    """Per-decision policy loss."""

    uses_ratio: ClassVar[bool] = True
    """False for losses on the log-probability only."""
    exponentiates: ClassVar[bool] = True
    """Whether the loss uses the ratio itself and not only its logarithm, which must then be limited."""
    compares_rows: ClassVar[bool] = False
    """Whether the loss of a row depends on the other rows of its group. The group must then be scored together, and has
    a gradient even if all its advantages are 0."""

    @property
    def compares_decisions(self) -> bool:
        """Whether the loss of a decision depends on the other ones scored with it, so that rows cannot be split."""
        return False

    @property
    def without_advantage(self) -> bool:
        """Whether a row may have a gradient even if its advantages are 0."""
        return False

    @property
    def reads_turns(self) -> bool:
        """Whether it also needs the turn of each decision."""
        return False

    def __call__(self, log_ratio: Tensor, logp: Tensor, advantage: Tensor, turn: Tensor | None = None) -> Loss:
        """Loss (B, T) and indicators of log-ratios, logp and constant advantages (B, T), with turns (B, T) int64."""
        raise NotImplementedError

    def of_rollouts(self, log_ratio: Tensor, outputs: PolicyOutputs, advantage: Tensor, rollouts: Rollouts) -> Loss:
        """The same, from rollouts and policy outputs; override it in rules that need more than ratio and advantage."""
        return self(log_ratio, outputs.logp, advantage, *((rollouts.turn,) if self.reads_turns else ()))

    def conflicts(self, ratio: Ratio) -> Iterator[str]:
        """Yield reasons why the rule is incompatible with a ratio."""
        yield from ()


@dataclass(frozen=True)
class StepClip(Clip):
    """A rule that depends on decisions outside the micro-batch."""

    surveys: ClassVar[bool] = False
    """Whether it needs the current scores of all decisions of an optimiser step, once the policy has moved."""

    def constants(self, rollouts: Rollouts) -> dict[str, Tensor]:
        """Entries of `extras` for the loss, computed once per step from all rows and their advantages."""
        return {}

    def survey(self, log_ratio: Tensor, advantage: Tensor, mask: Tensor) -> Tensor:
        """Summary of a part of an optimiser step, from log-ratios, advantages and the mask (B, T)."""
        raise NotImplementedError

    def settle(self, parts: Sequence[Tensor], rollouts: Rollouts) -> Rollouts:
        """Add what the loss needs to know about the whole optimiser step, given the `survey` of its parts.

        There are no parts before the policy has moved, since all ratios are then 1.
        """
        raise NotImplementedError


def clip_indicators(ratio: Tensor, low: float, high: float, signed: Tensor | None = None) -> dict[str, Tensor]:
    """Masks (B, T) of the decisions at a bound; with `signed` advantages, only those without a gradient."""
    ratio = ratio.detach()
    below, above = ratio < 1.0 - low, ratio > 1.0 + high
    if signed is not None:
        # the other two corners lie outside the bounds too, but there the unclipped branch wins and keeps its gradient
        below, above = below & (signed < 0), above & (signed > 0)
    return {
        "policy/clip_fraction_low": below.to(ratio.dtype),
        "policy/clip_fraction_high": above.to(ratio.dtype),
    }


@dataclass(frozen=True)
class BoundedClip(Clip):
    """Base of rules that bound the ratio on both sides of 1."""

    low: float = bounded(0.2, at_least=0, at_most=1)
    """The ratio is bounded below by 1 - low."""
    high: float = bounded(0.2, at_least=0)
    """The ratio is bounded above by 1 + high."""

    def clipped(self) -> str:
        """The bounded ratio of the formula."""
        return f"clip(r_it, {1 - self.low:g}, {1 + self.high:g})"


@dataclass(frozen=True)
class PpoClip(BoundedClip):
    """Clipped surrogate with an optional dual clip; see `clipped_loss`.

    Source: PPO, arXiv 1707.06347, eq. 7; dual: arXiv 1912.09729, eq. 5; `ratio_limit`: corl-team/VL-DAC, after TRL.
    """

    kind = "ppo_clip"
    dual: float | None = rare(bounded(None, above=1))
    """Bounds the loss by -A c for negative advantages, with c > 1 (usually 3); null disables it."""
    ratio_limit: float | None = rare(bounded(None, above=1))
    """If any ratio of a turn (or of a row, if there are no turns) exceeds it, the whole turn uses the clipped term -A
    clip(r), which has no gradient for ratios out of bounds (VL-DAC: 10); null disables it."""

    @property
    def reads_turns(self) -> bool:
        return self.ratio_limit is not None

    @property
    def compares_decisions(self) -> bool:
        return self.ratio_limit is not None

    def __call__(self, log_ratio: Tensor, logp: Tensor, advantage: Tensor, turn: Tensor | None = None) -> Loss:
        loss = clipped_loss(log_ratio, advantage, self.low, self.high, self.dual)
        ratio = log_ratio.exp()
        indicators = clip_indicators(ratio, self.low, self.high, signed=advantage.detach())
        if self.ratio_limit is None:
            return loss, indicators
        # detached: which branch is used is not differentiable
        beyond = _any_of_turn(ratio.detach() > self.ratio_limit, turn)
        loss = torch.where(beyond, -advantage.detach() * ratio.clamp(1.0 - self.low, 1.0 + self.high), loss)
        return loss, indicators | {"policy/beyond_ratio_limit": beyond.to(ratio.dtype)}

    def formula(self) -> str:
        bounded_ratio = self.clipped()
        loss = f"max(-A_it r_it, -A_it {bounded_ratio})"
        if self.dual is not None:
            loss = f"[{loss}, where A_it < 0 at most -{self.dual:g} A_it]"
        if self.ratio_limit is not None:
            loss = f"[{loss}, but -A_it {bounded_ratio} in turns with a ratio above {self.ratio_limit:g}]"
        return loss


def _any_of_turn(flags: Tensor, turn: Tensor | None) -> Tensor:
    """(B, T) bool, true on all decisions of a turn (of a row, without turns) if any of them is true."""
    # without turns the row is the unit
    if turn is None:
        return flags.any(1, keepdim=True).expand_as(flags)
    segment = turn_segments(turn)
    # count the flags of each turn, then hand the count back to each of its decisions
    number = torch.zeros_like(segment).scatter_add(1, segment, flags.to(segment.dtype))
    return number.gather(1, segment) > 0


@dataclass(frozen=True)
class GspoClip(BoundedClip):
    """Clipped surrogate on the ratio of a whole row, so that its decisions are clipped together.

    Source: GSPO, arXiv 2507.18071, eq. 5 (sequence) and 13 (token form).
    """

    kind = "gspo"

    def __call__(self, log_ratio: Tensor, logp: Tensor, advantage: Tensor, turn: Tensor | None = None) -> Loss:
        loss = clipped_loss(log_ratio, advantage, self.low, self.high)
        return loss, clip_indicators(log_ratio.exp(), self.low, self.high, signed=advantage.detach())

    def formula(self) -> str:
        return f"max(-A_it r_it, -A_it {self.clipped()})"

    def conflicts(self, ratio: Ratio) -> Iterator[str]:
        if ratio.level == "decision":
            yield f"clip 'gspo' clips whole rows, but ratio is '{ratio.kind}'. Use ratio 'sequence' or clip 'ppo_clip'."


@dataclass(frozen=True)
class Cispo(BoundedClip):
    """Policy gradient weighted by the clipped, detached ratio: -sg(clip(r)) A logp.

    The bounds are relative to 1 as in all other rules. TRL's `epsilon_high` for this loss is the bound itself: its 5.0
    is high = 4.0 here, and it has no lower bound, which is low = 1.0 here.

    Gradient: through logp at every decision, even if the ratio is clipped; the ratio is detached.

    Source: CISPO in MiniMax-M1, arXiv 2506.13585, eq. 4-5; volcengine/verl compute_policy_loss_cispo.
    """

    kind = "cispo"

    def __call__(self, log_ratio: Tensor, logp: Tensor, advantage: Tensor, turn: Tensor | None = None) -> Loss:
        """See `Clip`; the indicators do not depend on the sign of the advantage."""
        # detached: the ratio only weighs, and logp below carries the gradient at every decision
        ratio = log_ratio.detach().exp()
        bounded_ratio = ratio.clamp(1.0 - self.low, 1.0 + self.high)
        return -bounded_ratio * advantage.detach() * logp, clip_indicators(ratio, self.low, self.high)

    def formula(self) -> str:
        return f"-stopgrad({self.clipped()}) A_it logp_it"

    def conflicts(self, ratio: Ratio) -> Iterator[str]:
        if ratio.row_gradient:
            yield f"clip 'cispo' detaches the ratio, but ratio '{ratio.kind}' needs its gradient. Use ratio 'token'."


@dataclass(frozen=True)
class PolicyGradient(Clip):
    """Score-function loss -A logp, without a ratio (Williams, REINFORCE, 1992)."""

    kind = "policy_gradient"
    uses_ratio = False

    def __call__(self, log_ratio: Tensor, logp: Tensor, advantage: Tensor, turn: Tensor | None = None) -> Loss:
        return -advantage.detach() * logp, {}

    def formula(self) -> str:
        return "-A_it logp_it"

    def conflicts(self, ratio: Ratio) -> Iterator[str]:
        if ratio.kind != "token":
            yield f"clip 'policy_gradient' uses no ratio, but ratio is '{ratio.kind}'. Use ratio 'token'."


@dataclass(frozen=True)
class Unclipped(Clip):
    """Importance-weighted loss -A r without a bound (conservative policy iteration, arXiv 1707.06347, eq. 6)."""

    kind = "unclipped"

    def __call__(self, log_ratio: Tensor, logp: Tensor, advantage: Tensor, turn: Tensor | None = None) -> Loss:
        return -advantage.detach() * log_ratio.exp(), {}

    def formula(self) -> str:
        return "-A_it r_it"


@dataclass(frozen=True)
class DivergenceMask(Clip):
    """Importance-weighted loss -A r, masked if the exact divergence D from the old policy is large and would grow.

    Gradient: through the ratio of the decisions that are kept; D only selects.

    Source: Flow-DPPO, arXiv 2606.11025, eq. 14 and 18; Tencent-Hunyuan/UniRL unirl/algorithms/flowdppo.py.
    """

    kind = "divergence_mask"
    needs = frozenset({"kl_old"})
    limit: float = rare(bounded(1e-5, above=0))
    """Divergence in nats (per latent element for denoising steps) from which a decision is masked."""

    def of_rollouts(self, log_ratio: Tensor, outputs: PolicyOutputs, advantage: Tensor, rollouts: Rollouts) -> Loss:
        """See `Clip`; the divergence comes from the policy's outputs."""
        moved = required(outputs.kl_old, "scores.kl_old", "the policy must compute it for clip 'divergence_mask'")
        far, advantage, ratio = moved.detach() >= self.limit, advantage.detach(), log_ratio.exp()
        # only steps that move further away: one that leads back keeps its gradient at any distance
        above, below = far & (ratio > 1) & (advantage > 0), far & (ratio < 1) & (advantage < 0)
        loss = torch.where(above | below, 0.0, -advantage * ratio)
        fractions = {f"policy/clip_fraction_{side}": x.to(ratio.dtype) for side, x in (("low", below), ("high", above))}
        return loss, fractions | {"policy/divergence_old": moved.detach()}

    def formula(self) -> str:
        return f"[0 where D_it >= {self.limit:g} and (r_it - 1) A_it > 0, -A_it r_it elsewhere]"


def group_deviations(x: Tensor, group: Tensor, valid: Tensor, ddof: int = 1) -> tuple[Tensor, Tensor]:
    """Deviation (B,) of each valid row of x (B,) from its group mean, and the standard deviation (B,) of the group.

    Gradient: through both. If all values of a group are equal, the deviations keep their gradient and the standard
    deviation has none, unlike in `group_center` and `group_std`, which are for constants.
    """
    # rows without a trained decision have the log-ratio 0, which would pull the mean towards 0
    x = torch.where(valid, x, 0.0)
    number = group_count(group, valid)
    centred = torch.where(valid, x - (take_rows(group_sum(x, group, len(group)), group) / number.clamp(min=1)), 0.0)
    variance = take_rows(group_sum(centred.square(), group, len(group)), group) / (number - ddof).clamp(min=1)
    # the root has an infinite slope at 0, which would make NaN of the whole gradient
    smallest = torch.finfo(variance.dtype).tiny
    return centred, torch.where(variance > smallest, variance.clamp(min=smallest).sqrt(), 0.0)


@dataclass(frozen=True)
class GroupRegression(Clip):
    """Squared distance between the advantage and the advantage predicted by the policy's log-ratio.

    With rho_i the log-ratio of row i, the KL-regularised optimum has R = lambda rho + lambda log Z. Standardising over
    the group removes lambda and Z: the loss of row i is (A_i - (rho_i - mean rho) / (std rho + eps))^2. Nothing is
    clipped. At the first update of a step all rho are 0 and the gradient is that of -2 A rho / eps: a policy gradient
    of that size, which `trainer.max_grad_norm` bounds. Later updates of the same rollouts regress.

    Gradient: through rho, its mean and its standard deviation; the advantage is constant.

    Source: DeepVideo-R1, arXiv 2506.07464, section 3.2 and appendix A.4; eps, which it does not state, is TRL's.
    """

    kind = "group_regression"
    exponentiates = False
    compares_rows = True
    eps: float = rare(bounded(1e-4, above=0))
    """Added to the standard deviation of the log-ratios; larger values soften the first update of a step."""
    ddof: int = rare(choice(1, (0, 1)))
    """1 divides the variance of the log-ratios by n - 1, 0 by n."""
    scale: float | None = rare(bounded(None, above=0))
    """Lambda of the paper, in advantage units per nat: the prediction is scale (rho - mean rho), which sets a target
    size for the log-ratios; null standardises instead."""

    def __call__(self, log_ratio: Tensor, logp: Tensor, advantage: Tensor, turn: Tensor | None = None) -> Loss:
        """See `Clip`; all rows are one group."""
        group = torch.zeros(len(log_ratio), dtype=torch.int64, device=log_ratio.device)
        return self._loss(log_ratio, advantage, group, torch.ones_like(group, dtype=torch.bool))

    def of_rollouts(self, log_ratio: Tensor, outputs: PolicyOutputs, advantage: Tensor, rollouts: Rollouts) -> Loss:
        """See `Clip`; rows without a trained decision are excluded from their group."""
        return self._loss(log_ratio, advantage, rollouts.group, rollouts.loss_mask.any(1))

    def _loss(self, log_ratio: Tensor, advantage: Tensor, group: Tensor, valid: Tensor) -> Loss:
        # each decision of a row carries the row's ratio
        centred, std = group_deviations(log_ratio[:, 0], group, valid, self.ddof)
        predicted = centred / (std + self.eps) if self.scale is None else self.scale * centred
        loss = (advantage.detach() - predicted[:, None]).square()
        return loss, {"policy/log_ratio_std": std.detach()[:, None].expand_as(loss)}

    def formula(self) -> str:
        centred = "(log r_i - mean_group log r)"
        if self.scale is None:
            return f"(A_i - {centred} / (std_group log r + {self.eps:g}))^2, std with ddof {self.ddof}"
        return f"(A_i - {self.scale:g} {centred})^2"

    def conflicts(self, ratio: Ratio) -> Iterator[str]:
        if not ratio.row_gradient:
            yield (
                f"clip 'group_regression' compares whole rows, but ratio is '{ratio.kind}'. Use ratio "
                "'sequence_product' or 'sequence_full'."
            )
