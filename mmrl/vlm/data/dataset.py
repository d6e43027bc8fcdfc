"""Visual questions from files and datasets with TRL's or EasyR1's columns, and how to write such files.

TRL: `prompt` (text or chat turns), `image` or `images`, every other column goes to the rewards.
EasyR1: `problem`, `answer`, `images` and literal `<image>` / `<video>` marks in the text; R1-V: the same without marks.

Source: huggingface/trl trl/data_utils.py and hiyouga/EasyR1 verl/utils/dataset.py (column conventions).
"""

from __future__ import annotations

import filecmp
import json
import math
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

from omegaconf import MISSING
from PIL import Image

from mmrl.errors import UserError
from mmrl.fields import bounded, check_fields, choice, rare
from mmrl.files import expanded
from mmrl.hub.images import image_pixels_option
from mmrl.hub.tables import BAD_ROWS, DataRow, LoadedRows, RowsConfig, built_path, media_folder, rows
from mmrl.training.evaluation import parts_of_tasks
from mmrl.vlm.data.messages import MediaCells, build_messages, has_marks, make_renderer, split_conversation
from mmrl.vlm.data.task import TaskError, VideoOptions, VlmTask, holds_images

MakeRow = Callable[[], tuple[Image.Image, dict[str, Any]]]
"""Function that draws the image and the other columns of the next row."""


def write_rows(path: Path, count: int, make_row: MakeRow) -> Path:
    """Write `count` rows with an image each."""

    def save(folder: Path, stem: str) -> dict[str, Any]:
        image, row = make_row()
        image.save(folder / f"{stem}.png", compress_level=1)
        return {**row, "images": [f"{path.with_suffix('').name}/{stem}.png"]}

    return write_media_rows(path, count, save)


def write_media_rows(path: Path, count: int, save: Callable[[Path, str], dict[str, Any]]) -> Path:
    """Write rows with their media in a temporary folder and rename it, since parallel runs may build the same file."""
    if path.suffix != ".jsonl":
        raise ValueError(
            f"the questions are written to a .jsonl file, with their media in a folder next to it; got {path}"
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{path.stem}-", dir=path.parent))
    rows = [{"id": f"{path.stem}-{index:05d}", **save(partial, f"{index:05d}")} for index in range(count)]
    listing = partial / "rows.jsonl"
    listing.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    lines_path = partial.with_suffix(".jsonl")
    listing.rename(lines_path)
    partial.chmod(0o755)
    _place_media(partial, path.with_suffix(""), lines_path)
    lines_path.replace(path)
    return path


def _place_media(partial: Path, folder: Path, lines_path: Path) -> None:
    """Give the media folder its final name, unless another run was faster and has written the same media."""
    try:
        partial.rename(folder)
    except OSError as error:
        names = [file.name for file in partial.iterdir()]
        same = len(filecmp.cmpfiles(partial, folder, names, shallow=False)[0]) == len(names)
        shutil.rmtree(partial)
        if same:
            return
        lines_path.unlink()
        raise ValueError(
            f"the media of {folder.with_suffix('.jsonl')} would be written to {folder}, which has other content; "
            "remove it, or choose another file name (or another output_dir, if this is the run folder)"
        ) from error


PROMPT_KEYS = ("prompt", "problem", "question", "instruction")
CHAT_KEYS = ("messages", "conversations")
"""Columns with whole conversations, whose last turn may be the answer."""
ANSWER_KEYS = ("answer", "solution", "ground_truth")
VERL_ANSWER = ("reward_model", "ground_truth")
IMAGE_KEYS = ("images", "image")
VIDEO_KEYS = ("videos", "video")
OWN_OPTIONS = ("path", "split", "build", "build_options", "max_tasks", "budgets")
"""Options that a held-out split does not inherit from `data`."""
BUDGET = "budget"
"""Column with a question's token budget."""
MAX_PROMPT_CHARS = 200_000


@dataclass
class DataConfig(RowsConfig):
    """Source of the questions, and how to read its rows."""

    path: str = MISSING
    """A .jsonl, .json, .parquet or .csv file, a .txt file with one prompt per line, a folder written by
    datasets.save_to_disk, a folder of data files, or a hub id."""
    prompt_key: str | None = None
    """Column with the question. Default: prompt, problem, question or instruction, which must not differ in a row, else
    messages or conversations. These contain whole conversations; their last assistant turn becomes the column
    `completion`."""
    answer_key: str | None = None
    """Column with the answer (dots access nested columns), passed to the rewards as `answer`. Default: the first of
    answer, solution, ground_truth, reward_model.ground_truth that exists."""
    image_key: str | None = None
    """Column with the image or images. Default: images or image."""
    video_key: str | None = rare(None)
    """Column with the video or videos. Default: videos or video."""
    video: VideoOptions = rare(field(default_factory=VideoOptions))
    """Which video frames the model sees."""
    image_dir: str | None = rare(None)
    """Base folder of relative image and video paths. Default: the folder of the data file."""
    system_prompt: str | None = None
    """Text of a system turn added to questions that have none."""
    format_prompt: str | None = None
    """Jinja text, or path of a .jinja file, that wraps each question: {{ content }} is replaced by its text."""
    text_only: bool | None = rare(None)
    """Whether questions without an image are allowed. Default: yes if the texts mark images or the row's image list is
    empty, no if the dataset only provides images by column."""
    budgets: list[int] = rare(field(default_factory=list))
    """Ask each question once for each of these token budgets. The budget is written at the end of the question and
    passed to the rewards as `budget` (HBPO: 512, 1024, 2048, 2560)."""
    max_prompt_chars: int = rare(bounded(MAX_PROMPT_CHARS, at_least=1))
    """Maximum question length in characters, checked before tokenisation."""
    max_image_pixels: int = rare(image_pixels_option())
    """Maximum size of an image or video frame in pixels, checked from the header before decoding."""
    on_bad_row: str = rare(choice("error", BAD_ROWS))
    """error: stop at the first bad row and report it; skip: count and log bad rows, and use the rest."""


LoadedTasks: TypeAlias = LoadedRows[VlmTask]
"""The usable questions and the skipped rows; the kinds of problems are the keys of `TASK_ERRORS`."""


@dataclass
class _Layout:
    """Properties of the data set as a whole."""

    columns: list[str]
    prompt: str
    answer: str | None
    image: str | None
    video: str | None
    marked: bool
    folder: Path
    render: Callable[[str], str]


def load_tasks(config: DataConfig) -> LoadedTasks:
    """Read all tasks of a dataset and check each row; images are opened later, by `VlmTask.load_images`.

    Args:
        config: Where the data is and how to read it.

    Returns:
        Tasks in file order, with counts of the rows left out.

    Raises:
        UserError: The file is missing, empty or of unknown kind, a key names no column, no row is usable, or
            a row is bad and `on_bad_row` is "error".
    """
    check_fields(config, "data")
    built_path(config, "data", "a .jsonl, .json, .parquet, .csv or .txt file, a folder or a hub id")
    loaded = LoadedTasks(on_bad_row=config.on_bad_row)
    good: list[DataRow] = []
    for row in rows(config):
        if row.problem is None:
            good.append(row)
        else:
            loaded.leave_out(TaskError("invalid_json", row.place, row.problem))
    if good:
        layout, seen = _find_layout(config, good), set[str]()
        loaded.take(good, lambda row: _make_task(row, layout, config, seen), config.max_tasks)
    loaded.check_left(config.path)
    loaded.tasks = with_budgets(loaded.tasks, config.budgets)
    return loaded


def _find_layout(config: DataConfig, good: list[DataRow]) -> _Layout:
    columns = list(dict.fromkeys(key for row in good for key in row.cells))
    prompt = _find_key(config.prompt_key, (*PROMPT_KEYS, *CHAT_KEYS), columns, "prompt_key")
    if prompt is None:
        raise UserError(
            f"{config.path} has no question column ({', '.join((*PROMPT_KEYS, *CHAT_KEYS))}); its columns are "
            f"{', '.join(columns)}; set data.prompt_key to a column with texts or chat turns (token ids are not "
            "supported)"
        )
    if config.prompt_key is None:
        _check_one_question(good)
    answer = _find_key(config.answer_key, ANSWER_KEYS, columns, "answer_key")
    if answer is None and any(_nested(row.cells, VERL_ANSWER) is not None for row in good):
        answer = ".".join(VERL_ANSWER)
    if answer is None and prompt == "problem":
        raise UserError(
            f"{config.path} has no answer column; its columns are {', '.join(columns)}; set data.answer_key"
        )
    image = _find_key(config.image_key, IMAGE_KEYS, columns, "image_key")
    if config.image_key is None and all(key in columns for key in IMAGE_KEYS):
        raise UserError(f"{config.path} has both an image and an images column; set data.image_key to one")
    video = _find_key(config.video_key, VIDEO_KEYS, columns, "video_key")
    marked = any(has_marks(row.cells.get(prompt)) for row in good)
    if image is None and video is None and not marked and config.text_only is None:
        _check_unread(config, good, [name for name in columns if name not in (prompt, answer)])
    return _Layout(
        columns=columns,
        prompt=prompt,
        answer=answer,
        image=image,
        video=video,
        marked=marked,
        folder=_media_folder(config),
        render=make_renderer(config.format_prompt),
    )


def _check_one_question(good: Sequence[DataRow]) -> None:
    """Refuse rows whose question columns differ, such as the instruction of a screen and a prompt about it."""
    for row in good:
        found = [key for key in PROMPT_KEYS if row.cells.get(key)]
        if any(row.cells[key] != row.cells[found[0]] for key in found[1:]):
            raise UserError(
                f"{row.place} has different questions in the columns {' and '.join(found)}; set data.prompt_key to "
                "the one to ask"
            )


def _check_unread(config: DataConfig, good: Sequence[DataRow], columns: Sequence[str]) -> None:
    """Refuse questions without images if there are columns of images under other names, such as MMMU's image_1."""
    first = {name: next((row.cells[name] for row in good if row.cells.get(name) is not None), None) for name in columns}
    unread = [name for name, cell in first.items() if holds_images(cell)]
    if unread:
        raise UserError(
            f"{config.path} has images in {', '.join(unread)}, which nothing reads; set data.image_key to the column "
            "with the images (several are one list), or data.text_only=true to ask without them"
        )


def _find_key(wanted: str | None, candidates: tuple[str, ...], columns: list[str], option: str) -> str | None:
    if wanted is None:
        return next((key for key in candidates if key in columns), None)
    if wanted in columns or (option == "answer_key" and wanted.split(".")[0] in columns):
        return wanted
    raise UserError(f"data.{option} is {wanted!r}, but the columns are {', '.join(columns)}")


def _media_folder(config: DataConfig) -> Path:
    if config.image_dir is None:
        return media_folder(expanded(config.path))
    folder = expanded(config.image_dir)
    if not os.path.isdir(folder):  # False also for a text that cannot be a path
        raise UserError(f"data.image_dir is {config.image_dir!r}, which is not a folder")
    return folder


def _make_task(row: DataRow, layout: _Layout, config: DataConfig, seen: set[str]) -> VlmTask:
    """The task of a row; its id, to which the place is added if an earlier row has it, joins the seen ones."""
    name = row.cells.get("id")
    task_id = row.place if name is None or name == "" else str(name)
    place = row.place if task_id == row.place else f"{row.place} (id {task_id})"
    answer = _answer(row, layout, place)
    # rows of EasyR1 and R1-V, whose column is `problem`, may have no image
    may_be_bare = not layout.image or (layout.prompt == "problem" and config.text_only is None)
    media = MediaCells(
        images=row.cells.get(layout.image) if layout.image else None,
        videos=row.cells.get(layout.video) if layout.video else None,
        folder=layout.folder,
        marked=layout.marked,
        text_only=True if may_be_bare and config.text_only is not False else config.text_only,
    )
    prompt, completion = row.cells.get(layout.prompt), None
    if layout.prompt in CHAT_KEYS:
        prompt, completion = split_conversation(prompt, place)
    messages, images, videos = build_messages(prompt, media, layout.render, place)
    if config.system_prompt and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": [{"type": "text", "text": config.system_prompt}]})
    asked = {layout.prompt, layout.image, layout.video}
    columns = {key: row.cells.get(key) for key in layout.columns if key not in asked}
    if layout.answer is not None:
        columns["answer"] = answer
    if completion is not None and columns.get("completion") is None:
        columns["completion"] = completion
    length = sum(len(item.get("text", "")) for message in messages for item in message["content"])
    if length > config.max_prompt_chars:
        message = f"the question has {length} characters, more than {config.max_prompt_chars} (data.max_prompt_chars)"
        raise TaskError("long_prompt", place, message)
    if task_id in seen:
        task_id = f"{task_id} ({row.place})"
    seen.add(task_id)
    return VlmTask(
        task_id,
        messages,
        images,
        [config.video.complete(clip) for clip in videos],
        columns,
        conversational=not isinstance(prompt, str),
        max_image_pixels=config.max_image_pixels,
        tools=_tools(row.cells.get("tools")),
    )


def _tools(cell: Any) -> list[dict[str, Any]]:
    """Function schemas of a row's column `tools`, a list or its JSON text, as in TRL; empty for anything else."""
    if isinstance(cell, str):
        try:
            cell = json.loads(cell)
        except ValueError:
            return []
    schemas = [_filled(tool) for tool in cell] if isinstance(cell, list) else []
    return schemas if all(isinstance(tool, dict) and "name" in (tool.get("function") or ()) for tool in schemas) else []


def _filled(part: Any) -> Any:
    """Nested content without the nulls that tables add where other rows have an entry."""
    if isinstance(part, dict):
        return {key: _filled(value) for key, value in part.items() if value is not None}
    return [_filled(each) for each in part] if isinstance(part, list) else part


def _answer(row: DataRow, layout: _Layout, place: str) -> Any:
    if layout.answer is None:
        return None
    value: Any = row.cells.get(layout.answer)
    if value is None and layout.answer not in layout.columns:
        value = _nested(row.cells, layout.answer.split("."))
    blank = value is None or (isinstance(value, str) and not value.strip())
    if blank or (isinstance(value, float) and math.isnan(value)):
        found = ", ".join(key for key, cell in row.cells.items() if cell is not None) or "none"
        message = f"no answer in column {layout.answer!r}; the row's columns are: {found}"
        raise TaskError("missing_answer", place, message)
    if hasattr(value, "read"):
        message = f"the answer in column {layout.answer!r} is bytes or an image; expected a text or a number"
        raise TaskError("missing_answer", place, message)
    return value


def _nested(cells: dict[str, Any], path: Sequence[str]) -> Any:
    """The cell of a nested column; None if a row does not have it."""
    value: Any = cells
    for part in path:
        value = value.get(part) if isinstance(value, dict) else None
    return value


def load_splits(config: Any, prepare: Callable[..., LoadedTasks] | None = None) -> dict[str, Sequence[VlmTask]]:
    """Load the held-out splits of a configuration, truncated to `evaluation.max_tasks` and completed by `prepare`."""
    limit = config.evaluation.max_tasks or None
    splits: dict[str, Sequence[VlmTask]] = {}
    for name, data in config.eval_data.items():
        try:
            loaded = load_tasks(data)
            loaded.tasks = loaded.tasks[:limit]
            splits[name] = (loaded if prepare is None else prepare(loaded, training=False)).tasks
            parts_of_tasks([task.columns for task in splits[name]], config.evaluation.by)
        except (UserError, ValueError) as error:
            raise UserError(f"eval_data.{name}: {error}") from error
    return splits


def with_budgets(tasks: Sequence[VlmTask], budgets: Sequence[int]) -> list[VlmTask]:
    """Each question once per token budget, which is stated at the end of the question and kept as column `budget`."""
    if not budgets:
        return list(tasks)
    if min(budgets) < 1:
        raise UserError(f"data.budgets contains {min(budgets)}; a budget must be at least 1 token")
    return [_with_budget(task, budget) for task in tasks for budget in budgets]


def _with_budget(task: VlmTask, budget: int) -> VlmTask:
    text = {"type": "text", "text": f"\n\nAnswer the question with {budget} tokens."}
    *earlier, last = task.messages
    messages = [*earlier, {**last, "content": [*last["content"], text]}]
    return replace(task, id=f"{task.id} ({budget} tokens)", messages=messages, columns=task.columns | {BUDGET: budget})
