"""Prompts to generate images for, images to edit, and the columns that rewards read."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from omegaconf import MISSING

from mmrl.fields import choice, rare
from mmrl.files import expanded, is_file
from mmrl.hub.foreign import MalformedError, to_rgb
from mmrl.hub.images import ImageError, decode_image, image_pixels_option, read_image_file
from mmrl.hub.tables import BAD_ROWS, BadRowError, DataRow, LoadedRows, RowsConfig, built_path, media_folder, rows

LIMIT = "data.max_image_pixels"


@dataclass(frozen=True)
class ReferenceImage:
    """An image to be edited, read when needed."""

    source: Path | bytes
    """Path of the image file, or its contents."""
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
                raise ImageError(f"file not found: {stored}")
        if not isinstance(stored, Path | bytes):
            raise ImageError(f"expected a path or the contents of a file, not {type(stored).__name__}")
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


TaskT = TypeVar("TaskT")
LOGGER = logging.getLogger("mmrl")
MAX_PROMPT_CHARS = 10_000
"""Maximum length of a prompt or caption in characters; the text encoders of pipelines read a few hundred tokens."""


@dataclass(frozen=True)
class DiffusionTask:
    """One prompt; its G images form a group."""

    id: str
    """File and row, such as "prompts.jsonl line 3"."""
    prompt: str
    """The text."""
    columns: dict[str, Any] = field(default_factory=dict)
    """Other columns of the row, passed to the rewards by name; usually `metadata`."""
    image: ReferenceImage | None = None
    """The image to be edited; rewards get its pixels as the column `reference`."""


@dataclass
class PromptConfig(RowsConfig):
    """Source of the prompts."""

    path: str = MISSING
    """A .txt file with one prompt per line, a .jsonl, .json, .parquet or .csv file, a dataset folder or a Hub id."""
    prompt_key: str = "prompt"
    """Column with the prompt."""
    image_key: str = rare("image")
    """Column with the image to edit, for image-editing models: a path relative to the data, or the image itself. Either
    all rows have an image or none. Empty string: no column is an image."""
    max_image_pixels: int = rare(image_pixels_option())
    """Maximum number of pixels of an image, checked in the file header before decoding."""
    on_bad_row: str = rare(choice("skip", BAD_ROWS))
    """What to do with empty, over-long or unreadable prompts. skip: count and log them and use the rest; error: stop at
    the first one."""


def load_prompts(
    config: PromptConfig, too_long: Callable[[str], str | None] = lambda prompt: None
) -> LoadedRows[DiffusionTask]:
    """Read all prompts of a dataset.

    Args:
        config: where they are.
        too_long: describes what would be cut off a prompt, or None; see `TextEncoders.cuts`.

    Returns:
        Tasks in file order, with counts of the rows left out.

    Raises:
        UserError: nothing is there, no prompt is usable, or a row is bad and `on_bad_row` is "error".
    """
    built_path(config, "data", "a .txt, .jsonl, .json, .parquet or .csv file, a folder or a Hub id")
    loaded = LoadedRows[DiffusionTask](on_bad_row=config.on_bad_row)
    loaded.take(rows(config), lambda row: _task(row, config, too_long), config.max_tasks)
    loaded.check_left(config.path)
    return loaded


def has_images(config: Any, otherwise: bool) -> bool:
    """Whether the first usable prompt of a run's data has an image; `otherwise` if the file does not exist yet."""
    data = getattr(config, "data", None)
    if not isinstance(data, PromptConfig) or not expanded(data.path).exists():
        return otherwise
    return load_prompts(replace(data, max_tasks=1)).tasks[0].image is not None


def _task(row: DataRow, config: PromptConfig, too_long: Callable[[str], str | None]) -> DiffusionTask:
    """The task of a row; raises BadRowError."""
    kind, message = _fault(row.cells, row.problem, config, too_long)
    if kind is not None:
        raise BadRowError(kind, row.place, message)
    image, cell = None, row.cells.get(config.image_key) if config.image_key else None
    if cell is not None:
        try:
            image = ReferenceImage.of(cell, media_folder(expanded(config.path)), config.max_image_pixels)
        except ImageError as error:
            message = f"the image of column '{config.image_key}' cannot be used: {error}"
            raise BadRowError("image", row.place, message) from None
    own = {config.prompt_key, config.image_key}
    columns = {name: value for name, value in row.cells.items() if name not in own}
    return DiffusionTask(row.place, row.cells[config.prompt_key].strip(), columns, image)


def _fault(
    cells: dict[str, Any], problem: str | None, config: PromptConfig, too_long: Callable[[str], str | None]
) -> tuple[str | None, str]:
    """Kind and description of a row's problem; kind None if it is good."""
    if problem is not None:
        return "unreadable", problem
    if config.prompt_key not in cells:
        return "missing", f"column '{config.prompt_key}' not found; the row has: {', '.join(cells) or 'none'}"
    prompt = cells[config.prompt_key]
    if not isinstance(prompt, str) or not prompt.strip():
        return "empty", f"the prompt is empty or not text: {str(prompt)[:80]!r}"
    if len(prompt) > MAX_PROMPT_CHARS:
        found = f"the prompt has {len(prompt)} characters, more than {MAX_PROMPT_CHARS}"
        return "too_long", found
    cut = too_long(prompt)
    return (None, "") if cut is None else ("too_long", cut)
