"""Transformers over flow: `traj_dit` has a token a query point, `dit_factored` a token a point and frame.

Shapes: B rows, C channels, T frames, N x N points.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from robotics.flow3d.encoding import FlowEncoding
from robotics.flow3d.model.context import Context
from robotics.flow3d.model.layers import FlowBlock, Modulated, TimeEmbedding
from robotics.flow3d.model.settings import BodyConfig
from robotics.vla.place_codes import octave_code, octave_size


class _FlowTransformer(nn.Module):
    """Base: tokens of flow with positions, blocks modulated by time and instruction, zero-initialised output."""

    factored = False

    def __init__(self, config: BodyConfig, encoding: FlowEncoding, context: int, numbers: int) -> None:
        super().__init__()
        width = config.width
        self.encoding = encoding
        self.enter = nn.Linear(numbers, width)
        self.cells = nn.Parameter(torch.randn(encoding.grid**2, width) * 0.02)
        concat = config.point_condition == "tokens+concat"
        self.point = nn.Linear(octave_size(3), width) if concat else None
        self.time, self.text = TimeEmbedding(width), nn.Linear(context, width)
        self.blocks = nn.ModuleList(
            FlowBlock(width, config.heads, context, factored=self.factored) for _ in range(config.blocks)
        )
        self.last, self.leave = Modulated(width), nn.Linear(width, numbers)
        nn.init.zeros_(self.leave.weight)
        nn.init.zeros_(self.leave.bias)

    def _cells(self, context: Context) -> Tensor:
        """(B or 1, N * N, width) embedding of each token's grid cell and query point."""
        if self.point is None:
            return self.cells[None]
        found: Tensor = self.cells + self.point(octave_code(context.points.flatten(1, 2)))
        return found

    def _run(self, tokens: Tensor, time: Tensor, context: Context, frames: int) -> Tensor:
        condition = self.time(time) + self.text(context.text)
        for block in self.blocks:
            tokens = block(tokens, condition, context.tokens, frames)
        normed, _ = self.last(tokens, condition)
        found: Tensor = self.leave(normed)
        return found


class TrajectoryDit(_FlowTransformer):
    """One token a query point with its whole future of T x C numbers: the cheapest network, N * N tokens for any T."""

    def __init__(self, config: BodyConfig, encoding: FlowEncoding, context: int) -> None:
        super().__init__(config, encoding, context, encoding.channels * encoding.num_frames)

    def forward(self, noisy: Tensor, time: Tensor, context: Context) -> Tensor:
        """(B, C, T, N, N), (B,) of 0..1000 -> (B, C, T, N, N)."""
        channels, frames, side = noisy.shape[1:4]
        tokens = self.enter(noisy.flatten(3).permute(0, 3, 1, 2).flatten(2)) + self._cells(context)
        found = self._run(tokens, time, context, 1)
        return found.unflatten(-1, (channels, frames)).permute(0, 2, 3, 1).unflatten(-1, (side, side))


class FactoredDit(_FlowTransformer):
    """One token a point and frame, with attention over the points of a frame, then over the frames of a point."""

    factored = True

    def __init__(self, config: BodyConfig, encoding: FlowEncoding, context: int) -> None:
        super().__init__(config, encoding, context, encoding.channels)
        self.frames = nn.Parameter(torch.randn(encoding.num_frames, 1, config.width) * 0.02)

    def forward(self, noisy: Tensor, time: Tensor, context: Context) -> Tensor:
        """(B, C, T, N, N), (B,) of 0..1000 -> (B, C, T, N, N)."""
        frames, side = noisy.shape[2:4]
        tokens = self.enter(noisy.flatten(3).permute(0, 2, 3, 1)) + self._cells(context)[:, None] + self.frames
        found = self._run(tokens.flatten(1, 2), time, context, frames)
        return found.unflatten(1, (frames, side, side)).permute(0, 4, 1, 2, 3)
