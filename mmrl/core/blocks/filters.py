"""Which groups go into the update; groups whose rewards are all equal have no gradient."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from mmrl.core.blocks.block import Block
from mmrl.core.filters import zero_variance_groups
from mmrl.core.rollouts import Rollouts
from mmrl.fields import bounded, rare


@dataclass(frozen=True)
class GroupFilter(Block):
    """Chooses among the groups of a rollout batch."""

    resamples: ClassVar[bool] = False
    """Whether further tasks are sampled until the step is full."""

    def kept(self, rollouts: Rollouts) -> Tensor:
        """Which groups to keep (N,) bool; the rows are whole groups, scored."""
        raise NotImplementedError

    @property
    def reward_key(self) -> str:
        """`reward`, or the reward term that is looked at."""
        return "reward"

    @property
    def tries(self) -> int:
        """Most rollout batches of a step."""
        return 1


@dataclass(frozen=True)
class KeepAll(GroupFilter):
    """Keeps every group."""

    kind = "none"

    def kept(self, rollouts: Rollouts) -> Tensor:
        return torch.ones(rollouts.num_groups, dtype=torch.bool, device=rollouts.group.device)

    def formula(self) -> str:
        return ""


@dataclass(frozen=True)
class DropGroups(GroupFilter):
    """Drops groups whose rewards are all equal, or whose mean is outside the bounds."""

    kind = "drop"
    key: str = rare("reward")
    """`reward`, or the name of a reward term."""
    low: float | None = rare(None)
    """Keep groups whose mean of `key` lies strictly above; None for both bounds asks for different rewards."""
    high: float | None = rare(None)
    """Keep groups whose mean of `key` lies strictly below."""

    @property
    def reward_key(self) -> str:
        return self.key

    def kept(self, rollouts: Rollouts) -> Tensor:
        return zero_variance_groups(rollouts, self.key, self.low, self.high)

    def formula(self) -> str:
        return f"{_rule(self.key, self.low, self.high)} are dropped"

    def problems(self, where: str) -> Iterator[str]:
        yield from super().problems(where)
        yield from _order_problems(self.low, self.high, where)


@dataclass(frozen=True)
class ResampleGroups(GroupFilter):
    """Dynamic sampling: replaces the groups that `DropGroups` drops by sampling further tasks.

    Source: DAPO, arXiv 2503.14476, eq. 11; bounds on the mean as in EasyR1 filter_low and filter_high.
    """

    kind = "resample"
    resamples = True
    key: str = rare("reward")
    """`reward`, or the name of a reward term."""
    low: float | None = rare(None)
    """Keep groups whose mean of `key` lies strictly above; None for both bounds asks for different rewards."""
    high: float | None = rare(None)
    """Keep groups whose mean of `key` lies strictly below."""
    max_tries: int = rare(bounded(20, at_least=1))
    """Sampling rounds before the step goes on with what there is (EasyR1: 20)."""

    @property
    def tries(self) -> int:
        return self.max_tries

    @property
    def reward_key(self) -> str:
        return self.key

    def kept(self, rollouts: Rollouts) -> Tensor:
        return zero_variance_groups(rollouts, self.key, self.low, self.high)

    def formula(self) -> str:
        return f"{_rule(self.key, self.low, self.high)} are replaced by sampling further tasks"

    def problems(self, where: str) -> Iterator[str]:
        yield from super().problems(where)
        yield from _order_problems(self.low, self.high, where)


def _rule(key: str, low: float | None, high: float | None) -> str:
    if low is None and high is None:
        return f"groups whose {key} is the same in all rows"
    shown = ("-inf" if low is None else f"{low:g}", "inf" if high is None else f"{high:g}")
    return f"groups whose mean {key} is not strictly between {shown[0]} and {shown[1]}"


def _order_problems(low: float | None, high: float | None, where: str) -> Iterator[str]:
    if low is not None and high is not None and low >= high:
        yield f"{where}.low {low} must lie below {where}.high {high}; no group could be kept."


FILTERS: dict[str, type[GroupFilter]] = {block.kind: block for block in (KeepAll, DropGroups, ResampleGroups)}
