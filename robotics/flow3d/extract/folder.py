"""RGB-D videos from folders of images and from episodes of a LeRobotDataset."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mmrl.errors import UserError
from mmrl.files import expanded, read_json_object
from mmrl.hub.images import MAX_IMAGE_PIXELS, ImageError, check_pixels, decode_image, read_image_file
from mmrl.hub.video_reading import frame_to_array
from robotics.data.metadata import named_errors
from robotics.flow3d.extract.video import RejectedVideo, RgbdVideo
from robotics.flow3d.geometry import DepthArray, ImageArray

if TYPE_CHECKING:
    from numpy.typing import NDArray

COLOURS = (".png", ".jpg", ".jpeg")
DEPTHS = (".png", ".npy")


def read_rgbd_folder(folder: str | os.PathLike[str]) -> RgbdVideo:
    """Read a video.

        my_video/
          rgb/000000.png ...     8-bit colour, or JPEG; frames in the order of their names. Or rgb.mp4, any video that
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
    with named_errors(f"the video {place}"):
        unit = None if camera.get("depth_unit_m") is None else float(camera["depth_unit_m"])
        rgb, depth_m = _colors(place), _depths(place, unit)
        if depth_m is not None and len(depth_m) != len(rgb):
            raise UserError(f"{place} has {len(rgb)} colour frames and {len(depth_m)} of depth; they must match")
        T_world_cam = np.asarray(camera.get("T_world_cam", np.eye(4)), dtype=np.float64)
        return RgbdVideo(
            rgb=rgb,
            depth_m=depth_m,
            K=np.asarray(camera["K"], dtype=np.float64),
            T_world_cam=T_world_cam if T_world_cam.ndim == 2 else T_world_cam[0],
            T_world_cams=T_world_cam if T_world_cam.ndim == 3 else None,
            instruction=str(camera.get("instruction", "")),
            source=place.name,
        )


def _colors(place: Path) -> ImageArray:
    videos = [path for path in sorted(place.glob("rgb.*")) if path.is_file()]
    images = _files(place / "rgb", COLOURS)
    if videos and images:
        raise UserError(f"{place} has {videos[0].name} and images in rgb/; keep one of them")
    if not videos and not images:
        raise UserError(f"{place} has no frames: neither rgb.mp4 nor {', '.join(COLOURS)} in rgb/")
    return read_frames(videos[0]) if videos else np.stack([np.asarray(_image(path).convert("RGB")) for path in images])


def _depths(place: Path, unit_m: float | None) -> DepthArray | None:
    images, archive = _files(place / "depth", DEPTHS), place / "depth.npz"
    if archive.is_file():
        with np.load(archive, allow_pickle=False) as content:
            if len(content.files) != 1:
                raise UserError(f"{archive} holds {', '.join(content.files)}; must be one array (L, H, W)")
            return depth_of(content[content.files[0]], unit_m, str(archive))
    return np.stack([_depth(path, unit_m) for path in images]) if images else None


def read_frames(path: Path) -> ImageArray:
    """(L, H, W, 3) frames of a video file; raises UserError where it is none or too large."""
    import av

    try:
        with av.open(str(path)) as container:
            if not container.streams.video:
                raise UserError(f"{path} has no video in it")
            codec = container.streams.video[0].codec_context
            check_pixels(codec.width, codec.height, MAX_IMAGE_PIXELS)
            frames = list(map(frame_to_array(), container.decode(video=0)))
    except (av.error.FFmpegError, ImageError) as error:
        raise UserError(f"{path} cannot be read as a video: {error}") from error
    if not frames:
        raise UserError(f"{path} has no frame that can be decoded")
    return np.stack(frames)


def depth_of(pixels: NDArray[Any], unit_m: float | None, where: str) -> DepthArray:
    """Depth in metres: floats are metres already, integers are in units of `unit_m`."""
    if np.issubdtype(pixels.dtype, np.floating):
        return pixels.astype(np.float32)
    if pixels.dtype.itemsize < 2:
        raise UserError(f"{where} is {pixels.dtype}; depth must have 16 bits or be metres")
    if not unit_m:
        raise UserError(f'{where} holds integers, but "depth_unit_m", such as 0.001, is not given')
    return (pixels * unit_m).astype(np.float32)


def _files(folder: Path, suffixes: tuple[str, ...]) -> list[Path]:
    return sorted(path for path in folder.glob("*") if path.suffix.lower() in suffixes)


def _image(path: Path) -> Any:
    try:
        return decode_image(read_image_file(path))
    except ImageError as error:
        raise UserError(f"{path} cannot be read: {error}") from None


def _depth(path: Path, unit_m: float | None) -> DepthArray:
    pixels = np.load(path, allow_pickle=False) if path.suffix == ".npy" else np.asarray(_image(path))
    if pixels.ndim != 2:
        raise UserError(f"{path} is {pixels.dtype} {pixels.shape}; depth must be a 16-bit image of one channel")
    return depth_of(pixels, unit_m, str(path))
