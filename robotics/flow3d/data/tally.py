"""Counts over clips. Each shard stores its own, and those of a data set are their sum.

Depths and lengths are counted in bins of a millimetre, so that quantiles need no second pass over the clips.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from robotics.flow3d.geometry import lift

if TYPE_CHECKING:
    from collections.abc import Mapping

BIN_M = 1e-3
GROUPS = ("split", "source", "task")


@dataclass
class Tally:
    """Counts over clips."""

    clips: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    """Clips by split, source and task."""
    sizes: Counter[str] = field(default_factory=Counter)
    """Clips by image size, as width x height."""
    depth_mm: Counter[int] = field(default_factory=Counter)
    """Histogram of depths of query and future points."""
    moved_mm: Counter[int] = field(default_factory=Counter)
    """Histogram of the displacement of the median point between first and last frame."""
    visible: list[float] = field(default_factory=lambda: [0.0, 0.0])
    """Sum and count of visibility."""
    quality: dict[str, list[float]] = field(default_factory=dict)
    """Sum and count of each finite number of `FlowClip.quality`."""

    def add(self, row: Mapping[str, Any], quality: Mapping[str, float]) -> None:
        """Count a clip."""
        self.clips[row["split"], row["source"], row["task"]] += 1
        self.sizes[f"{row['width']}x{row['height']}"] += 1
        points = np.asarray(row["points"], dtype=np.float64).reshape(-1, 3)
        flow = np.asarray(row["flow"], dtype=np.float64).reshape(-1, len(points), 4)
        depths = np.concatenate([points[:, 2], flow[..., 2].ravel()])
        self.depth_mm.update(_bins(depths))
        K = np.asarray(row["K"], dtype=np.float64).reshape(3, 3)
        moved = np.linalg.norm(lift(flow[-1, :, :3], K) - lift(points, K), axis=-1)
        self.moved_mm.update(_bins(np.array([np.median(moved)])))
        self.visible[0] += float(flow[..., 3].sum())
        self.visible[1] += flow[..., 3].size
        for name, value in quality.items():
            if np.isfinite(value):
                one = self.quality.setdefault(name, [0.0, 0.0])
                one[0] += float(value)
                one[1] += 1

    def merge(self, other: Tally) -> None:
        """Add the counts of other clips."""
        for name in ("clips", "sizes", "depth_mm", "moved_mm"):
            getattr(self, name).update(getattr(other, name))
        self.visible = [mine + theirs for mine, theirs in zip(self.visible, other.visible, strict=True)]
        for name, (total, count) in other.quality.items():
            one = self.quality.setdefault(name, [0.0, 0.0])
            one[0] += total
            one[1] += count

    def to_json(self) -> dict[str, Any]:
        """JSON that `from_json` reads."""
        return {
            "clips": [[*key, count] for key, count in sorted(self.clips.items())],
            "sizes": dict(self.sizes),
            "depth_mm": [list(pair) for pair in sorted(self.depth_mm.items())],
            "moved_mm": [list(pair) for pair in sorted(self.moved_mm.items())],
            "visible": self.visible,
            "quality": self.quality,
        }

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Tally:
        """The inverse of `to_json`; raises KeyError, TypeError or ValueError for other content."""
        return cls(
            Counter({(split, source, task): count for split, source, task, count in content["clips"]}),
            Counter(content["sizes"]),
            Counter(dict(map(tuple, content["depth_mm"]))),
            Counter(dict(map(tuple, content["moved_mm"]))),
            list(content["visible"]),
            {name: list(pair) for name, pair in content["quality"].items()},
        )

    def count_by(self, group: str) -> dict[str, int]:
        """Clips by `split`, `source` or `task`, sorted by name."""
        index, counts = GROUPS.index(group), Counter[str]()
        for key, count in self.clips.items():
            counts[key[index]] += count
        return dict(sorted(counts.items()))

    def statistics(self) -> dict[str, Any]:
        """Quantiles of depth and displacement in metres, share of visible points, means of quality."""
        marks = {"min": 0.0, "q01": 0.01, "q50": 0.5, "q99": 0.99, "max": 1.0}
        return {
            "depth_m": {name: quantile_of(self.depth_mm, share) for name, share in marks.items()},
            "moved_m": {name: quantile_of(self.moved_mm, share) for name, share in marks.items()},
            "visible": self.visible[0] / max(self.visible[1], 1.0),
            "quality": {name: total / count for name, (total, count) in sorted(self.quality.items())},
        }


def quantile_of(bins: Mapping[int, int], share: float) -> float | None:
    """Smallest length in metres that at least a share of the counted ones do not exceed."""
    if not bins:
        return None
    lengths = np.array(sorted(bins))
    below = np.cumsum([bins[length] for length in lengths])
    index = min(int(np.searchsorted(below, max(share * below[-1], 1))), len(lengths) - 1)
    return round((float(lengths[index]) + 0.5) * BIN_M, 6)


def _bins(lengths_m: Any) -> Counter[int]:
    known = lengths_m[np.isfinite(lengths_m)]
    values, counts = np.unique(np.floor(known / BIN_M).astype(np.int64), return_counts=True)
    return Counter(dict(zip(values.tolist(), counts.tolist(), strict=True)))
