"""Reproducible benchmarks: each arm runs in its own process, alternating, with lower bounds next to the times."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import TYPE_CHECKING

from mmrl.errors import UserError
from mmrl.files import write_atomically

if TYPE_CHECKING:
    from benchmarks.harness import BenchOptions

__all__ = ["ROOMS", "run"]

ROOMS = {
    "vlm": "benchmarks.vlm.comparisons",
    "diffusion": "benchmarks.diffusion.comparisons",
    "sim": "benchmarks.robotics.comparisons",
    "gui": "benchmarks.gui.comparisons",
}
"""Benchmark rooms: from name to the module with the comparisons, which is imported on demand."""


def run(room: str, options: BenchOptions, out: Path | None = None) -> tuple[str, bool]:
    """Run the comparisons of a domain; progress and a table go to standard error.

    Args:
        room: row of `ROOMS`.
        options: what to run and how often.
        out: file that the result is written to as well.

    Returns:
        The result as JSON text, and whether every arm ran and every check passed.

    Raises:
        UserError: an option does not fit, or the room is not installed.
    """
    from benchmarks.harness import progress
    from benchmarks.report import describe_machine, describe_versions, settings_of, table

    options.validate()
    _check_room(room, options)
    try:
        module = importlib.import_module(ROOMS[room])
    except ModuleNotFoundError as error:
        raise UserError(f"`python -m benchmarks {room}` needs {error.name}, which is not installed") from error
    comparisons = module.compare(options)
    result = {
        "bench": room,
        "settings": settings_of(options),
        "versions": describe_versions(),
        "machine": describe_machine(options),
        "comparisons": comparisons,
        "failed": [name for name, found in comparisons.items() if found["failed"]],
    }
    text = json.dumps(result, indent=1)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(out, f"{text}\n")
    progress(table(comparisons))
    return text, not result["failed"]


def _check_room(room: str, options: BenchOptions) -> None:
    """Refuse options that a domain ignores."""
    given = {"--against": options.against, "--model": options.model, "--family": options.family != "qwen2_5_vl"}
    ignored = [name for name, value in given.items() if value]
    if room != "vlm" and ignored:
        raise UserError(f"{ignored[0]} is an option of the vlm benchmarks, not of the {room} benchmarks")
