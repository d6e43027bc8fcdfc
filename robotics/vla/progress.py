"""SRPO's reward: a failure is rewarded by how close it comes to the same policy's successes at the task.

Trajectories are points in the latent space of a frozen world model. Successes of a task are clustered, a failure's
distance to the nearest cluster's centre is normalised over the task's failures and mapped to a reward between 0 and
`alpha` < 1; a success has reward 1. If a task has no success to compare with, its failures have reward 0.

Paper: SRPO, arXiv 2511.15605. Defaults are the constants of the released code, sii-research/siiRL
siirl/utils/reward_score/embodied.py. Differences from it:

- `eps_mode="per_sqrt_dim"`: two standardised successes are about sqrt(2 E) apart, so the released radius of 0.5 never
  finds a cluster in E = 64 entries or more; here it grows with the root of the number of entries that vary.
  "absolute" is the released one.
- `invalid="nan"`: a trajectory that could not be embedded has no reward, where the code gives 0, even to a success.
- `norm="zscore"` is the paper's form, of the distance's deviation from its mean; `squared` its squared distance.
  "absolute" also tells whether all failures are far away or all are close, which the other two cannot.
- `memory` adds successes of earlier batches as references; the code has only those of the batch.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from mmrl.fields import bounded, check_fields, choice

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import ArrayLike, NDArray

    _Floats = NDArray[np.float64]

__all__ = [
    "EPS_MODES",
    "INVALID",
    "NORMS",
    "ProgressOutcome",
    "ProgressSettings",
    "SuccessMemory",
    "cluster_labels",
    "progress_rewards",
    "rank_agreement",
]

SMALLEST_RANGE = 1e-6
MIDDLE = 0.5
FEWEST_RANKED = 3
CONSTANT_ENTRY = 1e-7
EPS_MODES = ("per_sqrt_dim", "absolute")
INVALID = ("nan", "zero")


@dataclass
class ProgressSettings:
    """Constants of the progress reward; the defaults are the released code's except for `eps_mode` and `invalid`."""

    alpha: float = bounded(0.6, above=0, below=1)
    """Largest reward of a failure; below 1, so that what only looks like a success is worth less than one."""
    steepness: float = bounded(10.0, above=0, finite=True)
    """Slope of the sigmoid over the normalised distance; norms minmax and absolute."""
    offset: float = bounded(0.5, finite=True)
    """Normalised distance with a reward of alpha / 2; norms minmax and absolute."""
    eps: float = bounded(0.5, above=0, finite=True)
    """Radius of DBSCAN over the standardised successes; see `eps_mode`."""
    eps_mode: str = choice("per_sqrt_dim", EPS_MODES)
    """per_sqrt_dim multiplies `eps` by the root of the number of entries that vary; absolute uses it unchanged."""
    min_samples: int = bounded(2, at_least=1)
    """Successes within the radius, itself included, that make a success a core point of a cluster."""
    norm: str = choice("minmax", lambda: NORMS)
    """minmax over the task's failures (code), zscore over them (paper), absolute against the successes' own spread."""
    squared: bool = False
    """Whether distances are squared before they are normalised."""
    memory: int = bounded(0, at_least=0)
    """Latest successes of a task that are kept as references for later batches; 0 = those of the batch only."""
    invalid: str = choice("nan", INVALID)
    """Reward of a trajectory that could not be embedded: nan (left out and counted) or zero (released code)."""


@dataclass(frozen=True)
class ProgressOutcome:
    """Rewards of B trajectories and how they were obtained."""

    reward: NDArray[np.float32]
    """(B,) 1 for a success, 0..alpha for a failure; `settings.invalid` for an invalid row."""
    distance: NDArray[np.float32]
    """(B,) distance of each failure to the nearest centre, squared with `settings.squared`; NaN without a reference."""
    centres: Mapping[Hashable, NDArray[np.float32]]
    """(C, E) by task, for tasks with both failures and references."""
    clusters: float
    """Mean number of clusters of these tasks; a task without a cluster counts 0, and its only centre is the mean of all
    its references. 0 without such tasks."""
    noise_fraction: float
    """Share of these tasks' references that lie in no cluster; 0 without such tasks."""
    tasks_without_reference: int
    """Tasks of the batch whose failures have reward 0 because there is no success to compare with."""
    tasks: int
    """Tasks of the batch."""
    invalid: int
    """Rows that could not be embedded."""

    @property
    def fraction_without_reference(self) -> float:
        """Share of the batch's tasks without a reference."""
        return self.tasks_without_reference / max(self.tasks, 1)


def progress_rewards(
    latents: ArrayLike,
    success: ArrayLike,
    valid: ArrayLike,
    tasks: Sequence[Hashable],
    settings: ProgressSettings,
    references: Mapping[Hashable, ArrayLike] | None = None,
) -> ProgressOutcome:
    """Reward successes with 1 and failures by their distance to the successes of their task.

    All rows of a task share one set of references, whatever initial state they started from; give the whole batch, not
    one process's share. For a failure at distance d of the nearest centre (squared where asked for):

        minmax    u = (d - min d) / (max d - min d)     reward = alpha sigmoid(steepness (offset - u))
        absolute  u = d / (d + s)                       the same; s = mean distance of the references to their centres
        zscore    z = (d - mean d) / std d              reward = alpha sigmoid(-z)

    over the failures of the task. Where their distances differ by less than 1e-6, u is 0.5 and z is 0. Where s is 0
    (a single reference), absolute falls back to minmax.

    Args:
        latents: (B, E) float32; invalid rows are not used.
        success: (B,) bool, whether the episode succeeded.
        valid: (B,) bool, whether it ran and could be embedded.
        tasks: (B,) labels.
        settings: constants and options.
        references: (M, E) further successes by task, as `SuccessMemory.references` gives them.

    Returns:
        Rewards and how they were obtained.

    Gradient: none, all are constants.

    Raises:
        UserError: a setting is out of range.
        ValueError: shapes do not fit, or a valid latent is not finite.

    Source: sii-research/siiRL siirl/utils/reward_score/embodied.py; the paper's form: SRPO, arXiv 2511.15605.
    """
    check_fields(settings, "progress")
    points, won, sound = _check_rows(latents, success, valid, tasks)
    places = _places_by_task(tasks)
    reward = np.where(sound, won.astype(np.float64), np.nan if settings.invalid == "nan" else 0.0)
    distance = np.full(len(points), np.nan)
    centres: dict[Hashable, NDArray[np.float32]] = {}
    labels: list[NDArray[np.int64]] = []
    lonely = 0
    for task, rows in places.items():
        reference = _join(points[rows[won[rows] & sound[rows]]], (references or {}).get(task))
        failures = rows[~won[rows] & sound[rows]]
        lonely += not len(reference)
        if not len(reference) or not len(failures):
            continue
        labels.append(cluster_labels(reference, settings))
        found = _find_centres(reference, labels[-1])
        centres[task] = found.astype(np.float32)
        distance[failures] = _nearest(points[failures], found, settings.squared)
        spread = float(_nearest(reference, found, settings.squared).mean())
        reward[failures] = settings.alpha * NORMS[settings.norm](distance[failures], spread, settings)
    return ProgressOutcome(
        reward=reward.astype(np.float32),
        distance=distance.astype(np.float32),
        centres=centres,
        clusters=float(np.mean([found.max() + 1 for found in labels])) if labels else 0.0,
        noise_fraction=float(np.mean(np.concatenate(labels) < 0)) if labels else 0.0,
        tasks_without_reference=lonely,
        tasks=len(places),
        invalid=int((~sound).sum()),
    )


def cluster_labels(reference: ArrayLike, settings: ProgressSettings) -> NDArray[np.int64]:
    """Cluster successes with DBSCAN after standardising each entry.

    Entries that do not vary stay at 0 and do not count for the radius.

    Args:
        reference: (M, E) latents.
        settings: eps, eps_mode and min_samples are used.

    Returns:
        (M,) number of the cluster from 0, -1 for a success in none.
    """
    from sklearn.cluster import DBSCAN

    points = np.asarray(reference, np.float64)
    mean, std = points.mean(0), points.std(0)
    varies = std > CONSTANT_ENTRY * np.maximum(np.abs(mean), 1.0)
    standard = np.where(varies, (points - mean) / np.where(varies, std, 1.0), 0.0)
    growth = np.sqrt(max(int(varies.sum()), 1)) if settings.eps_mode == "per_sqrt_dim" else 1.0
    found = DBSCAN(eps=settings.eps * growth, min_samples=settings.min_samples).fit(standard)
    return np.asarray(found.labels_, np.int64)


def rank_agreement(reward: ArrayLike, progress: ArrayLike, group: ArrayLike) -> float:
    """Agreement of rewards with another measure of progress on the order of a group's failures.

    Group-normalised advantages keep the order within a group but not the level of its rewards, so the order is what
    makes a latent useful.

    Args:
        reward: (F,) rewards of failures; NaN for those without one.
        progress: (F,) a hand-written measure, such as a simulator's dense reward; NaN where unknown.
        group: (F,) labels of their groups.

    Returns:
        Spearman's rank correlation, mean over groups weighted by their failures; groups with fewer than 3 of them, or
        whose values are all equal, do not count. NaN if no group counts.
    """
    from scipy.stats import spearmanr

    mine, other, labels = np.asarray(reward, np.float64), np.asarray(progress, np.float64), np.asarray(group)
    known = np.isfinite(mine) & np.isfinite(other)
    found, weights = [], []
    for label in np.unique(labels):
        rows = known & (labels == label)
        if rows.sum() >= FEWEST_RANKED and np.ptp(mine[rows]) > 0 and np.ptp(other[rows]) > 0:
            found.append(float(spearmanr(mine[rows], other[rows]).statistic))
            weights.append(int(rows.sum()))
    return float(np.average(found, weights=weights)) if found else float("nan")


@dataclass
class SuccessMemory:
    """The latest success latents of each task.

    Args:
        keep: latents of a task at most; 0 keeps none.
    """

    keep: int
    latents: dict[Hashable, NDArray[np.float32]] = field(default_factory=dict)
    """(M, E) by task, oldest first."""

    def references(self) -> Mapping[Hashable, NDArray[np.float32]]:
        """What is kept, by task."""
        return dict(self.latents)

    def add(self, latents: ArrayLike, success: ArrayLike, tasks: Sequence[Hashable]) -> None:
        """Keep the successes of a batch; call it after the batch's rewards, which count its own successes anyway.

        Args:
            latents: (B, E).
            success: (B,) bool, rows that succeeded and could be embedded.
            tasks: (B,) labels.

        Raises:
            ValueError: shapes do not fit, or the latent of a success is not finite.
        """
        points, won, _ = _check_rows(latents, success, success, tasks)
        if not self.keep:
            return
        for task, rows in _places_by_task(tasks).items():
            new = points[rows[won[rows]]]
            if len(new):
                self.latents[task] = _join(self.latents.get(task, new[:0]), new)[-self.keep :].astype(np.float32)

    def state_dict(self) -> dict[str, Any]:
        """State for a checkpoint, in types that `torch.load(weights_only=True)` accepts."""
        import torch

        return {"tasks": list(self.latents), "latents": [torch.from_numpy(kept) for kept in self.latents.values()]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`; with a smaller `keep` the latest latents stay."""
        pairs = zip(state["tasks"], state["latents"], strict=True)
        kept = {task: latents.numpy(force=True)[-self.keep :].astype(np.float32) for task, latents in pairs}
        self.latents = kept if self.keep else {}


def _check_rows(
    latents: ArrayLike, success: ArrayLike, valid: ArrayLike, tasks: Sequence[Hashable]
) -> tuple[_Floats, NDArray[np.bool_], NDArray[np.bool_]]:
    points = np.asarray(latents, np.float64)
    won, sound = np.asarray(success, np.bool_), np.asarray(valid, np.bool_)
    if points.ndim != 2 or not (won.shape == sound.shape == (len(tasks),) == points.shape[:1]):
        raise ValueError(
            f"latents {points.shape}, success {won.shape}, valid {sound.shape} and {len(tasks)} tasks do not describe "
            "the same rows; expected (B, E), (B,), (B,) and B"
        )
    broken = np.flatnonzero(sound & ~np.isfinite(points).all(1))
    if len(broken):
        raise ValueError(f"the latents of rows {broken.tolist()} are not finite; mark such rows as not valid")
    return points, won, sound


def _places_by_task(tasks: Sequence[Hashable]) -> dict[Hashable, NDArray[np.int64]]:
    places: dict[Hashable, list[int]] = {}
    for row, task in enumerate(tasks):
        places.setdefault(task, []).append(row)
    return {task: np.array(rows, np.int64) for task, rows in places.items()}


def _join(first: ArrayLike, more: ArrayLike | None) -> _Floats:
    points = np.asarray(first, np.float64)
    if more is None:
        return points
    added = np.asarray(more, np.float64)
    if added.ndim != 2 or added.shape[1] != points.shape[1]:
        raise ValueError(f"references of shape {added.shape} for latents of {points.shape[1]} entries")
    return np.concatenate([points, added])


def _find_centres(reference: _Floats, labels: NDArray[np.int64]) -> _Floats:
    """(C, E) mean of each cluster; of all references where there is no cluster."""
    if labels.max() < 0:
        return reference.mean(0, keepdims=True)
    return np.stack([reference[labels == label].mean(0) for label in range(int(labels.max()) + 1)])


def _nearest(points: _Floats, centres: _Floats, squared: bool) -> _Floats:
    distances = np.stack([np.linalg.norm(points - centre, axis=1) for centre in centres]).min(0)
    return distances**2 if squared else distances


def _sigmoid(x: _Floats) -> _Floats:
    # 1 / (1 + exp(-x)) overflows for large negative x
    return np.asarray(0.5 * (1 + np.tanh(x / 2)))


def _by_range(distance: _Floats, spread: float, settings: ProgressSettings) -> _Floats:
    span = distance.max() - distance.min()
    share = np.full(len(distance), MIDDLE) if span < SMALLEST_RANGE else (distance - distance.min()) / span
    return _sigmoid(settings.steepness * (settings.offset - share))


def _by_deviation(distance: _Floats, spread: float, settings: ProgressSettings) -> _Floats:
    if np.ptp(distance) < SMALLEST_RANGE:
        return np.full(len(distance), MIDDLE)
    return _sigmoid((distance.mean() - distance) / distance.std())


def _by_spread(distance: _Floats, spread: float, settings: ProgressSettings) -> _Floats:
    if spread < SMALLEST_RANGE:
        return _by_range(distance, spread, settings)
    return _sigmoid(settings.steepness * (settings.offset - distance / (distance + spread)))


NORMS: dict[str, Callable[[_Floats, float, ProgressSettings], _Floats]] = {
    "minmax": _by_range,
    "zscore": _by_deviation,
    "absolute": _by_spread,
}
