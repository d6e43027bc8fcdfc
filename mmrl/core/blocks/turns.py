"""Advantages of the turns of an agent, and rules for episodes that branch from others."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mmrl.core.blocks.advantage import Advantage, GroupEstimator, group_center, group_mean_std, group_std, group_sum
from mmrl.core.blocks.clip import BoundedClip, Loss, PpoClip
from mmrl.core.blocks.weight import Weight
from mmrl.core.loss import masked_sum, required
from mmrl.core.returns import decision_rewards, gae_over_turns, returns_to_go, turn_starts, turn_sums
from mmrl.core.rollouts import Rollouts
from mmrl.fields import bounded, choice, rare

ANCHOR = "anchor"
"""Key of `Rollouts.extras` (B, T) int64: the state in which a decision's turn began, the same number for equal ones."""

GAIN = "information_gain"
"""Key of `Rollouts.extras` (B, T): what a turn added to the probability of the true answer, at its last decision."""


@dataclass(frozen=True)
class GroupInGroup(Advantage):
    """Compares episodes of a group, and in it turns that began in the same state, `extras["anchor"]`.

    A turn whose state no other turn of the group began in has the advantage of its episode alone.

    Source: GiGPO, arXiv 2505.10978, eq. 3-8; langfengQ/DrMAS gigpo/core_gigpo.py.
    """

    kind = "group_in_group"
    needs = frozenset({"samples", "turns", "anchors"})
    weight: float = rare(bounded(1.0, at_least=0))
    """Weight of the comparison of turns, omega."""
    gamma: float = rare(bounded(0.95, at_least=0, at_most=1))
    """Discount per turn of the rewards that a turn is compared by."""
    std: bool = rare(False)
    """Whether both differences are divided by the standard deviation of the compared rewards."""
    episode_mean: str = rare(choice("turns", ("turns", "episodes")))
    """Mean and deviation of episodes: over "turns", in which an episode counts as often as it has turns (as released),
    or over "episodes" (as in the paper)."""

    @property
    def level(self) -> str:
        return "turn"

    def __call__(self, rollouts: Rollouts) -> Tensor:
        starts = turn_starts(rollouts)
        row, column = torch.nonzero(starts, as_tuple=True)
        to_go = gae_over_turns(rollouts, torch.zeros_like(rollouts.logp_old), self.gamma, 1.0)
        anchor = required(rollouts.extras.get(ANCHOR), f'rollouts.extras["{ANCHOR}"]', "the state of each turn, (B, T)")
        states = torch.stack([rollouts.group[row], anchor[row, column]])
        of_turns = self._compared(to_go[row, column], torch.unique(states, dim=1, return_inverse=True)[1])
        if self.episode_mean == "turns":
            of_episodes = self._compared(rollouts.reward[row], torch.unique(states[0], return_inverse=True)[1])
        else:
            of_episodes = self._compared(rollouts.reward, rollouts.group, rollouts.scored)[row]
        table = torch.zeros_like(to_go).index_put((row, column), (of_episodes + self.weight * of_turns).to(to_go.dtype))
        first = torch.where(starts, torch.arange(starts.shape[1], device=starts.device), 0).cummax(1).values
        return torch.where(rollouts.loss_mask > 0, table.gather(1, first), 0.0)

    def _compared(self, values: Tensor, group: Tensor, valid: Tensor | None = None) -> Tensor:
        """Values (n,) minus the mean of their group, over its standard deviation if asked for."""
        valid = torch.ones_like(values, dtype=torch.bool) if valid is None else valid
        centred = group_center(values, group, valid)
        return centred / (group_std(values, group, valid) + 1e-6) if self.std else centred

    def formula(self) -> str:
        over = " / (std + 1e-6)" if self.std else ""
        return (
            f"A_ik = (R_i - mean_g R){over} + {self.weight:g} * (G_ik - mean of G from the same state){over}, "
            f"G_ik = sum_(l>=k) {self.gamma:g}^(l-k) R_il, mean_g over {self.episode_mean}; the same for all decisions "
            "of turn k"
        )


@dataclass(frozen=True)
class TurnReturns(Advantage):
    """Discounted returns from each turn on, over the largest of the row in size; no baseline.

    Source: EPO, arXiv 2502.12486; lxqpku/EPO LLaMA-Factory/data_new/utils/preprocessing.py.
    """

    kind = "turn_returns"
    needs = frozenset({"turns"})
    gamma: float = rare(bounded(0.99, at_least=0, at_most=1))
    """Discount per turn."""

    @property
    def level(self) -> str:
        return "turn"

    def __call__(self, rollouts: Rollouts) -> Tensor:
        rewards, place = turn_sums(rollouts, decision_rewards(rollouts))
        real = turn_sums(rollouts, turn_starts(rollouts).to(rewards.dtype))[0]
        to_go = returns_to_go(rewards, real, self.gamma)
        largest = to_go.abs().amax(1, keepdim=True)
        scaled = to_go / torch.where(largest > 0, largest, 1.0)
        return torch.where(rollouts.loss_mask > 0, scaled.gather(1, place), 0.0)

    def formula(self) -> str:
        return (
            f"A_ik = G_ik / max_k |G_ik|, G_ik = sum_(l>=k) {self.gamma:g}^(l-k) R_il; the same for all decisions of "
            "turn k"
        )


@dataclass(frozen=True)
class InformationGain(Advantage):
    """Advantages of turns by their rewards and their gains of information, `extras["information_gain"]`.

    The recipe scores the true answer behind the conversation before each turn. A turn's gain is the probability after
    it minus that before; the last turn of an episode has its reward alone.
    """

    needs = frozenset({"samples", "turns", "information_gain"})
    entry: str = rare("answer")
    """Entry of the task that is its true answer."""
    before: str = rare("")
    """Text between the conversation and the answer, as the agent would write it; it is not scored."""
    log: bool = rare(False)
    """Whether a gain is the difference of mean log-probabilities of the answer's tokens (as in the scripts of the later
    public code) and not of their exponentials."""

    def rewards(self, rollouts: Rollouts) -> Tensor:
        """Rewards and gains (B, T), each at the last decision of its turn."""
        gains = required(rollouts.extras.get(GAIN), f'rollouts.extras["{GAIN}"]', "the gain of each turn, (B, T)")
        return decision_rewards(rollouts) + torch.where(rollouts.loss_mask > 0, gains, 0.0)


@dataclass(frozen=True)
class TurnNormalised(InformationGain):
    """Rewards of turns, normalised over all turns of the group, summed from each turn on.

    Source: IGPO, arXiv 2510.14967; debajoycs98/IGPO verl/trainer/ppo/core_algos.py.
    """

    kind = "turn_normalised"
    gamma: float = rare(bounded(1.0, at_least=0, at_most=1))
    """Discount per turn."""
    apart: bool = rare(False)
    """Whether the last turns of episodes are normalised among themselves, and the others among themselves."""

    @property
    def level(self) -> str:
        return "turn"

    def __call__(self, rollouts: Rollouts) -> Tensor:
        rewards, place = turn_sums(rollouts, self.rewards(rollouts))
        real = turn_sums(rollouts, turn_starts(rollouts).to(rewards.dtype))[0] > 0
        row, turn = torch.nonzero(real, as_tuple=True)
        last = (turn + 1 == real.sum(1)[row]) if self.apart else torch.zeros_like(turn)
        among = torch.unique(2 * rollouts.group[row] + last, return_inverse=True)[1]
        valid = torch.ones_like(row, dtype=torch.bool)
        deviation = (group_std(rewards[real], among, valid, ddof=0) ** 2 + 1e-8).sqrt() + 1e-6
        normalised = torch.zeros_like(rewards).index_put(
            (row, turn), group_center(rewards[real], among, valid) / deviation
        )
        to_go = returns_to_go(normalised, real.to(rewards.dtype), self.gamma)
        return torch.where(rollouts.loss_mask > 0, to_go.gather(1, place), 0.0)

    def formula(self) -> str:
        among = "the group's last turns, or its others" if self.apart else "the turns of the group"
        mean = "mean log p(token of the answer | turns up to l)"
        gain = mean if self.log else f"exp({mean})"
        return (
            f"A_ik = sum_(l>=k) {self.gamma:g}^(l-k) (r_il - mean r) / std r over {among}; r_il = reward + {gain} - "
            "the same before turn l"
        )


@dataclass(frozen=True)
class PerPosition(InformationGain):
    """Sum of the rewards from each token on, minus its mean over the group at the same position in the episode.

    Positions of different episodes are not comparable: the mean is over turns of different depth, and over episodes
    that have ended, with 0.

    Source: GuoqingWang1/IGPO verl/trainer/ppo/core_algos.py, compute_grpo_outcome_advantage.
    """

    kind = "per_position"

    @property
    def level(self) -> str:
        return "decision"

    def __call__(self, rollouts: Rollouts) -> Tensor:
        turn = required(rollouts.turn, "rollouts.turn", "the turn of each decision, (B, T)")
        to_go = returns_to_go(self.rewards(rollouts), (turn >= 0).to(rollouts.mask.dtype), 1.0)
        scored = rollouts.scored.to(to_go.dtype)
        count = group_sum(scored, rollouts.group, rollouts.num_groups).clamp(min=1)
        total = to_go.new_zeros(rollouts.num_groups, to_go.shape[1]).index_add(
            0, rollouts.group, to_go * scored[:, None]
        )
        return torch.where(rollouts.loss_mask > 0, to_go - (total / count[:, None])[rollouts.group], 0.0)

    def formula(self) -> str:
        return "A_it = G_it - mean_g of G at position t, G_it = sum of rewards and gains of information from token t on"


PARENT, SHARED = "parent", "shared"
"""Keys of `Rollouts.extras` (B,) int64: how many rows before a row the one is that it branched from, 0 for none, and
how many of its first decisions it has in common with that one."""


@dataclass(frozen=True)
class GroupBranches(GroupEstimator):
    """`group_mean_std`, averaged on a decision that several rows share over these rows.

    Source: ARPO, arXiv 2507.19849, section 3.2 (hard advantage estimation); its code has none of it.
    """

    kind = "group_branches"
    needs = frozenset({"samples", "branches"})

    @property
    def level(self) -> str:
        return "decision"

    def of_rows(self, reward: Tensor, group: Tensor, valid: Tensor) -> Tensor:
        return group_mean_std(reward, group, valid=valid)

    def __call__(self, rollouts: Rollouts) -> Tensor:
        parent, shared = (
            required(rollouts.extras.get(key), f'rollouts.extras["{key}"]', "") for key in (PARENT, SHARED)
        )
        advantage, trained = super().__call__(rollouts), rollouts.loss_mask > 0
        rows, width = advantage.shape
        place = torch.arange(width, device=advantage.device)
        first = torch.arange(rows, device=advantage.device)[:, None].expand(rows, width)
        for _ in range(rows):  # up the tree, to the row that each decision was sampled in
            above = torch.where(place < shared[first], first - parent[first], first)
            if torch.equal(above, first):
                break
            first = above
        node = (first * width + place).flatten()
        total, count = (
            advantage.new_zeros(rows * width).index_add(0, node, x.to(advantage.dtype).flatten())
            for x in (advantage, trained)
        )
        return torch.where(trained, (total / count.clamp(min=1))[node].view(rows, width), 0.0)

    def rule(self) -> str:
        return "mean over the rows that share decision t of (R_i - mean_g R) / (std_g R + 1e-06)"


@dataclass(frozen=True)
class GradientPreserving(BoundedClip):
    """PPO's clipped surrogate whose upper bound keeps the gradient of log p, at the size that it has at the bound.

    Source: AEPO, arXiv 2510.14545; mowenruan/ARPO AEPO/verl_aepo_entropy/verl/trainer/ppo/core_algos.py.
    """

    kind = "gradient_preserving"
    dual: float | None = rare(bounded(None, above=1))
    """Bound c > 1 (3 is usual) on the loss -A c where the advantage is negative; none switches it off."""

    def __call__(self, log_ratio: Tensor, logp: Tensor, advantage: Tensor, turn: Tensor | None = None) -> Loss:
        loss, indicators = PpoClip(self.low, self.high, self.dual)(log_ratio, logp, advantage)
        bound = (1.0 + self.high) * (log_ratio - log_ratio.detach()).exp()
        beyond = (advantage > 0) & (log_ratio.detach().exp() > 1.0 + self.high)
        return torch.where(beyond, -advantage.detach() * bound, loss), indicators

    def formula(self) -> str:
        return (
            f"{PpoClip(self.low, self.high, self.dual).formula()}, with the gradient -A_it {1 + self.high:g} grad "
            "logp_it beyond the upper bound"
        )


@dataclass(frozen=True)
class EntropyBalanced(Weight):
    """Weighs a decision by its entropy, relative to all decisions of the step.

    The entropy is that of the policy that the update starts from; the public code takes the updated policy's, and mean
    and deviation of each micro-batch.

    Source: AEPO, arXiv 2510.14545; mowenruan/ARPO AEPO/verl_aepo_entropy/verl/trainer/ppo/core_algos.py.
    """

    kind = "entropy_balanced"
    needs = frozenset({"entropy_old"})
    scale: float = rare(bounded(0.2, at_least=0))
    """Added to the weight for each standard deviation above the mean; no weight falls below 0."""

    def __call__(self, rollouts: Rollouts) -> Tensor:
        entropy = required(rollouts.entropy, "rollouts.entropy", "weight 'entropy_balanced' reads it")
        mask = rollouts.loss_mask
        centred = entropy - masked_sum(entropy, mask).sum() / mask.sum().clamp(min=1)
        deviation = (masked_sum(centred**2, mask).sum() / (mask.sum() - 1).clamp(min=1)).sqrt()
        return (1.0 + self.scale * centred / torch.where(deviation > 0, deviation, 1.0)).clamp(min=0.0)

    def formula(self) -> str:
        return f"u_it = max(0, 1 + {self.scale:g} (H_it - mean H) / std H), over the step"
