"""Images as (H, W, 3) uint8 RGB, whatever an environment draws them as."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

MAX_SIDE = 16_384
"""Pixels."""


class MalformedError(ValueError):
    """An environment returned something of an unknown form; the message says what and why."""


def as_image(value: Any) -> NDArray[np.uint8]:
    """Convert a grey, RGB or RGBA uint8 array or a PIL image to a copy (H, W, 3) RGB; transparency lies over white."""
    if hasattr(value, "convert") and hasattr(value, "getbands"):  # PIL, without importing it
        value = np.asarray(value.convert("RGBA" if "A" in value.getbands() or "transparency" in value.info else "RGB"))
    if isinstance(value, (str, bytes, dict)) or value is None:
        raise MalformedError(f"an image is a {type(value).__name__}; expected (H, W, 3) uint8 or a PIL image")
    try:
        image = np.asarray(value)
    except (TypeError, ValueError) as error:
        raise MalformedError(f"an image cannot be made an array: {error}") from None
    if image.ndim == 2:
        image = image[:, :, None]
    if image.ndim != 3 or image.shape[2] not in (1, 3, 4) or not image.size or max(image.shape) > MAX_SIDE:
        raise MalformedError(f"an image has the shape {np.shape(value)}; expected (H, W, 3){_shape_advice(image)}")
    if image.dtype != np.uint8:
        advice = "; multiply it by 255 and round it, if it lies in 0 to 1" if image.dtype.kind == "f" else ""
        raise MalformedError(f"an image is {image.dtype}; expected uint8, 0 to 255{advice}")
    if image.shape[2] == 1:
        return np.repeat(image, 3, axis=2)
    if image.shape[2] == 4:
        opacity = image[:, :, 3:].astype(np.uint32)
        over_white = image[:, :, :3] * opacity + 255 * (255 - opacity)
        return ((over_white + 127) // 255).astype(np.uint8)
    return np.array(image, order="C")  # a copy: the environment may draw into its buffer again


def _shape_advice(image: NDArray[Any]) -> str:
    if image.ndim == 3 and image.shape[0] in (1, 3, 4) and image.shape[2] not in (1, 3, 4):
        return "; the channels come last: image.transpose(1, 2, 0)"
    if image.ndim == 3 and image.size and max(image.shape) > MAX_SIDE:
        return f" of at most {MAX_SIDE} pixels a side"
    return " of at least one pixel" if not image.size else ""
