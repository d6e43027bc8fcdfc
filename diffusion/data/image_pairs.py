"""Pairs of a preferred and a rejected image for the same caption, from files or a build function.

The columns are those of TRL's preference data, with images as chosen and rejected, and optionally score_chosen and
score_rejected (of a reward model) and text_quality (of the caption).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from omegaconf import MISSING

from diffusion.data.captioned_images import (
    PACKED,
    ImageFile,
    PackedImage,
    check_caption,
    read_arrays,
    read_list,
    readable,
)
from mmrl.errors import UserError
from mmrl.fields import choice, rare
from mmrl.files import replaced
from mmrl.hub.building import BuiltPath
from mmrl.hub.images import image_pixels_option
from mmrl.hub.tables import BAD_ROWS, BadRowError, DataRow, LoadedRows, media_folder

NUMBERS = ("score_chosen", "score_rejected", "text_quality")
"""Optional numeric columns of a pair."""
SIDES = ("chosen", "rejected")


@dataclass(frozen=True)
class ImagePair:
    """Two images of the same caption, read when needed."""

    id: str
    """File and row, for messages."""
    caption: str
    """The caption of both images."""
    chosen: Callable[[], NDArray[np.uint8]]
    """Returns the preferred image, RGB uint8 (h, w, 3)."""
    rejected: Callable[[], NDArray[np.uint8]]
    """Returns the rejected image."""
    numbers: Mapping[str, float] = field(default_factory=dict)
    """Values of those `NUMBERS` columns that are in the data."""

    def read(self) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
        """The preferred and the rejected image; a resume compares them to notice changed data."""
        return self.chosen(), self.rejected()


@dataclass
class ImagePairConfig(BuiltPath):
    """Location of the pairs."""

    path: str = MISSING
    """A .npz file with `captions` (N texts), `chosen` and `rejected` uint8 (N, h, w, 3), or (N, F, h, w, 3) for videos,
    and optionally the numbers score_chosen, score_rejected and text_quality, or a .jsonl, .json, .parquet or .csv file
    or a dataset folder, with the columns prompt, chosen and rejected, where the images are paths relative to the data,
    or in tables the images themselves."""
    max_image_pixels: int = rare(image_pixels_option())
    """Maximum number of pixels of an image, checked in the file header before decoding."""
    on_bad_row: str = rare(choice("error", BAD_ROWS))
    """What to do with a pair whose images are identical or missing: error stops the run; skip excludes and counts
    it."""


def write_pairs(
    path: Path | str,
    captions: Sequence[str],
    chosen: NDArray[np.uint8],
    rejected: NDArray[np.uint8],
    **numbers: Sequence[float],
) -> Path:
    """Write pairs as one .npz file.

    Args:
        path: file to write; created with its folder.
        captions: N texts.
        chosen: RGB uint8 (N, h, w, 3), the preferred images.
        rejected: RGB uint8 (N, h, w, 3).
        numbers: any of `NUMBERS`, N each.

    Returns:
        The file.

    Raises:
        ValueError: the counts differ, or a number has another name.
    """
    unknown = sorted(set(numbers) - set(NUMBERS))
    counts = {len(captions), len(chosen), len(rejected), *map(len, numbers.values())}
    if unknown or len(counts) != 1:
        raise ValueError(f"there are {sorted(counts)} entries and the numbers {unknown}; known: {', '.join(NUMBERS)}.")
    arrays: dict[str, Any] = {"captions": np.array(captions, dtype=np.str_), "chosen": chosen, "rejected": rejected}
    arrays |= {name: np.asarray(values, np.float64) for name, values in numbers.items()}
    file = Path(path)
    with replaced(file) as draft, draft.open("wb") as handle:
        np.savez_compressed(handle, **arrays)
    return file


def load_pairs(config: ImagePairConfig) -> LoadedRows[ImagePair]:
    """List the available pairs.

    Args:
        config: where they are.

    Returns:
        The pairs in file order; images of a list are opened later.

    Raises:
        UserError: nothing is there, a file is damaged, or a pair is bad and `on_bad_row` is "error".
    """
    path = readable(config, "pairs")
    loaded = LoadedRows[ImagePair](on_bad_row=config.on_bad_row, key="pairs")
    if path.suffix == PACKED:
        arrays = read_arrays(path, SIDES, NUMBERS, "pairs of images", config.max_image_pixels, "pairs")
        loaded.take(range(len(arrays["captions"])), lambda row: _packed_pair(row, arrays, path))
    else:
        loaded.take(read_list(path), lambda row: _listed_pair(row, path, config))
    loaded.check_left(path)
    return loaded


def _packed_pair(row: int, arrays: Mapping[str, NDArray[Any]], path: Path) -> ImagePair:
    place, caption = f"{path.name} {row}", str(arrays["captions"][row])
    check_caption(place, caption)
    # there is no preference between equal images
    if np.array_equal(arrays["chosen"][row], arrays["rejected"][row]):
        raise BadRowError("equal_sides", place, "both images are the same")
    chosen, rejected = (PackedImage(arrays[side], row) for side in SIDES)
    numbers = {name: float(arrays[name][row]) for name in NUMBERS if name in arrays}
    return ImagePair(place, caption, chosen, rejected, _finite(numbers, place))


def _listed_pair(row: DataRow, path: Path, config: ImagePairConfig) -> ImagePair:
    caption, *names = (row.cells.get(key) for key in ("prompt", *SIDES))
    if not isinstance(caption, str):
        raise UserError(f"{row.place}: expected the text of column prompt; the row has {', '.join(row.cells)}")
    check_caption(row.place, caption)
    chosen, rejected = (ImageFile.of(name, media_folder(path), config.max_image_pixels) for name in names)
    if chosen is None or rejected is None:
        gone = names[0] if chosen is None else names[1]
        raise BadRowError("missing_side", row.place, f"image not found: {gone}")
    # by name: reading all files to compare them would take too long
    if chosen == rejected:
        raise BadRowError("equal_sides", row.place, f"chosen and rejected are both {names[0]}")
    given = {name: row.cells[name] for name in NUMBERS if row.cells.get(name) is not None}
    return ImagePair(row.place, caption, chosen, rejected, _finite(given, row.place))


def _finite(numbers: Mapping[str, Any], place: str) -> dict[str, float]:
    for name, value in numbers.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise UserError(f"{place}: {name} is {value!r}; must be a finite number")
    return {name: float(value) for name, value in numbers.items()}
