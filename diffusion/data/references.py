"""Images to be edited: read with a prompt, identified by a digest of their bytes, and resized to the size of a run."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mmrl.files import is_file
from mmrl.hub.foreign import MalformedError, to_rgb
from mmrl.hub.images import ImageError, decode_image, read_image_file

LIMIT = "data.max_image_pixels"


@dataclass(frozen=True)
class ReferenceImage:
    """An image to be edited, read when it is needed."""

    source: Path | bytes
    """Path of the image file, or its content."""
    max_pixels: int
    """Maximum number of pixels to decode."""
    digest: str
    """Digest of the file's bytes; rows with the same digest share an embedding."""

    @classmethod
    def of(cls, cell: Any, folder: Path, max_pixels: int) -> ReferenceImage:
        """The image of a data cell: a path relative to `folder`, or file content; raises ImageError without one."""
        stored = cell.read() if hasattr(cell, "read") else cell
        if isinstance(stored, Mapping):
            stored = stored.get("bytes") or stored.get("path")
        if isinstance(stored, str) and stored:
            stored = folder / stored
            if not is_file(stored):
                raise ImageError(f"there is no such file: {stored}")
        if not isinstance(stored, Path | bytes):
            raise ImageError(f"expected a path or the content of a file, not {type(stored).__name__}")
        found = cls(stored, max_pixels, "")
        content = found._content()
        decode_image(content, max_pixels, LIMIT)
        return cls(stored, max_pixels, hashlib.blake2b(content, digest_size=16).hexdigest())

    def pixels(self, height: int, width: int) -> NDArray[np.uint8]:
        """RGB uint8 (height, width, 3), resized to cover this size and then center-cropped."""
        from PIL import Image, ImageOps

        try:
            image = to_rgb(decode_image(self._content(), self.max_pixels, LIMIT))
        except MalformedError as error:
            raise ImageError(str(error)) from error
        return np.asarray(ImageOps.fit(image, (width, height), Image.Resampling.LANCZOS))

    def _content(self) -> bytes:
        if isinstance(self.source, bytes):
            return self.source
        try:
            return read_image_file(self.source, self.max_pixels)
        except OSError as error:
            raise ImageError(f"{self.source} cannot be read: {error}") from error
