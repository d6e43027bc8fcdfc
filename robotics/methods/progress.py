"""SRPO's progress reward: a failure is rewarded by how close it comes to the same policy's successes at the task.

Trajectories are points in the latent space of a frozen world model. Successes of a task, or of an initial state, are
clustered; a failure's distance to the nearest cluster's centre is normalised and mapped to a reward between 0 and
`alpha` < 1; a success has reward 1. Without a success to compare with, failures have reward 0.

Paper: SRPO, arXiv 2511.15605. The preset "published" is the released code, sii-research/siiRL
siirl/utils/reward_score/embodied.py. Differences by the other options:

- `eps_mode="per_sqrt_dim"`: two standardised successes are about sqrt(2 E) apart, so the released radius of 0.5 never
  finds a cluster in E = 64 entries or more; here it grows with the root of the number of entries that vary.
- `invalid="nan"`: a trajectory that could not be embedded has no reward, where the code gives 0, even to a success.
- `references="initial_state"`: successes from other layouts of a task have other latents, regardless of what the
  failure achieved. `task_fallback` gives an initial state without a known success the successes of its task.
- `memory` adds successes of earlier batches as references; the code has only those of the batch.
- `norm="initial"` measures progress from the episode's own first frame, so that an episode in which nothing happened
  earns nothing; minmax and zscore always spread the failures over the whole range, even if they hardly differ.
- `norm="zscore"` is the paper's form (the distance's deviation from its mean), `squared` its squared distance;
  "absolute" distinguishes batches of close failures from batches of distant ones, which minmax and zscore cannot.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mmrl.errors import require_packages
from mmrl.fields import bounded, check_fields, choice, rare
from robotics.episodes.payload import task_of_id

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

    _Floats = NDArray[np.float64]

EPS_MODES = ("per_sqrt_dim", "absolute")
INVALID = ("nan", "zero")
REFERENCES = ("task", "initial_state")
NORM_NAMES = ("minmax", "zscore", "absolute", "initial")
SMALLEST_RANGE = 1e-6
MIDDLE = 0.5
CONSTANT_ENTRY = 1e-7
FEWEST_RANKED = 3


@dataclass(frozen=True)
class ProgressForm:
    """Values of a preset; the fields are those of `ProgressSettings`."""

    references: str
    memory: int
    norm: str
    eps_mode: str
    invalid: str


@dataclass
class ProgressSettings:
    """Conversion of distances to rewards; null takes the preset's value."""

    preset: str = choice("task", lambda: PRESETS)
    """published: the released code, bit for bit; task: the same with a clustering radius that finds clusters;
    initial_state: for initial states that recur, remembered references of the same initial state, and progress since
    the episode's first frame."""
    references: str | None = rare(choice(None, REFERENCES))
    """Compare a failure with the successes of its task or of its initial state; null = the preset's."""
    task_fallback: bool = rare(False)
    """If no success of an initial state is known, compare its failures with successes from other initial states of its
    task; for `references: initial_state`."""
    memory: int | None = rare(bounded(None, at_least=0))
    """Number of latest successes per task or initial state kept as references for later batches; 0 = only those of the
    batch; null = the preset's (initial_state 32, else 0)."""
    norm: str | None = choice(None, NORM_NAMES)
    """minmax over the failures with common references (code), zscore over them (paper), absolute against the successes'
    own spread, or initial against the distance of the episode's own first frame; null = the preset's (initial_state
    initial, else minmax)."""
    alpha: float = bounded(0.6, above=0, below=1)
    """Maximum reward of a failure; below 1, so that a near success is worth less than a success."""
    steepness: float = rare(bounded(10.0, above=0))
    """Slope of the sigmoid over the normalised distance; norms minmax and absolute."""
    offset: float = rare(0.5)
    """Normalised distance with a reward of alpha / 2; norms minmax and absolute."""
    eps: float = rare(bounded(0.5, above=0))
    """Radius of DBSCAN over the standardised successes; see `eps_mode`."""
    eps_mode: str | None = rare(choice(None, EPS_MODES))
    """per_sqrt_dim multiplies `eps` by the root of the number of entries that vary; absolute uses it unchanged; null =
    the preset's (published absolute, else per_sqrt_dim)."""
    min_samples: int = rare(bounded(2, at_least=1))
    """Minimum number of successes within the radius, itself included, for a core point of a cluster."""
    squared: bool = rare(False)
    """Square distances before they are normalised."""
    invalid: str | None = rare(choice(None, INVALID))
    """Reward of a trajectory that could not be embedded: nan (excluded and counted) or zero (released code); null = the
    preset's (published zero, else nan)."""

    def validate(self) -> None:
        """Check that the parts fit together; raises ValueError."""
        if self.task_fallback and self.form.references != "initial_state":
            raise ValueError(
                f"task_fallback is set, but references already is {self.form.references}; use it with references: "
                "initial_state"
            )

    @property
    def form(self) -> ProgressForm:
        """The preset with the fields that are set here."""
        preset = PRESETS[self.preset]
        names = [entry.name for entry in fields(ProgressForm)]
        # None means the preset's value, also for memory, where 0 is a setting
        own = {name: getattr(self, name) for name in names}
        return ProgressForm(**{name: getattr(preset, name) if value is None else value for name, value in own.items()})


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
    """Mean number of clusters of these labels; a label without a cluster counts as 0, and its only centre is the mean
    of all its references. NaN without such labels."""
    noise_fraction: float
    """Fraction of these labels' references in no cluster; NaN without such labels."""
    tasks_without_reference: int
    """Number of labels in the batch whose failures have reward 0 because there is no success to compare with."""
    tasks_with_fallback: int
    """Number of labels in the batch whose failures are compared with the successes of others."""
    tasks: int
    """Number of labels in the batch: tasks or initial states."""
    invalid: int
    """Number of rows that could not be embedded."""

    @property
    def fraction_without_reference(self) -> float:
        """Fraction of the batch's labels without a reference."""
        return self.tasks_without_reference / max(self.tasks, 1)

    @property
    def fraction_with_fallback(self) -> float:
        """Fraction of the batch's labels that are compared with the successes of others."""
        return self.tasks_with_fallback / max(self.tasks, 1)


def progress_rewards(
    latents: ArrayLike,
    success: ArrayLike,
    valid: ArrayLike,
    tasks: Sequence[Hashable],
    settings: ProgressSettings,
    references: Mapping[Hashable, ArrayLike] | None = None,
    first: ArrayLike | None = None,
) -> ProgressOutcome:
    """Reward successes with 1 and failures by their distance to the successes of their label.

    All rows of a label, the task or the initial state, share one set of references, so pass the batch of all processes.
    For a failure at distance d of the nearest centre (squared with `settings.squared`):

        minmax    u = (d - min d) / (max d - min d)     reward = alpha sigmoid(steepness (offset - u))
        absolute  u = d / (d + s)                       the same; s = mean distance of the references to their centres
        zscore    z = (d - mean d) / std d              reward = alpha sigmoid(-z)
        initial   p = 1 - d / d_0                       reward = alpha clip(p, 0, 1); d_0 = that of the first frame

    over the failures of the label. If their distances differ by less than 1e-6, u is 0.5 and z is 0. If s is 0 (a
    single reference), absolute falls back to minmax. An episode that begins at a centre (d_0 < 1e-6) has p = 0.

    Args:
        latents: (B, E) float32; invalid rows are not used.
        success: (B,) bool, whether the episode succeeded.
        valid: (B,) bool, whether it ran and could be embedded.
        tasks: (B,) labels: tasks or, with `settings.references` "initial_state", names that `episode_id` gives.
        settings: constants and options.
        references: (M, E) further successes by label, as `SuccessMemory.references` gives them.
        first: (B, E) latents of the episodes' first frames alone; needed by the norm initial.

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
    # float64: distances of nearly equal latents would lose their digits in float32
    points, success, valid = _check_rows(latents, success, valid, tasks)
    starts = _check_first(first, points, valid, form.norm)
    # only valid successes: an episode may succeed and still have no latent
    known, fallback = _find_references(points, success & valid, tasks, references or {}, settings.task_fallback)
    # a failure keeps this 0 if its label has no reference
    reward = np.where(valid, success.astype(np.float64), np.nan if form.invalid == "nan" else 0.0)
    distance = np.full(len(points), np.nan)
    compared: dict[Hashable, _Compared] = {}
    for label, rows in _rows_by_label(tasks).items():
        reference, failures = known[label], rows[~success[rows] & valid[rows]]
        if not len(reference) or not len(failures):
            continue
        found = compared[label] = _compare(reference, points[failures], starts[failures], settings)
        # failures of other labels are on another scale, so each label is normalised on its own
        distance[failures] = found.distances.end
        # alpha < 1: the best failure stays below every success
        reward[failures] = settings.alpha * NORMS[form.norm](found.distances, settings)
    clusters = [found.clusters for found in compared.values()]
    return ProgressOutcome(
        reward=reward.astype(np.float32),
        distance=distance.astype(np.float32),
        centres={label: found.centres.astype(np.float32) for label, found in compared.items()},
        # DBSCAN numbers clusters from 0 and noise is -1, so a label without a cluster counts 0
        clusters=float(np.mean([found.max() + 1 for found in clusters])) if clusters else float("nan"),
        noise_fraction=float(np.mean(np.concatenate(clusters) < 0)) if clusters else float("nan"),
        tasks_without_reference=sum(not len(reference) for reference in known.values()),
        tasks_with_fallback=len(fallback),
        tasks=len(known),
        invalid=int((~valid).sum()),
    )


def _find_references(
    points: _Floats,
    success: NDArray[np.bool_],
    labels: Sequence[Hashable],
    remembered: Mapping[Hashable, ArrayLike],
    task_fallback: bool,
) -> tuple[dict[Hashable, _Floats], list[Hashable]]:
    """Successes (M, E) to compare each label's failures with, and the labels that borrow those of their whole task."""
    found = {
        label: _join(points[rows[success[rows]]], remembered.get(label))
        for label, rows in _rows_by_label(labels).items()
    }
    empty = [label for label, reference in found.items() if not len(reference)] if task_fallback else []
    fallback: list[Hashable] = []
    if empty:
        # only labels without a success of their own state borrow
        tasks = np.array([task_of_id(str(label)) for label in labels])
        for label in empty:
            task = task_of_id(str(label))
            earlier = [
                np.asarray(kept, np.float32) for state, kept in remembered.items() if task_of_id(str(state)) == task
            ]
            # of this batch and of earlier ones
            borrowed = np.concatenate([points[success & (tasks == task)].astype(np.float32), *earlier])
            found[label] = _join(found[label], borrowed)
            fallback += [label] if len(borrowed) else []
    return found, fallback


def cluster_labels(reference: ArrayLike, settings: ProgressSettings) -> NDArray[np.int64]:
    """(M,) cluster of each success (M, E), -1 for none, by DBSCAN on standardised entries.

    Entries that do not vary stay at 0 and do not count for the radius.
    """
    require_packages("the clustering of successes", ["sklearn"], "vla")
    from sklearn.cluster import DBSCAN

    points = np.asarray(reference, np.float64)
    # population deviation, as in the released code
    mean, std = points.mean(0), points.std(0)
    # relative to the mean: the rounding error of a constant entry grows with it
    varies = std > CONSTANT_ENTRY * np.maximum(np.abs(mean), 1.0)
    standard = np.where(varies, (points - mean) / np.where(varies, std, 1.0), 0.0)
    # two standardised successes are about sqrt(2 E) apart in E varying entries
    growth = np.sqrt(max(int(varies.sum()), 1)) if settings.form.eps_mode == "per_sqrt_dim" else 1.0
    found = DBSCAN(eps=settings.eps * growth, min_samples=settings.min_samples).fit(standard)
    return np.asarray(found.labels_, np.int64)


def shuffled_failures(
    reward: ArrayLike, success: ArrayLike, group: ArrayLike, generator: np.random.Generator
) -> NDArray[np.float32]:
    """Shuffle the rewards (B,) of each group's failures among them, as a control for a progress reward.

    The rewards of each group stay the same, and with them the size of its advantages, but carry no information about
    the episodes. Successes (B,) and rows without a reward (NaN) keep theirs.
    """
    shuffled, labels = np.array(reward, np.float32), np.asarray(group)
    # only failures trade rewards; a success keeps its 1
    open_rows = ~np.asarray(success, np.bool_) & np.isfinite(shuffled)
    for label in np.unique(labels):
        # in sorted order of the groups, so that the draws do not depend on the order of the rows
        rows = np.flatnonzero(open_rows & (labels == label))
        shuffled[rows] = shuffled[generator.permutation(rows)]
    return shuffled


@dataclass
class SuccessMemory:
    """The latest success latents of each task or initial state, at most `keep` of each."""

    keep: int
    latents: dict[Hashable, NDArray[np.float32]] = field(default_factory=dict)
    """(M, E) by label, oldest first."""

    def references(self) -> Mapping[Hashable, NDArray[np.float32]]:
        """The kept latents by label."""
        return dict(self.latents)

    def add(self, latents: ArrayLike, success: ArrayLike, tasks: Sequence[Hashable]) -> None:
        """Keep the successes (B,) of a batch; call it after its rewards, which count its own successes anyway."""
        points, success, _ = _check_rows(latents, success, success, tasks)
        if not self.keep:
            return
        for task, rows in _rows_by_label(tasks).items():
            new = points[rows[success[rows]]]
            if len(new):
                # the latest `keep`, so that references follow the policy
                self.latents[task] = _join(self.latents.get(task, new[:0]), new)[-self.keep :].astype(np.float32)

    def state_dict(self) -> dict[str, Any]:
        """State for a checkpoint, in types that `torch.load(weights_only=True)` accepts."""
        import torch

        return {"tasks": list(self.latents), "latents": [torch.from_numpy(kept) for kept in self.latents.values()]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`; with a smaller `keep` the latest latents stay."""
        pairs = zip(state["tasks"], state["latents"], strict=True)
        # a slice from -0 would keep everything, hence the condition below
        kept = {task: latents.numpy(force=True)[-self.keep :].astype(np.float32) for task, latents in pairs}
        self.latents = kept if self.keep else {}


def rank_agreement(reward: ArrayLike, progress: ArrayLike, group: ArrayLike) -> float:
    """Spearman's correlation of the rewards (F,) of failures with another measure of progress (F,), within groups (F,).

    Group-normalised advantages keep the order within a group but not the level of its rewards, so the order is what
    makes a latent useful. The mean over groups is weighted by their failures; groups with fewer than 3 of them, or
    whose values are all equal, do not count. NaN rows are left out; NaN if no group counts.
    """
    from scipy.stats import spearmanr

    mine = np.asarray(reward, np.float64)
    other = np.asarray(progress, np.float64)
    labels = np.asarray(group)
    known = np.isfinite(mine) & np.isfinite(other)
    found, weights = [], []
    for label in np.unique(labels):
        rows = known & (labels == label)
        # two values always correlate perfectly, and equal ones have no order
        if rows.sum() >= FEWEST_RANKED and np.ptp(mine[rows]) > 0 and np.ptp(other[rows]) > 0:
            found.append(float(spearmanr(mine[rows], other[rows]).statistic))
            weights.append(int(rows.sum()))
    return float(np.average(found, weights=weights)) if found else float("nan")


def advantage_correlation(mine: ArrayLike, other: ArrayLike, progress: ArrayLike, failed: ArrayLike) -> float:
    """Pearson's correlation of advantages (B,) with those (B,) that another measure of progress (B,) would give.

    Rank agreement looks at the order of a state's failures only; this also depends on how much more the better ones
    count, and on how failures compare with successes. `failed` (B,) is 1 for a failure; NaN rows are left out. NaN if
    either side is constant, or the measure is the same for all failures.
    """
    columns = np.asarray([mine, other, progress, failed], np.float64)
    first, second, measure, lost = columns[:, np.isfinite(columns).all(0)]
    # the measure must differ between failures, or the correlation only restates success against failure
    measure = measure[lost > 0]
    if not len(measure) or not (np.ptp(measure) > 0 and np.ptp(first) > 0 and np.ptp(second) > 0):
        return float("nan")
    return float(np.corrcoef(first, second)[0, 1])


def _check_rows(
    latents: ArrayLike, success: ArrayLike, valid: ArrayLike, tasks: Sequence[Hashable]
) -> tuple[_Floats, NDArray[np.bool_], NDArray[np.bool_]]:
    points = np.asarray(latents, np.float64)
    success, valid = np.asarray(success, np.bool_), np.asarray(valid, np.bool_)
    if points.ndim != 2 or not (success.shape == valid.shape == (len(tasks),) == points.shape[:1]):
        raise ValueError(
            f"latents {points.shape}, success {success.shape}, valid {valid.shape} and {len(tasks)} tasks do not "
            "describe the same rows; expected (B, E), (B,), (B,) and B"
        )
    broken = np.flatnonzero(valid & ~np.isfinite(points).all(1))
    if len(broken):
        raise ValueError(f"the latents of rows {broken.tolist()} are not finite; mark these rows as invalid")
    return points, success, valid


def _check_first(first: ArrayLike | None, points: _Floats, valid: NDArray[np.bool_], norm: str) -> _Floats:
    """(B, E) latents of first frames; for norms that do not read them, those of the episodes."""
    if norm != "initial":
        return points
    if first is None:
        raise ValueError("progress.norm is 'initial', which needs the latents of first frames; pass `first`")
    starts = np.asarray(first, np.float64)
    if starts.shape != points.shape or not np.isfinite(starts[valid]).all():
        raise ValueError(f"latents of first frames are {starts.shape}; expected {points.shape}, finite in valid rows")
    return starts


def _rows_by_label(labels: Sequence[Hashable]) -> dict[Hashable, NDArray[np.int64]]:
    rows: dict[Hashable, list[int]] = {}
    # in order of first appearance, which is the same on every process
    for row, label in enumerate(labels):
        rows.setdefault(label, []).append(row)
    return {label: np.array(own, np.int64) for label, own in rows.items()}


def _join(first: ArrayLike, more: ArrayLike | None) -> _Floats:
    points = np.asarray(first, np.float64)
    if more is None:
        return points
    added = np.asarray(more, np.float64)
    if added.ndim != 2 or added.shape[1] != points.shape[1]:
        raise ValueError(f"references of shape {added.shape} for latents of {points.shape[1]} entries")
    return np.concatenate([points, added])


def _find_centres(reference: _Floats, labels: NDArray[np.int64]) -> _Floats:
    """(C, E) mean of each cluster, or of all references if there is no cluster."""
    if labels.max() < 0:
        return reference.mean(0, keepdims=True)
    return np.stack([reference[labels == label].mean(0) for label in range(int(labels.max()) + 1)])


def _nearest(points: _Floats, centres: _Floats, squared: bool) -> _Floats:
    # in raw space, as in the released code, although clusters are found in the standardised one
    distances = np.stack([np.linalg.norm(points - centre, axis=1) for centre in centres]).min(0)
    return distances**2 if squared else distances


def _sigmoid(x: _Floats) -> _Floats:
    # 1 / (1 + exp(-x)) overflows for large negative x
    return np.asarray(0.5 * (1 + np.tanh(x / 2)))


class _Distances(NamedTuple):
    """Distances of the F failures of a label to the nearest centre, squared with `settings.squared`."""

    end: _Floats
    """(F,) of the episodes."""
    first: _Floats
    """(F,) of their first frames."""
    spread: float
    """Mean of the references."""


class _Compared(NamedTuple):
    """A label's failures and the successes that they are compared with."""

    clusters: NDArray[np.int64]
    """(M,) cluster of each success, -1 for none."""
    centres: _Floats
    """(C, E)."""
    distances: _Distances


def _compare(reference: _Floats, points: _Floats, starts: _Floats, settings: ProgressSettings) -> _Compared:
    """Compare failures (F, E), and their first frames, with successes (M, E)."""
    clusters = cluster_labels(reference, settings)
    centres = _find_centres(reference, clusters)
    # the references' own distances are the scale of the norm absolute
    end, first, own = (_nearest(latents, centres, settings.squared) for latents in (points, starts, reference))
    return _Compared(clusters, centres, _Distances(end, first, float(own.mean())))


def _by_range(distances: _Distances, settings: ProgressSettings) -> _Floats:
    end, span = distances.end, np.ptp(distances.end)
    # equal distances have no order; the middle neither favours nor punishes them
    share = np.full(len(end), MIDDLE) if span < SMALLEST_RANGE else (end - end.min()) / span
    return _sigmoid(settings.steepness * (settings.offset - share))


def _by_deviation(distances: _Distances, settings: ProgressSettings) -> _Floats:
    end = distances.end
    if np.ptp(end) < SMALLEST_RANGE:
        return np.full(len(end), MIDDLE)
    # farther than the mean distance gives less than half of alpha
    return _sigmoid((end.mean() - end) / end.std())


def _by_spread(distances: _Distances, settings: ProgressSettings) -> _Floats:
    # a single reference is its own centre and gives no scale
    if distances.spread < SMALLEST_RANGE:
        return _by_range(distances, settings)
    return _sigmoid(settings.steepness * (settings.offset - distances.end / (distances.end + distances.spread)))


def _from_first(distances: _Distances, settings: ProgressSettings) -> _Floats:
    # an episode that begins at a success has no distance to cover, and dividing by it would reward noise
    moved = distances.first >= SMALLEST_RANGE
    return np.where(moved, (1 - distances.end / np.where(moved, distances.first, 1.0)).clip(0, 1), 0.0)


PRESETS: dict[str, ProgressForm] = {
    "published": ProgressForm("task", 0, "minmax", "absolute", "zero"),
    "task": ProgressForm("task", 0, "minmax", "per_sqrt_dim", "nan"),
    "initial_state": ProgressForm("initial_state", 32, "initial", "per_sqrt_dim", "nan"),
}
NORMS: dict[str, Callable[[_Distances, ProgressSettings], _Floats]] = {
    "minmax": _by_range,
    "zscore": _by_deviation,
    "absolute": _by_spread,
    "initial": _from_first,
}
