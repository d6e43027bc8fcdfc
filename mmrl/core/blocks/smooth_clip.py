"""Clip rules of other trainers: soft gates, gates on a divergence, and rules that single out decisions."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from mmrl.core.blocks.clip import BoundedClip, Clip, Loss, Ratio, clip_indicators, clipped_loss
from mmrl.core.loss import PolicyOutputs, masked_mean, required
from mmrl.core.rollouts import Rollouts
from mmrl.fields import bounded, rare

if TYPE_CHECKING:
    from torch import Tensor


def by_sign(chosen: Tensor, yes: float, no: float, like: Tensor) -> Tensor:
    """`yes` on the mask `chosen` (B, T), `no` elsewhere, in the precision of `like`."""
    return torch.where(chosen, like.new_full((), yes), no)


@dataclass(frozen=True)
class Sapo(Clip):
    """Soft gate -A 4/tau sigmoid(tau (r - 1)), whose slope is 1 on policy and fades smoothly on both sides.

    Source: SAPO, arXiv 2511.20347; volcengine/verl compute_policy_loss_sapo, huggingface/trl loss_type="sapo".
    """

    kind = "sapo"
    tau_pos: float = rare(bounded(1.0, above=0))
    """Temperature for positive advantages; the gate fades sooner for larger values."""
    tau_neg: float = rare(bounded(1.05, above=0))
    """Temperature of all other decisions."""

    def __call__(self, log_ratio: Tensor, logp: Tensor, advantage: Tensor, turn: Tensor | None = None) -> Loss:
        advantage = advantage.detach()
        tau = by_sign(advantage > 0, self.tau_pos, self.tau_neg, advantage)
        gate = torch.sigmoid(tau * (log_ratio.exp() - 1.0))
        # the gradient has the weight 4 gate (1 - gate), times the ratio
        return -advantage * gate * 4.0 / tau, {"policy/gate": (4.0 * gate * (1.0 - gate)).detach()}

    def formula(self) -> str:
        return f"-A_it 4/tau sigmoid(tau (r_it - 1)), tau = {self.tau_pos:g} where A_it > 0, {self.tau_neg:g} elsewhere"


@dataclass(frozen=True)
class BinaryGate(Clip):
    """Policy gradient with the detached ratio, 0 if the probability of the decision has moved too far.

    The binary divergence compares the sampled decision with all others together, so that a rare token may multiply its
    probability, while a likely token may not lose much of it.

    Gradient: through logp of the decisions that are kept.
    """

    needs = frozenset({"probabilities"})
    low: float = rare(bounded(0.2, above=0))
    """Maximum divergence for decisions with a non-positive advantage whose probability decreases."""
    high: float = rare(bounded(0.2, above=0))
    """Maximum divergence for decisions with a positive advantage whose probability increases."""
    limit: float | None = rare(bounded(20.0, at_least=1))
    """Maximum weight, so that a single decision cannot dominate an update; null disables it."""
    squared: float = rare(bounded(0.0, at_least=0))
    """Weight of (log r)^2, which pulls back to the old policy even if the gate is closed (prime-rl: 1e-3, after Kimi
    K2.5, arXiv 2602.02276)."""

    @property
    def without_advantage(self) -> bool:
        return self.squared > 0

    def __call__(self, log_ratio: Tensor, logp: Tensor, advantage: Tensor, turn: Tensor | None = None) -> Loss:
        advantage, now, moved = advantage.detach(), logp.detach(), log_ratio.detach()
        # log_ratio is logp - logp_old, limited; subtracting it gives logp_old without reading the rollouts
        distance = self.distance(now, now - moved)
        # the gate only shuts for moves that the advantage asks for: one that leads back keeps its gradient
        far = torch.where(advantage > 0, (moved > 0) & (distance > self.high), (moved < 0) & (distance > self.low))
        ratio = moved.exp() if self.limit is None else moved.exp().clamp(max=self.limit)
        weight = torch.where(far, 0.0, ratio)
        indicators = {"policy/clip_fraction_low": far & (moved < 0), "policy/clip_fraction_high": far & (moved > 0)}
        # the pull back acts on every decision, also where the gate is shut
        loss = self.squared * log_ratio.square() - weight * advantage * logp
        return loss, {name: mask.to(logp.dtype) for name, mask in indicators.items()}

    def distance(self, now: Tensor, old: Tensor) -> Tensor:
        """Divergence (B, T) between the decision's log-probabilities now and before."""
        raise NotImplementedError

    def rule(self) -> str:
        """The divergence of the formula."""
        raise NotImplementedError

    def formula(self) -> str:
        ratio = "r_it" if self.limit is None else f"min(r_it, {self.limit:g})"
        pull = f" + {self.squared:g} (log r_it)^2" if self.squared else ""
        return (
            f"-stopgrad({ratio} keep_it) A_it logp_it{pull}, keep_it = 0 where D_it > {self.high:g} and r_it > 1, "
            f"A_it > 0, or D_it > {self.low:g} and r_it < 1, A_it <= 0; D_it = {self.rule()}"
        )

    def conflicts(self, ratio: Ratio) -> Iterator[str]:
        if ratio.kind != "token":
            yield f"clip '{self.kind}' compares probabilities of decisions, but ratio is '{ratio.kind}'. Use 'token'."


@dataclass(frozen=True)
class DppoTv(BinaryGate):
    """Gate on the binary total variation |p - p_old|; see `BinaryGate`.

    Source: DPPO, arXiv 2602.04879, eq. 13; volcengine/verl compute_policy_loss_dppo_tv.
    """

    kind = "dppo_tv"

    def distance(self, now: Tensor, old: Tensor) -> Tensor:
        return (now.exp() - old.exp()).abs()

    def rule(self) -> str:
        return "|exp(logp_it) - exp(logp_old_it)|"


@dataclass(frozen=True)
class DppoKl(BinaryGate):
    """Gate on the binary divergence KL(p_old, p); see `BinaryGate`.

    Source: DPPO, arXiv 2602.04879, eq. 14; volcengine/verl compute_policy_loss_dppo_kl.
    """

    kind = "dppo_kl"
    low: float = rare(bounded(0.05, above=0))
    high: float = rare(bounded(0.05, above=0))

    def distance(self, now: Tensor, old: Tensor) -> Tensor:
        p, q = old.exp(), now.exp()
        # 1e-8 as in verl and SkyRL, for probabilities that round to 1
        return p * (old - now) + (1.0 - p) * ((1.0 - p + 1e-8) / (1.0 - q + 1e-8)).log()

    def rule(self) -> str:
        return "KL of {sampled decision, any other} from the old to the new policy"


@dataclass(frozen=True)
class Gmpo(BoundedClip):
    """Geometric mean of the ratios of a row's decisions, each clipped in log space on one side only.

    Source: GMPO, arXiv 2507.20673; volcengine/verl compute_policy_loss_geo_mean, huggingface/trl GMPOTrainer.
    """

    kind = "gmpo"
    compares_decisions = True
    low: float = rare(bounded(0.4, at_least=0))
    """The log-ratio is bounded below by -low if the advantage is negative."""
    high: float = rare(bounded(0.4, at_least=0))
    """The log-ratio is bounded above by high if the advantage is positive."""

    def __call__(self, log_ratio: Tensor, logp: Tensor, advantage: Tensor, turn: Tensor | None = None) -> Loss:
        """See `Clip`; every decision of a row counts."""
        return self._loss(log_ratio, advantage, torch.ones_like(log_ratio))

    def of_rollouts(self, log_ratio: Tensor, outputs: PolicyOutputs, advantage: Tensor, rollouts: Rollouts) -> Loss:
        """See `Clip`; only trained decisions count."""
        return self._loss(log_ratio, advantage, rollouts.loss_mask)

    def _loss(self, log_ratio: Tensor, advantage: Tensor, mask: Tensor) -> Loss:
        advantage = advantage.detach()
        # one side only: a decision that has moved against its advantage keeps its gradient
        below, above = (log_ratio < -self.low) & (advantage < 0), (log_ratio > self.high) & (advantage > 0)
        clipped = torch.where(below, -self.low, torch.where(above, self.high, log_ratio))
        fractions = {"policy/clip_fraction_low": below, "policy/clip_fraction_high": above}
        # the mean of log-ratios, exponentiated, is the geometric mean of the ratios
        loss = -advantage * masked_mean(clipped, mask)[:, None].exp()
        return loss, {name: x.to(loss.dtype) for name, x in fractions.items()}

    def formula(self) -> str:
        return (
            f"-A_it exp(mean_t c_it), c_it = log r_it, at most {self.high:g} where A_it > 0, at least {-self.low:g} "
            "where A_it < 0"
        )

    def conflicts(self, ratio: Ratio) -> Iterator[str]:
        if ratio.kind != "token":
            yield f"clip 'gmpo' averages the ratios of decisions itself, but ratio is '{ratio.kind}'. Use 'token'."


@dataclass(frozen=True)
class Vespo(Clip):
    """Policy gradient with the detached row weight w^k exp(lambda (1 - w)), where w is the ratio of the whole row.

    The weight is 1 on policy and approaches 0 for rows that have become far more or far less likely.

    Source: VESPO, arXiv 2602.10693; huggingface/trl GRPOTrainer.get_gamma_weights.
    """

    kind = "vespo"
    k_pos: float = rare(bounded(2.0, at_least=0))
    """Exponent of w for non-negative advantages."""
    lambda_pos: float = rare(bounded(3.0, above=0))
    """Decay in w for non-negative advantages."""
    k_neg: float = rare(bounded(3.0, at_least=0))
    """Exponent of w for negative advantages."""
    lambda_neg: float = rare(bounded(2.0, above=0))
    """Decay in w for negative advantages."""

    def __call__(self, log_ratio: Tensor, logp: Tensor, advantage: Tensor, turn: Tensor | None = None) -> Loss:
        advantage = advantage.detach()
        # a row this unlikely has a weight near 0 anyway
        log_w = log_ratio.detach().clamp(min=math.log(1e-8))
        k = by_sign(advantage >= 0, self.k_pos, self.k_neg, advantage)
        decay = by_sign(advantage >= 0, self.lambda_pos, self.lambda_neg, advantage)
        # in logs, since w^k and exp(-lambda w) over- and underflow by themselves
        weight = (k * log_w + decay * (1.0 - log_w.exp())).exp()
        return -weight * advantage * logp, {"policy/row_weight": weight}

    def formula(self) -> str:
        return (
            "-stopgrad(r_i^k exp(lambda (1 - r_i))) A_it logp_it, (k, lambda) = "
            f"({self.k_pos:g}, {self.lambda_pos:g}) where A_it >= 0, ({self.k_neg:g}, {self.lambda_neg:g}) elsewhere"
        )

    def conflicts(self, ratio: Ratio) -> Iterator[str]:
        if ratio.kind != "sequence_product" or not ratio.limited:
            yield "clip 'vespo' weighs rows by the product of their ratios. Use ratio 'sequence_product', with a limit."


@dataclass(frozen=True)
class Dro(Clip):
    """Direct reward optimisation: -A logp + beta/2 (log r)^2, a squared penalty instead of clipping.

    Gradient: through logp in both terms, even far off policy.

    Source: DRO, arXiv 2405.19107, with the value replaced by a group baseline; volcengine/verl compute_policy_loss_dro.
    """

    kind = "dro"
    exponentiates = False
    without_advantage = True
    beta: float = rare(bounded(0.05, above=0))
    """Weight of the squared log-ratio."""

    def __call__(self, log_ratio: Tensor, logp: Tensor, advantage: Tensor, turn: Tensor | None = None) -> Loss:
        return 0.5 * self.beta * log_ratio.square() - advantage.detach() * logp, {}

    def formula(self) -> str:
        return f"(-A_it logp_it + {self.beta / 2:g} (log r_it)^2)"


def covariances(logp: Tensor, advantage: Tensor, mask: Tensor) -> Tensor:
    """Contribution (B, T) of each decision to the covariance of log-probability and advantage; -inf if not trained.

    Source: Cui et al., arXiv 2505.22617, eq. 10.
    """
    # of the trained decisions of this micro-batch, as in the public code
    number = mask.sum().clamp(min=1)
    logp = logp.detach()
    product = (advantage - (advantage * mask).sum() / number) * (logp - (logp * mask).sum() / number)
    return torch.where(mask > 0, product, float("-inf"))


def _first(order: Tensor, chosen: Tensor, number: Tensor) -> Tensor:
    """Mask (B, T) of the `number` decisions of the mask `chosen` with the smallest `order` (B, T)."""
    # unchosen decisions get the last ranks
    order = torch.where(chosen, order, float("inf")).flatten()
    # the rank of each decision: argsort of an argsort; stable, so that ties break the same way everywhere
    rank = order.argsort(stable=True).argsort().view(chosen.shape)
    return chosen & (rank < number)


@dataclass(frozen=True)
class ClipCov(BoundedClip):
    """Clipped surrogate without a few decisions, drawn at random from those with a covariance in a given range.

    Decisions with a high covariance of advantage and log-probability are those that lower the entropy. The means of
    the covariance and the number of draws are those of a micro-batch. The draw is a hash of the decision's
    log-probability: it differs from update to update, and a run repeats bit for bit.

    Source: Clip-Cov, arXiv 2505.22617, eq. 11-13; volcengine/verl compute_policy_loss_clip_cov.
    """

    kind = "clip_cov"
    compares_decisions = True
    share: float = rare(bounded(2e-4, above=0, at_most=1))
    """Fraction of the decisions to exclude (at least one)."""
    cov_low: float = rare(bounded(1.0))
    """Lower end of the covariance range."""
    cov_high: float = rare(bounded(5.0))
    """Upper end of the covariance range."""

    def __call__(self, log_ratio: Tensor, logp: Tensor, advantage: Tensor, turn: Tensor | None = None) -> Loss:
        """See `Clip`; every decision counts."""
        return self._loss(log_ratio, logp, advantage, torch.ones_like(logp))

    def of_rollouts(self, log_ratio: Tensor, outputs: PolicyOutputs, advantage: Tensor, rollouts: Rollouts) -> Loss:
        """See `Clip`; only trained decisions count."""
        return self._loss(log_ratio, outputs.logp, advantage, rollouts.loss_mask)

    def _loss(self, log_ratio: Tensor, logp: Tensor, advantage: Tensor, mask: Tensor) -> Loss:
        advantage = advantage.detach()
        loss = clipped_loss(log_ratio, advantage, self.low, self.high)
        indicators = clip_indicators(log_ratio.exp(), self.low, self.high, signed=advantage)
        # decisions that are clipped already have no gradient to drop
        clipped = torch.stack(list(indicators.values())).sum(0) > 0
        covariance = covariances(logp, advantage, mask)
        band = (covariance > self.cov_low) & (covariance < self.cov_high) & ~clipped
        # at least one, also in micro-batches of fewer than 1 / share decisions
        number = (self.share * mask.sum()).floor().clamp(min=1)
        # a hash instead of a random draw, so that no generator has to be passed through the loss
        dropped = _first(hashed(logp).to(logp.dtype), band, number)
        return torch.where(dropped, 0.0, loss), indicators | {"policy/cov_dropped": dropped.to(loss.dtype)}

    def problems(self, where: str) -> Iterator[str]:
        yield from super().problems(where)
        if self.cov_low >= self.cov_high:
            yield f"{where}.cov_low {self.cov_low:g} must be below {where}.cov_high {self.cov_high:g}"

    def formula(self) -> str:
        return (
            f"[0 for a random {self.share:g} of the decisions with {self.cov_low:g} < cov_it < {self.cov_high:g}, else "
            f"max(-A_it r_it, -A_it {self.clipped()})], cov_it = (A_it - mean A)(logp_it - mean logp)"
        )


def hashed(x: Tensor) -> Tensor:
    """Whole numbers (B, T) below 2^31 that look random, but follow from the bits of x (B, T)."""
    # float32 and int32 have the same size: the bits of the number are the seed
    bits = x.detach().float().view(torch.int32)
    for shift, factor in ((15, 0x2C1B3C6D), (12, 0x297A2D39)):
        # a xorshift-multiply hash; the product wraps around, as intended
        bits = (bits ^ (bits >> shift)) * factor
    # without the sign bit, so that the order is that of a non-negative number
    return (bits ^ (bits >> 15)) & 0x7FFFFFFF


@dataclass(frozen=True)
class KlCov(Clip):
    """Importance-weighted loss -A r, with a penalty |log r| on the decisions with the highest covariance.

    The means of the covariance and the number of decisions are those of a micro-batch.

    Source: KL-Cov, arXiv 2505.22617, eq. 14-15; volcengine/verl compute_policy_loss_kl_cov.
    """

    kind = "kl_cov"
    compares_decisions = True
    without_advantage = True
    share: float = rare(bounded(2e-4, above=0, at_most=1))
    """Fraction of the decisions to penalise (at least one)."""
    coef: float = rare(bounded(1.0, at_least=0))
    """Weight of the penalty."""

    def __call__(self, log_ratio: Tensor, logp: Tensor, advantage: Tensor, turn: Tensor | None = None) -> Loss:
        """See `Clip`; every decision counts."""
        return self._loss(log_ratio, logp, advantage, torch.ones_like(logp))

    def of_rollouts(self, log_ratio: Tensor, outputs: PolicyOutputs, advantage: Tensor, rollouts: Rollouts) -> Loss:
        """See `Clip`; only trained decisions count."""
        return self._loss(log_ratio, outputs.logp, advantage, rollouts.loss_mask)

    def _loss(self, log_ratio: Tensor, logp: Tensor, advantage: Tensor, mask: Tensor) -> Loss:
        advantage = advantage.detach()
        number = (self.share * mask.sum()).floor().clamp(min=1)
        # negated, because _first takes the smallest
        chosen = _first(-covariances(logp, advantage, mask), mask > 0, number)
        penalty = torch.where(chosen, self.coef * log_ratio.abs(), 0.0)
        return penalty - advantage * log_ratio.exp(), {"policy/cov_penalised": chosen.to(logp.dtype)}

    def formula(self) -> str:
        return (
            f"(-A_it r_it, plus {self.coef:g} |log r_it| for the {self.share:g} of the decisions with the largest "
            "(A_it - mean A)(logp_it - mean logp))"
        )


@dataclass(frozen=True)
class StepRanking(Clip):
    """Ranks the policy's Gaussian for a step against its mirror image about the old policy, given the sampled step.

    With means m and m_old of the policy and of the policy before the update, both at one standard deviation s, the
    candidates are m_old +- beta (m - m_old), and E+ and E- their mean squared distances to the step over s^2. The loss
    is softplus(strength / 2 y (E+ - E-)) for y = A / limit within +-1. As E- - E+ = 4 beta (log r + D), with D the
    exact divergence between the two, it needs no means.

    Gradient: through the ratio and through D.

    Source: pi-StepNFT, arXiv 2603.02083; RLinf/RLinf rlinf/workers/actor/fsdp_nft_policy_worker.py, loss "dpo" in the
        space "xnext" with the weight "sigma".
    """

    kind = "step_ranking"
    needs = frozenset({"kl_old"})
    beta: float = rare(bounded(1.0, above=0))
    """Distance of the candidates from the old mean, relative to the move of the policy."""
    strength: float = rare(bounded(1.0, above=0))
    """Slope of the logistic ranking loss."""
    limit: float = rare(bounded(0.5, above=0))
    """Advantage that counts as a full preference."""

    def of_rollouts(self, log_ratio: Tensor, outputs: PolicyOutputs, advantage: Tensor, rollouts: Rollouts) -> Loss:
        """See `Clip`; the divergence comes from the policy's outputs."""
        moved = required(outputs.kl_old, "scores.kl_old", "the policy must compute it for clip 'step_ranking'")
        # beyond the limit an advantage counts as a full preference, so that an outlier cannot rule the step
        wish = (advantage.detach() / self.limit).clamp(-1, 1)
        # by 4 beta (log r + D) = E- - E+, so the means of the Gaussians are not needed
        loss = torch.nn.functional.softplus(-2 * self.beta * self.strength * wish * (log_ratio + moved))
        return loss, {"policy/divergence_old": moved.detach()}

    def formula(self) -> str:
        slope = 2 * self.beta * self.strength
        return f"softplus(-{slope:g} y_it (log r_it + D_it)), y_it = A_it / {self.limit:g} within +-1"
