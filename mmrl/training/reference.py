"""The reference policy of a KL term: a frozen copy, the model with its adapter off, or a moving average."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from mmrl.errors import UserError
from mmrl.training.settings import ReferenceConfig

ScoresT = TypeVar("ScoresT")


class Reference:
    """Scores rollouts with the policy that the KL term pulls towards."""

    def __init__(self, kind: str, policy: nn.Module, decay: float = 0.0) -> None:
        self.kind = kind
        self.decay = decay
        self._policy = policy
        self._copy = _frozen_copy(policy) if kind in ("frozen", "ema") else None

    def score(self, scorer: Callable[[nn.Module], ScoresT]) -> ScoresT:
        """Evaluate `scorer` on the reference, without gradient."""
        with torch.no_grad():
            if self._copy is not None:
                return scorer(self._copy)
            if self.kind == "adapter":
                with self._policy.disable_adapter():  # type: ignore[operator]
                    return scorer(self._policy)
        raise RuntimeError("this run has no reference policy; set reference.kind")

    def update(self) -> None:
        """Move an ema reference towards the policy; call once per optimiser step."""
        if self.kind != "ema" or self._copy is None:
            return
        with torch.no_grad():
            for mean, value in zip(self._copy.parameters(), self._policy.parameters(), strict=True):
                if value.requires_grad:
                    mean.lerp_(value.to(mean.dtype), 1.0 - self.decay)

    def to(self, device: torch.device | str) -> Reference:
        """Move the copy, if there is one; returns itself."""
        if self._copy is not None:
            self._copy.to(device)
        return self

    @property
    def needs_saving(self) -> bool:
        """Whether a checkpoint has to hold weights of its own for the reference."""
        return self._copy is not None

    def save(self, folder: Path) -> None:
        """Write the reference's weights into `folder`."""
        if self._copy is not None:
            self._copy.save_pretrained(folder)  # type: ignore[operator]

    def load(self, folder: Path) -> None:
        """Read weights written by `save`."""
        if self._copy is not None:
            self._copy.load_weights(folder)  # type: ignore[operator]


def _frozen_copy(policy: nn.Module) -> nn.Module:
    copied = copy.deepcopy(policy)
    own = {name: parameter for name, parameter in policy.named_parameters() if parameter.requires_grad}
    shared = [name for name, parameter in copied.named_parameters() if parameter is own.get(name)]
    if shared:
        raise RuntimeError(f"a copy of the policy shares weights that are trained: {', '.join(shared[:4])}")
    return copied.eval().requires_grad_(False)


def make_reference(config: ReferenceConfig, policy: Any, *, needed: bool, start: Reference | None = None) -> Reference:
    """Build the reference policy of a run."""
    has_adapter = bool(getattr(policy, "has_adapter", False))
    kind = config.kind
    if kind == "auto":
        kind = ("adapter" if has_adapter else "frozen") if needed else "none"
    if needed and kind == "none":
        raise UserError("the objective has a KL term but reference.kind is none; use auto, frozen, adapter or ema")
    if kind == "adapter" and not has_adapter:
        raise UserError("reference.kind is adapter but the model has no LoRA adapter; set model.lora.enabled=true")
    if needed and start is not None and start.kind == kind:
        return start.to(next(policy.parameters()).device)
    return Reference(kind if needed else "none", policy, config.ema_decay)
