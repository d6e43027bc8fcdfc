"""What float32 may differ by when the same sums are taken in another order."""

import torch
from torch import Tensor

ULPS = 2**5
"""Units in the last place of the largest number: sums of some hundred terms, layer after layer, whose order depends on
the batch, the kernel and the CPU. A mistake such as a wrong position or a missing adapter is 100 times larger."""


def assert_equal_up_to_rounding(found: Tensor, expected: Tensor) -> None:
    """Compare what a network computed in two ways that differ in the order of sums only, such as two batch sizes."""
    atol = ULPS * torch.finfo(torch.float32).eps * float(expected.detach().abs().max())
    torch.testing.assert_close(found, expected, rtol=0, atol=atol)
