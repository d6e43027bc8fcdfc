"""The moving average of the weights that a run evaluates and exports; images and losses of training do not see it."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from diffusion.ema import EMAWeights, eval_ema_decay
from mmrl.fields import bounded

FOLDER = "eval_ema"
"""Folder of a checkpoint that holds the averaged policy."""


@dataclass
class EvalEmaConfig:
    """A moving average of the weights for evaluation and use; sampling and KL terms do not see it."""

    decay: float = bounded(0.0, at_least=0, below=1)
    """Share of the old average that is kept at most, min((1 + s) / (10 + s), decay); 0 = no average."""


class EvalAverage:
    """The average of a policy's trained weights; a decay of 0 evaluates the policy itself."""

    def __init__(self, policy: nn.Module, config: EvalEmaConfig) -> None:
        self._policy, self._decay = policy, config.decay
        self._weights = EMAWeights(policy) if config.decay else None

    def applied(self, policy: nn.Module | None = None) -> AbstractContextManager[None]:
        """Put the average in the policy's place inside the context; see `EMAWeights.applied`."""
        return nullcontext() if self._weights is None else self._weights.applied(policy)

    def update(self, step: int) -> None:
        """Move the average after a step, counted from 1."""
        if self._weights is not None:
            self._weights.update(eval_ema_decay(step, self._decay))

    def state_dict(self) -> dict[str, Tensor] | None:
        """The averaged values; None where there is no average."""
        return None if self._weights is None else self._weights.state_dict()

    def load_state_dict(self, state: Mapping[str, Tensor] | None) -> None:
        """Restore `state_dict`; an average that a checkpoint does not hold starts from the policy."""
        if self._weights is not None and state is not None:
            self._weights.load_state_dict(state)

    def save(self, checkpoint: Path) -> None:
        """Write the averaged policy into a checkpoint, as its `eval_ema`."""
        if self._weights is not None:
            policy: Any = self._policy
            with self._weights.applied():
                policy.save_pretrained(checkpoint / FOLDER)

    @staticmethod
    def folder_of(checkpoint: Path) -> Path:
        """The weights of a checkpoint that were evaluated: the average where there is one, else the model."""
        averaged = checkpoint / FOLDER
        return averaged if averaged.is_dir() else checkpoint / "model"
