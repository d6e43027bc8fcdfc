"""Transformers over flow: `traj_dit` has one token per query point, `dit_factored` one per point and frame.

Shapes: B rows, C channels, T frames, N x N points.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from robotics.flow3d.clip import FlowEncoding
from robotics.flow3d.model.context import FlowContext
from robotics.flow3d.model.world_model_settings import BodyConfig
from robotics.policies.base.encoder import octave_code, octave_size


class TimeEmbedding(nn.Module):
    """Times (B,) of 0..1000 as (B, width), by sines and cosines and two layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width
        self.layers = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width))

    def forward(self, time: Tensor) -> Tensor:
        """(B,) -> (B, width)."""
        half = self.width // 2
        rates = torch.exp(-math.log(10000.0) * torch.arange(half, device=time.device) / half)
        angles = time[:, None].float() * rates
        found: Tensor = self.layers(torch.cat([angles.cos(), angles.sin()], 1))
        return found


class Attention(nn.Module):
    """Multi-head attention of tokens (B, n, width) to others (B, m, source)."""

    def __init__(self, width: int, heads: int, source: int | None = None) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.out = nn.Linear(width, width), nn.Linear(width, width)
        self.key_value = nn.Linear(source or width, 2 * width)

    def forward(self, tokens: Tensor, others: Tensor) -> Tensor:
        """(B, n, width), (B, m, source) -> (B, n, width)."""
        q = self.query(tokens).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        k, v = self.key_value(others).unflatten(-1, (2, self.heads, -1)).permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(q, k, v)
        found: Tensor = self.out(seen.transpose(1, 2).flatten(2))
        return found


class Modulated(nn.Module):
    """A norm with scale and shift from a condition, and a gate for the layer after it.

    Source: Peebles and Xie, DiT, arXiv 2212.09748 (AdaLN-Zero: all gates start at zero).
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, elementwise_affine=False)
        self.numbers = nn.Linear(width, 3 * width)
        nn.init.zeros_(self.numbers.weight)
        nn.init.zeros_(self.numbers.bias)

    def forward(self, tokens: Tensor, condition: Tensor) -> tuple[Tensor, Tensor]:
        """(B, n, width), (B, width) -> normalised tokens and the gate (B, 1, width)."""
        scale, shift, gate = self.numbers(functional.silu(condition))[:, None].chunk(3, -1)
        return self.norm(tokens) * (1 + scale) + shift, gate


class FlowBlock(nn.Module):
    """Self-attention, attention to a context, and a feed-forward layer.

    With `factored`, tokens are T frames x n points, with self-attention over the points of a frame, then over the
    frames of a point; otherwise over all tokens.
    """

    def __init__(self, width: int, heads: int, context: int, *, factored: bool = False) -> None:
        super().__init__()
        self.space, self.space_norm = Attention(width, heads), Modulated(width)
        self.time = Attention(width, heads) if factored else None
        self.time_norm = Modulated(width) if factored else None
        self.cross, self.cross_norm = Attention(width, heads, context), Modulated(width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.feed_norm = Modulated(width)

    def forward(self, tokens: Tensor, condition: Tensor, context: Tensor, frames: int = 1) -> Tensor:
        """(B, T n, width), (B, width), (B, L, context) -> (B, T n, width)."""
        # frames = 1 makes this attention over all tokens
        normed, gate = self.space_norm(tokens, condition)
        by_frame = normed.unflatten(1, (frames, -1)).flatten(0, 1)
        tokens = tokens + gate * self.space(by_frame, by_frame).unflatten(0, (-1, frames)).flatten(1, 2)
        if self.time is not None and self.time_norm is not None:
            normed, gate = self.time_norm(tokens, condition)
            by_point = normed.unflatten(1, (frames, -1)).transpose(1, 2)
            moved = self.time(by_point.flatten(0, 1), by_point.flatten(0, 1)).view(by_point.shape)
            tokens = tokens + gate * moved.transpose(1, 2).flatten(1, 2)
        normed, gate = self.cross_norm(tokens, condition)
        tokens = tokens + gate * self.cross(normed, context)
        normed, gate = self.feed_norm(tokens, condition)
        return tokens + gate * self.narrow(functional.gelu(self.wide(normed)))


class _FlowTransformer(nn.Module):
    """Base: tokens of flow with positions, blocks modulated by time and instruction, zero-initialised output."""

    factored = False

    def __init__(self, config: BodyConfig, encoding: FlowEncoding, context: int, numbers: int) -> None:
        super().__init__()
        width = config.width
        self.encoding = encoding
        self.enter = nn.Linear(numbers, width)
        # learned positions: attention alone would not know which grid cell a token is
        self.cells = nn.Parameter(torch.randn(encoding.grid**2, width) * 0.02)
        concat = config.point_condition == "tokens+concat"
        self.point = nn.Linear(octave_size(3), width) if concat else None
        self.time, self.text = TimeEmbedding(width), nn.Linear(context, width)
        self.blocks = nn.ModuleList(
            FlowBlock(width, config.heads, context, factored=self.factored) for _ in range(config.blocks)
        )
        self.last, self.leave = Modulated(width), nn.Linear(width, numbers)
        # the first prediction is zero, which is no motion if the model predicts displacements
        nn.init.zeros_(self.leave.weight)
        nn.init.zeros_(self.leave.bias)

    def _cells(self, context: FlowContext) -> Tensor:
        """(B or 1, N * N, width) embedding of each token's grid cell and query point."""
        if self.point is None:
            return self.cells[None]
        found: Tensor = self.cells + self.point(octave_code(context.points.flatten(1, 2)))
        return found

    def _run(self, tokens: Tensor, time: Tensor, context: FlowContext, frames: int) -> Tensor:
        # the same condition for all tokens; what differs between points comes by cross-attention
        condition = self.time(time) + self.text(context.text)
        for block in self.blocks:
            tokens = block(tokens, condition, context.tokens, frames)
        normed, _ = self.last(tokens, condition)
        found: Tensor = self.leave(normed)
        return found


class TrajectoryDit(_FlowTransformer):
    """One token per query point with its whole future of T x C numbers; the cheapest: N * N tokens for any T."""

    def __init__(self, config: BodyConfig, encoding: FlowEncoding, context: int) -> None:
        super().__init__(config, encoding, context, encoding.channels * encoding.num_frames)

    def forward(self, noisy: Tensor, time: Tensor, context: FlowContext) -> Tensor:
        """(B, C, T, N, N), (B,) of 0..1000 -> (B, C, T, N, N)."""
        channels, frames, side = noisy.shape[1:4]
        # (B, C, T, N N) -> (B, N N, C T): all that a point will do is one token
        tokens = self.enter(noisy.flatten(3).permute(0, 3, 1, 2).flatten(2)) + self._cells(context)
        found = self._run(tokens, time, context, 1)
        return found.unflatten(-1, (channels, frames)).permute(0, 2, 3, 1).unflatten(-1, (side, side))


class FactoredDit(_FlowTransformer):
    """One token per point and frame, with attention over the points of a frame, then over the frames of a point."""

    factored = True

    def __init__(self, config: BodyConfig, encoding: FlowEncoding, context: int) -> None:
        super().__init__(config, encoding, context, encoding.channels)
        self.frames = nn.Parameter(torch.randn(encoding.num_frames, 1, config.width) * 0.02)

    def forward(self, noisy: Tensor, time: Tensor, context: FlowContext) -> Tensor:
        """(B, C, T, N, N), (B,) of 0..1000 -> (B, C, T, N, N)."""
        frames, side = noisy.shape[2:4]
        # (B, C, T, N N) -> (B, T, N N, C)
        tokens = self.enter(noisy.flatten(3).permute(0, 2, 3, 1)) + self._cells(context)[:, None] + self.frames
        found = self._run(tokens.flatten(1, 2), time, context, frames)
        return found.unflatten(1, (frames, side, side)).permute(0, 4, 1, 2, 3)
