"""Policies as folders: policy.json with kind and configuration, weights and the statistics of the data."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any, Protocol, TypeVar

from torch import nn

from mmrl.errors import UserError
from mmrl.fields import check_config
from mmrl.files import read_json_object, replaced, write_atomically
from mmrl.hub.building import sort_header
from robotics.policies.base.statistics import ActionRange, ActionStatistics

Config = TypeVar("Config")

WEIGHTS_FILE = "model.safetensors"
CONFIG_FILE = "policy.json"
STATISTICS_FILE = "action_statistics.json"
BOUNDS_FILE = "action_bounds.json"


class Scaled(Protocol):
    """A policy as far as its units go; see `ActionPolicy`."""

    action_size: int
    statistics: ActionStatistics | None
    action_bounds: ActionRange | None


def write_config(path: Path, kind: str, config: Any, policy: Scaled, **more: Any) -> None:
    """Write policy.json and the policy's units."""
    path.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"kind": kind, **dataclasses.asdict(config), **more}, indent=2)
    write_atomically(path / CONFIG_FILE, text + "\n")
    write_units(path, policy)


def write_units(path: Path, policy: Scaled) -> None:
    """Write the statistics of a policy's data and the bounds of its actions into its folder, or remove those in it."""
    if policy.statistics is None:
        (path / STATISTICS_FILE).unlink(missing_ok=True)
    else:
        policy.statistics.save(path / STATISTICS_FILE)
    if policy.action_bounds is None:
        (path / BOUNDS_FILE).unlink(missing_ok=True)
    else:
        write_atomically(path / BOUNDS_FILE, json.dumps(policy.action_bounds.as_dict()) + "\n")


def is_saved_policy(path: Path) -> bool:
    """Whether a folder holds a policy of this package, which `open_policy` loads."""
    return (path / CONFIG_FILE).is_file()


def read_config(path: Path) -> dict[str, Any]:
    """Read a folder's policy.json."""
    file = path / CONFIG_FILE
    if not file.is_file():
        raise UserError(f"{path} is not a saved policy: it has no {CONFIG_FILE}")
    return read_json_object(file)


def make_config(kind: type[Config], entries: dict[str, Any], place: str) -> Config:
    """Build a dataclass from entries; raises UserError where one is unknown, missing or out of bounds."""
    if not isinstance(entries, dict):
        raise UserError(f"{place} is {entries!r:.80}; expected an object")
    known = {field.name for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    unknown = sorted(set(entries) - known)
    if unknown:
        raise UserError(f"{place} has the unknown entries {unknown}; known are: {', '.join(sorted(known))}")
    try:
        made = kind(**entries)
        check_config(made)
    except (TypeError, ValueError) as error:  # a missing entry, a wrong type or a value out of bounds
        raise UserError(f"{place}: {error}") from error
    return made


def read_units(path: Path, policy: Scaled) -> None:
    """Read what `write_units` wrote into a policy; one that has bounds keeps them where the folder has none."""
    file, bounds = path / STATISTICS_FILE, path / BOUNDS_FILE
    policy.statistics = ActionStatistics.load(file) if file.is_file() else None
    if bounds.is_file():
        policy.action_bounds = ActionRange.load(bounds, policy.action_size)


def write_weights(module: nn.Module, path: Path) -> None:
    """Write a module's weights and buffers to a folder, created with its parents."""
    from safetensors.torch import save_model

    with replaced(path / WEIGHTS_FILE) as draft:
        save_model(module, str(draft))
        sort_header(draft)


def read_weights(module: nn.Module, path: Path) -> None:
    """Read what `write_weights` wrote into a module of the same shape."""
    from safetensors import SafetensorError
    from safetensors.torch import load_model

    file = path / WEIGHTS_FILE
    if not file.is_file():
        raise UserError(f"{path} is not a saved policy: it has no {WEIGHTS_FILE}")
    try:
        load_model(module, str(file))
    except (SafetensorError, RuntimeError) as error:  # a damaged file; other names or shapes
        reason = " ".join(str(error).split())[:300]
        raise UserError(f"the weights in {file} do not fit or are damaged: {reason}") from error
