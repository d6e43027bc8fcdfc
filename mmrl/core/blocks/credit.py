"""Credit along a row: returns to go and generalised advantage estimation, over decisions or over turns."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from mmrl.core.blocks.advantage import Advantage
from mmrl.core.groups import masked_whiten
from mmrl.core.returns import decision_rewards, gae, gae_over_turns, returns_to_go
from mmrl.core.rollouts import Rollouts
from mmrl.fields import bounded, choice

__all__ = ["Gae", "TurnGae", "WhitenedReturns"]


@dataclass(frozen=True)
class WhitenedReturns(Advantage):
    """Discounted sum of rewards to go, whitened over all trained decisions; groups are not looked at.

    Source: REINFORCE++, arXiv 2501.03262; verl 0.9.1 compute_reinforce_plus_plus_outcome_advantage.
    """

    kind = "whitened_returns"
    gamma: float = bounded(1.0, at_least=0, at_most=1)
    """Discount per decision."""
    mask_carry: str = choice("skip", ("skip", "reset"))
    """Untrained decisions such as tool output: "skip" carries the return across them, as GAE and verl do; "reset" drops
    it there, as verl did before, so that only the decisions after the last of them see the reward."""

    @property
    def level(self) -> str:
        """See `Advantage`."""
        return "decision"

    def __call__(self, rollouts: Rollouts) -> Tensor:
        """See `Advantage`."""
        mask = rollouts.loss_mask
        to_go = returns_to_go(decision_rewards(rollouts), mask, self.gamma, self.mask_carry)
        return masked_whiten(to_go, mask)

    def formula(self) -> str:
        """See `Block`."""
        return f"A_it = whiten_batch(sum_(s>=t) {self.gamma:g}^(s-t) R_is)"


@dataclass(frozen=True)
class Gae(Advantage):
    """Generalised advantage estimation over decisions; see `mmrl.core.returns.gae`.

    A truncated row (time limit, longest response) is bootstrapped where `rollouts.extras["bootstrap_value"]` (B,) holds
    the critic's value of its last state; it is 0 for rows that terminated.
    """

    kind = "gae"
    needs = frozenset({"values"})
    gamma: float = bounded(1.0, at_least=0, at_most=1)
    """Discount per decision."""
    lam: float = bounded(1.0, at_least=0, at_most=1)
    """Weight of longer returns, lambda."""

    @property
    def level(self) -> str:
        """See `Advantage`."""
        return "decision"

    def __call__(self, rollouts: Rollouts) -> Tensor:
        """See `Advantage`."""
        rewards, bootstrap = decision_rewards(rollouts), rollouts.extras.get("bootstrap_value")
        return gae(rewards, _values(rollouts), rollouts.loss_mask, self.gamma, self.lam, bootstrap)[0]

    def formula(self) -> str:
        """See `Block`."""
        return f"A_it = GAE over decisions with gamma {self.gamma:g}, lambda {self.lam:g}"


@dataclass(frozen=True)
class TurnGae(Advantage):
    """Generalised advantage estimation over turns; see `mmrl.core.returns.gae_over_turns`.

    gamma and lambda count turns, and all decisions of a turn share its advantage.
    """

    kind = "gae_turn"
    needs = frozenset({"values", "turns"})
    gamma: float = bounded(1.0, at_least=0, at_most=1)
    """Discount per turn."""
    lam: float = bounded(1.0, at_least=0, at_most=1)
    """Weight of longer returns, lambda."""

    @property
    def level(self) -> str:
        """See `Advantage`."""
        return "turn"

    def __call__(self, rollouts: Rollouts) -> Tensor:
        """See `Advantage`."""
        bootstrap = rollouts.extras.get("bootstrap_value")
        return gae_over_turns(rollouts, _values(rollouts), self.gamma, self.lam, bootstrap)

    def formula(self) -> str:
        """See `Block`."""
        numbers = f"gamma {self.gamma:g}, lambda {self.lam:g}"
        return f"A_it = GAE over turns with {numbers}, the same for all decisions of a turn"


def _values(rollouts: Rollouts) -> Tensor:
    if rollouts.values is None:
        raise ValueError(
            "The estimators 'gae' and 'gae_turn' need rollouts.values (B, T), the critic's prediction before each "
            "decision. Load the policy with a value head, or use a group estimator such as 'group_mean_std'."
        )
    return rollouts.values.detach()
