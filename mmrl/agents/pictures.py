"""Pictures as (H, W, 3) uint8 RGB, whatever an environment draws them as."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

MAX_SIDE = 16_384
"""Pixels."""


class MalformedError(ValueError):
    """Something that an environment returned has a form that nothing can be made of; the message says what and why."""


def as_picture(value: Any) -> NDArray[np.uint8]:
    """Bring a picture into one form.

    Args:
        value: (H, W, 3), (H, W, 1) or (H, W) uint8, (H, W, 4) uint8 with an opacity, or an image of PIL.

    Returns:
        (H, W, 3) RGB, row-major, of its own memory; what is not opaque lies over white.

    Raises:
        MalformedError: it is none of these, empty, or larger than 16,384 pixels on a side.
    """
    if hasattr(value, "convert") and hasattr(value, "getbands"):  # PIL, without importing it
        value = np.asarray(value.convert("RGBA" if "A" in value.getbands() or "transparency" in value.info else "RGB"))
    if isinstance(value, (str, bytes, dict)) or value is None:
        raise MalformedError(f"a picture is a {type(value).__name__}; expected (H, W, 3) uint8 or an image of PIL")
    try:
        image = np.asarray(value)
    except (TypeError, ValueError) as error:
        raise MalformedError(f"a picture cannot be made an array: {error}") from None
    if image.ndim == 2:
        image = image[:, :, None]
    if image.ndim != 3 or image.shape[2] not in (1, 3, 4) or not image.size or max(image.shape) > MAX_SIDE:
        raise MalformedError(f"a picture has the shape {np.shape(value)}; expected (H, W, 3){_advice(image)}")
    if image.dtype != np.uint8:
        raise MalformedError(f"a picture is {image.dtype}; expected uint8, 0 to 255{_scale_advice(image)}")
    return _rgb(image)


def _rgb(image: NDArray[np.uint8]) -> NDArray[np.uint8]:
    channels = image.shape[2]
    if channels == 1:
        return np.repeat(image, 3, axis=2)
    if channels == 4:
        opacity = image[:, :, 3:].astype(np.uint32)
        over_white = image[:, :, :3] * opacity + 255 * (255 - opacity)
        return ((over_white + 127) // 255).astype(np.uint8)
    return np.array(image, order="C")


def _advice(image: NDArray[Any]) -> str:
    if image.ndim == 3 and image.shape[0] in (1, 3, 4) and image.shape[2] not in (1, 3, 4):
        return "; the channels come last: image.transpose(1, 2, 0)"
    if image.ndim == 3 and image.size and max(image.shape) > MAX_SIDE:
        return f" of at most {MAX_SIDE} pixels a side"
    return " of at least one pixel" if not image.size else ""


def _scale_advice(image: NDArray[Any]) -> str:
    return "; multiply it by 255 and round it, if it lies in 0 to 1" if image.dtype.kind == "f" else ""
