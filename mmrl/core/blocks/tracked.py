"""Estimators of advantages that remember earlier rewards of a task."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mmrl.core.blocks.advantage import Advantage, group_count, group_extremes, group_std, group_sum
from mmrl.core.loss import required
from mmrl.core.rollouts import TASK, Rollouts
from mmrl.fields import bounded, choice, rare

EPS = 1e-6


class TaskNumbers:
    """A few numbers of each task.

    Args:
        start: the numbers of a task that was not yet seen.
    """

    def __init__(self, *start: float) -> None:
        self.start = start
        self.numbers: dict[int, list[float]] = {}

    def of(self, tasks: Sequence[int]) -> Tensor:
        """Numbers (N, K) float64 of tasks."""
        return torch.tensor([self.numbers.get(task, self.start) for task in tasks], dtype=torch.float64)

    def note(self, tasks: Sequence[int], numbers: Tensor) -> None:
        """Replace the numbers of tasks by numbers (N, K)."""
        self.numbers.update(zip(tasks, numbers.tolist(), strict=True))

    def state_dict(self) -> dict[int, list[float]]:
        """Return what a checkpoint has to keep."""
        return dict(self.numbers)

    def load_state_dict(self, state: Mapping[int, list[float]]) -> None:
        """Continue from a checkpoint."""
        self.numbers = dict(state)


def tasks_of(rollouts: Rollouts) -> tuple[list[int], Tensor]:
    """Indices of the tasks in rollouts, rising, and the place (B,) int64 among them of each row's task."""
    given = required(rollouts.extras.get(TASK), 'rollouts.extras["task"]', "the index of each row's task")
    tasks, place = torch.unique(given, return_inverse=True)
    return tasks.tolist(), place


@dataclass(frozen=True)
class SmoothStandardised(Advantage):
    """Rewards standardised by this step's rewards of the task and by all of them so far, the more careful mixture.

    With k earlier visits of the task, whose rewards had the mean m and the standard deviation s, this step's mean m'
    and deviation s' move them to

        M = (k m + m') / (k + 1),    S^2 = (k s^2 + s'^2 + k/(k+1) (m' - m)^2) / (k + 1),

    and with z' = (R - m') / s' and Z = (R - M) / S the advantage is that one of Z/(k+1) + k/(k+1) z' and
    z'/(k+1) + k/(k+1) Z which is closer to 0. A deviation of 0 makes its own z 0, so that a step whose rewards are all
    equal still teaches by what came before.

    Source: DCPO, arXiv 2509.02333; lime-RL/DCPO verl/trainer/ppo/core_algos.py compute_dcpo_outcome_advantage.
    """

    kind = "smooth_std"
    needs = frozenset({"samples"})

    def state(self) -> TaskNumbers:
        """Visits, mean and standard deviation of each task."""
        return TaskNumbers(0.0, 0.0, 0.0)

    def __call__(self, rollouts: Rollouts, state: TaskNumbers | None = None) -> Tensor:
        """See `Advantage`."""
        state = self.state() if state is None else state
        tasks, place = tasks_of(rollouts)
        valid = rollouts.scored & (group_count(place, rollouts.scored) > 1)
        reward = rollouts.reward.double().where(valid, 0.0)
        visits, mean, std = state.of(tasks).to(reward.device).unbind(1)
        new_mean, new_std = _moments(reward, place, valid, len(tasks))
        total = visits + 1
        moved = mean + (new_mean - mean) / total  # exactly the mean where the new one is the same
        variance = visits * std**2 + new_std**2 + visits / total * (new_mean - mean) ** 2
        spread = (variance / total).sqrt()
        seen = group_sum(valid.long(), place, len(tasks)) > 0
        state.note(
            [task for task, known in zip(tasks, seen.tolist(), strict=True) if known],
            torch.stack([total, moved, spread], 1)[seen],
        )
        now, all_time = _z(reward, new_mean[place], new_std[place]), _z(reward, moved[place], spread[place])
        share = 1 / total[place]
        first = share * all_time + (1 - share) * now
        second = share * now + (1 - share) * all_time
        rows = torch.where(first.abs() < second.abs(), first, second).where(valid, 0.0).to(rollouts.reward.dtype)
        return torch.where(rollouts.loss_mask > 0, rows[:, None], 0.0)

    def formula(self) -> str:
        return (
            "A_it = the smaller in size of Z_i/(k+1) + k/(k+1) z_i and z_i/(k+1) + k/(k+1) Z_i; z, Z: R_i standardised "
            "by the task's rewards of this step, and of all its k+1 visits, std with ddof 1"
        )


def _moments(reward: Tensor, group: Tensor, valid: Tensor, groups: int) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation (N,), ddof 1, of the valid rewards of each group; exact where they are all equal."""
    low, high = group_extremes(reward, group, valid, groups)
    number = group_sum(valid.to(reward.dtype), group, groups).clamp(min=1)
    mean = torch.where(high > low, group_sum(reward, group, groups) / number, low)
    std = reward.new_zeros(groups).index_copy(0, group, group_std(reward, group, valid))
    return mean.where(high >= low, 0.0), std


def _z(reward: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    return torch.where(std > 0, (reward - mean) / torch.where(std > 0, std, 1.0), 0.0)


@dataclass(frozen=True)
class TrackedValue(Advantage):
    """Reward minus the success rate of the task so far, which a Beta distribution tracks; one sample a task will do.

    With a and b the tracked successes and failures, r = (R - low) / (high - low) and v = a / (a + b) before the step,

        A = R - (low + (high - low) v),    a <- keep a + r,    b <- keep b + 1 - r.

    Source: SPO, arXiv 2509.13232; verl-project/verl-recipe spo/spo_ray_trainer.py with rho.type constant.
    """

    kind = "tracked_value"
    keep: float = rare(bounded(0.875, above=0, at_most=1))
    """Share of the tracked counts that a visit keeps: 0.875 remembers 8 samples."""
    prior: float = rare(bounded(0.5, above=0))
    """Successes, and failures, of a task that was not yet seen."""
    low: float = rare(0.0)
    """Smallest reward."""
    high: float = rare(1.0)
    """Largest reward; the tracker clips larger ones to it."""

    def problems(self, where: str) -> Iterator[str]:
        yield from super().problems(where)
        if not self.low < self.high:
            yield f"{where}.low {self.low:g} must lie below {where}.high {self.high:g}"

    def state(self) -> TaskNumbers:
        """Successes and failures of each task."""
        return TaskNumbers(self.prior, self.prior)

    def __call__(self, rollouts: Rollouts, state: TaskNumbers | None = None) -> Tensor:
        """See `Advantage`."""
        state = self.state() if state is None else state
        tasks, place = tasks_of(rollouts)
        valid, reward = rollouts.scored, rollouts.reward.double()
        counts = state.of(tasks).to(reward.device)
        value = self.low + (self.high - self.low) * counts[:, 0] / counts.sum(1)
        rows = (reward - value[place]).where(valid, 0.0).to(rollouts.reward.dtype)
        share = ((reward - self.low) / (self.high - self.low)).clamp(0, 1)
        outcomes = torch.stack([share, 1 - share], 1).where(valid[:, None], 0.0)
        seen = group_sum(valid.long(), place, len(tasks)) > 0
        moved = self.keep * counts + torch.zeros_like(counts).index_add(0, place, outcomes)
        state.note([task for task, known in zip(tasks, seen.tolist(), strict=True) if known], moved[seen])
        return torch.where(rollouts.loss_mask > 0, rows[:, None], 0.0)

    def formula(self) -> str:
        return (
            f"A_it = R_i - v, v = {self.low:g} + {self.high - self.low:g} a / (a + b) of the task before the step; "
            f"a <- {self.keep:g} a + r_i, b <- {self.keep:g} b + 1 - r_i"
        )


class Quantiles:
    """Quantiles of a number that is seen in every step.

    Args:
        rate: how far they move in a step.
    """

    levels = torch.arange(1, 20, dtype=torch.float64) / 20

    def __init__(self, rate: float) -> None:
        self.rate = rate
        self.values: Tensor | None = None

    def at(self, level: float) -> Tensor | None:
        """The value at the nearest level; None before the first step."""
        return None if self.values is None else self.values[(self.levels - level).abs().argmin()]

    def note(self, seen: Tensor) -> None:
        """Move towards the quantiles of numbers (n,); the first ones are taken over."""
        seen = seen.double().cpu()
        if self.values is None:
            self.values = torch.quantile(seen, self.levels)
        else:
            below = (seen[None] < self.values[:, None]).double().mean(1)
            self.values = self.values + self.rate * (self.levels - below)

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint has to keep."""
        return {"values": self.values}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a checkpoint."""
        self.values = state["values"]


CREDITS = ("share", "uniform", "deviation")


@dataclass(frozen=True)
class BundledRisk(Advantage):
    """Advantage of a whole bundle of tasks, with more weight on scores below the usual.

    Some tasks of a step form a bundle, and the k-th answers to each of them a paper with the score x, their sum. With
    the quantiles a and b of x at the levels low and high, tracked over steps,

        A = (((x - a)+ - (x - b)+) / (high - low) - mix (a - x)+ / low) / (1 + mix) / std of the bundle's x,

    where (.)+ is 0 below 0, and each answer of the paper gets its share of A.

    Source: RiskPO, arXiv 2510.00911; RTkenny/RiskPO verl/trainer/ppo/core_algos.py
        compute_grpo_bundle_rvar_outcome_advantage_quantile_tracking, and the tracker in ray_trainer.py.
    """

    kind = "bundled_risk"
    needs = frozenset({"samples"})
    bundle: int = rare(bounded(5, at_least=1))
    """Tasks of a bundle; the tasks of a step are cut into bundles of about that size."""
    low: float = rare(bounded(0.2, above=0, below=1))
    """Level of the lower quantile."""
    high: float = rare(bounded(0.8, above=0, below=1))
    """Level of the upper quantile; better papers get no more."""
    mix: float = rare(bounded(1.5, at_least=0))
    """Weight of the shortfall below the lower quantile."""
    natural: bool = rare(False)
    """Whether a - b is added to the first term, so that no advantage is above 0."""
    credit: str = rare(choice("share", CREDITS))
    """An answer gets A times its share of the sum of R - mean_g R over the paper, "uniform" A itself, or A over the
    standard "deviation" of its task."""
    rate: float = rare(bounded(0.1, above=0))
    """Step size of the tracked quantiles."""

    def problems(self, where: str) -> Iterator[str]:
        yield from super().problems(where)
        if not self.low < self.high:
            yield f"{where}.low {self.low:g} must lie below {where}.high {self.high:g}"

    def state(self) -> Quantiles:
        """Quantiles of the scores of papers."""
        return Quantiles(self.rate)

    def __call__(self, rollouts: Rollouts, state: Quantiles | None = None) -> Tensor:
        """See `Advantage`."""
        state = self.state() if state is None else state
        reward, group = rollouts.reward.double().where(rollouts.scored, 0.0), rollouts.group
        number = group_count(group, rollouts.scored).clamp(min=1).to(reward.dtype)
        mean = group_sum(reward, group, len(group))[group] / number
        rows, seen = torch.zeros_like(reward), []
        for papers in self._papers(rollouts):
            scores = reward[papers].mean(1) * self.bundle
            seen.append(scores)
            rows[papers] = self._credited(self._of_papers(scores, state)[:, None], rollouts, papers, reward - mean)
        if seen:
            state.note(torch.cat(seen))
        return torch.where(rollouts.loss_mask > 0, rows.to(rollouts.reward.dtype)[:, None], 0.0)

    def _papers(self, rollouts: Rollouts) -> Iterator[Tensor]:
        """Rows (papers, tasks) of the papers of each bundle; tasks stand in the order in which they were drawn."""
        places = range(rollouts.num_groups) if rollouts.places is None else rollouts.places
        drawn = sorted(range(rollouts.num_groups), key=lambda group: places[group])
        scored = rollouts.scored.cpu()
        answers = [torch.nonzero((rollouts.host.group == group) & scored)[:, 0] for group in drawn]
        answered = [rows for rows in answers if len(rows)]
        for bundle in torch.arange(len(answered)).tensor_split(max(round(len(answered) / self.bundle), 1)):
            members = [answered[number] for number in bundle.tolist()]
            if members:
                size = min(map(len, members))
                yield torch.stack([rows[:size] for rows in members], 1).to(rollouts.reward.device)

    def _of_papers(self, scores: Tensor, state: Quantiles) -> Tensor:
        """Advantage (n,) of papers of one bundle, by their scores (n,)."""
        a, b = (self._quantile(scores, level, state) for level in (self.low, self.high))
        between = (scores - a).clamp(min=0) - (scores - b).clamp(min=0) + (a - b if self.natural else 0.0)
        between = between / (self.high - self.low + EPS)
        shortfall = -(a - scores).clamp(min=0) / (self.low + EPS)
        deviation = scores.std() if len(scores) > 1 else 1.0
        return (self.mix * shortfall + between) / (self.mix + 1) / (deviation + EPS)

    def _quantile(self, scores: Tensor, level: float, state: Quantiles) -> Tensor:
        tracked = state.at(level)
        return torch.quantile(scores, level) if tracked is None else tracked.to(scores.device)

    def _credited(self, advantage: Tensor, rollouts: Rollouts, papers: Tensor, centred: Tensor) -> Tensor:
        """Advantages (n, tasks) of the answers, from those of papers (n, 1)."""
        if self.credit == "uniform":
            return advantage.expand(papers.shape)
        if self.credit == "deviation":
            spread = group_std(rollouts.reward.double(), rollouts.group, rollouts.scored)[papers]
            return advantage / (torch.where(spread > 1e-3, spread, 1.0) + EPS)
        part = centred[papers]
        total = part.sum(1, keepdim=True)
        shared = total.abs() > EPS
        return advantage * torch.where(shared, part / torch.where(shared, total, 1.0), 1 / papers.shape[1])

    def formula(self) -> str:
        natural = " + a - b" if self.natural else ""
        share = {"share": "times its share of R - mean_g R in the paper", "uniform": "", "deviation": "/ std_g R"}
        return (
            f"A_it = ((x - a)+ - (x - b)+{natural}) / {self.high - self.low:g} - {self.mix:g} (a - x)+ / {self.low:g}, "
            f"over {1 + self.mix:g} std x, {share[self.credit]}; x = sum of R over a paper of {self.bundle} tasks, a "
            f"and b = its quantiles {self.low:g} and {self.high:g}, tracked at rate {self.rate:g}"
        )
