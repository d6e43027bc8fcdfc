"""Data sets that a builder reads, given as options of `data` are in a configuration."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from mmrl.errors import UserError
from mmrl.vlm.data import DataConfig, LoadedTasks, load_tasks


def load_source(options: Mapping[str, Any], name: str) -> LoadedTasks:
    """Read the questions of a data set, and build it first where it is missing and its options name a builder."""
    known = {field.name for field in dataclasses.fields(DataConfig)} - {"video"}
    if unknown := sorted(set(options) - known):
        raise UserError(f"{name} has no option {', '.join(unknown)}; there are: {', '.join(sorted(known))}")
    if "path" not in options:
        raise UserError(f"{name} names no path; give {name}: {{path: FILE.jsonl}}, as data of a configuration")
    return load_tasks(DataConfig(**options))
