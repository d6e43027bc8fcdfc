"""Tolerance for float32 results of the same sums in a different order."""

import torch
from torch import Tensor

EPS = torch.finfo(torch.float32).eps
ULPS = 2**5
"""Units in the last place of the largest number: sums of some hundred terms, layer after layer, whose order depends on
the batch, the kernel and the CPU. A mistake such as a wrong position or a missing adapter is 100 times larger."""
CANCELLATION = 2**5
"""How much larger the terms of a gradient are than their sum: a group's advantages add up to 0. A row that is missing,
or counted twice, changes a gradient by more than a hundredth."""


def assert_equal_up_to_rounding(found: Tensor, expected: Tensor, passes: int = 1) -> None:
    """Compare a network's outputs computed with a different order of sums, such as two batch sizes.

    Args:
        found: any shape.
        expected: the same shape.
        passes: networks that feed one another, such as the steps of a solver; each adds its rounding.
    """
    atol = passes * ULPS * EPS * float(expected.detach().abs().max())
    torch.testing.assert_close(found, expected, rtol=0, atol=atol)


def assert_same_gradient(found: Tensor, expected: Tensor) -> None:
    """Compare, by its norm, a gradient computed with a different order of sums."""
    assert found.shape == expected.shape
    difference = float((found - expected).detach().norm()) / float(expected.detach().norm())
    assert difference <= CANCELLATION * ULPS * EPS, f"relative difference {difference:.2e}"
