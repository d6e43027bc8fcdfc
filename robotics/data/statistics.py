"""Statistics of features: of one episode, aggregated over episodes, and quantiles of the whole dataset.

Each feature has min, max, mean, population standard deviation, count and the 1, 10, 50, 90 and 99% quantiles. The
quantiles of an episode are exact. Episodes are aggregated as in lerobot, by averaging their quantiles. This is not the
quantile over all frames (if episodes differ, the 1% quantile is too high), so `EpisodeWriter` recomputes all features
except images from all frames when it finishes.

Source: huggingface/lerobot 0.6.1, src/lerobot/datasets/compute_stats.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

Statistics: TypeAlias = "dict[str, NDArray]"
"""Name of a statistic -> its values."""


def vector_statistics(values: ArrayLike) -> Statistics:
    """Statistics over frames.

    Args:
        values: (T, n), (T,) or (T, ..., n) numbers or booleans, T >= 1.

    Returns:
        min, max, mean, std and quantiles as float64, each (n,) or (1,), for arrays of more axes over all but the last,
        as lerobot has them; count (1,), the frames.
    """
    table = np.asarray(values)
    numbers = (table[:, None] if table.ndim == 1 else table.reshape(-1, table.shape[-1])).astype(np.float64)
    return _array_statistics(numbers) | {"count": np.array([len(table)])}


def image_statistics(frames: NDArray[np.uint8]) -> Statistics:
    """Statistics of the colours over the pixels of some frames, evenly spaced; large ones are thinned out.

    Args:
        frames: (T, H, W, 3) uint8, T >= 1.

    Returns:
        Each (3, 1, 1) float64 in 0..1; count (1,), the number of frames used.
    """
    chosen = _sampled_pixels(frames)
    pixels = chosen.reshape(-1, 3)
    channels = [_level_statistics(np.bincount(pixels[:, channel], minlength=256)) for channel in range(3)]
    statistics = {
        name: np.array([one[name] for one in channels]).reshape(3, 1, 1) / 255.0
        for name in ("min", "max", "mean", "std", *QUANTILES)
    }
    return statistics | {"count": np.array([len(chosen)])}


def depth_statistics(frames: NDArray) -> Statistics:
    """Statistics (1, 1, 1) of depth (T, H, W) over pixels chosen as for images; count (1,), the frames used."""
    chosen = _sampled_pixels(frames)
    found = _array_statistics(chosen.reshape(-1, 1).astype(np.float64))
    return {name: one.reshape(1, 1, 1) for name, one in found.items()} | {"count": np.array([len(chosen)])}


def sampled_frames(length: int) -> int:
    """Frames of an episode used for its statistics: all up to 100, then length ** 0.75, at most 10,000."""
    return max(min(length, 100), min(int(length**0.75), 10_000))


def aggregate_statistics(parts: Sequence[Statistics]) -> Statistics:
    """Statistics of one feature over several episodes from those of each.

    Args:
        parts: of the episodes, at least one.

    Returns:
        min, max, mean, std and count as over all frames together; as quantiles the parts' mean, weighted by count.
    """
    count = np.sum([part["count"] for part in parts], axis=0)
    weights = [part["count"] / count for part in parts]

    def mean(values: Sequence[NDArray]) -> NDArray:
        return np.sum([value * weight for value, weight in zip(values, weights, strict=True)], axis=0)

    centre = mean([part["mean"] for part in parts])
    spread = mean([part["std"] ** 2 + (part["mean"] - centre) ** 2 for part in parts])
    statistics = {
        "min": np.min([part["min"] for part in parts], axis=0),
        "max": np.max([part["max"] for part in parts], axis=0),
        "mean": centre,
        "std": np.sqrt(spread),
        "count": count,
    }
    shared = [name for name in QUANTILES if all(name in part for part in parts)]
    return statistics | {name: mean([part[name] for part in parts]) for name in shared}


def _array_statistics(numbers: NDArray[np.float64]) -> Statistics:
    statistics = {"min": numbers.min(axis=0), "max": numbers.max(axis=0)}
    statistics |= {"mean": numbers.mean(axis=0), "std": numbers.std(axis=0)}
    return statistics | dict(zip(QUANTILES, np.quantile(numbers, list(QUANTILES.values()), axis=0), strict=True))


def _sampled_pixels(frames: NDArray) -> NDArray:
    length, height, width = frames.shape[:3]
    chosen = frames[np.round(np.linspace(0, length - 1, sampled_frames(length))).astype(int)]
    step = int(max(height, width) / THINNED_SIZE) if max(height, width) >= LARGE_SIZE else 1
    return chosen[:, ::step, ::step]


def _level_statistics(histogram: NDArray[np.int64]) -> dict[str, float]:
    levels, count = np.arange(256), int(histogram.sum())
    seen = np.flatnonzero(histogram)
    mean = float(histogram @ levels) / count
    variance = float(histogram @ (levels - mean) ** 2) / count
    numbers = {"min": float(seen[0]), "max": float(seen[-1]), "mean": mean, "std": variance**0.5}
    below = np.cumsum(histogram)
    for name, quantile in QUANTILES.items():
        rank = quantile * (count - 1)
        low, high = np.searchsorted(below, [int(rank), min(int(rank) + 1, count - 1)], side="right")
        numbers[name] = float(low + (rank - int(rank)) * (high - low))
    return numbers


QUANTILES = {"q01": 0.01, "q10": 0.10, "q50": 0.50, "q90": 0.90, "q99": 0.99}
LARGE_SIZE = 300
THINNED_SIZE = 150
