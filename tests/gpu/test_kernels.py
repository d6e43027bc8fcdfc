"""The joined attention's CUDA kernels against dense float64 attention on the CPU."""

import pytest
import torch

from mmrl.vlm.engine.attention import KERNELS, TOLERANCE, _dense, joined_attention, kernels_for

pytestmark = pytest.mark.gpu
SHAPES = [
    # prompts, group, answer, query heads, key heads, width of a head, prompt
    (2, 3, 5, 4, 2, 32, 11),
    (1, 8, 33, 16, 2, 128, 65),
    (3, 2, 16, 8, 8, 80, 128),
    (2, 4, 1, 4, 1, 64, 7),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("padded", [False, True])
def test_outputs_and_gradients_are_those_of_dense_attention(shape, dtype, padded):
    assert kernels_for("cuda", dtype, shape[5]) is KERNELS["cuda"]
    n, g, t, heads, keys, width, prompt = shape
    draw = torch.Generator().manual_seed(0)
    sizes = [(n, g, t, heads, width), *[(n, g, t, keys, width)] * 2, *[(n, keys, prompt, width)] * 2]
    # inputs that the precision holds exactly, so that only the arithmetic differs
    exact = [torch.randn(size, generator=draw).to(dtype).double().requires_grad_() for size in sizes]
    ours = [x.detach().to("cuda", dtype).requires_grad_() for x in exact]
    weight = torch.randn(sizes[0], generator=draw).to(dtype)
    real = torch.arange(prompt) < torch.arange(prompt, prompt - n, -1)[:, None] if padded else None
    expected = _dense(*exact, real, width**-0.5)
    found = joined_attention(*ours, None if real is None else real.cuda(), width**-0.5)
    (expected * weight.double()).sum().backward()
    (found * weight.cuda()).sum().backward()
    assert found.dtype == dtype
    for a, b in [(expected, found), *((x.grad, y.grad) for x, y in zip(exact, ours, strict=True))]:
        error = (b.detach().cpu().double() - a.detach()).norm() / a.detach().norm()
        assert float(error) <= TOLERANCE[dtype]
