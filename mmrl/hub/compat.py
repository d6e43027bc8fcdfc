"""Work-arounds for the installed torchvision and qwen-vl-utils, applied only where they are needed.

Linux x86-64 wheels of torchvision on the package index are CUDA builds. Beside a CPU build of torch their
compiled operators do not load, and the Python part then stops at the first operator it wants to describe.
Declaring the schema of the missing operators is enough: nothing in this suite calls them.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any

from mmrl.errors import UserError
from mmrl.hub.images import MAX_IMAGE_PIXELS, check_pixels

__all__ = ["TORCHVISION_STATES", "Frames", "ensure_torchvision", "quiet_transformers", "vision_info"]

Frames = tuple[Any, dict[str, Any]]
"""A sampled video: frames (T, 3, height, width) 0..255 and what is known of their times."""

_MISSING_OPERATOR = re.compile(r"operator (torchvision::\w+) does not exist")
_OPERATOR_SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
_CPU_WHEEL = "pip install --index-url https://download.pytorch.org/whl/cpu torchvision"
_MOST_OPERATORS = 16


@functools.cache
def ensure_torchvision() -> str:
    """Make `import torchvision` work beside the installed torch, once per process.

    Call it before anything that imports torchvision: image processors, peft, qwen_vl_utils.

    Returns:
        A row of `TORCHVISION_STATES`: "native", "patched" or "absent".

    Raises:
        UserError: torchvision is installed but cannot be imported for another reason.
    """
    for attempt in range(_MOST_OPERATORS):
        try:
            importlib.import_module("torchvision")
        except ModuleNotFoundError as error:
            if error.name != "torchvision":
                raise UserError(f"torchvision is installed but needs the module {error.name}") from error
            return "absent"
        except (ImportError, OSError, RuntimeError) as error:
            _declare_operator(error)
        else:
            return "native" if attempt == 0 else "patched"
    raise UserError(f"torchvision misses more than {_MOST_OPERATORS} operators; reinstall it: {_CPU_WHEEL}")


def _declare_operator(error: Exception) -> None:
    """Declare the operator that an import error names, and forget the half-imported package."""
    import torch
    from torch import library

    missing = _MISSING_OPERATOR.search(str(error))
    if missing is None:
        raise UserError(
            f"torchvision cannot be imported beside torch {torch.__version__}: {error}; "
            f"install the release that goes with it, without a GPU by: {_CPU_WHEEL}"
        ) from error
    for name in [key for key in sys.modules if key == "torchvision" or key.startswith("torchvision.")]:
        del sys.modules[name]
    library.define(missing.group(1), _OPERATOR_SCHEMA)


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """Switch off the progress bars that transformers draws for every weight file it reads or writes."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def vision_info(messages: Sequence[Mapping[str, Any]], patch_size: int) -> tuple[list[Any] | None, list[Frames] | None]:
    """Load the images and videos that chat messages carry, with qwen-vl-utils where it can be imported.

    Args:
        messages: chat turns whose content items carry their media: {"type": "image", "image": path or PIL image}
            or {"type": "video", "video": path or frames, "fps": ..., "max_pixels": ...}.
        patch_size: pixels on a side of one patch of the vision tower: 14 for Qwen2.5-VL, 16 for Qwen3-VL.

    Returns:
        PIL images and sampled videos, in order; None where there are none.

    Raises:
        UserError: a video is given and qwen-vl-utils is not usable.
    """
    items = [item for message in messages for item in _media(message)]
    if not items:
        return None, None
    library = _qwen_vl_utils()
    if library is None:
        return _pil_images(items), None
    images, videos, _ = library.process_vision_info(
        list(messages), return_video_kwargs=True, return_video_metadata=True, image_patch_size=patch_size
    )
    return images, videos


def _media(message: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    content = message["content"]
    if isinstance(content, str):
        return []
    return [item for item in content if item.get("type") in ("image", "video")]


def _pil_images(items: Sequence[Mapping[str, Any]]) -> list[Any] | None:
    from PIL import Image

    if any(item["type"] == "video" for item in items):
        raise UserError("videos need torchvision, qwen-vl-utils and av: pip install 'mmrl-suite[vlm]'")
    sources = [item["image"] for item in items]
    return [(source if isinstance(source, Image.Image) else Image.open(source)).convert("RGB") for source in sources]


@functools.cache
def _qwen_vl_utils() -> ModuleType | None:
    """The library with the PyAV reader as its only video reader, or None where it cannot be imported."""
    if ensure_torchvision() == "absent":
        return None
    try:
        library: Any = importlib.import_module("qwen_vl_utils.vision_process")
    except ModuleNotFoundError:
        return None
    # Its own chooser takes torchcodec whenever that is installed, also where no system FFmpeg can be loaded,
    # and then falls back to a torchvision function that recent releases no longer have.
    library.VIDEO_READER_BACKENDS |= {"pyav": _read_video, "torchvision": _read_video}
    library.FORCE_QWENVL_VIDEO_READER = "pyav"
    library.get_video_reader_backend = lambda: "pyav"  # the original prints on every first use
    return library


def _read_video(element: dict[str, Any]) -> tuple[Any, dict[str, Any], float]:
    """Decode the frames that qwen-vl-utils asks for.

    Args:
        element: content item with "video" (path) and optionally fps, nframes, video_start, video_end.

    Returns:
        Frames (T, 3, height, width) uint8, metadata, frames per second of the sample.

    Source: QwenLM/Qwen3-VL qwen-vl-utils/src/qwen_vl_utils/vision_process.py (the decord reader's sampling).
    """
    import torch

    library = sys.modules["qwen_vl_utils.vision_process"]
    path = str(element["video"]).removeprefix("file://")
    total, fps = _count_frames(path)
    start, end, span = library.calculate_video_frame_range(element, total, fps)
    count = library.smart_nframes(element, total_frames=span, video_fps=fps)
    indices = torch.linspace(start, end, count).round().long().tolist()
    metadata = {
        "fps": fps,
        "frames_indices": indices,
        "total_num_frames": span,
        "video_backend": "pyav",
    }
    return _decode_frames(path, indices), metadata, count / max(span, 1e-6) * fps


def _count_frames(path: str) -> tuple[int, float]:
    """Frames and frames per second; containers without an index are counted by reading their packets."""
    import av

    with av.open(path) as container:
        stream = container.streams.video[0]
        check_pixels(stream.codec_context.width, stream.codec_context.height, MAX_IMAGE_PIXELS)
        fps = float(stream.average_rate or stream.guessed_rate or 0)
        total = stream.frames or sum(1 for packet in container.demux(stream) if packet.size)
    return total, fps


def _decode_frames(path: str, indices: Sequence[int]) -> Any:
    import av
    import numpy as np
    import torch

    wanted = set(indices)
    frames: dict[int, Any] = {}
    with av.open(path) as container:
        for number, frame in enumerate(container.decode(video=0)):
            if number in wanted:
                frames[number] = frame.to_ndarray(format="rgb24")
            if len(frames) == len(wanted):
                break
    if not frames:
        raise OSError(f"{path}: no frame could be decoded")
    # a container may promise more frames than it decodes to; the last one stands for the rest
    last = frames[max(frames)]
    stacked = np.stack([frames.get(index, last) for index in indices])
    return torch.from_numpy(stacked).permute(0, 3, 1, 2).contiguous()


TORCHVISION_STATES = {
    "native": "torchvision imports as installed",
    "patched": "torchvision's compiled operators do not load beside this torch; their schemas are declared instead",
    "absent": "torchvision is not installed; images work through Pillow, videos do not",
}
