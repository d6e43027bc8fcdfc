"""The process of one arm: `python -m mmrl.bench.worker REQUEST RESULT` runs a function and writes what it returns."""

from __future__ import annotations

import importlib
import json
import sys
import traceback
from pathlib import Path
from typing import Any

__all__ = ["main"]


def main(request: str, result: str) -> int:
    """Run `module:function` of the request with its options.

    Args:
        request: JSON file {"function", "options", "threads"}.
        result: JSON file to write: what the function returned, or {"error", "traceback"}.

    Returns:
        The exit code: 0 done, 1 the function raised.
    """
    asked: dict[str, Any] = json.loads(Path(request).read_text(encoding="utf-8"))
    try:
        module, _, name = asked["function"].partition(":")
        _limit_threads(int(asked["threads"]))
        answer = getattr(importlib.import_module(module), name)(asked["options"])
        code = 0
    except Exception as error:
        answer = {"error": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()}
        code = 1
    Path(result).write_text(json.dumps(answer), encoding="utf-8")
    return code


def _limit_threads(threads: int) -> None:
    import torch

    torch.set_num_threads(threads)
    torch.set_num_interop_threads(threads)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2]))
