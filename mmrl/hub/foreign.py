"""Check and convert values from users' environments and files, and seed the generators that they may use.

Workers load this file by its path in the environment's own Python, so it needs only Python 3.8 and numpy.
"""

from __future__ import annotations

import random
import sys
from typing import Any, NamedTuple

import numpy as np


class MalformedError(ValueError):
    """An environment returned a value in an unknown format, which the message describes."""


def as_flag(value: Any, name: str) -> bool:
    """Convert True or False, 1 or 0, given as a Python or NumPy scalar or as an array with one entry."""
    try:
        number = np.asarray(value)
    except (TypeError, ValueError):
        number = np.asarray(None)
    # True of an array with one entry, but not of a text such as "False"
    if number.size == 1 and number.dtype.kind in "biuf" and number.item() in (0, 1):
        return bool(number.item())
    raise MalformedError(f"{name} is {value!r:.80}; expected True or False")


def as_number(value: Any, name: str) -> float:
    """Convert a number, given as a Python or NumPy scalar or as an array with one entry; it may be NaN."""
    try:
        number = np.asarray(value)
    except (TypeError, ValueError):
        number = np.asarray(None)
    if number.size == 1 and number.dtype.kind in "biuf":
        return float(number.item())
    raise MalformedError(f"{name} is {value!r:.80}; expected a number")


def seed_globals(seed: int) -> None:
    """Seed the global generators of a process, for environments that use them."""
    random.seed(seed)
    # NumPy's global seed has 32 bits
    np.random.seed(seed % (1 << 32))
    torch = sys.modules.get("torch")  # it is seeded where the environment has imported it
    if torch is not None and hasattr(torch, "manual_seed"):
        torch.manual_seed(seed)


MAX_SIDE = 16_384
"""Maximum side of an image in pixels."""
CLEAR = ("RGBA", "LA", "PA", "La", "RGBa")
"""Modes of PIL images with transparency."""


class ImageForm(NamedTuple):
    """Layout and range of an image in a Gymnasium space."""

    channels_first: bool = False
    """Whether the shape is (C, H, W)."""
    white: float = 255.0
    """Maximum value (white); the minimum is 0."""
    dtype: str = "uint8"


def image_form(space: Any) -> ImageForm | None:
    """How a Box stores an image; None if it does not contain one.

    An image is (H, W, C) with 1, 3 or 4 channels, (C, H, W) with 1 or 3, or a grey (H, W) of uint8; uint8 from 0 to 255
    or 1, or 3 or 4 channels of floats from 0 to 1 or 255.
    """
    shape, dtype = tuple(getattr(space, "shape", None) or ()), getattr(space, "dtype", None)
    # channels last wins: (3, H, 3) could be either
    last = len(shape) == 3 and shape[2] in (1, 3, 4)
    first = len(shape) == 3 and shape[0] in (1, 3) and not last
    flat = len(shape) == 2 and min(shape) > 1
    if dtype is None or not (last or first or flat) or not (hasattr(space, "low") and hasattr(space, "high")):
        return None
    # the largest bound says whether the range ends at 1 or 255
    white = float(np.max(space.high))
    if dtype == np.uint8:
        return ImageForm(first, 1.0 if white == 1 else 255.0)
    coloured = (last or first) and shape[-1 if last else 0] > 1
    bounded = white in (1, 255) and not np.any(space.low) and bool(np.all(space.high == white))
    floats = np.dtype(dtype).kind == "f"
    return ImageForm(first, white, str(np.dtype(dtype))) if floats and coloured and bounded else None


def as_image(value: Any, form: ImageForm | None = None) -> np.ndarray:
    """Convert a grey, RGB or RGBA array or a PIL image to a copy (H, W, 3) uint8 RGB, transparency as white.

    Args:
        value: uint8 from 0 to 255 with the channels last, or what the form says. Nothing is cast before it is checked.
        form: of the space that declares it; None if none does.

    Raises:
        MalformedError: it is none of these; the message names shape and dtype.
    """
    if hasattr(value, "convert") and hasattr(value, "getbands"):  # PIL, without importing it
        try:
            return np.array(to_rgb(value))
        except MalformedError as error:
            raise MalformedError(f"an image has {error}") from None
    if isinstance(value, (str, bytes, dict)) or value is None:
        raise MalformedError(f"an image is a {type(value).__name__}; expected (H, W, 3) uint8 or a PIL image")
    try:
        image = np.asarray(value)
    except (TypeError, ValueError) as error:
        raise MalformedError(f"an image cannot be converted to an array: {error}") from None
    form = form or ImageForm()
    # a declared layout decides; without one, channels are last
    if form.channels_first and image.ndim == 3:
        image = image.transpose(1, 2, 0)
    if image.ndim == 2:
        image = image[:, :, None]
    if image.ndim != 3 or image.shape[2] not in (1, 3, 4) or not image.size or max(image.shape) > MAX_SIDE:
        raise MalformedError(f"an image has the shape {np.shape(value)}; expected (H, W, 3){_shape_advice(image)}")
    image = _bytes(image, form)
    if image.shape[2] == 1:
        return np.repeat(image, 3, axis=2)
    if image.shape[2] == 4:
        opacity = image[:, :, 3:].astype(np.uint32)
        # alpha over white, in whole numbers and rounded: the same on every machine
        over_white = image[:, :, :3] * opacity + 255 * (255 - opacity)
        return ((over_white + 127) // 255).astype(np.uint8)
    return np.array(image, order="C")  # a copy: the environment may draw into its buffer again


def to_rgb(image: Any) -> Any:
    """Convert a PIL image to RGB: transparency as white, 16-bit greys scaled rather than clipped."""
    try:
        # 16-bit greys: PIL's convert("L") would clip them at 255
        if image.mode.startswith("I"):
            low, high = image.convert("F").getextrema()
            if low < 0 or high > 65535:
                raise ValueError(f"32-bit values from {low:g} to {high:g}; save it with 8 or 16 bits")
            return image.convert("F").point(lambda value: value * (1 / 257)).convert("L").convert("RGB")
        if image.mode == "F":
            raise ValueError("the range of floating-point pixels is unknown; save it with 8 bits per channel")
        # a palette may have a transparent colour without an alpha channel
        if image.mode in CLEAR or "transparency" in image.info:
            clear = image.convert("RGBA")
            white = clear.convert("RGB")
            white.paste((255, 255, 255), (0, 0, *clear.size))
            white.paste(clear, mask=clear.getchannel("A"))
            return white
        return image.convert("RGB")
    except (ValueError, OSError) as error:
        raise MalformedError(f"mode {image.mode}: {error}") from None


def _bytes(image: np.ndarray, form: ImageForm) -> np.ndarray:
    """(H, W, C) uint8 from 0 to 255 of the values of a form."""
    expected = "uint8, 0 to 255" if form == ImageForm() else f"{form.dtype}, 0 to {form.white:g}"
    what = f"an image of shape {image.shape} has type {image.dtype}"
    floats = image.dtype.kind == "f"
    # floats where integers are declared, or the reverse, is a mistake in range
    if floats != (np.dtype(form.dtype).kind == "f") or not (floats or image.dtype == np.uint8):
        advice = "; if its values are in 0 to 1, multiply by 255 and round" if floats else ""
        raise MalformedError(f"{what}; expected {expected}{advice}")
    # already in range: any uint8 is
    if image.dtype == np.uint8 and form.white == 255:
        return image
    low, high = float(image.min()), float(image.max())
    if not (low >= 0 and high <= form.white * (1 + 1e-6)):  # NaN fails too
        raise MalformedError(f"{what} with values from {low:g} to {high:g}; expected {expected}")
    return np.rint(np.clip(image * (255 / form.white), 0, 255)).astype(np.uint8)


def _shape_advice(image: np.ndarray) -> str:
    if image.ndim == 3 and image.shape[0] in (1, 3, 4) and image.shape[2] not in (1, 3, 4):
        return "; the channels come last: image.transpose(1, 2, 0)"
    if image.ndim == 3 and image.size and max(image.shape) > MAX_SIDE:
        return f" of at most {MAX_SIDE} pixels per side"
    return " of at least one pixel" if not image.size else ""
