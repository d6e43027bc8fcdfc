"""Latents with which SRPO compares episodes: V-JEPA 2, a small video encoder, pixels, states, or the object.

Base of the latents of whole trajectories: batches, a cache, and rows that fail one by one.

Shapes: B trajectories of F_i frames and P_i states, E entries of a latent.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from mmrl.errors import UserError
from mmrl.fields import bounded, by_kind, check_config, choice, rare
from mmrl.hub.building import BuiltPath, build_if_missing
from mmrl.hub.compat import ensure_torchvision, quiet_transformers
from mmrl.runs.export import foreign_model
from robotics.methods.video_encoder import VideoEncoder, fit_frames

REASON_CHARACTERS = 200


@dataclass(frozen=True)
class EmbeddedTrajectories:
    """Latents of B trajectories."""

    latents: NDArray[np.float32]
    """(B, E); NaN in rows that are not valid."""
    valid: NDArray[np.bool_]
    """(B,) whether the trajectory could be embedded."""
    reasons: Mapping[int, str]
    """Reason why a trajectory could not be embedded, by row."""


class TrajectoryLatent(ABC):
    """Embeds whole trajectories; a row that cannot be embedded is invalid, with a reason, and affects no other row."""

    needs_images: ClassVar[bool] = True
    """Whether the latent depends on images."""
    looks_at: ClassVar[str] = "robot"
    """States that it reads: those of the robot, or positions (F, 3) of the object."""

    def __init__(self, size: int, batch_size: int = 1, cache: int = 0) -> None:
        self.size = size
        """E; 0 until the latent is fitted, if it needs to be."""
        self.counts: Counter[str] = Counter()
        """Rows so far: embedded, reused from the cache, invalid."""
        self._batch_size = batch_size
        self._cache_size = cache
        self._cache: OrderedDict[bytes, NDArray[np.float32]] = OrderedDict()

    def fit(self, states: Sequence[NDArray[np.float32]]) -> None:
        """Fit the latent to the states (P_i, S) of the run's first episodes."""
        raise TypeError(f"{type(self).__name__} is not fitted to episodes")

    def state_dict(self) -> dict[str, Any]:
        """The result of `fit`, for a checkpoint; empty if nothing is fitted."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`; raises ValueError for the state of a latent of another kind."""
        if state:
            raise ValueError(
                f"{type(self).__name__} is not fitted; the checkpoint has {', '.join(state)} of its latent"
            )

    def embed(
        self,
        frames: Sequence[NDArray[np.uint8] | None],
        states: Sequence[NDArray[np.float32]],
        *,
        one_by_one: bool = False,
        reuse: bool = True,
    ) -> EmbeddedTrajectories:
        """Embed trajectories of frames (F_i, H, W, 3) uint8, None without images, and states (P_i, S).

        `one_by_one` embeds batches of one, so that a latent is bit for bit the same regardless of the other rows;
        `reuse` reads and fills the cache, whose keys are digests of the input.
        """
        if len(frames) != len(states):
            raise ValueError(f"{len(frames)} trajectories of frames and {len(states)} of states")
        inputs: dict[bytes, NDArray[Any]] = {}
        rows: dict[bytes, list[int]] = {}
        reasons: dict[int, str] = {}
        for row, (images, path) in enumerate(zip(frames, states, strict=True)):
            try:
                prepared = self._prepare(images, path)
            except ValueError as error:
                reasons[row] = str(error)
                continue
            # equal inputs are embedded once, with or without the cache
            key = _digest(prepared)
            inputs[key] = prepared
            rows.setdefault(key, []).append(row)
        # NaN marks invalid rows, which later code must not mistake for a latent at the origin
        latents = np.full((len(frames), self.size), np.nan, np.float32)
        for key, outcome in self._embed_distinct(inputs, 1 if one_by_one else self._batch_size, reuse).items():
            if isinstance(outcome, str):
                reasons |= dict.fromkeys(rows[key], outcome)
            else:
                latents[rows[key]] = outcome
        self.counts["invalid"] += len(reasons)
        valid = np.array([row not in reasons for row in range(len(frames))], np.bool_)
        return EmbeddedTrajectories(latents, valid, dict(sorted(reasons.items())))

    def _embed_distinct(
        self, inputs: Mapping[bytes, NDArray[Any]], batch_size: int, reuse: bool
    ) -> dict[bytes, NDArray[np.float32] | str]:
        """The (E,) latent of each distinct input, or the reason why there is none."""
        cached = self._cache if reuse else {}
        outcomes: dict[bytes, NDArray[np.float32] | str] = {key: cached[key] for key in inputs if key in cached}
        self.counts["reused"] += len(outcomes)
        new = [key for key in inputs if key not in outcomes]
        for start in range(0, len(new), batch_size):
            batch = new[start : start + batch_size]
            outcomes |= dict(zip(batch, self._attempt([inputs[key] for key in batch]), strict=True))
        for key, outcome in outcomes.items():
            # failures are not cached: their cause may be a lack of memory
            if reuse and self._cache_size and not isinstance(outcome, str):
                self._cache[key] = outcome
                # the latest used stay, the oldest leave first
                self._cache.move_to_end(key)
                while len(self._cache) > self._cache_size:
                    self._cache.popitem(last=False)
        self.counts["embedded"] += sum(not isinstance(outcomes[key], str) for key in new)
        return outcomes

    def _attempt(self, inputs: list[NDArray[Any]]) -> list[NDArray[np.float32] | str]:
        try:
            latents = self._compute(inputs)
        except Exception as error:  # a row that the network cannot take must not fail the others
            if len(inputs) > 1:
                # one by one, to find the rows that fail
                return [outcome for one in inputs for outcome in self._attempt([one])]
            return [f"{type(error).__name__}: {error}"[:REASON_CHARACTERS]]
        return [row if np.isfinite(row).all() else "the latent is not finite" for row in latents]

    @abstractmethod
    def _prepare(self, frames: NDArray[np.uint8] | None, states: NDArray[np.float32]) -> NDArray[Any]:
        """The part of a trajectory that its latent depends on; raises ValueError for a trajectory without it."""

    def _compute(self, inputs: list[NDArray[Any]]) -> NDArray[np.float32]:
        """(b, E) latents of prepared inputs; by default the inputs themselves."""
        return np.stack(inputs)


def check_frames(frames: NDArray[np.uint8] | None) -> NDArray[np.uint8]:
    """Images (F, H, W, 3) uint8 of an episode; raises ValueError if they are missing or of another shape or type."""
    if frames is None or not len(frames):
        raise ValueError("there are no images of the episode")
    images = np.asarray(frames)
    if images.ndim != 4 or images.shape[-1] != 3 or images.dtype != np.uint8:
        raise ValueError(f"images are {images.dtype} of shape {images.shape}; expected uint8 (F, H, W, 3)")
    return images


def _digest(prepared: NDArray[Any]) -> bytes:
    digest = hashlib.blake2b(f"{prepared.dtype}{prepared.shape}".encode(), digest_size=16)
    digest.update(np.ascontiguousarray(prepared).data)
    return digest.digest()


PADS = ("cycle", "edge")
IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
RESIZE_PER_CROP = 256 / 224
FRAME_RATES = ("step", "chunk")
SMALLEST_STD = 1e-6


@dataclass
class NetworkSettings:
    """Settings of latents that run a network."""

    path: str = ""
    """Folder of the model."""
    batch_size: int = rare(bounded(1, at_least=1))
    """Number of trajectories per batch."""
    device: str = "cpu"
    """Device of the model."""
    cache: int = rare(bounded(4096, at_least=0))
    """Maximum number of latents in the cache."""

    def validate(self) -> None:
        """Reject an empty path; raises UserError."""
        if not self.path:
            kind = next(kind for kind, (settings, _) in LATENTS.items() if isinstance(self, settings))
            raise UserError(f"latent.kind={kind} needs latent.path, the folder of its model")


@dataclass
class Vjepa2Settings(NetworkSettings):
    """Settings of the V-JEPA 2 latent; runs in float16 on a GPU, in float32 on the CPU.

    The path is a folder or hub name of a V-JEPA 2 model for transformers, such as facebook/vjepa2-vitg-fpc64-384.
    """

    pad: str = rare(choice("cycle", PADS))
    """Padding of a clip that is too short: repeat the clip (cycle, as in the code) or its last frame (edge)."""


class Vjepa2Latent(TrajectoryLatent):
    """Mean over all space-time tokens of a V-JEPA 2 encoder; its predictor is not used.

    Frames are taken evenly from the whole episode, as many as the model was trained on, resized to a short side of
    256/224 of the model's image (438 for 384), cropped in the middle and standardised with ImageNet's statistics.

    Source: V-JEPA 2, arXiv 2506.09985; sii-research/siiRL siirl/utils/embodied/video_emb.py. There the resized pixels
        are rounded to whole numbers, here they are not.
    """

    def __init__(self, settings: Vjepa2Settings) -> None:
        check_config(settings, "latent")
        model = _load_vjepa2(settings.path)
        self.settings = settings
        self._device = torch.device(settings.device)
        self._encoder = model.encoder.to(self._device).eval().requires_grad_(False)
        self._frames = int(model.config.frames_per_clip)
        side = model.config.crop_size
        self._side = int(side[0] if isinstance(side, (list, tuple)) else side)
        super().__init__(int(model.config.hidden_size), settings.batch_size, settings.cache)

    def _prepare(self, frames: NDArray[np.uint8] | None, states: NDArray[np.float32]) -> NDArray[Any]:
        images = check_frames(frames)
        # prepared inputs are digested for the cache, so frames that do not count are dropped here
        return images[sample_indices(len(images), self._frames, self.settings.pad)]

    @torch.no_grad()
    def _compute(self, inputs: list[NDArray[Any]]) -> NDArray[np.float32]:
        clips = torch.stack([crop_clip(clip, self._side) for clip in inputs]).to(self._device)
        # float16 as in the released code; half precision on the CPU would be slower
        with torch.autocast(self._device.type, torch.float16, enabled=self._device.type == "cuda"):
            # the encoder alone: the predictor serves pre-training
            tokens = self._encoder(pixel_values_videos=clips).last_hidden_state
        # float32 before the mean over all tokens: half precision would lose small differences
        return np.asarray(tokens.float().mean(1).cpu().numpy(), np.float32)


def sample_indices(count: int, wanted: int, pad: str = "cycle") -> NDArray[np.int64]:
    """Indices (wanted,) of the frames of a clip: evenly spaced, or padded if there are fewer.

    Source: sii-research/siiRL siirl/utils/embodied/video_emb.py (cycle).
    """
    if count < 1 or pad not in PADS:
        raise ValueError(f"cannot take {wanted} of {count} frames with pad {pad!r}; available pads: {', '.join(PADS)}")
    if count >= wanted:
        # truncated, not rounded, as in the released code
        return np.linspace(0, count - 1, wanted).astype(np.int64)
    indices = np.arange(wanted)
    return indices % count if pad == "cycle" else np.minimum(indices, count - 1)


def crop_clip(frames: NDArray[np.uint8], side: int) -> Tensor:
    """Resize (T, H, W, 3) uint8 frames to a short side of 256/224 `side`, crop and standardise: (T, 3, side, side)."""
    planes = torch.from_numpy(np.ascontiguousarray(frames)).permute(0, 3, 1, 2).float()
    height, width = planes.shape[-2:]
    # truncated, as in the released code: 438 for 384
    short = int(RESIZE_PER_CROP * side)
    size = (int(short * height / min(height, width)), int(short * width / min(height, width)))
    resized = functional.interpolate(planes, size, mode="bilinear", align_corners=False, antialias=True)
    top, left = round((size[0] - side) / 2), round((size[1] - side) / 2)
    # interpolation may overshoot 0..255
    cropped = resized[..., top : top + side, left : left + side].clamp(0, 255) / 255
    mean, std = (torch.tensor(numbers)[:, None, None] for numbers in (IMAGENET_MEAN, IMAGENET_STD))
    return (cropped - mean) / std


def _load_vjepa2(path: str) -> Any:
    ensure_torchvision()
    from transformers import VJEPA2Model

    path = foreign_model(path, "a V-JEPA 2")
    try:
        with quiet_transformers():
            return VJEPA2Model.from_pretrained(path, dtype=torch.float32)
    except (OSError, ValueError, RuntimeError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UserError(f"cannot read a V-JEPA 2 model from {path!r}: {reason}") from error


@dataclass
class LatentConfig(BuiltPath):
    """Latent used to compare episodes."""

    kind: str = choice("video", lambda: LATENTS)
    """A name of `LATENTS`: vjepa2, video, pixels, state or object."""
    path: str = field(default="", kw_only=True)
    """vjepa2: model folder or Hub id; video: folder of the encoder; state: LeRobotDataset that sets the scale (default:
    the scale of the run's first step)."""
    frames: str = choice("step", FRAME_RATES)
    """step: use an image of every control step; chunk: use only the images before each chunk and at the end."""
    options: dict[str, Any] = by_kind(
        lambda: {kind: settings for kind, (settings, _) in LATENTS.items()}, without=("path",)
    )
    """Options of the kind, see its settings class."""

    def validate(self) -> None:
        """Check the options of the kind; raises UserError."""
        settings = _settings_of(self)
        if self.path and (self.kind in ("pixels", "object") or getattr(settings, "mean", None)):
            reason = "takes its scale from latent.options.mean" if self.kind == "state" else "does not read a folder"
            raise UserError(f"latent.path is {self.path!r}, but latent.kind={self.kind} {reason}; leave it out")
        if not (isinstance(settings, StateSettings) and self.path):  # the dataset may not have been built yet
            check_config(settings, "latent")


@dataclass
class VideoLatentSettings(NetworkSettings):
    """Settings of the latent of the small video encoder; the path is what `VideoEncoder.save_pretrained` wrote."""

    pooling: str = rare("mean_and_end")
    """mean over time, end, or both, concatenated; a mean alone only shows where the robot spent its time."""
    batch_size: int = rare(bounded(16, at_least=1))
    """Number of trajectories per batch."""


@dataclass
class PixelSettings:
    """Settings of the pixel latent."""

    side: int = rare(bounded(8, at_least=1))
    """Size of the small images in pixels."""


@dataclass
class StateSettings:
    """Settings of the state latent."""

    mean: list[float] = rare(field(default_factory=list))
    """(S,) means of the states of a dataset, see `state_statistics`; empty = the means of the dataset in `path`, or of
    the run's first step if there is no path."""
    std: list[float] = rare(bounded([], at_least=0))
    """(S,) standard deviations; an entry with standard deviation 0 is only centred."""
    points: int = rare(bounded(8, at_least=1))
    """Number of evenly spaced points of the episode, both ends included, at which states are interpolated."""

    def validate(self) -> None:
        """Check that mean and std have one number per entry of the state, or none at all; raises UserError."""
        if len(self.mean) != len(self.std):
            raise UserError(
                "latent.kind=state takes the mean and std of the states, one number per entry; mean has "
                f"{len(self.mean)} and std {len(self.std)}. `state_statistics(states)` computes both from "
                "trajectories"
            )


@dataclass
class ObjectSettings:
    """Settings of the latent of the object's position: none."""


class VideoLatent(TrajectoryLatent):
    """Pooled latents of the frames of an episode, from a trained `VideoEncoder`: the given one or that at the path."""

    def __init__(self, settings: VideoLatentSettings, encoder: VideoEncoder | None = None) -> None:
        if encoder is None:
            check_config(settings, "latent")
            encoder = VideoEncoder.from_pretrained(settings.path)
        self.settings = settings
        self._encoder = encoder.to(settings.device).eval()
        super().__init__(encoder.latent_size(settings.pooling), settings.batch_size, settings.cache)

    def _prepare(self, frames: NDArray[np.uint8] | None, states: NDArray[np.float32]) -> NDArray[Any]:
        images = check_frames(frames)
        return images[sample_indices(len(images), self._encoder.config.clip_frames, "edge")]

    @torch.no_grad()
    def _compute(self, inputs: list[NDArray[Any]]) -> NDArray[np.float32]:
        clips = torch.stack([fit_frames(clip, self._encoder.config) for clip in inputs]).to(self.settings.device)
        latents = self._encoder.trajectory(clips, self.settings.pooling)
        return np.asarray(latents.float().cpu().numpy(), np.float32)


class PixelLatent(TrajectoryLatent):
    """Means over the cells of a `side` x `side` grid, 0..1: averaged over time, then those of the last frame."""

    def __init__(self, settings: PixelSettings) -> None:
        check_config(settings, "latent")
        self.settings = settings
        super().__init__(2 * settings.side**2 * 3)

    def _prepare(self, frames: NDArray[np.uint8] | None, states: NDArray[np.float32]) -> NDArray[Any]:
        planes = torch.from_numpy(np.ascontiguousarray(check_frames(frames))).permute(0, 3, 1, 2).float() / 255
        small = functional.adaptive_avg_pool2d(planes, self.settings.side).permute(0, 2, 3, 1).flatten(1)
        # the last frame separately: a mean over time hides how the episode ended
        return torch.cat([small.mean(0), small[-1]]).numpy()


class StateLatent(TrajectoryLatent):
    """Standardised states at `points` evenly spaced points of the episode, then the last state again."""

    needs_images = False

    def __init__(self, settings: StateSettings) -> None:
        check_config(settings, "latent")
        self.settings = settings
        # the size follows from the states; 0 marks a latent that has yet to be fitted
        super().__init__(0)
        self._set_scale(settings.mean, settings.std)

    def fit(self, states: Sequence[NDArray[np.float32]]) -> None:
        """Take the scale of these states (P_i, S)."""
        self._set_scale(*state_statistics(states))

    def state_dict(self) -> dict[str, Any]:
        """The scale, if it was fitted."""
        return {} if self.settings.mean else {"mean": self._mean.tolist(), "std": self._std.tolist()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state:
            self._set_scale(state["mean"], state["std"])

    def _set_scale(self, mean: Sequence[float], std: Sequence[float]) -> None:
        self._mean = np.asarray(mean, np.float64)
        # constant entries are only centred: their noise would count as much as real motion
        self._std = np.where(np.asarray(std, np.float64) > SMALLEST_STD, std, 1.0)
        self.state_size = len(mean)
        self.size = (self.settings.points + 1) * self.state_size

    def _prepare(self, frames: NDArray[np.uint8] | None, states: NDArray[np.float32]) -> NDArray[Any]:
        path = np.asarray(states, np.float64)
        if path.ndim != 2 or not len(path) or path.shape[1] != len(self._mean):
            raise ValueError(f"states are {path.shape}; expected (F >= 1, {len(self._mean)})")
        standard = (path - self._mean) / self._std
        times = np.linspace(0, len(path) - 1, self.settings.points)
        # linear interpolation between the neighbouring control steps
        below = times.astype(np.int64)
        above = np.minimum(below + 1, len(path) - 1)
        share = (times - below)[:, None]
        resampled = (1 - share) * standard[below] + share * standard[above]
        # the last state twice, so that the end counts more than other points
        return np.concatenate([resampled.ravel(), standard[-1]]).astype(np.float32)


class ObjectLatent(TrajectoryLatent):
    """Final position (3,) in metres of the object that the task acts on: the upper bound for latents of the scene."""

    needs_images = False
    looks_at = "object"

    def __init__(self, settings: ObjectSettings | None = None) -> None:
        super().__init__(3)

    def _prepare(self, frames: NDArray[np.uint8] | None, states: NDArray[np.float32]) -> NDArray[Any]:
        positions = np.asarray(states, np.float32)
        if positions.ndim != 2 or not len(positions) or positions.shape[1] != self.size:
            raise ValueError(f"positions of the object are {positions.shape}; expected (F >= 1, 3)")
        # only where the object ended up counts, not the way there
        return positions[-1]


def make_latent(config: LatentConfig) -> TrajectoryLatent:
    """Build the latent of a configuration.

    Args:
        config: kind and its options.

    Returns:
        The latent, its networks loaded.

    Raises:
        UserError: no such kind or option, or a model that cannot be read.
    """
    check_config(config, "latent")
    build_if_missing(config, "latent")
    settings = _settings_of(config)
    # the scale comes from the dataset, unless the options have one
    if isinstance(settings, StateSettings) and config.path and not settings.mean:
        from robotics.data import LeRobotReader

        mean, std = state_statistics([episode.state for episode in LeRobotReader(config.path)])
        settings = replace(settings, mean=mean, std=std)
    return LATENTS[config.kind][1](settings)


def state_statistics(states: Sequence[NDArray[np.float32]]) -> tuple[list[float], list[float]]:
    """Means (S,) and standard deviations (S,) of the states (F_i, S) of trajectories; raises UserError without any."""
    if not len(states):
        raise UserError("state_statistics needs at least one trajectory")
    joined = np.concatenate([np.asarray(path, np.float64) for path in states])
    return joined.mean(0).tolist(), joined.std(0).tolist()


def _settings_of(config: LatentConfig) -> Any:
    settings = LATENTS[config.kind][0]
    known = [entry.name for entry in fields(settings)]
    unknown = sorted(set(config.options) - set(known))
    if unknown:
        raise UserError(f"latent.options has {', '.join(unknown)}; options of {config.kind} are: {', '.join(known)}")
    path = {"path": config.path} if config.path and "path" in known else {}
    return settings(**path, **config.options)


LATENTS: dict[str, tuple[type[Any], type[TrajectoryLatent]]] = {
    "vjepa2": (Vjepa2Settings, Vjepa2Latent),
    "video": (VideoLatentSettings, VideoLatent),
    "pixels": (PixelSettings, PixelLatent),
    "state": (StateSettings, StateLatent),
    "object": (ObjectSettings, ObjectLatent),
}
