import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mmrl.core import gaussian_step_logprob, linear_logprobs, logprobs_from_logits

M, H, V = 7, 4, 11


def inputs(dtype=torch.float64, m=M, h=H, v=V, seed=0):
    g = torch.Generator().manual_seed(seed)
    hidden = torch.randn(m, h, generator=g, dtype=torch.float64).to(dtype).requires_grad_()
    weight = torch.randn(v, h, generator=g, dtype=torch.float64).to(dtype).requires_grad_()
    bias = torch.randn(v, generator=g, dtype=torch.float64).to(dtype).requires_grad_()
    targets = torch.randint(2, v, (m,), generator=g)
    return hidden, weight, bias, targets


def naive(logits, targets, temperature=1.0, banned=None):
    logits = (logits if logits.dtype == torch.float64 else logits.float()) / temperature
    if banned is not None:
        logits = logits.index_fill(1, banned, -math.inf)
    logp = logits.log_softmax(1)
    finite = torch.where(torch.isfinite(logp), logp, 0.0)
    return logp.gather(1, targets[:, None]).squeeze(1), -(logp.exp() * finite).sum(1)


@pytest.mark.parametrize("banned", [None, torch.tensor([0, 1])])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("chunk_rows", [1, 3, 7, 100, None])
def test_linear_equals_the_naive_form(banned, temperature, chunk_rows):
    hidden, weight, bias, targets = inputs()
    options = {"bias": bias, "temperature": temperature, "banned": banned, "entropy": True, "chunk_rows": chunk_rows}
    out = linear_logprobs(hidden, weight, targets, **options)
    logp, entropy = naive(hidden @ weight.t() + bias, targets, temperature, banned)
    torch.testing.assert_close(out.logp, logp)
    torch.testing.assert_close(out.entropy, entropy)
    weights = torch.randn(2, M, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    ours = torch.autograd.grad((weights[0] * out.logp + weights[1] * out.entropy).sum(), (hidden, weight, bias))
    theirs = torch.autograd.grad((weights[0] * logp + weights[1] * entropy).sum(), (hidden, weight, bias))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("entropy", [False, True])
def test_linear_gradcheck(entropy):
    hidden, weight, bias, targets = inputs(m=4, h=3, v=5)

    def function(h, w, b):
        banned = torch.tensor([0])
        options = {"temperature": 1.3, "banned": banned, "entropy": entropy, "chunk_rows": 3}
        out = linear_logprobs(h, w, targets, bias=b, **options)
        return (out.logp, out.entropy) if entropy else out.logp

    assert torch.autograd.gradcheck(function, (hidden, weight, bias))


@pytest.mark.parametrize("entropy", [False, True])
def test_logits_gradcheck_and_naive_form(entropy):
    g = torch.Generator().manual_seed(0)
    logits = torch.randn(5, 6, generator=g, dtype=torch.float64, requires_grad=True)
    targets, banned = torch.tensor([1, 2, 5, 1, 4]), torch.tensor([0, 3])

    def function(x):
        out = logprobs_from_logits(x, targets, temperature=0.8, banned=banned, entropy=entropy, chunk_rows=2)
        return (out.logp, out.entropy) if entropy else out.logp

    assert torch.autograd.gradcheck(function, (logits,))
    expected = naive(logits, targets, 0.8, banned)
    torch.testing.assert_close(function(logits), expected if entropy else expected[0])


def test_given_logits_are_not_changed():
    logits = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    before = logits.clone()
    logprobs_from_logits(logits, torch.tensor([1, 2, 3, 4]), banned=torch.tensor([0]), entropy=True)
    assert torch.equal(logits, before)


def test_log_probabilities_are_float32_for_low_precision_inputs():
    hidden, weight, bias, targets = inputs(torch.bfloat16, m=50)
    out = linear_logprobs(hidden, weight, targets, bias=bias, entropy=True, chunk_rows=16)
    assert out.logp.dtype == out.entropy.dtype == torch.float32
    logits = hidden @ weight.t() + bias
    logp, entropy = naive(logits.double(), targets)
    # every term of the sums over the vocabulary is rounded at the size of the largest logit
    rounding = (V + 4) * 2**-24 * float(logits.detach().abs().max())
    torch.testing.assert_close(out.logp.double(), logp, rtol=0, atol=rounding)
    torch.testing.assert_close(out.entropy.double(), entropy, rtol=0, atol=rounding)
    (out.logp.sum() + out.entropy.sum()).backward()
    assert hidden.grad.dtype == weight.grad.dtype == bias.grad.dtype == torch.bfloat16
    exact = [x.detach().double().requires_grad_() for x in (hidden, weight, bias)]
    logp, entropy = naive(exact[0] @ exact[1].t() + exact[2], targets)
    (logp.sum() + entropy.sum()).backward()
    for a, b in zip((hidden, weight, bias), exact, strict=True):
        assert (a.grad.double() - b.grad).norm() / b.grad.norm() < 0.02


def test_weight_gradient_is_summed_in_float32():
    # One row a chunk: bfloat16 sums of 1024 chunks stall once the sum is 256 times a summand.
    hidden, weight, _, targets = inputs(torch.bfloat16, m=1024, h=2, v=3)
    hidden = (hidden.detach().abs() + 1).requires_grad_()
    linear_logprobs(hidden, weight, targets, chunk_rows=1).logp.sum().backward()
    exact = weight.detach().double().requires_grad_()
    naive(hidden.detach().double() @ exact.t(), targets)[0].sum().backward()
    logits = (hidden @ weight.t()).detach().float().requires_grad_()
    slope = torch.autograd.grad(naive(logits, targets)[0].sum(), logits)[0].bfloat16()
    stalled = torch.zeros_like(weight)
    for row in range(1024):
        stalled += slope[row, :, None] * hidden.detach()[row][None]
    error = (weight.grad.double() - exact.grad).norm() / exact.grad.norm()
    assert error < 0.01
    assert (stalled.double() - exact.grad).norm() / exact.grad.norm() > 5 * error


class LargestTensor(TorchDispatchMode):
    """Records the largest floating-point result of any operation, in elements."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, torch.Tensor) and tensor.is_floating_point():
                self.elements = max(self.elements, tensor.numel())
        return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_pass_holds_more_than_a_chunk_of_logits(dtype):
    rows, vocabulary = 64, 1000
    hidden, weight, bias, targets = inputs(dtype, m=rows, h=3, v=vocabulary)
    with LargestTensor() as seen:
        out = linear_logprobs(hidden, weight, targets, bias=bias, entropy=True, chunk_rows=4)
        (out.logp.sum() + out.entropy.sum()).backward()
    assert 0 < seen.elements <= 4 * vocabulary
    with LargestTensor() as seen:
        naive(hidden @ weight.t(), targets)[0].sum().backward()
    assert seen.elements == rows * vocabulary


def test_default_chunks_respect_the_memory_limit():
    hidden, weight, _, targets = inputs(torch.float32, m=40, h=1, v=1_000_000)
    with torch.no_grad(), LargestTensor() as seen:
        linear_logprobs(hidden, weight, targets)
    assert 1_000_000 < seen.elements <= 2**24


def test_frozen_parts_get_no_gradient():
    hidden, weight, bias, targets = inputs()
    out = linear_logprobs(hidden, weight.detach(), targets, bias=bias.detach())
    (gradient,) = torch.autograd.grad(out.logp.sum(), hidden)
    expected = naive(hidden @ weight.detach().t() + bias.detach(), targets)[0].sum()
    torch.testing.assert_close(gradient, torch.autograd.grad(expected, hidden)[0])
    linear_logprobs(hidden.detach(), weight, targets).logp.sum().backward()
    assert hidden.grad is None
    assert weight.grad is not None


def test_unused_entropy_output_leaves_the_gradient_alone():
    hidden, weight, _, targets = inputs()
    with_entropy = linear_logprobs(hidden, weight, targets, entropy=True)
    without = linear_logprobs(hidden, weight, targets)
    assert without.entropy is None
    for a, b in zip(
        torch.autograd.grad(with_entropy.logp.sum(), (hidden, weight)),
        torch.autograd.grad(without.logp.sum(), (hidden, weight)),
        strict=True,
    ):
        torch.testing.assert_close(a, b)


def test_tied_weights_add_their_gradients():
    _, weight, _, targets = inputs()
    tokens = torch.arange(M) % V
    tied = linear_logprobs(weight[tokens], weight, targets).logp.sum()
    expected = naive(weight[tokens] @ weight.t(), targets)[0].sum()
    torch.testing.assert_close(torch.autograd.grad(tied, weight)[0], torch.autograd.grad(expected, weight)[0])


class Products(TorchDispatchMode):
    """Records the precision of every matrix product, and how often a tensor of some shape changes its precision."""

    def __init__(self, shape=()):
        super().__init__()
        self.shape, self.dtypes, self.casts = tuple(shape), [], 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
            self.dtypes.append(args[-1].dtype)
        if func is torch.ops.aten._to_copy.default and tuple(args[0].shape) == self.shape:
            self.casts += 1
        return func(*args, **(kwargs or {}))


class Results(TorchDispatchMode):
    """Counts the products of some shape."""

    def __init__(self, shape):
        super().__init__()
        self.shape, self.count = tuple(shape), 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.count += func is torch.ops.aten.mm.default and tuple(out.shape) == self.shape
        return out


def test_autocast_multiplies_in_its_precision_and_casts_the_weight_once():
    hidden, weight, bias, targets = inputs(torch.float32)
    with Products(weight.shape) as seen:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = linear_logprobs(hidden, weight, targets, bias=bias, chunk_rows=2)
        out.logp.sum().backward()
    assert set(seen.dtypes) == {torch.bfloat16}
    assert seen.casts == 2  # the weight, and the first part of its gradient
    assert out.logp.dtype == hidden.grad.dtype == weight.grad.dtype == bias.grad.dtype == torch.float32


def test_autocast_is_as_far_from_float32_as_bfloat16_allows():
    hidden, weight, bias, targets = inputs(torch.float32)
    plain = linear_logprobs(hidden, weight, targets, bias=bias)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = linear_logprobs(hidden, weight, targets, bias=bias)
    h, w, b = (x.detach().double() for x in (hidden, weight, bias))
    unit = torch.finfo(torch.bfloat16).eps / 2
    # both factors, the product and its sum with the bias are rounded, and a log-sum-exp moves by as much as a logit
    logit = 4.1 * unit * (h.abs() @ w.abs().t() + b.abs())
    limit = logit.gather(1, targets[:, None])[:, 0] + logit.amax(1)
    assert (plain.logp - cast.logp).abs().le(limit).all()
    p = (h @ w.t() + b).softmax(1)
    moved = p * torch.expm1(2 * logit.amax(1, keepdim=True))
    slope = (torch.nn.functional.one_hot(targets, len(w)) - p).abs()
    exact, found = (torch.autograd.grad(x.logp.sum(), (hidden, weight)) for x in (plain, cast))
    error = moved + 2.1 * unit * (slope + moved)
    for a, c, own in zip(exact, found, (error @ w.abs(), error.t() @ h.abs()), strict=True):
        # a result is rounded too
        assert (a - c).abs().le(own + 1.1 * unit * (a.abs() + own)).all()


def test_logits_of_a_single_chunk_are_multiplied_once():
    hidden, weight, _, targets = inputs(torch.float32)
    plain = torch.autograd.grad(linear_logprobs(hidden, weight, targets, chunk_rows=2).logp.sum(), (hidden, weight))
    with Products() as seen:
        out = linear_logprobs(hidden, weight, targets).logp.sum()
        kept = torch.autograd.grad(out, (hidden, weight), retain_graph=True)
    assert len(seen.dtypes) == 3  # logits, and the gradients of states and weight
    again = torch.autograd.grad(out, (hidden, weight))
    for a, b, c in zip(plain, kept, again, strict=True):
        torch.testing.assert_close(a, b)
        assert torch.equal(b, c)


def test_the_gradient_of_a_weight_needs_one_tensor_of_its_size(monkeypatch):
    hidden, weight, _, targets = inputs(torch.float32)
    whole = torch.autograd.grad(linear_logprobs(hidden, weight, targets, chunk_rows=2).logp.sum(), weight)[0]
    monkeypatch.setattr("mmrl.core.logprobs.BLOCK_ELEMENTS", 3 * weight.shape[1])
    out = linear_logprobs(hidden.detach(), weight, targets, chunk_rows=2).logp.sum()
    with Results(weight.shape) as seen:
        blocks = torch.autograd.grad(out, weight)[0]
    assert seen.count == 1
    torch.testing.assert_close(blocks, whole)


def test_low_precision_states_with_float32_weights():
    hidden, weight, bias, targets = inputs(torch.float32)
    low = hidden.detach().bfloat16().requires_grad_()
    out = linear_logprobs(low, weight, targets, bias=bias)
    out.logp.sum().backward()
    assert low.grad.dtype == torch.bfloat16
    assert weight.grad.dtype == torch.float32
    torch.testing.assert_close(
        out.logp, naive(low @ weight.bfloat16().t() + bias.bfloat16(), targets)[0], rtol=1e-5, atol=1e-5
    )


def test_extreme_logits_stay_finite():
    hidden = torch.tensor([[1.0], [1.0]], requires_grad=True)
    weight = torch.tensor([[1e4], [-1e4], [0.0]], requires_grad=True)
    out = linear_logprobs(hidden, weight, torch.tensor([0, 1]), entropy=True)
    assert out.logp.tolist() == [0.0, -2e4]
    assert out.entropy.tolist() == [0.0, 0.0]
    (out.logp.sum() + out.entropy.sum()).backward()
    assert torch.isfinite(hidden.grad).all()
    assert torch.isfinite(weight.grad).all()


def test_no_rows():
    hidden, weight, _, targets = inputs(m=0)
    out = linear_logprobs(hidden, weight, targets, entropy=True)
    assert out.logp.shape == out.entropy.shape == (0,)
    (out.logp.sum() + out.entropy.sum()).backward()
    assert (weight.grad == 0).all()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden": torch.zeros(2, 3, 4)}, r"hidden\[mask\.bool\(\)\]"),
        ({"targets": torch.zeros(3, dtype=torch.int64)}, "one entry per row"),
        ({"targets": torch.zeros(2)}, "int64"),
        ({"weight": torch.zeros(5, 3)}, "H = 4"),
        ({"bias": torch.zeros(4)}, r"\(5,\)"),
        ({"temperature": 0.0}, "temperature must be positive"),
        ({"chunk_rows": 0}, "chunk_rows"),
        ({"banned": torch.tensor([5])}, r"outside 0\.\.4"),
        ({"banned": torch.tensor([3, 1])}, r"1 targets are banned entries \(first: 1\)"),
    ],
)
def test_bad_arguments_are_named(changes, message):
    arguments = {"hidden": torch.zeros(2, 4), "weight": torch.zeros(5, 4), "targets": torch.tensor([1, 2])} | changes
    with pytest.raises(ValueError, match=message):
        linear_logprobs(**arguments)


def test_gaussian_step():
    g = torch.Generator().manual_seed(0)
    x, mean = torch.randn(2, 3, 2, 2, generator=g, dtype=torch.float64)
    normal = torch.distributions.Normal(mean, 0.3).log_prob(x)
    torch.testing.assert_close(gaussian_step_logprob(x, mean, 0.3, "sum"), normal.sum((1, 2)))
    torch.testing.assert_close(gaussian_step_logprob(x, mean, 0.3), normal.mean((1, 2)))
    torch.testing.assert_close(gaussian_step_logprob(x, mean, 0.3, "sum", batch_dims=2), normal.sum(2))
    std = torch.rand(3, 1, 1, generator=g, dtype=torch.float64) + 0.1
    expected = torch.distributions.Normal(mean, std).log_prob(x)
    torch.testing.assert_close(gaussian_step_logprob(x, mean, std), expected.mean((1, 2)))


def test_gaussian_step_gradients():
    x, mean = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    mean, std = mean.requires_grad_(), torch.tensor(0.5, dtype=torch.float64, requires_grad=True)
    sampled = (mean * 1.0 + x).requires_grad_()  # reparametrised: the score must not flow through the sample
    assert torch.autograd.gradcheck(lambda m, s: gaussian_step_logprob(x, m, s, "sum"), (mean, std))
    (gradient,) = torch.autograd.grad(gaussian_step_logprob(sampled, mean, std, "sum").sum(), mean)
    torch.testing.assert_close(gradient, (sampled - mean).detach() / 0.25)


def test_gaussian_step_in_low_precision_is_float32():
    x = torch.ones(1, 1000, dtype=torch.bfloat16)
    assert gaussian_step_logprob(x, torch.zeros_like(x), 1.0, "sum").dtype == torch.float32
    with pytest.raises(ValueError, match="unknown reduction 'max'"):
        gaussian_step_logprob(x, x, 1.0, "max")
    with pytest.raises(ValueError, match="shape"):
        gaussian_step_logprob(x, x[:, :2], 1.0)
