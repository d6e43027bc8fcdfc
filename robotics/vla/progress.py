"""SRPO's reward: a failure is rewarded by how close it comes to the same policy's successes at the task.

Trajectories are points in the latent space of a frozen world model. Successes of a task, or of an initial state, are
clustered, a failure's distance to the nearest cluster's centre is normalised and mapped to a reward between 0 and
`alpha` < 1; a success has reward 1. Where there is no success to compare with, failures have reward 0.

Paper: SRPO, arXiv 2511.15605. The preset "published" is the released code, sii-research/siiRL
siirl/utils/reward_score/embodied.py. What the others and single options change:

- `eps_mode="per_sqrt_dim"`: two standardised successes are about sqrt(2 E) apart, so the released radius of 0.5 never
  finds a cluster in E = 64 entries or more; here it grows with the root of the number of entries that vary.
- `invalid="nan"`: a trajectory that could not be embedded has no reward, where the code gives 0, even to a success.
- `references="initial_state"`: successes from other layouts of a task lie elsewhere in the latent space, and so does
  their mean, whatever the failure achieved.
- `task_fallback` gives an initial state of which no success is known the successes of its task.
- `memory` adds successes of earlier batches as references; the code has only those of the batch.
- `norm="initial"` measures progress from the episode's own first frame, so an episode in which nothing happened earns
  nothing; minmax and zscore always share out the whole range among the failures, however little they differ.
- `norm="zscore"` is the paper's form, of the distance's deviation from its mean; `squared` its squared distance.
  "absolute" also tells whether all failures are far away or all are close, which minmax and zscore cannot.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mmrl.errors import require_packages
from mmrl.fields import check_fields
from robotics.vla.progress_settings import ProgressSettings
from robotics.vla.tasks import task_of_id

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import ArrayLike, NDArray

    _Floats = NDArray[np.float64]

SMALLEST_RANGE = 1e-6
MIDDLE = 0.5
CONSTANT_ENTRY = 1e-7


@dataclass(frozen=True)
class ProgressOutcome:
    """Rewards of B trajectories and how they were obtained."""

    reward: NDArray[np.float32]
    """(B,) 1 for a success, 0..alpha for a failure; `settings.invalid` for an invalid row."""
    distance: NDArray[np.float32]
    """(B,) distance of each failure to the nearest centre, squared with `settings.squared`; NaN without a reference."""
    centres: Mapping[Hashable, NDArray[np.float32]]
    """(C, E) by label, for labels with both failures and references."""
    clusters: float
    """Mean number of clusters of these labels; one without a cluster counts 0, and its only centre is the mean of all
    its references. 0 without such labels."""
    noise_fraction: float
    """Share of these labels' references that lie in no cluster; 0 without such labels."""
    tasks_without_reference: int
    """Labels of the batch whose failures have reward 0 because there is no success to compare with."""
    tasks_with_fallback: int
    """Labels of the batch whose failures are compared with the successes of others."""
    tasks: int
    """Labels of the batch, tasks or initial states."""
    invalid: int
    """Rows that could not be embedded."""

    @property
    def fraction_without_reference(self) -> float:
        """Share of the batch's labels without a reference."""
        return self.tasks_without_reference / max(self.tasks, 1)

    @property
    def fraction_with_fallback(self) -> float:
        """Share of the batch's labels that are compared with the successes of others."""
        return self.tasks_with_fallback / max(self.tasks, 1)


def progress_rewards(
    latents: ArrayLike,
    success: ArrayLike,
    valid: ArrayLike,
    tasks: Sequence[Hashable],
    settings: ProgressSettings,
    references: Mapping[Hashable, ArrayLike] | None = None,
    first: ArrayLike | None = None,
    fallback: Mapping[Hashable, ArrayLike] | None = None,
) -> ProgressOutcome:
    """Reward successes with 1 and failures by their distance to the successes of their label.

    All rows of a label, the task or the initial state, share one set of references; give the whole batch, not one
    process's share. For a failure at distance d of the nearest centre (squared where asked for):

        minmax    u = (d - min d) / (max d - min d)     reward = alpha sigmoid(steepness (offset - u))
        absolute  u = d / (d + s)                       the same; s = mean distance of the references to their centres
        zscore    z = (d - mean d) / std d              reward = alpha sigmoid(-z)
        initial   p = 1 - d / d_0                       reward = alpha clip(p, 0, 1); d_0 = that of the first frame

    over the failures of the label. Where their distances differ by less than 1e-6, u is 0.5 and z is 0. Where s is 0
    (a single reference), absolute falls back to minmax. An episode that begins at a centre (d_0 < 1e-6) has p = 0.

    Args:
        latents: (B, E) float32; invalid rows are not used.
        success: (B,) bool, whether the episode succeeded.
        valid: (B,) bool, whether it ran and could be embedded.
        tasks: (B,) labels, of tasks or of initial states; `settings.references` is the caller's to follow.
        settings: constants and options.
        references: (M, E) further successes by label, as `SuccessMemory.references` gives them.
        first: (B, E) latents of the episodes' first frames alone; needed by the norm initial.
        fallback: (M, E) successes of others by label, as `fallback_references` gives them, for labels that have none.

    Returns:
        Rewards and how they were obtained.

    Gradient: none, all are constants.

    Raises:
        UserError: a setting is out of range.
        ValueError: shapes do not fit, a valid latent is not finite, or `first` is missing.

    Source: sii-research/siiRL siirl/utils/reward_score/embodied.py; the paper's form: SRPO, arXiv 2511.15605.
    """
    check_fields(settings, "progress")
    form = settings.form
    points, won, sound = _check_rows(latents, success, valid, tasks)
    begun = _check_first(first, points, sound, form.norm)
    places = _places_by_task(tasks)
    reward = np.where(sound, won.astype(np.float64), np.nan if form.invalid == "nan" else 0.0)
    distance = np.full(len(points), np.nan)
    centres: dict[Hashable, NDArray[np.float32]] = {}
    labels: list[NDArray[np.int64]] = []
    lonely = borrowing = 0
    for task, rows in places.items():
        reference = _join(points[rows[won[rows] & sound[rows]]], (references or {}).get(task))
        if not len(reference):
            reference = _join(reference, (fallback or {}).get(task))
            borrowing += bool(len(reference))
        failures = rows[~won[rows] & sound[rows]]
        lonely += not len(reference)
        if not len(reference) or not len(failures):
            continue
        labels.append(cluster_labels(reference, settings))
        found = _find_centres(reference, labels[-1])
        centres[task] = found.astype(np.float32)
        distance[failures] = _nearest(points[failures], found, settings.squared)
        far = _Distances(
            end=distance[failures],
            first=_nearest(begun[failures], found, settings.squared),
            spread=float(_nearest(reference, found, settings.squared).mean()),
        )
        reward[failures] = settings.alpha * NORMS[form.norm](far, settings)
    return ProgressOutcome(
        reward=reward.astype(np.float32),
        distance=distance.astype(np.float32),
        centres=centres,
        clusters=float(np.mean([found.max() + 1 for found in labels])) if labels else 0.0,
        noise_fraction=float(np.mean(np.concatenate(labels) < 0)) if labels else 0.0,
        tasks_without_reference=lonely,
        tasks_with_fallback=borrowing,
        tasks=len(places),
        invalid=int((~sound).sum()),
    )


def fallback_references(
    latents: ArrayLike, won: ArrayLike, states: Sequence[str], remembered: Mapping[Hashable, ArrayLike]
) -> dict[Hashable, NDArray[np.float32]]:
    """Successes of its task for each initial state: those of the batch and those that are remembered of any state.

    Args:
        latents: (B, E).
        won: (B,) bool, rows that succeeded and could be embedded.
        states: (B,) names of initial states, as `episode_id` gives them.
        remembered: (M, E) earlier successes by initial state.

    Returns:
        (M, E) by initial state of the batch.
    """
    points, successes = np.asarray(latents, np.float32), np.asarray(won, np.bool_)
    tasks = np.array([task_of_id(state) for state in states])
    earlier: dict[str, list[NDArray[np.float32]]] = {}
    for state, kept in remembered.items():
        earlier.setdefault(task_of_id(str(state)), []).append(np.asarray(kept, np.float32))
    known = {task: np.concatenate([points[successes & (tasks == task)], *earlier.get(task, [])]) for task in set(tasks)}
    return {state: known[task] for state, task in zip(states, tasks, strict=True)}


def cluster_labels(reference: ArrayLike, settings: ProgressSettings) -> NDArray[np.int64]:
    """Cluster successes with DBSCAN after standardising each entry.

    Entries that do not vary stay at 0 and do not count for the radius.

    Args:
        reference: (M, E) latents.
        settings: eps, eps_mode and min_samples are used.

    Returns:
        (M,) number of the cluster from 0, -1 for a success in none.
    """
    require_packages("the clustering of successes", ["sklearn"], "vla")
    from sklearn.cluster import DBSCAN

    points = np.asarray(reference, np.float64)
    mean, std = points.mean(0), points.std(0)
    varies = std > CONSTANT_ENTRY * np.maximum(np.abs(mean), 1.0)
    standard = np.where(varies, (points - mean) / np.where(varies, std, 1.0), 0.0)
    growth = np.sqrt(max(int(varies.sum()), 1)) if settings.form.eps_mode == "per_sqrt_dim" else 1.0
    found = DBSCAN(eps=settings.eps * growth, min_samples=settings.min_samples).fit(standard)
    return np.asarray(found.labels_, np.int64)


def shuffled_failures(
    reward: ArrayLike, success: ArrayLike, group: ArrayLike, generator: np.random.Generator
) -> NDArray[np.float32]:
    """Deal the rewards of a group's failures out among them at random, the control of a progress reward.

    The rewards of each group stay the same and with them the size of its advantages; what they said of the episodes is
    lost.

    Args:
        reward: (B,), NaN where there is none; such rows keep it.
        success: (B,) bool; successes keep their rewards.
        group: (B,) labels.
        generator: of the permutations.

    Returns:
        (B,).
    """
    shuffled, labels = np.array(reward, np.float32), np.asarray(group)
    open_rows = ~np.asarray(success, np.bool_) & np.isfinite(shuffled)
    for label in np.unique(labels):
        rows = np.flatnonzero(open_rows & (labels == label))
        shuffled[rows] = shuffled[generator.permutation(rows)]
    return shuffled


@dataclass
class SuccessMemory:
    """The latest success latents of each task or initial state.

    Args:
        keep: latents of a label at most; 0 keeps none.
    """

    keep: int
    latents: dict[Hashable, NDArray[np.float32]] = field(default_factory=dict)
    """(M, E) by label, oldest first."""

    def references(self) -> Mapping[Hashable, NDArray[np.float32]]:
        """What is kept, by label."""
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


def _check_first(first: ArrayLike | None, points: _Floats, sound: NDArray[np.bool_], norm: str) -> _Floats:
    """(B, E) latents of first frames; those of the episodes, which nothing reads, where the norm does not need any."""
    if norm != "initial":
        return points
    if first is None:
        raise ValueError("progress.norm is 'initial', which needs the latents of first frames; give `first`")
    begun = np.asarray(first, np.float64)
    if begun.shape != points.shape or not np.isfinite(begun[sound]).all():
        raise ValueError(f"latents of first frames are {begun.shape}; expected {points.shape}, finite in valid rows")
    return begun


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


class _Distances(NamedTuple):
    """Distances of the F failures of a label to the nearest centre, squared where asked for."""

    end: _Floats
    """(F,) of the episodes."""
    first: _Floats
    """(F,) of their first frames."""
    spread: float
    """Mean of the references."""


def _by_range(far: _Distances, settings: ProgressSettings) -> _Floats:
    distance, span = far.end, np.ptp(far.end)
    share = np.full(len(distance), MIDDLE) if span < SMALLEST_RANGE else (distance - distance.min()) / span
    return _sigmoid(settings.steepness * (settings.offset - share))


def _by_deviation(far: _Distances, settings: ProgressSettings) -> _Floats:
    distance = far.end
    if np.ptp(distance) < SMALLEST_RANGE:
        return np.full(len(distance), MIDDLE)
    return _sigmoid((distance.mean() - distance) / distance.std())


def _by_spread(far: _Distances, settings: ProgressSettings) -> _Floats:
    if far.spread < SMALLEST_RANGE:
        return _by_range(far, settings)
    return _sigmoid(settings.steepness * (settings.offset - far.end / (far.end + far.spread)))


def _from_first(far: _Distances, settings: ProgressSettings) -> _Floats:
    moved = far.first >= SMALLEST_RANGE
    return np.where(moved, (1 - far.end / np.where(moved, far.first, 1.0)).clip(0, 1), 0.0)


NORMS: dict[str, Callable[[_Distances, ProgressSettings], _Floats]] = {
    "minmax": _by_range,
    "zscore": _by_deviation,
    "absolute": _by_spread,
    "initial": _from_first,
}
