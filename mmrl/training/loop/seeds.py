"""Named random streams: every draw of a run follows from (seed, purpose, step, ...), so a resumed run repeats it."""

from __future__ import annotations

import hashlib
import importlib
import random
from typing import Any

import numpy as np
import torch
from torch import Tensor


def stream_seed(seed: int, *purpose: int | str) -> int:
    """Derive a 63-bit seed for one purpose from the run's seed."""
    text = "/".join(str(part) for part in (seed, *purpose))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def make_generator(seed: int, *purpose: int | str) -> torch.Generator:
    """CPU generator of one named stream, see `stream_seed`."""
    return torch.Generator().manual_seed(stream_seed(seed, *purpose))


def seed_everything(seed: int) -> None:
    """Seed the global generators of Python, NumPy and torch (initialisation, dropout)."""
    importlib.import_module("rich.style")  # draws from Python's when first imported, in a resumed run once more
    random.seed(stream_seed(seed, "python"))
    np.random.seed(stream_seed(seed, "numpy") % 2**32)
    torch.manual_seed(stream_seed(seed, "torch"))


def capture_global_rng() -> dict[str, Any]:
    """State of the global generators in types that `torch.load(weights_only=True)` accepts."""
    algorithm, keys, position, has_gauss, gauss = np.random.get_state()
    version, internal, gauss_next = random.getstate()
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "numpy": [algorithm, torch.from_numpy(np.asarray(keys).astype(np.int64)), position, has_gauss, gauss],
        "python": [version, list(internal), gauss_next],
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def restore_global_rng(state: dict[str, Any]) -> None:
    """Put back what `capture_global_rng` returned."""
    torch.set_rng_state(state["torch"])
    algorithm, keys, position, has_gauss, gauss = state["numpy"]
    np.random.set_state((algorithm, _as_uint32(keys), position, has_gauss, gauss))
    version, internal, gauss_next = state["python"]
    random.setstate((version, tuple(internal), gauss_next))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(state["cuda"])


def _as_uint32(keys: Tensor) -> np.ndarray:
    return keys.numpy().astype(np.uint32)
