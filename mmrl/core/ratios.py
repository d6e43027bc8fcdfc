"""Importance ratios between the new and the old policy, and the rules that bound them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from mmrl.core.aggregation import masked_sum
from mmrl.core.checks import look_up

__all__ = ["LOG_RATIO_LIMIT", "RATIOS", "SURROGATES", "SurrogateInputs", "log_ratio", "surrogate"]

LOG_RATIO_LIMIT = 20.0
SEQUENCE_LOG_RATIO_LIMIT = 10.0


@dataclass(frozen=True)
class SurrogateInputs:
    """What a surrogate sees; the advantage is constant, the rest carries the policy's gradient."""

    logp: Tensor
    """(B, T) nats, under the policy being trained."""
    log_ratio: Tensor
    """(B, T) nats, from `log_ratio`."""
    advantage: Tensor
    """(B, T), no gradient."""
    mask: Tensor
    """(B, T) {0, 1}."""
    clip_low: float = 0.2
    """The ratio is bounded below by 1 - clip_low."""
    clip_high: float = 0.2
    """The ratio is bounded above by 1 + clip_high."""
    dual_clip: float | None = None
    """Where the advantage is negative, the loss is at most -A * dual_clip."""


def log_ratio(logp: Tensor, logp_old: Tensor, mask: Tensor, level: str) -> Tensor:
    """Return the log importance ratio that stands at each decision.

    With d = logp - logp_old, limited to +-20, and |o| the trained decisions of the row:

    * token: d
    * sequence: the row mean of d as a value, the gradient of the decision's own logp (limited to at most 10)
    * sequence_full: the row mean of d, with its full gradient
    * sequence_product: the row sum of d, with its full gradient, limited to +-20

    "sequence" and "sequence_full" have equal values, and equal gradients when the advantage is constant in a
    row and rows are averaged; only "sequence" stays meaningful with advantages that differ inside a row.

    Args:
        logp: (B, T) nats, under the policy being trained.
        logp_old: (B, T) nats, under the policy the step started from.
        mask: (B, T) {0, 1}.
        level: One of `RATIOS`.

    Returns:
        (B, T) nats, 0 where the mask is 0 (sequence levels: the row's value).

    Raises:
        ValueError: Unknown level.

    Gradient: through logp only.

    Source: GSPO, arXiv 2507.18071, eq. 5-7 and 4.3; volcengine/verl compute_policy_loss_gspo ("sequence");
        huggingface/trl importance_sampling_level ("sequence_full") and RLOO ("sequence_product").
    """
    function = look_up(RATIOS, level, "ratio")
    difference = torch.where(mask > 0, logp - logp_old.detach(), 0.0)
    return function(difference.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT), logp, mask)


def surrogate(inputs: SurrogateInputs, name: str) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the per-decision policy loss.

    Args:
        inputs: Ratios, advantages and bounds.
        name: One of `SURROGATES`.

    Returns:
        The loss (B, T), to be minimised, and (B, T) indicators to be averaged over the mask, by metric name.

    Raises:
        ValueError: Unknown name.
    """
    return look_up(SURROGATES, name, "surrogate")(inputs)


def _token(difference: Tensor, logp: Tensor, mask: Tensor) -> Tensor:
    return difference


def _sequence_full(difference: Tensor, logp: Tensor, mask: Tensor) -> Tensor:
    return _row_mean(difference, mask).expand_as(difference)


def _sequence(difference: Tensor, logp: Tensor, mask: Tensor) -> Tensor:
    own = torch.where(mask > 0, logp - logp.detach(), 0.0)
    return (own + _row_mean(difference, mask).detach()).clamp(max=SEQUENCE_LOG_RATIO_LIMIT)


def _sequence_product(difference: Tensor, logp: Tensor, mask: Tensor) -> Tensor:
    total = masked_sum(difference, mask)[:, None]
    return total.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).expand_as(difference)


def _row_mean(x: Tensor, mask: Tensor) -> Tensor:
    return (masked_sum(x, mask) / mask.sum(1).clamp(min=1).to(x.dtype))[:, None]


def ppo_clip(inputs: SurrogateInputs) -> tuple[Tensor, dict[str, Tensor]]:
    """Clipped surrogate max(-A r, -A clip(r)), with an optional dual clip.

    Args:
        inputs: Ratios, advantages and bounds.

    Returns:
        The loss (B, T) and the indicators of clipping from below and from above.

    Gradient: none where the clipped branch is the larger one; with the dual clip, none where A < 0 and
        r > dual_clip.

    Source: PPO, arXiv 1707.06347, eq. 7; separate bounds: DAPO, arXiv 2503.14476, eq. 10; dual clip:
        arXiv 1912.09729, eq. 5.
    """
    ratio, advantage = inputs.log_ratio.exp(), inputs.advantage.detach()
    bounded = ratio.clamp(1.0 - inputs.clip_low, 1.0 + inputs.clip_high)
    loss = torch.maximum(-advantage * ratio, -advantage * bounded)
    if inputs.dual_clip is not None:
        capped = torch.minimum(loss, -advantage * inputs.dual_clip)
        loss = torch.where(advantage < 0, capped, loss)
    return loss, _clip_indicators(ratio, inputs, signed=advantage)


def gspo(inputs: SurrogateInputs) -> tuple[Tensor, dict[str, Tensor]]:
    """Clipped surrogate on the ratio of a whole row, without a dual clip.

    Args:
        inputs: Sequence-level ratios, advantages and bounds; `dual_clip` is not used.

    Returns:
        The loss (B, T) and the indicators of clipping.

    Gradient: as `ppo_clip`, for all decisions of a row at once.

    Source: GSPO, arXiv 2507.18071, eq. 5 (sequence) and 13 (token form).
    """
    ratio, advantage = inputs.log_ratio.exp(), inputs.advantage.detach()
    bounded = ratio.clamp(1.0 - inputs.clip_low, 1.0 + inputs.clip_high)
    loss = torch.maximum(-advantage * ratio, -advantage * bounded)
    return loss, _clip_indicators(ratio, inputs, signed=advantage)


def cispo(inputs: SurrogateInputs) -> tuple[Tensor, dict[str, Tensor]]:
    """Policy gradient weighted by the clipped, detached ratio: -sg(clip(r)) A logp.

    The bounds are relative to 1 like everywhere in this table. TRL's `epsilon_high` for this loss is the
    bound itself: its 5.0 is clip_high = 4.0 here, and it has no lower bound, which is clip_low = 1.0 here.

    Args:
        inputs: Ratios, advantages and bounds.

    Returns:
        The loss (B, T) and the indicators of clipping, whatever the sign of the advantage.

    Gradient: through logp at every decision, also where the ratio is clipped; the ratio is detached.

    Source: CISPO in MiniMax-M1, arXiv 2506.13585, eq. 4-5; volcengine/verl compute_policy_loss_cispo.
    """
    ratio = inputs.log_ratio.detach().exp()
    bounded = ratio.clamp(1.0 - inputs.clip_low, 1.0 + inputs.clip_high)
    return -bounded * inputs.advantage.detach() * inputs.logp, _clip_indicators(ratio, inputs)


def policy_gradient(inputs: SurrogateInputs) -> tuple[Tensor, dict[str, Tensor]]:
    """Score-function loss -A logp, without a ratio.

    Args:
        inputs: Log-probabilities and advantages.

    Returns:
        The loss (B, T) and no indicators.

    Gradient: through logp.

    Source: Williams, REINFORCE (1992).
    """
    return -inputs.advantage.detach() * inputs.logp, {}


def unclipped(inputs: SurrogateInputs) -> tuple[Tensor, dict[str, Tensor]]:
    """Importance-weighted loss -A r without a bound.

    Args:
        inputs: Ratios and advantages.

    Returns:
        The loss (B, T) and no indicators.

    Gradient: through the ratio.

    Source: conservative policy iteration, PPO, arXiv 1707.06347, eq. 6.
    """
    return -inputs.advantage.detach() * inputs.log_ratio.exp(), {}


def bgpo(inputs: SurrogateInputs) -> tuple[Tensor, dict[str, Tensor]]:
    """Bound of the importance-weighted loss that is linear in Monte Carlo samples of a log-likelihood bound.

    With d the log-ratio of one sample, -A (1 + d) where A >= 0 and -A exp(d) where A < 0. Averaged over samples it is
    never below -A exp(mean d), because exp(x) >= 1 + x and by Jensen; at d = 0 value and gradient are the same. As
    each sample enters on its own, samples may be backpropagated one at a time.

    Args:
        inputs: Ratios and advantages; one sample is one decision.

    Returns:
        The loss (B, T) and no indicators.

    Gradient: through the ratio, unbounded.

    Source: BGPO, arXiv 2510.11683; rebuilt from the properties that its abstract states.
    """
    advantage, difference = inputs.advantage.detach(), inputs.log_ratio
    return -advantage * torch.where(advantage < 0, difference.exp(), 1.0 + difference), {}


def _clip_indicators(ratio: Tensor, inputs: SurrogateInputs, signed: Tensor | None = None) -> dict[str, Tensor]:
    ratio = ratio.detach()
    low, high = ratio < 1.0 - inputs.clip_low, ratio > 1.0 + inputs.clip_high
    if signed is not None:
        low, high = low & (signed < 0), high & (signed > 0)
    return {
        "policy/clip_fraction_low": low.to(ratio.dtype),
        "policy/clip_fraction_high": high.to(ratio.dtype),
    }


RATIOS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "token": _token,
    "sequence": _sequence,
    "sequence_full": _sequence_full,
    "sequence_product": _sequence_product,
}

SURROGATES: dict[str, Callable[[SurrogateInputs], tuple[Tensor, dict[str, Tensor]]]] = {
    "ppo_clip": ppo_clip,
    "gspo": gspo,
    "cispo": cispo,
    "policy_gradient": policy_gradient,
    "unclipped": unclipped,
    "bgpo": bgpo,
}
