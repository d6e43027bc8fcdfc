"""Random numbers for the rows of a batch, each from a separate generator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Self

import torch
from torch import Tensor


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
