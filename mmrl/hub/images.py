"""Images from outside: measured by their header and refused if too large, before a pixel is decoded."""

from __future__ import annotations

import io
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mmrl.errors import UserError
from mmrl.fields import bounded
from mmrl.files import IMAGE_FORMATS, open_image_file, read_file

if TYPE_CHECKING:
    from PIL import Image

MAX_IMAGE_PIXELS = 64_000_000
"""Maximum number of pixels decoded by default: 192 MB as RGB."""
ORIENTATION = 0x0112
"""EXIF tag."""
PILLOW_LIMIT = 178_956_970
"""Limit above which Pillow itself raises an error."""
BYTES_PER_PIXEL = 16
"""Maximum file size per pixel of the limit: four uncompressed channels of 32 bits."""


class ImageError(ValueError):
    """An image that cannot be used; the message is the reason."""


def image_pixels_option() -> int:
    """The field of a configuration that limits the images it reads, with its default and bounds."""
    option: int = bounded(MAX_IMAGE_PIXELS, at_least=1, at_most=PILLOW_LIMIT)
    return option


def check_pixels(width: int, height: int, max_pixels: int, option: str = "") -> None:
    """Raise ImageError for an image or video frame with no pixels or more than `max_pixels` (the setting `option`)."""
    if width < 1 or height < 1:
        raise ImageError(f"it is {width} x {height} pixels")
    # a small file can announce pixels that fill the memory
    if width * height > max_pixels:
        tip = f" ({option})" if option else ""
        raise ImageError(f"it has {width} x {height} pixels, more than {max_pixels}{tip}; make it smaller")


def decode_image(
    content: bytes, max_pixels: int = MAX_IMAGE_PIXELS, option: str = "", formats: Sequence[str] = IMAGE_FORMATS
) -> Image.Image:
    """Decode the content of an image file, upright, unless its header announces more than `max_pixels`."""
    from PIL import Image, UnidentifiedImageError

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of large images, whose limit is here, and of damage that can be decoded
            # reads the header only
            image = open_image_file(io.BytesIO(content), formats)
            check_pixels(image.width, image.height, max_pixels, option)
            # pixels are read here, so that damage shows now and not in a training step
            image.load()
        return upright(image)
    except ImageError:
        raise
    except UnidentifiedImageError as error:
        raise ImageError(str(error)) from None
    except Image.DecompressionBombError as error:
        raise ImageError(f"it has more pixels than {max_pixels}: {error}") from None
    except Exception as error:  # Pillow's decoders raise OSError, SyntaxError, struct.error, EOFError, ...
        raise ImageError(f"{type(error).__name__}: {error}") from None


def upright(image: Image.Image) -> Image.Image:
    """A PIL image rotated according to its EXIF orientation, which is then removed."""
    from PIL import ImageOps

    # cameras store the sensor's image and a note to turn it
    return image if image.getexif().get(ORIENTATION, 1) == 1 else ImageOps.exif_transpose(image)


def read_image_file(path: Path, max_pixels: int = MAX_IMAGE_PIXELS) -> bytes:
    """Read an image file, unless it is larger than an image of `max_pixels` can be."""
    # before it is read: a file that is no image may have any size
    try:
        return read_file(path, max_pixels * BYTES_PER_PIXEL + 2**20)
    except UserError as error:
        raise ImageError(f"{error}, as an image of {max_pixels} pixels") from None


def resize_image(image: Image.Image, size: tuple[int, int]) -> Image.Image:
    """An image resized to (width, height) pixels, with the same (bicubic) resampling as qwen-vl-utils."""
    # the same filter as qwen-vl-utils, whose pixels models were trained on
    return image if image.size == tuple(size) else image.resize(size)
