"""Write golden files: `python -m tests.golden.make NAME [CLONE ...]`."""

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from tests.golden.make import by_hand, packages
from tests.golden.make.peers import Clone, Made, package

GOLDEN = Path(__file__).resolve().parents[1]


def main(name: str, *paths: str) -> None:
    """Write tests/golden/NAME.json."""
    text = laid_out(document(name, *made(name, *paths)))
    (GOLDEN / f"{name}.json").write_text(text + "\n", encoding="utf-8")


def made(name: str, *paths: str) -> Made:
    """Citation, inputs, peers and clones of a golden file; `paths` are those of the clones."""
    if name in packages.TABLE:
        return packages.made(name)
    if name in by_hand.ROWS:
        return by_hand.ROWS[name]()
    return importlib.import_module(f"tests.golden.make.{name}").make(*paths)


def document(
    name: str, citation: str, inputs: dict[str, Any], peers: list[dict[str, Any]], *clones: Clone
) -> dict[str, Any]:
    """The content of a golden file.

    Args:
        name: that of the file.
        citation: what is computed, and where it was published.
        inputs: what the peers were given.
        peers: for each of them "program", "calls", "relative" (how exact its numbers are; "because" says why, where it
            is not float64) and what it returned.
        clones: the clones that the command is given, in order.
    """
    return {
        "citation": citation,
        "command": " ".join(["python -m tests.golden.make", name, *(x.repository.split("/")[1] for x in clones)]),
        "made_with": [package("torch"), package("numpy")],
        "inputs": inputs,
        "peers": [_plain(peer) for peer in peers],
    }


def laid_out(value: Any, indent: str = "") -> str:
    """JSON with a line for each entry of an object, and arrays of numbers or texts in one line."""
    if isinstance(value, dict) and value:
        entries = [f"{json.dumps(key)}: {laid_out(entry, indent + ' ')}" for key, entry in value.items()]
    elif isinstance(value, list) and "{" in json.dumps(value, allow_nan=False):
        entries = [laid_out(entry, indent + " ") for entry in value]
    else:
        return json.dumps(value, allow_nan=False)
    start, end = "{}" if isinstance(value, dict) else "[]"
    inside = f",\n{indent} ".join(entries)
    return f"{start}\n{indent} {inside}\n{indent}{end}"


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor | np.ndarray):
        return value.tolist()
    if isinstance(value, dict):
        return {key: _plain(entry) for key, entry in value.items()}
    return value.item() if isinstance(value, np.generic) else value


if __name__ == "__main__":
    main(*sys.argv[1:])
