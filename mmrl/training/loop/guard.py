"""Names the cause of a NaN or infinite number and keeps the evidence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mmrl.core.rollouts import Rollouts
from mmrl.files import replaced

BATCH_FIELDS = ("reward", "advantage", "logp_old", "logp_ref", "values", "returns")


def describe_nonfinite(minibatch: Rollouts, loss: Tensor | None, policy: nn.Module) -> str | None:
    """Say which number stopped being finite, the earliest cause first."""
    checks: list[tuple[str, Tensor]] = []
    scored = minibatch.scored
    for name in BATCH_FIELDS:
        value = getattr(minibatch, name)
        if value is not None and name != "reward":
            checks.append((f"rollouts.{name}", _visible(value, minibatch.mask)[scored]))
    checks += [
        (f"rollouts.extras[{name!r}]", _visible(value, minibatch.mask)[scored])
        for name, value in minibatch.extras.items()
    ]
    checks += [(f"weight {name}", parameter.detach()) for name, parameter in policy.named_parameters()]
    if loss is not None:
        checks.append(("loss", loss.detach().reshape(1)))
    checks += [(f"gradient of {n}", p.grad) for n, p in policy.named_parameters() if p.grad is not None]
    for name, value in checks:
        bad = ~torch.isfinite(value)
        if bool(bad.any()):
            first = bad.nonzero()[0].tolist()
            return f"{name} has {int(bad.sum())} of {value.numel()} entries NaN or infinite, the first at {first}"
    return None


def save_failure(folder: Path, step: int, minibatch: Rollouts, cause: str, extra: dict[str, Any]) -> Path:
    """Write the rows of a failed optimiser step so that it can be looked at."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"step-{step:06d}-{len(list(folder.glob('*.pt')))}.pt"
    with replaced(path) as draft:
        torch.save({"cause": cause, "step": step, "rollouts": minibatch.to("cpu"), **extra}, draft)
    return path


def _visible(value: Tensor, mask: Tensor) -> Tensor:
    if value.ndim == 1:
        return value
    return torch.where(mask.bool(), value, torch.zeros_like(value))
