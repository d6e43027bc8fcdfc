"""Build functions for configurations: clips of 3D flow extracted from videos.

    data:
      path: runs/my-clips
      build: robotics.flow3d.extract.clip_building:build_from_folder
      build_options: {videos: my_videos, grid: 4}

Besides the shards, whose card has the statistics of the extraction, a folder gets `extraction.json`, which counts the
reasons of rejected videos, and `strips/`, images of the first clips.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from mmrl.errors import UserError
from mmrl.files import expanded, replaced
from mmrl.rewards.reward_loading import call_function
from robotics.data.layout import write_json
from robotics.flow3d.clip import FlowEncoding
from robotics.flow3d.data import FlowWriter
from robotics.flow3d.extract.extractor import FlowExtractor
from robotics.flow3d.extract.sources import LeRobotVideos, read_rgbd_folder
from robotics.flow3d.metrics import flow_strip
from robotics.flow3d.video import RejectedVideo, RgbdVideo

LOGGER = logging.getLogger("mmrl")
STRIPS = 12
"""Number of clips drawn as strips."""


def build_from_folder(
    path: str,
    *,
    videos: str,
    num_frames: int = 8,
    grid: int = 4,
    begin: str = "motion",
    held_out_share: float = 0.1,
    extractor: str = "",
    extractor_options: Mapping[str, Any] | None = None,
    title: str = "",
) -> Path:
    """Extract the flow of RGB-D videos, each a folder as `read_rgbd_folder` reads it.

    Args:
        path: folder to write.
        videos: folder of such folders.
        num_frames: T, frames of a flow.
        grid: N, query points a side.
        begin: `FlowExtractor.begin`: motion or video.
        held_out_share: fraction of the videos, taken from the end, for the split held_out.
        extractor: module:function that returns a `FlowExtractor`, called as function(encoding, **extractor_options);
            empty = the offline extractor.
        extractor_options: options of the extractor's function.
        title: title of the card; empty = from the name of `videos`.

    Returns:
        The folder.

    Raises:
        UserError: there are no videos, none of them gives a clip, or the folder exists already.
    """
    found = sorted(one.parent for one in expanded(Path(videos)).glob("*/camera.json"))
    if not found:
        raise UserError(f"no folder in {videos} contains a camera.json; see the docstring of read_rgbd_folder")
    chosen = _extractor(FlowEncoding(num_frames=num_frames, grid=grid), begin, extractor, extractor_options)
    read = [partial(read_rgbd_folder, one) for one in found]
    return write_clips(path, _split(read, held_out_share), chosen, title or f"3D flow of {Path(videos).name}")


def build_from_lerobot(
    path: str,
    *,
    dataset: str,
    camera: str,
    depth: str,
    K: Sequence[Sequence[float]],
    depth_unit_m: float = 0.001,
    T_world_cam: Sequence[Sequence[float]] | None = None,
    episodes: int = 0,
    num_frames: int = 8,
    grid: int = 4,
    begin: str = "motion",
    held_out_share: float = 0.1,
    extractor: str = "",
    extractor_options: Mapping[str, Any] | None = None,
    title: str = "",
) -> Path:
    """Extract the flow of the episodes of a LeRobotDataset.

    Args:
        path: folder to write.
        dataset: folder of the dataset.
        camera: name of the camera in colour.
        depth: name of the camera or feature with its depth; see `LeRobotVideos`.
        K: 3 x 3 intrinsics of that camera in pixels, which a LeRobotDataset does not store.
        depth_unit_m: metres of one unit of depth.
        T_world_cam: 4 x 4 pose of the camera.
        episodes: number of episodes to use, the first ones; 0 = all.
        num_frames: see `build_from_folder`, also for the arguments below.
        grid: N.
        begin: motion or video.
        held_out_share: fraction of the episodes, taken from the end.
        extractor: module:function.
        extractor_options: its options.
        title: title of the card.

    Returns:
        The folder.

    Raises:
        UserError: as in `build_from_folder` and `LeRobotVideos`.
    """
    source = LeRobotVideos(dataset, camera=camera, depth=depth, K=K, depth_unit_m=depth_unit_m, T_world_cam=T_world_cam)
    chosen = _extractor(FlowEncoding(num_frames=num_frames, grid=grid), begin, extractor, extractor_options)
    read = [partial(source.__getitem__, index) for index in range(len(source))[: episodes or None]]
    return write_clips(path, _split(read, held_out_share), chosen, title or f"3D flow of {Path(dataset).name}")


def write_clips(
    path: str, videos: Iterable[tuple[str, Callable[[], RgbdVideo]]], extractor: FlowExtractor, title: str
) -> Path:
    """Extract clips of videos, each a split and a function that reads it, and write them with the extraction report."""
    from PIL import Image

    if expanded(Path(path)).exists():
        raise UserError(f"{path} already exists; choose another folder or remove it")
    refused: Counter[str] = Counter()
    numbers: dict[str, list[int]] = {}
    form = extractor.encoding
    count = 0
    total = 0
    last = ""
    # a draft, so that an error leaves no half-written folder
    with replaced(expanded(Path(path))) as draft:
        with FlowWriter(draft, num_frames=form.num_frames, grid=form.grid, title=title) as writer:
            for split, read in videos:
                total += 1
                try:
                    clip = extractor.extract(_read(read))
                except RejectedVideo as rejection:
                    refused[rejection.reason] += 1
                    last = str(rejection)
                    # the index within all videos, rejected ones included, so that users can find the video
                    numbers.setdefault(rejection.reason, []).append(total - 1)
                    continue
                writer.add(clip, split=split)
                count += 1
                if count <= STRIPS:
                    strips = draft / "strips"
                    strips.mkdir(exist_ok=True)
                    Image.fromarray(flow_strip(clip)).save(strips / f"{count - 1:03d}.png")
        if not count:
            raise UserError(f"none of the {total} videos gives a clip: {dict(refused)}; the last one: {last}")
        report = {"videos": total, "clips": count, "left_out": dict(refused), "numbers": numbers}
        write_json(report, draft / "extraction.json")
    LOGGER.info("%d clips from %d videos; rejected: %s", count, total, dict(refused) or "none")
    return Path(path)


def _read(read: Callable[[], RgbdVideo]) -> RgbdVideo:
    try:
        return read()
    except RejectedVideo:
        raise
    except UserError as error:
        # one damaged video does not end hours of extraction
        LOGGER.warning("skipped: %s", error)
        raise RejectedVideo("unreadable", str(error)) from error


def _extractor(encoding: FlowEncoding, begin: str, function: str, options: Mapping[str, Any] | None) -> FlowExtractor:
    if function:
        made = call_function(function, options or {}, encoding, what="extractor")
        if not isinstance(made, FlowExtractor):
            raise UserError(f"extractor {function} returned a {type(made).__name__}; expected a FlowExtractor")
        return made
    if options:
        raise UserError("extractor_options needs extractor=module:function, to which the options are passed")
    return FlowExtractor(encoding, begin=begin)


def _split(
    videos: Sequence[Callable[[], RgbdVideo]], held_out_share: float
) -> Iterator[tuple[str, Callable[[], RgbdVideo]]]:
    if not 0 <= held_out_share < 1:
        raise UserError(f"held_out_share is {held_out_share}; must be at least 0 and below 1")
    train = len(videos) - round(held_out_share * len(videos))
    return (("train" if index < train else "held_out", read) for index, read in enumerate(videos))
