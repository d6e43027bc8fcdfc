"""Estimators of advantages that remember earlier rewards of a task."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mmrl.core.blocks.advantage import Advantage, group_count, group_extremes, group_std, group_sum
from mmrl.core.loss import required
from mmrl.core.rollouts import TASK, Rollouts
from mmrl.fields import bounded, rare


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
    keep: float = bounded(0.875, above=0, at_most=1)
    """Share of the tracked counts that a visit keeps: 0.875 remembers 8 samples."""
    prior: float = rare(bounded(0.5, above=0))
    """Successes, and failures, of a task that was not yet seen."""
    low: float = 0.0
    """Smallest reward."""
    high: float = 1.0
    """Largest reward; those beyond count as it in what is tracked."""

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
