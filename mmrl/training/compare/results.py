"""What comparison.json says, as dataclasses.

A seed without a value is None; numbers of a mean, a difference or a ratio are None where no seed has one, and NaN where
one seed alone gives no interval.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any


@dataclass
class SeedValues:
    """A metric of one arm by seed, with its mean and 95 % interval."""

    values: dict[int, float | None]
    mean: float | None = None
    low: float | None = None
    high: float | None = None
    n: int = 0
    """Seeds that have a value."""


@dataclass
class ArmResult:
    """One arm's compared metric on the seeds of the comparison."""

    chosen: dict[str, Any] | None
    """The swept parameter and its chosen value; None without a sweep."""
    values: dict[int, float | None]
    mean: float | None
    low: float | None
    high: float | None
    n: int
    secondary: dict[str, SeedValues]
    """Further metrics by name."""
    command: str = ""
    """Command of the arm's first run."""


@dataclass
class Difference:
    """Arm minus baseline, paired seed by seed, with a 95 % interval."""

    per_seed: dict[int, float]
    missing_seeds: list[int]
    """Seeds on which one of the two has no value."""
    ties: int
    mean: float | None = None
    low: float | None = None
    high: float | None = None
    n: int = 0
    """Pairs."""
    wins: int = 0
    """Pairs in which the arm is better than the baseline."""


@dataclass
class SweepRow:
    """One value of the swept parameter in one arm."""

    value: Any
    values: dict[int, float | None]
    mean: float | None


@dataclass
class SweepArm:
    """All values tried in one arm."""

    rows: list[SweepRow]
    at_edge: bool
    """Whether the chosen value is the smallest or the largest that was tried."""


@dataclass
class SweepResult:
    """What the sweep tried and chose."""

    parameter: str
    seeds: list[int]
    overrides: dict[str, Any]
    metric: str
    chosen: dict[str, Any]
    """Arm to value; None where no run finished."""
    arms: dict[str, SweepArm]


@dataclass
class Reach:
    """What one arm spent until its curve had the target."""

    needed: dict[int, float | None]
    """By seed; an upper bound where the first evaluation has the target already, None where it is never reached."""
    spent: dict[int, float]
    """Cost of the whole run on seeds that never reach the target."""
    reached: int
    n: int
    """Seeds with a curve and a target."""
    never: list[int]
    at_first_evaluation: list[int]
    missing_seeds: list[int]


@dataclass
class Ratio:
    """Geometric mean of baseline cost / arm cost over the seeds that both have, or what bounds it."""

    per_seed: dict[int, list[float]]
    """Lower and upper bound of the ratio; equal where both reached the target."""
    missing_seeds: list[int]
    never: list[int]
    """Seeds on which the arm never reaches the target."""
    baseline_never: list[int]
    ratio: float | None = None
    """NaN unless every ratio is known."""
    low: float | None = None
    high: float | None = None
    n: int = 0
    at_least: float = 0.0
    at_most: float | None = None


@dataclass
class CostResult:
    """One cost: what each arm needed, and the baseline's cost over the arm's."""

    weights: dict[str, float]
    """Evaluation counters to their weights in the cost."""
    arms: dict[str, Reach]
    ratios: dict[str, Ratio]


@dataclass
class WorkResult:
    """What each arm spent until it reached the target."""

    metric: str
    higher_is_better: bool
    target: str | int | float
    baseline_last: int
    baseline_share: float
    baseline_spends: str
    targets: dict[int, float | None]
    costs: dict[str, CostResult]


@dataclass
class EqualCostResult:
    """Each arm's value at equal cost."""

    metric: str
    cost: str
    value: str | int | float
    costs: dict[int, float | None]
    """Cost at which the curves are read, by seed."""
    arms: dict[str, SeedValues]
    differences: dict[str, Difference]


@dataclass
class CollapseArm:
    """How much of its start value each run of an arm kept."""

    kept: dict[int, float | None]
    collapsed: list[int]
    share: float | None
    """Share of the runs that collapsed."""
    n: int
    missing_seeds: list[int]


@dataclass
class CollapseResult:
    """Runs that end with less than a share of what they started with."""

    metric: str
    below: float
    arms: dict[str, CollapseArm]


@dataclass
class Failure:
    """A run that failed, or that finished without a number that was asked for."""

    run: str
    reason: str


@dataclass
class Comparison:
    """Content of comparison.json."""

    status: str
    """running, done or failed."""
    command: str
    """Command that made it."""
    name: str
    budget: str
    metric: str
    higher_is_better: bool
    baseline: str
    seeds: list[int]
    sweep: SweepResult | None
    arms: dict[str, ArmResult]
    differences: dict[str, Difference]
    work: WorkResult | None
    at: EqualCostResult | None
    collapse: CollapseResult | None
    failures: list[Failure] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """Plain values, as saved; a section that the experiment does not have is empty."""
        content = dataclasses.asdict(self)
        return {key: {} if value is None else value for key, value in content.items()}
