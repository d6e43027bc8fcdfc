"""The video frames shown to a Qwen-VL model, selected and resized like in qwen-vl-utils.

The rules are the library's own functions. Only the loop is written here: each frame is resized as soon as it is
decoded, so that a video costs the memory of its small frames and one large one, where the library holds all of them in
full size.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

from mmrl.errors import UserError
from mmrl.hub.compat import ensure_torchvision
from mmrl.hub.images import MAX_IMAGE_PIXELS
from mmrl.hub.video_reading import VideoError, VideoIndex, decode_frames, read_index

if TYPE_CHECKING:
    from PIL import Image
    from torch import Tensor

Frames = tuple[Any, dict[str, Any]]
"""Frames (T, 3, height, width) float32 0..255, and fps, frames_indices and total_num_frames of the whole video."""

PIXEL_OPTIONS = ("min_pixels", "max_pixels", "total_pixels", "resized_height", "resized_width")
FILE_OPTIONS = ("fps", "nframes", "min_frames", "max_frames", "video_start", "video_end", *PIXEL_OPTIONS)
"""Options of a video file, with the names used by qwen-vl-utils."""
FRAME_LIST_OPTIONS = ("sample_fps", "raw_fps", "max_frames", *PIXEL_OPTIONS)
"""Options of a list of frames."""
RANGE = ("video_start", "video_end")
GRID_HZ = 1000
"""Grid points per second used to select frames of variable-rate videos."""


def sample_file(path: str, options: Mapping[str, Any], patch_size: int, max_pixels: int = MAX_IMAGE_PIXELS) -> Frames:
    """Decode and resize the frames of a file that are shown to the model.

    Without options 2 frames a second, 4 to 768 of them, an even number, each of 128 to 768 tokens.

    Source: QwenLM/Qwen3-VL qwen-vl-utils/src/qwen_vl_utils/vision_process.py (the decord reader, `fetch_video`).
    """
    import torch

    library = qwen_vl_utils()
    index = read_index(path, max_pixels)
    if not index.constant:
        return _sample_by_time(library, index, options, patch_size)
    with _asked():
        start, end, span = library.calculate_video_frame_range(dict(options), index.total, index.fps)
        few = span < library.FRAME_FACTOR
        count = library.FRAME_FACTOR if few else library.smart_nframes(dict(options), span, index.fps)
    numbers = torch.linspace(start, end, count).round().long().tolist()
    metadata = {"fps": index.fps, "frames_indices": numbers, "total_num_frames": max(span, count)}
    return _decoded(library, index, numbers, options, patch_size), metadata


def _sample_by_time(library: Any, index: VideoIndex, options: Mapping[str, Any], patch_size: int) -> Frames:
    """Choose frames of a variable rate as if the file had one every 1 / GRID_HZ seconds.

    Processors derive times from frames_indices / fps: these are points of the grid, not indices in the file. A frame
    has the time at which it appears; chosen again because nothing new has come, it has the time of the choice.
    """
    import torch

    first_s = index.times_s[0]
    total = max(library.FRAME_FACTOR, round((index.end_s - first_s) * GRID_HZ))
    asked = {**options, **{name: max(0.0, options[name] - first_s) for name in RANGE if name in options}}
    with _asked():
        start, end, span = library.calculate_video_frame_range(asked, total, float(GRID_HZ))
        count = library.smart_nframes(asked, span, float(GRID_HZ))
    chosen_s = [first_s + point / GRID_HZ for point in torch.linspace(start, end, count, dtype=torch.float64).tolist()]
    numbers = [index.frame_at(time_s) for time_s in chosen_s]
    times_s = [
        chosen if number in numbers[:place] else index.times_s[number]
        for place, (number, chosen) in enumerate(zip(numbers, chosen_s, strict=True))
    ]
    metadata = {
        "fps": float(GRID_HZ),
        "frames_indices": [round(time_s * GRID_HZ) for time_s in times_s],
        "total_num_frames": span,
    }
    return _decoded(library, index, numbers, options, patch_size), metadata


def _decoded(
    library: Any, index: VideoIndex, numbers: Sequence[int], options: Mapping[str, Any], patch_size: int
) -> Tensor:
    import torch

    images = (torch.from_numpy(frame).permute(2, 0, 1) for frame in decode_frames(index, numbers))
    return _resized(library, images, len(numbers), options, patch_size)


def sample_frames(images: Iterable[Image.Image], count: int, options: Mapping[str, Any], patch_size: int) -> Frames:
    """Resize a video that is given as a list of frames.

    Source: as for `sample_file`; the library first fits every frame to a multiple of the square of the patches that
    make a token, and so does this.
    """
    import numpy as np
    import torch

    library = qwen_vl_utils()
    most = options.get("max_frames", library.FPS_MAX_FRAMES)
    if not count:
        raise VideoError("empty_video", "its list of frames is empty")
    if count > most:
        raise VideoError("unusable_video", f"it is a list of {count} frames, more than max_frames={most}")
    even = library.ceil_by_factor(count, library.FRAME_FACTOR)
    factor = patch_size * library.SPATIAL_MERGE_SIZE

    def fitted() -> Iterator[Tensor]:
        for number, image in enumerate(images, start=1):
            fit = library.fetch_image({"image": image, **options}, factor)
            pixels = torch.from_numpy(np.array(fit).transpose(2, 0, 1))
            yield from [pixels] * (1 + (even - count if number == count else 0))

    rate = options.get("sample_fps", library.FPS)
    raw = options.get("raw_fps", rate)
    # the library numbers them 0, 1, ... at raw_fps too, which makes their times shorter by raw_fps / sample_fps
    places = [round(number / rate * raw) for number in range(even)]
    metadata = {"fps": raw, "frames_indices": places, "total_num_frames": even / rate * raw}
    with _asked():
        return _resized(library, fitted(), even, options, patch_size), metadata


def frame_times(frames: Frames) -> list[float]:
    """Seconds from the start of the video to each frame."""
    metadata = frames[1]
    return [number / metadata["fps"] for number in metadata["frames_indices"]]


@functools.cache
def qwen_vl_utils() -> ModuleType:
    """The library; raises UserError if it cannot be imported."""
    needed = "videos need torchvision, qwen-vl-utils and av: pip install 'mmrl-suite[vlm]'"
    if ensure_torchvision() == "absent":
        raise UserError(needed)
    try:
        return importlib.import_module("qwen_vl_utils.vision_process")
    except ModuleNotFoundError as error:
        raise UserError(f"{needed} (there is no module {error.name})") from None


@contextlib.contextmanager
def _asked() -> Iterator[None]:
    """Turn the library's refusal of options into a VideoError."""
    try:
        yield
    except VideoError:
        raise
    except (ValueError, AssertionError) as error:
        raise VideoError("unusable_video", f"its frames cannot be selected as requested: {error}") from None


def _resized(library: Any, images: Iterable[Tensor], count: int, options: Mapping[str, Any], patch_size: int) -> Tensor:
    """Frames (count, 3, h, w) float32 out of images (3, H, W) uint8 that come one at a time."""
    import torch
    from torchvision.transforms import InterpolationMode, functional

    result: Tensor | None = None
    shape: tuple[int, ...] = ()
    for number, image in enumerate(images):
        if result is None:
            shape = tuple(image.shape)
            size = _target_size(library, shape[1:], count, options, patch_size)
            result = torch.empty((count, 3, *size), dtype=torch.uint8)
        if tuple(image.shape) != shape:
            sizes = " and ".join(f"{width} x {height}" for _, height, width in (shape, image.shape))
            raise VideoError("unreadable_video", f"its frames differ in size: {sizes} pixels")
        result[number] = functional.resize(image, list(result.shape[2:]), InterpolationMode.BICUBIC, antialias=True)
    assert result is not None
    return result.float()


def _target_size(
    library: Any, size: Sequence[int], count: int, options: Mapping[str, Any], patch_size: int
) -> tuple[int, int]:
    """Height and width that `fetch_video` gives frames of a height and width."""
    factor = patch_size * library.SPATIAL_MERGE_SIZE
    with _asked():
        if "resized_height" in options and "resized_width" in options:
            wanted = (options["resized_height"], options["resized_width"])
            return library.smart_resize(*wanted, factor=factor)
        least = options.get("min_pixels", library.VIDEO_MIN_TOKEN_NUM * factor**2)
        total = options.get("total_pixels", library.MODEL_SEQ_LEN * factor**2 * 0.9)
        share = min(library.VIDEO_MAX_TOKEN_NUM * factor**2, total / count * library.FRAME_FACTOR)
        most = min(options.get("max_pixels", float("inf")), max(share, int(least * 1.05)))
        if "min_pixels" not in options and most < least:
            raise VideoError(
                "unusable_video",
                f"max_pixels={most} is below min_pixels, which is {least} by default; set min_pixels, too",
            )
        return library.smart_resize(*size, factor=factor, min_pixels=least, max_pixels=most)
