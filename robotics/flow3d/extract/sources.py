"""RGB-D videos from folders of images and from episodes of a LeRobotDataset."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, overload

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mmrl.errors import UserError
from mmrl.files import expanded, read_json_object
from mmrl.hub.foreign import MalformedError, to_rgb
from mmrl.hub.images import ImageError, decode_image, read_image_file
from mmrl.hub.video_reading import VideoError, decode_frames, read_index
from robotics.data.features import camera_features, camera_name, image_size, is_depth
from robotics.data.images import DepthCodes
from robotics.data.layout import named_errors
from robotics.data.reader import EpisodeData, LeRobotReader
from robotics.flow3d.geometry import DepthArray, ImageArray
from robotics.flow3d.video import RejectedVideo, RgbdVideo

LOGGER = logging.getLogger("mmrl")
CAMERA = ("K", "depth_unit_m", "T_world_cam", "instruction")
"""Entries of `camera.json`."""
COLOURS = (".png", ".jpg", ".jpeg")
DEPTHS = (".png", ".npy")
COARSEST_M = 0.1
"""Maximum `depth_unit_m`; a larger value is hardly in metres."""
FARTHEST_M = 50.0
"""Maximum median of depth in metres; a larger one is in millimetres."""


def read_rgbd_folder(folder: str | os.PathLike[str]) -> RgbdVideo:
    """Read a video.

        my_video/
          rgb/000000.png ...     8-bit colour, or JPEG; frames in the order of their numbers. Or rgb.mp4, any video that
                                 FFmpeg reads
          depth/000000.png ...   16-bit, one for each frame; or 000000.npy in metres. Or depth.npz with one array of all
                                 frames, integers in units or metres. Optional with a depth model.
          camera.json            {"K": [[fx, 0, cx], [0, fy, cy], [0, 0, 1]], "depth_unit_m": 0.001,
                                  "T_world_cam": 4 x 4, or one for each frame of a moving camera, optional,
                                  "instruction": text, optional}

    Args:
        folder: laid out as above.

    Returns:
        The video; its source is the name of the folder.

    Raises:
        RejectedVideo: `camera.json` has no K.
        UserError: a file is missing or damaged, or depth and colour differ in number or size.
    """
    place = expanded(Path(folder))
    camera = read_json_object(place / "camera.json")
    if camera.get("K") is None:
        raise RejectedVideo("no_intrinsics", f'{place / "camera.json"} must have "K", 3 x 3 in pixels')
    if unread := sorted(set(camera) - set(CAMERA)):
        LOGGER.warning(
            "%s has %s, which nothing reads; its entries are %s", place, ", ".join(unread), ", ".join(CAMERA)
        )
    with named_errors(f"the video {place}"):
        unit = None if camera.get("depth_unit_m") is None else float(camera["depth_unit_m"])
        rgb, depth_m = _colors(place), _depths(place, unit)
        if depth_m is not None and len(depth_m) != len(rgb):
            raise UserError(
                f"{place} has {len(rgb)} colour frames and {len(depth_m)} depth frames; the numbers must match"
            )
        T_world_cam = np.asarray(camera.get("T_world_cam", np.eye(4)), dtype=np.float64)
        K = np.asarray(camera["K"], dtype=np.float64)
        _check_centre(K, rgb.shape[1:3], str(place / "camera.json"))
        return RgbdVideo(
            rgb=rgb,
            depth_m=depth_m,
            K=K,
            # a moving camera's first pose is that of the first frame, in which points are queried
            T_world_cam=T_world_cam if T_world_cam.ndim == 2 else T_world_cam[0],
            T_world_cams=T_world_cam if T_world_cam.ndim == 3 else None,
            instruction=str(camera.get("instruction", "")),
            source=place.name,
        )


def _check_centre(K: NDArray[np.float64], size: Sequence[int], where: str) -> None:
    """Warn if the image's centre (H, W) is far from the camera's axis, as with intrinsics of another resolution."""
    height, width = size
    if K.shape == (3, 3) and not all(1 / 3 < place < 2 / 3 for place in (K[0, 2] / width, K[1, 2] / height)):
        LOGGER.warning(
            "K of %s puts the camera's axis at (%.5g, %.5g) of %d x %d pixels; unless the images are cropped, it is of "
            "another resolution, and must be scaled with the images",
            *(where, K[0, 2], K[1, 2], width, height),
        )


def _colors(place: Path) -> ImageArray:
    videos = [path for path in sorted(place.glob("rgb.*")) if path.is_file()]
    images = _files(place / "rgb", COLOURS)
    if videos and images:
        raise UserError(f"{place} has {videos[0].name} and images in rgb/; keep one of them")
    if not videos and not images:
        raise UserError(f"{place} has no frames: neither rgb.mp4 nor {', '.join(COLOURS)} in rgb/")
    return read_frames(videos[0]) if videos else np.stack([_colour(path) for path in images])


def _colour(path: Path) -> ImageArray:
    try:
        return np.asarray(to_rgb(_image(path)))
    except MalformedError as error:
        raise UserError(f"{path} has {error}") from None


def _depths(place: Path, unit_m: float | None) -> DepthArray | None:
    images, archive = _files(place / "depth", DEPTHS), place / "depth.npz"
    if archive.is_file() and images:
        raise UserError(f"{place} has depth.npz and images in depth/; keep one of them")
    if archive.is_file():
        with np.load(archive, allow_pickle=False) as content:
            if len(content.files) != 1:
                raise UserError(
                    f"{archive} contains {', '.join(content.files)}; it must contain a single array (L, H, W)"
                )
            return depth_of(content[content.files[0]], unit_m, str(archive))
    return np.stack([_depth(path, unit_m) for path in images]) if images else None


def read_frames(path: Path) -> ImageArray:
    """(L, H, W, 3) frames of a video file, upright; raises UserError if it is not a video or too large."""
    try:
        index = read_index(path)
        return np.stack(list(decode_frames(index, range(index.total))))
    except VideoError as error:
        raise UserError(f"{path} cannot be read as a video: {error}") from error


def depth_of(pixels: NDArray[Any], unit_m: float | None, where: str) -> DepthArray:
    """Depth in metres: floats are metres already, integers are in units of `unit_m`."""
    if np.issubdtype(pixels.dtype, np.floating):
        known = pixels[np.isfinite(pixels) & (pixels > 0)]
        if known.size and (median := float(np.median(known))) > FARTHEST_M:
            raise UserError(
                f"{where} has floats with a median of {median:g}, which cannot be metres; store metres, or integers "
                f"with depth_unit_m"
            )
        return pixels.astype(np.float32)
    # 8 bits over 1.5 m would be steps of 6 mm
    if pixels.dtype.itemsize < 2:
        raise UserError(f"{where} is {pixels.dtype}; depth must be 16-bit integers or metres")
    # no default for files: millimetres and tenths of them are both common
    if unit_m is None:
        raise UserError(f'{where} contains integers, but "depth_unit_m" (such as 0.001) is missing')
    if not 0 < unit_m <= COARSEST_M:
        raise UserError(f"depth_unit_m is {unit_m:g}; must be the metres of one unit of {where}, such as 0.001")
    return (pixels * unit_m).astype(np.float32)


def _files(folder: Path, suffixes: tuple[str, ...]) -> list[Path]:
    # by the numbers in the names: 2.png comes before 10.png
    def order(path: Path) -> list[tuple[int, str]]:
        return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", path.name)]

    return sorted(sorted(path for path in folder.glob("*") if path.suffix.lower() in suffixes), key=order)


def _image(path: Path) -> Any:
    try:
        return decode_image(read_image_file(path))
    except ImageError as error:
        raise UserError(f"{path} cannot be read: {error}") from None


def _depth(path: Path, unit_m: float | None) -> DepthArray:
    pixels = np.load(path, allow_pickle=False) if path.suffix == ".npy" else np.asarray(_image(path))
    if pixels.ndim != 2:
        raise UserError(f"{path} is {pixels.dtype} {pixels.shape}; depth must be a single-channel 16-bit image")
    return depth_of(pixels, unit_m, str(path))


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
        camera: name of the colour camera.
        depth: name of the camera or feature with the depth of that camera; None for a depth model.
        K: (3, 3) intrinsics in pixels of the stored images.
        depth_unit_m: metres per unit if depth is stored as integers and not by a depth camera.
        T_world_cam: (4, 4) pose of the camera, or (L, 4, 4) for a moving one; None = the identity.

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
            raise RejectedVideo("no_intrinsics", "a LeRobotDataset does not store intrinsics; pass K, 3 x 3 in pixels")
        self._reader = LeRobotReader(dataset)
        if camera not in self._reader.cameras:
            known = ", ".join(self._reader.cameras) or "none"
            raise UserError(f"unknown camera {camera!r}; {dataset} has {known}")
        self._camera = camera
        self._unit_m = depth_unit_m
        self._K = np.asarray(K, dtype=np.float64)
        self._T = np.eye(4) if T_world_cam is None else np.asarray(T_world_cam, dtype=np.float64)
        self._depth = None if depth is None else self._depth_feature(depth)
        features = self._reader.info["features"]
        key = next(key for key in camera_features(features) if camera_name(key) == camera)
        _check_centre(self._K, image_size(features[key]), f"{dataset}, {camera}")

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
            raise UserError(f"unknown depth camera {name!r}; {self._reader.folder} has {', '.join(features)}")
        if features[found[0]]["dtype"] == "video" and not is_depth(features[found[0]]):
            raise UserError(
                f"{found[0]} is stored as 8-bit video, which is too coarse; store depth as 16-bit images or as numbers"
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
