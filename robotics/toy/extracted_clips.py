"""Clips of 3D flow extracted from videos of the suite's scenes, to compare extractors by what models learn."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from mmrl.errors import UserError
from robotics.flow3d.clip import FlowEncoding
from robotics.flow3d.extract.clip_building import write_clips
from robotics.flow3d.extract.depth import SensorDepth
from robotics.flow3d.extract.extractor import FlowExtractor
from robotics.flow3d.extract.simulated import SimSegmentation, SimState
from robotics.flow3d.objects.demonstrations import FlowDemonstrationConfig
from robotics.flow3d.objects.demonstrations import videos as recorded_videos
from robotics.flow3d.objects.flow_tasks import FLOW_TASKS
from robotics.flow3d.objects.scene import SceneConfig
from robotics.flow3d.video import RgbdVideo

LOGGER = logging.getLogger("mmrl")


def build_from_scenes(
    path: str,
    *,
    backend: str = "offline",
    scenes: int = 200,
    held_out_scenes: int = 20,
    tasks: Sequence[str] = (),
    actors: Sequence[str] = (),
    image_size: int = 128,
    depth_noise: float = 0.0,
    num_frames: int = 8,
    grid: int = 4,
    begin: str = "motion",
    first_scene: int = 0,
) -> Path:
    """Record demonstrations in the suite's scenes and extract their flow.

    Args:
        path: folder to write.
        backend: offline (`revealed_depth` and `rigid_chain`), or simulator (its own masks and poses). With the same
            other options both see the same videos.
        scenes: number of videos in the split train.
        held_out_scenes: number of videos in the split held_out, with layouts that training data do not show.
        tasks: keys of `FLOW_TASKS`; empty = all.
        actors: who may be in view; empty = hand, free gripper and Panda.
        image_size: width and height of the images in pixels.
        depth_noise: standard deviation of the relative error of each pixel's depth.
        num_frames: T, frames of a flow.
        grid: N, query points per side.
        begin: `FlowExtractor.begin`.
        first_scene: number of the first video of each split.

    Returns:
        The folder.

    Raises:
        UserError: an unknown backend, task or actor, no video gives a clip, or the folder exists already.
    """
    if backend not in BACKENDS:
        raise UserError(f"unknown backend {backend!r}; available: {', '.join(BACKENDS)}")
    chosen = FlowExtractor(FlowEncoding(num_frames=num_frames, grid=grid), begin=begin, **BACKENDS[backend])
    counts = {"train": scenes, "held_out": held_out_scenes}
    recorded = _scene_videos(counts, first_scene, tasks, actors, image_size, depth_noise)
    return write_clips(path, recorded, chosen, f"Flow of tasks at a table, {backend} extraction")


def _scene_videos(
    counts: Mapping[str, int],
    first: int,
    tasks: Sequence[str],
    actors: Sequence[str],
    image_size: int,
    depth_noise: float,
) -> Iterator[tuple[str, Callable[[], RgbdVideo]]]:
    skipped: list[str] = []
    for split, count in counts.items():
        scene = SceneConfig(layouts=split, width=image_size, height=image_size, depth_noise=depth_noise)
        config = FlowDemonstrationConfig(tuple(tasks or FLOW_TASKS), tuple(actors or DEFAULT_ACTORS), scene=scene)
        for video in recorded_videos(
            range(first, first + count), config, on_skip=lambda _, reason: skipped.append(reason)
        ):
            # An extractor must find the gripper itself; the simulator's mask would give it away.
            yield split, partial(replace, video, gripper_mask=None)
    if skipped:
        LOGGER.info("%d videos cannot be shown, such as: %s", len(skipped), skipped[0])


BACKENDS: dict[str, dict[str, Any]] = {
    "offline": {},
    "simulator": {"detector": SimSegmentation(), "tracker": SimState(), "depth": SensorDepth()},
}
"""Parts of `FlowExtractor` for videos of the scenes."""
DEFAULT_ACTORS = ("hand", "free_gripper", "panda")
"""Actors of the videos by default; the other arms are held out."""
