"""What an episode is compared by: one latent vector for each whole trajectory.

    vjepa2   mean over all tokens of a V-JEPA 2 encoder, as SRPO's released code does it
    video    the small video encoder of `robotics.vla.video_encoder`, trained on this suite's own pictures
    pixels   ablation: small pictures, their mean over time beside the last one
    state    ablation: the state at fixed shares of the episode and at its end

A trajectory that cannot be embedded is invalid, with its reason; its latent is NaN, never zeros that something might
take for a place. Whatever runs a network keeps the latents of the pictures that it has seen, by their content.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from mmrl.errors import UserError
from robotics.vla.video_encoder import VideoEncoder, fit_frames

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

__all__ = [
    "LATENTS",
    "EmbeddedTrajectories",
    "LatentConfig",
    "PixelLatent",
    "PixelSettings",
    "StateLatent",
    "StateSettings",
    "TrajectoryLatent",
    "VideoLatent",
    "VideoSettings",
    "Vjepa2Latent",
    "Vjepa2Settings",
    "crop_clip",
    "make_latent",
    "sample_indices",
    "state_statistics",
]

PADS = ("cycle", "edge")
FRAME_RATES = ("step", "chunk")
IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
RESIZE_PER_CROP = 256 / 224
SMALLEST_STD = 1e-6
REASON_CHARACTERS = 200


@dataclass
class LatentConfig:
    """What episodes are compared by."""

    kind: str = "video"
    """A name of `LATENTS`: vjepa2, video, pixels or state."""
    path: str = ""
    """vjepa2: model folder or hub id; video: folder of the encoder; state: a LeRobotDataset that gives the scale."""
    build: str | None = None
    """module:function that writes the folder where it is missing; is given the path and `build_options`."""
    build_options: dict[str, Any] = field(default_factory=dict)
    """Options of `build`."""
    frames: str = "step"
    """Pictures that are drawn for it: of every control step, or only where the policy looks (chunk)."""
    options: dict[str, Any] = field(default_factory=dict)
    """Settings of that kind, see its settings class; state needs `mean` and `std` where there is no path."""

    def validate(self) -> None:
        """Check names and options; raises UserError."""
        if self.frames not in FRAME_RATES:
            raise UserError(f"latent.frames is {self.frames!r}; there are: {', '.join(FRAME_RATES)}")
        settings = _settings_of(self)
        if not (isinstance(settings, StateSettings) and self.path):  # the dataset may still be to be built
            settings.validate()


@dataclass(frozen=True)
class EmbeddedTrajectories:
    """Latents of B trajectories."""

    latents: NDArray[np.float32]
    """(B, E); NaN in rows that are not valid."""
    valid: NDArray[np.bool_]
    """(B,) whether the trajectory could be embedded."""
    reasons: Mapping[int, str]
    """Why not, by row."""


class TrajectoryLatent(Protocol):
    """Embeds whole trajectories."""

    @property
    def size(self) -> int:
        """E, entries of a latent."""
        ...

    @property
    def counts(self) -> Mapping[str, int]:
        """Since the start: embedded, reused from earlier calls, invalid."""
        ...

    def embed(
        self, frames: Sequence[NDArray[np.uint8] | None], states: Sequence[NDArray[np.float32]]
    ) -> EmbeddedTrajectories:
        """Embed trajectories of any lengths.

        Args:
            frames: (F_i, H, W, 3) uint8 pictures of each, in order; None without.
            states: (F_i, S) float32 states of each, in order.

        Returns:
            Latents, and which rows have none and why. But for rounding, a row's latent does not depend on the others.

        Raises:
            ValueError: another number of frames than of states.
        """
        ...


@dataclass
class Vjepa2Settings:
    """Settings of the V-JEPA 2 latent."""

    path: str = ""
    """Folder or hub name of a V-JEPA 2 model for transformers, e.g. facebook/vjepa2-vitg-fpc64-384."""
    pad: str = "cycle"
    """What fills up a clip that is too short: the clip again from its start (code), or its last frame (edge)."""
    batch_size: int = 1
    """Trajectories at once."""
    device: str = "cpu"
    """Where the model runs; in float16 on a GPU, in float32 on the CPU."""
    cache: int = 4096
    """Latents kept by content."""

    def validate(self) -> None:
        """Check ranges; raises UserError."""
        _check_network(self, "vjepa2")
        if self.pad not in PADS:
            raise UserError(f"pad of the latent vjepa2 is {self.pad!r}; there are: {', '.join(PADS)}")


@dataclass
class VideoSettings:
    """Settings of the latent of the small video encoder."""

    path: str = ""
    """Folder that `VideoEncoder.save_pretrained` wrote."""
    pooling: str = "mean_and_end"
    """mean over time, end, or both side by side; a mean alone tells where the robot spent its time."""
    batch_size: int = 16
    """Trajectories at once."""
    device: str = "cpu"
    """Where the model runs."""
    cache: int = 4096
    """Latents kept by content."""

    def validate(self) -> None:
        """Check ranges; raises UserError."""
        _check_network(self, "video")


@dataclass
class PixelSettings:
    """Settings of the pixel latent."""

    side: int = 8
    """Pixels on a side of the small pictures."""

    def validate(self) -> None:
        """Check ranges; raises UserError."""
        if self.side < 1:
            raise UserError(f"side of the latent pixels is {self.side}; at least 1")


@dataclass
class StateSettings:
    """Settings of the state latent."""

    mean: list[float] = field(default_factory=list)
    """(S,) of the states of a data set; see `state_statistics`."""
    std: list[float] = field(default_factory=list)
    """(S,) standard deviations; where one is 0 the entry is only centred."""
    points: int = 8
    """Moments at equal shares of the episode, both ends included, between which states are interpolated."""

    def validate(self) -> None:
        """Check ranges; raises UserError."""
        if not self.mean or len(self.mean) != len(self.std):
            raise UserError(
                f"the latent state needs the mean and std of the states, one number an entry; mean has "
                f"{len(self.mean)} and std {len(self.std)}. `state_statistics(states)` computes both from trajectories"
            )
        if min(self.std) < 0 or self.points < 1:
            raise UserError(f"the latent state has points={self.points}, at least 1, and std={self.std}, none negative")


class _RowLatent(ABC):
    """Embeds row by row what can be, keeps what is asked for, and says of the rest why not."""

    def __init__(self, size: int, batch_size: int = 1, cache: int = 0) -> None:
        self.size = size
        self.counts: Counter[str] = Counter()
        self._batch, self._room = batch_size, cache
        self._kept: OrderedDict[bytes, NDArray[np.float32]] = OrderedDict()

    def embed(
        self, frames: Sequence[NDArray[np.uint8] | None], states: Sequence[NDArray[np.float32]]
    ) -> EmbeddedTrajectories:
        """Embed trajectories of any lengths; see `TrajectoryLatent.embed`."""
        if len(frames) != len(states):
            raise ValueError(f"{len(frames)} trajectories of frames and {len(states)} of states")
        latents = np.full((len(frames), self.size), np.nan, np.float32)
        inputs, rows, reasons = self._sort(frames, states)
        outcomes = self._run(inputs)
        for key, places in rows.items():
            outcome = outcomes[key]
            if isinstance(outcome, str):
                reasons |= dict.fromkeys(places, outcome)
            else:
                latents[places] = outcome
        self.counts["invalid"] += len(reasons)
        valid = np.array([row not in reasons for row in range(len(frames))], np.bool_)
        return EmbeddedTrajectories(latents, valid, dict(sorted(reasons.items())))

    def _sort(
        self, frames: Sequence[NDArray[np.uint8] | None], states: Sequence[NDArray[np.float32]]
    ) -> tuple[dict[bytes, NDArray[Any]], dict[bytes, list[int]], dict[int, str]]:
        """Distinct inputs, the rows of each, and why the other rows have none."""
        inputs: dict[bytes, NDArray[Any]] = {}
        rows: dict[bytes, list[int]] = {}
        reasons: dict[int, str] = {}
        for row, (film, path) in enumerate(zip(frames, states, strict=True)):
            try:
                given = self._prepare(film, path)
            except ValueError as error:
                reasons[row] = str(error)
                continue
            key = _content(given)
            inputs[key] = given
            rows.setdefault(key, []).append(row)
        return inputs, rows, reasons

    def _run(self, inputs: Mapping[bytes, NDArray[Any]]) -> dict[bytes, NDArray[np.float32] | str]:
        """Latents of distinct inputs, or why there is none."""
        outcomes: dict[bytes, NDArray[np.float32] | str] = {key: self._kept[key] for key in inputs if key in self._kept}
        self.counts["reused"] += len(outcomes)
        new = [key for key in inputs if key not in outcomes]
        for start in range(0, len(new), self._batch):
            part = new[start : start + self._batch]
            outcomes |= dict(zip(part, self._attempt([inputs[key] for key in part]), strict=True))
        for key, outcome in outcomes.items():
            if not isinstance(outcome, str):
                self._keep(key, outcome)
        self.counts["embedded"] += sum(not isinstance(outcomes[key], str) for key in new)
        return outcomes

    def _attempt(self, given: list[NDArray[Any]]) -> list[NDArray[np.float32] | str]:
        try:
            found = self._compute(given)
        except Exception as error:  # one row that a network cannot take must not cost the others theirs
            if len(given) > 1:
                return [outcome for one in given for outcome in self._attempt([one])]
            return [f"{type(error).__name__}: {error}"[:REASON_CHARACTERS]]
        return [row if np.isfinite(row).all() else "the latent is not finite" for row in found]

    def _keep(self, key: bytes, latent: NDArray[np.float32]) -> None:
        if self._room:
            self._kept[key] = latent
            self._kept.move_to_end(key)
        while len(self._kept) > self._room:
            self._kept.popitem(last=False)

    @abstractmethod
    def _prepare(self, frames: NDArray[np.uint8] | None, states: NDArray[np.float32]) -> NDArray[Any]:
        """What the latent depends on; raises ValueError, naming what is missing."""

    @abstractmethod
    def _compute(self, given: list[NDArray[Any]]) -> NDArray[np.float32]:
        """(b, E) latents of what `_prepare` returned."""


class Vjepa2Latent(_RowLatent):
    """Mean over all space-time tokens of a V-JEPA 2 encoder; its predictor is not used.

    Frames are taken evenly from the whole episode, as many as the model was trained on, resized to a short side of
    256/224 of the model's picture (438 for 384), cropped in the middle and standardised with ImageNet's statistics.

    Args:
        settings: path of the model and how it runs.

    Raises:
        UserError: a setting is out of range, or the model cannot be read.

    Source: V-JEPA 2, arXiv 2506.09985; sii-research/siiRL siirl/utils/embodied/video_emb.py. There the resized pixels
        are rounded to whole numbers, here they are not.
    """

    def __init__(self, settings: Vjepa2Settings) -> None:
        settings.validate()
        model = _load_vjepa2(settings.path)
        self.settings = settings
        self._device = torch.device(settings.device)
        self._encoder = model.encoder.to(self._device).eval().requires_grad_(False)
        self._frames = int(model.config.frames_per_clip)
        self._side = _one_number(model.config.crop_size)
        super().__init__(int(model.config.hidden_size), settings.batch_size, settings.cache)

    def _prepare(self, frames: NDArray[np.uint8] | None, states: NDArray[np.float32]) -> NDArray[Any]:
        film = _check_film(frames)
        return film[sample_indices(len(film), self._frames, self.settings.pad)]

    @torch.no_grad()
    def _compute(self, given: list[NDArray[Any]]) -> NDArray[np.float32]:
        clips = torch.stack([crop_clip(clip, self._side) for clip in given]).to(self._device)
        with torch.autocast(self._device.type, torch.float16, enabled=self._device.type == "cuda"):
            tokens = self._encoder(pixel_values_videos=clips).last_hidden_state
        return np.asarray(tokens.float().mean(1).cpu().numpy(), np.float32)


class VideoLatent(_RowLatent):
    """Pooled latents of the moments of an episode, from a trained `VideoEncoder`.

    Args:
        settings: path, pooling and how it runs.
        encoder: a trained encoder to use instead of the one at the path.

    Raises:
        UserError: a setting is out of range, or the encoder cannot be read.
    """

    def __init__(self, settings: VideoSettings, encoder: VideoEncoder | None = None) -> None:
        if encoder is None:
            settings.validate()
        loaded = encoder if encoder is not None else VideoEncoder.from_pretrained(settings.path)
        self.settings = settings
        self._device = torch.device(settings.device)
        self._encoder = loaded.to(self._device).eval()
        super().__init__(loaded.latent_size(settings.pooling), settings.batch_size, settings.cache)

    def _prepare(self, frames: NDArray[np.uint8] | None, states: NDArray[np.float32]) -> NDArray[Any]:
        film = _check_film(frames)
        return film[sample_indices(len(film), self._encoder.config.clip_frames, "edge")]

    @torch.no_grad()
    def _compute(self, given: list[NDArray[Any]]) -> NDArray[np.float32]:
        clips = torch.stack([fit_frames(clip, self._encoder.config) for clip in given]).to(self._device)
        found = self._encoder.trajectory(clips, self.settings.pooling)
        return np.asarray(found.float().cpu().numpy(), np.float32)


class PixelLatent(_RowLatent):
    """Means over the cells of a `side` x `side` grid, 0..1: averaged over time, then those of the last frame.

    Args:
        settings: size of the grid.

    Raises:
        UserError: a setting is out of range.
    """

    def __init__(self, settings: PixelSettings) -> None:
        settings.validate()
        self.settings = settings
        super().__init__(2 * settings.side**2 * 3)

    def _prepare(self, frames: NDArray[np.uint8] | None, states: NDArray[np.float32]) -> NDArray[Any]:
        planes = torch.from_numpy(np.ascontiguousarray(_check_film(frames))).permute(0, 3, 1, 2).float() / 255
        small = functional.adaptive_avg_pool2d(planes, self.settings.side).permute(0, 2, 3, 1).flatten(1)
        return torch.cat([small.mean(0), small[-1]]).numpy()

    def _compute(self, given: list[NDArray[Any]]) -> NDArray[np.float32]:
        return np.stack(given)


class StateLatent(_RowLatent):
    """Standardised states at `points` equal shares of the episode, then the last one once more.

    Args:
        settings: statistics of the states and number of points.

    Raises:
        UserError: a setting is out of range.
    """

    def __init__(self, settings: StateSettings) -> None:
        settings.validate()
        std = np.asarray(settings.std, np.float64)
        self.settings = settings
        self._mean, self._std = np.asarray(settings.mean, np.float64), np.where(std > SMALLEST_STD, std, 1.0)
        super().__init__((settings.points + 1) * len(settings.mean))

    def _prepare(self, frames: NDArray[np.uint8] | None, states: NDArray[np.float32]) -> NDArray[Any]:
        path = np.asarray(states, np.float64)
        if path.ndim != 2 or not len(path) or path.shape[1] != len(self._mean):
            raise ValueError(f"states are {path.shape}; expected (F >= 1, {len(self._mean)})")
        standard = (path - self._mean) / self._std
        times = np.linspace(0, len(path) - 1, self.settings.points)
        below = times.astype(np.int64)
        above = np.minimum(below + 1, len(path) - 1)
        share = (times - below)[:, None]
        resampled = (1 - share) * standard[below] + share * standard[above]
        return np.concatenate([resampled.ravel(), standard[-1]]).astype(np.float32)

    def _compute(self, given: list[NDArray[Any]]) -> NDArray[np.float32]:
        return np.stack(given)


def make_latent(config: LatentConfig) -> TrajectoryLatent:
    """Build what episodes are compared by.

    Args:
        config: kind and its options.

    Returns:
        Ready to embed; networks are loaded.

    Raises:
        UserError: no such kind or option, or a model that cannot be read.
    """
    from mmrl.vlm.data import build_if_missing

    config.validate()
    build_if_missing(config, "latent")
    settings = _settings_of(config)
    if isinstance(settings, StateSettings) and not settings.mean:
        mean, std = _scale_of(config.path)
        settings = replace(settings, mean=mean, std=std)
    latent: TrajectoryLatent = LATENTS[config.kind][1](settings)
    return latent


def sample_indices(count: int, wanted: int, pad: str = "cycle") -> NDArray[np.int64]:
    """Which frames of a trajectory make a clip.

    Args:
        count: frames of the trajectory, at least 1.
        wanted: frames of the clip.
        pad: for fewer than wanted: "cycle" begins again with the first, "edge" repeats the last.

    Returns:
        (wanted,) from 0: evenly spaced and rounded down where there are enough.

    Raises:
        ValueError: no frame, or no such pad.

    Source: sii-research/siiRL siirl/utils/embodied/video_emb.py (cycle).
    """
    if count < 1 or pad not in PADS:
        raise ValueError(f"cannot take {wanted} of {count} frames with pad {pad!r}; pads: {', '.join(PADS)}")
    if count >= wanted:
        return np.linspace(0, count - 1, wanted).astype(np.int64)
    places = np.arange(wanted)
    return places % count if pad == "cycle" else np.minimum(places, count - 1)


def crop_clip(frames: NDArray[np.uint8], side: int) -> Tensor:
    """Resize, crop and standardise the frames of a clip as V-JEPA 2 is given them.

    Args:
        frames: (T, H, W, 3) uint8.
        side: pixels of the square that the model sees; the short side is first brought to int(256 / 224 * side).

    Returns:
        (T, 3, side, side) float32 in units of ImageNet's standard deviations.
    """
    planes = torch.from_numpy(np.ascontiguousarray(frames)).permute(0, 3, 1, 2).float()
    height, width = planes.shape[-2:]
    short = int(RESIZE_PER_CROP * side)
    size = (int(short * height / min(height, width)), int(short * width / min(height, width)))
    resized = functional.interpolate(planes, size, mode="bilinear", align_corners=False, antialias=True)
    top, left = round((size[0] - side) / 2), round((size[1] - side) / 2)
    cropped = resized[..., top : top + side, left : left + side].clamp(0, 255) / 255
    mean, std = (torch.tensor(numbers)[:, None, None] for numbers in (IMAGENET_MEAN, IMAGENET_STD))
    return (cropped - mean) / std


def state_statistics(states: Sequence[NDArray[np.float32]]) -> tuple[list[float], list[float]]:
    """Mean and standard deviation of the states of trajectories, for `StateSettings`.

    Args:
        states: (F_i, S) of each trajectory.

    Returns:
        (S,) means and (S,) standard deviations over all moments.

    Raises:
        UserError: no trajectory.
    """
    if not len(states):
        raise UserError("there is no trajectory to take the statistics of the states from")
    moments = np.concatenate([np.asarray(path, np.float64) for path in states])
    return moments.mean(0).tolist(), moments.std(0).tolist()


def _settings_of(config: LatentConfig) -> Any:
    if config.kind not in LATENTS:
        raise UserError(f"latent.kind is {config.kind!r}; there are: {', '.join(LATENTS)}")
    settings = LATENTS[config.kind][0]
    known = [entry.name for entry in fields(settings)]
    unknown = sorted(set(config.options) - set(known))
    if unknown:
        raise UserError(f"latent.options has {', '.join(unknown)}; the latent {config.kind} has: {', '.join(known)}")
    given = {"path": config.path} if config.path and "path" in known else {}
    return settings(**given, **config.options)


def _scale_of(folder: str) -> tuple[list[float], list[float]]:
    """Mean and deviation of the states of a dataset."""
    from robotics.data import LeRobotReader

    return state_statistics([episode.state for episode in LeRobotReader(folder)])


def _check_network(settings: Vjepa2Settings | VideoSettings, kind: str) -> None:
    if not settings.path:
        raise UserError(f"the latent {kind} needs `path`, the folder of its model")
    if settings.batch_size < 1 or settings.cache < 0:
        raise UserError(
            f"the latent {kind} has batch_size={settings.batch_size}, at least 1, and cache={settings.cache}, at "
            "least 0"
        )


def _check_film(frames: NDArray[np.uint8] | None) -> NDArray[np.uint8]:
    if frames is None or not len(frames):
        raise ValueError("there are no pictures of the episode")
    film = np.asarray(frames)
    if film.ndim != 4 or film.shape[-1] != 3 or film.dtype != np.uint8:
        raise ValueError(f"pictures are {film.dtype} of shape {film.shape}; expected uint8 (F, H, W, 3)")
    return film


def _content(given: NDArray[Any]) -> bytes:
    digest = hashlib.blake2b(f"{given.dtype}{given.shape}".encode(), digest_size=16)
    digest.update(np.ascontiguousarray(given).data)
    return digest.digest()


def _one_number(size: Any) -> int:
    return int(size[0] if isinstance(size, (list, tuple)) else size)


def _load_vjepa2(path: str) -> Any:
    from mmrl.vlm.compat import ensure_torchvision, quiet_transformers

    ensure_torchvision()
    from transformers import VJEPA2Model

    try:
        with quiet_transformers():
            return VJEPA2Model.from_pretrained(path, dtype=torch.float32)
    except (OSError, ValueError, RuntimeError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UserError(f"no V-JEPA 2 model can be read from {path!r}: {reason}") from error


LATENTS: dict[str, tuple[type[Any], Callable[[Any], TrajectoryLatent]]] = {
    "vjepa2": (Vjepa2Settings, Vjepa2Latent),
    "video": (VideoSettings, VideoLatent),
    "pixels": (PixelSettings, PixelLatent),
    "state": (StateSettings, StateLatent),
}
