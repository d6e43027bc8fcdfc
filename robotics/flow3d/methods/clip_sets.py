"""Clips for training: their sources, and their tensors.

Shapes: C channels, T frames, N x N points, S x S pixels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from mmrl.errors import UserError
from mmrl.fields import SET, UNSET, bounded, only_with, rare
from mmrl.hub.building import BuiltPath, build_if_missing
from mmrl.rewards.reward_loading import call_function
from mmrl.runs.fingerprint import content_digest
from robotics.flow3d.clip import VISIBLE, FlowClip, FlowEncoding, Z
from robotics.flow3d.data import FlowReader
from robotics.flow3d.geometry import BoolArray, DepthArray, ImageArray

if TYPE_CHECKING:
    from robotics.flow3d.model.context import FlowInputs
    from robotics.flow3d.model.world_model import FlowWorldModel

OUTER = 0.01
"""Fraction of the depths at either end that does not determine the range."""
MARGIN = 0.1
"""Fraction of that range that is added at both ends."""
MOST_CLIPS = 2000
"""Approximate number of clips from which the range is determined."""


@dataclass
class ClipSetConfig(BuiltPath):
    """Clips of a folder written by `FlowWriter`, or returned by your own function."""

    path: str = ""
    """Folder of the dataset; leave it empty with `function`."""
    build: str | None = rare(only_with(None, function=UNSET))
    """module:function that writes the folder if it is missing, called as function(path, **build_options)."""
    split: str = only_with("", function=UNSET)
    """Only clips of this split; empty = all."""
    sources: list[str] = rare(only_with(field(default_factory=list), function=UNSET))
    """Only clips of these sources; empty = all."""
    tasks: list[str] = only_with(field(default_factory=list), function=UNSET)
    """Only clips of these tasks; empty = all."""
    function: str = ""
    """module:function that returns FlowClips, instead of a folder."""
    options: dict[str, Any] = only_with(field(default_factory=dict), function=SET)
    """Options of `function`."""
    limit: int = bounded(0, at_least=0)
    """Maximum number of clips, starting with the first; 0 = all."""

    def validate(self) -> None:
        """Raise ValueError unless exactly one of path and function is given."""
        if bool(self.path) == bool(self.function):
            raise ValueError("set either path (a folder of clips) or function (module:function that returns clips)")


def load_clips(config: ClipSetConfig, where: str) -> Sequence[FlowClip]:
    """The clips of a configuration."""
    try:
        clips = _of_function(config, where) if config.function else _of_folder(config, where)
    except UserError as error:
        raise UserError(f"{where}: {error}") from error
    if not clips:
        raise UserError(f"{where}: no clips found")
    return clips


def depth_range_m(clips: Sequence[FlowClip]) -> tuple[float, float]:
    """Depths in metres that contain 98% of the clips' points, widened by a tenth or 5 mm at both ends."""
    some = [clips[number] for number in range(0, len(clips), max(1, len(clips) // MOST_CLIPS))]
    depths = [depth for clip in some for depth in (clip.flow[..., Z].ravel(), clip.points[..., Z].ravel())]
    # quantiles, because a single wrong depth would stretch the range for all clips
    low, high = np.quantile(np.concatenate(depths), [OUTER, 1 - OUTER])
    margin = max(MARGIN * float(high - low), 0.005)
    return max(0.0, float(low) - margin), float(high) + margin


def clips_digest(clips: Sequence[FlowClip]) -> str:
    """Digest of clips, to check that a run resumes on the same data; for a folder, it does not read them all."""
    fingerprint = getattr(clips, "fingerprint", None)
    return str(fingerprint()) if callable(fingerprint) else content_digest(clips)


def instructions_of(clips: Sequence[FlowClip]) -> list[str]:
    """The distinct instructions of clips; of a folder without reading its images."""
    own = getattr(clips, "instructions", None)
    found: list[str] = own() if callable(own) else [clip.observation.instruction for clip in clips]
    return list(dict.fromkeys(found))


@dataclass
class TrainingClip:
    """One clip, resized and encoded."""

    image: ImageArray
    """(S, S, 3)."""
    points: DepthArray
    """(N, N, 3) in -1..1."""
    instruction: str
    flow: DepthArray
    """(C, T, N, N)."""
    counted: BoolArray
    """(C, T, N, N) numbers that the loss uses."""


class TrainingClips(Sequence[TrainingClip]):
    """Encoded clips for training a model."""

    def __init__(
        self, clips: Sequence[FlowClip], model: FlowWorldModel, *, only_visible: bool, in_memory: bool
    ) -> None:
        self._clips = clips
        self._only_visible = only_visible
        self._encoding: FlowEncoding = model.encoding
        self._inputs_of = model.inputs_of
        self._check = model.check_flow
        self._kept = [self._encoded(clip) for clip in clips] if in_memory else None

    def __len__(self) -> int:
        return len(self._clips)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        return self._encoded(self._clips[index]) if self._kept is None else self._kept[index]

    def digest(self) -> str:
        """Digest of the data, to check that a run resumes on the same data."""
        return clips_digest(self._clips)

    def _encoded(self, clip: FlowClip) -> TrainingClip:
        self._check(clip.flow)
        inputs = self._inputs_of([clip.observation], [clip.points])
        flow = self._encoding.encode(clip.flow, clip.points, clip.observation.size_px)
        counted = np.ones(flow.shape, bool)
        if self._only_visible:
            # positions of hidden points are guesses; the visibility itself is always known
            counted[:VISIBLE] = clip.flow[..., VISIBLE] > 0.5
        return TrainingClip(inputs.images[0].numpy(), inputs.points[0].numpy(), inputs.instructions[0], flow, counted)


def stacked(clips: Sequence[TrainingClip]) -> tuple[FlowInputs, Tensor, Tensor]:
    """Inputs of B clips, their flow (B, C, T, N, N) and which of its numbers count, (B, C, T, N, N) bool."""
    from robotics.flow3d.model.context import FlowInputs

    inputs = FlowInputs(
        torch.from_numpy(np.stack([clip.image for clip in clips])),
        torch.from_numpy(np.stack([clip.points for clip in clips])),
        [clip.instruction for clip in clips],
    )
    flow, counted = (np.stack([getattr(clip, name) for clip in clips]) for name in ("flow", "counted"))
    return inputs, torch.from_numpy(flow), torch.from_numpy(counted)


def _of_function(config: ClipSetConfig, where: str) -> list[FlowClip]:
    found = call_function(config.function, config.options, what=f"{where}.function")
    clips = []
    for clip in found:
        if not isinstance(clip, FlowClip):
            raise UserError(f"function {config.function} returned a {type(clip).__name__}; expected FlowClips")
        clip.check_finite()
        clips.append(clip)
        # a function may yield clips without end
        if len(clips) == config.limit:
            break
    return clips


def _of_folder(config: ClipSetConfig, where: str) -> Sequence[FlowClip]:
    build_if_missing(config, where)
    reader = FlowReader(
        config.path, split=config.split or None, sources=config.sources or None, tasks=config.tasks or None
    )
    return reader[: config.limit] if config.limit else reader
