"""Images of an episode: cut out of a video of many episodes, or as PNG, and TIFF for depth."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mmrl.errors import UserError
from mmrl.hub.images import MAX_IMAGE_PIXELS, ImageError, check_pixels, decode_image
from mmrl.hub.video_reading import frame_to_array

if TYPE_CHECKING:
    from numpy.typing import NDArray


def read_clip(
    path: Path, start_s: float, length: int, fps: float, size: Sequence[int], pixels: str = "rgb24"
) -> tuple[NDArray[Any], NDArray[np.bool_]]:
    """Decode one episode's part of a video.

    Args:
        path: of the video.
        start_s: seconds from the beginning of the video to the episode's first frame.
        length: T.
        fps: frames a second.
        size: (H, W) pixels; what the video has beyond them is padding.
        pixels: rgb24, or gray12le for the codes of depth.

    Returns:
        (T, H, W, 3) uint8, or (T, H, W) uint16 of gray12le, and (T,) whether a frame could be decoded; one that could
        not repeats the one before it, or the first that could.
    """
    height, width = size
    shape, kind = PIXELS[pixels]
    frames: NDArray[Any] = np.zeros((length, height, width, *shape), kind)
    decoded = np.zeros(length, np.bool_)
    to_array = frame_to_array(pixels)
    for time_s, frame in _timed_frames(path, start_s):
        index = round((time_s - start_s) * fps)
        if index >= length:
            break
        if index < 0:
            continue
        if frame.height < height or frame.width < width:
            raise UserError(f"{path} is {frame.width}x{frame.height}; the features say {width}x{height}")
        frames[index] = to_array(frame)[:height, :width]
        decoded[index] = True
    if not decoded.any():
        raise UserError(f"{path} has no readable frame from {start_s:.3f} s on, where an episode of {length} should be")
    latest = np.maximum.accumulate(np.where(decoded, np.arange(length), -1))
    return frames[np.where(latest < 0, decoded.argmax(), latest)], decoded


def describe_video(path: Path, depth: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Size, codec, pixel format and rate of a feature's video, by lerobot's names in `meta/info.json`."""
    import av

    with av.open(str(path)) as container:
        video = container.streams.video[0]
        rate = video.base_rate
        return {
            "video.height": video.height,
            "video.width": video.width,
            "video.codec": video.codec.canonical_name,
            "video.pix_fmt": video.pix_fmt,
            "video.fps": int(rate) if rate else None,
            "video.channels": 3 if depth is None else 1,
            "has_audio": False,
            **(depth or {}),
            "is_depth_map": depth is not None,
        }


def encode_png(frame: NDArray[np.uint8]) -> bytes:
    """PNG of an image (H, W, 3) uint8."""
    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(frame).save(buffer, format="PNG")
    return buffer.getvalue()


def decode_png(content: bytes, size: Sequence[int]) -> NDArray[np.uint8] | None:
    """Image (H, W, 3) uint8 of any file that Pillow reads; None where it cannot, or the size (H, W) is another."""
    try:
        frame = np.asarray(decode_image(content, size[0] * size[1]).convert("RGB"))
    except (OSError, ValueError):
        return None
    return frame if frame.shape[:2] == tuple(size) else None


def decode_depth(content: bytes, size: Sequence[int]) -> NDArray[Any] | None:
    """Depth (H, W) in stored unit and type, of a TIFF or a PNG of 16 bits; None where it cannot be read as that."""
    try:
        depth = np.asarray(decode_image(content, size[0] * size[1]))
    except (OSError, ValueError):
        return None
    return depth if depth.shape == tuple(size) and depth.dtype.itemsize >= 2 else None


def _timed_frames(path: Path, start_s: float) -> Iterator[tuple[float, Any]]:
    import av

    if not path.is_file():
        raise UserError(f"the dataset lacks {path}")
    try:
        container = av.open(str(path))
    except av.error.FFmpegError as error:
        raise UserError(f"{path} cannot be read as a video: {error}") from error
    with container:
        if not container.streams.video:
            raise UserError(f"{path} has no video in it")
        video: Any = container.streams.video[0]
        try:
            check_pixels(video.codec_context.width, video.codec_context.height, MAX_IMAGE_PIXELS)
        except ImageError as error:
            raise UserError(f"{path} cannot be decoded: {error}") from error
        # Without it the decoder conceals what is broken.
        video.codec_context.options = {"err_detect": "explode"}
        video.codec_context.thread_type = "NONE"
        # Backward to the key frame; the half millisecond is for starts that are rounded down.
        container.seek(int((start_s + 5e-4) / video.time_base), stream=video)
        packets = container.demux(video)
        while True:
            try:
                packet = next(packets)
            except (StopIteration, av.error.FFmpegError):
                return
            try:
                frames = packet.decode()
            except av.error.FFmpegError:
                continue
            for frame in frames:
                if not frame.is_corrupt and frame.pts is not None:
                    yield float(frame.pts * frame.time_base), frame


PIXELS: dict[str, tuple[tuple[int, ...], type]] = {"rgb24": ((3,), np.uint8), "gray12le": ((), np.uint16)}
"""Channels and type of a pixel in each format."""
