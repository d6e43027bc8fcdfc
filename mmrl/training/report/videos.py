"""Videos of evaluation episodes, embedded in the report."""

from __future__ import annotations

import base64
import re
from pathlib import Path
from typing import Any

LARGEST_BYTES = 3_000_000
"""Of one video; larger ones are named, not embedded."""
MOST_FILMS = 12
_STEP = re.compile(r"step-(\d+)")


def videos_of(folder: Path) -> list[dict[str, Any]]:
    """The videos of a run's first and last evaluation that kept some."""
    files = sorted(path for path in folder.glob("videos/*.mp4") if _STEP.match(path.name))
    steps = sorted({_step(path) for path in files})
    kept = [path for path in files if _step(path) in (steps[0], steps[-1])]
    return [{"title": path.stem.replace("-", " "), "source": _embedded(path)} for path in kept[:MOST_FILMS]]


def _step(path: Path) -> int:
    found = _STEP.match(path.name)
    assert found is not None
    return int(found[1])


def _embedded(path: Path) -> str | None:
    if path.stat().st_size > LARGEST_BYTES:
        return None
    return f"data:video/mp4;base64,{base64.b64encode(path.read_bytes()).decode()}"
