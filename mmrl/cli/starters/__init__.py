"""First configurations of users' own runs, for `mmrl init`: a few commented lines with their model and data.

Each is a YAML file of this folder in which `<model=DEFAULT>`, `<data=DEFAULT>` and `<folder>` are filled in.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from mmrl.errors import UserError
from mmrl.files import write_atomically

STARTERS = ("papo", "grpo", "text", "sft", "screens", "video", "awm", "robot", "agent")
PLACE = re.compile(r"<(folder|model|data)(?:=(.*?))?>")
ARGUMENTS = re.compile(r"(?<=kwargs: ){.*?}")
"""Arguments of the default environment; another one has others."""


def write_starter(name: str, file: Path, model: str | None, data: str | None, *, force: bool) -> None:
    """Write the configuration of a starter; an existing file stays unless `force` is set."""
    if file.exists() and not force:
        raise UserError(f"{file} exists; --force overwrites it")
    write_atomically(file, _filled(name, model, data, f"runs/{file.stem}"))


def _filled(name: str, model: str | None, data: str | None, folder: str) -> str:
    """The text of a starter with a user's values, each as a YAML text in quotes; values are not interpolated."""
    from mmrl.config import escaped

    text = Path(__file__).with_name(f"{name}.yaml").read_text(encoding="utf-8")
    defaults = dict(PLACE.findall(text))
    given = {"model": model or defaults["model"], "data": data or defaults["data"], "folder": folder}
    if given["data"] != defaults["data"]:
        text = ARGUMENTS.sub("{}", text)
    return PLACE.sub(lambda place: json.dumps(escaped(given[place[1]]), ensure_ascii=False), text)
