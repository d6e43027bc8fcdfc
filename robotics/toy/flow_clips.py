"""Builder for configurations: clips of the scenes' tasks in the format of `robotics.flow3d.data`."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path

from mmrl.errors import UserError
from mmrl.files import replaced
from robotics.flow3d.clip import FlowClip, FlowEncoding
from robotics.flow3d.data import FlowWriter
from robotics.flow3d.objects.demonstrations import FlowDemonstrationConfig, demonstrations, instructed_clips
from robotics.flow3d.objects.flow_tasks import FLOW_TASKS
from robotics.flow3d.objects.scene import HAND, NOBODY, SceneConfig

LOGGER = logging.getLogger("mmrl")
SEEN_ACTORS = (HAND, NOBODY, "free_gripper", "panda")
"""Actors in view by default; other arms are held out."""


def build_clips(
    path: str,
    *,
    scenes: int = 1000,
    held_out_scenes: int = 60,
    tasks: Sequence[str] = (),
    actors: Sequence[str] = SEEN_ACTORS,
    shapes: Sequence[str] = (),
    image_size: int = 128,
    num_frames: int = 8,
    grid: int = 4,
    visibility: bool = False,
    first_scene: int = 0,
) -> Path:
    """Draw first images of the tasks, and write them with their instructions and the true flow of each.

    Args:
        path: folder to write, which must not exist.
        scenes: number of first images in the split train, with layouts of training data; the furniture takes turns.
        held_out_scenes: the same for the split held_out, with layouts that training data do not show.
        tasks: keys of `FLOW_TASKS`; empty = all.
        actors: who may be in view: arms, hand or nobody.
        shapes: shapes of the objects; empty = those of the training data.
        image_size: width and height of the images in pixels.
        num_frames: T, frames of a flow.
        grid: N, query points per side.
        visibility: execute the motions and draw all frames of the flow to find out which points are hidden, with one
            instruction per image. It takes several times as long; without it every point counts as visible, and each
            image comes with all its instructions.
        first_scene: seed of the first image of each split.
    """
    if Path(path).exists():
        raise UserError(f"{path} already exists; choose another folder or remove it")
    config = FlowDemonstrationConfig(tasks=tuple(tasks or FLOW_TASKS), actors=tuple(actors), shapes=tuple(shapes))
    encoding, count = FlowEncoding(num_frames=num_frames, grid=grid), 0
    with replaced(Path(path)) as draft:
        with FlowWriter(draft, num_frames=num_frames, grid=grid, title="Flow of tasks at a table") as writer:
            for split, number in (("train", scenes), ("held_out", held_out_scenes)):
                scene = SceneConfig(layouts=split, width=image_size, height=image_size)
                seeds = range(first_scene, first_scene + number)
                for clip in _build(seeds, dataclasses.replace(config, scene=scene), encoding, visibility):
                    writer.add(clip, split=split)
                    count += 1
        if not count:
            raise UserError(f"scenes is {scenes} and held_out_scenes {held_out_scenes}, so there would be no clips")
    LOGGER.info("%d clips from %d first images", count, scenes + held_out_scenes)
    return Path(path)


def _build(
    seeds: range, config: FlowDemonstrationConfig, encoding: FlowEncoding, visibility: bool
) -> Iterator[FlowClip]:
    if not visibility:
        yield from instructed_clips(seeds, config, encoding)
        return
    skipped: list[str] = []
    yield from demonstrations(seeds, config, encoding, on_skip=lambda _, reason: skipped.append(reason))
    if skipped:
        LOGGER.info("%d of %d episodes gave no clip, such as: %s", len(skipped), len(seeds), skipped[0])
