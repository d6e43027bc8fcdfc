"""The process of one arm: `python -m benchmarks.worker REQUEST RESULT` runs a function and writes its result."""

from __future__ import annotations

import importlib
import json
import sys
import traceback
from pathlib import Path
from typing import Any


def main(request: str, result: str) -> int:
    """Read a request from a JSON file and write the result to another; returns 1 if the function raised."""
    answer = answer_to(json.loads(Path(request).read_text(encoding="utf-8")))
    Path(result).write_text(json.dumps(answer), encoding="utf-8")
    return 1 if "error" in answer else 0


def answer_to(asked: dict[str, Any]) -> dict[str, Any]:
    """Run an arm in this process."""
    module, _, name = asked["function"].partition(":")
    try:
        return dict(getattr(importlib.import_module(module), name)(asked["options"]))
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2]))
