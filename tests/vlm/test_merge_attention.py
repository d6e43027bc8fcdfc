"""Two attentions merged through their log-sum-exps against one softmax over all keys."""

import pytest
import torch

from mmrl.vlm.engine import attention
from mmrl.vlm.engine.attention import TOLERANCE, joined_attention, merge_attention

B, H, Q, D = 2, 3, 4, 8


def attend(q, k, v):
    products = q @ k.transpose(-1, -2) * D**-0.5
    return products.softmax(-1) @ v, products.logsumexp(-1)


def tensors(*keys: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(B, H, Q, D)] + [(B, H, count, D) for count in keys for _ in range(2)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in shapes]


def test_merged_attention_is_one_softmax_over_both_sets():
    q, k_a, v_a, k_b, v_b = tensors(5, 7)
    merged, lse = merge_attention(*attend(q, k_a, v_a), *attend(q, k_b, v_b))
    expected, expected_lse = attend(q, torch.cat([k_a, k_b], 2), torch.cat([v_a, v_b], 2))
    torch.testing.assert_close(merged, expected)
    torch.testing.assert_close(lse, expected_lse)
    inputs = [q, k_a, v_a, k_b, v_b]
    weight = torch.linspace(-1, 1, merged.numel(), dtype=torch.float64).view_as(merged)
    found = torch.autograd.grad((merged * weight).sum() + lse.sum(), inputs, retain_graph=True)
    wanted = torch.autograd.grad((expected * weight).sum() + expected_lse.sum(), inputs)
    torch.testing.assert_close(found, wanted)


def test_order_and_grouping_do_not_matter():
    q, *rest = tensors(2, 3, 4)
    a, b, c = (attend(q, *rest[start : start + 2]) for start in (0, 2, 4))
    torch.testing.assert_close(merge_attention(*a, *b), merge_attention(*b, *a))
    left = merge_attention(*merge_attention(*a, *b), *c)
    torch.testing.assert_close(left, merge_attention(*a, *merge_attention(*b, *c)))


def test_an_empty_set_of_keys_changes_nothing():
    q, k, v = tensors(5)
    out, lse = attend(q, k, v)
    nothing = torch.zeros_like(out), torch.full_like(lse, float("-inf"))
    merged, merged_lse = merge_attention(out, lse, *nothing)
    torch.testing.assert_close(merged, out)
    torch.testing.assert_close(merged_lse, lse)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("padded", [False, True])
def test_dense_masks_compute_in_half_precision(dtype, padded, monkeypatch):
    """Heads of width 12 have no kernels in half precision on a GPU."""
    monkeypatch.setattr(attention, "kernels_for", lambda *_: None)
    generator = torch.Generator().manual_seed(0)
    sizes = [(2, 3, 5, 4, 12), *[(2, 3, 5, 2, 12)] * 2, *[(2, 2, 11, 12)] * 2]
    exact = [torch.randn(size, generator=generator).to(dtype).double().requires_grad_() for size in sizes]
    low = [x.detach().to(dtype).requires_grad_() for x in exact]
    weight = torch.randn(sizes[0], generator=generator).to(dtype)
    real = torch.arange(11) < torch.tensor([[11], [7]]) if padded else None
    outputs = [joined_attention(*own, real, 0.3) for own in (exact, low)]
    for out in outputs:
        (out * weight.to(out.dtype)).sum().backward()
    for a, b in [outputs, *((x.grad, y.grad) for x, y in zip(exact, low, strict=True))]:
        assert b.dtype == dtype
        assert (b.detach().double() - a.detach()).norm() <= TOLERANCE[dtype] * a.detach().norm()
