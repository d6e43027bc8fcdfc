"""Which groups have a gradient, and the bookkeeping of dropping or resampling the others."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from mmrl.core.checks import unknown_name
from mmrl.core.groups import group_extremes, group_sum
from mmrl.core.rollouts import Rollouts


def zero_variance_groups(
    rollouts: Rollouts, key: str = "reward", low: float | None = None, high: float | None = None
) -> Tensor:
    """Say which groups to keep: those whose scored rows do not all have the same reward.

    Args:
        rollouts: The rows of whole groups.
        key: "reward" or the name of a reward term, such as "accuracy".
        low: With `low` or `high`, keep instead the groups whose mean lies strictly between them.
        high: See `low`.

    Returns:
        (N,) bool, true where the group is kept; false for groups without a scored row.

    Raises:
        ValueError: `key` is neither "reward" nor a term.

    Source: dynamic sampling, DAPO, arXiv 2503.14476, eq. 11; bounds on the mean as in EasyR1 filter_low and
        filter_high.
    """
    values = _values(rollouts, key)
    valid = rollouts.scored & torch.isfinite(values)
    if low is None and high is None:
        smallest, largest = group_extremes(values, rollouts.group, valid)
        return largest > smallest
    number = group_sum(valid.to(values.dtype), rollouts.group)
    mean = group_sum(torch.where(valid, values, 0.0), rollouts.group) / number.clamp(min=1)
    keep = number > 0
    if low is not None:
        keep &= mean > low
    if high is not None:
        keep &= mean < high
    return keep


@dataclass
class FilterCounts:
    """How many groups a filter has seen and kept."""

    seen: int = 0
    """Groups given to the filter."""
    kept: int = 0
    """Groups that went on to the loss."""
    tries: int = 0
    """Rollout batches given to the filter."""

    @property
    def kept_fraction(self) -> float:
        """Share of the groups that were kept; NaN before the first."""
        return self.kept / self.seen if self.seen else float("nan")


def drop(rollouts: Rollouts, keep: Tensor) -> tuple[Rollouts, FilterCounts]:
    """Remove groups; the denominators of the loss are then counted over what is left.

    Args:
        rollouts: The rows of whole groups.
        keep: (N,) bool, from `zero_variance_groups`.

    Returns:
        The kept rows, possibly none at all, and the counts.
    """
    kept = rollouts.select_groups(keep)
    return kept, FilterCounts(seen=len(keep), kept=int(keep.sum()), tries=1)


@dataclass
class DynamicSamplingBuffer:
    """Collects kept groups over several rollout batches until a step is full.

    Source: dynamic sampling, DAPO, arXiv 2503.14476, algorithm 1 lines 4-8; the limit of 20 tries is EasyR1's.
    """

    target_groups: int
    """Groups that make a step."""
    max_tries: int = 20
    """Rollout batches after which `add` gives up."""
    counts: FilterCounts = field(default_factory=FilterCounts)
    """What has been seen and kept so far."""
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
        """Whether the tries are used up before the step is full."""
        return not self.full and self.counts.tries >= self.max_tries

    def add(self, rollouts: Rollouts, keep: Tensor) -> None:
        """Add the kept groups (N,) bool of one more rollout batch; more batches than `max_tries` are refused."""
        if self.counts.tries >= self.max_tries:
            raise ValueError(
                f"{self.counts.tries} rollout batches gave {self.counts.kept} of {self.target_groups} groups "
                f"with different rewards (max_tries {self.max_tries}). The tasks are too easy or too hard "
                "for the policy: change the tasks, take more samples_per_task, or set filter to 'drop'."
            )
        kept, counts = drop(rollouts, keep)
        self.counts.seen += counts.seen
        self.counts.kept += counts.kept
        self.counts.tries += 1
        if counts.kept:
            self._parts.append(kept)

    def take(self) -> Rollouts:
        """Return the step's groups, the earliest ones first and not more than `target_groups`.

        Raises:
            ValueError: Nothing was kept.
        """
        if not self._parts:
            raise ValueError("No group was kept, so there is no step to return; check `counts` first.")
        joined = Rollouts.concat(self._parts)
        return joined.select_groups(torch.arange(min(self.target_groups, joined.num_groups)))


def _values(rollouts: Rollouts, key: str) -> Tensor:
    if key == "reward":
        return rollouts.reward
    if key not in rollouts.reward_terms:
        raise ValueError(unknown_name(key, ["reward", *rollouts.reward_terms], "reward term"))
    return rollouts.reward_terms[key].to(rollouts.reward.dtype)
