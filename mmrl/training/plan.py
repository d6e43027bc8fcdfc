"""Memory that a run needs on each GPU, before it starts: `mmrl train CONFIG --dry-run`.

Tensors can have shapes and no numbers, so a model of any size can be run forward and backward to see what it keeps. A
domain gives the facts of a run, `Facts`: its network, a pass over the rows of an update and a call that samples.
`planned` runs them and adds up what they hold.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

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
        # rows and sharded weights are divided; the rest is on every GPU
        return self.bytes / gpus if self.divided else self.bytes


@dataclass(frozen=True)
class Plan:
    """Parts of a run, and what they were computed for."""

    parts: tuple[Part, ...]
    assumed: tuple[str, ...]

    def held(self, phase: str, gpus: int = 1) -> float:
        """Bytes of the parts of a phase on each of some GPUs."""
        return sum(part.on(gpus) for part in self.parts if part.during == phase)

    def peak(self, gpus: int = 1) -> float:
        """Most bytes on each GPU at any time."""
        # sampling and update follow each other; what one holds is free in the other
        phases = max(self.held("sampling", gpus), self.held("update", gpus))
        return max(self.held("always", gpus) + phases, self.held("start", gpus))

    def fits(self, memory_gb: float, gpus: int = 1) -> bool:
        """Whether the peak leaves room for memory besides tensors."""
        # CUDA, its libraries and gaps between blocks take the rest
        return self.peak(gpus) <= HEADROOM * memory_gb * GB


class Sizes(NamedTuple):
    """Maximum number of rows."""

    step: int
    """In a step of all processes."""
    minibatch: int
    """In an optimiser step."""
    chunk: int
    """In a forward and backward pass."""

    @property
    def passes(self) -> int:
        """Forward and backward passes of an optimiser step."""
        return -(-self.minibatch // self.chunk)


@dataclass(frozen=True)
class Facts:
    """What a domain knows about a run: its networks and the calls that a step makes of them."""

    network: nn.Module
    """The trained network, with `requires_grad` on what is trained; its weights are on the meta device unless small."""
    learn: Callable[[], Tensor]
    """Makes the input of a forward pass of the update and returns its loss, a scalar."""
    assumed: tuple[str, ...]
    """What the calls are made for."""
    passes: int = 1
    """Forward and backward passes of an optimiser step; the second one meets the gradients of the first."""
    act: Callable[[], Any] | None = None
    """Samples once, without gradient; None if nothing is sampled, or `inputs` has what sampling needs."""
    acting: str = "sampling"
    """Name of the memory that `act` needs."""
    keep: Callable[[], Tensor] | None = None
    """A forward pass of sampling whose graph is kept for the update."""
    copies: int = 0
    """Frozen copies of the network, such as a reference."""
    frozen: tuple[nn.Module, ...] = ()
    """Other networks that the calls use."""
    held: Sequence[Part] = ()
    """What is held between passes besides weights, gradients, moments and copies."""
    inputs: Sequence[Part] = ()
    """What the calls read, write and keep besides activations."""


def planned(facts: Facts, trainer: Any, *, passes: bool) -> Plan:
    """Run the calls of a step and add up what they hold; without passes, only what is held between them."""
    parts = [*state_parts(facts.network, trainer, copies=facts.copies), *facts.held]
    if passes:
        parts += facts.inputs
        networks = nn.ModuleList([facts.network, *facts.frozen])
        outlined = any(weight.is_meta for weight in networks.parameters())
        with imagined(networks) if outlined else contextlib.nullcontext():
            parts.append(Part("activations", activations(facts.network, facts.learn, facts.passes), "update"))
            if facts.keep is not None:
                kept = history(facts.network, facts.keep)
                parts.append(Part("history of the prompts, for the update", kept, "sampling"))
            if facts.act is not None:
                parts.append(Part(facts.acting, forward(networks, facts.act), "sampling"))
    return Plan(tuple(part for part in parts if part.bytes), facts.assumed if passes else ())


def state_parts(network: nn.Module, trainer: Any, *, copies: int = 0) -> list[Part]:
    """Weights, gradients and moments of a network, and whole or trained-only copies of it.

    Args:
        network: with `requires_grad` on what is trained.
        trainer: settings of the run's `trainer`.
        copies: frozen copies of the policy, such as a reference.
    """
    weights = list(network.parameters())
    trained = sum(weight.nbytes for weight in weights if weight.requires_grad)
    numbers = sum(weight.numel() for weight in weights if weight.requires_grad)
    # buffers are never trained
    frozen = sum(weight.nbytes for weight in weights) + sum(b.nbytes for b in network.buffers()) - trained
    sharded = trainer.sharding == "fsdp2"
    # bfloat16 weights would gain nothing from a bfloat16 copy
    low = sharded and trainer.gathered == "bf16" and trained > 2 * numbers
    parts = [Part("weights, frozen", frozen)]
    if sharded:
        parts.append(Part("weights, trained, in parts", trained, divided=True))
        parts.append(Part("gradients, sums in parts", trained, "update", divided=True))
    parts += [
        Part("weights, trained" + (", whole in bf16" if low else ""), 2 * numbers if low else trained),
        Part("moments of AdamW", 2 * trained, divided=sharded),
        Part("gradients", trained, "update"),  # those of bfloat16 weights add up in float32
        Part("reference", copies * (trained + frozen), divided=sharded),
    ]
    return [part for part in parts if part.bytes]


def batch_sizes(trainer: Any, group: int) -> Sizes:
    """Rows of a step, an optimiser step and a pass, as `Rollouts.micro_batches` cuts groups of equal size."""
    rows, micro_batch = trainer.tasks_per_step * group, trainer.micro_batch
    # rounded up: the largest of uneven parts decides
    minibatch = -(-rows // trainer.minibatches_per_step)
    if micro_batch == 0 or micro_batch >= minibatch:
        return Sizes(rows, minibatch, minibatch)
    if micro_batch >= group:
        return Sizes(rows, minibatch, micro_batch // group * group)
    parts = -(-group // micro_batch)
    return Sizes(rows, minibatch, -(-group // parts))


def activations(network: nn.Module, once: Callable[[], Tensor], passes: int) -> float:
    """Bytes that forward and backward passes of a micro-batch need besides weights and gradients.

    Args:
        network: the trained network, whose gradients are dropped afterwards.
        once: makes the input and returns the loss of a micro-batch, a scalar.
        passes: micro-batches of an optimiser step; the second one meets the gradients of the first.
    """
    network.train()
    with _besides(network) as allocations:
        before = allocations.alive
        for weight in network.parameters():
            # the second micro-batch meets the gradients of the first
            if passes > 1 and weight.requires_grad:
                weight.grad = torch.empty_like(weight)
        allocations.restart()
        # the peak is in the backward pass, which holds the history and the gradients
        once().backward()
    gradients = sum(weight.grad.nbytes for weight in network.parameters() if weight.grad is not None)
    network.zero_grad()
    return max(allocations.peak - before - gradients, 0)


def forward(network: nn.Module, once: Callable[[], Any]) -> float:
    """Bytes that a pass without gradient needs besides the weights."""
    network.eval()
    with torch.no_grad(), _besides(network) as allocations:
        before = allocations.alive
        allocations.restart()
        once()
    return max(allocations.peak - before, 0)


def history(network: nn.Module, once: Callable[[], Tensor]) -> float:
    """Bytes that a forward pass keeps for its backward pass, besides the weights."""
    with _besides(network) as allocations:
        before = allocations.alive
        loss = once()
        # what the backward pass will need is alive until the loss goes
        kept = allocations.alive - before
    del loss
    return kept


def _besides(network: nn.Module) -> Allocations:
    """A count that ignores the weights and views of them, such as transposes."""
    allocations = Allocations()
    allocations.hold(*network.parameters(), *network.buffers())
    return allocations


def described(config: Any, footprint: Callable[[Any], Plan], memory_gb: float, gpus: int) -> list[str]:
    """The plan of a run as lines of text, with changes that make it fit if it does not.

    Raises:
        UserError: the memory is not above 0.
    """
    if not memory_gb > 0:
        raise UserError(f"--gpu-memory is {memory_gb:g}; must be above 0")
    try:
        plan = footprint(config)
    except NoPlan as error:
        return [f"memory: {error}"]
    lines = [
        f"{gpus} GPU{'s' if gpus > 1 else ''}, computed for {', '.join(plan.assumed)}",
        *shown(plan, memory_gb, gpus),
    ]
    return lines if plan.fits(memory_gb, gpus) else lines + remedies(config, footprint, memory_gb, gpus)


def check_state(config: Any, footprint: Callable[..., Plan], memory_gb: float, gpus: int) -> None:
    """Refuse a run whose weights, gradients, moments and copies alone are larger than a GPU; raises UserError."""
    try:
        with torch.random.fork_rng(devices=[]):  # the run draws what it would draw without a plan
            plan = footprint(config, passes=False)
    except Exception as error:  # there is no plan, or the run itself says better what is wrong
        LOGGER.debug("the memory of the run is not checked: %s", error)
        return
    # without headroom: only a run that cannot fit at all is refused
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


def remedies(config: Any, footprint: Callable[[Any], Plan], memory_gb: float, gpus: int) -> list[str]:
    """Changes, each on top of those before, until the run fits; with their peaks."""
    lines = ["changes, each with those before, and the peak:"]
    for key, value in CHANGES:
        changed = _changed(config, key, value)
        # an option that the recipe does not have, or that is set already
        if changed is None:
            continue
        # one GPU has nothing to divide
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
    # None: nothing would change
    new = (None if old == value else value) if not rest else _changed(old, rest, value)
    return None if new is None else dataclasses.replace(config, **{name: new})  # type: ignore[type-var]


def autocast(trainer: Any) -> torch.autocast:
    """The arithmetic of a run, for tensors without numbers."""
    low = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(trainer.mixed_precision)
    # enabled=False for float32, so that the context can be entered in any case
    return torch.autocast("cpu", dtype=low or torch.bfloat16, enabled=low is not None)


class Allocations(TorchDispatchMode):
    """Counts the storages that are made inside the context.

    with Allocations() as allocations:
        loss.backward()
    allocations.peak
    """

    def __init__(self) -> None:
        super().__init__()
        self.alive = 0
        """Bytes now."""
        self.peak = 0
        """Most bytes so far."""
        self._seen: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()

    def hold(self, *tensors: Tensor) -> None:
        """Count tensors that were there before."""
        for tensor in tensors:
            self._add(tensor)

    def restart(self) -> None:
        """Reset the peak from here on."""
        self.peak = self.alive

    def __enter__(self) -> Self:
        return super().__enter__()  # type: ignore[no-any-return]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default and isinstance(args[0], FakeTensor):
            return args[0].fake_device  # asked for so often that the way through the mode takes most of the time
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self._add(leaf)
        return out

    def _add(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        # views share their storage, and count once
        if storage in self._seen:
            return
        size = storage.nbytes()
        self._seen[storage] = size
        # atexit=False: a count at the end of the program would be of no use
        weakref.finalize(storage, self._free, size).atexit = False
        self.alive += size
        self.peak = max(self.peak, self.alive)

    def _free(self, size: int) -> None:
        # called when the storage is freed, so `alive` follows Python's references
        self.alive -= size


@contextlib.contextmanager
def imagined(module: nn.Module) -> Iterator[None]:
    """Have tensors of shapes without numbers made inside, and attention that keeps what a fused kernel keeps.

    Weights of the module on the meta device move to the CPU, still without numbers.
    """

    def attention(query: Tensor, key: Tensor, value: Tensor, *_: Any, **options: Any) -> Any:
        # a fused kernel keeps no matrix of weights, which the plain form would
        return _Fused.apply(query, key, value)

    with FakeTensorMode(allow_non_fake_inputs=True), mock.patch(ATTENTION, attention):
        _imagine(module)
        yield


def _imagine(module: nn.Module) -> None:
    known: dict[int, Any] = {}
    for part in module.modules():
        for table in (part._parameters, part._buffers):
            for name, old in table.items():
                if old is None or not old.is_meta:
                    continue
                # tied weights stay tied
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
        ctx.save_for_backward(q, k, v, out, q.new_empty(q.shape[:-1], dtype=torch.float32))
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch.empty_like(x) for x in ctx.saved_tensors[:3])
