"""Task order, and filters that drop groups without a gradient or sample replacements for them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from mmrl.core.block import Block, unknown_name
from mmrl.core.blocks.advantage import Advantage, group_extremes, group_sum
from mmrl.core.rollouts import Rollouts
from mmrl.core.state import ObjectiveState
from mmrl.fields import bounded, rare

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class TaskOrder(Block):
    """Chooses the next tasks."""

    def state(self, tasks: Sequence[Any] = ()) -> Any:
        """See `Block.state`; the state may depend on the training tasks."""
        return None

    def __call__(self, tasks: int, count: int, state: ObjectiveState, generator: torch.Generator) -> Tensor | None:
        """Draw tasks.

        Args:
            tasks: Number of training tasks.
            count: Number of tasks to draw.
            state: State of the objective's blocks.
            generator: CPU generator of this draw, the same in every process.

        Returns:
            Their indices (count,) int64; None for each task once per epoch, reshuffled every epoch.
        """
        raise NotImplementedError

    def conflicts(self, advantage: Advantage) -> Iterator[str]:
        """Yield reasons why the order is incompatible with an advantage estimator."""
        yield from ()


@dataclass(frozen=True)
class Epochs(TaskOrder):
    """Every task once per epoch, reshuffled every epoch."""

    kind = "epochs"

    def __call__(self, tasks: int, count: int, state: ObjectiveState, generator: torch.Generator) -> Tensor | None:
        return None

    def formula(self) -> str:
        return ""


def zero_variance_groups(
    rollouts: Rollouts, key: str = "reward", low: float | None = None, high: float | None = None
) -> Tensor:
    """Choose the groups to keep: those whose scored rows do not all have the same reward.

    Args:
        rollouts: The rows of whole groups.
        key: "reward" or the name of a reward term, such as "accuracy".
        low: With `low` or `high`, keep instead the groups whose mean is strictly between them.
        high: See `low`.

    Returns:
        (N,) bool, true where the group is kept; false for groups without a scored row.

    Raises:
        ValueError: `key` is neither "reward" nor a term.

    Source: dynamic sampling, DAPO, arXiv 2503.14476, eq. 11; bounds on the mean as in EasyR1 filter_low and
        filter_high.
    """
    values = _values(rollouts, key)
    # unscored rows do not make a group differ, and a term may be missing for single rows
    valid = rollouts.scored & torch.isfinite(values)
    if low is None and high is None:
        smallest, largest = group_extremes(values, rollouts.group, valid, rollouts.num_groups)
        return largest > smallest
    # a mean over the valid rows; groups without one are dropped by `number > 0`
    number = group_sum(valid.to(values.dtype), rollouts.group, rollouts.num_groups)
    mean = group_sum(torch.where(valid, values, 0.0), rollouts.group, rollouts.num_groups) / number.clamp(min=1)
    keep = number > 0
    # strict on both sides: a mean of exactly 0 or 1 has no gradient with binary rewards
    if low is not None:
        keep &= mean > low
    if high is not None:
        keep &= mean < high
    return keep


def groups_that_differ(rollouts: Rollouts, compared: Sequence[str]) -> Tensor:
    """Mask (N,) bool of the groups whose scored rows differ in one of the compared rewards."""
    # advantages that are estimated term by term and added have a gradient if any term differs
    return torch.stack([zero_variance_groups(rollouts, key) for key in compared]).any(0)


@dataclass
class FilterCounts:
    """Numbers of groups that a filter has seen and kept."""

    seen: int = 0
    """Groups given to the filter."""
    kept: int = 0
    """Groups passed on to the loss."""
    tries: int = 0
    """Rollout batches given to the filter."""


def drop(rollouts: Rollouts, keep: Tensor) -> tuple[Rollouts, FilterCounts]:
    """Remove groups; the denominators of the loss are then counted over the remaining ones.

    Args:
        rollouts: The rows of whole groups.
        keep: (N,) bool, from `zero_variance_groups`.

    Returns:
        The kept rows, possibly none at all, and the counts.
    """
    # whole groups only: dropping single rows would shift the mean of the rest
    kept = rollouts.select_groups(keep)
    return kept, FilterCounts(seen=len(keep), kept=kept.num_groups, tries=1)


@dataclass
class DynamicSamplingBuffer:
    """Collects kept groups over several rollout batches until a step is full.

    Source: dynamic sampling, DAPO, arXiv 2503.14476, algorithm 1 lines 4-8; the limit of 20 tries is EasyR1's.
    """

    target_groups: int
    """Groups needed for a step."""
    max_tries: int = 20
    """Maximum number of rollout batches before `add` gives up."""
    counts: FilterCounts = field(default_factory=FilterCounts)
    """Counts so far."""
    _parts: list[Rollouts] = field(default_factory=list)

    @property
    def missing_groups(self) -> int:
        """Groups still needed; 0 when the step is full."""
        return max(0, self.target_groups - self.counts.kept)

    @property
    def full(self) -> bool:
        """Whether no further rollouts are needed."""
        return self.missing_groups == 0

    @property
    def exhausted(self) -> bool:
        """Whether all tries have been used before the step is full."""
        return not self.full and self.counts.tries >= self.max_tries

    def add(self, rollouts: Rollouts, keep: Tensor) -> None:
        """Add the kept groups (N,) bool of another rollout batch; raises an error after `max_tries` batches."""
        # an error of the caller, which has to ask `exhausted` first
        if self.counts.tries >= self.max_tries:
            raise ValueError(
                f"{self.counts.tries} rollout batches gave {self.counts.kept} of {self.target_groups} groups with "
                f"different rewards (max_tries {self.max_tries}). The tasks are too easy or too hard for the "
                "policy: change the tasks, increase samples_per_task, or set filter to 'drop'."
            )
        kept, counts = drop(rollouts, keep)
        self.counts.seen += counts.seen
        self.counts.kept += counts.kept
        self.counts.tries += 1
        # an empty part has no shape to join with
        if counts.kept:
            self._parts.append(kept)

    def take(self) -> Rollouts:
        """Return the step's groups, at most `target_groups`, earliest first.

        Raises:
            ValueError: Nothing was kept.
        """
        if not self._parts:
            raise ValueError("No group was kept, so there is no step to return; check `counts` first.")
        joined = Rollouts.concat(self._parts)
        # the surplus of the last batch is discarded: a step has a fixed number of groups, and the earliest are drawn
        # first
        return joined.select_groups(torch.arange(min(self.target_groups, joined.num_groups)))


def _values(rollouts: Rollouts, key: str) -> Tensor:
    if key == "reward":
        return rollouts.reward
    if key not in rollouts.reward_terms:
        raise ValueError(unknown_name(key, sorted(["reward", *rollouts.reward_terms]), "reward term"))
    # in the precision of the reward, so that comparisons of both round alike
    return rollouts.reward_terms[key].to(rollouts.reward.dtype)


@dataclass(frozen=True)
class GroupFilter(Block):
    """Chooses among the groups of a rollout batch."""

    resamples: ClassVar[bool] = False
    """Whether further tasks are sampled until the step is full."""

    def kept(self, rollouts: Rollouts, compared: Sequence[str] = ("reward",)) -> Tensor:
        """Mask (N,) bool of the groups to keep.

        Args:
            rollouts: The rows of whole groups, scored.
            compared: `reward`, or names of the terms that advantages are made of, each by itself.
        """
        raise NotImplementedError

    @property
    def reward_key(self) -> str:
        """`reward`, or the reward term that the filter uses."""
        return "reward"

    @property
    def tries(self) -> int:
        """Maximum number of rollout batches per step."""
        return 1


@dataclass(frozen=True)
class KeepAll(GroupFilter):
    """Keeps every group."""

    kind = "none"

    def kept(self, rollouts: Rollouts, compared: Sequence[str] = ("reward",)) -> Tensor:
        return torch.ones(rollouts.num_groups, dtype=torch.bool)

    def formula(self) -> str:
        return ""


@dataclass(frozen=True)
class DropGroups(GroupFilter):
    """Drops groups whose rewards are all equal, or whose mean is outside the bounds."""

    kind = "drop"
    fate: ClassVar[str] = "are dropped"
    """Verb of the formula."""
    key: str = rare("reward")
    """`reward`, or the name of a reward term."""
    low: float | None = rare(None)
    """Keep groups whose mean of `key` is strictly above it; without bounds, keep groups whose rewards differ."""
    high: float | None = rare(None)
    """Keep groups whose mean of `key` is strictly below it."""

    @property
    def reward_key(self) -> str:
        return self.key

    def kept(self, rollouts: Rollouts, compared: Sequence[str] = ("reward",)) -> Tensor:
        # with a plain reward key, also look at the terms that advantages are estimated from
        if self.key == "reward" and self.low is None and self.high is None:
            return groups_that_differ(rollouts, compared)
        return zero_variance_groups(rollouts, self.key, self.low, self.high)

    def formula(self) -> str:
        if self.low is None and self.high is None:
            return f"groups whose {self.key} is the same in all rows {self.fate}"
        low, high = (
            (self.low if self.low is not None else -math.inf),
            (self.high if self.high is not None else math.inf),
        )
        return f"groups whose mean {self.key} is not strictly between {low:g} and {high:g} {self.fate}"

    def problems(self, where: str) -> Iterator[str]:
        yield from super().problems(where)
        if self.low is not None and self.high is not None and self.low >= self.high:
            yield f"{where}.low {self.low} must be below {where}.high {self.high}; otherwise no group can be kept."


@dataclass(frozen=True)
class ResampleGroups(DropGroups):
    """Dynamic sampling: replaces the groups that `DropGroups` would drop by sampling more tasks.

    Source: DAPO, arXiv 2503.14476, eq. 11; bounds on the mean as in EasyR1 filter_low and filter_high.
    """

    kind = "resample"
    resamples = True
    fate = "are replaced by sampling further tasks"
    max_tries: int = rare(bounded(20, at_least=1))
    """Maximum number of sampling rounds before the step continues with the groups it has (EasyR1: 20)."""

    @property
    def tries(self) -> int:
        return self.max_tries
