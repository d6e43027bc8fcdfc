"""Compressibility of an image: a reward that ignores the content, to demonstrate reward hacking."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from mmrl.errors import UserError

QUALITY = 95


def jpeg_incompressibility(prompts: Sequence[str], completions: Sequence[NDArray[np.uint8]], **_: Any) -> list[float]:
    """Reward images (H, W, 3) uint8 whose JPEG file is large.

    Source: DDPO, arXiv 2305.13301; kvablack/ddpo-pytorch ddpo_pytorch/rewards.py.
    """
    return [jpeg_kilobytes(image) for image in completions]


def jpeg_compressibility(
    prompts: Sequence[str], completions: Sequence[NDArray[np.uint8]], *, scale: str = "ddpo", **_: Any
) -> list[float]:
    """Reward images whose JPEG file is small; option `scale`: "ddpo" for -kB, "flow_grpo" for -kB / 500.

    Source: as `jpeg_incompressibility`; the second scale is that of yifan123/flow_grpo flow_grpo/rewards.py.
    """
    if scale not in SCALES:
        raise UserError(f"jpeg_compressibility: scale is {scale!r}; use one of {', '.join(SCALES)}")
    return [-jpeg_kilobytes(image) / SCALES[scale] for image in completions]


def jpeg_kilobytes(image: NDArray[np.uint8]) -> float:
    """Size in kB of an RGB image (H, W, 3) uint8 as a JPEG file of quality 95."""
    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, format="JPEG", quality=QUALITY)
    return buffer.tell() / 1000.0


SCALES = {"ddpo": 1.0, "flow_grpo": 500.0}
