"""Log-probabilities of chosen entries and entropies, computed in chunks of rows."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mmrl.core.payload import numbers

CHUNK_ELEMENTS = 2**24  # 64 MiB of float32 for one [rows, V] buffer

BLOCK_ELEMENTS = 2**22
"""Number of elements of a weight's gradient that are computed at a time when accumulating."""


@dataclass(frozen=True)
class LogProbs:
    """Log-probabilities of chosen entries and, if requested, entropies."""

    logp: Tensor
    """(M,) nats, float32 (float64 for float64 inputs)."""
    entropy: Tensor | None = None
    """(M,) nats, of the whole distribution."""


def linear_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    banned: Tensor | None = None,
    entropy: bool = False,
    chunk_rows: int | None = None,
) -> LogProbs:
    """Return log softmax((hidden weight^T + bias) / temperature) at the targets.

    Equal to the naive form in values and gradients, but neither pass holds more than `chunk_rows` rows of
    logits: the backward pass recomputes them, unless a single chunk holds them all. The products are computed in
    the dtype of `hidden`, or under autocast in autocast's, like the model's output layer; everything after them, and
    the sums over chunks, is in float32.

    Args:
        hidden: (M, H), states before each decision; float32, float64, bfloat16 or float16.
        weight: (V, H), output layer.
        targets: (M,) int64, the chosen entries.
        bias: (V,) or None.
        temperature: Divides the logits; must be the one that was used for sampling.
        banned: (K,) int64, entries that cannot be chosen: their logits count as -inf.
        entropy: Whether to compute the entropy too.
        chunk_rows: Rows of logits held at once; None uses as many as fit in 64 MiB.

    Returns:
        Log-probabilities and, if requested, entropies in nats.

    Raises:
        ValueError: Mismatched shapes, a non-positive temperature, or a banned target.

    Gradient: through hidden, weight and bias, from both outputs; once (no second derivatives).

    Source: recomputation in the backward pass as in linkedin/Liger-Kernel fused linear losses.
    """
    _check_inputs(hidden, targets, temperature, chunk_rows, "hidden")
    if weight.dim() != 2 or weight.shape[1] != hidden.shape[1]:
        raise ValueError(f"weight must be (V, H) with H = {hidden.shape[1]} as in hidden; got {tuple(weight.shape)}.")
    if bias is not None and tuple(bias.shape) != (weight.shape[0],):
        raise ValueError(f"bias must be (V,) = ({weight.shape[0]},); got {tuple(bias.shape)}.")
    banned = _check_banned(banned, targets, weight.shape[0])
    device = hidden.device.type
    if torch.is_autocast_enabled(device) and hidden.dtype != torch.float64:
        # norms leave the last states of a model in the precision of their weights, which is float32 under autocast
        hidden = hidden.to(torch.get_autocast_dtype(device))
    # bounded by elements, so that the buffers do not grow with the vocabulary
    rows = chunk_rows or max(1, CHUNK_ELEMENTS // weight.shape[0])
    logp, entropies = _LinearLogProbs.apply(hidden, weight, bias, targets, banned, temperature, entropy, rows)
    return LogProbs(logp, entropies if entropy else None)


def logprobs_from_logits(
    logits: Tensor,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    banned: Tensor | None = None,
    entropy: bool = False,
    chunk_rows: int | None = None,
) -> LogProbs:
    """Return log softmax(logits / temperature) at the targets, from existing logits.

    Args:
        logits: (M, V), any floating dtype; only chunks of it are ever converted to float32.
        targets: (M,) int64, the chosen entries.
        temperature: Divides the logits.
        banned: (K,) int64, entries that cannot be chosen.
        entropy: Whether to compute the entropy too.
        chunk_rows: Rows converted at once; None uses as many as fit in 64 MiB.

    Returns:
        Log-probabilities and, if requested, entropies in nats.

    Raises:
        ValueError: Mismatched shapes, a non-positive temperature, or a banned target.

    Gradient: through logits, from both outputs, in the dtype of the logits; once.
    """
    _check_inputs(logits, targets, temperature, chunk_rows, "logits")
    # a banned target would have the log-probability -inf and make the loss infinite
    banned = _check_banned(banned, targets, logits.shape[1])
    rows = chunk_rows or max(1, CHUNK_ELEMENTS // logits.shape[1])
    logp, entropies = _LogitsLogProbs.apply(logits, targets, banned, temperature, entropy, rows)
    return LogProbs(logp, entropies if entropy else None)


def gaussian_step_logprob(
    x: Tensor, mean: Tensor, std: Tensor | float, reduction: str = "mean", batch_dims: int = 1
) -> Tensor:
    """Return the log-density of a step x ~ N(mean, std^2), reduced over the dimensions of the step.

    Args:
        x: (B, ...), what was sampled.
        mean: (B, ...).
        std: Positive, broadcastable to x.
        reduction: "sum" is the log-density; "mean" divides it by the number of dimensions, as DDPO-style code
            does, which rescales the meaning of a clip range by that factor.
        batch_dims: Leading dimensions that are kept.

    Returns:
        Shape `x.shape[:batch_dims]`, nats.

    Raises:
        ValueError: Unknown reduction, or x and mean of different shapes.

    Gradient: through mean and std; x is data.

    Source: kvablack/ddpo-pytorch ddim_with_logprob (mean).
    """
    if reduction not in ("mean", "sum"):
        raise ValueError(f"unknown reduction '{reduction}'; available: mean, sum")
    if x.shape != mean.shape:
        raise ValueError(f"x and mean must have the same shape; got {tuple(x.shape)} and {tuple(mean.shape)}.")
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    spread = torch.as_tensor(std, dtype=dtype, device=x.device)
    # x is data: without detach, the gradient would also flow into the sampler's noise
    z = (x.detach().to(dtype) - mean.to(dtype)) / spread
    density = -0.5 * z**2 - torch.log(spread) - 0.5 * math.log(2 * math.pi)
    # expand first: std and mean may be broadcast, and the mean would otherwise weigh dimensions differently
    flat = density.expand(x.shape).flatten(batch_dims) if x.dim() > batch_dims else density[..., None]
    return flat.sum(-1) if reduction == "sum" else flat.mean(-1)


class _LinearLogProbs(torch.autograd.Function):
    """Log-probabilities from hidden states, in chunks of rows.

    The forward pass keeps each row's log-sum-exp (and entropy) and drops the logits. The backward pass recomputes the
    logits of a chunk, turns them into d loss / d logits with the saved log-sum-exps, and adds the contribution of the
    chunk to the gradients of hidden, weight and bias. So neither pass ever holds more than `rows` rows of V logits, at
    the cost of one more product with the weight. Logits that fit in one chunk are kept: the backward pass would hold
    as much.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        banned: Tensor | None,
        temperature: float,
        entropy: bool,
        rows: int,
    ) -> tuple[Tensor, Tensor]:
        ctx.options = (temperature, entropy, rows)
        outputs, logits = [], None
        with _no_autocast(hidden):
            # cast once, not in every chunk
            operand = weight.to(hidden.dtype)
            for part in _chunks(len(hidden), rows):
                # freed first, so that two chunks are never held together
                logits = None
                logits = _logits(hidden[part], operand, bias, temperature)
                outputs.append(_statistics(logits, targets[part], banned, entropy))
        logp, logsumexp, entropies = _join(outputs, hidden)
        # with entropies the backward pass would need a third buffer beside kept logits
        keeps = any(ctx.needs_input_grad) and len(outputs) == 1 and not entropy
        # one number a row, from which the backward pass normalises the logits without a second reduction over V
        kept = (logsumexp, entropies, logits if keeps else None)
        ctx.save_for_backward(hidden, weight, None if operand is weight else operand, bias, targets, banned, *kept)
        return logp, entropies

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logp: Tensor, grad_entropy: Tensor) -> tuple[Any, ...]:
        hidden, weight, cast, bias, targets, banned, logsumexp, entropies, kept = ctx.saved_tensors
        temperature, entropy, rows = ctx.options
        operand, keeps = weight if cast is None else cast, kept is not None
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        # empty: every row is in exactly one chunk and is written once
        grad_hidden = torch.empty_like(hidden) if wants_hidden else None
        # all chunks add to these two, which would lose small ones in bfloat16
        grad_weight = _Sum(weight) if wants_weight else None
        grad_bias = _Sum(bias) if wants_bias else None
        with _no_autocast(hidden):
            for part in _chunks(len(hidden), rows):
                ends = logsumexp[part, None]
                # kept logits stay as they are, since a graph may be used twice
                log_probability = kept - ends if keeps else _logits(hidden[part], operand, bias, temperature).sub_(ends)
                slope = _logit_gradient(
                    log_probability,
                    targets[part],
                    banned,
                    entropies[part],
                    grad_logp[part],
                    grad_entropy[part] if entropy else None,
                )
                # the logits were divided by the temperature, so their gradient is too
                slope = slope if temperature == 1.0 else slope.div_(temperature)
                if grad_bias is not None:
                    # before the cast below, so that the sum over rows is exact
                    grad_bias.add(slope.sum(0))
                # the two products run in the dtype of the forward product
                slope = slope.to(hidden.dtype)
                if grad_hidden is not None:
                    grad_hidden[part] = slope @ operand
                if grad_weight is not None:
                    grad_weight.add_product(slope, hidden[part])
        return (
            grad_hidden,
            None if grad_weight is None else grad_weight.total,
            None if grad_bias is None else grad_bias.total,
            # targets, banned, temperature, entropy and rows have no gradient
            *(None,) * 5,
        )


class _LogitsLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        targets: Tensor,
        banned: Tensor | None,
        temperature: float,
        entropy: bool,
        rows: int,
    ) -> tuple[Tensor, Tensor]:
        ctx.options = (temperature, entropy, rows)
        outputs = [
            _statistics(_scaled(logits[part], temperature), targets[part], banned, entropy)
            for part in _chunks(len(logits), rows)
        ]
        logp, logsumexp, entropies = _join(outputs, logits)
        ctx.save_for_backward(logits, targets, banned, logsumexp, entropies)
        return logp, entropies

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logp: Tensor, grad_entropy: Tensor) -> tuple[Any, ...]:
        logits, targets, banned, logsumexp, entropies = ctx.saved_tensors
        temperature, entropy, rows = ctx.options
        # in the dtype of the logits, as autograd would return it; the sums above are exact already
        gradient = torch.empty_like(logits)
        for part in _chunks(len(logits), rows):
            gradient[part] = _logit_gradient(
                _scaled(logits[part], temperature).sub_(logsumexp[part, None]),
                targets[part],
                banned,
                entropies[part],
                grad_logp[part],
                grad_entropy[part] if entropy else None,
            ).div_(temperature)
        return (gradient, *(None,) * 5)


class _Sum:
    """Sum of parts of a gradient in float32 (float64 for float64); `total` is in the dtype of its tensor."""

    def __init__(self, like: Tensor) -> None:
        self._like = like
        self._sum: Tensor | None = None

    def add(self, part: Tensor) -> None:
        # the first part is the sum so far: zeros to add it to would be a second tensor of this size
        self._sum = part.to(_exact_dtype(self._like)) if self._sum is None else self._sum.add_(part)

    def add_product(self, left: Tensor, right: Tensor) -> None:
        """Add left^T right, of (r, V) and (r, H), in blocks of V to avoid a second tensor of the size of the sum."""
        if self._sum is None:
            self.add(left.t() @ right)
            return
        for part in _chunks(len(self._sum), max(1, BLOCK_ELEMENTS // right.shape[1])):
            self._sum[part].add_(left[:, part].t() @ right)

    @property
    def total(self) -> Tensor:
        return torch.zeros_like(self._like) if self._sum is None else self._sum.to(self._like.dtype)


def _logits(hidden: Tensor, operand: Tensor, bias: Tensor | None, temperature: float) -> Tensor:
    """Logits (r, V) in float32 (or float64) that may be overwritten."""
    logits = hidden @ operand.t()
    if bias is not None:
        logits += bias.to(hidden.dtype)
    # the product belongs to nobody else, so it needs no copy
    exact = logits.to(_exact_dtype(logits))
    return exact if temperature == 1.0 else exact.div_(temperature)


def _scaled(logits: Tensor, temperature: float) -> Tensor:
    """Given logits as a new float32 (or float64) tensor that may be overwritten."""
    # the division makes a copy, which is what lets the callers overwrite it
    return logits.to(_exact_dtype(logits)) / temperature


def _statistics(logits: Tensor, targets: Tensor, banned: Tensor | None, entropy: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return log-probability, log-sum-exp and entropy of (r, V) logits, which are overwritten."""
    if banned is not None:
        # before the log-sum-exp: banned entries take no probability, as while sampling
        logits.index_fill_(1, banned, float("-inf"))
    logsumexp = torch.logsumexp(logits, dim=1)
    logp = logits.gather(1, targets[:, None]).squeeze(1) - logsumexp
    if not entropy:
        return logp, logsumexp, torch.zeros_like(logp)
    probability = (logits - logsumexp[:, None]).exp_()
    if banned is not None:
        logits.index_fill_(1, banned, 0.0)  # 0 * -inf is NaN, and the probability there is 0
    # H = -sum p log p = logsumexp - sum p logits, without another (r, V) buffer
    return logp, logsumexp, logsumexp - probability.mul_(logits).sum(1)


def _logit_gradient(
    log_probability: Tensor,
    targets: Tensor,
    banned: Tensor | None,
    entropies: Tensor,
    grad_logp: Tensor,
    grad_entropy: Tensor | None,
) -> Tensor:
    """Return g (onehot - p) - e p (log p + H) for (r, V) log-probabilities, which are overwritten."""
    if banned is not None:
        # recomputed logits do not have the ban yet
        log_probability.index_fill_(1, banned, float("-inf"))
    if grad_entropy is None:
        slope = log_probability.exp_().mul_(-grad_logp[:, None])
    else:
        probability = log_probability.exp()
        if banned is not None:
            log_probability.index_fill_(1, banned, 0.0)
        # in place, so that a chunk never needs more than two (r, V) buffers
        pull = log_probability.add_(entropies[:, None]).mul_(grad_entropy[:, None]).add_(grad_logp[:, None])
        # -p (g + e (log p + H)); the one-hot part is added below, at a single entry a row
        slope = probability.mul_(pull).neg_()
    # at the target only: a one-hot matrix would be another (r, V) buffer
    return slope.scatter_add_(1, targets[:, None], grad_logp[:, None].to(slope.dtype))


def _chunks(total: int, rows: int) -> list[slice]:
    return [slice(start, min(start + rows, total)) for start in range(0, total, rows)]


def _join(outputs: list[tuple[Tensor, Tensor, Tensor]], like: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    if not outputs:
        empty = like.new_zeros(0, dtype=_exact_dtype(like))
        return empty, empty.clone(), empty.clone()
    # zip transposes: chunk by chunk to output by output
    logp, logsumexp, entropies = (torch.cat(parts) for parts in zip(*outputs, strict=True))
    return logp, logsumexp, entropies


def _exact_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _no_autocast(x: Tensor) -> torch.autocast:
    # Autocast is off in backward passes, so it must be off in the forward pass that they repeat.
    return torch.autocast(device_type=x.device.type, enabled=False)


def _check_inputs(x: Tensor, targets: Tensor, temperature: float, chunk_rows: int | None, name: str) -> None:
    if x.dim() != 2 or tuple(targets.shape) != (x.shape[0],) or targets.dtype != torch.int64:
        raise ValueError(
            f"{name} must be 2-d and targets 1-d int64 with one entry per row; got {tuple(x.shape)} and "
            f"{targets.dtype} {tuple(targets.shape)}. Flatten (B, T) decisions first, e.g. {name}[mask.bool()]."
        )
    if temperature <= 0:
        raise ValueError(f"temperature must be positive; got {temperature}. Greedy decoding has no log-probability.")
    if chunk_rows is not None and chunk_rows < 1:
        raise ValueError(f"chunk_rows must be at least 1, or None; got {chunk_rows}.")


def _check_banned(banned: Tensor | None, targets: Tensor, entries: int) -> Tensor | None:
    if banned is None or not len(banned):
        return None
    # on the device of the targets; the ids are few
    hit = torch.isin(targets, banned)
    # one transfer for three checks
    low, high, hits = numbers([banned.min(), banned.max(), hit.any()])
    if low < 0 or high >= entries:
        raise ValueError(f"banned contains an entry outside 0..{entries - 1}.")
    if hits:
        raise ValueError(
            f"{int(hit.sum())} targets are banned entries (first: {int(targets[hit][0])}), so their "
            "log-probability is -inf. Ban the same entries while sampling, and score only trained decisions."
        )
    return banned.to(targets.device)
