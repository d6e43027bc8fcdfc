"""Attention of responses that share a prompt: the prompt's keys and values exist once for the whole group.

A response attends to its prompt and to itself. The two parts run as two ordinary attention kernels and are merged
through their log-sum-exps. In the backward pass both backward kernels get the merged output and log-sum-exp, so each
recomputes the softmax over prompt and response, and the gradients of the two parts add up.

Source: the merging rule of blockwise attention (Liu et al., Ring Attention, arXiv 2310.01889, section 3); one prefix
for many continuations as in Hydragen (arXiv 2402.05099) and Prefix Grouper (arXiv 2506.05433).
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from mmrl.core.payload import to_device

LOGGER = logging.getLogger("mmrl")


def joined_attention(
    q: Tensor, k: Tensor, v: Tensor, prompt_k: Tensor, prompt_v: Tensor, prompt_real: Tensor | None, scale: float
) -> Tensor:
    """Attend from every response to its prompt and, causally, to itself: (N, G, T, H, d), undefined on padding.

    `q` (N, G, T, H, d), `k` and `v` (N, G, T, Hk, d) are those of G responses to each of N prompts, `prompt_k` and
    `prompt_v` (N, Hk, P, d) those of the prompts, all padded at the end; Hk divides H. `prompt_real` (N, P) is False on
    the prompts' padding, None without padding; `scale` multiplies the products of queries and keys.

    Gradient: through all five, summed over the group for prompt_k and prompt_v; first derivatives only.
    """
    # private operators of torch, so they are tested once for each device, dtype and width
    kernels = kernels_for(q.device.type, q.dtype, q.shape[-1])
    if kernels is None:
        return _dense(q, k, v, prompt_k, prompt_v, prompt_real, scale)
    return _Joined.apply(q, k, v, prompt_k, prompt_v, _bias(prompt_real, q), scale, kernels)


def merge_attention(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Merge the attention of the same queries to two sets of keys into the attention to both sets.

    With o the output (..., d) of a softmax over some keys and l the log-sum-exp (...) of its scaled products, the
    softmax over both sets has

        l = log(exp(l_a) + exp(l_b)),    o = w o_a + (1 - w) o_b,    w = sigmoid(l_a - l_b) = exp(l_a - l).

    Gradient: through all four.

    Source: Liu et al., Ring Attention, arXiv 2310.01889, section 3; Juravsky et al., Hydragen, arXiv 2402.05099.
    """
    # logaddexp never forms exp(l), which overflows for scores that a softmax still takes
    return merge_outputs(out_a, lse_a, out_b, lse_b), torch.logaddexp(lse_a, lse_b)


def merge_outputs(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> Tensor:
    """The output of `merge_attention` alone."""
    share = torch.sigmoid(lse_a - lse_b)[..., None]  # never forms exp(l) either
    return torch.lerp(out_b.to(lse_a.dtype), out_a.to(lse_a.dtype), share)


class Part(NamedTuple):
    """Arguments of one of the two kernel calls whose results are merged."""

    q: Tensor
    """(b, H, Q, d)."""
    k: Tensor
    """(b, H, K, d)."""
    v: Tensor
    """(b, H, K, d)."""
    bias: Tensor | None
    """(b, 1, 1, K), added to the products."""
    causal: bool
    scale: float


class Kernels(NamedTuple):
    """Forward and backward attention kernels that expose the log-sum-exp."""

    forward: Callable[[Part], tuple[Any, ...]]
    """Output, log-sum-exp (b, H, Q) and a tuple of the backward kernel's other inputs."""
    backward: Callable[[Part, Tensor, Tensor, Tensor, Sequence[Tensor]], tuple[Tensor, ...]]
    """Gradients of q, k, v from the part, the output's gradient, the output, the log-sum-exp and the tuple."""


class _Joined(torch.autograd.Function):
    """Attention of responses (N, G, T, H, d) to prompts (N, Hk, P, d) and to themselves (N, G, T, Hk, d)."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        prompt_k: Tensor,
        prompt_v: Tensor,
        bias: Tensor | None,
        scale: float,
        kernels: Kernels,
    ) -> Tensor:
        shape, heads = q.shape, k.shape[3]
        to_prompt, to_self = _parts(q, k, v, prompt_k, prompt_v, bias, scale)
        far, far_lse, far_rest = kernels.forward(to_prompt)
        near, near_lse, near_rest = kernels.forward(to_self)
        # (N, Hk, r G T) to (N, G, H, T)
        far_lse = far_lse.unflatten(2, (-1, *shape[1:3])).permute(0, 3, 1, 2, 4).flatten(2, 3)
        near_lse = near_lse.unflatten(0, shape[:2])
        far, near = _unfold(far, shape, heads).transpose(2, 3), near.unflatten(0, shape[:2])  # (N, G, H, T, d)
        # the log-sum-exps of half-precision inputs are float32, and so is the merge; only the result is rounded
        merged, lse = merge_attention(far, far_lse, near, near_lse)
        out = merged.transpose(2, 3).to(q.dtype)
        # the inputs before folding: the folded copies are made again in `backward` instead of being held until then
        ctx.save_for_backward(q, k, v, prompt_k, prompt_v, bias, out, lse, *far_rest, *near_rest)
        ctx.options = (scale, kernels, len(far_rest))
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        q, k, v, prompt_k, prompt_v, bias, out, lse, *rest = ctx.saved_tensors
        scale, kernels, far_count = ctx.options
        shape, heads = q.shape, k.shape[3]
        # kernels refuse a gradient in another precision than their inputs
        grad = grad.to(q.dtype)
        to_prompt, to_self = _parts(q, k, v, prompt_k, prompt_v, bias, scale)
        # both kernels get the merged output and log-sum-exp, so each differentiates its share of the whole softmax
        folded_lse = lse.unflatten(2, (heads, -1)).permute(0, 2, 3, 1, 4).flatten(2, 4)  # (N, Hk, r G T)
        folded = (_fold(grad, heads), _fold(out, heads), folded_lse)
        # the folded queries are one sequence for the kernel, so far_k and far_v come summed over group and heads
        far_q, far_k, far_v = kernels.backward(to_prompt, *folded, rest[:far_count])
        rows = (_rows(grad), _rows(out), lse.flatten(0, 1))
        near_q, near_k, near_v = kernels.backward(to_self, *rows, rest[far_count:])
        # the queries take part in both kernels; keys and values of prompt and response in one each
        grad_q = _unfold(far_q, shape, heads) + near_q.transpose(1, 2).unflatten(0, shape[:2])
        grad_k, grad_v = (  # summed over the query heads of each key head
            x.transpose(1, 2).unflatten(0, shape[:2]).unflatten(3, (heads, -1)).sum(4) for x in (near_k, near_v)
        )
        return grad_q, grad_k, grad_v, far_k, far_v, None, None, None


def _parts(
    q: Tensor, k: Tensor, v: Tensor, prompt_k: Tensor, prompt_v: Tensor, bias: Tensor | None, scale: float
) -> tuple[Part, Part]:
    """Attention of the responses to the prompts, and of the responses to themselves."""
    # a prompt is seen by its group alone and no response by another: folded into the queries' axis, G responses and r
    # query heads are one long sequence, so the prompt's keys need no copy for each of them
    to_prompt = Part(_fold(q, k.shape[3]), prompt_k, prompt_v, bias, causal=False, scale=scale)
    times = q.shape[3] // k.shape[3]
    k, v = (_rows(x.repeat_interleave(times, 3) if times > 1 else x) for x in (k, v))  # one for each query head
    return to_prompt, Part(_rows(q), k, v, None, causal=True, scale=scale)


def _rows(x: Tensor) -> Tensor:
    """(N, G, T, H, d) as (N G, H, T, d)."""
    return x.flatten(0, 1).transpose(1, 2)


def _fold(x: Tensor, heads: int) -> Tensor:
    """Fold a group's queries into one long sequence for each key head: (N, G, T, H, d) to (N, Hk, r G T, d)."""
    return x.unflatten(3, (heads, -1)).permute(0, 3, 4, 1, 2, 5).flatten(2, 4)


def _unfold(x: Tensor, shape: torch.Size, heads: int) -> Tensor:
    """Inverse of `_fold`."""
    _, g, t, h, _ = shape
    return x.unflatten(2, (h // heads, g, t)).permute(0, 3, 4, 1, 2, 5).flatten(3, 4)


def _bias(real: Tensor | None, like: Tensor) -> Tensor | None:
    """Additive mask (N, 1, 1, P) for the prompts' padding."""
    if real is None:
        return None
    bias = torch.zeros(real.shape, dtype=like.dtype, device=like.device)
    return bias.masked_fill(~real, float("-inf"))[:, None, None]


def _dense(
    q: Tensor, k: Tensor, v: Tensor, prompt_k: Tensor, prompt_v: Tensor, real: Tensor | None, scale: float
) -> Tensor:
    """The same attention with one dense mask over prompt and responses, for devices without kernels."""
    n, g, t = q.shape[:3]
    # the responses of a group are one sequence here, so the mask also has to keep each from reading the others
    own = torch.eye(g, dtype=torch.bool, device=q.device)[:, None, :, None]
    causal = torch.ones(t, t, dtype=torch.bool, device=q.device).tril()[None, :, None, :]
    near = (own & causal).reshape(g * t, g * t).expand(n, -1, -1)
    width = prompt_k.shape[2]
    far = torch.ones((n, 1, width), dtype=torch.bool, device=q.device) if real is None else real[:, None]
    mask = torch.cat([far.expand(n, g * t, width), near], 2)[:, None]
    keys, values = (
        torch.cat([prompt, x.flatten(1, 2).transpose(1, 2)], 2) for prompt, x in ((prompt_k, k), (prompt_v, v))
    )
    out = functional.scaled_dot_product_attention(
        q.flatten(1, 2).transpose(1, 2), keys, values, attn_mask=mask, scale=scale, enable_gqa=True
    )
    return out.transpose(1, 2).unflatten(1, (g, t))


def _cpu_forward(part: Part) -> tuple[Any, ...]:
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        *part[:3], 0.0, part.causal, attn_mask=_for_every_query(part), scale=part.scale
    )
    return out, lse, ()


def _cpu_backward(part: Part, grad: Tensor, out: Tensor, lse: Tensor, rest: Sequence[Tensor]) -> tuple[Tensor, ...]:
    mask = _for_every_query(part)
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, *part[:3], out, lse, 0.0, part.causal, attn_mask=mask, scale=part.scale
    )


def _for_every_query(part: Part) -> Tensor | None:
    return None if part.bias is None else part.bias.expand(-1, -1, part.q.shape[2], -1)


def _cuda_forward(part: Part) -> tuple[Any, ...]:
    out, lse, seed, offset = torch.ops.aten._scaled_dot_product_efficient_attention(
        *part[:3], _aligned(part.bias, part.q), True, 0.0, part.causal, scale=part.scale
    )
    # the log-sum-exps are padded to blocks of 32 queries; the merge needs those of real queries alone
    return out, lse[..., : part.q.shape[2]], (seed, offset)


def _cuda_backward(part: Part, grad: Tensor, out: Tensor, lse: Tensor, rest: Sequence[Tensor]) -> tuple[Tensor, ...]:
    # the kernel expects its own padding back; exp(-inf) makes the padded queries contribute nothing
    lse = functional.pad(lse, (0, -lse.shape[-1] % 32), value=float("inf")).contiguous()
    # in half precision it reads the output as contiguous (b, Q, H, d) and ignores the strides
    out = out.transpose(1, 2).contiguous().transpose(1, 2)
    bias, needed = _aligned(part.bias, part.q), (True, True, True, False)
    gradients = torch.ops.aten._scaled_dot_product_efficient_attention_backward(
        grad, *part[:3], bias, out, lse, *rest, 0.0, needed, part.causal, scale=part.scale
    )
    return tuple(gradients[:3])


def _aligned(bias: Tensor | None, q: Tensor) -> Tensor | None:
    """A mask whose rows start at multiples of 16 elements, as the kernel requires."""
    if bias is None:
        return None
    width = bias.shape[-1]
    # pad and slice: the shape stays, the stride of a row grows to a multiple of 16
    padded = functional.pad(bias, (0, -width % 16))[..., :width]
    return padded.expand(-1, q.shape[1], q.shape[2], -1)


@functools.cache
def kernels_for(device: str, dtype: torch.dtype, width: int) -> Kernels | None:
    """Kernels of a device that agree with the dense form for heads of a width; None if there are none.

    CUDA kernels need heads whose rows are multiples of 16 bytes: in half precision widths such as 64 and 80, not 12.
    """
    kernels = KERNELS.get(device)
    if kernels is None:
        return None
    # these are private functions of torch, whose layout may change with a release: measure, do not trust
    try:
        error = _largest_error(kernels, device, dtype, width)
        problem = "" if error <= TOLERANCE.get(dtype, 1e-4) else f"is off by {error:.1e}"  # NaN is off too
    except (RuntimeError, NotImplementedError) as failure:
        problem = f"failed: {failure}"
    if problem:
        what = f"joined attention on {device} for {dtype} and heads of width {width}"
        cost = "which store every pair of a group's tokens, G T x (P + G T) numbers per head"
        LOGGER.warning("%s %s; dense masks are used instead, %s", what, problem, cost)
        return None
    return kernels


def _largest_error(kernels: Kernels, device: str, dtype: torch.dtype, width: int) -> float:
    """Relative error of output and gradients against the dense form, on a small ragged case."""
    # a private generator: the global one belongs to the run, whose draws must not depend on this check
    generator = torch.Generator().manual_seed(0)
    # two prompts of unequal lengths, grouped heads (4 to 2), responses longer than one token: every branch once
    shapes = [(2, 3, 5, 4, width), *[(2, 3, 5, 2, width)] * 2, *[(2, 2, 11, width)] * 2]
    exact: Any = [
        to_device(torch.randn(shape, generator=generator), device).to(dtype).requires_grad_() for shape in shapes
    ]
    joined = [x.detach().clone().requires_grad_() for x in exact]
    weight = to_device(torch.randn(shapes[0], generator=generator), device).to(dtype)
    real = torch.arange(11, device=device) < to_device(torch.tensor([[11], [7]]), device)
    # inside a checkpointed layer its hooks would count what is saved here, which is not saved when it is recomputed
    own_hooks = torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x)
    with own_hooks, torch.enable_grad(), torch.autocast(device, enabled=False):
        q, k, v, prompt_k, prompt_v = exact
        outputs = [
            _dense(q, k, v, prompt_k, prompt_v, real, 0.3),
            _Joined.apply(*joined, _bias(real, joined[0]), 0.3, kernels),
        ]
        for out in outputs:
            (out * weight).sum().backward()
    pairs = [outputs, *zip([x.grad for x in exact], [x.grad for x in joined], strict=True)]
    return float(torch.stack([(b.detach() - a.detach()).norm() / a.detach().norm() for a, b in pairs]).max())


KERNELS: dict[str, Kernels] = {
    "cpu": Kernels(_cpu_forward, _cpu_backward),
    "cuda": Kernels(_cuda_forward, _cuda_backward),
}

TOLERANCE: dict[torch.dtype, float] = {
    torch.float64: 1e-10,
    torch.float32: 1e-5,
    torch.bfloat16: 3e-2,
    torch.float16: 5e-3,
}
"""Maximum relative error of output and gradients at which kernels are trusted."""


ATTENTION_NAME = "mmrl_shared_prefix"
"""Name of the attention function in transformers' registry."""


def register_attention() -> str:
    """Register the attention function with transformers.

    All prompts of a batch pass through the language model end to end in one row, all responses in another, so no layer
    computes padding; only attention turns them into padded tables. The attention layers get the layout as the argument
    `shared`.
    """
    from transformers import AttentionInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface

    AttentionInterface.register(ATTENTION_NAME, _attend)
    # a name without a mask function gets no mask at all, and passes without `shared` need sdpa's
    AttentionMaskInterface.register(ATTENTION_NAME, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    return ATTENTION_NAME


def _attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    shared: PromptRow | ResponseRow | TokenRows | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    if shared is not None:
        # transformers' mask would join the prompts of the row; the layout has its own masks
        return shared.attend(module.layer_idx, query, key, value, options.get("scaling")), None
    from transformers import AttentionInterface

    q, k, v = _workable(query, key, value)
    # sdpa wants an additive mask in the precision of the queries, which `_workable` may have changed
    if attention_mask is not None and attention_mask.is_floating_point():
        attention_mask = attention_mask.to(q.dtype)
    with _no_autocast(q):
        out, _ = AttentionInterface()["sdpa"](module, q, k, v, attention_mask, **options)
    return out.to(query.dtype), None


def _workable(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Tensors in a common precision that the attention kernels handle safely.

    Under autocast, rotated keys are float32 and values low precision. Low precision is avoided on the CPU: its fused
    kernels are slower than those of float32, and the backward one needs instructions that some virtual machines
    announce and then refuse, which kills the process.
    """
    device, dtype = tensors[0].device.type, tensors[0].dtype
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
    if device == "cpu" and dtype in (torch.bfloat16, torch.float16):
        dtype = torch.float32
    return tuple(x.to(dtype) for x in tensors)


def _no_autocast(x: Tensor) -> torch.autocast:
    return torch.autocast(x.device.type, enabled=False)


@dataclass(frozen=True)
class PackedIndex:
    """Indices that map a packed row to a padded table and back."""

    index: Tensor | None
    """Table of token numbers, 0 on padding; None if the row only has to be reshaped."""
    inverse: Tensor | None
    """(M,) index of each token in the flattened table."""
    real: Tensor | None
    """Bool table, False on padding; None if nothing is padded."""
    shape: tuple[int, ...]
    """Shape of the table."""

    def to(self, device: torch.device) -> PackedIndex:
        """Move to a device."""
        index, inverse, real = (
            None if x is None else to_device(x, device) for x in (self.index, self.inverse, self.real)
        )
        return PackedIndex(index, inverse, real, self.shape)

    def gather(self, x: Tensor) -> Tensor:
        """Tokens (M, ...) as a table (*shape, ...)."""
        return x.unflatten(0, self.shape) if self.index is None else x[self.index]

    def scatter(self, table: Tensor) -> Tensor:
        """The table's tokens (*shape, ...) as a row (M, ...)."""
        flat = table.flatten(0, len(self.shape) - 1)
        return flat if self.inverse is None else flat[self.inverse]


def prompt_index(lengths: Tensor, device: torch.device) -> PackedIndex:
    """Index on a device from N packed prompts to a table (N, P); `lengths` (N,) are on the host."""
    # built on the host, where shapes are known without waiting for the device, and moved once
    count, width = len(lengths), int(lengths.max())
    if bool((lengths == width).all()):
        return PackedIndex(None, None, None, (count, width))
    column = torch.arange(width)
    real = column < lengths[:, None]
    # padding points to token 0, which always exists; masks and the causal order hide it
    starts = lengths.cumsum(0) - lengths
    index = (starts[:, None] + column).masked_fill(~real, 0)
    return PackedIndex(index, torch.nonzero(real.flatten()).flatten(), real, (count, width)).to(device)


def response_index(lengths: Tensor, group: Tensor, prompts: int, device: torch.device) -> PackedIndex:
    """Map B packed responses, of `lengths` (B,) and to the prompts `group` (B,), to a table (N, G, T).

    Lengths and groups are on the host, the index is on `device`.
    """
    sizes = torch.bincount(group, minlength=prompts)
    width, most = int(lengths.max()), int(sizes.max())
    shape = (prompts, most, width)
    # equal groups in order need no gather: the row is a view of the table
    in_order = bool((group == torch.arange(len(group)) // most).all())
    if in_order and len(group) == prompts * most and bool((lengths == width).all()):
        return PackedIndex(None, None, None, shape)
    # rank: number of each response among those of its group
    order = torch.argsort(group, stable=True)
    rank = torch.empty_like(group)
    rank[order] = torch.arange(len(group)) - (sizes.cumsum(0) - sizes)[group[order]]
    # groups may be unequal, after a filter or in a micro-batch: the cells without a response stay -1
    row = torch.full((prompts, most), -1, dtype=torch.int64)
    row[group, rank] = torch.arange(len(group))
    column = torch.arange(width)
    real = (row >= 0)[..., None] & (column < lengths[row.clamp(min=0)][..., None])
    starts = (lengths.cumsum(0) - lengths)[row.clamp(min=0)]
    index = (starts[..., None] + column).masked_fill(~real, 0)
    # built from `index` and not by a mask, because responses of a group need not be neighbours in the row
    inverse = torch.empty(int(lengths.sum()), dtype=torch.int64)
    inverse[index[real]] = torch.nonzero(real.flatten()).flatten()
    return PackedIndex(index, inverse, real, shape).to(device)


@dataclass
class PromptRow:
    """N prompts in one row: each attends causally to itself, and its keys and values are recorded."""

    places: PackedIndex
    keys: dict[int, Tensor] = field(default_factory=dict)
    """Keys (N, Hk, P, d) by layer, rotary applied."""
    values: dict[int, Tensor] = field(default_factory=dict)
    """Values (N, Hk, P, d) by layer."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
        """Attention (1, M, H, d) of a layer for query (1, H, M, d), key and value (1, Hk, M, d), rotary applied."""
        q, k, v = (self.places.gather(x[0].transpose(0, 1)).transpose(1, 2) for x in _workable(query, key, value))
        if layer not in self.keys:  # a recomputed layer must not replace what the responses already read
            self.keys[layer], self.values[layer] = k, v
        # prompts are padded at their end, where the causal mask hides the padding from every real token
        with _no_autocast(q):
            out = functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
        return self.places.scatter(out.transpose(1, 2))[None].to(query.dtype)


@dataclass
class ResponseRow:
    """B responses in one row: each attends to its prompt and causally to itself."""

    places: PackedIndex
    prompt_real: Tensor | None
    """(N, P) bool, False on the padding of the prompts; None if they are equally long."""
    keys: list[Tensor]
    """Keys (N, Hk, P, d) of the prompts by layer, rotary applied."""
    values: list[Tensor]
    """Values (N, Hk, P, d) by layer."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
        """Attention (1, M, H, d) of a layer for query (1, H, M, d), key and value (1, Hk, M, d), rotary applied.

        Gradient: into query, key and value, and, summed over the group, into the prompts' keys and values.
        """
        own = [self.places.gather(x[0].transpose(0, 1)) for x in (query, key, value)]
        q, k, v, prompt_k, prompt_v = _workable(*own, self.keys[layer], self.values[layer])
        size = query.shape[-1] ** -0.5 if scale is None else scale
        with _no_autocast(query):
            out = joined_attention(q, k, v, prompt_k, prompt_v, self.prompt_real, size)
        return self.places.scatter(out)[None].to(query.dtype)


@dataclass
class KeepingRow(ResponseRow):
    """Packed rows that keep their keys and values."""

    own: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    """Keys with rotary applied and values (M, Hk, d) of each layer."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
        """Attend as `ResponseRow` does."""
        self.own.append((key[0].transpose(0, 1), value[0].transpose(0, 1)))
        return super().attend(layer, query, key, value, scale)


ROOM = 64
"""Initial capacity of decoded rows in tokens; it doubles when used up."""
FIXED_ROOM = 256
"""Initial capacity if a step is replayed in fixed memory, which must be captured again when it grows."""


class TokenRows:
    """Rows that read one token at a time: each attends to its prompt, which its group shares, and to its own tokens.

    Args:
        keys: of N prompts by layer, (N, Hk, P, d), rotary applied.
        values: likewise.
        prompt_real: (N, P) bool, False on the padding of the prompts; None if they are equally long.
        prompt: (b,) int64 on the CPU, the prompt of each row in ascending order; every prompt has a row.
        fixed: whether all steps have the same shapes: rows attend to all columns, those without a token masked.
    """

    def __init__(
        self,
        keys: list[Tensor],
        values: list[Tensor],
        prompt_real: Tensor | None,
        prompt: Tensor,
        *,
        fixed: bool = False,
    ) -> None:
        self._prompt_keys, self._prompt_values, self._real = list(keys), list(values), prompt_real
        self._keys: list[Tensor] = []
        """Own keys (b, Hk, room, d) by layer, of which the first `_read` count."""
        self._values: list[Tensor] = []
        self._read = 0
        # the column of the current token, where a step that is captured once finds it
        self._column = torch.full((1,), -1, device=keys[0].device) if fixed else None
        self._far: Tensor | None = None
        """Mask (N, 1, 1, P) of the prompts' padding."""
        self._near: Tensor | None = None
        """Mask (b, 1, 1, room) of the own columns in this step."""
        self._place(prompt)

    def make_room(self) -> bool:
        """Count one more token of each row; returns whether memory was reallocated. Call it outside a captured step."""
        self._read += 1
        room = self._keys[0].shape[2] if self._keys else 0
        if room >= self._read:
            return False
        room = max(ROOM if self._column is None else FIXED_ROOM, 2 * room)
        self._keys = self._wider(self._keys, self._prompt_keys, room)
        self._values = self._wider(self._values, self._prompt_values, room)
        return True

    def begin_step(self) -> None:
        """Advance to the column of the next token; it also attends to itself."""
        if self._column is not None:
            self._column.add_(1)
            self._near = None

    def keep(self, index: Tensor) -> None:
        """Keep only the rows `index` (n,), on the CPU, and their prompts."""
        live, prompt = torch.unique_consecutive(self._prompt[index], return_inverse=True)
        device = self._prompt_keys[0].device
        # gathering copies all keys and values of the prompts, so only when a whole group has finished
        if len(live) < len(self._prompt_keys[0]):
            kept = to_device(live, device)
            self._prompt_keys = [layer[kept] for layer in self._prompt_keys]
            self._prompt_values = [layer[kept] for layer in self._prompt_values]
            self._real = None if self._real is None else self._real[kept]
        rows = to_device(index, device)
        self._keys = [own[rows] for own in self._keys]
        self._values = [own[rows] for own in self._values]
        self._place(prompt)

    def cached(self, index: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Keys and values of the tokens that rows (n,) have read, for each layer (n, Hk, t, d)."""
        rows = to_device(index, self._prompt_keys[0].device)
        return [own[rows, :, : self._read] for own in self._keys], [own[rows, :, : self._read] for own in self._values]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
        """Attention (b, 1, H, d) of a layer for query (b, H, 1, d), key and value (b, Hk, 1, d), rotary applied."""
        size = query.shape[-1] ** -0.5 if scale is None else scale
        q, k, v = _workable(query, key, value)
        keys, values = self._append(self._keys[layer], k), self._append(self._values[layer], v)
        prompt_k, prompt_v = _workable(self._prompt_keys[layer], self._prompt_values[layer])
        heads = k.shape[1]
        table = self._places.gather(q.transpose(1, 2).flatten(0, 1))  # (N, G, 1, H, d)
        with _no_autocast(q):
            far_mask, near_mask = self._masks(q)
            to_prompt = Part(_fold(table, heads), prompt_k, prompt_v, far_mask, causal=False, scale=size)
            far, far_lse = _softmax_part(to_prompt)
            # the query heads of a key head are one sequence, so that keys need no copy for each of them
            own = q[:, :, 0].unflatten(1, (heads, -1))
            near, near_lse = _softmax_part(Part(own, keys, values, near_mask, causal=False, scale=size))
            far = self._places.scatter(_unfold(far, table.shape, heads))  # (b, H, d)
            far_lse = self._places.scatter(_unfold(far_lse[..., None], table.shape, heads))[..., 0]
            out = merge_outputs(far, far_lse, near.flatten(1, 2), near_lse.flatten(1, 2))
        return out[:, None].to(query.dtype)

    def _masks(self, like: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Masks (N, 1, 1, P) of padding and (b, 1, 1, room) of columns without a token, the same for all layers."""
        if self._real is not None and self._far is None:
            self._far = _bias(self._real, like)
        if self._column is not None and self._near is None:
            columns = torch.arange(self._keys[0].shape[2], device=like.device).expand(len(like), -1)
            self._near = _bias(columns <= self._column, like)
        return self._far, self._near

    def _append(self, store: Tensor, new: Tensor) -> Tensor:
        """Write keys or values (b, Hk, 1, d) of a token behind those before; returns what the rows attend to."""
        if self._column is not None:
            return store.index_copy_(2, self._column, new)
        store[:, :, self._read - 1] = new[:, :, 0]
        return store[:, :, : self._read]

    def _wider(self, stores: list[Tensor], prompts: list[Tensor], room: int) -> list[Tensor]:
        """Room for as many tokens of each row, in the precision of the prompts."""
        rows = len(self._prompt)
        # masked columns are multiplied by 0, which has to give 0
        make = torch.Tensor.new_empty if self._column is None else torch.Tensor.new_zeros
        wider = [make(like, (rows, like.shape[1], room, like.shape[3])) for like in prompts]
        for held, new in zip(stores, wider, strict=False):
            new[:, :, : held.shape[2]] = held
        return wider

    def _place(self, prompt: Tensor) -> None:
        self._prompt = prompt
        ones = torch.ones(len(prompt), dtype=torch.int64)
        device = self._prompt_keys[0].device
        self._places = response_index(ones, prompt, len(self._prompt_keys[0]), device)
        self._far = None


def _softmax_part(part: Part) -> tuple[Tensor, Tensor]:
    """Output (b, H, Q, d) and log-sum-exp (b, H, Q) of one set of keys, without gradient."""
    kernels = kernels_for(part.q.device.type, part.q.dtype, part.q.shape[-1])
    if kernels is not None:
        out, lse, _ = kernels.forward(part)
        return out, lse
    scores = (part.q @ part.k.transpose(-1, -2) * part.scale).float()
    if part.bias is not None:
        scores = scores + part.bias
    return scores.softmax(-1).to(part.v.dtype) @ part.v, scores.logsumexp(-1)
