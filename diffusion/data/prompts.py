"""Prompts to draw images for, with the columns that rewards read."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

from omegaconf import MISSING

from diffusion.data.references import ReferenceImage
from mmrl.errors import UserError
from mmrl.fields import bounded, choice, rare
from mmrl.files import expanded
from mmrl.hub.images import ImageError, image_pixels_option
from mmrl.hub.tables import MAX_LINE_MB, check_split, read_rows

TaskT = TypeVar("TaskT")
LOGGER = logging.getLogger("mmrl")
BAD_ROWS = ("error", "skip")


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
class PromptConfig:
    """Source of the prompts."""

    path: str = MISSING
    """A .txt file with a prompt a line, a .jsonl, .json or .parquet file, a data-set folder or a hub id."""
    split: str = "train"
    """Split of a data set that has several."""
    subset: str | None = rare(None)
    """Configuration name of a hub data set that has several."""
    prompt_key: str = "prompt"
    """Column of the text."""
    image_key: str = rare("image")
    """Column of the image to be edited, a file beside the data or content of a data set, for models that take one; all
    rows have one, or none. Empty: a column of this name is like any other."""
    max_image_pixels: int = rare(image_pixels_option())
    """Largest image in pixels, checked by its header before it is decoded."""
    max_tasks: int | None = bounded(None, at_least=1)
    """Use only the first prompts, up to this number of usable ones."""
    build: str | None = None
    """`module:function` that writes `path` when it does not exist: function(path, **build_options)."""
    build_options: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the build function."""
    max_prompt_chars: int = rare(bounded(10_000, at_least=1))
    """Longest prompt in characters, checked before it is tokenised."""
    max_line_mb: float = rare(bounded(MAX_LINE_MB, above=0, finite=True))
    """Longest line of a .jsonl file in 10^6 bytes."""
    on_bad_row: str = rare(choice("skip", BAD_ROWS))
    """skip: count and log empty, over-long and unreadable prompts and use the rest; error: stop at the first."""


@dataclass
class LoadedRows(Generic[TaskT]):
    """The usable prompts or pairs of a file, and counts of the rows left out."""

    on_bad_row: str
    """error: stop at a bad row; skip: leave it out and count it."""
    key: str
    """Section of the option, for messages."""
    tasks: list[TaskT] = field(default_factory=list)
    skipped: Counter[str] = field(default_factory=Counter)
    """Rows left out, by kind."""

    def leave_out(self, kind: str, message: str) -> None:
        """Count a row that cannot be used; raises UserError where bad rows are errors."""
        if self.on_bad_row == "error":
            raise UserError(f"{message}; {self.key}.on_bad_row=skip leaves such rows out")
        if not self.skipped[kind]:
            LOGGER.warning("%s; such rows are skipped and counted", message)
        self.skipped[kind] += 1

    def check_left(self, path: Path | str, noun: str) -> None:
        """Refuse a file without a usable row; raises UserError."""
        if not self.tasks:
            counts = ", ".join(f"{number} {kind}" for kind, number in self.skipped.items())
            raise UserError(f"{path} has no usable {noun} ({counts or 'it is empty'})")


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
    if not config.path or config.path == MISSING:
        raise UserError("data.path is not set: give a .txt, .jsonl, .json or .parquet file, a folder or a hub id")
    from mmrl.hub.building import build_if_missing

    build_if_missing(config)
    loaded = LoadedRows[DiffusionTask](config.on_bad_row, "data")
    for place, cells, problem in _rows(config):
        kind, message = _fault(cells, problem, config, too_long)
        image = None
        if kind is None and config.image_key and cells.get(config.image_key) is not None:
            try:
                image = ReferenceImage.of(
                    cells[config.image_key], expanded(config.path).parent, config.max_image_pixels
                )
            except ImageError as error:
                kind, message = "image", f"the image of column '{config.image_key}' cannot be used: {error}"
        if kind is None:
            own = {config.prompt_key, config.image_key}
            columns = {name: value for name, value in cells.items() if name not in own}
            loaded.tasks.append(DiffusionTask(place, cells[config.prompt_key].strip(), columns, image))
        else:
            loaded.leave_out(kind, f"{place}: {message}")
        if len(loaded.tasks) == config.max_tasks:
            break
    loaded.check_left(config.path, "prompt")
    return loaded


def has_images(config: Any, otherwise: bool) -> bool:
    """Whether the first usable prompt of a run's data comes with an image; `otherwise` where there is no such file."""
    data = getattr(config, "data", None)
    if not isinstance(data, PromptConfig) or not expanded(data.path).is_file():
        return otherwise
    return load_prompts(replace(data, max_tasks=1)).tasks[0].image is not None


def _rows(config: PromptConfig) -> Iterator[tuple[str, dict[str, Any], str | None]]:
    path = expanded(config.path)
    check_split(config.path, config.split, config.subset)
    if path.suffix.lower() == ".txt":
        for place, line in _text_lines(path):
            yield place, {config.prompt_key: line}, None
        return
    for row in read_rows(config.path, config.split, config.subset, config.max_line_mb):
        yield row.place, row.cells, row.problem


def _text_lines(path: Path) -> Iterator[tuple[str, str]]:
    try:
        with path.open(encoding="utf-8-sig") as file:  # splitlines() would also cut at U+2028 and form feeds
            lines = [line.removesuffix("\n") for line in file]
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read: {error}") from error
    for number, line in enumerate(lines, start=1):
        yield f"{path.name} line {number}", line


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
    if len(prompt) > config.max_prompt_chars:
        found = f"the prompt has {len(prompt)} characters, more than {config.max_prompt_chars}"
        return "too_long", f"{found} (data.max_prompt_chars)"
    cut = too_long(prompt)
    return (None, "") if cut is None else ("too_long", cut)
