"""A policy-optimisation method as data: estimator x ratio x surrogate x regularisers x aggregation."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from mmrl.core.advantages import ADVANTAGES, CRITIC_ESTIMATORS, AdvantageOptions
from mmrl.core.aggregation import Denominators, aggregate, count, masked_sum
from mmrl.core.checks import check_decisions, look_up
from mmrl.core.description import describe
from mmrl.core.filters import zero_variance_groups
from mmrl.core.groups import masked_whiten
from mmrl.core.metrics import Metric, max_metric, mean_metric, merge_metrics
from mmrl.core.ratios import SurrogateInputs, log_ratio, surrogate
from mmrl.core.regularizers import entropy_sampled, kl
from mmrl.core.returns import decision_rewards, turn_starts
from mmrl.core.rollouts import Rollouts
from mmrl.core.validation import validate
from mmrl.core.values import value_loss

__all__ = ["LossOutput", "Metric", "Objective", "PolicyOutputs", "merge_metrics"]


@dataclass(frozen=True)
class PolicyOutputs:
    """What the policy says now about the decisions of some rollouts; carries the gradient."""

    logp: Tensor
    """(B, T) nats, float32 or float64; anything may stand where the mask is 0."""
    entropy: Tensor | None = None
    """(B, T) nats, of the whole action distribution; needed by entropy="full"."""
    values: Tensor | None = None
    """(B, T), value of the state before each decision; needed by a critic."""
    kl_ref: Tensor | None = None
    """(B, T) nats, exact divergence from the reference; needed by kl="full"."""


@dataclass(frozen=True)
class LossOutput:
    """A loss and the numbers about it."""

    loss: Tensor
    """Scalar, this batch's share of the loss of the optimiser step."""
    metrics: dict[str, Metric] = field(default_factory=dict)
    """Name to metric; merge them over the micro-batches of a step with `merge_metrics`."""


@dataclass(frozen=True)
class Objective:
    """One method: how advantages are estimated and which loss the policy minimises.

    loss = agg[surrogate(ratio, A)] + kl_coef * agg_kl[w * KL] - entropy_coef * agg[H]
    + value_coef * agg[value loss], where agg divides by counts over the whole optimiser step.
    """

    name: str
    """Short name, as in the catalogue."""
    citation: str = ""
    """Where the method was published."""
    advantage: str = "group_mean_std"
    """Estimator: group_mean_std, group_mean, leave_one_out, whitened_returns, group_mean_batch_std,
    group_mean_global_std, gae, gae_turn."""
    advantage_options: AdvantageOptions = field(default_factory=AdvantageOptions)
    """Numbers of the estimator."""
    ratio: str = "token"
    """Level of the importance ratio: token, sequence, sequence_full, sequence_product."""
    surrogate: str = "ppo_clip"
    """Policy loss: ppo_clip, gspo, cispo, policy_gradient, unclipped, bgpo."""
    clip_low: float = 0.2
    """The ratio is bounded below by 1 - clip_low."""
    clip_high: float = 0.2
    """The ratio is bounded above by 1 + clip_high."""
    dual_clip: float | None = None
    """ppo_clip only: bound c > 1 on the loss -A c where the advantage is negative; None switches it off."""
    kl: str | None = None
    """Divergence from the reference: k1, k2, k3, k1p, k3p, full (exact), or None."""
    kl_coef: float = 0.0
    """Weight of the divergence; 0 needs no reference."""
    kl_in_reward: bool = False
    """Whether the divergence is taken off the reward instead of being added to the loss."""
    kl_aggregation: str | None = None
    """Aggregation of the divergence; None takes that of the policy term."""
    kl_clamp: bool = True
    """Whether k3 limits its exponent to +-20 and its value to +-10 (verl, EasyR1) or not (TRL)."""
    entropy: str | None = None
    """Entropy term: sampled (-logp of the decision), full (whole distribution), or None."""
    entropy_coef: float = 0.0
    """Weight of the entropy; positive rewards entropy, negative punishes it."""
    aggregation: str = "token_mean"
    """token_mean, sequence_mean (mean of row means), sequence_sum, fixed_length (sum / (rows * length))."""
    fixed_length: int | None = None
    """Constant length of the aggregation fixed_length: the longest response the sampler allows."""
    filter: str = "none"
    """Groups without a signal: none (keep), drop, resample (sample further tasks until the step is full)."""
    filter_key: str = "reward"
    """What the filter looks at: reward or the name of a reward term."""
    filter_low: float | None = None
    """Keep groups whose mean lies strictly above; None with filter_high None asks for different rewards."""
    filter_high: float | None = None
    """Keep groups whose mean lies strictly below."""
    value_coef: float = 0.0
    """Weight of the value loss."""
    value_clip: float | None = None
    """Largest move of a value away from its old prediction that the value loss rewards; None does not clip."""

    @property
    def needs_values(self) -> bool:
        """Whether the policy must have a value head."""
        return self.advantage in CRITIC_ESTIMATORS

    @property
    def needs_reference(self) -> bool:
        """Whether log-probabilities under the reference are used."""
        return self.kl is not None and self.kl_coef > 0

    @property
    def needs_entropy(self) -> bool:
        """Whether the policy must score the entropy of the whole distribution."""
        return self.entropy == "full" and self.entropy_coef != 0

    def validate(self) -> None:
        """Refuse unknown names and contradictions.

        Raises:
            ValueError: The message names the options, what they may be and what to try.
        """
        validate(self)

    def describe(self) -> str:
        """Return the formula this objective computes, with its constants.

        Raises:
            ValueError: The objective is not valid, so there is no such formula.
        """
        validate(self)
        return describe(self)

    def keep_groups(self, rollouts: Rollouts) -> Tensor:
        """Say which groups the filter keeps.

        Args:
            rollouts: Rows of whole groups, scored.

        Returns:
            (N,) bool; all true with filter "none".
        """
        if self.filter == "none":
            return torch.ones(rollouts.num_groups, dtype=torch.bool, device=rollouts.group.device)
        return zero_variance_groups(rollouts, self.filter_key, self.filter_low, self.filter_high)

    def compute_advantages(self, rollouts: Rollouts) -> Rollouts:
        """Turn rewards into advantages (and returns, with a critic).

        Call it on everything a rollout step produced, before minibatches are cut: groups must be whole and
        batch statistics are taken over all rows.

        Args:
            rollouts: Scored rows; with `logp_ref` if the divergence goes into the reward, with `values` if a
                critic is used.

        Returns:
            A copy with `advantage` (B, T), 0 where nothing is trained, and with a critic `returns` (B, T).

        Gradient: none; advantages and returns are constants.
        """
        with torch.no_grad():
            shaped = self._kl_shaped(rollouts) if self.kl_in_reward and self.needs_reference else rollouts
            advantage = look_up(ADVANTAGES, self.advantage, "advantage estimator")(shaped, self.advantage_options)
            mask = rollouts.loss_mask
            returns = rollouts.returns
            if self.needs_values and rollouts.values is not None:
                returns = torch.where(mask > 0, advantage + rollouts.values, 0.0)
            if self.advantage_options.whiten:
                advantage = masked_whiten(advantage, mask)
            limit = self.advantage_options.clip
            if limit is not None:
                advantage = advantage.clamp(-limit, limit)
            advantage = advantage * self.advantage_options.scale
        return rollouts.replace(advantage=advantage.to(rollouts.logp_old.dtype), returns=returns)

    def denominators(self, rollouts: Rollouts) -> Denominators:
        """Count what the loss of an optimiser step is divided by.

        Args:
            rollouts: Everything of this rank that goes into one optimiser step.

        Returns:
            The counts; add those of other ranks with `Denominators.total` before calling `loss`.
        """
        turns = float(turn_starts(rollouts).sum()) if self.advantage == "gae_turn" else 0.0
        return count(rollouts.loss_mask, length=self.fixed_length or 0.0, turns=turns)

    def loss(self, scores: PolicyOutputs, rollouts: Rollouts, denominators: Denominators) -> LossOutput:
        """Return the loss of a batch or micro-batch.

        Args:
            scores: The policy's current scores of these rollouts.
            rollouts: Rows with advantages; `extras["kl_weight"]` (B,) multiplies the divergence of each row.
            denominators: Counts over the whole optimiser step, so that the losses of its micro-batches add up.

        Returns:
            The scalar loss and its metrics.

        Raises:
            ValueError: Something the objective needs is missing or has the wrong shape.

        Gradient: through `scores` only.
        """
        mask = rollouts.loss_mask
        scores = _only(scores, mask)
        policy, metrics = self._policy_term(scores, rollouts, denominators)
        terms = {"loss/policy": policy}
        for name, term, more in (
            ("loss/kl", *self._kl_term(scores, rollouts, denominators)),
            ("loss/entropy", *self._entropy_term(scores, mask, denominators)),
            ("loss/value", *self._value_term(scores, rollouts, denominators)),
        ):
            metrics |= more
            if term is not None:
                terms[name] = term
        total = torch.stack(list(terms.values())).sum()
        summed = {name: Metric.summed(term.detach()) for name, term in {"loss/total": total, **terms}.items()}
        return LossOutput(total, summed | metrics)

    def _policy_term(
        self, scores: PolicyOutputs, rollouts: Rollouts, denominators: Denominators
    ) -> tuple[Tensor, dict[str, Metric]]:
        mask, logp_old = rollouts.loss_mask, rollouts.logp_old.detach()
        advantage = _need(rollouts.advantage, "rollouts.advantage", "compute_advantages(rollouts) sets it")
        log_rho = log_ratio(scores.logp, logp_old, mask, self.ratio)
        inputs = SurrogateInputs(
            logp=scores.logp,
            log_ratio=log_rho,
            advantage=torch.where(mask > 0, advantage, 0.0),
            mask=mask,
            clip_low=self.clip_low,
            clip_high=self.clip_high,
            dual_clip=self.dual_clip,
        )
        loss, indicators = surrogate(inputs, self.surrogate)
        rho = log_rho.detach().exp()
        metrics = {
            "policy/ratio_mean": mean_metric(rho, mask),
            "policy/ratio_max": max_metric(rho, mask),
            "policy/kl_old": mean_metric(kl(logp_old, scores.logp.detach(), "k3"), mask),
        }
        metrics |= {name: mean_metric(value, mask) for name, value in indicators.items()}
        return aggregate(loss, mask, self.aggregation, denominators), metrics

    def _kl_term(
        self, scores: PolicyOutputs, rollouts: Rollouts, denominators: Denominators
    ) -> tuple[Tensor | None, dict[str, Metric]]:
        if self.kl is None or not self.needs_reference:
            return None, {}
        mask = rollouts.loss_mask
        if self.kl == "full":
            divergence = _need(scores.kl_ref, "scores.kl_ref", "kl='full' needs the policy to score it")
        else:
            divergence = kl(scores.logp, self._reference(rollouts), self.kl, self.kl_clamp)
        metrics = {"policy/kl_ref": mean_metric(divergence, mask)}
        if self.kl_in_reward:
            return None, metrics
        mode = self.kl_aggregation or self.aggregation
        weighted = divergence * _row_weights(rollouts)
        return self.kl_coef * aggregate(weighted, mask, mode, denominators), metrics

    def _entropy_term(
        self, scores: PolicyOutputs, mask: Tensor, denominators: Denominators
    ) -> tuple[Tensor | None, dict[str, Metric]]:
        sampled = entropy_sampled(scores.logp)
        metrics = {"policy/entropy": mean_metric(sampled if scores.entropy is None else scores.entropy, mask)}
        if self.entropy is None or self.entropy_coef == 0:
            return None, metrics
        entropy = sampled
        if self.entropy == "full":
            entropy = _need(scores.entropy, "scores.entropy", "entropy='full' needs the policy to score it")
        return -self.entropy_coef * aggregate(entropy, mask, self.aggregation, denominators), metrics

    def _value_term(
        self, scores: PolicyOutputs, rollouts: Rollouts, denominators: Denominators
    ) -> tuple[Tensor | None, dict[str, Metric]]:
        if not self.needs_values or self.value_coef == 0:
            return None, {}
        mask, counts, mode = rollouts.loss_mask, denominators, self.aggregation
        if self.advantage == "gae_turn":
            # A turn-level critic is only asked at the first decision of a turn, so it is only trained there.
            mask, mode = turn_starts(rollouts).to(mask.dtype), "token_mean"
            counts = replace(denominators, tokens=denominators.turns)
        values = _need(scores.values, "scores.values", "the policy needs a value head")
        values_old = _need(rollouts.values, "rollouts.values", "the critic's predictions at sampling time")
        returns = _need(rollouts.returns, "rollouts.returns", "compute_advantages(rollouts) sets it")
        loss = value_loss(values, values_old, returns, self.value_clip)
        return self.value_coef * aggregate(loss, mask, mode, counts), {}

    def _kl_shaped(self, rollouts: Rollouts) -> Rollouts:
        assert self.kl is not None
        mask = rollouts.loss_mask
        divergence = kl(rollouts.logp_old, self._reference(rollouts), self.kl, self.kl_clamp)
        penalty = self.kl_coef * divergence * _row_weights(rollouts)
        shaped = decision_rewards(rollouts) - torch.where(mask > 0, penalty, 0.0)
        return rollouts.replace(
            reward=rollouts.reward - masked_sum(penalty, mask),
            extras={**rollouts.extras, "decision_reward": shaped},
        )

    def _reference(self, rollouts: Rollouts) -> Tensor:
        hint = f"kl='{self.kl}' compares with the reference policy; score it or set kl_coef=0"
        return _need(rollouts.logp_ref, "rollouts.logp_ref", hint).detach()


def _only(scores: PolicyOutputs, mask: Tensor) -> PolicyOutputs:
    """Check the scores and cut them off where nothing is trained, so that no NaN comes back from there."""
    masked = {}
    for name in ("logp", "entropy", "values", "kl_ref"):
        value = getattr(scores, name)
        if value is not None:
            check_decisions(f"scores.{name}", value, (mask.shape[0], mask.shape[1]))
            masked[name] = torch.where(mask > 0, value, 0.0)
    return PolicyOutputs(**masked)


def _row_weights(rollouts: Rollouts) -> Tensor:
    weight = rollouts.extras.get("kl_weight")
    return torch.ones_like(rollouts.reward)[:, None] if weight is None else weight.detach()[:, None]


def _need(value: Tensor | None, name: str, hint: str) -> Tensor:
    if value is None:
        raise ValueError(f"{name} is missing: {hint}.")
    return value
