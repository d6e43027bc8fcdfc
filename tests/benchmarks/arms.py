"""Arms without measurements: they record that they ran and return given numbers."""

import json
import os
from pathlib import Path
from typing import Any

SEEN = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "MALLOC_MMAP_THRESHOLD_", "CUDA_VISIBLE_DEVICES", "EXTRA")


def given(options: dict[str, Any]) -> dict[str, Any]:
    """Append a line to the journal; seconds are those of the options at this arm's turn."""
    journal = Path(options["journal"])
    name = options["name"]
    turn = journal.read_text().count(f'"{name}"') if journal.exists() else 0
    note = {"name": name, "pid": os.getpid(), **{key: os.environ.get(key) for key in SEEN}}
    with journal.open("a") as handle:
        handle.write(json.dumps(note) + "\n")
    seconds = options["seconds"][min(turn, len(options["seconds"]) - 1)]
    times = {"total": seconds, "half": seconds / 2}
    return {"cpu_s": times, "wall_s": times, "peak_mb": {"total": 100 * seconds}, "held_mb": 1.0, "counts": {"rows": 8}}


def broken(options: dict[str, Any]) -> dict[str, Any]:
    """Raise after recording that it ran."""
    given(options)
    raise ValueError("no such thing")


def dies(options: dict[str, Any]) -> dict[str, Any]:
    """End the process as a crash does."""
    os._exit(7)
