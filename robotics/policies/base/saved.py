"""Policies as folders: policy.json with kind and configuration, weights, and the statistics of the data."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from torch import nn

from mmrl.errors import UserError
from mmrl.fields import check_config
from mmrl.files import read_json_object, replaced, write_atomically, written_by_run
from mmrl.hub.building import check_finite, sort_header
from robotics.policies.base.action_statistics import ActionRange, ActionStatistics
from robotics.sim.interface import RobotInterface

LOGGER = logging.getLogger("mmrl")
Config = TypeVar("Config")
ModuleT = TypeVar("ModuleT", bound=nn.Module)

WEIGHTS_FILE = "model.safetensors"
CONFIG_FILE = "policy.json"
STATISTICS_FILE = "action_statistics.json"
SMALL = 4096
"""Integers up to this are never considered too large."""
COUNTS = ("layers", "blocks")
"""Entries that count modules, each of which has at least one tensor."""
NO_SIZES = ("seed", "first_id")
"""Integer entries that are not sizes."""
BOUNDS_FILE = "action_bounds.json"
INTERFACE_FILE = "interface.json"
EXAMPLE = '{"state": ["x", "y"], "actions": null, "cameras": ["front"], "control_hz": 10}'


class Scaled(Protocol):
    """The parts of an `ActionPolicy` about its units and its robot."""

    action_size: int
    statistics: ActionStatistics | None
    action_bounds: ActionRange | None
    interface: RobotInterface | None


def write_config(path: Path, kind: str, config: Any, policy: Scaled, **more: Any) -> None:
    """Write policy.json and the policy's units."""
    path.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"kind": kind, **dataclasses.asdict(config), **more}, indent=2)
    write_atomically(path / CONFIG_FILE, text + "\n")
    write_units(path, policy)


def write_units(path: Path, policy: Scaled) -> None:
    """Write a policy's statistics, action bounds and interface to its folder; files of missing ones are removed."""
    if policy.statistics is None:
        (path / STATISTICS_FILE).unlink(missing_ok=True)
    else:
        policy.statistics.save(path / STATISTICS_FILE)
    if policy.action_bounds is None:
        (path / BOUNDS_FILE).unlink(missing_ok=True)
    else:
        write_atomically(path / BOUNDS_FILE, json.dumps(policy.action_bounds.as_dict()) + "\n")
    if policy.interface is None:
        (path / INTERFACE_FILE).unlink(missing_ok=True)
    else:
        write_atomically(path / INTERFACE_FILE, json.dumps(policy.interface.as_dict()) + "\n")


def is_saved_policy(path: Path) -> bool:
    """Whether a folder contains a policy of this package that `open_policy` can load."""
    return (path / CONFIG_FILE).is_file()


def read_config(path: Path) -> dict[str, Any]:
    """Read a folder's policy.json."""
    file = path / CONFIG_FILE
    if not file.is_file():
        missing = (
            f"the folder does not exist{written_by_run(path)}" if not path.is_dir() else f"it has no {CONFIG_FILE}"
        )
        raise UserError(f"{path} is not a saved policy: {missing}")
    return read_json_object(file)


def make_config(kind: type[Config], entries: dict[str, Any], place: str) -> Config:
    """Build a dataclass from entries; raises UserError if one is unknown, missing or out of bounds."""
    if not isinstance(entries, dict):
        raise UserError(f"{place} is {entries!r:.80}; expected an object")
    known = {field.name for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    unknown = sorted(set(entries) - known)
    if unknown:
        raise UserError(f"{place} has the unknown entries {unknown}; known: {', '.join(sorted(known))}")
    try:
        made = kind(**entries)
        check_config(made)
    except (TypeError, ValueError) as error:  # a missing entry, a wrong type or a value out of bounds
        raise UserError(f"{place}: {error}") from error
    return made


def read_units(path: Path, policy: Scaled) -> None:
    """Read the files of `write_units` into a policy, which keeps its bounds or interface if the folder has none."""
    file = path / STATISTICS_FILE
    bounds = path / BOUNDS_FILE
    interface = path / INTERFACE_FILE
    policy.statistics = ActionStatistics.load(file) if file.is_file() else None
    if bounds.is_file():
        policy.action_bounds = ActionRange.load(bounds, policy.action_size)
    if interface.is_file():
        policy.interface = RobotInterface.load(interface)
    else:
        LOGGER.warning(
            "%s has no %s, so it cannot be checked whether states, cameras and control rate match the policy's "
            "training; add one, such as %s, with null for anything unknown",
            *(path, INTERFACE_FILE, EXAMPLE),
        )


def build_fitting(make: Callable[[], ModuleT], entries: Mapping[str, Any], path: Path) -> ModuleT:
    """Make a module from a folder's entries, after `check_fitting`."""
    check_fitting(make, entries, path)
    return make()


def check_fitting(make: Callable[[], nn.Module], entries: Mapping[str, Any], path: Path) -> None:
    """Check that a folder's weights have the sizes given by its entries.

    The module, or a part of it, is built without memory and compared with the shapes in the file.
    """
    shapes = check_sizes(entries, path)
    if not shapes:
        return  # reading the weights later reports what is wrong with them
    with torch.device("meta"):
        own = {name: tuple(value.shape) for name, value in make().state_dict().items()}
    wrong = [name for name, shape in own.items() if shapes.get(name, shape) != shape]
    if wrong:
        shown = f"{wrong[0]} has the shape {shapes[wrong[0]]}, but the entries require {own[wrong[0]]}"
        raise UserError(f"the weights in {path} do not fit its configuration: {shown}")
    expected, found = (sum(map(math.prod, sizes.values())) for sizes in (own, shapes))
    if expected > 2 * found + SMALL:
        raise UserError(f"the weights in {path} have {found} numbers, but its configuration requires {expected}")


def check_sizes(entries: Mapping[str, Any], path: Path) -> dict[str, tuple[int, ...]]:
    """Reject integers too large for the weights in a folder; returns the shapes of the weights."""
    shapes = _shapes(path / WEIGHTS_FILE)
    numbers = sum(map(math.prod, shapes.values()))
    for place, number in _integers(entries):
        name = place.rpartition(".")[2]
        most = len(shapes) if shapes and name in COUNTS else max(numbers, SMALL)
        if number > most and name not in NO_SIZES:
            raise UserError(f"{place} in {path} is {number}; its weights allow at most {most}")
    return shapes


def _shapes(file: Path) -> dict[str, tuple[int, ...]]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(file), "pt") as weights:
            return {name: tuple(weights.get_slice(name).get_shape()) for name in weights.keys()}  # noqa: SIM118
    except (SafetensorError, OSError):
        return {}


def _integers(value: Any, place: str = "") -> Iterator[tuple[str, int]]:
    """Integers in nested entries with their paths."""
    if isinstance(value, Mapping):
        for name, entry in value.items():
            yield from _integers(entry, f"{place}.{name}".lstrip("."))
    elif isinstance(value, list | tuple):
        for entry in value:
            yield from _integers(entry, place)
    elif isinstance(value, int) and not isinstance(value, bool):
        yield place, value


def write_weights(module: nn.Module, path: Path) -> None:
    """Write a module's weights and buffers to a folder, created with its parents."""
    from safetensors.torch import save_model

    with replaced(path / WEIGHTS_FILE) as draft:
        save_model(module, str(draft))
        sort_header(draft)


def read_weights(module: nn.Module, path: Path) -> None:
    """Read the weights written by `write_weights` into a module with the same shapes."""
    from safetensors import SafetensorError
    from safetensors.torch import load_model

    file = path / WEIGHTS_FILE
    if not file.is_file():
        raise UserError(f"{path} is not a saved policy: {WEIGHTS_FILE} not found")
    try:
        load_model(module, str(file))
    except (SafetensorError, RuntimeError) as error:  # a damaged file; other names or shapes
        reason = " ".join(str(error).split())[:300]
        raise UserError(f"the weights in {file} do not fit or are damaged: {reason}") from error
    check_finite(module.state_dict(), file)
