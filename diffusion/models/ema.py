"""Moving averages of the trained weights, with the decay schedules of the published methods.

There are three: the average used for evaluation and saving (`eval_ema_decay`), the anchor of AWM's KL term
(`kl_ema_decay`) and the policy from which DiffusionNFT samples (`nft_old_decay`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mmrl.core.payload import to_device
from mmrl.errors import UserError
from mmrl.fields import bounded
from mmrl.training.recipe import Step
from mmrl.training.sharding import exact_weights


class EMAWeights:
    """A moving average of the trained parameters; all other weights are shared with the policy.

    The average starts as a copy. It is always float32, so small updates are not rounded away.

    Args:
        policy: the policy; parameters that currently require a gradient are averaged.
        enabled: if False, there is no average: `applied` does nothing, and nothing is saved.

    Raises:
        UserError: the policy has no trainable parameters.
    """

    def __init__(self, policy: nn.Module, *, enabled: bool = True) -> None:
        trained = {name: value for name, value in policy.named_parameters() if value.requires_grad}
        self._policy = policy
        if enabled and not trained:
            raise UserError("no parameter of the policy requires a gradient, so there is nothing to average")
        followed = trained if enabled else {}
        self._values = {name: value.detach().float().clone() for name, value in followed.items()}
        self._applied = False

    def __len__(self) -> int:
        return len(self._values)

    @torch.no_grad()
    def update(self, decay: float) -> None:
        """Move the average towards the policy: average <- decay * average + (1 - decay) * policy.

        Args:
            decay: weight of the OLD average, 0..1; 0 copies the policy bit for bit.

        Raises:
            RuntimeError: the average is currently applied to the policy, see `applied`.
        """
        self._check_apart()
        # not the parameters themselves: sharded training holds rounded copies of its weights there
        for name, weight in exact_weights(self._policy, list(self._values)):
            current = weight.float()
            if decay == 0.0:
                # a copy and not lerp with weight 1, which may round
                self._values[name] = current.clone()
            else:
                self._values[name] = to_device(self._values[name], current.device).lerp_(current, 1.0 - decay)

    def copy_(self) -> None:
        """Make the average equal to the policy."""
        self.update(0.0)

    @contextlib.contextmanager
    def applied(self, policy: nn.Module | None = None) -> Iterator[None]:
        """Replace the policy's weights with the average and restore them afterwards, even after an exception.

        The weights are restored bit for bit. Changes made to the parameters in the meantime are lost.

        Args:
            policy: the module whose parameters are replaced, by name; None for the averaged policy itself.

        Raises:
            RuntimeError: the average is already applied.

        Gradient: the exchange is not part of any graph; earlier graphs cannot be used for a backward pass any more.
        """
        self._check_apart()
        # by name: the module may be a wrapped or copied policy
        parameters = dict((self._policy if policy is None else policy).named_parameters())
        replaced = {name: parameters[name] for name in self._values}
        # clones, as `copy_` overwrites the parameters in place
        kept = {name: parameter.detach().clone() for name, parameter in replaced.items()}
        _write(replaced, self._values)
        # an empty average changes nothing and may be applied twice
        self._applied = len(self) > 0
        try:
            yield
        finally:
            _write(replaced, kept)
            self._applied = False

    def state_dict(self) -> dict[str, Tensor] | None:
        """A float32 copy of the average by parameter name; None if it is not enabled."""
        return {name: value.clone() for name, value in self._values.items()} or None

    def load_state_dict(self, state: Mapping[str, Tensor] | None) -> None:
        """Restore `state_dict`; if the checkpoint has no average, it starts from the policy.

        Args:
            state: values by parameter name.

        Raises:
            UserError: the values belong to other parameters.
            RuntimeError: the average is currently applied.
        """
        self._check_apart()
        if state is None or not self._values:
            return
        # symmetric: names that are missing and names that are new
        different = sorted(set(state) ^ set(self._values))
        different += [name for name, own in self._values.items() if name in state and state[name].shape != own.shape]
        if different:
            raise UserError(
                f"the averaged weights belong to a different policy; {', '.join(different[:4])} do not match"
            )
        self._values = {
            name: state[name].detach().to(value.device, torch.float32, copy=True)
            for name, value in self._values.items()
        }

    def _check_apart(self) -> None:
        if self._applied:
            raise RuntimeError("the policy currently has the averaged weights; leave applied() first.")


@torch.no_grad()
def _write(parameters: Mapping[str, nn.Parameter], values: Mapping[str, Tensor]) -> None:
    for name, parameter in parameters.items():
        parameter.copy_(values[name], non_blocking=values[name].device.type == "cpu")
    torch.clear_autocast_cache()  # it caches copies of the weights and does not notice that they changed


def eval_ema_decay(step: int, decay: float = 0.9999) -> float:
    """Decay of the average used for evaluation and saving: min((1 + s) / (10 + s), d).

    Source: yifan123/flow_grpo flow_grpo/ema.py, scxue/advantage_weighted_matching.
    """
    return min((1 + step) / (10 + step), decay)


def kl_ema_decay(step: int, limit: float = 0.3, slope: float = 0.001) -> float:
    """Decay of the anchor of AWM's KL term: min(slope * s, limit), so at first the anchor is the last sampling policy.

    Source: scxue/advantage_weighted_matching (the linear schedule of the adapter `ema`).
    """
    return min(slope * step, limit)


def nft_old_decay(step: int, kind: int) -> float:
    """Decay of DiffusionNFT's sampling policy after `step` steps; `kind` is a row of `NFT_SCHEDULES`.

    Source: NVlabs/DiffusionNFT (decay types of the adapter `old`); X-GenGroup/Flow-Factory, trainers CRD and DGPO.
    """
    flat, first, slope, limit = NFT_SCHEDULES[kind]
    # constant for the first `flat` steps, then linear up to the limit
    return min(first + slope * max(step - flat, 0), limit)


NFT_SCHEDULES = {
    0: (0, 0.0, 0.0, 0.0),
    1: (0, 0.0, 0.001, 0.5),
    2: (75, 0.0, 0.0075, 0.999),
    3: (0, 0.25, 0.005, 0.999),
    4: (0, 0.0, 0.001, 0.3),
}
"""Decay types (steps, value, slope, limit): constant for some steps, then growing by slope per step to the limit."""


FOLDER = "eval_ema"
"""Subfolder of a checkpoint with the averaged policy."""


@dataclass
class EvalEmaConfig:
    """A moving average of the weights for evaluation and export; sampling and KL terms do not use it."""

    decay: float = bounded(0.0, at_least=0, below=1)
    """Maximum weight of the old average; the weight is min((1 + s) / (10 + s), decay) at step s. 0 = no average."""


class EvalAverage(EMAWeights):
    """The average of a policy's trained weights for evaluation; with decay 0, the policy itself is evaluated."""

    def __init__(self, policy: nn.Module, config: EvalEmaConfig) -> None:
        super().__init__(policy, enabled=config.decay > 0)
        self._decay = config.decay

    def on_step_end(self, step: int) -> None:
        """Update the average after a step, counted from 1."""
        self.update(eval_ema_decay(step, self._decay))

    def save(self, checkpoint: Path) -> None:
        """Write the averaged policy to the `eval_ema` folder of a checkpoint."""
        if len(self):
            policy: Any = self._policy
            with self.applied():
                policy.save_pretrained(checkpoint / FOLDER)

    @staticmethod
    def folder_of(checkpoint: Path) -> Path:
        """The folder of a checkpoint's evaluated weights: the average if there is one, otherwise the model."""
        averaged = checkpoint / FOLDER
        return averaged if averaged.is_dir() else checkpoint / "model"


class KeepsEvalAverage:
    """Updates and saves the evaluation average of a recipe's policy."""

    eval_ema: EvalAverage

    def on_step_end(self, step: Step, metrics: Mapping[str, float]) -> None:
        """Update the evaluation average."""
        # the decay counts finished steps
        self.eval_ema.on_step_end(step.number + 1)

    def save_parts(self, folder: Path) -> None:
        """Write the evaluation average next to the policy, as `eval_ema`."""
        self.eval_ema.save(folder)
