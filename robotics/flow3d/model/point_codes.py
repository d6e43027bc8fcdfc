"""Sinusoidal codes of query points: as the paper means them, and as its code computes them.

Coordinates are CLIP's: u and v in 0..224 of a 224 x 224 image, z in 0..128 over the range of depths.
"""

from __future__ import annotations

import torch
from torch import Tensor

CODE_SIZE = 72
"""Numbers of a point's code in the paper's network."""
SIDE, DEPTHS = 224, 128
TEMPERATURE = 10000.0


def clip_places(points: Tensor) -> Tensor:
    """Points (..., 3) in -1..1 in CLIP's coordinates: u, v in 0..224, z in 0..127 over the range of depths."""
    share = (points + 1) / 2
    scaled = share * torch.tensor([SIDE, SIDE, DEPTHS], dtype=points.dtype, device=points.device)
    return torch.cat([scaled[..., :2], scaled[..., 2:].clamp(0, DEPTHS - 1)], -1)


def corrected_code(places: Tensor, size: int = CODE_SIZE) -> Tensor:
    """Sines and cosines [sin u w, cos u w, sin v w, cos v w, sin z w, cos z w] with w_k = 10000^(-k / (size / 6 - 1)).

    Source: Hoyyyaard/3DFlowAction AnimateFlow.py, posemb_sincos_3d, as it is meant.
    """
    count = size // 6
    return _waves(places, TEMPERATURE ** (-torch.arange(count, device=places.device) / (count - 1)))


def repo_code(places: Tensor, size: int = CODE_SIZE, shape: tuple[int, int, int] = (SIDE, SIDE, DEPTHS)) -> Tensor:
    """The code that the released weights were trained with.

    `dim //  - 1` in its source is a division by -1, so w_k = 10000^(k / size), and the table that it is read from is
    built in another order of axes than it is read in, see `scrambled_places`. Each position still has its own code.
    `places` (..., 3) u, v, z are truncated to integers within the table.

    Source: Hoyyyaard/3DFlowAction AnimateFlow.py, posemb_sincos_3d.
    """
    frequencies = TEMPERATURE ** (torch.arange(size // 6, device=places.device) / size)
    return _waves(scrambled_places(places, shape).to(frequencies.dtype), frequencies)


def scrambled_places(places: Tensor, shape: tuple[int, int, int] = (SIDE, SIDE, DEPTHS)) -> Tensor:
    """The position (..., 3) whose code the released code reads for positions (..., 3), truncated to integers.

    Its table is written with depths first, then rows and columns, and read as if depths came last: entry [v, u, z] is
    number n = (v columns + u) depths + z, which was written for z' = n // (rows columns),
    v' = (n // columns) % rows, u' = n % columns.
    """
    rows, columns, depths = shape
    last = torch.tensor([columns - 1, rows - 1, depths - 1], device=places.device)
    u, v, z = places.long().clamp(min=0).minimum(last).unbind(-1)
    number = (v * columns + u) * depths + z
    return torch.stack([number % columns, number // columns % rows, number // (rows * columns)], -1)


def _waves(places: Tensor, frequencies: Tensor) -> Tensor:
    angles = places[..., None] * frequencies
    return torch.stack([angles.sin(), angles.cos()], -2).flatten(-3)
