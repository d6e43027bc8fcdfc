"""Errors of detectors and trackers against the simulator."""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mmrl.errors import RunError, UserError
from mmrl.files import replaced, write_atomically
from robotics.data.layout import write_json
from robotics.flow3d.clip import grid_in_box, grid_in_mask
from robotics.flow3d.extract.backends import Tracks
from robotics.flow3d.extract.camera import grey_frames, klt_tracks
from robotics.flow3d.extract.depth import DenoisedDepth
from robotics.flow3d.extract.extractor import PUBLIC_SIDE_PX, RevealedDepth, lifted
from robotics.flow3d.extract.rigid_chain import RigidChain
from robotics.flow3d.extract.simulated import SimSegmentation, SimState
from robotics.flow3d.geometry import BoolArray, FloatArray, angle_rad, apply_pose, lift
from robotics.flow3d.rigid_motion import fit_motions
from robotics.flow3d.video import RejectedVideo
from robotics.toy.extracted_clips import DEFAULT_ACTORS

if TYPE_CHECKING:
    from robotics.flow3d.extract.backends import DepthSource, Detector, PointTracker
    from robotics.flow3d.video import RgbdVideo


@dataclass(frozen=True)
class DetectorScore:
    """One video."""

    iou: float
    """Overlap of the masks; 0 if the video was rejected."""
    precision: float
    """Fraction of the found mask that lies on the object; 0 if the video was rejected."""
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
    """Angle between the motion fitted to the points of the last frame and the true one."""
    final_translation_cm: float
    """The same for the middle of the object."""
    visible: float
    """Fraction of points that the tracker reports as visible."""
    cpu_s: float
    """Processor time."""


def score_detector(detector: Detector, video: RgbdVideo, depth: DepthSource | None = None) -> DetectorScore:
    """Compare a detector with the simulator's segmentation; `depth` as in `FlowExtractor`, the default if None."""
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


def score_tracker(
    tracker: PointTracker, video: RgbdVideo, side: int = 8, depth: DepthSource | None = None
) -> TrackerScore:
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


Row = dict[str, Any]


def compare_extractors(
    sizes_px: Sequence[int] = (128, 256),
    noises: Sequence[float] = (0.0, 0.01),
    videos: int = 1,
    backends: Sequence[str] = (),
) -> Iterator[Row]:
    """Judge backends on every task and actor; `noises` are relative standard deviations of each pixel's depth."""
    for size in sizes_px:
        for number, recorded in enumerate(_videos(size, videos)):
            clean = replace(recorded, gripper_mask=None)  # which no user has
            for noise in noises:
                video = _noisy(clean, noise, number)
                for name in backends or BACKENDS:
                    known = {"backend": name, "size_px": size, "noise": noise, "video": number}
                    yield known | {key: clean.meta[key] for key in ("task", "family", "actor")} | _judge(name, video)


def summary(rows: Sequence[Row]) -> list[Row]:
    """Medians and fractions for each backend, size and noise, in the order of the rows."""
    keys = dict.fromkeys((row["backend"], row["size_px"], row["noise"]) for row in rows)
    return [
        _summary(key, [row for row in rows if (row["backend"], row["size_px"], row["noise"]) == key]) for key in keys
    ]


def table(rows: Sequence[Row]) -> str:
    """The summary as Markdown."""
    lines = [
        "| backend | pixels | depth noise | found | refused | mask IoU | on the object | flow, px | flow, cm "
        "| end, ° | end, cm | lost | CPU s |",
        "|" + "---|" * 13,
    ]
    for row in summary(rows):
        numbers = (f"{row[name]:.{digits}f}" for name, digits in COLUMNS)
        lines.append(f"| {row['backend']} | {row['size_px']} | {100 * row['noise']:g}% | {' | '.join(numbers)} |")
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the comparison and write its files."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.robotics.flow3d_extractors", description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("runs/flow3d-extractors"), help="output folder")
    parser.add_argument("--sizes", type=int, nargs="+", default=[128, 256], help="image sizes in pixels")
    parser.add_argument("--noises", type=float, nargs="+", default=[0.0, 0.01], help="relative deviations of depth")
    parser.add_argument("--videos", type=int, default=1, help="episodes per task and actor")
    parser.add_argument("--backends", nargs="+", choices=list(BACKENDS), default=[], help="default: all")
    args = parser.parse_args(argv)
    if broken := [noise for noise in args.noises if not np.isfinite(noise)]:
        parser.error(f"--noises contains {broken[0]}; must be finite")
    rows = []
    for row in compare_extractors(args.sizes, args.noises, args.videos, args.backends):
        rows.append(row)
        _say(
            f"{row['backend']}, {row['size_px']} px, noise {row['noise']}, {row['actor']}, {row['task']}: "
            f"IoU {row['iou']:.2f}"
        )
    args.output.mkdir(parents=True, exist_ok=True)
    write_json(rows, args.output / "extractors.json")
    write_atomically(args.output / "extractors.md", table(rows))
    draw(rows, args.output / "extractors.png")
    _say(table(rows))
    return 0


def draw(rows: Sequence[Row], file: Path) -> None:
    """Plot overlap of masks and errors of flow, one dot per video."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    groups = list(dict.fromkeys((row["size_px"], row["noise"]) for row in rows))
    names = list(dict.fromkeys(row["backend"] for row in rows))
    figure, axes = pyplot.subplots(1, 3, figsize=(13, 4.2), layout="constrained")
    for axis, (name, title) in zip(axes, PANELS.items(), strict=True):
        for position, backend in enumerate(names):
            for at, (size, noise) in enumerate(groups):
                values = [
                    row[name]
                    for row in rows
                    if (row["backend"], row["size_px"], row["noise"]) == (backend, size, noise)
                    and row[name] is not None
                ]
                spread = np.random.default_rng(0).uniform(-0.07, 0.07, len(values))
                x = at + 0.26 * (position - (len(names) - 1) / 2)
                axis.scatter(
                    x + spread, values, s=12, alpha=0.6, color=f"C{position}", label=backend if at == 0 else None
                )
                if values:
                    axis.plot([x - 0.1, x + 0.1], [np.median(values)] * 2, color="black", linewidth=2)
        axis.set_xticks(range(len(groups)), [f"{size} px\n{100 * noise:g}% noise" for size, noise in groups])
        axis.set_title(title)
        if name != "iou":
            axis.set_yscale("log")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=len(names), fontsize=9)
    with replaced(file) as draft:
        figure.savefig(draft, dpi=110)
    pyplot.close(figure)


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def _videos(size_px: int, count: int) -> Iterator[RgbdVideo]:
    from robotics.flow3d.objects.demonstrator import Demonstrator
    from robotics.flow3d.objects.flow_tasks import FLOW_TASKS
    from robotics.flow3d.objects.scene import FlowScene, SceneConfig

    number = 0
    for task, known in FLOW_TASKS.items():
        shapes = known.shape_names(False)
        for actor in DEFAULT_ACTORS:
            shape = shapes[number % len(shapes)]
            config = SceneConfig(task=task, actor=actor, shape=shape, width=size_px, height=size_px)
            with FlowScene(config) as scene:
                yield from _recorded(Demonstrator(scene), 1000 * number, count)
            number += 1


def _recorded(demonstrator: Any, first_seed: int, count: int) -> Iterator[RgbdVideo]:
    """Videos of the first episodes from a seed on that the actor can demonstrate."""
    found = 0
    for seed in range(first_seed, first_seed + TRIES * count):
        demonstrator.scene.reset(seed)
        try:
            video = demonstrator.video()
        except RunError:  # out of the arm's reach
            continue
        yield video
        if (found := found + 1) == count:
            return
    raise UserError(f"only {found} of {TRIES * count} episodes can be demonstrated")


def _noisy(clean: RgbdVideo, noise: float, seed: int) -> RgbdVideo:
    if not noise:
        return clean
    depth_m = clean.known_depth_m
    errors = np.random.default_rng([seed, 7]).standard_normal(depth_m.shape, dtype=np.float32)
    return replace(clean, depth_m=depth_m * (1 + np.float32(noise) * errors))


def _judge(name: str, video: RgbdVideo) -> Row:
    detector, tracker = BACKENDS[name]
    found = score_detector(detector, video)
    row: Row = {"iou": found.iou, "precision": found.precision, "refused": found.rejected, "lost": False}
    try:
        scored = dataclasses.asdict(score_tracker(tracker, video))
    except RejectedVideo:
        scored = dict.fromkeys(("median_px", "median_cm", "final_rotation_deg", "final_translation_cm", "visible"))
        scored |= {"cpu_s": 0.0}
        row["lost"] = True
    return row | scored | {"cpu_s": scored["cpu_s"] + found.cpu_s}


def _summary(key: tuple[str, int, float], rows: Sequence[Row]) -> Row:
    def median(name: str) -> float:
        values = [row[name] for row in rows if row[name] is not None]
        return float(np.median(values)) if values else float("nan")

    medians = ("iou", "precision", "median_px", "median_cm", "final_rotation_deg", "final_translation_cm", "cpu_s")
    shares = {
        "found": float(np.mean([row["iou"] > FOUND for row in rows])),
        "refused": float(np.mean([row["refused"] for row in rows])),
        "lost": float(np.mean([row["lost"] for row in rows])),
    }
    backend, size, noise = key
    return (
        {"backend": backend, "size_px": size, "noise": noise, "videos": len(rows)}
        | shares
        | {name: median(name) for name in medians}
    )


class ClassicalFlow:
    """Tracker that follows each point on its own by Lucas-Kanade; the baseline."""

    def track(self, video: RgbdVideo, mask: BoolArray, uv_px: FloatArray) -> Tracks:
        """Follow points; see `PointTracker`. A lost point stays at its last position, hidden."""
        tracks, alive = klt_tracks(grey_frames(video.rgb), uv_px)
        return Tracks(tracks, alive.astype(np.float64))


@dataclass(frozen=True)
class EarlyMotion:
    """The public code's rule: the box of points that move far, but not early.

    Source: Hoyyyaard/3DFlowAction preprocess/BridgeV2/moving_obj_det_pipeline.py, for images of 256 x 256; here lengths
        in pixels scale with the image. The paper masks the gripper by segmentation instead of by early motion.
    """

    tracker: PointTracker
    """Follows the grid; CoTracker in the public code."""
    grid: int = 32
    """Points per side over the whole image."""
    early_frame: int = 5
    """Frame by which points of the gripper have moved."""
    early_px: float = 1.0
    """Displacement of a gripper point by then, in an image of 256 pixels."""
    least_px: float = 10.0
    """Displacement of the object, in an image of 256 pixels."""
    largest_share: float = 0.25
    """Maximum fraction of the image that the box may cover."""

    def detect(self, video: RgbdVideo) -> BoolArray:
        """Mask the box; see `Detector`."""
        width, height = video.size_px
        scale = width / PUBLIC_SIDE_PX
        points = grid_in_box((0, 0, width - 1e-3, height - 1e-3), self.grid).reshape(-1, 2)
        tracks = self.tracker.track(video, np.ones((height, width), dtype=bool), points).uv_px
        early = min(self.early_frame, len(video) - 1)
        moving = moving_points(tracks, early, self.early_px * scale, self.least_px * scale)
        box = np.concatenate([points[moving].min(0), points[moving].max(0)])
        area = (box[2] - box[0]) * (box[3] - box[1])
        if area > self.largest_share * width * height:
            raise RejectedVideo("no_moving_object", f"the box covers {area / (width * height):.2f} of the image")
        left, top = (int(np.clip(np.floor(box[axis]), 0, side - 1)) for axis, side in ((0, width), (1, height)))
        mask = np.zeros((height, width), dtype=bool)
        mask[top : max(top + 1, int(np.ceil(box[3]))), left : max(left + 1, int(np.ceil(box[2])))] = True
        return mask


def moving_points(uv_px: FloatArray, early_frame: int, early_px: float, least_px: float) -> BoolArray:
    """Which of the tracks (L, n, 2) move far, but less than `early_px` until `early_frame`: (n,)."""
    rested = np.linalg.norm(uv_px[early_frame] - uv_px[0], axis=-1) < early_px
    moved = np.linalg.norm(uv_px[-1] - uv_px[0], axis=-1)
    farthest = moved[rested].max() if rested.any() else 0.0
    if farthest < least_px:
        raise RejectedVideo("no_moving_object", f"points move by {farthest:.1f} px at most, must be {least_px:.1f}")
    moving: BoolArray = rested & (moved > (farthest - moved[rested].min()) / 4)
    return moving


BACKENDS: dict[str, tuple[Detector, PointTracker]] = {
    "revealed_depth + rigid_chain": (RevealedDepth(), RigidChain()),
    "paper's rule + KLT": (EarlyMotion(ClassicalFlow()), ClassicalFlow()),
}
"""Detector and tracker by name."""
FOUND = 0.5
"""Overlap of the masks above which an object counts as found."""
TRIES = 10
COLUMNS = (
    ("found", 2),
    ("refused", 2),
    ("iou", 2),
    ("precision", 2),
    ("median_px", 2),
    ("median_cm", 2),
    ("final_rotation_deg", 1),
    ("final_translation_cm", 2),
    ("lost", 2),
    ("cpu_s", 1),
)
PANELS = {
    "iou": "overlap of masks (IoU)",
    "median_cm": "median error of the flow, cm",
    "final_rotation_deg": "rotation at the end, °",
}

if __name__ == "__main__":
    raise SystemExit(main())
