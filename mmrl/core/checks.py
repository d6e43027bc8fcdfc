"""Shape and dtype checks of `Rollouts` and of scores, with messages that name the change to make."""

from __future__ import annotations

import torch
from torch import Tensor

_FLOATS = (torch.float32, torch.float64)


def check_rows(group: Tensor, reward: Tensor) -> int:
    """Check the two per-row fields that every `Rollouts` has and return B."""
    if group.dim() != 1 or group.dtype != torch.int64:
        raise ValueError(f"group must be (B,) int64; got {group.dtype} of shape {tuple(group.shape)}.")
    if tuple(reward.shape) != tuple(group.shape) or reward.dtype not in _FLOATS:
        raise ValueError(
            f"reward must be ({len(group)},) float32 or float64, one number a row of group; got "
            f"{reward.dtype} of shape {tuple(reward.shape)}."
        )
    return len(group)


def check_groups(group: Tensor) -> None:
    """Check that the groups are numbered 0..N-1 without a gap."""
    if len(group) == 0:
        return
    present = torch.unique(group)
    if int(present[0]) != 0 or int(present[-1]) != len(present) - 1:
        raise ValueError(
            f"group must use every number from 0 to N-1; got {present.tolist()}. "
            "torch.unique(group, return_inverse=True)[1] renumbers them."
        )


def check_mask(mask: Tensor, rows: int) -> tuple[int, int]:
    """Check the decision mask and return (B, T)."""
    if mask.dim() != 2 or mask.shape[0] != rows:
        raise ValueError(f"mask must be (B, T) with B = {rows} rows; got shape {tuple(mask.shape)}.")
    if mask.shape[1] < 1:
        raise ValueError("mask must have at least one decision; got T = 0.")
    if mask.dtype not in _FLOATS:
        raise ValueError(f"mask must be float32 (0 or 1); got {mask.dtype}. mask.float() converts it.")
    if not bool(((mask == 0) | (mask == 1)).all()):
        raise ValueError("mask must hold only 0 and 1; weights of decisions belong into the advantage.")
    return (rows, mask.shape[1])


def check_decisions(name: str, value: Tensor, shape: tuple[int, int], *, integer: bool = False) -> None:
    """Check one per-decision tensor against the (B, T) of the mask."""
    if tuple(value.shape) != tuple(shape):
        raise ValueError(
            f"{name} must have the shape of the mask, {tuple(shape)}: one number a decision; got {tuple(value.shape)}."
        )
    if integer and value.dtype != torch.int64:
        raise ValueError(f"{name} must be int64; got {value.dtype}.")
    if not integer and value.dtype not in _FLOATS:
        raise ValueError(
            f"{name} must be float32 or float64, because ratios of log-probabilities are lost in "
            f"{value.dtype}. Convert the logits with .float() before the log-softmax."
        )
