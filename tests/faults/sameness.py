"""Differences between two run folders, apart from times, memory and paths."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pyarrow.parquet import read_table
from safetensors.torch import load_file

__all__ = ["differences"]

MEASURED = ("time", "sampler", "seconds", "memory", "tokens/per_second", "cost/seconds", "output_dir", "relative")
"""Keys, or what stands before their slash, that no two runs share: times, memory, their own folder."""
NOT_COMPARED = ("tensorboard", "report.html", "config.yaml", "earlier", "run.lock", "warnings.jsonl")
"""`earlier` holds what a run had written that was killed before its first checkpoint; a resumed run warns of itself."""


def differences(first: Path, second: Path) -> list[str]:
    """Names of the files that differ, or that only one of the two runs has.

    Args:
        first: folder of a run.
        second: folder of another.
    """
    datasets = [path.parents[1].relative_to(first) for path in first.rglob("meta/info.json")]
    names = [
        {name for name in _files(folder) if not any(_is_part(Path(name), dataset) for dataset in datasets)}
        for folder in (first, second)
    ]
    differ = [dataset for dataset in datasets if _episodes(first / dataset) != _episodes(second / dataset)]
    found = [f"{dataset}: other episodes" for dataset in differ]
    found += [f"{name} only in {first.name}" for name in sorted(names[0] - names[1])]
    found += [f"{name} only in {second.name}" for name in sorted(names[1] - names[0])]
    for name in sorted(names[0] & names[1]):
        reason = _difference(first / name, second / name)
        found += [f"{name}: {reason}"] if reason else []
    return found


def _files(folder: Path) -> set[str]:
    paths = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    return {str(path) for path in paths if path.parts[0] not in NOT_COMPARED}


def _is_part(path: Path, dataset: Path) -> bool:
    """Whether a file holds some of a dataset's episodes: a recording that continues begins new files."""
    return path.suffix == ".parquet" and path.is_relative_to(dataset)


def _episodes(dataset: Path) -> list[list[dict[str, Any]]]:
    """Rows of a dataset's frames and episodes, without where they are stored."""
    found = []
    for folder, key in (("data", "index"), ("meta/episodes", "episode_index")):
        rows = [row for path in (dataset / folder).rglob("*.parquet") for row in read_table(path).to_pylist()]
        kept = ({name: row[name] for name in row if not name.endswith(("/chunk_index", "/file_index"))} for row in rows)
        found.append(sorted(kept, key=lambda row: row[key]))
    return found


def _difference(first: Path, second: Path) -> str:
    if first.read_bytes() == second.read_bytes():
        return ""
    if first.name == "manifest.json":  # sizes and checksums follow from the files, whose contents are compared
        names = (json.loads(path.read_text()) for path in (first, second))
        return _unequal(*(sorted(name for name in one if not name.endswith(".parquet")) for one in names), "")
    if first.suffix == ".jsonl":
        rows = [[json.loads(line) for line in path.read_text().splitlines()] for path in (first, second)]
        return _unequal(*rows, "")
    if first.suffix == ".json":
        return _unequal(*(json.loads(path.read_text()) for path in (first, second)), "")
    if first.suffix == ".pt":
        return _unequal(*(torch.load(path, weights_only=True) for path in (first, second)), "")
    if first.suffix == ".safetensors":
        return _unequal(*(load_file(path) for path in (first, second)), "")
    return "other bytes"


def _unequal(first: Any, second: Any, where: str) -> str:
    """The path of the first difference of two values; empty if they are equal bit for bit."""
    if type(first) is not type(second):
        return f"{where}: {type(first).__name__} and {type(second).__name__}"
    if isinstance(first, dict):
        keys = [{key for key in value if not _is_measured(key)} for value in (first, second)]
        if keys[0] != keys[1]:
            return f"{where}: only one has {sorted(map(str, keys[0] ^ keys[1]))}"
        return _first_of(_unequal(first[key], second[key], f"{where}.{key}") for key in first if key in keys[0])
    if isinstance(first, list | tuple):
        if len(first) != len(second):
            return f"{where}: {len(first)} and {len(second)} entries"
        return _first_of(
            _unequal(a, b, f"{where}[{index}]") for index, (a, b) in enumerate(zip(first, second, strict=True))
        )
    if isinstance(first, torch.Tensor):
        same = first.dtype == second.dtype and first.shape == second.shape
        return "" if same and _bits(first) == _bits(second) else f"{where}: other numbers"
    both_nan = isinstance(first, float) and math.isnan(first) and math.isnan(second)
    return "" if both_nan or first == second else f"{where}: {str(first)[:60]} and {str(second)[:60]}"


def _bits(tensor: torch.Tensor) -> bytes:
    return np.ascontiguousarray(tensor.detach().contiguous().flatten().view(torch.uint8).numpy()).tobytes()


def _is_measured(key: Any) -> bool:
    return isinstance(key, str) and (key in MEASURED or key.partition("/")[0] in MEASURED)


def _first_of(reasons: Any) -> str:
    return next((reason for reason in reasons if reason), "")
