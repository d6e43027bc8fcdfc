"""Positions as numbers that a small network can distinguish: sines and cosines of doubling frequencies.

Source: NeRF's positional encoding, arXiv 2003.08934, eq. 4.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def octave_code(positions: Tensor, octaves: int = 4) -> Tensor:
    """(..., n (1 + 2 octaves)): positions (..., n) in -1..1 and sines and cosines of 2^k pi times them, k < octaves."""
    angles = positions[..., None] * (math.pi * 2.0 ** torch.arange(octaves, device=positions.device))
    return torch.cat([positions[..., None], angles.sin(), angles.cos()], -1).flatten(-2)


def octave_size(numbers: int, octaves: int = 4) -> int:
    """Numbers of `octave_code`."""
    return numbers * (1 + 2 * octaves)
