"""Reading the golden files, and comparing with them as exactly as their peers computed."""

import json
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

FOLDER = Path(__file__).parent
PAPERS = sorted(path.stem for path in FOLDER.glob("*.json"))


def load(paper: str) -> SimpleNamespace:
    """A golden file: citation, command, inputs and peers."""
    return SimpleNamespace(**_parsed(paper))


@cache
def _parsed(paper: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((FOLDER / f"{paper}.json").read_text(encoding="utf-8"))
    return found


def inputs_of(paper: str, peer: dict[str, Any] | None = None) -> SimpleNamespace:
    """The inputs of a file, with those of a peer where it has its own; floats as float64 tensors."""
    given = load(paper).inputs | (peer or {}).get("inputs", {})
    return SimpleNamespace(**{key: tensor(value) for key, value in given.items()})


def tensor(value: Any) -> Any:
    """A float64 or int64 tensor of numbers; anything else as it is."""
    if isinstance(value, list) and not isinstance(value[0], dict | str):
        return torch.from_numpy(np.array(value))
    return value


def group_numbers(prompts: list[str]) -> torch.Tensor:
    """The number of each row's prompt (B,)."""
    return torch.from_numpy(np.unique(np.array(prompts), return_inverse=True)[1])


PROGRESS = 0.25
"""Share of a run's steps that lies behind: a weight that changes over the run has changed."""
FLOAT32 = 2.0**-22
"""Two units in the last place of float32, for what is computed in it here."""


def assert_agrees(found: Any, peer: dict[str, Any], key: str, size: float = 0.0, relative: float | None = None) -> None:
    """Compare with the number of a peer.

    Args:
        found: tensor, array or number.
        peer: one entry of "peers"; its "relative" is the share of the largest number that may differ.
        key: which of its numbers.
        size: the sum of the sizes of the terms where the number is a sum in which they cancel.
        relative: in the place of the peer's, where our side is less exact.
    """
    expected = np.asarray(peer[key], np.float64)
    found = found.detach().double().numpy() if isinstance(found, torch.Tensor) else np.asarray(found, np.float64)
    scale = max(float(np.abs(expected).max()), size)
    atol = scale * (peer["relative"] if relative is None else relative)
    np.testing.assert_allclose(found, expected, rtol=0, atol=atol, err_msg=peer["program"])
