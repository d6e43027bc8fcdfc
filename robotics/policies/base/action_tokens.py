"""Actions as tokens (binning, sampling, scoring, cloning loss), and random numbers for the rows of a batch.

Shapes: B rows, T tokens of a chunk, n bins, ... any leading dimensions. Tokens are indices 0..n-1 among the action
tokens; in a language model's vocabulary these are n consecutive ids.

Log-probabilities are log_softmax(logits / temperature) in float32. Sampling and training use the same expression, so an
update starts at ratio 1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mmrl.core.payload import to_device
from mmrl.errors import UserError


class RowGenerators(torch.Generator):
    """One generator per row of a batch, so that the draws of a row do not depend on the other rows.

    Use `draw_rows` to draw from them. Other code can use this as a single generator, seeded with one draw from each
    row's; its draws then depend on the whole batch.
    """

    def __new__(cls, rows: Sequence[torch.Generator]) -> Self:
        """A CPU generator."""
        return super().__new__(cls)

    def __init__(self, rows: Sequence[torch.Generator]) -> None:
        self.rows = list(rows)
        self.manual_seed(sum(int(torch.randint(2**62, (), generator=own)) for own in self.rows) % 2**62)

    @classmethod
    def seeded(cls, seeds: Sequence[int]) -> Self:
        """Create one generator per seed."""
        return cls([torch.Generator().manual_seed(seed) for seed in seeds])


def draw_rows(
    draw: Callable[..., Tensor], shape: Sequence[int], generator: torch.Generator, dtype: torch.dtype | None = None
) -> Tensor:
    """Draw random numbers of shape (B, ...), row by row if `generator` is a `RowGenerators` for B rows.

    Args:
        draw: `torch.rand` or `torch.randn`.
        shape: shape for all rows.
        generator: one for all rows, or `RowGenerators`; the numbers are drawn on its device.
        dtype: dtype of the numbers, float32 by default.

    Raises:
        ValueError: the number of rows of `RowGenerators` is not B.
    """
    options: dict[str, Any] = {"dtype": dtype or torch.float32, "device": generator.device}
    if not isinstance(generator, RowGenerators):
        return draw(tuple(shape), generator=generator, **options)
    if len(generator.rows) != shape[0]:
        raise ValueError(
            f"the shape {tuple(shape)} has {shape[0]} rows, but there are {len(generator.rows)} generators"
        )
    return torch.stack([draw(tuple(shape[1:]), generator=own, **options) for own in generator.rows])


Values = TypeVar("Values", Tensor, NDArray[Any])

TOKEN_MODES = ("openvla", "uniform")


@dataclass(frozen=True)
class ActionTokenizer:
    """Divides -1..1 into bins.

    * openvla: n edges from -1 to 1, so n - 1 bins; ids decrease with the action, V - digitize(a). Only an action of
      exactly 1 gets the lowest id, which decodes to the same centre as the next one.
    * uniform: n bins of equal width; indices increase with the action, and every index has a different centre.

    Source: openvla/openvla prismatic/vla/action_tokenizer.py (openvla).
    """

    bins: int = 256
    """n, number of action tokens."""
    mode: str = "openvla"
    """openvla or uniform."""

    def __post_init__(self) -> None:
        if self.mode not in TOKEN_MODES:
            raise UserError(f"unknown token mode {self.mode!r}; available: {', '.join(TOKEN_MODES)}")
        if self.bins < 2 + (self.mode == "openvla"):
            raise UserError(f"bins is {self.bins}; {self.mode} needs at least {2 + (self.mode == 'openvla')}")

    @property
    def centres(self) -> NDArray[np.float64]:
        """Action that each index decodes to (n,)."""
        if self.mode == "uniform":
            return (2 * np.arange(self.bins) + 1) / self.bins - 1
        edges = np.linspace(-1, 1, self.bins)
        # n - 1 bins for n indices: the clip gives index 0 the centre of index 1
        falling = (self.bins - 1 - np.arange(self.bins)).clip(0, self.bins - 2)
        return ((edges[:-1] + edges[1:]) / 2)[falling]

    def encode(self, actions: Values) -> Values:
        """Bins of actions (...) as int64 indices (...); values outside -1..1 are clipped."""
        if not isinstance(actions, Tensor):
            return self.encode(torch.from_numpy(np.array(actions, np.float64))).numpy()
        values = actions.double()  # float32 and float64 actions have to fall into the same bins
        if values.isnan().any():
            raise ValueError("actions contain NaN, which has no token")
        values = values.clamp(-1, 1)
        if self.mode == "uniform":
            return ((values + 1) / 2 * self.bins).floor().long().clamp(0, self.bins - 1)
        edges = torch.from_numpy(np.linspace(-1, 1, self.bins)).to(values.device)
        return self.bins - torch.bucketize(values.contiguous(), edges, right=True)

    def decode(self, indices: Values) -> Values:
        """Centres of the bins of indices (...) in 0..n-1 as actions (...), float32."""
        if len(indices.reshape(-1)):
            low, high = int(indices.min()), int(indices.max())
            if low < 0 or high >= self.bins:
                raise ValueError(f"indices range from {low} to {high}; must be 0..{self.bins - 1}")
        centres = self.centres.astype(np.float32)
        if isinstance(indices, Tensor):
            return torch.from_numpy(centres).to(indices.device)[indices]
        return centres[indices]


def draw_tokens(
    logits: Tensor, generator: torch.Generator, temperature: float = 1.0, greedy: bool = False
) -> tuple[Tensor, Tensor]:
    """Sample a token (...) int64 from each distribution (..., n), with its log-probability (...) float32.

    Gradient: none.
    """
    with torch.no_grad():
        logp = _log_softmax(logits, temperature)
        # drawn even if greedy, so that the generator ends in the same state in both modes
        uniform = draw_rows(torch.rand, logp.shape[:-1], generator, torch.float64)
        if greedy:
            tokens = logp.argmax(-1)
        else:
            # Inverse of the cumulative distribution, in float64: `multinomial` could not draw row by row from several
            # generators. The total may miss 1 by rounding, so the uniform number is scaled by it.
            mass = logp.double().exp().cumsum(-1)
            target = to_device(uniform, mass.device)[..., None] * mass[..., -1:]
            tokens = torch.searchsorted(mass, target, right=True)[..., 0].clamp(max=mass.shape[-1] - 1)
        return tokens, logp.gather(-1, tokens[..., None])[..., 0]


def score_tokens(logits: Tensor, tokens: Tensor, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """Log-probabilities of tokens (...) and entropies (...) of their distributions (..., n), float32, nats.

    Gradient: through the logits, from both outputs.
    """
    if logits.shape[:-1] != tokens.shape:
        raise ValueError(f"logits {tuple(logits.shape)} do not fit tokens {tuple(tokens.shape)}; expected one more dim")
    logp = _log_softmax(logits, temperature)
    entropy = -(logp.exp() * logp).sum(-1)
    return logp.gather(-1, tokens[..., None])[..., 0], entropy


def token_loss(logits: Tensor, targets: Tensor, mask: Tensor, smoothing: float = 0.0) -> Tensor:
    """Mean cross-entropy () float32 of logits (B, T, n) under a mask (B, T); 0 if the mask is empty.

    Targets are (B, T) int64 indices or (B, T, n) distributions, of which `smoothing` is spread over all n tokens.

    Gradient: through the logits.
    """
    logp = _log_softmax(logits, 1.0)
    chosen = logp.gather(-1, targets[..., None])[..., 0] if targets.dim() == 2 else (targets * logp).sum(-1)
    spread = logp.mean(-1) if smoothing else 0.0
    weight = mask.to(logp.dtype)
    total = ((1 - smoothing) * chosen + smoothing * spread) * weight
    return -total.sum() / weight.sum().clamp(min=1)


def _log_softmax(logits: Tensor, temperature: float) -> Tensor:
    if temperature <= 0:
        raise ValueError(f"temperature is {temperature}; must be above 0. Use greedy for the most likely action.")
    return (logits.float() / temperature).log_softmax(-1)
