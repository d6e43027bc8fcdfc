"""Ranges and statistics of actions and states, and conversions between a dataset's units and the simulator's -1..1.

Shapes: D entries of an action, ... any leading dimensions.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeVar

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from mmrl.errors import UserError
from mmrl.files import is_file, read_json_object, write_atomically

Values = TypeVar("Values", Tensor, NDArray[Any])
RANGE_EPS = 1e-8
"""Added to q99 - q01 when normalising and unnormalising, as in OpenVLA."""
SMALLEST_STD = 1e-6
"""States with a smaller standard deviation are only shifted."""
FARTHEST = 3.0
"""Actions beyond this, on the scale -1..1, are more than a full range outside, which means different units rather than
a few large commands."""
BEYOND = 1.01
"""Actions up to this, on the scale -1..1, count as inside."""
STATE_LIMIT = 10.0
"""Standardised states are clipped to this."""
MOVES = 1e-6
"""Standard deviation above which an entry of the state counts as moving; others are only centred."""
QUIET = 0.05
"""Fraction of the median standard deviation of the moving entries below which one of them counts as quiet."""


@dataclass(frozen=True)
class ActionRange:
    """Values in other units that correspond to -1 and 1 in the simulator, for each of D entries of an action.

    The units are those of a policy's data, which the policy converts itself, or the environment's own. In contrast,
    `ActionStatistics` normalise demonstrations and are applied outside the policy. An entry with equal bounds, such as
    a locked joint, has a single value, which corresponds to 0 in the simulator.
    """

    low: tuple[float, ...]
    """D values that correspond to -1 in the simulator."""
    high: tuple[float, ...]
    """D values that correspond to 1 in the simulator."""
    integer: bool = False
    """Whether the values are whole numbers."""

    @classmethod
    def of(cls, low: Sequence[float], high: Sequence[float], size: int, policy: str) -> ActionRange | None:
        """Create a range from options."""
        if not low and not high:
            return None
        for name, values in (("action_low", low), ("action_high", high)):
            if values and len(values) != size:
                raise UserError(
                    f"model.options.{name} has {len(values)} entries, but the actions of {policy} have {size}; the "
                    "numbers must match"
                )
        # one side alone is allowed; the other is then the simulator's own
        return cls(tuple(low) or (-1.0,) * size, tuple(high) or (1.0,) * size)

    @classmethod
    def load(cls, path: Path, size: int) -> ActionRange:
        """Read both bounds of a policy with D = size entries from a file; raises UserError if they do not fit."""
        entries = read_json_object(path)
        low, high = (side if isinstance(side, list) else [] for side in (entries.get("low"), entries.get("high")))
        numbers = all(type(value) in (int, float) and math.isfinite(value) for value in low + high)
        if len(low) != size or len(high) != size or not numbers:
            raise UserError(f"{path} needs low and high with {size} finite numbers each, one per entry of an action")
        if any(least > most for least, most in zip(low, high, strict=True)):
            raise UserError(f"{path} has low {low} and high {high}; low must not exceed high")
        integer = entries.get("integer", False)
        if not isinstance(integer, bool):
            raise UserError(f"{path} has integer {integer!r:.40}; expected true or false")
        return cls(tuple(map(float, low)), tuple(map(float, high)), integer)

    def to_sim(self, actions: Tensor) -> Tensor:
        """Convert actions (..., D) of the data to the simulator's, 2 (a - low) / (high - low) - 1, not clipped."""
        low, width = self._scales(actions)
        # in float64: bounds such as 512 would cost float32 actions their last bits on the way there and back
        scaled = 2 * (actions.double() - low) / torch.where(width == 0, 1.0, width) - 1
        # equal bounds mean a locked joint, whose only value is 0 by convention
        return torch.where(width == 0, 0.0, scaled).to(actions.dtype)

    def to_data(self, actions: Tensor) -> Tensor:
        """Convert actions (..., D) of the simulator to the data's, (a + 1) / 2 (high - low) + low, rounded if whole."""
        low, width = self._scales(actions)
        found = (actions.double() + 1) / 2 * width + low
        return (found.round() if self.integer else found).to(actions.dtype)

    def as_dict(self) -> dict[str, Any]:
        """Both bounds as lists."""
        return {"low": list(self.low), "high": list(self.high), **({"integer": True} if self.integer else {})}

    def same_as(self, other: ActionRange) -> bool:
        """Whether two ranges are equal up to float32 rounding of the bounds."""
        sides = ((self.low, other.low), (self.high, other.high))
        close = all(np.shape(one) == np.shape(two) and np.allclose(one, two, rtol=1e-6, atol=0) for one, two in sides)
        return close and self.integer == other.integer

    def __str__(self) -> str:
        """The bounds as a Box."""
        pairs = dict.fromkeys(f"{low:.6g}..{high:.6g}" for low, high in zip(self.low, self.high, strict=True))
        return ", ".join(pairs) + (" (whole numbers)" if self.integer else "")

    def _scales(self, like: Tensor) -> tuple[Tensor, Tensor]:
        low, high = (torch.tensor(values, dtype=torch.float64, device=like.device) for values in (self.low, self.high))
        return low, high - low


def check_bounds(low: Sequence[float], high: Sequence[float]) -> None:
    """Check the options `action_low` and `action_high` as far as possible without a policy; raises ValueError."""
    if low and high and len(low) != len(high):
        raise ValueError(
            f"action_low has {len(low)} entries and action_high {len(high)}; both need one value per entry of an action"
        )
    size = max(len(low), len(high))
    pairs = zip(low or [-1.0] * size, high or [1.0] * size, strict=True)
    for entry, (least, most) in enumerate(pairs):
        if not (math.isfinite(least) and math.isfinite(most) and least <= most):
            raise ValueError(
                f"entry {entry} of action_low is {least} and of action_high {most}; both must be finite, and "
                "action_low must not exceed action_high"
            )


@dataclass(frozen=True)
class ActionStatistics:
    """Distribution of each action entry over a dataset; float64, so that saving and loading is bit-exact."""

    q01: NDArray[np.float64]
    """(D,) quantile 0.01, in the dataset's units."""
    q99: NDArray[np.float64]
    """(D,) quantile 0.99."""
    minimum: NDArray[np.float64]
    """(D,)."""
    maximum: NDArray[np.float64]
    """(D,)."""
    mean: NDArray[np.float64]
    """(D,)."""
    std: NDArray[np.float64]
    """(D,) population standard deviation."""
    mask: NDArray[np.bool_]
    """(D,) False for entries that are not scaled, such as a gripper that is 0 or 1."""

    def __post_init__(self) -> None:
        sizes = {name: np.shape(getattr(self, name)) for name in (*COLUMNS, "mask")}
        if len(set(sizes.values())) != 1 or len(sizes["q01"]) != 1:
            raise ValueError(f"all statistics must have the same shape (D,); got {sizes}")

    @property
    def size(self) -> int:
        """Number of entries D."""
        return len(self.q01)

    @property
    def hardly_moves(self) -> NDArray[np.bool_]:
        """(D,) whether an entry varies, but its quantiles span at most a fiftieth of its range."""
        span = self.maximum - self.minimum
        return (span > 0) & (self.q99 - self.q01 <= span / 50)

    @classmethod
    def from_arrays(cls, actions: ArrayLike, mask: Sequence[bool] | None = None) -> Self:
        """Compute them from the actions (N, D) of a dataset; `mask` (D,) is False for entries that are not scaled."""
        values = _table(actions, "actions")
        low, high = np.quantile(values, [0.01, 0.99], axis=0)
        kept = np.ones(values.shape[1], bool) if mask is None else np.asarray(mask, bool)
        return cls(low, high, values.min(0), values.max(0), values.mean(0), values.std(0), kept)

    @classmethod
    def from_lerobot(
        cls, stats: Mapping[str, Mapping[str, Any]], key: str = "action", mask: Sequence[bool] | None = None
    ) -> Self:
        """Read them from the contents of a LeRobotDataset's meta/stats.json; `mask` as in `from_arrays`.

        Source: LeRobotDataset v3.0, meta/stats.json.
        """
        if key not in stats:
            raise UserError(f"the dataset's statistics have no feature {key!r}; available: {', '.join(sorted(stats))}")
        missing = [name for name in LEROBOT_NAMES if name not in stats[key]]
        if missing:
            raise UserError(
                f"the statistics of {key!r} have no {', '.join(missing)}; they have {', '.join(sorted(stats[key]))}. "
                "For datasets without quantiles, use from_arrays"
            )
        found = {name: np.asarray(stats[key][name], np.float64).reshape(-1) for name in LEROBOT_NAMES}
        kept = np.ones(len(found["q01"]), bool) if mask is None else np.asarray(mask, bool)
        return cls(mask=kept, **{own: found[name] for name, own in LEROBOT_NAMES.items()})

    def normalise(self, actions: Values) -> Values:
        """Normalise actions to -1..1 by their quantiles, clip(2 (a - q01) / (q99 - q01 + 1e-8) - 1).

        Constant entries become 0, and entries outside the mask are unchanged. If only the quantiles are equal, their
        value becomes -1, and other values -1 or 1.

        Source: openvla/openvla prismatic/vla/datasets/rlds/utils/data_utils.py (BOUNDS_Q99).
        """
        low, width, kept, constant = self._scales(actions)
        # RANGE_EPS is part of the published formula; without it, saved policies would act differently
        scaled = (2 * (actions - low) / width - 1).clip(-1, 1)
        return _where(kept, _where(constant, scaled * 0, scaled), actions)

    def unnormalise(self, actions: Values) -> Values:
        """Undo `normalise` within the quantiles, 0.5 (a + 1) (q99 - q01 + 1e-8) + q01.

        Source: openvla/openvla prismatic/extern/hf/modeling_prismatic.py (predict_action).
        """
        low, width, kept, _ = self._scales(actions)
        return _where(kept, 0.5 * (actions + 1) * width + low, actions)

    def as_dict(self) -> dict[str, list[Any]]:
        """All numbers as lists."""
        return {name: getattr(self, name).tolist() for name in (*COLUMNS, "mask")}

    def save(self, path: Path | str) -> None:
        """Write a JSON file."""
        write_atomically(Path(path), json.dumps(self.as_dict(), indent=2) + "\n")

    @classmethod
    def load(cls, path: Path | str) -> Self:
        """Load saved statistics; raises UserError if the file is missing or has different entries."""
        if not is_file(path):
            raise UserError(f"statistics file {path} not found")
        entries = read_json_object(Path(path))
        if set(entries) != {*COLUMNS, "mask"}:
            raise UserError(f"{path} has the entries {sorted(entries)}; expected {sorted((*COLUMNS, 'mask'))}")
        try:
            columns = {name: np.asarray(entries[name], np.float64) for name in COLUMNS}
            mask = np.asarray(entries["mask"], bool)
        except (ValueError, TypeError, OverflowError) as error:
            raise UserError(f"{path} contains something other than lists of numbers: {error}") from error
        shapes = {column.shape for column in (*columns.values(), mask)}
        if len(shapes) > 1 or mask.ndim != 1 or not all(np.isfinite(column).all() for column in columns.values()):
            raise UserError(
                f"{path} must contain lists of finite numbers, all of the same length; their shapes are "
                f"{sorted(shapes)}"
            )
        return cls(mask=mask, **columns)

    def _scales(self, like: Values) -> tuple[Values, Values, Values, Values]:
        if like.shape[-1] != self.size:
            raise ValueError(f"actions have the shape {tuple(like.shape)}, but the statistics have {self.size} entries")
        width = self.q99 - self.q01
        constant = self.minimum == self.maximum
        low, scale = _like(self.q01, like), _like(width + RANGE_EPS, like)
        return low, scale, _like(self.mask, like), _like(constant, like)


@dataclass(frozen=True)
class StateStatistics:
    """Mean and standard deviation of each entry of a state."""

    mean: NDArray[np.float64]
    """(S,) in the state's units."""
    std: NDArray[np.float64]
    """(S,)."""

    @property
    def size(self) -> int:
        """Number of entries S."""
        return len(self.mean)

    @classmethod
    def from_arrays(cls, states: ArrayLike) -> Self:
        """Compute them from (N, S) states; raises UserError if there are none or some are not finite."""
        values = _table(states, "states")
        return cls(values.mean(0), values.std(0))

    def at_least(self, minimum: float) -> StateStatistics:
        """The same with standard deviations of moving entries of at least `minimum`, in the state's units."""
        return StateStatistics(self.mean, np.where(self.std > MOVES, np.maximum(self.std, minimum), self.std))

    def quiet(self) -> list[int]:
        """Entries that hardly move: a small change of them is many standard deviations.

        Their units are not known, so this is a reason to look at them, not an error.
        """
        moving = self.std[self.std > MOVES]
        limit = QUIET * np.median(moving) if len(moving) else 0.0
        return np.flatnonzero((self.std > MOVES) & (self.std < limit)).tolist()


def libero_gripper(actions: Values) -> Values:
    """Convert the gripper of a policy trained on LIBERO, 1 = open, to the environment's, -1 = open.

    Source: openvla/openvla experiments/robot/robot_utils.py (normalize_gripper_action, invert_gripper_action).
    """
    # 0..1 to 1..-1: open is 1 in the data and -1 in the environment
    gripper = actions[..., -1:] * -2 + 1
    if isinstance(actions, Tensor):
        return torch.cat([actions[..., :-1], gripper.sign()], -1)
    return np.concatenate([actions[..., :-1], np.sign(gripper)], -1)


def _table(values: ArrayLike, what: str) -> NDArray[np.float64]:
    table = np.asarray(values, np.float64)
    if table.ndim != 2 or not len(table):
        raise UserError(f"{what} have the shape {table.shape}; statistics need (N, D) with N at least 1")
    if not np.isfinite(table).all():
        bad = np.flatnonzero(~np.isfinite(table).all(0)).tolist()
        raise UserError(f"{what} are not finite in the entries {bad}")
    return table


def _like(values: NDArray[Any], like: Values) -> Any:
    """Convert values to an array or tensor like another, with its device and dtype; bools stay bools."""
    if isinstance(like, Tensor):
        return torch.as_tensor(values).to(like.device, torch.bool if values.dtype == bool else like.dtype)
    return values if values.dtype == bool else values.astype(like.dtype)


def _where(condition: Any, yes: Any, no: Any) -> Any:
    return torch.where(condition, yes, no) if isinstance(yes, Tensor) else np.where(condition, yes, no)


LEROBOT_NAMES = {"q01": "q01", "q99": "q99", "min": "minimum", "max": "maximum", "mean": "mean", "std": "std"}
COLUMNS = tuple(LEROBOT_NAMES.values())
