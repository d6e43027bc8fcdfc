"""Starter configurations for `mmrl init`: a few commented lines with their model, data and rewards.

Each is a YAML file of this folder in which `<model=DEFAULT>`, `<data=DEFAULT>`, `<folder>`, `<reward>` and `<term>`,
the reward's name, are filled in. One that ends in _cpu is for machines without a GPU.
"""

from __future__ import annotations

import json
import keyword
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mmrl.entries import load_target
from mmrl.errors import UserError
from mmrl.files import expanded, write_atomically

STARTERS = ("papo", "grpo", "text", "sft", "screens", "video", "awm", "robot", "agent")
PLACE = re.compile(r"<(folder|model|data|reward|term)(?:=(.*?))?>")
ARGUMENTS = re.compile(r"(?<=kwargs: ){.*?}")
"""Arguments of the default environment; other environments have different ones."""
ROWS_READ = 16
"""Number of rows whose answers determine the reward."""
STUB = '''"""The reward of {file}."""


def {name}(completions, {arguments}**columns):
    """One number per response: 1 if it is correct, None if the reward does not apply."""
    scores = []
    for text, *row in zip(completions, {columns}strict=True):
        scores.append(0.0)  # write your check of `text` here
    return scores
'''


def write_starter(
    name: str, file: Path, model: str | None, data: str | None, reward: str | None, device: str, *, force: bool
) -> list[str]:
    """Write a starter configuration with rewards that fit the rows; existing files are kept unless `force` is set.

    Args:
        name: a row of STARTERS.
        file: to write.
        model: model to name; None for the starter's own.
        data: data to name; None for the starter's own.
        reward: the user's reward as FILE.py:function or module:function; None for a built-in one that fits the rows, or
            if none does a function to fill in, in a file next to this one.
        device: cpu or cuda, the machine that the run is for.
        force: overwrite the files.

    Returns:
        The files, and remarks, as lines to print.
    """
    if file.exists() and not force:
        raise UserError(f"{file} already exists; --force overwrites it")
    text = _text_for(name, device)
    places = dict(PLACE.findall(text))
    if reward is not None and "reward" not in places:
        raise UserError(f"--reward is for {', '.join(_rewarded())}; {name} has no configurable rewards")
    lines, fitting = [f"written: {file}"], ""
    if "reward" in places and reward is None:
        columns, fitting = _rows_of(expanded(data)) if data else ([], "math")
        if not fitting:
            reward, place = f"{file.stem}_rewards.py:score", file.with_name(f"{file.stem}_rewards.py")
            reward = str(place.parent / reward) if place.parent != Path() else reward
            if force or not place.exists():
                write_atomically(place, _stub(file.name, columns))
                lines.append(f"written: {place}; fill in its function, because the rows have no answer to compare with")
    write_atomically(file, _filled(text, model, data, f"runs/{file.stem}", reward or "", fitting))
    return lines


def _text_for(name: str, device: str) -> str:
    """The text of a starter, for a machine without a GPU if there is one."""
    own = Path(__file__).with_name(f"{name}_cpu.yaml")
    place = own if device == "cpu" and own.is_file() else Path(__file__).with_name(f"{name}.yaml")
    return place.read_text(encoding="utf-8")


def _rewarded() -> list[str]:
    """Starters whose rewards can be named."""
    return [name for name in STARTERS if "<reward>" in _text_for(name, "cuda")]


def _rows_of(path: Path) -> tuple[list[str], str]:
    """Columns of the rows in a file, and the built-in reward that fits their answers; empty if they have none.

    What cannot be read is left to the dry run.
    """
    if not path.exists():
        return [], "math"
    config = load_target("mmrl.vlm.data.dataset:DataConfig")(path=str(path), max_tasks=ROWS_READ, on_bad_row="skip")
    try:
        tasks = load_target("mmrl.vlm.data.dataset:load_tasks")(config).tasks
    except UserError:
        return [], "math"
    columns = list(dict.fromkeys(column for task in tasks for column in task.columns))
    return columns, _fitting([task.columns["answer"] for task in tasks if "answer" in task.columns])


def _fitting(answers: Sequence[Any]) -> str:
    """Built-in reward for such answers: numbers and formulas, letters of options, or words."""
    texts = [str(answer).strip() for answer in answers]
    if not texts:
        return ""
    if all(re.fullmatch(r"\(?[A-Za-z]\)?", text) for text in texts):
        return "choice"
    return "math" if any(re.search(r"\d|\\", text) for text in texts) else "exact"


def _stub(file: str, columns: Sequence[str]) -> str:
    """A reward function to fill in, with the columns of the rows as arguments."""
    names = [name for name in columns if name.isidentifier() and not keyword.iskeyword(name)]
    own = ("completions", "columns", "scores", "zip")  # names of the function itself
    listed = "".join(f"{name}, " for name in names if name not in own)
    return STUB.format(file=file, name="score", arguments=listed, columns=listed)


def _filled(text: str, model: str | None, data: str | None, folder: str, reward: str, fitting: str) -> str:
    """The text of a starter with a user's values, each as a YAML text in quotes; values are not interpolated."""
    from mmrl.config import escaped

    def quoted(value: str) -> str:
        return json.dumps(escaped(value), ensure_ascii=False)

    defaults = dict(PLACE.findall(text))
    term = reward.rpartition(":")[2] or fitting
    values = {"model": model or defaults["model"], "data": data or defaults["data"], "folder": folder}
    given = {name: quoted(value) for name, value in values.items()} | {"term": term}
    given["reward"] = f"{{name: {term}, function: {quoted(reward)}}}" if reward else f"{{name: {term}}}"
    if values["data"] != defaults["data"]:
        text = ARGUMENTS.sub("{}", text)
    if reward:  # which reads what the user wants, and not a box
        text = re.sub(r"^( +)format_prompt:", r"\1# format_prompt:", text, flags=re.MULTILINE)
    return PLACE.sub(lambda place: given[place[1]], text)
