"""Advantages of an agent's turns, and weights of decisions in the policy loss.

Weights of decisions in the policy loss: which of them the update should learn from, and how much.

They are computed once a step, after the advantages and over the rows of all processes, and are constants of the update.
Denominators still count all trained decisions, as in TRL, unless a block says otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from mmrl.core.block import Block
from mmrl.core.blocks.advantage import Advantage, group_center, group_std
from mmrl.core.loss import masked_sum, required
from mmrl.core.returns import decision_rewards, gae_over_turns, turn_starts
from mmrl.core.rollouts import Rollouts
from mmrl.fields import bounded, choice, rare

if TYPE_CHECKING:
    from torch import Tensor

DURATION = "duration"
"""Key of `Rollouts.extras` (B, T): the seconds of the action that each decision belongs to."""

WEIGHT = "weight"
"""Key of `Rollouts.extras` (B, T): the weights that `Objective.compute_advantages` sets."""


@dataclass(frozen=True)
class Weight(Block):
    """Factor of each decision's policy loss."""

    weighs_kl: ClassVar[bool] = False
    """Whether it also multiplies each decision's divergence in the loss."""
    thins: ClassVar[bool] = False
    """Whether it takes rows out of the mask before the policy scores them; see `thinned`."""

    def __call__(self, rollouts: Rollouts) -> Tensor:
        """Weights (B, T), at least 0, of rollouts with advantages; no gradient, any value if nothing is trained."""
        raise NotImplementedError

    def thinned(self, rollouts: Rollouts, state: Any) -> Rollouts:
        """Mask out rows that the update does not learn from, before the policy scores them; none by default.

        Args:
            rollouts: Scored rows of whole groups, those of this process.
            state: Memory of the block, not to be changed here; None without one.
        """
        return rollouts


def quantile(x: Tensor, mask: Tensor, q: float) -> Tensor:
    """Quantile q of x (B, T) where the mask (B, T) is 1, interpolated linearly; NaN if the mask is empty.

    Unlike `torch.quantile` it has no limit of 16 million numbers, and the host does not wait for a GPU.
    """
    last = int(mask.numel()) - 1
    # untrained decisions at the end, so that positions count only trained ones
    ordered = torch.where(mask > 0, x, float("inf")).flatten().sort().values
    # a tensor, because the number of trained decisions is only known on the device
    position = (q * (mask.sum() - 1)).clamp(min=0)
    below = position.floor().long()
    low, high = ordered[below], ordered[(below + 1).clamp(max=last)]
    # no interpolation at whole positions, where the upper neighbour may be the inf of padding
    found = torch.where(position > below, torch.lerp(low, high, (position - below).to(x.dtype)), low)
    return torch.where(mask.any(), found, torch.nan)


@dataclass(frozen=True)
class TopEntropy(Weight):
    """Learns only from the decisions with the highest entropy: weight 1 for them, 0 for the others.

    The entropy is that of the policy that the update starts from, and the threshold is a quantile over the decisions of
    the step. TRL uses the entropy of the updated policy and the quantile of each micro-batch over all processes.

    Source: Wang et al., Beyond the 80/20 Rule, arXiv 2506.01939; huggingface/trl top_entropy_quantile.
    """

    kind = "top_entropy"
    needs = frozenset({"entropy_old"})
    share: float = rare(bounded(0.2, above=0, at_most=1))
    """Fraction of decisions to train on."""

    def __call__(self, rollouts: Rollouts) -> Tensor:
        entropy = required(rollouts.entropy, "rollouts.entropy", "weight 'top_entropy' selects decisions by it")
        # ties at the threshold all stay, so slightly more than the share may be kept
        return (entropy >= quantile(entropy, rollouts.loss_mask, 1.0 - self.share)).to(entropy.dtype)

    def formula(self) -> str:
        return f"u_it = 1 where the entropy is among the highest {100 * self.share:g}% of the step, 0 elsewhere"


@dataclass(frozen=True)
class Duration(Weight):
    """Weights a decision by the time its action took, relative to the mean of the step.

    Asynchronous workers return fast actions more often, so slow actions would be trained too little.

    Source: Yang et al., RL for Machine Learning Engineering Agents, arXiv 2509.01684, section 4.1; the paper leaves the
        normaliser open.
    """

    kind = "duration"
    needs = frozenset({"durations"})

    def __call__(self, rollouts: Rollouts) -> Tensor:
        found, mask = rollouts.extras.get(DURATION), rollouts.loss_mask
        duration = required(found, f"rollouts.extras['{DURATION}']", "weight 'duration' reads it").to(mask.dtype)
        mean = masked_sum(duration, mask).sum() / mask.sum().clamp(min=1)
        # without any duration every decision weighs the same
        return torch.where(mean > 0, duration / mean, 1.0)

    def formula(self) -> str:
        return "u_it = duration_it / mean duration of the step"


ANCHOR = "anchor"
"""Key of `Rollouts.extras` (B, T) int64: the state in which a decision's turn began; equal states have equal
numbers."""

GAIN = "information_gain"
"""Key of `Rollouts.extras` (B, T): what a turn added to the probability of the true answer, at its last decision."""


@dataclass(frozen=True)
class GroupInGroup(Advantage):
    """Compares the episodes of a group, and within it turns that began in the same state (`extras["anchor"]`).

    A turn that began in a state of its own only has the advantage of its episode.

    Source: GiGPO, arXiv 2505.10978, eq. 3-8; langfengQ/DrMAS gigpo/core_gigpo.py.
    """

    kind = "group_in_group"
    compares = "decisions"
    needs = frozenset({"samples", "turns", "anchors"})
    weight: float = rare(bounded(1.0, at_least=0))
    """Weight of the comparison of turns, omega."""
    gamma: float = rare(bounded(0.95, at_least=0, at_most=1))
    """Discount per turn of the rewards used to compare turns."""
    std: bool = rare(False)
    """Divide both differences by the standard deviation of the compared rewards."""
    episode_mean: str = rare(choice("turns", ("turns", "episodes")))
    """What the mean and deviation of episodes are taken over: "turns", so that an episode counts once per turn (as in
    the released code), or "episodes" (as in the paper)."""

    @property
    def level(self) -> str:
        return "turn"

    def __call__(self, rollouts: Rollouts) -> Tensor:
        starts = turn_starts(rollouts)
        row, column = torch.nonzero(starts, as_tuple=True)
        # with lambda 1 and a critic of 0, the estimate is the plain discounted return over turns
        to_go = gae_over_turns(rollouts, torch.zeros_like(rollouts.logp_old), self.gamma, 1.0)
        anchor = required(rollouts.extras.get(ANCHOR), f'rollouts.extras["{ANCHOR}"]', "the state of each turn, (B, T)")
        # states are only compared within a group: equal anchors of two tasks are different states
        states = torch.stack([rollouts.group[row], anchor[row, column]])
        of_turns = self._compared(to_go[row, column], torch.unique(states, dim=1, return_inverse=True)[1])
        # over turns, as released: an episode is counted once for each of its turns
        if self.episode_mean == "turns":
            of_episodes = self._compared(rollouts.reward[row], torch.unique(states[0], return_inverse=True)[1])
        else:
            of_episodes = self._compared(rollouts.reward, rollouts.group, rollouts.scored)[row]
        table = torch.zeros_like(to_go).index_put((row, column), (of_episodes + self.weight * of_turns).to(to_go.dtype))
        # the column of the turn's first decision, carried to the turn's other decisions
        first = torch.where(starts, torch.arange(starts.shape[1], device=starts.device), 0).cummax(1).values
        return torch.where(rollouts.loss_mask > 0, table.gather(1, first), 0.0)

    def _compared(self, values: Tensor, group: Tensor, valid: Tensor | None = None) -> Tensor:
        """Values (n,) minus the mean of their group, over its standard deviation if asked for."""
        valid = torch.ones_like(values, dtype=torch.bool) if valid is None else valid
        centred = group_center(values, group, valid)
        # 1e-6 as in the public code, for states whose rewards are all equal
        return centred / (group_std(values, group, valid) + 1e-6) if self.std else centred

    def formula(self) -> str:
        over, ddof = (" / (std + 1e-06)", ", std with ddof 1") if self.std else ("", "")
        return (
            f"A_ik = (R_i - mean_g R){over} + {self.weight:g} * (G_ik - mean of G from the same state){over}, "
            f"G_ik = sum_(l>=k) {self.gamma:g}^(l-k) R_il, mean_g over {self.episode_mean}{ddof}; the same for all "
            "decisions of turn k"
        )


@dataclass(frozen=True)
class InformationGain(Advantage):
    """Advantages of turns from their rewards and their information gains (`extras["information_gain"]`).

    Before each turn, the recipe computes the probability of the true answer as a continuation of the conversation. A
    turn's gain is the change of this probability; the last turn of an episode only has its reward.
    """

    needs = frozenset({"samples", "turns", "information_gain"})
    compares = "decisions"
    reads_sum = True
    entry: str = rare("answer")
    """Name of the task entry that contains the true answer."""
    before: str = rare("")
    """Text between the conversation and the answer, as the agent would write it; it is not scored."""
    log: bool = rare(False)
    """Whether a gain is the difference of the mean log-probabilities of the answer's tokens (as in the scripts of the
    later public code) instead of their exponentials."""

    def rewards(self, rollouts: Rollouts) -> Tensor:
        """Rewards and gains (B, T), each at the last decision of its turn."""
        gains = required(rollouts.extras.get(GAIN), f'rollouts.extras["{GAIN}"]', "the gain of each turn, (B, T)")
        return decision_rewards(rollouts) + torch.where(rollouts.loss_mask > 0, gains, 0.0)


PARENT, SHARED = "parent", "shared"
"""Keys of `Rollouts.extras` (B,) int64: how many rows earlier the row is that this row branched from (0 for none), and
how many first decisions the two rows share."""
