"""Weights and gates for decisions whose sampler differs slightly from the policy that the update starts from.

An inference engine computes other log-probabilities than the trainer: its kernels, its precision or its weights are
others. Below, d = logp_old - logp_rollout, and rho is exp(d) of a decision ("token"), exp(sum_t d) of its row
("sequence") or exp(mean_t d) of its row ("geometric"); logarithms are limited to +-20. Rejected decisions still count
in the denominators, as in TRL and IcePop.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from mmrl.core.block import Block
from mmrl.core.blocks.clip import LOG_RATIO_LIMIT
from mmrl.core.loss import PolicyOutputs, masked_mean, masked_sum, required
from mmrl.core.rollouts import Rollouts
from mmrl.fields import bounded, choice

if TYPE_CHECKING:
    from torch import Tensor

EXPONENTS = {"token": "d_it", "sequence": "sum_t d_it", "geometric": "mean_t d_it"}


def mismatch_ratio(difference: Tensor, mask: Tensor, level: str) -> Tensor:
    """The ratio rho (B, T) of trainer to sampler at a level of `EXPONENTS`, from d (B, T); no gradient."""
    # constant: the weight corrects for the sampler and does not itself teach the policy
    difference = difference.detach()
    if level != "token":
        # the sum grows with the length of a row, the mean does not
        reduce = masked_sum if level == "sequence" else masked_mean
        difference = reduce(difference, mask)[:, None].expand_as(mask)
    # of sums too: a long row leaves the range of exp even with small differences a token
    return difference.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


@dataclass(frozen=True)
class Interval(Block):
    """Two bounds of rho, one of which may be missing."""

    needs = frozenset({"logp_rollout"})
    low: float | None = bounded(None, at_least=0)
    """Lower bound of rho; null disables it."""
    high: float | None = bounded(None, above=0)
    """Upper bound of rho; null disables it."""

    def problems(self, where: str) -> Iterator[str]:
        yield from super().problems(where)
        if self.low is None and self.high is None:
            yield f"{where}.low and {where}.high are both null, so nothing would be bounded; set at least one"
        elif self.low is not None and self.high is not None and self.low >= self.high:
            yield f"{where}.low {self.low:g} must be below {where}.high {self.high:g}"

    def of_rollouts(self, difference: Tensor, outputs: PolicyOutputs, rollouts: Rollouts) -> Tensor:
        """The weights (B, T); for blocks that need more than d (B, T)."""
        return self(difference, rollouts.loss_mask)

    def __call__(self, difference: Tensor, mask: Tensor) -> Tensor:
        """Weights (B, T) from d (B, T), 0 where a decision is rejected; no gradient."""
        raise NotImplementedError

    def holds(self, rho: Tensor) -> Tensor:
        """Mask (B, T) bool of the decisions whose rho (B, T) is within the bounds."""
        inside = torch.ones_like(rho, dtype=torch.bool)
        # a bound that is not set does not reject
        if self.low is not None:
            inside &= rho >= self.low
        if self.high is not None:
            inside &= rho <= self.high
        return inside

    def bounds(self) -> str:
        """The bounds in a formula."""
        return f"[{0.0 if self.low is None else self.low:g}, {'inf' if self.high is None else f'{self.high:g}'}]"


@dataclass(frozen=True)
class Correction(Interval):
    """Importance weight of each decision's policy loss that corrects for the difference between the two policies."""

    level: str = choice("token", tuple(EXPONENTS))
    """token: each decision has its own rho; sequence: the product over its row; geometric: the geometric mean over its
    row."""

    def __call__(self, difference: Tensor, mask: Tensor) -> Tensor:
        """Weights (B, T) from d (B, T), 0 where a decision is rejected; no gradient."""
        # the ratio of a row is the same for all its decisions
        return self.of(mismatch_ratio(difference, mask, self.level))

    def of(self, rho: Tensor) -> Tensor:
        """Weights (B, T) of ratios (B, T)."""
        raise NotImplementedError

    def formula(self) -> str:
        return f"{self.rule()}, rho_it = exp({EXPONENTS[self.level]}), d_it = logp_old_it - logp_rollout_it"

    def rule(self) -> str:
        """The weight of the formula."""
        raise NotImplementedError


@dataclass(frozen=True)
class Truncated(Correction):
    """Truncated importance sampling (TIS): rho within the bounds, the nearer bound outside.

    Source: Yao et al., Your Efficient RL Framework Secretly Brings You Off-Policy RL Training, 2025; huggingface/trl
        vllm_importance_sampling_mode token_truncate and sequence_truncate; volcengine/verl rollout_is.
    """

    kind = "truncated"
    high: float | None = bounded(2.0, above=0)

    def of(self, rho: Tensor) -> Tensor:
        return rho.clamp(self.low, self.high)

    def rule(self) -> str:
        return f"w_it = clip(rho_it, {self.bounds()[1:-1]})"


@dataclass(frozen=True)
class Masked(Correction):
    """Masked importance sampling (MIS): rho within the bounds, 0 outside; by default IcePop.

    Source: IcePop in Ring-1T, arXiv 2510.18855 (token, 0.5 to 5); Liu et al., When Speed Kills Stability, 2025
        (sequence); huggingface/trl vllm_importance_sampling_mode token_mask and sequence_mask (to 3).
    """

    kind = "masked"
    low: float | None = bounded(0.5, at_least=0)
    high: float | None = bounded(5.0, above=0)

    def of(self, rho: Tensor) -> Tensor:
        # 0 rather than the bound: a decision this far off is taken for a fault of the engine
        return torch.where(self.holds(rho), rho, 0.0)

    def rule(self) -> str:
        return f"w_it = rho_it within {self.bounds()}, 0 outside"


@dataclass(frozen=True)
class Gate(Interval):
    """Excludes decisions with rho out of bounds from the policy loss; the others keep their weight.

    With `trainer.old_logp: sampler`, old and sampled log-probabilities are the same, so rho uses the updated policy
    instead of the old one.
    """

    level: ClassVar[str]
    """A key of `EXPONENTS`."""

    def __call__(self, difference: Tensor, mask: Tensor) -> Tensor:
        """Weights (B, T), 1 or 0, from d (B, T)."""
        # 1 or 0: a gate selects and does not weigh
        return self.holds(mismatch_ratio(difference, mask, self.level)).to(difference.dtype)

    def formula(self) -> str:
        what = "decisions" if self.level == "token" else "rows"
        exponent = EXPONENTS[self.level].replace("d_it", "(logp_old_it - logp_rollout_it)")
        return f"{what} with exp({exponent}) outside {self.bounds()} are left out of the policy loss"


@dataclass(frozen=True)
class TokenGate(Gate):
    """Drops each decision by its own rho (verl rollout_rs token_k1, with the bounds of 1 / rho)."""

    kind = level = "token"
    low: float | None = bounded(0.5, at_least=0)
    high: float | None = bounded(2.0, above=0)


@dataclass(frozen=True)
class SequenceGate(Gate):
    """Drops whole rows by the product of their ratios (verl rollout_rs seq_sum_k1, with the bounds of 1 / rho)."""

    kind = level = "sequence"
    low: float | None = bounded(0.5, at_least=0)
    high: float | None = bounded(2.0, above=0)


@dataclass(frozen=True)
class GeometricGate(Gate):
    """Drops whole rows by the geometric mean of their ratios, which does not grow with their length.

    Source: Liu et al., When Speed Kills Stability, 2025, part 3; volcengine/verl rollout_rs seq_mean_k1, with the
        bounds of 1 / rho.
    """

    kind = level = "geometric"
    low: float | None = bounded(0.999, at_least=0)
    high: float | None = bounded(1.001, above=0)


@dataclass(frozen=True)
class OffPolicyGate(Block):
    """Drops rows with a negative advantage that the policy has moved away from; rows with a positive one stay.

    The distance is the row's mean of logp_rollout - logp, an estimate of the divergence of the sampler from the updated
    policy. Without log-probabilities of the sampler, those of the old policy are used.

    Source: off-policy sequence masking in DeepSeek-V3.2, arXiv 2512.02556, eq. 9; huggingface/trl
        off_policy_mask_threshold.
    """

    kind = "off_policy"
    limit: float = bounded(0.5, above=0)
    """Maximum distance in nats per decision."""

    def of_rollouts(self, difference: Tensor, outputs: PolicyOutputs, rollouts: Rollouts) -> Tensor:
        """Weights (B, T), 1 or 0, from the policy's outputs and rollouts with advantages; d (B, T) is not used."""
        # without the sampler's own log-probabilities, logp_old is them
        sampler = rollouts.logp_old if rollouts.logp_rollout is None else rollouts.logp_rollout
        # one distance per row: dropping single tokens would leave a row half learnt
        distance = masked_mean(sampler.detach() - outputs.logp.detach(), rollouts.loss_mask)[:, None]
        advantage = required(rollouts.advantage, "rollouts.advantage", "compute_advantages(rollouts) sets it")
        # rows to imitate stay at any distance: raising their probability also brings the policy back
        return ((advantage >= 0) | (distance <= self.limit)).to(outputs.logp.dtype)

    def formula(self) -> str:
        return f"rows with A_i < 0 and mean_t (logp_rollout_it - logp_it) above {self.limit:g} are left out"
