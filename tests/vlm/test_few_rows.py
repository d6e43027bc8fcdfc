"""Products of a few rows with a large matrix: those of `functional.linear` up to rounding, while tokens are decoded."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from mmrl.vlm.engine.few_rows import BLOCK, FEW, LARGE, in_blocks, linear

OUT, WIDTH = 8 * BLOCK, LARGE // (8 * BLOCK)


@pytest.mark.parametrize("bias", [None, torch.arange(float(OUT))])
@pytest.mark.parametrize("shape", [(FEW[0],), (FEW[1],), (FEW[0], 1), (1,), (FEW[1] + 1, 1), (0,)])
def test_products_are_those_of_a_linear_layer(shape, bias):
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(*size, WIDTH, generator=generator) for size in (shape, (OUT,)))
    found, expected = linear(x, weight, bias), functional.linear(x, weight, bias)
    # sums of WIDTH products of unit numbers, in another order
    torch.testing.assert_close(found, expected, atol=2**-23 * WIDTH, rtol=1e-6)
    few = FEW[0] <= shape[0] <= FEW[1]
    assert few or torch.equal(found, expected)


@pytest.mark.parametrize(
    "weight", [torch.ones(OUT, WIDTH - 1), torch.ones(OUT, WIDTH, dtype=torch.float64), torch.ones(OUT + 1, WIDTH)]
)
def test_small_precise_and_odd_matrices_are_multiplied_as_usual(weight, monkeypatch):
    monkeypatch.setattr(torch, "bmm", None)
    assert linear(torch.ones(8, weight.shape[1], dtype=weight.dtype), weight).shape == (8, len(weight))


def test_a_network_is_as_before_afterwards():
    network = nn.Sequential(nn.Linear(WIDTH, OUT), nn.Linear(OUT, 4))
    x = torch.ones(8, WIDTH)
    before = network(x)
    with in_blocks(network):
        assert "forward" in vars(network[0])
        assert "forward" not in vars(network[1])
        torch.testing.assert_close(network(x), before)
    assert not any("forward" in vars(layer) for layer in network)
    assert torch.equal(network(x), before)
