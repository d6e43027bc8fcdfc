"""Images of an episode: cut out of a video of many episodes, or as PNG; depth as TIFF or as a video of 12-bit codes.

A depth image is in whole millimetres (uint16) or metres (float32), as the feature's `depth_unit` defines. A depth video
has codes q = 0..4095, by default over the logarithm, which is finer near the camera: with a shift s and the bounds a
and b in metres, d = exp(log(a + s) + q / 4095 (log(b + s) - log(a + s))) - s. With lerobot's a = 0.01, b = 10 and
s = 3.5 a step is 1.2 mm near and 4.4 mm far away. Values beyond the bounds, such as 0 for "not measured", are clipped.
The codes are encoded without loss, HEVC in gray12le.

Source: huggingface/lerobot 0.6.1, src/lerobot/datasets/depth_utils.py, src/lerobot/configs/video.py.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from mmrl.errors import UserError
from mmrl.hub.foreign import to_rgb
from mmrl.hub.images import decode_image
from mmrl.hub.video_reading import PIXELS, VideoError, decode_from, frame_to_array, opened, video_stream
from mmrl.hub.video_writing import write_gray12_mp4

if TYPE_CHECKING:
    from numpy.typing import NDArray

DEPTH_DTYPES = {"mm": np.dtype(np.uint16), "m": np.dtype(np.float32)}
"""Type of the values by a feature's `depth_unit`."""
MOST = 4095


def read_clip(
    path: Path,
    start_s: float,
    length: int,
    fps: float,
    size: Sequence[int],
    pixels: str = "rgb24",
    times_s: NDArray[Any] | None = None,
) -> tuple[NDArray[Any], NDArray[np.bool_]]:
    """Decode T = length frames of a video from a time on, cropped to (H, W); pixels beyond are padding.

    Frame t is the one whose presentation time is nearest to start_s + times_s[t] (T,), rising; t / fps without times_s.

    Returns (T, H, W, 3) uint8, or (T, H, W) uint16 of gray12le, and (T,) whether a frame could be decoded, within half
    a frame's duration of its time; one that could not repeats the one before it, or the first that could.
    """
    height, width = size
    shape, kind = PIXELS[pixels]
    frames: NDArray[Any] = np.zeros((length, height, width, *shape), kind)
    wanted_s = start_s + (np.arange(length) / fps if times_s is None else times_s.astype(np.float64))
    off_s = np.full(length, np.inf)
    to_array = frame_to_array(pixels)
    for time_s, frame in _timed_frames(path, wanted_s[0]):
        if time_s > wanted_s[-1] + 0.5 / fps:
            break
        off = np.abs(wanted_s - time_s)
        nearer = off < np.minimum(off_s, 0.5 / fps)
        if not nearer.any():
            continue
        if frame.height < height or frame.width < width:
            raise UserError(f"{path} is {frame.width}x{frame.height}; the features say {width}x{height}")
        frames[nearer], off_s[nearer] = to_array(frame)[:height, :width], off[nearer]
    decoded = np.isfinite(off_s)
    if not decoded.any():
        raise UserError(
            f"{path} has no readable frame from {start_s:.3f} s on, although an episode of {length} frames should "
            "start there"
        )
    latest = np.maximum.accumulate(np.where(decoded, np.arange(length), -1))
    return frames[np.where(latest < 0, decoded.argmax(), latest)], decoded


def describe_video(path: Path, depth: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Size, codec, pixel format and rate of a feature's video, by lerobot's names in `meta/info.json`."""
    with opened(path) as container:
        video = video_stream(container)
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
    """Image (H, W, 3) uint8 of an image file; None if it cannot be read or has a different size (H, W)."""
    try:
        frame = np.asarray(to_rgb(decode_image(content, size[0] * size[1])))
    except (OSError, ValueError):
        return None
    return frame if frame.shape[:2] == tuple(size) else None


def decode_depth(content: bytes, size: Sequence[int]) -> NDArray[Any] | None:
    """Depth (H, W) in its stored unit and type from a TIFF or 16-bit PNG; None if it is neither."""
    try:
        depth = np.asarray(decode_image(content, size[0] * size[1], formats=("TIFF", "PNG")))
    except (OSError, ValueError):
        return None
    return depth if depth.shape == tuple(size) and depth.dtype.itemsize >= 2 else None


def _timed_frames(path: Path, start_s: float) -> Iterator[tuple[float, Any]]:
    if not path.is_file():
        raise UserError(f"the dataset lacks {path}")
    try:
        yield from decode_from(path, start_s)
    except VideoError as error:
        raise UserError(f"{path} cannot be read as a video: {error}") from error


@dataclass(frozen=True)
class DepthCodes:
    """Conversion of metres to the 12-bit codes of a video, and back."""

    depth_min: float = 0.01  # metres of code 0
    depth_max: float = 10.0  # metres of code 4095
    shift: float = 3.5  # metres added before the logarithm; the larger, the more even the steps
    use_log: bool = True  # else uniform in metres

    @classmethod
    def from_info(cls, info: Mapping[str, Any] | None) -> Self:
        """Read the codes from a feature's info; lerobot's defaults if it has none."""
        given = {name: (info or {}).get(f"video.{name}") for name in cls.__dataclass_fields__}
        codes = cls(**{name: value for name, value in given.items() if value is not None})
        numbers = (codes.depth_min, codes.depth_max, codes.shift)
        if not all(isinstance(value, int | float) and math.isfinite(value) for value in numbers):
            raise UserError(f"the depth video has {codes}; its bounds and shift must be given in metres")
        if not codes.depth_min < codes.depth_max or (codes.use_log and codes.depth_min + codes.shift <= 0):
            raise UserError(f"the depth video has {codes}; needs depth_min < depth_max and depth_min + shift > 0")
        return codes

    def to_info(self) -> dict[str, Any]:
        """Entries for a feature's info."""
        return {f"video.{name}": getattr(self, name) for name in self.__dataclass_fields__}

    def encode(self, depth_m: NDArray[np.float32]) -> NDArray[np.uint16]:
        """12-bit codes of metres of any shape, clipped to the bounds."""
        low, high = self._ends()
        clipped = np.clip(depth_m.astype(np.float64), self.depth_min, self.depth_max)
        spread = np.log(clipped + self.shift) if self.use_log else clipped
        return np.rint((spread - low) / (high - low) * MOST).astype(np.uint16)

    def decode(self, codes: NDArray[np.uint16]) -> NDArray[np.float32]:
        """Metres of codes of any shape."""
        low, high = self._ends()
        spread = low + codes.astype(np.float64) * ((high - low) / MOST)
        depth_m = np.exp(spread) - self.shift if self.use_log else spread
        return np.clip(depth_m, self.depth_min, self.depth_max).astype(np.float32)

    def _ends(self) -> tuple[float, float]:
        if not self.use_log:
            return self.depth_min, self.depth_max
        return math.log(self.depth_min + self.shift), math.log(self.depth_max + self.shift)


def depth_unit_of(values: NDArray[Any]) -> str | None:
    """Unit of depth by its type: "mm" for uint16, "m" for float32; None for other types."""
    return next((unit for unit, dtype in DEPTH_DTYPES.items() if values.dtype == dtype), None)


def metres_of(values: NDArray[Any], unit: str | None = None) -> NDArray[np.float32]:
    """Metres of stored depth of any shape: by the feature's unit "mm" or "m", or by the type if it is None."""
    metres = unit == "m" if unit else np.issubdtype(values.dtype, np.floating)
    return values.astype(np.float32) if metres else (values * 0.001).astype(np.float32)


def encode_tiff(depth: NDArray[Any]) -> bytes:
    """TIFF without loss of depth (H, W): uint16 millimetres or float32 metres."""
    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(depth)).save(buffer, format="TIFF", compression="raw")
    return buffer.getvalue()


def write_depth_mp4(path: Path, depth_m: NDArray[np.float32], fps: float, codes: DepthCodes) -> Path:
    """Write depth (T, H, W) in metres as a video of codes, without loss of a code, atomically."""
    import av

    try:
        return write_gray12_mp4(path, codes.encode(depth_m), fps)
    except (ValueError, av.error.FFmpegError) as error:
        height, width = depth_m.shape[1:]
        raise UserError(
            f"depth of {width}x{height} cannot be encoded: this PyAV lacks libx265 with gray12le, or does not "
            "support images this small; store depth as images with robot_features(..., video=False)"
        ) from error
