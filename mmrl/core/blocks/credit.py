"""Credit along a row: returns to go, generalised advantage estimation, losses of critics."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from mmrl.core.block import Block
from mmrl.core.blocks.advantage import Advantage, masked_whiten, whitening
from mmrl.core.returns import decision_rewards, gae, gae_over_turns, returns_to_go
from mmrl.core.rollouts import Rollouts
from mmrl.fields import bounded, choice, rare

if TYPE_CHECKING:
    from torch import Tensor

TRUNCATIONS = {
    "bootstrap": "bootstrapped at time limits",
    "mask": "no advantage at time limits",
    "terminate": "ended by time limits",
    "repeat": "the last value kept beyond time limits",
}


@dataclass(frozen=True)
class WhitenedReturns(Advantage):
    """Discounted sum of rewards to go, whitened over all trained decisions; groups are ignored.

    Source: REINFORCE++, arXiv 2501.03262; verl 0.9.1 compute_reinforce_plus_plus_outcome_advantage.
    """

    kind = "whitened_returns"
    gamma: float = rare(bounded(1.0, at_least=0, at_most=1))
    """Discount per decision."""
    mask_carry: str = rare(choice("skip", ("skip", "reset")))
    """How returns pass untrained decisions such as tool output: "skip" carries the return across them, like GAE and
    verl; "reset" drops it, like earlier versions of verl, so that only the decisions after the last untrained one see
    the reward."""

    @property
    def level(self) -> str:
        return "decision"

    def __call__(self, rollouts: Rollouts) -> Tensor:
        mask = rollouts.loss_mask
        to_go = returns_to_go(decision_rewards(rollouts), mask, self.gamma, self.mask_carry)
        # whitening is the only baseline, so it is part of the estimator and not left to `scaling`
        return masked_whiten(to_go, mask)

    def formula(self) -> str:
        return f"A_it = whiten(sum_(s>=t) {self.gamma:g}^(s-t) R_is), {whitening('decisions')}"


VALUE_BEFORE, VALUE_AFTER, VALUE_STD = "value_before", "value_after", "value_std"
"""Extras (B, T): values of the states in which a decision's segment begins and ends, and the deviation of the values of
the segments that begin in the same state."""


@dataclass(frozen=True)
class CriticAdvantage(Advantage):
    """Generalised advantage estimation with a critic.

    Rows cut off by a time limit are marked in `rollouts.extras["truncated"]` (B,). The critic's value of the state in
    which they were cut off is in `rollouts.extras["bootstrap_value"]` (B,), 0 for rows that terminated and NaN if
    unknown.

    Source: "mask": ikostrikov/pytorch-a2c-ppo-acktr-gail a2c_ppo_acktr/storage.py, use_proper_time_limits;
        "repeat": T-PPO, arXiv 2506.15050.
    """

    gamma: float = rare(bounded(1.0, at_least=0, at_most=1))
    """Discount per step (a decision or a turn)."""
    lam: float = rare(bounded(1.0, at_least=0, at_most=1))
    """Lambda of GAE, the weight of longer returns."""
    truncation: str = rare(choice("bootstrap", TRUNCATIONS))
    """How to treat rows cut off by a time limit: "bootstrap" adds the critic's value of the state after the last step;
    "mask" gives the last step an advantage of 0 and earlier steps the critic's value of that step; "terminate" treats
    the limit as the end of the task; "repeat" uses the value before the last step for everything after it (EGAE)."""

    def numbers(self) -> str:
        """Constants shown in the formula."""
        return f"gamma {self.gamma:g}, lambda {self.lam:g}, {TRUNCATIONS[self.truncation]}"

    def cut_off(self, rollouts: Rollouts) -> dict[str, Tensor]:
        """Arguments of `gae` for rows that were cut off, (B,) each: bootstrap, masked, repeated."""
        truncated, value = rollouts.extras.get("truncated"), rollouts.extras.get("bootstrap_value")
        if self.truncation in ("mask", "repeat"):
            name = "masked" if self.truncation == "mask" else "repeated"
            # no row was cut off: nothing to treat
            return {} if truncated is None else {name: truncated > 0}
        if self.truncation == "terminate" or value is None:
            return {}
        # NaN: the critic could not be asked for the state after the last step, so the step is masked instead
        unknown = value.isnan()
        return {"bootstrap": value.masked_fill(unknown, 0.0), "masked": unknown}


@dataclass(frozen=True)
class Gae(CriticAdvantage):
    """Generalised advantage estimation over decisions; see `mmrl.core.returns.gae`."""

    kind = "gae"
    needs = frozenset({"values"})

    @property
    def level(self) -> str:
        return "decision"

    def __call__(self, rollouts: Rollouts) -> Tensor:
        rewards, mask = decision_rewards(rollouts), rollouts.loss_mask
        # only the advantages; the returns are formed in Objective.compute_advantages
        return gae(rewards, _values(rollouts), mask, self.gamma, self.lam, **self.cut_off(rollouts))[0]

    def formula(self) -> str:
        return f"A_it = GAE over decisions with {self.numbers()}"


@dataclass(frozen=True)
class TurnGae(CriticAdvantage):
    """Generalised advantage estimation over turns; see `mmrl.core.returns.gae_over_turns`.

    gamma and lambda count turns, and all decisions of a turn share its advantage.
    """

    kind = "gae_turn"
    needs = frozenset({"values", "turns"})

    @property
    def level(self) -> str:
        return "turn"

    def __call__(self, rollouts: Rollouts) -> Tensor:
        return gae_over_turns(rollouts, _values(rollouts), self.gamma, self.lam, **self.cut_off(rollouts))

    def formula(self) -> str:
        return f"A_it = GAE over turns with {self.numbers()}, the same for all decisions of a turn"


def _values(rollouts: Rollouts) -> Tensor:
    if rollouts.values is None:
        raise ValueError(
            "The estimators 'gae' and 'gae_turn' require rollouts.values (B, T), the critic's prediction before "
            "each decision. Load the policy with a value head, or use a group estimator such as 'group_mean_std'."
        )
    # constant: the critic learns from its own loss, not through the advantage
    return rollouts.values.detach()


def value_loss(
    values: Tensor, values_old: Tensor, returns: Tensor, clip: float | None = None, *, halved: bool = True
) -> Tensor:
    """Return half the squared error of the value head, optionally pessimistic about large moves.

    max((V - R)^2, (V_old + clip(V - V_old, -c, c) - R)^2) / 2

    Args:
        values: (B, T), current predictions.
        values_old: (B, T), predictions when the rows were sampled.
        returns: (B, T), targets.
        clip: c; None gives the plain squared error.
        halved: whether it is divided by 2.

    Returns:
        (B, T).

    Gradient: through `values`; none where the clipped branch is the larger one.

    Source: openai/baselines ppo2; volcengine/verl verl/trainer/ppo/core_algos.py compute_value_loss.
    """
    values_old, returns = values_old.detach(), returns.detach()
    error = (values - returns) ** 2
    if clip is not None:
        # the prediction may move by at most `clip`, as the policy's ratio does in PPO
        near = values_old + (values - values_old).clamp(-clip, clip)
        # the larger error, so that clipping never makes a bad value look good
        error = torch.maximum(error, (near - returns) ** 2)
    return 0.5 * error if halved else error


@dataclass(frozen=True)
class CriticLoss(Block):
    """Loss of an estimator's critic."""


@dataclass(frozen=True)
class ValueLoss(CriticLoss):
    """Squared error of the critic on the returns, optionally clipped; see `value_loss`."""

    kind = "squared_error"
    coef: float = rare(bounded(0.1, above=0))
    """Weight."""
    clip: float | None = rare(bounded(None, above=0))
    """Value clipping range around the old prediction; null disables it."""

    halved: bool = rare(True)
    """Whether the squared error is divided by 2 (verl, OpenRLHF) or not (VL-DAC)."""

    def __call__(self, values: Tensor, values_old: Tensor, returns: Tensor) -> Tensor:
        return value_loss(values, values_old, returns, self.clip, halved=self.halved)

    def formula(self) -> str:
        clip = f", V within V_old +-{self.clip:g} if that is worse" if self.clip else ""
        return f"{'0.5 ' if self.halved else ''}(V_it - (A + V_old)_it)^2{clip}"


@dataclass(frozen=True)
class SeparateCritic(CriticLoss):
    """No term in the loss: the recipe trains the critic separately from the policy, with its own optimiser."""

    kind = "separate"
    needs = frozenset({"separate_critic"})

    def formula(self) -> str:
        return "the critic is trained apart"
