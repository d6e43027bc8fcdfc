"""Objectives whose clip bounds, weights or coefficients adapt to the batch or the step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from mmrl.core.blocks.advantage import (
    Advantage,
    GroupMean,
    GroupMeanStd,
    group_center,
    group_extremes,
    group_mean_std,
    group_sum,
)
from mmrl.core.blocks.clip import Loss, PolicyGradient, StepClip, Unclipped
from mmrl.core.blocks.divergence import K3
from mmrl.core.blocks.filter import ResampleGroups
from mmrl.core.blocks.turns import Weight
from mmrl.core.loss import PolicyOutputs, SequenceMean, TokenMean, masked_mean, required
from mmrl.core.objectives.objective import Objective
from mmrl.core.rollouts import TOKENS, Rollouts
from mmrl.fields import bounded, choice, rare

if TYPE_CHECKING:
    from torch import Tensor

BOUNDS = ("clip_low", "clip_high")
"""Keys of `Rollouts.extras` (B,): bounds of the ratio for an optimiser step."""

ENTROPY_LEVEL = "entropy_level"
"""Key of `Rollouts.extras` (B, T): entropy of each decision on the scale of `HapoClip`."""

ENTROPY_EPS = 1e-8
"""Minimum entropy in nats whose logarithm HAPO takes, and minimum divisor of levels."""


def bounded_loss(log_ratio: Tensor, advantage: Tensor, low: Tensor, high: Tensor, dual: float | None) -> Loss:
    """Clipped surrogate (B, T) of the ratio within bounds that broadcast, with indicators; see `clipped_loss`."""
    ratio, advantage = log_ratio.exp(), advantage.detach()
    inside = torch.minimum(torch.maximum(ratio, low), high)
    loss = torch.maximum(-advantage * ratio, -advantage * inside)
    if dual is not None:
        loss = torch.where(advantage < 0, torch.minimum(loss, -advantage * dual), loss)
    below, above = (ratio < low) & (advantage < 0), (ratio > high) & (advantage > 0)
    shown = {"clip_fraction_low": below, "clip_fraction_high": above, "bound_low": low, "bound_high": high}
    return loss, {f"policy/{name}": x.detach().to(ratio.dtype).expand_as(ratio) for name, x in shown.items()}


def tried(first: float, last: float, step: float) -> list[float]:
    """Values of a bound from first to last, in the order in which they are tried."""
    found = [first]
    while found[-1] < last:
        # the last bound itself is always tried
        found.append(min(found[-1] + step, last))
    return found


@dataclass(frozen=True)
class Bapo(StepClip):
    """Clipped surrogate whose bounds widen until positive advantages weigh as much as negative ones.

    With P = sum of A min(r, high) over the decisions of an optimiser step with A >= 0 and N = sum of -A max(r, low)
    over the others, the bounds rise step by step while P / N is below the target. They are bounds of the ratio itself.

    Raising the lower bound never raises P / N, because N grows with it: once it moves, it moves to its maximum. With
    `order` low_first, as released, it does so before the upper one moves.

    Gradient: none through the bounds.

    Source: BAPO, arXiv 2510.18927; WooooDyy/BAPO recipe/bapo/policy_loss.py, which searches in each micro-batch.
    """

    kind = "bapo"
    surveys = True
    lower: float = rare(bounded(0.6, at_least=0, at_most=1))
    """Initial lower bound."""
    lower_max: float = rare(bounded(0.9, at_least=0, at_most=1))
    """Lower bound after it has moved."""
    upper: float = rare(bounded(1.2, at_least=1))
    """Initial upper bound."""
    upper_max: float = rare(bounded(3.0, at_least=1))
    """Maximum upper bound."""
    upper_step: float = rare(bounded(0.05, above=0))
    """Step between the upper bounds to try."""
    target: float = rare(bounded(1.0, at_least=0))
    """Target for P / N; 1 corresponds to the paper's P / (P + N) = 0.5."""
    order: str = rare(choice("high_first", ("high_first", "low_first")))
    """Bound to raise first: "high_first" (paper) or "low_first" (the released code)."""
    dual: float | None = rare(bounded(3.0, above=1))
    """Bound c on the loss -A c for negative advantages; null disables it."""

    def problems(self, where: str) -> Iterator[str]:
        yield from super().problems(where)
        for name, first, last in (("lower", self.lower, self.lower_max), ("upper", self.upper, self.upper_max)):
            if last < first:
                yield f"{where}.{name}_max {last:g} must not lie below {where}.{name} {first:g}"

    def of_rollouts(self, log_ratio: Tensor, outputs: PolicyOutputs, advantage: Tensor, rollouts: Rollouts) -> Loss:
        """See `Clip`; the bounds are those of the optimiser step, or of these rows if they have not been set."""
        if not rollouts.extras.keys() >= set(BOUNDS):
            rollouts = self.settle([self.survey(log_ratio, advantage, rollouts.loss_mask)], rollouts)
        low, high = (rollouts.extras[key].to(log_ratio.dtype)[:, None] for key in BOUNDS)
        return bounded_loss(log_ratio, advantage, low, high, self.dual)

    def survey(self, log_ratio: Tensor, advantage: Tensor, mask: Tensor) -> Tensor:
        """P at each upper bound and N at each lower bound, one after the other."""
        # sums over a whole optimiser step, joined from several micro-batches
        ratio, advantage = log_ratio.detach().double().exp(), advantage.detach().double()
        gains = [(advantage.clamp(min=0) * ratio.clamp(max=bound)).sum() for bound in self._highs]
        losses = [(-advantage.clamp(max=0) * ratio.clamp(min=bound)).sum() for bound in self._lows]
        return torch.stack(gains + losses)

    def settle(self, parts: Sequence[Tensor], rollouts: Rollouts) -> Rollouts:
        highs, lows = self._highs, self._lows
        total = torch.stack([part.cpu() for part in parts]).sum(0).tolist() if parts else []
        gains, losses = total[: len(highs)], total[len(highs) :]

        def short(high: int, low: int) -> bool:
            # without negative advantages the bounds stay: nothing is to be balanced
            return bool(parts) and losses[low] > 0 and gains[high] / (losses[low] + 1e-8) < self.target

        place = {"high": 0, "low": 0}
        # the second bound moves only if the first is at its end and P / N still short
        for moving in ("high", "low") if self.order == "high_first" else ("low", "high"):
            last = len(highs if moving == "high" else lows) - 1
            while short(**place) and place[moving] < last:
                place[moving] += 1
        found = (lows[place["low"]], highs[place["high"]])
        bounds = {key: torch.full_like(rollouts.reward, value) for key, value in zip(BOUNDS, found, strict=True)}
        return rollouts.replace(extras=rollouts.extras | bounds)

    def formula(self) -> str:
        capped = "" if self.dual is None else f", where A_it < 0 at most -{self.dual:g} A_it"
        return (
            f"[max(-A_it r_it, -A_it clip(r_it, low, high)){capped}], low in [{self.lower:g}, {self.lower_max:g}] and "
            f"high in [{self.upper:g}, {self.upper_max:g}] the first ({self.order}) with sum A+ min(r, high) >= "
            f"{self.target:g} sum A- max(r, low) over the optimiser step"
        )

    @property
    def _lows(self) -> list[float]:
        return [self.lower, self.lower_max]

    @property
    def _highs(self) -> list[float]:
        return tried(self.upper, self.upper_max, self.upper_step)


@dataclass(frozen=True)
class TokenGroupMeanStd(Advantage):
    """Reward minus group mean, over group standard deviation, both over the decisions of the group.

    Each decision counts with its row's reward, so long rows weigh more. In a group with an advantage beyond `limit`,
    the mean and the deviation of its rows take their place.

    Source: HAPO, arXiv 2509.16591; starriver030515/HAPO verl/trainer/ppo/core_algos.py compute_hapo_outcome_advantage.
    """

    kind = "token_group_mean_std"
    compares = "decisions"
    needs = frozenset({"samples"})
    eps: float = rare(bounded(1e-6, above=0))
    """Added to the standard deviation."""
    limit: float = rare(bounded(5.0, above=0))
    """Groups with an advantage of at least this size use the standard deviation over rows instead."""

    def __call__(self, rollouts: Rollouts) -> Tensor:
        reward = rollouts.reward
        group = rollouts.group
        valid = rollouts.scored
        mask, size = rollouts.loss_mask, len(rollouts.group)
        reward, length = torch.where(valid, reward, 0.0), mask.sum(1)

        def mean(x: Tensor) -> Tensor:
            number = group_sum(length, group, size).clamp(min=1)
            return (group_sum(x * length, group, size) / number)[group]

        low, high = group_extremes(reward, group, length > 0, size)
        # rounding would leave a tiny deviation in a group of equal rewards
        centred = torch.where((high > low)[group], reward - mean(reward), 0.0)
        found = centred / (mean(centred.square()).sqrt() + self.eps)
        # a group whose lengths differ extremely: one short row among long ones gets a huge advantage
        beyond = group_sum(((found.abs() >= self.limit) & (length > 0)).to(reward.dtype), group, size)[group] > 0
        rows = torch.where(beyond, group_mean_std(reward, group, eps=self.eps, valid=valid), found)
        return torch.where(mask > 0, rows.detach()[:, None], 0.0)

    def formula(self) -> str:
        return (
            f"A_it = (R_i - mean_g R) / (std_g R + {self.eps:g}), over the decisions of the group, std with ddof 0; "
            f"over its rows with ddof 1 where |A| would reach {self.limit:g}"
        )


class EntropyScale:
    """Numbers (4,) of `HapoClip.scale_of` of the last step; None before the first."""

    def __init__(self) -> None:
        self.numbers: Tensor | None = None

    def state_dict(self) -> list[float] | None:
        """The numbers."""
        return None if self.numbers is None else self.numbers.tolist()

    def load_state_dict(self, state: list[float] | None) -> None:
        """Restore `state_dict`."""
        self.numbers = None if state is None else torch.tensor(state, dtype=torch.float64)


@dataclass(frozen=True)
class HapoClip(StepClip):
    """Clipped surrogate that treats decisions of high and low entropy differently.

    h is the logarithm of a decision's entropy before the update, less the quantile `pivot` of the step, over its root
    mean square; positive values are then divided by the largest, negative ones by the size of the smallest. Where h > 0
    the upper bound is wider, and advantages grow outside the inner half of the bounds; elsewhere the lower bound is
    wider, and advantages shrink inside it.

    Gradient: none through h, bounds and advantages.

    Source: HAPO, arXiv 2509.16591; starriver030515/HAPO verl/trainer/ppo/core_algos.py compute_policy_loss, which takes
        the entropies of the updated policy and the statistics of each micro-batch.
    """

    kind = "hapo"
    needs = frozenset({"entropy_old"})
    low: float = rare(bounded(0.2, at_least=0, at_most=0.5))
    """The ratio is bounded below by 1 - low, or by 1 - low (1 - alpha h) if h <= 0."""
    high: float = rare(bounded(0.2, at_least=0))
    """The ratio is bounded above by 1 + high, or by 1 + high (1 + alpha h) if h > 0."""
    alpha: float = rare(bounded(1.0, at_least=0, at_most=1))
    """Strength of the effect of h on the bounds."""
    beta: float = rare(bounded(1.0, at_least=0, at_most=1))
    """Strength of the effect of h on the advantages, which are multiplied by 1 + beta h."""
    pivot: float = rare(bounded(0.8, at_least=0, at_most=1))
    """Quantile of the entropies at which h is 0."""
    sign: str = rare(choice("signed", ("signed", "repo")))
    """"signed": h is in [-1, 1]; "repo": negative values are divided by the (negative) minimum, as in the released
    code, so h is in [0, 1]."""
    dual: float | None = rare(bounded(10.0, above=1))
    """Bound c on the loss -A c for negative advantages; null disables it."""

    def constants(self, rollouts: Rollouts) -> dict[str, Tensor]:
        entropy = required(rollouts.entropy, "rollouts.entropy", "clip 'hapo' reads it")
        return {ENTROPY_LEVEL: self.level_of(entropy, rollouts.loss_mask)}

    def state(self) -> EntropyScale:
        """Scale of the last step, by which `recipe: adaptive_temperature` samples the next one."""
        return EntropyScale()

    def observe(self, rollouts: Rollouts, state: EntropyScale) -> Rollouts:
        """Keep the scale of this step."""
        assert rollouts.entropy is not None
        state.numbers = self.scale_of(rollouts.entropy, rollouts.loss_mask)
        return rollouts

    def level_of(self, entropy: Tensor, mask: Tensor) -> Tensor:
        """H (B, T) of entropies (B, T) in nats, 0 where the mask is 0."""
        return torch.where(mask > 0, self.level_by(self.scale_of(entropy, mask), entropy), 0.0)

    def scale_of(self, entropy: Tensor, mask: Tensor) -> Tensor:
        """(4,) quantile of log entropies (B, T), root mean square about it, and largest and smallest h without sign."""
        trained = mask > 0
        logs = torch.where(trained, entropy.clamp(min=ENTROPY_EPS).log(), 0.0)
        # untrained decisions go behind all others and cannot be the quantile
        ordered = torch.where(trained, logs, float("inf")).flatten().sort().values
        place = (self.pivot * (mask.sum() - 1)).clamp(min=0).round().long()
        # no trained decision at all: the quantile is inf
        pivot = ordered[place].nan_to_num(posinf=0.0)
        h = torch.where(trained, logs - pivot, 0.0)
        deviation = (h.square().sum() / mask.sum().clamp(min=1)).clamp(min=ENTROPY_EPS).sqrt()
        h = h / deviation
        return torch.stack([pivot, deviation, h.max().clamp(min=ENTROPY_EPS), -h.min().clamp(max=-ENTROPY_EPS)])

    def level_by(self, scale: Tensor, entropy: Tensor) -> Tensor:
        """H of entropies of any shape by a scale (4,), which may be that of other decisions."""
        pivot, deviation, largest, smallest = scale.unbind()
        h = (entropy.clamp(min=ENTROPY_EPS).log() - pivot) / deviation
        return torch.where(h > 0, h / largest, h / (-smallest if self.sign == "repo" else smallest))

    def of_rollouts(self, log_ratio: Tensor, outputs: PolicyOutputs, advantage: Tensor, rollouts: Rollouts) -> Loss:
        """See `Clip`; h comes from `constants`."""
        found = rollouts.extras.get(ENTROPY_LEVEL)
        h = required(found, f"rollouts.extras['{ENTROPY_LEVEL}']", "compute_advantages(rollouts) sets it")
        low = self.low * (1.0 - self.alpha * h.clamp(max=0))
        high = self.high * (1.0 + self.alpha * h.clamp(min=0))
        ratio = log_ratio.detach().exp()
        inner = (ratio > 1.0 - low / 2.0) & (ratio < 1.0 + high / 2.0)
        advantage = torch.where(inner == (h > 0), advantage, advantage * (1.0 + self.beta * h))
        return bounded_loss(log_ratio, advantage, 1.0 - low, 1.0 + high, self.dual)

    def formula(self) -> str:
        capped = "" if self.dual is None else f", where A_it < 0 at most -{self.dual:g} A_it"
        return (
            f"[max(-A'_it r_it, -A'_it clip(r_it, 1 - l, 1 + u)){capped}], l = {self.low:g} (1 - {self.alpha:g} "
            f"min(h, 0)), u = {self.high:g} (1 + {self.alpha:g} max(h, 0)), A' = A (1 + {self.beta:g} h) where h > 0 "
            f"and r is outside (1 - l/2, 1 + u/2) or h <= 0 and r inside, A elsewhere; h = log entropy less its "
            f"{self.pivot:g} quantile, scaled ({self.sign})"
        )


@dataclass(frozen=True)
class ConflictTokens(Weight):
    """Protects the tokens that good and bad responses of a group share at their beginning or end.

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
    """Weight of conflict tokens in good responses."""
    count: str = rare(choice("both", ("both", "longest")))
    """Number of conflict tokens that weights are divided by: "both" runs, or the "longest" run as in the released
    code."""

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
    """Reward minus group mean, minus a fraction of the response's mean entropy; 0 for responses with high entropy.

    Source: GTPO, arXiv 2508.03772; winstonsmith1897/GTPO gtpo/gtpo_training.py, with the updated policy's entropies.
    """

    kind = "entropy_filtered"
    reads_sum = True
    needs = frozenset({"samples", "entropy_old"})
    limit: float = rare(bounded(0.7, above=0))
    """Mean entropy in nats above which a response is excluded."""
    coef: float = rare(bounded(0.1, at_least=0))
    """Coefficient of the entropy."""

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


ROWS: tuple[Objective, ...] = (
    Objective(
        "bapo",
        GroupMeanStd(),
        Bapo(),
        TokenMean(),
        claim="clip bounds adapted to balance positive and negative updates keep off-policy training stable",
        citation="BAPO, arXiv 2510.18927; ranges of its README (low 0.6 to 0.9, high 1.2 to 3, share 0.5)",
        verified="WooooDyy/BAPO at 7287044444d5, recipe/bapo/policy_loss.py",
        differs="bounds of the whole optimiser step on all processes, the upper one first; the code: of a micro-batch",
    ),
    Objective(
        "hapo",
        TokenGroupMeanStd(),
        HapoClip(),
        TokenMean(),
        filter=ResampleGroups(),
        claim="advantages and clip bounds that depend on a token's entropy let uncertain tokens move more",
        citation="HAPO, arXiv 2509.16591; its public scripts (clip 0.2, dual clip 10, pivot 0.8, dynamic sampling)",
        verified="starriver030515/HAPO at 7671dde3e268, verl/trainer/ppo/core_algos.py",
        differs="entropies are those before the update, over the whole step, signed; the loss alone: the temperature "
        "adapts in recipe adaptive_temperature",
    ),
    Objective(
        "mirror_descent",
        GroupMean(),
        Unclipped(),
        TokenMean(),
        kl=K3(1.0, to="old", anneal=True, importance=True, clamp=False),
        claim="mirror descent, a proximal KL instead of the clip, matches or beats TRPO and PPO",
        citation="Tomar et al., Mirror Descent Policy Optimization, arXiv 2005.09814, eq. 9 (t_k = 1 - k/K)",
        verified="manantomar/Mirror-Descent-Policy-Optimization at c9bd3ba080e3, mdpo_on/mdpo.py; hand computation",
        differs="KL estimated on the decisions taken, r k3, without every logit; t_k at least 0.05; no critic",
    ),
    Objective(
        "gtpo",
        EntropyFiltered(),
        PolicyGradient(),
        SequenceMean(),
        weight=ConflictTokens(),
        claim="protecting tokens that right and wrong answers share, and an entropy filter, replace the KL",
        citation="GTPO, arXiv 2508.03772 (conflict tokens, entropy limit 0.7 and coefficient 0.1 of its code, no KL)",
        verified="winstonsmith1897/GTPO at 5d33811e8ea1, gtpo/gtpo_training.py",
        differs="rows are averaged, not summed; conflicts at both ends count; entropies are those before the update",
    ),
)
