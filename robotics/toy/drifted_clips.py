"""Clips that share a known error, such as that of a drifting tracker."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from mmrl.errors import UserError
from robotics.flow3d.clip import VISIBLE
from robotics.flow3d.data.reader import FlowReader
from robotics.flow3d.geometry import lift, project

if TYPE_CHECKING:
    from robotics.flow3d.clip import FlowClip


def drifted_clips(path: str, split: str = "", drift_cm: Sequence[float] = (0.0, 0.0, 0.0)) -> list[FlowClip]:
    """The clips of a folder with the flow of a drifting tracker; a `function` of `ClipSetConfig`."""
    if len(drift_cm) != 3 or not np.isfinite(drift_cm).all():
        raise UserError(f"drift_cm is {list(drift_cm)}; must be three finite numbers: right, down and forward")
    return [drifted(clip, drift_cm) for clip in FlowReader(path, split=split or None)]


def drifted(clip: FlowClip, drift_cm: Sequence[float]) -> FlowClip:
    """A clip whose points drift linearly, by `drift_cm` (right, down, forward) in the last frame."""
    share = np.arange(1, len(clip.flow) + 1) / len(clip.flow)
    points = lift(clip.flow[..., :VISIBLE], clip.observation.K)
    moved = points + share[:, None, None, None] * np.asarray(drift_cm, dtype=np.float64) / 100
    return clip.with_flow(np.concatenate([project(moved, clip.observation.K), clip.flow[..., VISIBLE:]], -1))
