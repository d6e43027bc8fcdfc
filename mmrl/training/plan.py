"""Memory and time that a run needs on each GPU, before it starts: `mmrl train CONFIG --dry-run`.

Tensors can have shapes and no numbers, so a model of any size can be run forward and backward to see what it keeps and
how much it computes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from mmrl.errors import NoPlan, UserError

LOGGER = logging.getLogger("mmrl")
GB = 1e9
HEADROOM = 0.92
"""Share of a GPU's memory that tensors can have; CUDA, its libraries and gaps between blocks take the rest."""


@dataclass(frozen=True)
class Part:
    """Tensors of one purpose."""

    name: str
    bytes: float
    during: str = "always"
    """always, sampling, update, or start: before the others are there."""
    divided: bool = False
    """Whether each GPU has its share of them, by `trainer.sharding=fsdp2` or as rows of the step."""

    def on(self, gpus: int) -> float:
        """Bytes on each of some GPUs."""
        return self.bytes / gpus if self.divided else self.bytes


@dataclass(frozen=True)
class CountedPass:
    """Memory and operations of one pass through a network."""

    bytes: float
    """Most memory besides weights and gradients."""
    flops: float
    """Floating-point operations of matrices and attention."""
    kernels: float
    """Operations that are started one after the other."""
    attention: float = 0.0
    """Floating-point operations of attention, part of `flops`."""
    reads: float = 0.0
    """Bytes that are read from memory, where that may take longer than computing with them."""

    def attending(self, share: float) -> CountedPass:
        """The same where attention computes a share of the pairs of positions that were counted."""
        return dataclasses.replace(self, flops=self.flops - (1 - share) * self.attention)


@dataclass(frozen=True)
class Work:
    """Computation of one kind in a step, that of all GPUs together."""

    name: str
    flops: float
    kernels: float
    reads: float = 0.0

    @classmethod
    def of(cls, name: str, counted: CountedPass, passes: float) -> Work:
        """The work of a counted pass that is made several times."""
        return cls(name, counted.flops * passes, counted.kernels * passes, counted.reads * passes)


@dataclass(frozen=True)
class Gpu:
    """Sizes and speeds of a GPU."""

    memory_gb: float = 80.0
    tflops: float = 989.0
    """10^12 operations a second in bfloat16, dense: 989 of an H100 SXM, 312 of an A100."""
    timed: bool = True
    """Whether plans have seconds, which mean nothing for a GPU whose speed nobody named."""

    def seconds(self, work: Work, gpus: int, *, low: bool) -> tuple[float, float]:
        """Least and most seconds of some work, divided between GPUs, in bfloat16 or float16 (`low`) or in float32.

        Whatever takes longest counts: arithmetic, reading, or starting kernels.
        """
        peak = self.tflops * 1e12 * (1.0 if low else FLOAT32)
        bandwidth = BYTES_PER_OPERATION * self.tflops * 1e12
        least, most = (
            max(work.flops / (peak * share), work.reads / (bandwidth * 2 * share), work.kernels * start) / gpus
            for share, start in zip(UTILISATION, STARTING, strict=True)
        )
        return least, most


UTILISATION = (0.5, 0.2)
"""Shares of the peak that matrices of usual sizes reach, at best and at worst; of the bandwidth, twice these."""
STARTING = (5e-6, 40e-6)
"""Seconds in which Python and the driver start a kernel, at best and at worst; there are no CUDA graphs."""
FLOAT32 = 67 / 989
"""Peak in float32 over that in bfloat16, of an H100; an A100 has the same."""
BYTES_PER_OPERATION = 3.35e12 / 989e12
"""Bandwidth over peak in bfloat16, of an H100; an A100 has up to 6.5e-3."""


@dataclass(frozen=True)
class Plan:
    """Parts of a run, and what they were computed for."""

    parts: tuple[Part, ...]
    assumed: tuple[str, ...]
    work: tuple[Work, ...] = ()
    """Computation of a step."""
    low: bool = True
    """Whether matrices are multiplied in bfloat16 or float16."""

    def held(self, phase: str, gpus: int = 1) -> float:
        """Bytes of the parts of a phase on each of some GPUs."""
        return sum(part.on(gpus) for part in self.parts if part.during == phase)

    def peak(self, gpus: int = 1) -> float:
        """Most bytes on each GPU at any time."""
        phases = max(self.held("sampling", gpus), self.held("update", gpus))
        return max(self.held("always", gpus) + phases, self.held("start", gpus))

    def fits(self, memory_gb: float, gpus: int = 1) -> bool:
        """Whether the peak leaves room for what is no tensor."""
        return self.peak(gpus) <= HEADROOM * memory_gb * GB

    def seconds(self, gpu: Gpu, gpus: int = 1) -> tuple[float, float]:
        """Least and most seconds of a step."""
        found = [gpu.seconds(work, gpus, low=self.low) for work in self.work]
        return sum(least for least, _ in found), sum(most for _, most in found)


def state_parts(network: nn.Module, trainer: Any, *, copies: int = 0, prefix: str = "") -> list[Part]:
    """Weights, gradients and moments of a network, and whole or trained-only copies of it.

    Args:
        network: with `requires_grad` on what is trained.
        trainer: settings of the run's `trainer`.
        copies: frozen copies of the policy, such as a reference.
        prefix: of the parts' names.
    """
    weights = list(network.parameters())
    trained = sum(weight.nbytes for weight in weights if weight.requires_grad)
    numbers = sum(weight.numel() for weight in weights if weight.requires_grad)
    frozen = sum(weight.nbytes for weight in weights) + sum(b.nbytes for b in network.buffers()) - trained
    sharded = trainer.sharding == "fsdp2"
    low = sharded and trainer.gathered == "bf16" and trained > 2 * numbers
    parts = [Part(f"{prefix}weights, frozen", frozen)]
    if sharded:
        parts.append(Part(f"{prefix}weights, trained, in parts", trained, divided=True))
        parts.append(Part(f"{prefix}gradients, sums in parts", trained, "update", divided=True))
    parts += [
        Part(f"{prefix}weights, trained" + (", whole in bf16" if low else ""), 2 * numbers if low else trained),
        Part(f"{prefix}moments of AdamW", 2 * trained, divided=sharded),
        Part(f"{prefix}gradients", trained, "update"),  # those of bfloat16 weights add up in float32
        Part(f"{prefix}reference", copies * (trained + frozen), divided=sharded),
    ]
    return [part for part in parts if part.bytes]


def batch_sizes(trainer: Any, group: int) -> tuple[int, int, int]:
    """Most rows of a step, an optimiser step and a pass, as `Rollouts.micro_batches` cuts groups of equal size."""
    rows, micro_batch = trainer.tasks_per_step * group, trainer.micro_batch
    minibatch = -(-rows // trainer.minibatches_per_step)
    if micro_batch == 0 or micro_batch >= minibatch:
        return rows, minibatch, minibatch
    if micro_batch >= group:
        return rows, minibatch, micro_batch // group * group
    parts = -(-group // micro_batch)
    return rows, minibatch, -(-group // parts)


def activations(network: nn.Module, once: Callable[[], Tensor], passes: int) -> CountedPass:
    """Forward and backward passes of a micro-batch, and their memory besides weights and gradients.

    Args:
        network: the trained network, whose gradients are dropped afterwards.
        once: makes the input and returns the loss of a micro-batch, a scalar.
        passes: micro-batches of an optimiser step; the second one meets the gradients of the first.
    """
    network.train()
    with _besides(network) as allocations:
        before = allocations.alive
        for weight in network.parameters():
            if passes > 1 and weight.requires_grad:
                weight.grad = torch.empty_like(weight)
        allocations.restart()
        once().backward()
    gradients = sum(weight.grad.nbytes for weight in network.parameters() if weight.grad is not None)
    network.zero_grad()
    return allocations.counted(before + gradients)


def forward(network: nn.Module, once: Callable[[], Any]) -> CountedPass:
    """A pass without gradient, and its memory besides the weights."""
    network.eval()
    with torch.no_grad(), _besides(network) as allocations:
        before = allocations.alive
        allocations.restart()
        once()
    return allocations.counted(before)


def history(network: nn.Module, once: Callable[[], Tensor]) -> float:
    """Bytes that a forward pass keeps for its backward pass, besides the weights."""
    with _besides(network) as allocations:
        before = allocations.alive
        loss = once()
        kept = allocations.alive - before
    del loss
    return kept


def _besides(network: nn.Module) -> Allocations:
    """Allocations that know the weights, of which a pass makes views such as transposes."""
    allocations = Allocations()
    allocations.hold(*network.parameters(), *network.buffers())
    return allocations


def described(config: Any, footprint: Callable[[Any], Plan], gpu: Gpu, gpus: int) -> list[str]:
    """The plan of a run as lines of text, with changes that make it fit where it does not.

    Raises:
        UserError: the memory or the speed is not above 0.
    """
    for option, value in (("--gpu-memory", gpu.memory_gb), ("--gpu-tflops", gpu.tflops)):
        if not value > 0:
            raise UserError(f"{option} is {value:g}; must be above 0")
    try:
        plan = footprint(config)
    except NoPlan as error:
        return [f"memory: {error}"]
    return [
        f"{gpus} GPU{'s' if gpus > 1 else ''}, computed for {', '.join(plan.assumed)}",
        *shown(plan, gpu.memory_gb, gpus),
        *(times(plan, gpu, gpus) if gpu.timed else []),
        *([] if plan.fits(gpu.memory_gb, gpus) else remedies(config, footprint, gpu.memory_gb, gpus)),
    ]


def check_state(config: Any, footprint: Callable[..., Plan], memory_gb: float, gpus: int) -> None:
    """Refuse a run whose weights, gradients, moments and copies alone are larger than a GPU; raises UserError."""
    try:
        with torch.random.fork_rng(devices=[]):  # the run draws what it would draw without a plan
            plan = footprint(config, passes=False)
    except Exception as error:  # there is no plan, or the run itself says better what is wrong
        LOGGER.debug("the memory of the run is not checked: %s", error)
        return
    if plan.peak(gpus) > memory_gb * GB:
        lines = [*shown(plan, memory_gb, gpus), *remedies(config, footprint, memory_gb, gpus)]
        raise UserError("\n".join(["the run is larger than the GPU, even without activations:", *lines]))


def shown(plan: Plan, memory_gb: float, gpus: int) -> list[str]:
    """The parts as lines of text, and whether they fit."""
    width = max(len(part.name) for part in plan.parts)
    lines = [
        f"  {part.name:<{width}}  {part.on(gpus) / GB:8.2f} GB"
        + ("" if part.during == "always" else f"  {part.during}")
        for part in plan.parts
    ]
    peak = plan.peak(gpus) / GB
    verdict = "fits into" if plan.fits(memory_gb, gpus) else "does not fit into"
    return [*lines, f"  {'peak':<{width}}  {peak:8.2f} GB  {verdict} {memory_gb:g} GB"]


def times(plan: Plan, gpu: Gpu, gpus: int) -> list[str]:
    """Seconds of a step as lines of text."""
    if not plan.work:
        return []
    width = max(len(work.name) for work in plan.work)
    found = [gpu.seconds(work, gpus, low=plan.low) for work in plan.work]
    lines = [
        f"  {work.name:<{width}}  {least:8.3g} to {most:.3g} s"
        for work, (least, most) in zip(plan.work, found, strict=True)
    ]
    least, most = plan.seconds(gpu, gpus)
    head = f"a step without rewards and environments, on GPUs of {gpu.tflops:g} TFLOPS:"
    return [head, *lines, f"  {'all':<{width}}  {least:8.3g} to {most:.3g} s"]


def remedies(config: Any, footprint: Callable[[Any], Plan], memory_gb: float, gpus: int) -> list[str]:
    """Changes, each on top of those before, until the run fits; with their peaks."""
    lines = ["changes, each with those before, and the peak:"]
    for key, value in CHANGES:
        changed = _changed(config, key, value)
        if changed is None:
            continue
        if key == "trainer.sharding" and gpus == 1:
            continue
        config = changed
        plan = footprint(config)
        lines.append(f"  {key}={str(value).lower()}: {plan.peak(gpus) / GB:.2f} GB")
        if plan.fits(memory_gb, gpus):
            return lines
    return [*lines, "  none of these is enough"]


CHANGES: Sequence[tuple[str, Any]] = (
    ("trainer.micro_batch", 1),
    ("model.gradient_checkpointing", True),
    ("trainer.mixed_precision", "bf16"),
    ("model.free_text_encoders", True),
    ("trainer.sharding", "fsdp2"),
    ("model.lora.enabled", True),
    ("model.dtype", "bfloat16"),
)
"""Changes that save memory, those that cost least first."""


def _changed(config: Any, key: str, value: Any) -> Any | None:
    """A copy with another value; None if there is no such option or it already has the value."""
    name, _, rest = key.partition(".")
    if not dataclasses.is_dataclass(config) or not hasattr(config, name):
        return None
    old = getattr(config, name)
    new = (None if old == value else value) if not rest else _changed(old, rest, value)
    return None if new is None else dataclasses.replace(config, **{name: new})  # type: ignore[type-var]


def autocast(trainer: Any) -> torch.autocast:
    """The arithmetic of a run, for tensors without numbers."""
    low = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(trainer.mixed_precision)
    return torch.autocast("cpu", dtype=low or torch.bfloat16, enabled=low is not None)


class Allocations(TorchDispatchMode):
    """Counts the storages that are made inside the context, and the operations.

    with Allocations() as allocations:
        loss.backward()
    allocations.peak
    """

    _current: ClassVar[Allocations | None] = None

    def __init__(self) -> None:
        super().__init__()
        self.alive = 0
        """Bytes now."""
        self.peak = 0
        """Most bytes so far."""
        self.flops = 0.0
        """Floating-point operations of matrices and attention, since `restart`."""
        self.attention = 0.0
        """Those of attention alone."""
        self.kernels = 0
        """Operations that are no views, since `restart`."""
        self._seen: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()

    def hold(self, *tensors: Tensor) -> None:
        """Count tensors that were there before."""
        for tensor in tensors:
            self._add(tensor)

    def restart(self) -> None:
        """Reset the peak and the counts from here on."""
        self.peak, self.flops, self.attention, self.kernels = self.alive, 0.0, 0.0, 0

    def counted(self, before: float) -> CountedPass:
        """Memory and operations since `restart`, less the bytes that were held before."""
        return CountedPass(max(self.peak - before, 0), self.flops, self.kernels, self.attention)

    def __enter__(self) -> Self:
        Allocations._current = self
        return super().__enter__()  # type: ignore[no-any-return]

    def __exit__(self, *error: Any) -> None:
        Allocations._current = None
        super().__exit__(*error)

    @classmethod
    def note(cls, attention: float) -> None:
        """Count operations of attention, which here has no kernel that torch's registry knows."""
        if cls._current is not None:
            cls._current.flops += attention
            cls._current.attention += attention

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default and isinstance(args[0], FakeTensor):
            return args[0].fake_device  # asked for so often that the way through the mode takes most of the time
        out = func(*args, **(kwargs or {}))
        if (flops := flop_registry.get(func._overloadpacket)) is not None:
            self.flops += flops(*args, **(kwargs or {}), out_val=out)
        self.kernels += not (func.is_view or func._overloadpacket in _FREE)
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self._add(leaf)
        return out

    def _add(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage in self._seen:
            return
        size = storage.nbytes()
        self._seen[storage] = size
        weakref.finalize(storage, self._free, size).atexit = False
        self.alive += size
        self.peak = max(self.peak, self.alive)

    def _free(self, size: int) -> None:
        self.alive -= size


@contextlib.contextmanager
def imagined(*modules: nn.Module) -> Iterator[FakeTensorMode]:
    """Have tensors of shapes without numbers made inside, and attention that keeps what a fused kernel keeps.

    Modules of the meta device get weights on the CPU without numbers.
    """

    def attention(query: Tensor, key: Tensor, value: Tensor, *_: Any, **options: Any) -> Any:
        return _Fused.apply(query, key, value)

    with FakeTensorMode(allow_non_fake_inputs=True) as mode, mock.patch(ATTENTION, attention):
        for module in modules:
            _imagine(module)
        yield mode


def _imagine(module: nn.Module) -> None:
    known: dict[int, Any] = {}
    for part in module.modules():
        for table in (part._parameters, part._buffers):
            for name, old in table.items():
                if old is None or not old.is_meta:
                    continue
                if id(old) not in known:
                    new = torch.empty(old.shape, dtype=old.dtype)
                    known[id(old)] = nn.Parameter(new, old.requires_grad) if isinstance(old, nn.Parameter) else new
                table[name] = known[id(old)]


ATTENTION = "torch.nn.functional.scaled_dot_product_attention"


class _Fused(torch.autograd.Function):
    """Output (..., T, d) of queries (..., T, d), with their log-sum-exps."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = q.new_empty(*q.shape[:-1], v.shape[-1])
        ctx.flops = 4.0 * out.numel() * k.shape[-2]
        Allocations.note(ctx.flops)
        ctx.save_for_backward(q, k, v, out, q.new_empty(q.shape[:-1], dtype=torch.float32))
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        Allocations.note(2.5 * ctx.flops)  # the weights are computed again
        return tuple(torch.empty_like(x) for x in ctx.saved_tensors[:3])


_FREE = {
    getattr(torch.ops.aten, name) for name in ("empty", "empty_like", "new_empty", "detach", "_unsafe_view", "alias")
}
"""Operations that compute nothing."""
