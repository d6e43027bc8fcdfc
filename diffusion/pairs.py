"""Pairs of a preferred and a rejected image of one caption: made by a function, or a user's own files.

Columns are those of TRL's preference data, with images in the place of texts: prompt, chosen, rejected, and where
there are any score_chosen and score_rejected (of a reward model) and text_quality (of the caption).
"""

from __future__ import annotations

import logging
import math
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from omegaconf import MISSING

from diffusion.images import PACKED, ImageFile, StoredImage, array_header, check_caption
from mmrl.errors import UserError
from mmrl.fields import bounded, choice
from mmrl.files import expanded, is_file, replaced
from mmrl.hub.images import check_pixels, image_pixels_option
from mmrl.hub.tables import LINES, READERS, read_rows

LOGGER = logging.getLogger("mmrl")
NUMBERS = ("score_chosen", "score_rejected", "text_quality")
"""Columns of numbers that a pair may have."""
BAD_ROWS = ("error", "skip")


@dataclass(frozen=True)
class ImagePair:
    """Two images of one caption, read when they are needed."""

    id: str
    """Place in the data."""
    caption: str
    """The text of both."""
    chosen: Callable[[], NDArray[np.uint8]]
    """Gives the preferred image, RGB uint8 (h, w, 3)."""
    rejected: Callable[[], NDArray[np.uint8]]
    """Gives the rejected one."""
    numbers: Mapping[str, float] = field(default_factory=dict)
    """Those of `NUMBERS` that the data has."""

    def read(self) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
        """The preferred and the rejected image; also what a resume tells other data by."""
        return self.chosen(), self.rejected()


@dataclass
class ImagePairConfig:
    """Where the pairs lie."""

    path: str = MISSING
    """A .npz file with `captions` (N texts), `chosen` and `rejected` uint8 (N, h, w, 3) and perhaps the numbers
    score_chosen, score_rejected and text_quality, or a .jsonl, .json or .parquet file whose columns prompt, chosen
    and rejected name image files beside it."""
    build: str | None = None
    """`module:function` that writes `path` when it does not exist: function(path, **build_options)."""
    build_options: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the build function."""
    max_image_pixels: int = image_pixels_option()
    """Largest image in pixels, checked by its header before it is decoded."""
    max_prompt_chars: int = bounded(10_000, at_least=1)
    """Longest caption in characters."""
    on_bad_row: str = choice("error", BAD_ROWS)
    """What a pair whose sides are equal or missing does: error stops the run, skip counts it and goes on."""


@dataclass
class LoadedPairs:
    """The usable pairs, and what was left out."""

    pairs: list[ImagePair]
    skipped: Counter[str] = field(default_factory=Counter)
    """Pairs left out, by kind: equal_sides, missing_side."""


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


def load_pairs(config: ImagePairConfig) -> LoadedPairs:
    """Read which pairs there are.

    Args:
        config: where they lie.

    Returns:
        The pairs in file order; images of a list are opened later.

    Raises:
        UserError: nothing is there, a file is damaged, or a pair is bad and `on_bad_row` is "error".
    """
    if not config.path or config.path == MISSING:
        raise UserError("pairs.path is not set: give a .npz or .jsonl file")
    from mmrl.hub.building import build_if_missing

    build_if_missing(config, "pairs")
    path = expanded(config.path)
    if not is_file(path):
        raise UserError(f"pairs.path: no such file: {path}")
    loaded = LoadedPairs([])
    if path.suffix == PACKED:
        _read_packed(path, config, loaded)
    else:
        _read_list(path, config, loaded)
    if not loaded.pairs:
        counts = ", ".join(f"{number} {kind}" for kind, number in loaded.skipped.items())
        raise UserError(f"{path} has no usable pair ({counts or 'it is empty'})")
    return loaded


def _read_packed(path: Path, config: ImagePairConfig, loaded: LoadedPairs) -> None:
    try:
        with zipfile.ZipFile(path) as packed:
            heads = {name: array_header(packed, f"{name}.npy") for name in ("chosen", "rejected", "captions")}
            known = [name for name in NUMBERS if f"{name}.npy" in packed.namelist()]
            heads |= {name: array_header(packed, f"{name}.npy") for name in known}
    except Exception as error:  # zipfile, zlib and the parser of NumPy's headers each raise their own kinds
        raise UserError(f"{path} is no file of pairs of images: {error}") from error
    (shape, dtype), (other, other_dtype) = heads["chosen"], heads["rejected"]
    fits = dtype == other_dtype == np.uint8 and shape == other and len(shape) == 4 and shape[3] == 3
    if not fits or any(heads[name][0] != shape[:1] for name in ("captions", *known)):
        found = ", ".join(f"{name} {kind} {size}" for name, (size, kind) in heads.items())
        raise UserError(f"{path}: {found}; must be N texts, two arrays uint8 (N, h, w, 3) and N of each number")
    try:
        check_pixels(shape[2], shape[1], config.max_image_pixels, "pairs.max_image_pixels")
        with np.load(path, allow_pickle=False) as data:
            arrays = {name: data[name] for name in heads}
    except (OSError, EOFError, ValueError, KeyError, MemoryError, zipfile.BadZipFile, zlib.error) as error:
        raise UserError(f"{path} is no file of pairs of images: {error or type(error).__name__}") from error
    for row, caption in enumerate(arrays["captions"].tolist()):
        place = f"{path.name} {row}"
        check_caption(place, caption, config)
        if np.array_equal(arrays["chosen"][row], arrays["rejected"][row]):
            _leave_out("equal_sides", f"{place}: both images are the same", config, loaded)
            continue
        numbers = {name: float(arrays[name][row]) for name in known}
        sides = StoredImage(arrays["chosen"], row), StoredImage(arrays["rejected"], row)
        loaded.pairs.append(ImagePair(place, caption, *sides, _finite(numbers, place)))


def _read_list(path: Path, config: ImagePairConfig, loaded: LoadedPairs) -> None:
    if path.suffix.lower() not in (LINES, *READERS):
        raise UserError(f"{path}: unknown extension {path.suffix!r}; give a .npz or .jsonl file")
    for row in read_rows(str(path), "train", None):
        if row.problem is not None:
            raise UserError(f"{row.place}: {row.problem}")
        caption, *names = (row.cells.get(key) for key in ("prompt", "chosen", "rejected"))
        if not isinstance(caption, str):
            raise UserError(f"{row.place}: expected the text of column prompt; it has {', '.join(row.cells)}")
        check_caption(row.place, caption, config)
        files = [path.parent / name if isinstance(name, str) and name else None for name in names]
        gone = [str(name) for name, file in zip(names, files, strict=True) if file is None or not is_file(file)]
        if gone:
            _leave_out("missing_side", f"{row.place}: no such image: {gone[0]}", config, loaded)
            continue
        if files[0] == files[1]:
            _leave_out("equal_sides", f"{row.place}: both sides are {names[0]}", config, loaded)
            continue
        given = {name: row.cells[name] for name in NUMBERS if row.cells.get(name) is not None}
        chosen, rejected = (ImageFile(file, config.max_image_pixels) for file in files if file is not None)
        loaded.pairs.append(ImagePair(row.place, caption, chosen, rejected, _finite(given, row.place)))


def _finite(numbers: Mapping[str, Any], place: str) -> dict[str, float]:
    for name, value in numbers.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise UserError(f"{place}: {name} is {value!r}; must be a finite number")
    return {name: float(value) for name, value in numbers.items()}


def _leave_out(kind: str, message: str, config: ImagePairConfig, loaded: LoadedPairs) -> None:
    if config.on_bad_row == "error":
        raise UserError(f"{message}; pairs.on_bad_row=skip leaves such pairs out")
    if not loaded.skipped[kind]:
        LOGGER.warning("%s; such pairs are skipped and counted", message)
    loaded.skipped[kind] += 1
