"""The first episodes of a run, which a latent is fitted to before it can embed any."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

if TYPE_CHECKING:
    from numpy.typing import NDArray


class FirstEpisode(NamedTuple):
    """One episode."""

    frames: NDArray[np.uint8] | None
    """(F, H, W, 3); None where the latent looks at no images."""
    states: NDArray[np.float32]
    """(P, S)."""
    state_label: str
    """Its initial state."""
    label: str
    """With whose successes it is compared."""
    success: bool
    """Whether it solved the task."""


@dataclass
class FirstEpisodes:
    """Episodes so far, in order."""

    rows: list[FirstEpisode] = field(default_factory=list)

    def add(self, rows: Sequence[FirstEpisode]) -> None:
        """Append episodes."""
        self.rows += rows

    def clear(self) -> None:
        """Forget all of them, once the latent is fitted."""
        self.rows = []

    def state_dict(self) -> dict[str, Any]:
        """State for a checkpoint, in types that `torch.load(weights_only=True)` accepts."""
        return {
            "rows": [
                [_tensor(row.frames), _tensor(row.states), row.state_label, row.label, row.success] for row in self.rows
            ]
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`."""
        self.rows = [
            FirstEpisode(None if frames is None else frames.numpy(), states.numpy(), *rest)
            for frames, states, *rest in state["rows"]
        ]


def _tensor(array: NDArray[Any] | None) -> torch.Tensor | None:
    return None if array is None else torch.from_numpy(np.ascontiguousarray(array))
