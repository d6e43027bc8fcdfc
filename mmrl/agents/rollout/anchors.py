"""Per-turn numbers as tables of decisions: hashes of observations, which identify equal states, and times."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mmrl.agents.environments.environment import Observation
from mmrl.agents.rollout.episodes import Episode
from mmrl.core.blocks.turns import ANCHOR


def number_observation(observation: Observation, info: Mapping[str, Any]) -> int:
    """A 64-bit hash of `info["anchor"]` if present, else of the observation's text and images."""
    parts = [info[ANCHOR]] if ANCHOR in info else [observation.text, *observation.images]
    digest = blake2b(digest_size=8)
    for part in parts:
        if isinstance(part, np.ndarray):
            digest.update(repr((part.shape, part.dtype.str)).encode())
            digest.update(part.tobytes())
        else:
            digest.update(repr(part).encode())
    return int.from_bytes(digest.digest(), "little", signed=True)


def tabulate_anchors(episodes: Sequence[Episode], turn: Tensor) -> Tensor:
    """(B, T) int64, the number of the observation before each decision's turn (B, T); 0 outside turns."""
    return _tabulate([episode.anchors for episode in episodes], turn, torch.int64)


def tabulate_durations(episodes: Sequence[Episode], turn: Tensor) -> Tensor:
    """(B, T) float32, the seconds of each decision's turn (B, T); 0 outside turns."""
    return _tabulate([episode.seconds for episode in episodes], turn, torch.float32)


def _tabulate(numbers: Sequence[Sequence[float]], turn: Tensor, dtype: torch.dtype) -> Tensor:
    width = max(1 + int(turn.max()), *map(len, numbers))
    rows = [[*own, *[0] * (width - len(own))] for own in numbers]
    table = torch.tensor(rows, dtype=dtype, device=turn.device)
    return torch.where(turn < 0, 0, table.gather(1, turn.clamp(min=0)))
