"""Scores of each task of an evaluation, for paired comparison, and the samples of a run."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmrl.files import replaced, write_atomically
from mmrl.runs.jsonlines import finite_or_none, read_jsonl

if TYPE_CHECKING:
    from PIL.Image import Image


@dataclass
class Outcome:
    """Scores of one held-out task."""

    id: str
    """The task; the same in every evaluation of its split."""
    scores: dict[str, float]
    """Mean score of its samples by metric, such as accuracy/greedy; a sample that could not be scored is left out."""
    parts: dict[str, str] = field(default_factory=dict)
    """Value of each data column that the split is broken down by."""


def mean_outcomes(outcomes: Iterable[Outcome]) -> list[Outcome]:
    """Join the outcomes of each task: of its repeats and of several protocols."""
    joined: dict[str, Outcome] = {}
    collected: dict[str, dict[str, list[float]]] = {}
    for outcome in outcomes:
        joined.setdefault(outcome.id, Outcome(outcome.id, {}, dict(outcome.parts)))
        scores = collected.setdefault(outcome.id, {})
        for name, value in outcome.scores.items():
            if value == value:
                scores.setdefault(name, []).append(value)
    for task, scores in collected.items():
        joined[task].scores = {name: sum(values) / len(values) for name, values in scores.items()}
    return list(joined.values())


def write_outcomes(run_dir: Path, step: int, split: str, outcomes: Sequence[Outcome]) -> Path:
    """Write the outcomes of one evaluation; an earlier file of the same step and split is replaced."""
    path = _path(run_dir, step, split)
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = (json.dumps(finite_or_none(vars(outcome)), ensure_ascii=False, allow_nan=False) for outcome in outcomes)
    write_atomically(path, "".join(f"{line}\n" for line in lines))
    return path


def read_outcomes(run_dir: Path, step: int, split: str) -> dict[str, Outcome]:
    """Read the outcomes of one evaluation."""
    rows = read_jsonl(_path(run_dir, step, split))
    found = [_outcome(row) for row in rows if isinstance(row.get("id"), str)]
    return {outcome.id: outcome for outcome in found}


def _outcome(row: Mapping[str, object]) -> Outcome:
    scores, parts = row.get("scores"), row.get("parts")
    return Outcome(
        id=str(row["id"]),
        scores={name: float(value) for name, value in scores.items() if isinstance(value, int | float)}
        if isinstance(scores, dict)
        else {},
        parts={name: str(value) for name, value in parts.items()} if isinstance(parts, dict) else {},
    )


def _path(run_dir: Path, step: int, split: str) -> Path:
    return Path(run_dir) / "outcomes" / f"step-{step:06d}" / f"{split.replace('/', '.')}.jsonl"


_PNG_MODES = ("1", "L", "LA", "P", "RGB", "RGBA", "I;16")
IMAGE_FIELDS = ("images", "outputs")
_STORED_TYPES: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("answer", "finish"), (str,)),
    **dict.fromkeys(("reward", "advantage"), (int, float)),
    "correct": (bool,),
    "terms": (dict,),
    **dict.fromkeys(IMAGE_FIELDS, (list,)),
}
_STEP_FOLDER = re.compile(r"step-(\d+)")


@dataclass
class SampleRecord:
    """One response to one task, with everything needed to inspect it."""

    id: str
    """Task the sample belongs to; samples of one group share it."""
    prompt: str
    """The prompt as the model saw it."""
    response: str
    """The sampled text."""
    answer: str | None = None
    """The reference answer."""
    images: list[Image] = field(default_factory=list)
    """The prompt's images."""
    outputs: list[Image] = field(default_factory=list)
    """Images that were drawn for the prompt."""
    reward: float | None = None
    """Total reward; None where it could not be scored or does not exist."""
    terms: dict[str, float] = field(default_factory=dict)
    """Each reward term before its weight."""
    advantage: float | None = None
    """Advantage of the sample, the mean over its decisions where they differ."""
    finish: str | None = None
    """End of the response: "eos", "stop" or "length"."""
    correct: bool | None = None
    """Whether the evaluation counted the answer as correct."""


def write_samples(run_dir: Path, step: int, split: str, records: Sequence[SampleRecord]) -> Path:
    """Write the samples of one step; an earlier file of the same step and split is replaced."""
    folder = Path(run_dir) / "samples" / f"step-{step:06d}"
    folder.mkdir(parents=True, exist_ok=True)
    names: dict[int, str] = {}
    rows = [store_record(folder, record, names) for record in records]
    lines = [json.dumps(finite_or_none(row), ensure_ascii=False, allow_nan=False) + "\n" for row in rows]
    path = folder / f"{split}.jsonl"
    write_atomically(path, "".join(lines))
    return path


def read_samples(run_dir: Path, step: int, split: str) -> list[SampleRecord]:
    """Read the samples of one step."""
    folder = Path(run_dir) / "samples" / f"step-{step:06d}"
    images: dict[str, Image | None] = {}
    rows = read_jsonl(folder / f"{split}.jsonl")
    return [load_record(folder, row, images) for row in rows if _is_record(row)]


def store_record(folder: Path, record: SampleRecord, names: dict[int, str] | None = None) -> dict[str, Any]:
    """Write a sample's images as PNG files."""
    folder.mkdir(parents=True, exist_ok=True)
    names = {} if names is None else names
    for image in (*record.images, *record.outputs):
        if id(image) not in names:
            names[id(image)] = _store_image(folder, image)
    return {**vars(record), **{key: [names[id(image)] for image in getattr(record, key)] for key in IMAGE_FIELDS}}


def load_record(folder: Path, row: dict[str, Any], images: dict[str, Image | None] | None = None) -> SampleRecord:
    """Read a record that `store_record` returned."""
    images = {} if images is None else images
    fields: dict[str, Any] = {key: value for key, value in row.items() if key in SampleRecord.__dataclass_fields__}
    for key in IMAGE_FIELDS:
        names = row.get(key) or []
        images |= {name: _load_image(folder / Path(name).name) for name in names if name not in images}
        fields[key] = [image for name in names if (image := images[name]) is not None]
    fields["terms"] = {name: math.nan if value is None else value for name, value in (row.get("terms") or {}).items()}
    return SampleRecord(**{"id": "", "prompt": "", "response": "", **fields})


def sample_steps(run_dir: Path, split: str) -> list[int]:
    """Steps, in rising order, that have samples of a split, "train" or "eval"."""
    folders = (Path(run_dir) / "samples").glob("step-*")
    matches = [(_STEP_FOLDER.fullmatch(folder.name), folder) for folder in folders]
    return sorted(int(match[1]) for match, folder in matches if match and (folder / f"{split}.jsonl").exists())


def _is_record(row: dict[str, Any]) -> bool:
    """Whether every field of a row has a type that `write_samples` writes."""
    if not all(isinstance(row.get(name, ""), str) for name in ("id", "prompt", "response")):
        return False
    if not all(isinstance(row.get(name), (*kinds, type(None))) for name, kinds in _STORED_TYPES.items()):
        return False
    numbers, files = (row.get("terms") or {}).values(), [name for key in IMAGE_FIELDS for name in row.get(key) or []]
    return all(isinstance(value, int | float | None) for value in numbers) and all(isinstance(f, str) for f in files)


def _store_image(folder: Path, image: Image) -> str:
    digest = hashlib.sha256(f"{image.mode}{image.size}".encode() + image.tobytes()).hexdigest()
    path = folder / f"{digest[:16]}.png"
    if not path.exists():
        storable = image if image.mode in _PNG_MODES else image.convert("RGB")
        with replaced(path) as draft:
            storable.save(draft, format="PNG")
    return path.name


def _load_image(path: Path) -> Image | None:
    from PIL import Image

    try:
        with Image.open(path) as image:
            image.load()
            return image.copy()
    except (OSError, ValueError):  # ValueError: a name that no file can have
        return None
