"""Objectives that assign credit to an agent's turns, or balance episodes that branch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from mmrl.core.blocks.advantage import (
    Advantage,
    GroupEstimator,
    GroupMeanStd,
    group_center,
    group_mean_std,
    group_std,
    group_sum,
)
from mmrl.core.blocks.clip import BoundedClip, Loss, PolicyGradient, PpoClip
from mmrl.core.blocks.divergence import K3
from mmrl.core.blocks.filter import ResampleGroups
from mmrl.core.blocks.turns import PARENT, SHARED, InformationGain, Weight
from mmrl.core.loss import TokenMean, TurnMean, masked_sum, required
from mmrl.core.objectives.objective import Objective
from mmrl.core.returns import decision_rewards, returns_to_go, turn_starts, turn_sums
from mmrl.core.rollouts import Rollouts
from mmrl.fields import bounded, rare

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class TurnReturns(Advantage):
    """Discounted returns from each turn on, divided by the row's largest absolute value; no baseline.

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
        # 1 for each turn that a row has, 0 for padding
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
class TurnNormalised(InformationGain):
    """Rewards of turns, normalised over all turns of the group, summed from each turn on.

    Source: IGPO, arXiv 2510.14967; debajoycs98/IGPO verl/trainer/ppo/core_algos.py.
    """

    kind = "turn_normalised"
    gamma: float = rare(bounded(1.0, at_least=0, at_most=1))
    """Discount per turn."""
    apart: bool = rare(False)
    """Normalise final turns separately from the others."""

    @property
    def level(self) -> str:
        return "turn"

    def __call__(self, rollouts: Rollouts) -> Tensor:
        rewards, place = turn_sums(rollouts, self.rewards(rollouts))
        real = turn_sums(rollouts, turn_starts(rollouts).to(rewards.dtype))[0] > 0
        row, turn = torch.nonzero(real, as_tuple=True)
        last = (turn + 1 == real.sum(1)[row]) if self.apart else torch.zeros_like(turn)
        # group and kind in one number
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
            f"A_ik = sum_(l>=k) {self.gamma:g}^(l-k) (r_il - mean r) / (sqrt(var r + 1e-08) + 1e-06) over {among}, "
            f"var with ddof 0; r_il = reward + {gain} - the same before turn l"
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
        # padding has turn -1
        to_go = returns_to_go(self.rewards(rollouts), (turn >= 0).to(rollouts.mask.dtype), 1.0)
        scored = rollouts.scored.to(to_go.dtype)
        count = group_sum(scored, rollouts.group, rollouts.num_groups).clamp(min=1)
        # the divisor counts ended episodes as well, with 0 at later positions
        total = to_go.new_zeros(rollouts.num_groups, to_go.shape[1]).index_add(
            0, rollouts.group, to_go * scored[:, None]
        )
        return torch.where(rollouts.loss_mask > 0, to_go - (total / count[:, None])[rollouts.group], 0.0)

    def formula(self) -> str:
        return "A_it = G_it - mean_g of G at position t, G_it = sum of rewards and gains of information from token t on"


@dataclass(frozen=True)
class GroupBranches(GroupEstimator):
    """`group_mean_std`, averaged on a decision that several rows share over these rows.

    Source: ARPO, arXiv 2507.19849, section 3.2 (hard advantage estimation); its code has none of it.
    """

    kind = "group_branches"
    compares = "decisions"
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
        return "mean over the rows that share decision t of (R_i - mean_g R) / (std_g R + 1e-06), std with ddof 1"


@dataclass(frozen=True)
class GradientPreserving(BoundedClip):
    """PPO's clipped surrogate whose upper bound keeps the gradient of log p, at the size that it has at the bound.

    Source: AEPO, arXiv 2510.14545; mowenruan/ARPO AEPO/verl_aepo_entropy/verl/trainer/ppo/core_algos.py.
    """

    kind = "gradient_preserving"
    dual: float | None = rare(bounded(None, above=1))
    """Bound c > 1 (usually 3) on the loss -A c for negative advantages; null disables it."""

    def __call__(self, log_ratio: Tensor, logp: Tensor, advantage: Tensor, turn: Tensor | None = None) -> Loss:
        loss, indicators = PpoClip(self.low, self.high, self.dual)(log_ratio, logp, advantage)
        # value 1 + high, gradient (1 + high) grad logp
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
    """Weights a decision by its entropy, relative to all decisions of the step.

    The entropy is that of the policy that the update starts from; the public code takes the updated policy's, and mean
    and deviation of each micro-batch.

    Source: AEPO, arXiv 2510.14545; mowenruan/ARPO AEPO/verl_aepo_entropy/verl/trainer/ppo/core_algos.py.
    """

    kind = "entropy_balanced"
    needs = frozenset({"entropy_old"})
    scale: float = rare(bounded(0.2, at_least=0))
    """Increase of the weight per standard deviation above the mean; weights never fall below 0."""

    def __call__(self, rollouts: Rollouts) -> Tensor:
        entropy = required(rollouts.entropy, "rollouts.entropy", "weight 'entropy_balanced' reads it")
        mask = rollouts.loss_mask
        centred = entropy - masked_sum(entropy, mask).sum() / mask.sum().clamp(min=1)
        deviation = (masked_sum(centred**2, mask).sum() / (mask.sum() - 1).clamp(min=1)).sqrt()
        return (1.0 + self.scale * centred / torch.where(deviation > 0, deviation, 1.0)).clamp(min=0.0)

    def formula(self) -> str:
        return f"u_it = max(0, 1 + {self.scale:g} (H_it - mean H) / std H), over the step, std with ddof 1"


ROWS: tuple[Objective, ...] = (
    Objective(
        "information_gain",
        TurnNormalised(),
        PpoClip(dual=3.0),
        TokenMean(),
        kl=K3(0.001),
        claim="rewarding each turn by how much it raises the probability of the right answer gives dense turn rewards",
        citation="Wang et al., IGPO, arXiv 2510.14967; its public code (gamma 1, k3 0.001)",
        verified="debajoycs98/IGPO at 866019637ff3, GuoqingWang1/IGPO at bff163b72718",
        differs="token mean, no entropy bonus (later code: sums per row, 0.001); a gain of 0 counts as a turn; no F1; "
        "the deviation has ddof 0 and 1e-8 in the root, as in the later code, not GRPO's ddof 1",
    ),
    Objective(
        "explicit_strategy",
        TurnReturns(),
        PolicyGradient(),
        TurnMean(),
        claim="a strategy model trained with process rewards by multi-turn RL improves the dialogue agent it advises",
        citation="Liu et al., EPO (explicit policy optimization), arXiv 2502.12486; gamma 0.99 of its preprocessing.py",
        verified="lxqpku/EPO at e363c7619dd2",
        differs="turns of the step are averaged, where the code averages those of an episode and adds episodes up; "
        "process rewards are those of the environment, turn by turn",
    ),
    Objective(
        "agentic_branching",
        GroupMeanStd(),
        PpoClip(dual=3.0),
        TokenMean(),
        claim="branching where entropy is high after a tool call beats GRPO with half of the tool calls",
        citation="Dong et al., Agentic Reinforced Policy Optimization (ARPO), arXiv 2507.19849; its scripts (no KL)",
        verified="dongguanting/ARPO at e257337d1f10",
        differs="the loss alone: the branching of episodes is recipe agentic_branching",
    ),
    Objective(
        "agentic_entropy_balanced",
        GroupMeanStd(),
        GradientPreserving(dual=3.0),
        TokenMean(),
        weight=EntropyBalanced(),
        claim="balancing entropy in branching rollouts and in the update avoids over-branching and clipped gradients",
        citation="Dong et al., Agentic Entropy-Balanced PO (AEPO), arXiv 2510.14545; its public scripts (no KL)",
        verified="mowenruan/ARPO at 410211f8a3ea",
        differs="entropies of the policy before the update, compared over the step; no weight below 0",
    ),
    Objective(
        "tapo",
        GroupMeanStd(),
        PpoClip(high=0.28, dual=10.0),
        TokenMean(),
        filter=ResampleGroups(),
        claim="DAPO with searches and programs inside the answer learns when to call a tool and when to think",
        citation="Wu et al., TAPO, arXiv 2510.07038; clip 0.2/0.28, dual clip 10 and resampled groups of its scripts",
        verified="Goer17/TAPO at 81cfe3980d95",
        differs="the loss alone: tags, tools and reward belong to recipe tapo; groups of equal rewards are resampled, "
        "in the code those of equal correctness",
    ),
)
