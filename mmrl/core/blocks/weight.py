"""Weights of decisions in the policy loss: which of them the update should learn from, and how much.

They are computed once a step, after the advantages and over the rows of all processes, and are constants of the update.
Denominators still count all trained decisions, as in TRL, unless a block says otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mmrl.core.block import Block
from mmrl.core.blocks.advantage import Advantage, group_center, group_sum
from mmrl.core.loss import masked_mean, masked_sum, required
from mmrl.core.rollouts import TOKENS, Rollouts
from mmrl.fields import bounded, choice, rare

DURATION = "duration"
"""Key of `Rollouts.extras` (B, T): the seconds of the action that each decision belongs to."""
WEIGHT = "weight"
"""Key of `Rollouts.extras` (B, T): the weights that `Objective.compute_advantages` sets."""


@dataclass(frozen=True)
class Weight(Block):
    """Factor of each decision's policy loss."""

    def __call__(self, rollouts: Rollouts) -> Tensor:
        """Weights (B, T), at least 0, of rollouts with advantages; no gradient, any value where nothing is trained."""
        raise NotImplementedError


def quantile(x: Tensor, mask: Tensor, q: float) -> Tensor:
    """Quantile q of x (B, T) where the mask (B, T) is 1, interpolated linearly; NaN if that is nowhere.

    Unlike `torch.quantile` it has no limit of 16 million numbers, and the host does not wait for a GPU.
    """
    last = int(mask.numel()) - 1
    ordered = torch.where(mask > 0, x, float("inf")).flatten().sort().values
    position = (q * (mask.sum() - 1)).clamp(min=0)
    below = position.floor().long()
    low, high = ordered[below], ordered[(below + 1).clamp(max=last)]
    found = torch.where(position > below, torch.lerp(low, high, (position - below).to(x.dtype)), low)
    return torch.where(mask.any(), found, torch.nan)


@dataclass(frozen=True)
class TopEntropy(Weight):
    """Learns from the decisions with the highest entropy only: 1 for them, 0 for the others.

    The entropy is that of the policy that the update starts from, and the threshold is a quantile over the decisions of
    the step. TRL takes the updated policy's, and the quantile of each micro-batch over all processes.

    Source: Wang et al., Beyond the 80/20 Rule, arXiv 2506.01939; huggingface/trl top_entropy_quantile.
    """

    kind = "top_entropy"
    needs = frozenset({"entropy_old"})
    share: float = rare(bounded(0.2, above=0, at_most=1))
    """Share of the decisions that are learnt from."""

    def __call__(self, rollouts: Rollouts) -> Tensor:
        entropy = required(rollouts.entropy, "rollouts.entropy", "weight 'top_entropy' selects by it")
        return (entropy >= quantile(entropy, rollouts.loss_mask, 1.0 - self.share)).to(entropy.dtype)

    def formula(self) -> str:
        return f"u_it = 1 where the entropy is among the highest {100 * self.share:g} % of the step, 0 elsewhere"


@dataclass(frozen=True)
class Duration(Weight):
    """Weighs a decision by the time that its action took, relative to the mean of the step.

    Asynchronous workers return fast actions more often, so that slow ones would be trained too little.

    Source: Yang et al., RL for Machine Learning Engineering Agents, arXiv 2509.01684, section 4.1; the paper leaves the
        normaliser open.
    """

    kind = "duration"
    needs = frozenset({"durations"})

    def __call__(self, rollouts: Rollouts) -> Tensor:
        found, mask = rollouts.extras.get(DURATION), rollouts.loss_mask
        duration = required(found, f"rollouts.extras['{DURATION}']", "weight 'duration' reads it").to(mask.dtype)
        mean = masked_sum(duration, mask).sum() / mask.sum().clamp(min=1)
        return torch.where(mean > 0, duration / mean, 1.0)

    def formula(self) -> str:
        return "u_it = duration_it / mean duration of the step"


@dataclass(frozen=True)
class ConflictTokens(Weight):
    """Spares the tokens that good and bad responses of a group begin or end with.

    In the runs of conflicts from either end, bad responses do not learn and good ones learn `factor` times, or its
    square where both runs meet. A token is in conflict where a response with a reward above the mean of its group and
    one with a reward below it have it at the same place from that end. The weights of a response are divided by the
    number of its conflicts.

    Source: GTPO, arXiv 2508.03772; winstonsmith1897/GTPO gtpo/gtpo_training.py build_conflict_mask.
    """

    kind = "conflict_tokens"
    reads_sum = True
    needs = frozenset({"samples", "tokens"})
    factor: float = bounded(2.0, at_least=0)
    """Weight of the conflicts of good responses."""
    count: str = rare(choice("both", ("both", "longest")))
    """Conflicts that weights are divided by: those of "both" runs, or of the "longest" one, as released."""

    def __call__(self, rollouts: Rollouts) -> Tensor:
        found = rollouts.extras.get(TOKENS)
        tokens = required(found, f"rollouts.extras['{TOKENS}']", "weight 'conflict_tokens' reads it")
        mask, centred = rollouts.loss_mask, group_center(rollouts.reward, rollouts.group, rollouts.scored)
        place = (mask.cumsum(1) - 1).long()
        places = (place, mask.sum(1).long()[:, None] - 1 - place)
        runs = [self._runs(tokens, mask, rollouts.group, centred, one) for one in places]
        inside = [(one < run[:, None]) & (mask > 0) for one, run in zip(places, runs, strict=True)]
        number = torch.stack(inside).sum(0)
        weight = torch.where((centred > 0)[:, None], self.factor ** number.to(mask.dtype), (number == 0).to(mask.dtype))
        total = torch.maximum(*runs) if self.count == "longest" else (number > 0).sum(1)
        return weight / total.clamp(min=1).to(mask.dtype)[:, None]

    def _runs(self, tokens: Tensor, mask: Tensor, group: Tensor, centred: Tensor, place: Tensor) -> Tensor:
        """Length (B,) of each response's run of conflicts at the places 0, 1, ... of place (B, T)."""
        # on the host, which stops at the first place without a conflict; most runs are short
        tokens, trained, group, place = (x.cpu() for x in (tokens, mask > 0, group, place))
        sides = torch.stack([centred > 0, centred < 0]).cpu()
        rows, width = tokens.shape
        spread = torch.where(trained, place, width)  # untrained tokens go to a column that is not read
        packed = torch.full((rows, width + 1), -1).scatter(1, spread, tokens)
        run, alive = torch.zeros(rows, dtype=torch.int64), sides.any(0)
        for column in packed[:, :width].unbind(1):
            pairs = torch.unique(torch.stack([group, column]), dim=1, return_inverse=True)[1]
            for side in sides:
                alive = alive & (column >= 0) & (group_sum(side.long(), pairs, rows)[pairs] > 0)
            if not bool(alive.any()):
                break
            run += alive
        return run.to(mask.device)

    def formula(self) -> str:
        return (
            f"u_it = {self.factor:g}^k where R_i > mean_g R, [k = 0] where R_i < mean_g R, over the number of i's "
            f"conflicts ({self.count}); k of the two runs from the ends hold t, runs of tokens that a response above "
            "and one below the mean have at the same place"
        )


@dataclass(frozen=True)
class EntropyFiltered(Advantage):
    """Reward minus group mean, less a share of the response's mean entropy; 0 for responses with a high one.

    Source: GTPO, arXiv 2508.03772; winstonsmith1897/GTPO gtpo/gtpo_training.py, with the updated policy's entropies.
    """

    kind = "entropy_filtered"
    needs = frozenset({"samples", "entropy_old"})
    limit: float = rare(bounded(0.7, above=0))
    """Mean entropy in nats above which a response is left out."""
    coef: float = rare(bounded(0.1, at_least=0))
    """Factor of the entropy."""

    def __call__(self, rollouts: Rollouts) -> Tensor:
        entropy = required(rollouts.entropy, "rollouts.entropy", "advantage 'entropy_filtered' reads it")
        mask, mean = rollouts.loss_mask, masked_mean(entropy, rollouts.loss_mask)
        centred = group_center(rollouts.reward, rollouts.group, rollouts.scored)
        rows = torch.where(mean <= self.limit, centred - self.coef * mean, 0.0)
        return torch.where(mask > 0, rows.detach()[:, None], 0.0)

    def formula(self) -> str:
        return (
            f"A_it = R_i - mean_g R - {self.coef:g} H_i where the mean entropy H_i before the update is at most "
            f"{self.limit:g}, 0 elsewhere"
        )
