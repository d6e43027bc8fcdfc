"""Cards: README.md with a head of metadata, which the Hugging Face hub shows for models and data sets."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mmrl.errors import UserError
from mmrl.files import LARGEST_YAML, expanded, parse_json, parse_yaml, read_lines, read_text, write_atomically

CARD = "README.md"
MARK = "<!-- Written by mmrl, which keeps it up to date; without this line it is yours. -->"
SECRET = re.compile(r"(^|_)(api_key|secret|password|token)$")
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


def fenced(text: str, language: str = "text") -> list[str]:
    """Lines of a code block whose fence cannot be closed by its content."""
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    return [f"{fence}{language}", text.rstrip("\n"), fence, ""]


def plain(text: object) -> str:
    """Text on one line, escaped so that Markdown and HTML show it literally, also in a table."""
    return re.sub(r"[\\`*\[\]<>|#~$&]|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])", r"\\\g<0>", " ".join(str(text).split()))


def code(text: object) -> str:
    """Text on one line as code, also in a table."""
    line = " ".join(str(text).split())
    tick = "`" * (1 + max(map(len, re.findall("`+", line)), default=0))
    pad = " " if line[:1] == "`" or line[-1:] == "`" else ""
    return f"{tick}{pad}{line}{pad}{tick}".replace("|", r"\|")


def table(heading: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Lines of a table; none if it has no rows. Cells are Markdown: see `plain` and `code`."""
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return [f"| {' | '.join(heading)} |", f"|{'---|' * len(heading)}", *lines, ""] if lines else []


def portable(value: Any, key: str = "") -> Any:
    """Settings without secrets, and with local paths reduced to their last component."""
    if isinstance(value, Mapping):
        return {name: portable(entry, str(name)) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [portable(entry) for entry in value]
    if not isinstance(value, str):
        return value
    if SECRET.search(key.lower()) and value:
        return "removed"
    is_path = value.startswith(("/", "~/", "file:")) and not re.search(r"\s", value.partition("/")[2])
    is_path = is_path or (os.path.isabs(value) and os.path.exists(value))  # with a space in its name
    return value.rstrip("/").rpartition("/")[2] if is_path else value


def without_paths(text: str) -> str:
    """A message with absolute paths shortened to file names."""
    return re.sub(r"(?<![\w.:/~>)])~?/(?:[\w.+@%-]+/)+([\w.+@%-]*)", r"\1", text)


def hub_id_of(path: str) -> str:
    """The path if it is a hub id whose files are in the hub cache; otherwise empty."""
    from huggingface_hub import try_to_load_from_cache

    if not HUB_ID.fullmatch(path) or expanded(path).exists():
        return ""
    files = ("config.json", "model_index.json", "README.md")
    try:
        return path if any(isinstance(try_to_load_from_cache(path, name), str) for name in files) else ""
    except ValueError:  # not a valid id
        return ""


def head_of(path: str) -> dict[str, Any]:
    """Metadata from the card of a model or dataset, in its folder or the hub cache; empty if there is none."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.repocard import REGEX_YAML_BLOCK

    found = try_to_load_from_cache(path, CARD) if hub_id_of(path) else str(expanded(path) / CARD)
    try:
        text = read_text(found, LARGEST_YAML, errors="replace") if isinstance(found, str) else ""
        block = REGEX_YAML_BLOCK.search(text.removeprefix("\ufeff"))
        head = parse_yaml(block[2], str(found)) if block else None
    except (OSError, UserError):  # no card, or a damaged head
        return {}
    return head if isinstance(head, dict) else {}


def card_text(head: Any, lines: Iterable[str]) -> str:
    """A card from the hub's `ModelCardData` or `DatasetCardData` and lines of Markdown."""
    return f"---\n{head.to_yaml()}\n---\n\n" + "\n".join(lines).rstrip("\n") + "\n"


def write_dataset_card(folder: Path, title: str, lines: Sequence[str], **head: Any) -> None:
    """Write the card of a dataset, unless its folder has a card without the mark of mmrl."""
    from huggingface_hub import DatasetCardData

    path = folder / CARD
    if path.exists() and MARK not in path.read_text(encoding="utf-8", errors="replace"):
        return
    data = DatasetCardData(pretty_name=title, **head)
    write_atomically(path, card_text(data, [f"# {plain(title)}", "", *lines, "", MARK]))


def note_build(path: Path, build: str, options: Mapping[str, Any], *, new_folder: bool) -> None:
    """Record the function and options that generated a dataset in its card.

    A folder that is a data set has its own card. Files get one in a folder that was made for them, with a part for
    each file; the metadata keeps what the others were made with.
    """
    made = f"Made by {code(portable(build))}" + (f" with {code(portable(dict(options)))}." if options else ".")
    folder = path if path.is_dir() else path.parent
    card = folder / CARD
    known = read_text(card, errors="replace") if card.is_file() else ""
    if path.is_dir():
        if MARK in known:
            write_atomically(card, known.replace(MARK, f"{made}\n\n{MARK}"))
        return
    if not new_folder and MARK not in known:
        return
    files = {**(head_of(str(folder)).get("files") or {}), path.name: {"made": made, **_contents(path)}}
    lines = ["Generated data.", ""]
    for name, about in files.items():
        rows = [[key, str(text)] for key, text in about.items() if key != "made"]
        lines += [f"## {plain(name)}", "", about["made"], "", *table(["", ""], rows)]
    shown = [{"split": re.sub(r"\W", "_", Path(name).stem), "path": name} for name in files]
    configs = [{"config_name": "default", "data_files": shown}]
    write_dataset_card(folder, folder.resolve().name, lines, tags=["mmrl", "generated"], configs=configs, files=files)


def _contents(path: Path) -> dict[str, Any]:
    """Rows and columns of a file of JSON lines; nothing of others."""
    if path.suffix != ".jsonl":
        return {}
    rows = read_lines(path, None)
    first = next(rows, b"")
    count = int(bool(first.strip())) + sum(1 for row in rows if row.strip())
    try:
        columns = parse_json(first)
    except ValueError:
        columns = {}
    return {"rows": count, "columns": ", ".join(map(code, columns)) if isinstance(columns, dict) else ""}
