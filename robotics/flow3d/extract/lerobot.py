"""Episodes of a LeRobotDataset as RGB-D videos."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from mmrl.errors import UserError
from mmrl.hub.images import ImageError, decode_image
from robotics.data.depth import DepthCodes
from robotics.data.episodes import EpisodeData
from robotics.data.features import camera_name, is_depth
from robotics.data.metadata import named_errors
from robotics.data.reader import LeRobotReader
from robotics.flow3d.extract.folder import depth_of
from robotics.flow3d.extract.video import RejectedVideo, RgbdVideo
from robotics.flow3d.geometry import DepthArray

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray


class LeRobotVideos(Sequence[RgbdVideo]):
    """Episodes by number, read on access.

        K = [[300, 0, 160], [0, 300, 120], [0, 0, 1]]
        videos = LeRobotVideos("demos", camera="front", depth="front_depth", K=K)
        clip = FlowExtractor().extract(videos[0])

    A LeRobotDataset stores no intrinsics, so they must be given; wrong ones distort every distance across the image.
    Depth is a depth camera's (`is_depth_map`), an image feature of 16-bit PNG, or a feature of H x W numbers a frame; a
    colour video has too few bits for it.

    Args:
        dataset: folder in the format v3.0.
        camera: name of the camera in colour.
        depth: name of the camera or feature with the depth of that camera; None for a depth model.
        K: (3, 3) intrinsics in pixels of the stored pictures.
        depth_unit_m: metres of one unit, where depth is stored in whole numbers and not as a depth camera's.
        T_world_cam: (4, 4) pose of the camera, or (L, 4, 4) of one that moves; the identity when None.

    Raises:
        RejectedVideo: K is not given.
        UserError: there is no such camera or depth, depth is stored as a video of colours, or the dataset is damaged.
    """

    def __init__(
        self,
        dataset: str | os.PathLike[str],
        *,
        camera: str,
        depth: str | None,
        K: ArrayLike | None,
        depth_unit_m: float = 0.001,
        T_world_cam: ArrayLike | None = None,
    ) -> None:
        if K is None:
            raise RejectedVideo("no_intrinsics", "a LeRobotDataset does not store them; give K, 3 x 3 in pixels")
        self._reader = LeRobotReader(dataset)
        if camera not in self._reader.cameras:
            known = ", ".join(self._reader.cameras) or "none"
            raise UserError(f"no camera {camera!r}; {dataset} has {known}")
        self._camera, self._unit_m = camera, depth_unit_m
        self._K = np.asarray(K, dtype=np.float64)
        self._T = np.eye(4) if T_world_cam is None else np.asarray(T_world_cam, dtype=np.float64)
        self._depth = None if depth is None else self._depth_feature(depth)

    def __len__(self) -> int:
        return len(self._reader)

    @overload
    def __getitem__(self, index: int) -> RgbdVideo: ...

    @overload
    def __getitem__(self, index: slice) -> list[RgbdVideo]: ...

    def __getitem__(self, index: int | slice) -> RgbdVideo | list[RgbdVideo]:
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(f"episode {index} of {len(self)}")
        episode = self._reader.episode(index % len(self))
        moving = self._T.ndim == 3
        rgb = episode.images[self._camera]
        return RgbdVideo(
            rgb=rgb,
            depth_m=None if self._depth is None else self._read_depth(episode, rgb.shape[:3]),
            K=self._K,
            T_world_cam=self._T[0] if moving else self._T,
            T_world_cams=self._T if moving else None,
            instruction=episode.task,
            source=self._reader.folder.name,
            meta={"episode": episode.number},
        )

    def _depth_feature(self, name: str) -> str:
        features: dict[str, Any] = self._reader.info["features"]
        found = [key for key in features if name in (key, camera_name(key))]
        if not found:
            raise UserError(f"no depth {name!r}; {self._reader.folder} has {', '.join(features)}")
        if features[found[0]]["dtype"] == "video" and not is_depth(features[found[0]]):
            raise UserError(
                f"{found[0]} is stored as video, whose 8 bits are too few; store it as 16-bit images or as numbers"
            )
        return found[0]

    def _read_depth(self, episode: EpisodeData, shape: tuple[int, ...]) -> DepthArray:
        assert self._depth is not None
        feature, where = self._reader.info["features"][self._depth], f"{self._depth} of episode {episode.number}"
        if is_depth(feature):
            depth_m = episode.depth_m[camera_name(self._depth)]
            # A video stores missing depth as the smallest depth that it has a code for.
            nearest = DepthCodes.from_info(feature.get("info")).depth_min if feature["dtype"] == "video" else 0.0
            return np.where(depth_m > nearest, depth_m, np.float32(0))
        if feature["dtype"] == "image":
            frames = [
                _image_pixels(content, where) for content in self._reader.image_contents(episode.number, self._depth)
            ]
            return np.stack([depth_of(frame, self._unit_m, where) for frame in frames])
        with named_errors(where):
            # The channel may come last, and numbers may be stored flat.
            return depth_of(np.asarray(episode.extra[self._depth]).reshape(shape), self._unit_m, where)


def _image_pixels(content: bytes, where: str) -> NDArray[Any]:
    try:
        pixels = np.asarray(decode_image(content))
    except ImageError as error:
        raise UserError(f"{where} cannot be read: {error}") from None
    if pixels.ndim != 2:
        raise UserError(f"{where} has images of shape {pixels.shape}; depth must have one channel")
    return pixels
