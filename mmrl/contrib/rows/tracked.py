"""Objectives that remember earlier steps: statistics of each task, quantiles, histories."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from mmrl.contrib.rows.adaptive import bounded_loss
from mmrl.core.block import unknown_name
from mmrl.core.blocks.advantage import (
    Advantage,
    AdvantageScaling,
    group_center,
    group_count,
    group_extremes,
    group_std,
    group_sum,
)
from mmrl.core.blocks.clip import Clip, Loss, PpoClip
from mmrl.core.blocks.divergence import K3, FullEntropy
from mmrl.core.blocks.filter import TaskOrder
from mmrl.core.catalogue.group import ROWS as GROUP
from mmrl.core.loss import PolicyOutputs, SequenceMean, TokenMean, required
from mmrl.core.objectives.objective import Objective
from mmrl.core.rollouts import TASK, Rollouts
from mmrl.core.state import ObjectiveState
from mmrl.fields import bounded, choice, rare

if TYPE_CHECKING:
    from torch import Tensor

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
    """Sorted indices of the tasks in rollouts, and for each row the position (B,) int64 of its task among them."""
    given = required(rollouts.extras.get(TASK), 'rollouts.extras["task"]', "the index of each row's task")
    tasks, place = torch.unique(given, return_inverse=True)
    return tasks.tolist(), place


@dataclass(frozen=True)
class SmoothStandardised(Advantage):
    """Rewards standardised by the task's rewards of this step and by all so far, mixed; the smaller mixture is used.

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
class DcpoClip(Clip):
    """Clipped surrogate with wider bounds for unlikely decisions.

    With q the old probability, |r - 1| r q is bounded, not |r - 1|: r ranges from (1 + sqrt(max(1 - 4 low / q, 0))) / 2
    to (1 + sqrt(1 + 4 high / q)) / 2, at most `cap`.

    Source: DCPO, arXiv 2509.02333, section 3.1; lime-RL/DCPO verl/trainer/ppo/core_algos.py get_clip_low_high.
    """

    kind = "dcpo_clip"
    low: float = rare(bounded(0.16, at_least=0))
    """Bound on (1 - r) r q."""
    high: float = rare(bounded(0.2, at_least=0))
    """Bound on (r - 1) r q."""
    cap: float = rare(bounded(10.0, at_least=1))
    """Maximum upper bound of the ratio."""
    dual: float | None = rare(bounded(10.0, above=1))
    """Bound c on the loss -A c for negative advantages; null disables it."""

    def of_rollouts(self, log_ratio: Tensor, outputs: PolicyOutputs, advantage: Tensor, rollouts: Rollouts) -> Loss:
        """See `Clip`; the old probabilities are those of `rollouts`."""
        old = torch.where(rollouts.loss_mask > 0, rollouts.logp_old.detach(), 0.0)
        inverse = (-old).exp()  # infinite where a probability is 0 in floating point
        # the root is not real for small probabilities; the bound is then 1/2
        low = (1.0 + (1.0 - 4.0 * self.low * inverse).clamp(min=0).sqrt()) / 2.0
        high = ((1.0 + (1.0 + 4.0 * self.high * inverse).sqrt()) / 2.0).clamp(max=self.cap)
        return bounded_loss(log_ratio, advantage, low, high, self.dual)

    def formula(self) -> str:
        capped = "" if self.dual is None else f", where A_it < 0 at most -{self.dual:g} A_it"
        return (
            f"[max(-A_it r_it, -A_it clip(r_it, (1 + sqrt(max(1 - {4 * self.low:g} / q_it, 0))) / 2, min((1 + sqrt(1 + "
            f"{4 * self.high:g} / q_it)) / 2, {self.cap:g}))){capped}], q_it = exp(logp_old_it)"
        )


@dataclass(frozen=True)
class TrackedValue(Advantage):
    """Reward minus the task's success rate so far, tracked by a Beta distribution; one sample per task is enough.

    With a and b the tracked successes and failures, r = (R - low) / (high - low) and v = a / (a + b) before the step,

        A = R - (low + (high - low) v),    a <- keep a + r,    b <- keep b + 1 - r.

    Source: SPO, arXiv 2509.13232; verl-project/verl-recipe spo/spo_ray_trainer.py with rho.type constant.
    """

    kind = "tracked_value"
    keep: float = rare(bounded(0.875, above=0, at_most=1))
    """Decay factor of the tracked counts at each visit; 0.875 remembers about 8 samples."""
    prior: float = rare(bounded(0.5, above=0))
    """Prior number of successes, and of failures, for a task not seen yet."""
    low: float = rare(0.0)
    """Minimum reward."""
    high: float = rare(1.0)
    """Maximum reward; the tracker clips higher rewards to it."""

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
        # a task whose samples all failed to be scored keeps its counts
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
    """Running quantiles of a number observed in every step.

    Args:
        rate: how far they move in a step.
    """

    def __init__(self, rate: float) -> None:
        self.rate = rate
        self.levels = torch.arange(1, 20, dtype=torch.float64) / 20
        self.values: Tensor | None = None

    def at(self, level: float) -> Tensor | None:
        """The value at the nearest level; None before the first step."""
        return None if self.values is None else self.values[(self.levels - level).abs().argmin()]

    def note(self, seen: Tensor) -> None:
        """Move towards the quantiles of numbers (n,); the first ones are adopted as they are."""
        seen = seen.double().cpu()
        if self.values is None:
            self.values = torch.quantile(seen, self.levels)
        else:
            # stochastic quantile tracking: the step is 0 where the fraction below equals the level
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
    """Advantage of a whole bundle of tasks, with more weight on scores that are lower than usual.

    Some tasks of a step form a bundle, and the k-th answers to each of them a paper with the score x, their sum. With
    the quantiles a and b of x at the levels low and high, tracked over steps,

        A = (((x - a)+ - (x - b)+) / (high - low) - mix (a - x)+ / low) / (1 + mix) / std of the bundle's x,

    where (.)+ is 0 below 0, and each answer of the paper gets its fraction of A.

    Source: RiskPO, arXiv 2510.00911; RTkenny/RiskPO verl/trainer/ppo/core_algos.py
        compute_grpo_bundle_rvar_outcome_advantage_quantile_tracking, and the tracker in ray_trainer.py.
    """

    kind = "bundled_risk"
    needs = frozenset({"samples"})
    bundle: int = rare(bounded(5, at_least=1))
    """Tasks per bundle; the tasks of a step are split into bundles of about this size."""
    low: float = rare(bounded(0.2, above=0, below=1))
    """Level of the lower quantile."""
    high: float = rare(bounded(0.8, above=0, below=1))
    """Level of the upper quantile; bundles that score higher get no extra weight."""
    mix: float = rare(bounded(1.5, at_least=0))
    """Weight of the shortfall below the lower quantile."""
    natural: bool = rare(False)
    """Whether to add a - b to the first term, so that no advantage is above 0."""
    credit: str = rare(choice("share", CREDITS))
    """How a response's advantage follows from the bundle's A. "share": A times its fraction of the sum of R - mean_g R
    over the bundle; "uniform": A itself; "deviation": A divided by the standard deviation of its task."""
    rate: float = rare(bounded(0.1, above=0))
    """Step size of the tracked quantiles."""

    def problems(self, where: str) -> Iterator[str]:
        yield from super().problems(where)
        if not self.low < self.high:
            yield f"{where}.low {self.low:g} must lie below {where}.high {self.high:g}"

    def state(self) -> Quantiles:
        """Quantiles of the scores of bundles."""
        return Quantiles(self.rate)

    def __call__(self, rollouts: Rollouts, state: Quantiles | None = None) -> Tensor:
        """See `Advantage`."""
        state = self.state() if state is None else state
        reward, group = rollouts.reward.double().where(rollouts.scored, 0.0), rollouts.group
        number = group_count(group, rollouts.scored).clamp(min=1).to(reward.dtype)
        mean = group_sum(reward, group, len(group))[group] / number
        rows, seen = torch.zeros_like(reward), []
        for papers in self._papers(rollouts):
            # as a sum over a full bundle, because the last bundles may have fewer tasks
            scores = reward[papers].mean(1) * self.bundle
            seen.append(scores)
            rows[papers] = self._credited(self._of_papers(scores, state)[:, None], rollouts, papers, reward - mean)
        if seen:
            # after all papers: quantiles of this step must not depend on the order of bundles
            state.note(torch.cat(seen))
        return torch.where(rollouts.loss_mask > 0, rows.to(rollouts.reward.dtype)[:, None], 0.0)

    def _papers(self, rollouts: Rollouts) -> Iterator[Tensor]:
        """Rows (papers, tasks) of the papers of each bundle, with tasks in the order in which they were drawn."""
        places = range(rollouts.num_groups) if rollouts.places is None else rollouts.places
        # in the order of the places, or bundles would depend on the number of processes
        drawn = sorted(range(rollouts.num_groups), key=lambda group: places[group])
        scored = rollouts.scored.cpu()
        answers = [torch.nonzero((rollouts.host.group == group) & scored)[:, 0] for group in drawn]
        answered = [rows for rows in answers if len(rows)]
        for bundle in torch.arange(len(answered)).tensor_split(max(round(len(answered) / self.bundle), 1)):
            members = [answered[number] for number in bundle.tolist()]
            if members:
                # papers need one answer of each task, so the shortest group limits them
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
            # dividing by the deviation of nearly equal rewards would give huge advantages
            return advantage / (torch.where(spread > 1e-3, spread, 1.0) + EPS)
        part = centred[papers]
        total = part.sum(1, keepdim=True)
        # a paper whose parts cancel is split evenly
        shared = total.abs() > EPS
        return advantage * torch.where(shared, part / torch.where(shared, total, 1.0), 1 / papers.shape[1])

    def formula(self) -> str:
        natural = " + a - b" if self.natural else ""
        share = {
            "share": ", times its fraction of R - mean_g R in the paper",
            "uniform": "",
            "deviation": f", over std_g R + {EPS:g} (over 1 where std_g R is at most 0.001)",
        }
        return (
            f"A_it = ((x - a)+ - (x - b)+{natural}) / {self.high - self.low:g} - {self.mix:g} (a - x)+ / {self.low:g}, "
            f"over {1 + self.mix:g} (std x + {EPS:g}){share[self.credit]}, std with ddof 1; x = sum of R over a paper "
            f"of {self.bundle} tasks, a and b = its quantiles {self.low:g} and {self.high:g}, tracked at rate "
            f"{self.rate:g}"
        )


USUAL = "entropy_usual"
"""Key of `Rollouts.extras` (B, T): mean entropy so far of each decision's turn."""

PENALTY = "entropy_penalty"
"""Key of `Rollouts.extras` (B,): weight of the penalty in this step, the same for all rows."""


class TurnEntropies:
    """Mean over steps of the mean entropy of each turn."""

    def __init__(self) -> None:
        self.steps = 0
        self.total = torch.zeros(0, dtype=torch.float64)
        self.count = torch.zeros(0, dtype=torch.float64)

    def note(self, entropy: Tensor, turn: Tensor) -> None:
        """Add a step with decisions (n,) in turns (n,)."""
        turn, entropy = turn.cpu(), entropy.double().cpu()
        turns = max(len(self.total), int(turn.max()) + 1 if len(turn) else 0)
        number = group_sum(torch.ones_like(entropy), turn, turns)
        mean = group_sum(entropy, turn, turns) / number.clamp(min=1)
        missing = (0, turns - len(self.total))
        self.total = torch.nn.functional.pad(self.total, missing) + mean
        self.count = torch.nn.functional.pad(self.count, missing) + (number > 0)
        self.steps += 1

    def mean(self, turn: Tensor) -> Tensor:
        """Mean entropy so far of known turns (B, T)."""
        return (self.total / self.count.clamp(min=1)).to(turn.device)[turn]

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint has to keep."""
        return {"steps": self.steps, "total": self.total, "count": self.count}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a checkpoint."""
        self.steps = state["steps"]
        self.total = state["total"]
        self.count = state["count"]


def phase_weight(step: int, steps: int) -> float:
    """Weight of the penalty in a step (from 0): slowly from 1 to 0.83 in the first half, then from 0.8 to 0.04.

    Source: WujiangXu/EPO verl/workers/actor/dp_actor.py _calculate_epoch_based_entropy_weight.
    """
    half, step = steps // 2, min(step, steps)
    if step <= half:
        return 1 - 0.2 * (1 - math.exp(-2 * step / half)) if half else 1.0
    return 0.8 * math.exp(-3 * (step - half) / (steps - half))


@dataclass(frozen=True)
class SmoothedEntropy(FullEntropy):
    """Entropy of the whole action distribution, minus a penalty when it leaves a band around its past average.

        H - scale w P,    P = relu(low h - H) + relu(H - high h)

    with h the mean over all steps so far, this one included, of the entropy before the update in the same turn (rows
    without turns have one), and w the weight of the phase. The public code's penalty is a constant outside the band,
    which has no gradient: it changes the loss that is reported and nothing else.

    Source: EPO, arXiv 2509.22576; WujiangXu/EPO verl/workers/actor/dp_actor.py generate_entropy_penalty.
    """

    kind = "smoothed"
    needs = frozenset({"entropy", "entropy_old"})
    low: float = rare(bounded(0.0, at_least=0))
    """Lower end of the band, as a factor of h."""
    high: float = rare(bounded(2.0, above=0))
    """Upper end of the band, as a factor of h."""
    scale: float = rare(bounded(1.0, at_least=0))
    """Weight of the penalty relative to the entropy."""
    penalty: str = rare(choice("hinge", ("hinge", "indicator")))
    """hinge: penalise by the distance outside the band; indicator: a constant penalty (`outside`), as in the released
    code."""
    outside: float = rare(bounded(0.1, above=0))
    """Penalty of the indicator."""
    phase_steps: int | None = rare(bounded(None, at_least=2))
    """Steps over which the weight of the penalty falls (150 in the code); null keeps it at 1."""

    def problems(self, where: str) -> Iterator[str]:
        yield from super().problems(where)
        if not self.low < self.high:
            yield f"{where}.low {self.low:g} must lie below {where}.high {self.high:g}"

    def state(self) -> TurnEntropies:
        """Mean entropy of each turn."""
        return TurnEntropies()

    def observe(self, rollouts: Rollouts, state: TurnEntropies) -> Rollouts:
        """Add the entropies before the update to the history, and store the averages that the loss compares with."""
        entropy = required(rollouts.entropy, "rollouts.entropy", "entropy 'smoothed' remembers it")
        turn = torch.zeros_like(rollouts.mask, dtype=torch.int64) if rollouts.turn is None else rollouts.turn
        trained = rollouts.loss_mask > 0
        weight = 1.0 if self.phase_steps is None else phase_weight(state.steps, self.phase_steps)
        # before `mean`, since the history includes this step
        state.note(entropy[trained], turn[trained])
        # untrained decisions may have turn -1; they are not read
        usual = state.mean(torch.where(trained, turn, 0)) if len(state.total) else torch.zeros_like(entropy)
        found = {USUAL: usual.to(entropy.dtype), PENALTY: torch.full_like(rollouts.reward, weight)}
        return rollouts.replace(extras=rollouts.extras | found)

    def of_rollouts(self, outputs: PolicyOutputs, rollouts: Rollouts) -> Tensor:
        """Bonus (B, T), with gradient."""
        entropy = self(outputs)
        usual = required(rollouts.extras.get(USUAL), f"rollouts.extras['{USUAL}']", "compute_advantages sets it")
        low, high = self.low * usual, self.high * usual
        if self.penalty == "hinge":
            penalty = (low - entropy).clamp(min=0) + (entropy - high).clamp(min=0)
        else:
            penalty = self.outside * ((entropy <= low) | (entropy >= high)).to(entropy.dtype)
        return entropy - self.scale * rollouts.extras[PENALTY][:, None] * penalty

    def formula(self) -> str:
        band = f"{self.low:g} h, {self.high:g} h"
        penalty = {
            "hinge": f"(relu({self.low:g} h - H_it) + relu(H_it - {self.high:g} h))",
            "indicator": f"{self.outside:g} [H_it outside ({band})]",
        }
        weight = "" if self.phase_steps is None else f"w({self.phase_steps}) "
        return f"(H_it - {self.scale:g} {weight}{penalty[self.penalty]}), h = mean H of the turn in all steps so far"


@dataclass(frozen=True)
class Uncertain(TaskOrder):
    """Prefers tasks that succeed about half the time, by the value v that the estimator tracks.

    Source: SPO, arXiv 2509.13232; verl-project/verl-recipe spo/spo_ray_trainer.py prompt2weight, which draws from the
        prompts of one loaded batch.
    """

    kind = "uncertain"
    floor: float = rare(bounded(0.05, above=0))
    """Weight of tasks whose outcome is certain."""

    def weights(self, tasks: int, state: ObjectiveState) -> Tensor:
        """Weight (tasks,) float64 of each task."""
        counts = state.blocks["advantage"].of(range(tasks))
        value = counts[:, 0] / counts.sum(1)
        return (value * (1 - value)).sqrt() + self.floor

    def __call__(self, tasks: int, count: int, state: ObjectiveState, generator: torch.Generator) -> Tensor | None:
        return torch.multinomial(self.weights(tasks, state), count, replacement=count > tasks, generator=generator)

    def conflicts(self, advantage: Advantage) -> Iterator[str]:
        if not isinstance(advantage, TrackedValue):
            yield (
                f"order '{self.kind}' reads the values that advantage '{TrackedValue.kind}' tracks, but advantage is "
                f"'{advantage.kind}'. Use order 'epochs', or that advantage."
            )

    def formula(self) -> str:
        return f"tasks are drawn with weight sqrt(v (1 - v)) + {self.floor:g}, v = a / (a + b) of the task"


class CategoryQ:
    """Estimate of how much can be learned from each category of tasks.

    Args:
        categories: name of each task's category.
    """

    def __init__(self, categories: Sequence[str]) -> None:
        self.names = list(dict.fromkeys(categories))
        numbers = {name: number for number, name in enumerate(self.names)}
        self.of_task = torch.tensor([numbers[name] for name in categories])
        self.q = torch.zeros(len(self.names), dtype=torch.float64)

    def state_dict(self) -> dict[str, float]:
        """Return what a checkpoint has to keep."""
        return dict(zip(self.names, self.q.tolist(), strict=True))

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Continue from a checkpoint."""
        self.q = torch.tensor([state[name] for name in self.names], dtype=torch.float64)


@dataclass(frozen=True)
class CategoryBandit(TaskOrder):
    """Draws task categories with a bandit whose reward is the mean distance of a group's rewards from their mean.

    After a step, Q_c <- (1 - rate) Q_c + rate * mean |R - mean_g R| over the category's rows. A place of the next step
    gets the category c with probability softmax(Q / temperature)_c, and a task of it at random.

    Source: SEC, arXiv 2505.14970; Vincent-La/cofa sec/verl/verl/utils/auto_curriculum/priority.py BanditPriority.
    """

    kind = "category_bandit"
    reads_sum = True
    field: str = "category"
    """Task field or data column with the category; robot tasks have `task`."""
    rate: float = rare(bounded(0.5, above=0, at_most=1))
    """Step size of Q."""
    temperature: float = rare(bounded(0.4, above=0))
    """Temperature of the softmax over categories."""
    forgets: bool = rare(False)
    """Whether the Q of a category without rows in a step decays towards 0, as in the public code."""

    def state(self, tasks: Sequence[Any] = ()) -> CategoryQ | None:
        """Q of each category; None without tasks."""
        return CategoryQ([self._category(task) for task in tasks]) if tasks else None

    def _category(self, task: Any) -> str:
        said = fields_of(task)
        if self.field not in said:
            raise ValueError(f"order.field: {unknown_name(self.field, sorted(said), 'field of the training tasks')}")
        return said[self.field]

    def observe(self, rollouts: Rollouts, state: CategoryQ) -> Rollouts:
        """Update Q with the rows of a step."""
        tasks, place = tasks_of(rollouts)
        row, valid = state.of_task[tasks][place.cpu()], rollouts.scored.cpu()
        distance = group_center(rollouts.reward, rollouts.group, rollouts.scored).abs().double().cpu()
        count = group_sum(valid.double(), row, len(state.q))
        mean = group_sum(distance, row, len(state.q)) / count.clamp(min=1)
        moved = (1 - self.rate) * state.q + self.rate * mean
        state.q = moved if self.forgets else torch.where(count > 0, moved, state.q)
        return rollouts

    def __call__(self, tasks: int, count: int, state: ObjectiveState, generator: torch.Generator) -> Tensor | None:
        bandit: CategoryQ = state.blocks["order"]
        chances = torch.softmax(bandit.q / self.temperature, 0)
        drawn = torch.multinomial(chances, count, replacement=True, generator=generator)
        chosen = torch.empty(count, dtype=torch.int64)
        for category in drawn.unique().tolist():
            (places,), (members,) = torch.where(drawn == category), torch.where(bandit.of_task == category)
            rounds = -(-len(places) // len(members))
            mixed = torch.cat([torch.randperm(len(members), generator=generator) for _ in range(rounds)])
            chosen[places] = members[mixed[: len(places)]]
        return chosen

    def formula(self) -> str:
        return (
            f"tasks are drawn by {self.field}, c with probability softmax(Q / {self.temperature:g}); "
            f"Q_c <- {1 - self.rate:g} Q_c + {self.rate:g} mean_c |R_i - mean_g R|"
        )


def fields_of(task: Any) -> dict[str, str]:
    """Texts and numbers of a task, from its own fields and the columns of its data row."""
    inner = getattr(task, "task", None)  # what an environment is reset with, or the question about a video
    found: dict[str, Any] = {}
    for part in (getattr(inner, "columns", inner), getattr(task, "columns", None), getattr(task, "__dict__", None)):
        found |= part if isinstance(part, Mapping) else {}
    return {name: str(value) for name, value in found.items() if isinstance(value, str | int | float)}


ROWS: tuple[Objective, ...] = (
    Objective(
        "dcpo",
        SmoothStandardised(),
        DcpoClip(),
        SequenceMean(),
        claim="clip bounds by token probability and cumulative statistics use answers that GRPO wastes",
        citation="DCPO, arXiv 2509.02333; bounds 0.16/0.2 of its README",
        verified="lime-RL/DCPO at 01787b0f6158",
        differs="averages rows, where the paper adds them up: the direction is the same; the code's mean runs over all "
        "tokens (aggregation: token_mean)",
    ),
    Objective(
        "single_stream",
        TrackedValue(),
        PpoClip(high=0.28, dual=10.0),
        TokenMean(),
        scaling=AdvantageScaling(whiten="rows", eps_to="deviation"),
        order=Uncertain(),
        claim="one answer per question against its tracked success rate beats GRPO without groups that wait",
        citation="SPO, arXiv 2509.13232 (one sample per task; clip 0.2/0.28, dual clip 10 of its train.sh)",
        verified="verl-project/verl-recipe at 48ea0a797fa2; loss: RTkenny/RiskPO at 65ec40c935f5",
        differs="each visit keeps 0.875 of the tracked counts (rho.type constant in the code); the paper's rule scores "
        "each task's last answer again, and 0.875 is its lower bound; no values from samples before the run",
    ),
    Objective(
        "riskpo",
        BundledRisk(),
        PpoClip(dual=3.0),
        TokenMean(),
        claim="an objective on the lower tail of rewards improves hard questions and pass@k",
        citation="RiskPO, arXiv 2510.00911, the mixture MVaR; constants of scripts/run_qwen2.5_1.5b_MVaR_dapomath.sh",
        verified="RTkenny/RiskPO at 65ec40c935f5",
        differs="tracked quantiles are used from the second step on; the code's trainer hands none on to the next step "
        "and so takes those of each bundle; scores of bundles of unequal size are scaled to one size",
    ),
    Objective(
        "entropy_smoothing",
        clip=PpoClip(dual=3.0),
        aggregation=TokenMean(),
        kl=K3(0.01),
        entropy=SmoothedEntropy(0.001),
        claim="holding the entropy near its past average keeps agents exploring over many turns",
        citation="EPO, arXiv 2509.22576; entropy 0.001 and a band of 0 to 2 on GRPO",
        verified="WujiangXu/EPO at 5b6fa98e0346",
        differs="the penalty is a hinge, because the indicator of the paper and the code has no gradient "
        "(entropy.penalty), in all steps and not only where an episode reaches half of its longest length; the history "
        "is by turn, where the code aligns shorter steps at their end",
    ),
    Objective(
        "sec",
        order=CategoryBandit(),
        advantage=GROUP[0].advantage,
        clip=GROUP[0].clip,
        aggregation=GROUP[0].aggregation,
        kl=GROUP[0].kl,
        claim="a bandit that picks question categories by mean absolute advantage improves on random curricula",
        citation="SEC, arXiv 2505.14970, on GRPO (rate 0.5, temperature 0.4)",
        verified="Vincent-La/cofa at 8b685cbb5ad6",
        differs="a category without rows in a step keeps its value (order.forgets moves it towards 0 as in the code); "
        "tasks of a category are drawn at random, in the code one after the other",
    ),
)
