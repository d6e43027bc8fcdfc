"""Captioned images for pre-training, from a build function or your own files."""

from __future__ import annotations

import math
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from omegaconf import MISSING

from diffusion.data.prompts import MAX_PROMPT_CHARS
from mmrl.errors import UserError
from mmrl.fields import is_text, rare
from mmrl.files import is_file, replaced
from mmrl.hub.building import BuiltPath
from mmrl.hub.foreign import to_rgb
from mmrl.hub.images import check_pixels, decode_image, image_pixels_option, read_image_file
from mmrl.hub.tables import LINES, READERS, ArrowImage, DataRow, built_path, good_rows, media_folder

PACKED = ".npz"


@dataclass(frozen=True)
class CaptionedImage:
    """One image, read when it is needed."""

    id: str
    """Position in the data."""
    caption: str
    """The caption."""
    read: Callable[[], NDArray[np.uint8]]
    """Returns RGB uint8 (h, w, 3), or (F, h, w, 3) for a video."""


@dataclass
class ImageDataConfig(BuiltPath):
    """Location of the captioned images."""

    path: str = MISSING
    """A .npz file with `images` uint8 (N, h, w, 3), or (N, F, h, w, 3) for videos, and `captions`; or a .jsonl, .json,
    .parquet or .csv file or a dataset folder, with the columns image (a path relative to the data, or in tables the
    image itself) and prompt."""
    max_image_pixels: int = rare(image_pixels_option())
    """Maximum number of pixels of an image, checked in the file header before decoding."""


def write_images(path: Path | str, images: NDArray[np.uint8], captions: Sequence[str]) -> Path:
    """Write captioned images as one .npz file.

    Args:
        path: file to write; created with its folder.
        images: RGB uint8 (N, h, w, 3), or (N, F, h, w, 3) of videos.
        captions: N texts.

    Returns:
        The file.

    Raises:
        ValueError: the numbers differ.
    """
    if len(images) != len(captions):
        raise ValueError(f"there are {len(images)} images and {len(captions)} captions.")
    file = Path(path)
    with replaced(file) as draft, draft.open("wb") as handle:
        np.savez_compressed(handle, images=images, captions=np.array(captions, dtype=np.str_))
    return file


def load_images(config: ImageDataConfig) -> list[CaptionedImage]:
    """List the available images.

    Args:
        config: where they are.

    Returns:
        The images; those of a .jsonl file are opened later.

    Raises:
        UserError: nothing is there, a row has no image or caption, or a file is damaged.
    """
    path = readable(config, "images")
    found = _read_packed(path, config) if path.suffix == PACKED else _read_list(path, config)
    if not found:
        raise UserError(f"{path} contains no images")
    return found


def _read_packed(path: Path, config: ImageDataConfig) -> list[CaptionedImage]:
    arrays = read_arrays(path, ("images",), (), "captioned images", config.max_image_pixels, "images")
    captions = arrays["captions"].tolist()
    for number, caption in enumerate(captions):
        check_caption(f"{path.name} {number}", caption)
    images = arrays["images"]
    return [CaptionedImage(f"{path.name} {n}", caption, PackedImage(images, n)) for n, caption in enumerate(captions)]


def read_arrays(
    path: Path, sides: Sequence[str], numbers: Sequence[str], content: str, max_pixels: int, key: str
) -> dict[str, NDArray[Any]]:
    """Read captions, images and any numbers from a .npz file; sizes are checked before memory is allocated.

    `sides` names the arrays of images uint8 (N, h, w, 3), `numbers` those of N numbers that may be there; `content` and
    the option's section `key` are for messages.
    """
    try:
        with zipfile.ZipFile(path) as packed:
            # optional columns of numbers
            known = [name for name in numbers if f"{name}.npy" in packed.namelist()]
            heads = {name: _array_header(packed, f"{name}.npy") for name in (*sides, "captions", *known)}
    except Exception as error:  # zipfile, zlib and the parser of NumPy's headers each raise their own kinds
        raise UserError(f"{path} is not a valid file of {content}: {error}") from error
    shape = heads[sides[0]][0]
    fits = len(shape) in (4, 5) and shape[-1] == 3 and all(heads[name] == (shape, np.uint8) for name in sides)
    if (
        not fits
        or any(heads[name][0] != shape[:1] for name in ("captions", *known))
        # texts as fixed-width Unicode: object arrays would need pickle
        or heads["captions"][1].kind != "U"
    ):
        found = ", ".join(f"{name} {dtype} {size}" for name, (size, dtype) in heads.items())
        raise UserError(
            f"{path}: {found}; {' and '.join(sides)} must be uint8 (N, h, w, 3), or (N, F, h, w, 3) "
            "of videos, with N texts and numbers"
        )
    try:
        check_pixels(shape[-2], shape[-3], max_pixels, f"{key}.max_image_pixels")
        # a pickle runs code when it is loaded
        with np.load(path, allow_pickle=False) as data:
            return {name: data[name] for name in heads}
    except (OSError, EOFError, ValueError, KeyError, MemoryError, zipfile.BadZipFile, zlib.error) as error:
        raise UserError(f"{path} is not a valid file of {content}: {error or type(error).__name__}") from error


def _array_header(packed: zipfile.ZipFile, name: str) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Shape and type of an array, checked against its stored bytes."""
    with packed.open(name) as content:
        version = np.lib.format.read_magic(content)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, _, dtype = read(content)
        stored = packed.getinfo(name).file_size - content.tell()
    # a header may claim more than is stored, and np.load would take memory for it first
    if dtype.hasobject or math.prod(shape) * dtype.itemsize != stored:
        raise ValueError(f"{name} declares {dtype} {shape}, but contains {stored} bytes")
    return shape, dtype


def readable(config: Any, key: str) -> Path:
    """File or folder of a configuration with `path` and `build`, built if missing; `key` is the option's section."""
    path = built_path(config, key, "a .npz, .jsonl, .json, .parquet or .csv file, or a dataset folder")
    if not path.exists():
        raise UserError(f"{key}.path: file not found: {path}")
    return path


def read_list(path: Path) -> Iterator[DataRow]:
    """The rows of a list of image files; raises UserError at the first invalid one."""
    if not path.is_dir() and path.suffix.lower() not in (LINES, *READERS):
        raise UserError(
            f"{path}: unsupported extension {path.suffix!r}; use a .npz, .jsonl, .json, .parquet or .csv file, or a "
            "dataset folder"
        )
    return good_rows(str(path))


def check_caption(place: str, caption: str) -> None:
    """Reject a caption that is not valid text or is too long; raises UserError."""
    if not is_text(caption):
        raise UserError(f"{place}: the caption contains a NUL or half of a surrogate pair, so it is not valid text")
    if len(caption) > MAX_PROMPT_CHARS:
        raise UserError(f"{place}: the caption has {len(caption)} characters, more than {MAX_PROMPT_CHARS}")


def _read_list(path: Path, config: ImageDataConfig) -> list[CaptionedImage]:
    found = []
    for row in read_list(path):
        cell, caption = row.cells.get("image"), row.cells.get("prompt")
        if not isinstance(cell, str | ArrowImage) or not isinstance(caption, str):
            columns = ", ".join(row.cells)
            raise UserError(
                f"{row.place}: expected the text prompt and image, a path or an image inside the table, but it has "
                f"{columns}"
            )
        check_caption(row.place, caption)
        image = ImageFile.of(cell, media_folder(path), config.max_image_pixels)
        if image is None:
            raise UserError(f"{row.place}: image not found: {media_folder(path) / str(cell)}")
        found.append(CaptionedImage(row.place, caption, image))
    return found


@dataclass(frozen=True)
class PackedImage:
    """One image or video from an array."""

    images: NDArray[np.uint8]
    row: int

    def __call__(self) -> NDArray[np.uint8]:
        """RGB uint8 (h, w, 3) or (F, h, w, 3)."""
        pixels: NDArray[np.uint8] = self.images[self.row]
        return pixels


@dataclass(frozen=True)
class ImageFile:
    """An image file, or an image inside a table, opened when called."""

    source: Path | ArrowImage
    max_pixels: int

    @classmethod
    def of(cls, cell: Any, folder: Path, max_pixels: int) -> ImageFile | None:
        """The image of a list's cell, whose paths are relative to `folder`; None if there is none."""
        if isinstance(cell, ArrowImage):
            return cls(replace(cell, folder=folder), max_pixels)
        file = folder / cell if isinstance(cell, str) and cell else None
        return cls(file, max_pixels) if file is not None and is_file(file) else None

    def __call__(self) -> NDArray[np.uint8]:
        """RGB uint8 (h, w, 3); raises UserError if it cannot be read."""
        try:
            return np.asarray(to_rgb(decode_image(self.content(), self.max_pixels, "images.max_image_pixels")))
        except (OSError, ValueError) as error:
            raise UserError(f"{self} cannot be read as an image: {error}") from error

    def content(self) -> bytes:
        """Bytes of the image file; raises OSError or ValueError."""
        stored: Any = self.source.read() if isinstance(self.source, ArrowImage) else self.source
        if isinstance(stored, Mapping):
            stored = stored["path"] if stored["bytes"] is None else stored["bytes"]
        if isinstance(stored, str | Path):
            return read_image_file(Path(stored), self.max_pixels)
        if not isinstance(stored, bytes):
            raise ValueError("the cell contains neither bytes nor a path")
        return stored

    def __str__(self) -> str:
        """Where the image is, for messages."""
        cell = self.source
        return f"column {cell.column} of row {cell.row + 1}" if isinstance(cell, ArrowImage) else str(cell)
