"""The moving average of the weights that a run evaluates and exports; images and losses of training do not see it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from diffusion.ema import EMAWeights, eval_ema_decay
from mmrl.fields import bounded

FOLDER = "eval_ema"
"""Folder of a checkpoint that holds the averaged policy."""


@dataclass
class EvalEmaConfig:
    """A moving average of the weights for evaluation and use; sampling and KL terms do not see it."""

    decay: float = bounded(0.0, at_least=0, below=1)
    """Share of the old average that is kept at most, min((1 + s) / (10 + s), decay); 0 = no average."""


class EvalAverage(EMAWeights):
    """The average of a policy's trained weights; a decay of 0 evaluates the policy itself."""

    def __init__(self, policy: nn.Module, config: EvalEmaConfig) -> None:
        super().__init__(policy, enabled=config.decay > 0)
        self._policy, self._decay = policy, config.decay

    def on_step_end(self, step: int) -> None:
        """Move the average after a step, counted from 1."""
        self.update(eval_ema_decay(step, self._decay))

    def save(self, checkpoint: Path) -> None:
        """Write the averaged policy into a checkpoint, as its `eval_ema`."""
        if len(self):
            policy: Any = self._policy
            with self.applied():
                policy.save_pretrained(checkpoint / FOLDER)

    @staticmethod
    def folder_of(checkpoint: Path) -> Path:
        """The weights of a checkpoint that were evaluated: the average where there is one, else the model."""
        averaged = checkpoint / FOLDER
        return averaged if averaged.is_dir() else checkpoint / "model"
