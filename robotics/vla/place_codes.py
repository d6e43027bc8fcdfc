"""Places as numbers that a small network can tell apart: sines and cosines of doubling frequencies.

Source: NeRF's positional encoding, arXiv 2003.08934, eq. 4.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def octave_code(places: Tensor, octaves: int = 4) -> Tensor:
    """Places (..., n) in -1..1 with sines and cosines of pi 2^k times them, k below `octaves`: (..., n (1 + 2 k))."""
    angles = places[..., None] * (math.pi * 2.0 ** torch.arange(octaves, device=places.device))
    return torch.cat([places[..., None], angles.sin(), angles.cos()], -1).flatten(-2)


def octave_size(numbers: int, octaves: int = 4) -> int:
    """Numbers of `octave_code`."""
    return numbers * (1 + 2 * octaves)
