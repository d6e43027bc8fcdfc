"""Random draws of the rows of a batch, each from its own generator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Self

import torch
from torch import Tensor


class RowGenerators(torch.Generator):
    """A generator for each row of a batch, so that the draws of a row do not depend on the rows beside it.

    `draw_rows` draws from them. Other code may use this as one generator, which is seeded by a draw from each row's;
    its draws then depend on the whole batch.
    """

    def __new__(cls, rows: Sequence[torch.Generator]) -> Self:
        """A CPU generator."""
        return super().__new__(cls)

    def __init__(self, rows: Sequence[torch.Generator]) -> None:
        self.rows = list(rows)
        self.manual_seed(sum(int(torch.randint(2**62, (), generator=own)) for own in self.rows) % 2**62)

    @classmethod
    def seeded(cls, seeds: Sequence[int]) -> Self:
        """Generators of their own for rows with these seeds."""
        return cls([torch.Generator().manual_seed(seed) for seed in seeds])


def draw_rows(
    draw: Callable[..., Tensor], shape: Sequence[int], generator: torch.Generator, dtype: torch.dtype | None = None
) -> Tensor:
    """Random numbers of a shape (B, ...), by row where there are `RowGenerators` of B rows.

    Args:
        draw: `torch.rand` or `torch.randn`.
        shape: of all rows.
        generator: of the rows or of all together; its device decides where the numbers are drawn.
        dtype: of the numbers, float32 by default.

    Raises:
        ValueError: there are `RowGenerators` of another number of rows than B.
    """
    options: dict[str, Any] = {"dtype": dtype or torch.float32, "device": generator.device}
    if not isinstance(generator, RowGenerators):
        return draw(tuple(shape), generator=generator, **options)
    if len(generator.rows) != shape[0]:
        raise ValueError(
            f"the shape {tuple(shape)} has {shape[0]} rows, but there are {len(generator.rows)} generators"
        )
    return torch.stack([draw(tuple(shape[1:]), generator=own, **options) for own in generator.rows])
