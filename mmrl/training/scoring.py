"""Adds rewards to rollouts and counts the samples that could not be scored."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from mmrl.core.payload import to_device
from mmrl.core.rollouts import Rollouts
from mmrl.errors import RunError
from mmrl.rewards.reward_config import RewardResult
from mmrl.runs.records import KEPT, SampleRecord
from mmrl.runs.run_log import metric_label
from mmrl.training.processes import from_all

LOGGER = logging.getLogger("mmrl")


class EveryRewardFailedError(RunError):
    """No sample of `rollouts` could be scored; they stay in the step if samples of other workers could be scored."""

    def __init__(self, message: str, rollouts: Rollouts) -> None:
        super().__init__(f"all rewards of this step failed: {message}")
        self.rollouts = rollouts

    def __reduce__(self) -> tuple[Any, ...]:
        """Give `__init__` its own arguments when a worker sends it."""
        return type(self), (str(self).partition(": ")[2], self.rollouts)


def with_rewards(
    rollouts: Rollouts, result: RewardResult, further: Callable[[Rollouts], Rollouts] | None = None
) -> Rollouts:
    """Set the rewards of rollouts; rows with a failed term keep NaN and are excluded from the loss.

    Args:
        rollouts: rows without rewards.
        result: their rewards.
        further: adds what a method makes of scored rows. Rows that no reward could score need it too: they stay in the
            step if other processes have scored theirs.
    """
    device = rollouts.mask.device
    total = torch.tensor(result.total, dtype=torch.float32)
    terms = {
        name: to_device(torch.tensor(values, dtype=torch.float32), device) for name, values in result.terms.items()
    }
    scored = rollouts.replace(reward=to_device(total, device), reward_terms=terms)
    scored = scored if further is None else further(scored)
    if bool(torch.isnan(total).all()):
        raise EveryRewardFailedError(failure_of(result), scored)
    return scored


def scored_record(rollouts: Rollouts, row: int, **about: Any) -> SampleRecord:
    """A row as a sample for the report: its reward, terms and mean advantage, and what a room says about it."""
    length = max(float(rollouts.mask[row].sum()), 1.0)
    advantage = rollouts.advantage
    scored = {
        "reward": float(rollouts.reward[row]),
        "terms": {name: float(values[row]) for name, values in rollouts.reward_terms.items()},
        "advantage": None if advantage is None else float(advantage[row].sum()) / length,
    }
    return SampleRecord(**{**scored, **about})


def score_everywhere(score: Callable[[], Rollouts], failure: RunError | None = None) -> Rollouts:
    """Rows with their rewards; all processes must call it.

    Args:
        score: Scores the rows of this process.
        failure: Reason why none of them could be scored, where it is known already.

    Raises:
        EveryRewardFailedError: None of the rows of any process could be scored; else these teach nothing.
    """
    try:
        rollouts = score()
    except EveryRewardFailedError as error:
        rollouts, failure = error.rollouts, error
    if not any(from_all(failure is None)):
        assert failure is not None
        raise failure
    return rollouts


def failure_of(result: RewardResult) -> str:
    """Reason why no row of a result has a reward; empty if any row has one."""
    if any(value == value for value in result.total):
        return ""
    return "; ".join(f"{name}: {message}" for name, message in result.examples.items())


def describe_failure(rows: Sequence[Mapping[str, Any]], split: str) -> str:
    """Reason why no sample of an evaluation could be scored, from the "failure" of its rows; empty if any could."""
    if not rows or not all(row["failure"] for row in rows):
        return ""
    return f"all rewards failed in the evaluation of {split}: {rows[0]['failure']}"


class RewardErrors:
    """Failures of reward functions: the first of each kind is logged, and failures in training steps are counted."""

    def __init__(self) -> None:
        self._logged: dict[str, None] = {}
        self.step: Counter[str] = Counter()
        """Failures in the step by term and kind."""

    def warn(self, result: RewardResult) -> None:
        """Log the first failure of each kind of a run, with the traceback of the user's code."""
        for name in result.errors:
            if name not in self._logged:
                self._logged[name] = None
                # each by itself in the list of warnings, which holds the reason without its traceback
                LOGGER.warning(f"reward {name.replace('%', '%%')} failed: %s", result.examples.get(name, ""))
                for line in result.traces.get(name, "").splitlines():
                    LOGGER.warning("  %s", line, extra={KEPT: True})

    def count(self, result: RewardResult) -> None:
        """Log like `warn`, and count the failures as part of the step."""
        self.warn(result)
        self.step.update(result.errors)

    def take(self) -> dict[str, float]:
        """Failures in the step as metrics reward/errors/<term>/<kind>; resets the counts.

        A kind that has been seen in the run is there with 0 in steps without it.
        """
        self._logged |= dict.fromkeys(self.step)  # workers and other processes have logged these
        counts = {name: float(self.step[name]) for name in self._logged}
        self.step.clear()
        parts = {name: name.rpartition("/") for name in counts}
        return {f"reward/errors/{metric_label(parts[name][0])}/{parts[name][2]}": n for name, n in counts.items()}

    def state_dict(self) -> list[str]:
        """The kinds that have been logged."""
        return list(self._logged)

    def load_state_dict(self, state: list[str]) -> None:
        """Restore `state_dict`."""
        self._logged = dict.fromkeys(state)
