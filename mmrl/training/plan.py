"""Memory that a run needs on this machine or on each GPU, before it starts: `mmrl train CONFIG --dry-run`.

Tensors can have shapes and no numbers, so a model of any size can be run forward and backward to see what it keeps. A
domain gives the facts of a run, `Facts`: its network, a pass over the rows of an update and a call that samples.
`planned` runs them and adds up what they hold. What follows from no fact is not estimated: a plan then has what is
certain, such as weights and moments, and says what it lacks.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Self
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mmrl.errors import NoPlan, UserError
from mmrl.workers.memory import machine_bytes

LOGGER = logging.getLogger("mmrl")
GB = 1e9
BUFFERS = 0.04
"""Resident memory of a run on a CPU in addition to tensors and libraries, as a fraction of the tensors: buffers of
matrix products and gaps of the allocator."""
HEADROOM = 0.92
"""Fraction of a GPU's memory available for tensors; CUDA, its libraries and gaps between blocks take the rest."""


@dataclass(frozen=True)
class Part:
    """Tensors that serve one purpose."""

    name: str
    bytes: float
    during: str = "always"
    """always, sampling, update, or start (before the others exist)."""
    divided: bool = False
    """Whether they are divided over the GPUs, by `trainer.sharding=fsdp2` or as rows of the step."""

    def on(self, gpus: int) -> float:
        """Bytes per GPU for a number of GPUs."""
        # rows and sharded weights are divided; the rest is on every GPU
        return self.bytes / gpus if self.divided else self.bytes


@dataclass(frozen=True)
class Plan:
    """Parts of a run, and what they were computed for."""

    parts: tuple[Part, ...]
    assumed: tuple[str, ...]
    unknown: tuple[str, ...] = ()
    """Unknown quantities on which the memory also depends; the parts then only include what is certain."""
    tried_on_cpu: bool = False
    """See `Facts`."""

    def held(self, phase: str, gpus: int = 1) -> float:
        """Bytes per GPU of the parts of a phase."""
        return sum(part.on(gpus) for part in self.parts if part.during == phase)

    def peak(self, gpus: int = 1) -> float:
        """Peak number of bytes per GPU."""
        # sampling and update follow each other; what one holds is free in the other
        phases = max(self.held("sampling", gpus), self.held("update", gpus))
        return max(self.held("always", gpus) + phases, self.held("start", gpus))

    def fits(self, memory_gb: float, gpus: int = 1) -> bool:
        """Whether the peak leaves room for memory other than tensors."""
        # CUDA, its libraries and gaps between blocks take the rest
        return self.peak(gpus) <= HEADROOM * memory_gb * GB


class Sizes(NamedTuple):
    """Maximum number of rows."""

    step: int
    """Rows in a step of all processes."""
    minibatch: int
    """Rows in an optimiser step."""
    chunk: int
    """Rows in a forward and backward pass."""

    @property
    def passes(self) -> int:
        """Number of forward and backward passes in an optimiser step."""
        return -(-self.minibatch // self.chunk)


@dataclass(frozen=True)
class Facts:
    """What a domain knows about a run: its networks and the calls a step makes to them."""

    network: nn.Module
    """The trained network, with `requires_grad` on what is trained; its weights are on the meta device unless small."""
    learn: Callable[[], Tensor]
    """Creates the input of a forward pass of the update and returns its scalar loss."""
    assumed: tuple[str, ...]
    """Assumptions about the input of the calls."""
    unknown: tuple[str, ...] = ()
    """Unknown quantities on which the calls depend; if there are any, the calls are not made."""
    tried_on_cpu: bool = False
    """Whether plans have been compared with the memory of processes that run such models on a CPU."""
    passes: int = 1
    """Forward and backward passes of an optimiser step; during the second one, gradients of the first exist."""
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
    """Memory held between passes in addition to weights, gradients, moments and copies."""
    inputs: Sequence[Part] = ()
    """What the calls read, write and keep in addition to activations."""


def planned(facts: Facts, trainer: Any, *, passes: bool) -> Plan:
    """Run the calls of a step and add up their memory; without passes, only the memory held between them."""
    parts = [*state_parts(facts.network, trainer, copies=facts.copies), *facts.held]
    if passes and not facts.unknown:
        parts += facts.inputs
        networks = nn.ModuleList([facts.network, *facts.frozen])
        outlined = any(weight.is_meta for weight in networks.parameters())
        try:
            with imagined(networks) if outlined else contextlib.nullcontext():
                parts += _measured(facts, networks, trainer)
        except (RuntimeError, NotImplementedError) as error:
            if not outlined:
                raise
            # torch cannot run some kernels without numbers, such as those of experts in float32
            lines = str(error).splitlines() or [type(error).__name__]
            facts = dataclasses.replace(facts, unknown=(f"activations, which only a run can tell ({lines[0]})",))
    complete = passes and not facts.unknown
    found = tuple(part for part in parts if part.bytes)
    return Plan(found, facts.assumed if complete else (), facts.unknown, facts.tried_on_cpu)


def _measured(facts: Facts, networks: nn.Module, trainer: Any) -> Iterator[Part]:
    """Memory that the calls need; autocast keeps its copies of weights until an update ends, as in a run."""
    with autocast(trainer):
        yield Part("activations", activations(facts.network, facts.learn, facts.passes), "update")
    if facts.keep is not None:
        # until the end of the update, whose last pass goes back through it
        yield Part("history of the prompts, for the update", history(facts.network, facts.keep))
    if facts.act is not None:
        yield Part(facts.acting, forward(networks, facts.act), "sampling")


def certain(footprint: Callable[..., Plan], config: Any) -> Plan:
    """Memory held between passes, for a run whose data have not been read."""
    return dataclasses.replace(footprint(config, passes=False), unknown=("data that have not been read",))


def state_parts(network: nn.Module, trainer: Any, *, copies: int = 0) -> list[Part]:
    """Weights, gradients and moments of a network, and full or trained-only copies of it.

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
        parts.append(Part("weights, trained, sharded", trained, divided=True))
        parts.append(Part("gradients, sums, sharded", trained, "update", divided=True))
    parts += [
        Part("weights, trained" + (", gathered in bf16" if low else ""), 2 * numbers if low else trained),
        Part("moments of AdamW", 2 * trained, divided=sharded),
        Part("gradients", trained, "update"),  # those of bfloat16 weights add up in float32
        Part("reference", copies * (trained + frozen), divided=sharded),
    ]
    return [part for part in parts if part.bytes]


def batch_sizes(trainer: Any, group: int) -> Sizes:
    """Rows of a step, an optimiser step and a pass, given how `Rollouts.micro_batches` splits groups of equal size."""
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
    """Bytes that forward and backward passes of a micro-batch need in addition to weights and gradients.

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
    """Bytes that a pass without gradient needs in addition to the weights."""
    network.eval()
    with torch.no_grad(), _besides(network) as allocations:
        before = allocations.alive
        allocations.restart()
        once()
    return max(allocations.peak - before, 0)


def history(network: nn.Module, once: Callable[[], Tensor]) -> float:
    """Bytes that a forward pass keeps for its backward pass, in addition to the weights."""
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


@dataclass(frozen=True)
class Machine:
    """Hardware on which a run will be executed."""

    name: str
    memory_gb: float
    """Memory of each GPU, or of the machine within the limits of its container."""
    gpus: int = 1
    """Number of GPUs; 1 for a run on the CPU."""
    is_cpu: bool = False


def machine_of(gpu_memory_gb: float | None, processes: int) -> Machine:
    """The machine of a run: GPUs of the memory that is given, else this one's GPU, else its CPU.

    Raises:
        UserError: the memory is not above 0.
    """
    if gpu_memory_gb is not None and not gpu_memory_gb > 0:
        raise UserError(f"--gpu-memory is {gpu_memory_gb:g}; must be above 0")
    several = f"{processes} GPU{'s' if processes > 1 else ''}"
    if gpu_memory_gb is not None:
        return Machine(several, gpu_memory_gb, processes)
    if torch.cuda.is_available():
        found = torch.cuda.get_device_properties(0)
        return Machine(f"{several} like this {found.name}", found.total_memory / GB, processes)
    return Machine("this machine's CPU", (machine_bytes() or math.inf) / GB, 1, is_cpu=True)


def on_machine(plan: Plan, machine: Machine) -> Plan:
    """A plan including the memory of a CPU process other than tensors, as far as it has been measured."""
    if not machine.is_cpu or plan.unknown:
        return plan
    if not plan.tried_on_cpu:
        return dataclasses.replace(plan, unknown=("libraries and buffers of a process on a CPU", "activations"))
    # the libraries are those of this process, which has read the data and outlined the model as the run does
    libraries = Part("libraries, data and tokenizer", resident_bytes())
    largest = max(plan.held("sampling"), plan.held("update"))
    buffers = Part("buffers of the libraries, gaps between tensors", BUFFERS * (plan.held("always") + largest))
    return dataclasses.replace(plan, parts=(*plan.parts, libraries, buffers))


def described(config: Any, footprint: Callable[[Any], Plan], machine: Machine, processes: int = 1) -> list[str]:
    """The plan of a run as lines of text, with changes that make it fit if necessary."""
    if machine.is_cpu and processes > 1:
        return ["memory: no estimate for several processes on a CPU; use --gpu-memory GB to plan for GPUs"]

    def plan_of(config: Any) -> Plan:
        return on_machine(footprint(config), machine)

    try:
        plan = plan_of(config)
    except NoPlan as error:
        return [f"memory: {error}"]
    about = f", computed for {', '.join(plan.assumed)}" if plan.assumed else ""
    lines = [f"{machine.name}{about}", *shown(plan, machine)]
    fits = plan.fits(machine.memory_gb, machine.gpus)
    return lines if fits or plan.unknown else lines + remedies(config, plan_of, machine.memory_gb, machine.gpus)


def check_state(config: Any, footprint: Callable[..., Plan], memory_gb: float, gpus: int) -> None:
    """Raise UserError if weights, gradients, moments and copies alone are larger than a GPU."""
    try:
        with torch.random.fork_rng(devices=[]):  # the run draws what it would draw without a plan
            plan = footprint(config, passes=False)
    except Exception as error:  # there is no plan, or the run itself says better what is wrong
        LOGGER.debug("the memory of the run was not checked: %s", error)
        return
    # without headroom: only a run that cannot fit at all is refused
    if plan.peak(gpus) > memory_gb * GB:
        state = dataclasses.replace(plan, unknown=("activations",))
        lines = [*shown(state, Machine("", memory_gb, gpus)), *remedies(config, footprint, memory_gb, gpus)]
        raise UserError("\n".join(["the run does not fit on the GPU, even without activations:", *lines]))


def shown(plan: Plan, machine: Machine) -> list[str]:
    """The parts as lines of text, and whether they fit; without a peak if something is unknown."""
    memory_gb, gpus = machine.memory_gb, machine.gpus
    width = max([len(part.name) for part in plan.parts], default=0)
    lines = [
        f"  {part.name:<{width}}  {part.on(gpus) / GB:8.2f} GB"
        + ("" if part.during == "always" else f"  {part.during}")
        for part in plan.parts
    ]
    peak, fits = plan.peak(gpus) / GB, plan.fits(memory_gb, gpus)
    if plan.unknown:
        short = "" if fits else f"; even the known parts do not fit into {memory_gb:.4g} GB"
        return [*lines, f"  no estimate of the peak, because it also depends on {' and '.join(plan.unknown)}{short}"]
    verdict = "fits into" if fits else "does not fit into"
    return [*lines, f"  {'peak':<{width}}  {peak:8.2f} GB  {verdict} {memory_gb:.4g} GB"]


def resident_bytes() -> float:
    """Current memory of this process."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError) as error:
        raise NoPlan(
            "no estimate for the CPU of this system, because the memory of a process cannot be read"
        ) from error


def remedies(config: Any, footprint: Callable[[Any], Plan], memory_gb: float, gpus: int) -> list[str]:
    """Changes, each added to the previous ones, until the run fits; with their peaks."""
    lines = ["cumulative changes and the resulting peak:"]
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
        peak = "no estimate" if plan.unknown else f"{plan.peak(gpus) / GB:.2f} GB"
        lines.append(f"  {key}={str(value).lower()}: {peak}")
        if not plan.unknown and plan.fits(memory_gb, gpus):
            return lines
    return [*lines, "  none of these are sufficient"]


CHANGES: Sequence[tuple[str, Any]] = (
    ("trainer.micro_batch", 1),
    ("model.gradient_checkpointing", True),
    ("trainer.mixed_precision", "bf16"),
    ("model.free_text_encoders", True),
    ("trainer.sharding", "fsdp2"),
    ("model.lora.enabled", True),
    ("model.dtype", "bfloat16"),
)
"""Changes that save memory, cheapest first."""


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
    """The arithmetic of a run, for tensors without data."""
    low = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(trainer.mixed_precision)
    # enabled=False for float32, so that the context can be entered in any case
    return torch.autocast("cpu", dtype=low or torch.bfloat16, enabled=low is not None)


class Allocations(TorchDispatchMode):
    """Counts the storages created inside the context.

    with Allocations() as allocations:
        loss.backward()
    allocations.peak
    """

    def __init__(self) -> None:
        super().__init__()
        self.alive = 0
        """Current number of bytes."""
        self.peak = 0
        """Peak number of bytes so far."""
        self._seen: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()

    def hold(self, *tensors: Tensor) -> None:
        """Count tensors that existed before."""
        for tensor in tensors:
            self._add(tensor)

    def restart(self) -> None:
        """Reset the peak to the current number of bytes."""
        self.peak = self.alive

    def __enter__(self) -> Self:
        return super().__enter__()

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
    """Context in which tensors have shapes but no data, and attention keeps what a fused kernel keeps.

    Weights of the module on the meta device move to the CPU, still without numbers.
    """

    def attention(query: Tensor, key: Tensor, value: Tensor, *_: Any, **options: Any) -> Any:
        # a fused kernel keeps no matrix of weights, which the plain form would
        return _Fused.apply(query, key, value)

    quiet = mock.patch.object(logging.getLogger(FakeTensorMode.__module__), "disabled", True)
    with FakeTensorMode(allow_non_fake_inputs=True), mock.patch(ATTENTION, attention), quiet:
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
