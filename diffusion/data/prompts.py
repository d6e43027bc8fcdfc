"""Prompts to draw images for, with the columns that rewards read."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from omegaconf import MISSING

from diffusion.data.references import ReferenceImage
from mmrl.errors import UserError
from mmrl.fields import choice, rare
from mmrl.files import expanded
from mmrl.hub.images import ImageError, image_pixels_option
from mmrl.hub.tables import BAD_ROWS, BadRowError, DataRow, LoadedRows, RowsConfig, built_path, check_split, rows

TaskT = TypeVar("TaskT")
LOGGER = logging.getLogger("mmrl")
MAX_PROMPT_CHARS = 10_000
"""Longest prompt or caption in characters; text encoders of pipelines read a few hundred tokens."""


@dataclass(frozen=True)
class DiffusionTask:
    """One prompt; its G images form a group."""

    id: str
    """File and row, such as "prompts.jsonl line 3"."""
    prompt: str
    """The text."""
    columns: dict[str, Any] = field(default_factory=dict)
    """Further data of the row, handed to the rewards by name; `metadata` is the usual one."""
    image: ReferenceImage | None = None
    """The image to be edited; rewards get its pixels as the column `reference`."""


@dataclass
class PromptConfig(RowsConfig):
    """Source of the prompts."""

    path: str = MISSING
    """A .txt file with a prompt a line, a .jsonl, .json or .parquet file, a data-set folder or a hub id."""
    prompt_key: str = "prompt"
    """Column of the text."""
    image_key: str = rare("image")
    """Column of the image to edit, for models that take one: a path relative to the data, or the image itself; either
    all rows have one or none. Empty: no column is an image."""
    max_image_pixels: int = rare(image_pixels_option())
    """Largest image in pixels, checked by its header before it is decoded."""
    on_bad_row: str = rare(choice("skip", BAD_ROWS))
    """skip: count and log empty, over-long and unreadable prompts and use the rest; error: stop at the first."""


def load_prompts(
    config: PromptConfig, too_long: Callable[[str], str | None] = lambda prompt: None
) -> LoadedRows[DiffusionTask]:
    """Read all prompts of a data set.

    Args:
        config: where they are.
        too_long: describes what would be cut off a prompt, or None; see `TextEncoders.cuts`.

    Returns:
        Tasks in file order, with counts of the rows left out.

    Raises:
        UserError: nothing is there, no prompt is usable, or a row is bad and `on_bad_row` is "error".
    """
    built_path(config, "data", "a .txt, .jsonl, .json or .parquet file, a folder or a hub id")
    loaded = LoadedRows[DiffusionTask](on_bad_row=config.on_bad_row)
    loaded.take(_rows(config), lambda row: _task(row, config, too_long), config.max_tasks)
    loaded.check_left(config.path)
    return loaded


def has_images(config: Any, otherwise: bool) -> bool:
    """Whether the first usable prompt of a run's data comes with an image; `otherwise` if there is no file yet."""
    data = getattr(config, "data", None)
    if not isinstance(data, PromptConfig) or not expanded(data.path).is_file():
        return otherwise
    return load_prompts(replace(data, max_tasks=1)).tasks[0].image is not None


def _rows(config: PromptConfig) -> Iterator[DataRow]:
    path = expanded(config.path)
    if path.suffix.lower() != ".txt":
        yield from rows(config)
        return
    # a text file has no splits, so another one than train is a mistake
    check_split(config.path, config.split, config.subset)
    try:
        with path.open(encoding="utf-8-sig") as file:  # splitlines() would also cut at U+2028 and form feeds
            lines = [line.removesuffix("\n") for line in file]
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read: {error}") from error
    for number, line in enumerate(lines, start=1):
        yield DataRow(f"{path.name} line {number}", {config.prompt_key: line})


def _task(row: DataRow, config: PromptConfig, too_long: Callable[[str], str | None]) -> DiffusionTask:
    """The task of a row; raises BadRowError."""
    kind, message = _fault(row.cells, row.problem, config, too_long)
    if kind is not None:
        raise BadRowError(kind, row.place, message)
    image, cell = None, row.cells.get(config.image_key) if config.image_key else None
    if cell is not None:
        try:
            image = ReferenceImage.of(cell, expanded(config.path).parent, config.max_image_pixels)
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
        return "missing", f"there is no column '{config.prompt_key}'; the row has: {', '.join(cells) or 'none'}"
    prompt = cells[config.prompt_key]
    if not isinstance(prompt, str) or not prompt.strip():
        return "empty", f"the prompt is empty or no text: {str(prompt)[:80]!r}"
    if len(prompt) > MAX_PROMPT_CHARS:
        found = f"the prompt has {len(prompt)} characters, more than {MAX_PROMPT_CHARS}"
        return "too_long", found
    cut = too_long(prompt)
    return (None, "") if cut is None else ("too_long", cut)
