"""Divergences from a reference policy and entropies: functions, a weighted divergence, and an entropy bonus."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Self

import torch

from mmrl.core.block import Block
from mmrl.core.loss import Aggregation, PolicyOutputs, required
from mmrl.core.rollouts import Rollouts
from mmrl.fields import bounded, choice, rare

if TYPE_CHECKING:
    from torch import Tensor

EXPONENT_LIMIT = 20.0
VALUE_LIMIT = 10.0


def k1(logp: Tensor, logp_ref: Tensor) -> Tensor:
    """Estimate KL(policy || reference) at each sampled decision by d = logp - logp_ref.

    Used as a loss it has the gradient of the score function, whose mean under the policy is zero: it belongs into the
    reward. `k2` and `k3` have the same arguments.

    Args:
        logp: (...) nats, under the policy that took the decision.
        logp_ref: (...) nats, under the reference.

    Returns:
        (...) nats.

    Gradient: through both arguments; detach the reference.

    Source: Schulman, "Approximating KL divergence" (2020); volcengine/verl verl/trainer/ppo/core_algos.py kl_penalty.
    """
    return logp - logp_ref


def k2(logp: Tensor, logp_ref: Tensor) -> Tensor:
    """Estimate the divergence by d^2 / 2; see `k1`."""
    return 0.5 * (logp - logp_ref) ** 2


def k3(logp: Tensor, logp_ref: Tensor, clamp: bool = True) -> Tensor:
    """Estimate the divergence by exp(-d) + d - 1; see `k1`.

    Args:
        logp: (...) nats, under the policy that took the decision.
        logp_ref: (...) nats, under the reference.
        clamp: Whether to limit the exponent to +-20 and the value to +-10 (EasyR1, verl) or not (TRL, View-R1).

    Returns:
        (...) nats, not negative.
    """
    exponent = logp_ref - logp
    if not clamp:
        return torch.exp(exponent) - exponent - 1.0
    # without the limits, one token that the policy has all but ruled out would dominate the mean
    exponent = exponent.clamp(-EXPONENT_LIMIT, EXPONENT_LIMIT)
    return (torch.exp(exponent) - exponent - 1.0).clamp(-VALUE_LIMIT, VALUE_LIMIT)


def k1p(logp: Tensor, logp_ref: Tensor) -> Tensor:
    """`k1` with the gradient of `k2`."""
    return _straight_through(k1(logp, logp_ref), k2(logp, logp_ref))


def k3p(logp: Tensor, logp_ref: Tensor, clamp: bool = True) -> Tensor:
    """`k3` with the gradient of `k2`."""
    return _straight_through(k3(logp, logp_ref, clamp), k2(logp, logp_ref))


def kl_full(logits: Tensor, logits_ref: Tensor, temperature: float = 1.0) -> Tensor:
    """Return the exact KL(policy || reference) over the whole vocabulary.

    Args:
        logits: (..., V).
        logits_ref: (..., V); -inf must be at the same entries as in `logits`.
        temperature: Both are divided by it.

    Returns:
        (...) nats, float32 (float64 for float64 logits).

    Gradient: through both arguments; detach the reference.
    """
    logp = torch.log_softmax(_upcast(logits) / temperature, dim=-1)
    logp_ref = torch.log_softmax(_upcast(logits_ref) / temperature, dim=-1)
    # banned entries have probability 0, but 0 * (-inf - -inf) would be NaN
    allowed = torch.isfinite(logp)
    difference = torch.where(allowed, logp, 0.0) - torch.where(allowed, logp_ref, 0.0)
    return (logp.exp() * difference).sum(-1)


def generalized_jsd(logp: Tensor, logp_teacher: Tensor, beta: float) -> Tensor:
    """Generalised Jensen-Shannon divergence of a student p from a teacher q; the mixture is m = (1 - beta) p + beta q.

    Args:
        logp: (..., V) nats, of the student; very low, but finite, where a choice is impossible.
        logp_teacher: (..., V) nats, of the teacher.
        beta: 0 is KL(q || p), 1 is KL(p || q), anything between is beta KL(q || m) + (1 - beta) KL(p || m).

    Returns:
        (...) nats, not negative.

    Gradient: through both arguments; detach the teacher.

    Source: GKD, arXiv 2306.13649, eq. 1, with the ends as in huggingface/trl generalized_jsd_loss, where the paper's
        divergence is 0 and only its slope is a KL.
    """
    if beta in (0.0, 1.0):
        # the ends of GKD as TRL defines them, since the mixture equals one side there and the divergence is 0
        first, second = (logp_teacher, logp) if beta == 0 else (logp, logp_teacher)
        return (first.exp() * (first - second)).sum(-1)
    # in logs: the mixture of two tiny probabilities would round to 0 otherwise
    mixture = torch.logaddexp(logp + math.log1p(-beta), logp_teacher + math.log(beta))
    of_teacher = (logp_teacher.exp() * (logp_teacher - mixture)).sum(-1)
    return beta * of_teacher + (1.0 - beta) * (logp.exp() * (logp - mixture)).sum(-1)


def entropy_sampled(logp: Tensor) -> Tensor:
    """Estimate the entropy at each decision by the negative log-probability (...) of the sampled decision, in nats.

    Gradient: -d logp, whose mean under the policy is zero: the term acts only off policy.
    """
    return -logp


def entropy_from_logits(logits: Tensor, temperature: float = 1.0) -> Tensor:
    """Return the entropy of softmax(logits / temperature).

    Args:
        logits: (..., V); -inf marks entries that cannot be chosen.
        temperature: Divides the logits.

    Returns:
        (...) nats, float32 (float64 for float64 logits).
    """
    logp = torch.log_softmax(_upcast(logits) / temperature, dim=-1)
    # p log p is 0 where p is 0, but 0 * -inf is NaN
    return -(logp.exp() * torch.where(torch.isfinite(logp), logp, 0.0)).sum(-1)


def _upcast(x: Tensor) -> Tensor:
    # the softmax over a vocabulary loses too much in bfloat16
    return x if x.dtype == torch.float64 else x.float()


def _straight_through(value: Tensor, gradient: Tensor) -> Tensor:
    # on policy the gradient of k2 is an unbiased one of the KL and its value is not; k1 and k3 are the other way round
    return value.detach() + (gradient - gradient.detach())


@dataclass(frozen=True)
class Divergence(Block):
    """Divergence from the reference or the old policy, added to the loss or subtracted from the reward."""

    needs = frozenset({"logp_ref"})
    only_gradient: ClassVar[bool] = False
    """Whether the block differs from another block only in its gradient, so that it cannot be used in a reward."""
    coef: float = bounded(0.0, at_least=0)
    """Weight of the divergence; 0 needs no reference."""
    to: str = rare(choice("reference", ("reference", "old")))
    """Policy to measure the divergence from: "reference", or "old" (the policy that the update starts from), which
    needs no reference and has no effect with a single optimiser step per rollout step."""
    anneal: bool = rare(False)
    """Use the weight coef / t with t = max(1 - k / K, 0.05) in step k of K (mirror descent) instead of a constant
    one."""
    in_reward: bool = rare(False)
    """Subtract the divergence from the reward instead of adding it to the loss."""
    aggregation: Aggregation | None = rare(None)
    """Aggregation of the term; null uses the aggregation of the policy term."""
    importance: bool = rare(False)
    """Multiply the term by the importance ratio, including the ratio's gradient. The gradient of k3 is then an unbiased
    gradient of the reverse KL, also on policy (DeepSeek-V3.2, arXiv 2512.02556; use_bias_correction_kl of TRL, where it
    is the default)."""

    def __call__(self, outputs: PolicyOutputs, rollouts: Rollouts) -> Tensor:
        """Divergence (B, T) in nats of the policy's current outputs, with gradient."""
        return self.estimate(outputs.logp, self.reference(rollouts))

    def estimate(self, logp: Tensor, logp_ref: Tensor) -> Tensor:
        """Divergence (...) from log-probabilities (...) of the sampled decisions."""
        raise NotImplementedError

    def penalty(self, rollouts: Rollouts) -> Tensor:
        """Penalty on the rewards of the decisions (B, T), from the log-probabilities at sampling time."""
        # at sampling time: a reward must not carry the gradient of the current policy
        return self.coef * self.estimate(rollouts.logp_old, self.reference(rollouts)) * row_weights(rollouts)

    @property
    def inputs(self) -> frozenset[str]:
        # with `to: old` it reads only logp_old, so no reference model is loaded for it
        return self.needs if self.to == "reference" else self.needs - {"logp_ref"}

    def at(self, progress: float) -> Self:
        """The block with its weight after a fraction of the run's steps."""
        # at most 20 times the coefficient, at the end of the run
        return self.replace(coef=self.coef / max(1.0 - progress, 0.05)) if self.anneal else self

    def terms(self, factor: str = "") -> str:
        """Weight and formula of the term in the loss, with an additional factor per decision."""
        weight = f"{self.coef:g}{' / max(1 - k/K, 0.05)' if self.anneal else ''}"
        divergence = self.formula()
        if self.to == "old":
            divergence = divergence.replace("logp_ref_it", "logp_old_it").replace("|| reference", "|| old policy")
        return f"{weight} * mean {factor}{'r_it ' if self.importance else ''}{divergence}"

    def reference(self, rollouts: Rollouts) -> Tensor:
        """Log-probabilities under the policy to compare with; raises ValueError if they are missing."""
        if self.to == "old":
            # constant: the term pulls the policy to the reference, never the reverse
            return rollouts.logp_old.detach()
        hint = f"kl '{self.kind}' needs log-probabilities of the reference policy; compute them or set its coef to 0"
        return required(rollouts.logp_ref, "rollouts.logp_ref", hint).detach()

    def problems(self, where: str) -> Iterator[str]:
        yield from super().problems(where)
        if self.in_reward and self.only_gradient:
            yield f"{where} '{self.kind}' only changes a gradient, and rewards have no gradient. Use '{self.kind[:2]}'."
        if self.in_reward and (self.to == "old" or self.anneal):
            option = f"{where}.to 'old'" if self.to == "old" else f"{where}.anneal"
            yield f"{option} only applies to a term of the loss, not to the reward. Remove {where}.in_reward."
        if self.in_reward and self.aggregation is not None:
            yield f"{where}.aggregation has no effect with {where}.in_reward. Set only one of them."
        if self.in_reward and self.importance:
            yield f"{where}.importance has no effect with {where}.in_reward. Set only one of them."


@dataclass(frozen=True)
class K1(Divergence):
    """Estimate d = logp - logp_ref of the sampled decision; see `mmrl.core.blocks.divergence.k1`."""

    kind = "k1"

    def estimate(self, logp: Tensor, logp_ref: Tensor) -> Tensor:
        return k1(logp, logp_ref)

    def formula(self) -> str:
        return "(logp_it - logp_ref_it)"


@dataclass(frozen=True)
class K2(Divergence):
    """Estimate d^2 / 2 with d = logp - logp_ref; see `mmrl.core.blocks.divergence.k2`."""

    kind = "k2"

    def estimate(self, logp: Tensor, logp_ref: Tensor) -> Tensor:
        return k2(logp, logp_ref)

    def formula(self) -> str:
        return "0.5 (logp_it - logp_ref_it)^2"


@dataclass(frozen=True)
class K3(Divergence):
    """Estimate exp(-d) + d - 1 with d = logp - logp_ref; see `mmrl.core.blocks.divergence.k3`."""

    kind = "k3"
    clamp: bool = rare(True)
    """Whether to limit the exponent to +-20 and the value to +-10 (verl, EasyR1) or not (TRL)."""

    def estimate(self, logp: Tensor, logp_ref: Tensor) -> Tensor:
        return k3(logp, logp_ref, self.clamp)

    def formula(self) -> str:
        limits = " (exponent within +-20, value within +-10)" if self.clamp and not self.in_reward else ""
        gradient = "; gradient of k2" if self.only_gradient else ""
        return f"(exp(logp_ref_it - logp_it) - (logp_ref_it - logp_it) - 1{gradient}){limits}"


@dataclass(frozen=True)
class K1StraightThrough(Divergence):
    """The value of k1 with the gradient of k2."""

    kind = "k1p"
    only_gradient = True

    def estimate(self, logp: Tensor, logp_ref: Tensor) -> Tensor:
        return k1p(logp, logp_ref)

    def formula(self) -> str:
        return "(logp_it - logp_ref_it; gradient of k2)"


@dataclass(frozen=True)
class K3StraightThrough(K3):
    """The value of k3 with the gradient of k2."""

    kind = "k3p"
    only_gradient = True

    def estimate(self, logp: Tensor, logp_ref: Tensor) -> Tensor:
        return k3p(logp, logp_ref, self.clamp)


@dataclass(frozen=True)
class ExactKl(Divergence):
    """The exact divergence over the whole action distribution, computed by the policy."""

    kind = "full"
    needs = frozenset({"kl_ref"})

    @property
    def inputs(self) -> frozenset[str]:
        return self.needs if self.to == "reference" else frozenset({"kl_old"})

    def __call__(self, outputs: PolicyOutputs, rollouts: Rollouts) -> Tensor:
        name = "kl_ref" if self.to == "reference" else "kl_old"
        # the policy has both distributions at hand, so the core only checks that it has compared them
        return required(getattr(outputs, name), f"scores.{name}", "the policy must compute it for kl 'full'")

    def formula(self) -> str:
        return "KL(policy || reference) over the whole distribution"

    def problems(self, where: str) -> Iterator[str]:
        yield from super().problems(where)
        if self.in_reward:
            yield f"{where} 'full' cannot be used in the reward because it is computed during the update. Use 'k1'."


@dataclass(frozen=True)
class Entropy(Block):
    """Entropy bonus."""

    coef: float = 0.0
    """Weight of the bonus; positive rewards entropy, negative penalises it."""

    def __call__(self, outputs: PolicyOutputs) -> Tensor:
        """Entropy (B, T) in nats, with gradient."""
        raise NotImplementedError

    def of_rollouts(self, outputs: PolicyOutputs, rollouts: Rollouts) -> Tensor:
        """The bonus (B, T) of rollouts, with gradient; for blocks that need more than the policy's outputs."""
        return self(outputs)


@dataclass(frozen=True)
class SampledEntropy(Entropy):
    """-logp of the sampled decision; see `entropy_sampled`."""

    kind = "sampled"

    def __call__(self, outputs: PolicyOutputs) -> Tensor:
        return entropy_sampled(outputs.logp)

    def formula(self) -> str:
        return "(-logp_it)"


@dataclass(frozen=True)
class FullEntropy(Entropy):
    """Entropy of the whole action distribution, computed by the policy."""

    kind = "full"
    needs = frozenset({"entropy"})

    def __call__(self, outputs: PolicyOutputs) -> Tensor:
        return required(outputs.entropy, "scores.entropy", "the policy must compute it for entropy 'full'")

    def formula(self) -> str:
        return "H_it"


def row_weights(rollouts: Rollouts) -> Tensor:
    """Factor of each row's divergence (B, 1): `extras["kl_weight"]` (B,), or 1."""
    weight = rollouts.extras.get("kl_weight")
    return torch.ones_like(rollouts.reward)[:, None] if weight is None else weight.detach()[:, None]


SHARE = "entropy_share"
"""Key of `Rollouts.extras` (B,): this step's entropy weight as a fraction of the maximum, the same for all rows."""


class MovingWeight:
    """A weight that changes with each step."""

    def __init__(self, value: float) -> None:
        self.value = value

    def state_dict(self) -> dict[str, float]:
        """Return the state to store in a checkpoint."""
        return {"value": self.value}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Continue from a checkpoint."""
        self.value = state["value"]


@dataclass(frozen=True)
class TargetEntropy(FullEntropy):
    """Entropy of the whole action distribution, rewarded while it is at most a target, with an adaptive weight c.

    In a step that begins with mean entropy e, the weight is c if e <= target, else 0. Then c changes by `step`, up if e
    < target, else down, and stays between 0 and `coef`.

    Source: Skywork-OR1, arXiv 2505.22312, section 3.2.3; huggingface/trl use_adaptive_entropy, which changes it with
    each optimiser step and compares with the entropy of the previous one.
    """

    kind = "target"
    needs = frozenset({"entropy", "entropy_old"})
    coef: float = rare(bounded(1.0, above=0))
    """Maximum weight."""
    target: float = rare(bounded(0.2, above=0))
    """Target mean entropy in nats."""
    step: float = rare(bounded(0.005, above=0))
    """Change of the weight per step of the run."""
    start: float = rare(bounded(0.0, at_least=0))
    """Weight at the start of the run."""

    def problems(self, where: str) -> Iterator[str]:
        yield from super().problems(where)
        if self.start > self.coef:
            yield f"{where}.start {self.start:g} must be at most {where}.coef {self.coef:g}"

    def state(self) -> MovingWeight:
        """The weight."""
        return MovingWeight(self.start)

    def observe(self, rollouts: Rollouts, state: MovingWeight) -> Rollouts:
        """Record the weight of this step and update it."""
        entropy = required(
            rollouts.entropy, "rollouts.entropy", "entropy 'target' compares the entropy with its target"
        )
        trained, share = rollouts.loss_mask > 0, 0.0
        # a step without a trained decision leaves the weight as it is
        if bool(trained.any()):
            # in float64: the comparison with the target must not depend on the order of summation
            mean = float(entropy[trained].double().mean())
            # relative to the largest weight, because the loss multiplies by `coef` once more
            share = state.value / self.coef if mean <= self.target else 0.0
            moved = state.value + (self.step if mean < self.target else -self.step)
            state.value = min(max(moved, 0.0), self.coef)
        # as an entry of the rows, so that each micro-batch finds it and no state reaches the loss
        return rollouts.replace(extras=rollouts.extras | {SHARE: torch.full_like(rollouts.reward, share)})

    def of_rollouts(self, outputs: PolicyOutputs, rollouts: Rollouts) -> Tensor:
        """Bonus (B, T), with gradient."""
        share = required(rollouts.extras.get(SHARE), f"rollouts.extras['{SHARE}']", "compute_advantages sets it")
        return share[:, None] * self(outputs)

    def formula(self) -> str:
        return (
            f"H_it c / {self.coef:g} where mean H <= {self.target:g}, c from {self.start:g} by +-{self.step:g} a step "
            f"within 0 and {self.coef:g}"
        )
