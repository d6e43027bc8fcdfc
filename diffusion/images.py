"""Captioned images to pre-train on: made by a function, or a user's own files."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray
from omegaconf import MISSING

from mmrl.errors import UserError

__all__ = ["CaptionedImage", "ImageDataConfig", "load_images", "write_images"]

PACKED = ".npz"


@dataclass(frozen=True)
class CaptionedImage:
    """One image, read when it is needed."""

    id: str
    """Place in the data."""
    caption: str
    """Its text."""
    read: Callable[[], NDArray[np.uint8]]
    """Gives RGB uint8 (h, w, 3)."""


@dataclass
class ImageDataConfig:
    """Where the captioned images lie."""

    path: str = MISSING
    """A .npz file with `images` uint8 (N, h, w, 3) and `captions`, or a .jsonl file with the columns image (a path,
    relative to the file) and prompt."""
    build: str | None = None
    """`module:function` that writes `path` when it does not exist: function(path, **build_options)."""
    build_options: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the build function."""


def write_images(path: Path | str, images: NDArray[np.uint8], captions: Sequence[str]) -> Path:
    """Write captioned images as one .npz file.

    Args:
        path: file to write; created with its folder.
        images: RGB uint8 (N, h, w, 3).
        captions: N texts.

    Returns:
        The file.

    Raises:
        ValueError: the numbers differ.
    """
    if len(images) != len(captions):
        raise ValueError(f"there are {len(images)} images and {len(captions)} captions.")
    file = Path(path)
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("wb") as handle:
        np.savez_compressed(handle, images=images, captions=np.array(captions, dtype=np.str_))
    return file


def load_images(config: ImageDataConfig) -> list[CaptionedImage]:
    """Read which images there are.

    Args:
        config: where they lie.

    Returns:
        The images; those of a .jsonl file are opened later.

    Raises:
        UserError: nothing is there, a row has no image or caption, or a file is damaged.
    """
    if not config.path or config.path == MISSING:
        raise UserError("images.path is not set: give a .npz or .jsonl file")
    from mmrl.hub.building import build_if_missing

    build_if_missing(config, "images")
    path = Path(config.path).expanduser()
    if not path.is_file():
        raise UserError(f"images.path: no such file: {path}")
    found = _read_packed(path) if path.suffix == PACKED else _read_list(path)
    if not found:
        raise UserError(f"{path} holds no images")
    return found


def _read_packed(path: Path) -> list[CaptionedImage]:
    try:
        with np.load(path) as data:
            images, captions = data["images"], data["captions"].tolist()
    except (OSError, EOFError, ValueError, KeyError, BadZipFile, zlib.error) as error:
        raise UserError(f"{path} is no file of captioned images: {error}") from error
    if images.dtype != np.uint8 or images.ndim != 4 or images.shape[3] != 3 or len(images) != len(captions):
        raise UserError(
            f"{path}: images are {images.dtype} {images.shape}, captions {len(captions)}; must be uint8 (N, h, w, 3), N"
        )
    return [CaptionedImage(f"{path.name} {n}", caption, _Stored(images, n)) for n, caption in enumerate(captions)]


def _read_list(path: Path) -> list[CaptionedImage]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read: {error}") from error
    found = []
    for number, line in enumerate(lines, start=1):
        place = f"{path.name} line {number}"
        try:
            row = json.loads(line)
            file, caption = path.parent / row["image"], str(row["prompt"])
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"{place}: expected an object with image and prompt ({error!r})") from error
        if not file.is_file():
            raise UserError(f"{place}: no such image: {file}")
        found.append(CaptionedImage(place, caption, _File(file)))
    return found


@dataclass(frozen=True)
class _Stored:
    images: NDArray[np.uint8]
    row: int

    def __call__(self) -> NDArray[np.uint8]:
        pixels: NDArray[np.uint8] = self.images[self.row]
        return pixels


@dataclass(frozen=True)
class _File:
    path: Path

    def __call__(self) -> NDArray[np.uint8]:
        from PIL import Image

        try:
            with Image.open(self.path) as image:
                return np.asarray(image.convert("RGB"))
        except OSError as error:
            raise UserError(f"{self.path} cannot be read as an image: {error}") from error
