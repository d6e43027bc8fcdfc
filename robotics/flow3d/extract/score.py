"""Errors of detectors and trackers against the simulator."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from robotics.flow3d.encoding import grid_in_mask
from robotics.flow3d.extract.depth_noise import DenoisedDepth
from robotics.flow3d.extract.extractor import lifted
from robotics.flow3d.extract.simulated import SimSegmentation, SimState
from robotics.flow3d.extract.video import RejectedVideo
from robotics.flow3d.geometry import angle_rad, apply_pose, lift
from robotics.flow3d.rigid_fit import fit_motions

if TYPE_CHECKING:
    from robotics.flow3d.extract.protocols import DepthSource, Detector, Tracker
    from robotics.flow3d.extract.video import RgbdVideo


@dataclass(frozen=True)
class DetectorScore:
    """One video."""

    iou: float
    """Overlap of the masks; 0 where the video was rejected."""
    precision: float
    """Share of the found mask on the object; 0 where the video was rejected."""
    rejected: bool
    """Whether the detector rejected it."""
    cpu_s: float
    """Processor time."""


@dataclass(frozen=True)
class TrackerScore:
    """One video, on a grid over the true mask."""

    median_px: float
    """Median distance in the image, over all frames and points."""
    median_cm: float
    """Median distance in space, over points with depth."""
    final_rotation_deg: float
    """Between the motion fitted to the points of the last frame, and the true one."""
    final_translation_cm: float
    """The same for the middle of the object."""
    visible: float
    """Share of points that the tracker calls visible."""
    cpu_s: float
    """Processor time."""


def score_detector(detector: Detector, video: RgbdVideo, depth: DepthSource | None = None) -> DetectorScore:
    """Compare a detector with the simulator's segmentation; `depth` as in `FlowExtractor`, its default when None."""
    truth, start = SimSegmentation().detect(video), time.process_time()
    try:
        found = detector.detect(_measured(video, depth))
    except RejectedVideo:
        return DetectorScore(0.0, 0.0, True, time.process_time() - start)
    cpu_s = time.process_time() - start
    precision = float((found & truth).sum() / max(found.sum(), 1))
    iou = float((found & truth).sum() / max((found | truth).sum(), 1))
    return DetectorScore(iou, precision, False, cpu_s)


def _measured(video: RgbdVideo, depth: DepthSource | None) -> RgbdVideo:
    return replace(video, depth_m=(depth or DenoisedDepth()).depth_m(video))


def score_tracker(tracker: Tracker, video: RgbdVideo, side: int = 8, depth: DepthSource | None = None) -> TrackerScore:
    """Compare a tracker with the simulator's state on `side` x `side` points; raises RejectedVideo when it is lost."""
    K, mask = video.intrinsics_px, SimSegmentation().detect(video)
    uv = grid_in_mask(mask, side).reshape(-1, 2)
    true = SimState().track(video, mask, uv)
    start = time.process_time()
    measured = _measured(video, depth)
    tracks = tracker.track(measured, mask, uv)
    found = lifted(tracks, measured.known_depth_m)
    cpu_s = time.process_time() - start
    true_m = lift(lifted(true, video.known_depth_m), K)
    found_m = lift(found, K)
    fit = fit_motions(true_m[0], found_m[-1:], tracks.visible[-1:])
    assert video.truth is not None  # SimState has asked for it
    middle = true_m[0].mean(0)[None]
    ends = apply_pose(np.stack([fit.T_t_0[0], video.truth.T_t_0[-1]]), middle)[:, 0]
    pixels = np.linalg.norm(tracks.uv_px[1:] - true.uv_px[1:], axis=-1)
    metres = np.linalg.norm(found_m[1:] - true_m[1:], axis=-1)
    return TrackerScore(
        float(np.median(pixels)),
        100 * float(np.nanmedian(metres)),
        float(np.degrees(angle_rad(fit.T_t_0[0], video.truth.T_t_0[-1]))),
        100 * float(np.linalg.norm(ends[0] - ends[1])),
        float(tracks.visible.mean()),
        cpu_s,
    )
