"""Processes of a run: the accelerator, sums over ranks, random streams, and memory that is returned to the system.

`HeapTrimmer` is for CPUs, where the tensors of a step differ in size from step to step: freed blocks between live ones
stay with the process, a larger tensor fits into none of them, and the process grows although no more tensors are alive.
glibc returns whole free pages on request. oneDNN compiles a kernel for every shape of a convolution and keeps the last
1024, some 50 KB each; batches of changing sizes fill that cache and seldom return to a shape.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import importlib
import importlib.metadata
import logging
import os
import random
import signal
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol, TypeVar, runtime_checkable

import numpy as np
import torch
from accelerate import Accelerator, PartialState
from accelerate.state import AcceleratorState, is_initialized
from accelerate.utils import GradientAccumulationPlugin, InitProcessGroupKwargs, gather_object
from torch import Tensor, nn

from mmrl.core.loss import Metric
from mmrl.core.payload import to_device
from mmrl.core.rollouts import PLACE, Rollouts
from mmrl.errors import UserError
from mmrl.workers.row_pool import FailureLog

LOGGER = logging.getLogger("mmrl")
PACKAGES = ("mmrl-suite", "torch", "numpy", "transformers", "diffusers", "mujoco")
"""Packages that affect what a run computes; rollout workers must have the same versions."""
LIMIT = "ONEDNN_MAX_CPU_ISA"
PROBE = "import torch; x = torch.ones(64, 64, dtype=torch.bfloat16); torch.nn.functional.linear(x, x)"
GROWTH = 1.25
SLACK = 64 << 20
"""In bytes. A process is trimmed if it exceeds GROWTH times its size after the last trim, plus SLACK."""
CACHE_CAPACITY = "ONEDNN_PRIMITIVE_CACHE_CAPACITY"
PRIMITIVES = 256
"""Number of kernels that oneDNN caches: more than a step of a large model needs, and a quarter of its default."""
BUCKET_ELEMENTS = 2**24
"""Number of gradient entries in one message between processes."""
ItemT = TypeVar("ItemT")


def make_accelerator(mixed_precision: str = "none", timeout_minutes: float = 240.0) -> Accelerator:
    """Create the process group and pick the device, for `accelerate launch` or plain `python`."""
    # before torch multiplies anything: oneDNN reads the limit once
    if mixed_precision != "none":
        avoid_refused_instructions()
    patience = InitProcessGroupKwargs(timeout=timedelta(minutes=timeout_minutes))
    world = int(os.environ.get("WORLD_SIZE", "1"))
    precision = "no" if mixed_precision == "none" else mixed_precision
    # accelerate keeps one state a process; a second run in a notebook may ask for another precision
    if world == 1 and is_initialized() and AcceleratorState().mixed_precision != precision:
        AcceleratorState._reset_state()  # of an earlier run in this process, which accelerate keeps
    accelerator = Accelerator(
        mixed_precision=precision,
        # both given, or accelerate would take them from its environment variables: it divides losses by the first
        gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=1),
        dynamo_backend="no",
        cpu=world > 1 and not torch.accelerator.is_available(),  # else each process would run alone, in one folder
        kwargs_handlers=[patience],
    )
    if mixed_precision == "fp16":  # on a CPU accelerate would stay in float32; the update scales losses itself
        accelerator.native_amp = True
        accelerator.scaler = None
    # a launcher may have started more processes than accelerate has found, which would then train apart
    if accelerator.num_processes != world:
        raise UserError(f"WORLD_SIZE is {world}, but accelerate counts {accelerator.num_processes} processes")
    return accelerator


def process_device() -> torch.device:
    """Device of this process: that of its accelerator once there is one, else the CPU."""
    # before an accelerator exists, such as in a listing, nothing is on a GPU
    return AcceleratorState().device if is_initialized() else torch.device("cpu")


def machine(accelerator: Accelerator) -> dict[str, Any]:
    """Number of processes of the run, device of this process, and the machine's name, for the log and result.json."""
    device = accelerator.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return {"processes": accelerator.num_processes, "device": name, "host": socket.gethostname()}


def versions() -> dict[str, str]:
    """Versions of the installed packages that affect what a process computes."""
    return dict(_versions())


@functools.cache
def _versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def leave(code: int = 0) -> None:
    """Exit immediately if this is one of several processes, else do nothing; call it when all work is on disk.

    With gloo a communication thread may outlive the interpreter, whose teardown then aborts about one run in ten
    ("terminate called without an active exception", torch 2.13), after everything has succeeded.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        # os._exit flushes nothing
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


@functools.cache
def avoid_refused_instructions() -> None:
    """Prevent low-precision arithmetic on the CPU from crashing the process.

    Some virtual machines announce AMX instructions and then refuse them. Whether this is one of them is tried in a
    separate process, before the first product here; if so, oneDNN is set up to do without. A limit that the user has
    set stays, and machines without AMX or with a GPU are left alone.
    """
    # a limit of the user wins
    if LIMIT in os.environ or torch.cuda.is_available() or not _announces_amx():
        return
    probe = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, check=False)
    if probe.returncode == -signal.SIGILL:
        os.environ[LIMIT] = "AVX512_CORE_BF16"
        LOGGER.warning(
            "this machine announces AMX instructions but does not execute them; using %s=%s", LIMIT, os.environ[LIMIT]
        )


def _announces_amx() -> bool:
    file = Path("/proc/cpuinfo")
    return file.is_file() and "amx_bf16" in file.read_text(encoding="utf-8", errors="replace")


def shard(items: Sequence[ItemT], accelerator: Accelerator) -> list[ItemT]:
    """This process's fraction of `items`: every world-size-th one, starting at its rank."""
    # strided and not in blocks, so that any number of tasks is spread evenly
    return list(items[accelerator.process_index :: accelerator.num_processes])


def check_shares(name: str, count: int) -> None:
    """Raise UserError for a count that cannot be divided evenly among the processes of the run."""
    # asked of torch, so that callers need no accelerator
    processes = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    if count % processes:
        raise UserError(f"{name} is {count}; with {processes} processes it must be a multiple of {processes}")


def sum_over_processes(values: Mapping[str, float]) -> dict[str, float]:
    """Sum numbers over all processes by name; all processes must call it, and names may differ."""
    total: Counter[str] = Counter()
    # Counter.update adds, where a plain dictionary would replace
    for part in from_all(dict(values)):
        total.update(part)
    return dict(total)


def all_ranks(flag: bool, accelerator: Accelerator) -> bool:
    """Whether `flag` is true in every process."""
    if accelerator.num_processes == 1:
        return flag
    # a tensor, because gather of objects would pickle one bit
    votes = accelerator.gather(torch.tensor([int(flag)], device=accelerator.device))
    return bool(votes.all())


def from_all(mine: ItemT) -> list[ItemT]:
    """Gather a value from every process, in rank order; all processes must call it."""
    return [mine] if PartialState().num_processes == 1 else list(gather_object([mine]))


def merge_lists(items: list[ItemT], accelerator: Accelerator) -> list[ItemT]:
    """Concatenate picklable lists of all processes, in rank order, on every process."""
    if accelerator.num_processes == 1:
        return items
    return list(gather_object(items))


def share_weights(module: nn.Module, accelerator: Accelerator) -> None:
    """Copy the weights of the first process to all processes."""
    if accelerator.num_processes > 1:
        for tensor in (*module.parameters(), *module.buffers()):
            # integer buffers such as position ids follow from the configuration
            if tensor.is_floating_point():
                torch.distributed.broadcast(tensor.data, 0)


def merge_in_order(items: Sequence[tuple[Any, ItemT]]) -> list[ItemT]:
    """Join the items of all processes in the order of their keys, which must be unique."""
    # in the order of one process: float sums over them must not depend on who has which item
    found = list(items) if PartialState().num_processes == 1 else gather_object(list(items))
    return [item for _, item in sorted(found, key=lambda entry: entry[0])]


def sum_gradients(parameters: Sequence[nn.Parameter], accelerator: Accelerator) -> None:
    """Replace each gradient by its sum over all processes; losses are divided by counts over all processes."""
    if accelerator.num_processes == 1:
        return
    # a weight that only one process has used still has to be summed by all
    used = torch.tensor([int(parameter.grad is not None) for parameter in parameters], device=accelerator.device)
    torch.distributed.all_reduce(used, torch.distributed.ReduceOp.MAX)
    gradients = []
    # a process without that weight's gradient adds zeros, or the collective calls would not match
    for parameter, anywhere in zip(parameters, used.tolist(), strict=True):
        if anywhere:
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            gradients.append(parameter.grad)
    for bucket in _buckets(gradients):
        # one message for many small gradients: the latency of a message is far above the time for a bias
        flat = torch.cat([gradient.flatten() for gradient in bucket])
        torch.distributed.all_reduce(flat)
        for gradient, total in zip(bucket, flat.split([gradient.numel() for gradient in bucket]), strict=True):
            gradient.copy_(total.view_as(gradient))


def _buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Neighbours of one type, about `BUCKET_ELEMENTS` at a time: few messages, and little memory for the copy."""
    bucket: list[Tensor] = []
    for tensor in tensors:
        full = sum(other.numel() for other in bucket) + tensor.numel() > BUCKET_ELEMENTS
        # one dtype a bucket, since torch.cat would convert
        if bucket and (full or tensor.dtype != bucket[0].dtype):
            yield bucket
            bucket = []
        bucket.append(tensor)
    if bucket:
        yield bucket


def deal(
    sizes: Sequence[int],
    parts: int,
    generator: torch.Generator,
    accelerator: Accelerator,
    places: Sequence[int] | None = None,
) -> list[Tensor]:
    """Split the items of all processes into parts, in the random order that a single process would use.

    Args:
        sizes: Items of each of this process's tasks.
        parts: Wanted number of parts; fewer come back if there are fewer items.
        generator: CPU generator, the same on every process.
        accelerator: The processes.
        places: Rising places of these tasks among those of all processes; by default every world-size-th one, as in
            `shard`.

    Returns:
        Indices of this process's items in each part; an empty tensor where it has none.
    """
    rank, world = accelerator.process_index, accelerator.num_processes
    # places of `shard`, if none have been recorded
    own = range(rank, rank + world * len(sizes), world) if places is None else places
    everywhere = merge_lists([(place, rank, size) for place, size in zip(own, sizes, strict=True)], accelerator)
    numbers: list[int] = []
    total = 0
    # in the order of places, which is that of a single process
    for _, process, size in sorted(everywhere):
        numbers += range(total, total + size) if process == rank else ()
        total += size
    # -1: an item of another process
    index = torch.full((total,), -1)
    index[torch.tensor(numbers, dtype=torch.int64)] = torch.arange(len(numbers))
    # the same permutation on every process; each keeps its own items of every part
    shuffled = index[torch.randperm(total, generator=generator)]
    return [part[part >= 0] for part in shuffled.tensor_split(max(min(parts, total), 1))]


def global_advantages(
    estimate: Callable[[Rollouts], Rollouts], rollouts: Rollouts, accelerator: Accelerator
) -> Rollouts:
    """Run an advantage estimator over the rows of all processes and keep this process's part, with mask and `extras`.

    Only rewards, masks and per-decision numbers are sent; prompts and images stay with their process.
    """
    if accelerator.num_processes == 1:
        return estimate(rollouts)
    # without prompts and images, which are large, and on the CPU, where every process can read it
    parts = merge_lists([rollouts.replace(payload=None).to("cpu")], accelerator)
    joined = estimate(Rollouts.concat(parts))
    # the position of this process's rows among all of them
    start = sum(part.num_rows for part in parts[: accelerator.process_index])
    rows = torch.arange(start, start + rollouts.num_rows)
    mine = joined.select(rows)
    # concat has padded all rows to the longest of any process
    length = rollouts.mask.shape[1]
    thinned = not torch.equal(mine.host.mask[:, :length], rollouts.host.mask)
    return rollouts.replace(
        **({"mask": _cut(mine.mask, length, accelerator)} if thinned else {}),
        advantage=_cut(mine.advantage, length, accelerator),
        returns=_cut(mine.returns, length, accelerator),
        extras={name: _cut(values, length, accelerator) for name, values in mine.extras.items()},
    )


def _cut(values: Any, length: int, accelerator: Accelerator) -> Any:
    """Decisions (B, T) of this process's width, or numbers (B,), on its device."""
    # (B,) values have no decisions to cut
    return None if values is None else (values[:, :length] if values.dim() > 1 else values).to(accelerator.device)


def stream_seed(seed: int, *purpose: int | str) -> int:
    """Derive a 63-bit seed for one purpose from the run's seed."""
    # a hash, so that streams of neighbouring steps and purposes are unrelated
    text = "/".join(str(part) for part in (seed, *purpose))
    # non-negative and below 2^63, which is what torch's generators take
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def make_generator(seed: int, *purpose: int | str) -> torch.Generator:
    """CPU generator of one named stream; see `stream_seed`."""
    return torch.Generator().manual_seed(stream_seed(seed, *purpose))


@dataclass(frozen=True)
class Streams:
    """Random streams of the tasks of a step, each determined by a seed and the task's position in the step.

    A task therefore draws the same numbers in any process and together with any other tasks.
    """

    seed: int
    """Seed of the run, the step and the attempt, from `stream_seed`."""
    places: Sequence[int] = range(2**31)
    """Position in the step of each task; by default, the tasks are the first ones."""
    draw: int = 0
    """Number of the draw of tasks within the step."""

    def of(self, task: int, *purpose: int | str) -> torch.Generator:
        """The generator of one task."""
        # by the place in the step and not by the position in `tasks`, which depends on the number of processes
        return make_generator(self.seed, *purpose, "task", self.places[task])

    def shared(self, *purpose: int | str) -> torch.Generator:
        """The generator of the whole step, the same for every task."""
        return make_generator(self.seed, *purpose, "step")

    def stack(self, tasks: int, draw: Callable[[torch.Generator], Tensor], *purpose: int | str) -> Tensor:
        """The draws of each of the first tasks, concatenated along the first dimension."""
        # one generator a task: a single one would make draws depend on the tasks before
        return torch.cat([draw(self.of(task, *purpose)) for task in range(tasks)])

    def uniform(self, tasks: int, *size: int, purpose: str = "") -> Tensor:
        """Draws in [0, 1) of each of the first tasks, (tasks * size[0], ...) float32."""
        return self.stack(tasks, lambda generator: torch.rand(size, generator=generator), purpose)

    def seeds(self, tasks: int, *size: int, purpose: str = "") -> Tensor:
        """Seeds for additional draws of each of the first tasks, (tasks * size[0], ...) int64."""
        return self.stack(tasks, lambda generator: torch.randint(2**62, size, generator=generator), purpose)

    def select(self, tasks: Sequence[int]) -> Streams:
        """The streams of some of the tasks."""
        return Streams(self.seed, [self.places[task] for task in tasks], self.draw)

    def of_groups(self, rollouts: Rollouts) -> Streams:
        """The streams of the tasks of groups that record their positions; see `noted`."""
        places = rollouts.places
        assert places is not None
        return Streams(self.seed, places, self.draw)

    def noted(self, rollouts: Rollouts) -> Rollouts:
        """Rollouts of these tasks, one group each, with the tasks' positions recorded."""
        # the rows of a group share its task
        places = torch.tensor(self.places[: rollouts.num_groups])[rollouts.host.group]
        return rollouts.replace(extras=rollouts.extras | {PLACE: to_device(places, rollouts.mask.device)})

    def among(self, tasks: Sequence[object], kept: Sequence[object]) -> Streams:
        """The streams of the tasks that were kept, in their order."""
        # by identity: equal tasks may be drawn twice; one iterator, so `kept` has to be in the order of `tasks`
        numbered = enumerate(tasks)
        return self.select([next(number for number, task in numbered if task is one) for one in kept])


def seed_everything(seed: int) -> None:
    """Seed the global generators of Python, NumPy and torch (initialisation, dropout)."""
    importlib.import_module("rich.style")  # draws from Python's when first imported, in a resumed run once more
    random.seed(stream_seed(seed, "python"))
    # NumPy's global seed has 32 bits
    np.random.seed(stream_seed(seed, "numpy") % 2**32)
    torch.manual_seed(stream_seed(seed, "torch"))


def capture_global_rng() -> dict[str, Any]:
    """State of the global generators in types that `torch.load(weights_only=True)` accepts."""
    algorithm, keys, position, has_gauss, gauss = np.random.get_state()
    version, internal, gauss_next = random.getstate()
    # NumPy's state is an array, which weights_only loading refuses; a tensor of the numbers is fine
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "numpy": [algorithm, torch.from_numpy(np.asarray(keys).astype(np.int64)), position, has_gauss, gauss],
        "python": [version, list(internal), gauss_next],
    }
    if torch.cuda.is_available():
        # of this process's device only: the others belong to other processes
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def restore_global_rng(state: dict[str, Any]) -> None:
    """Restore the state that `capture_global_rng` returned."""
    torch.set_rng_state(state["torch"])
    algorithm, keys, position, has_gauss, gauss = state["numpy"]
    np.random.set_state((algorithm, _as_uint32(keys), position, has_gauss, gauss))
    version, internal, gauss_next = state["python"]
    random.setstate((version, tuple(internal), gauss_next))
    if "cuda" in state and torch.cuda.is_available():
        kept = state["cuda"]
        if not isinstance(kept, Tensor):  # older checkpoints hold a state for each device
            kept = kept[min(torch.cuda.current_device(), len(kept) - 1)]
        torch.cuda.set_rng_state(kept)


def _as_uint32(keys: Tensor) -> np.ndarray:
    return keys.numpy().astype(np.uint32)


class HeapTrimmer:
    """Returns free heap pages to the system when the process has grown; has no effect without glibc."""

    def __init__(self, *, enabled: bool = True) -> None:
        # looked up once: trim() is called several times a step
        self._trim = _malloc_trim() if enabled else None
        self._left = 0.0

    def trim(self) -> bool:
        """Trim if the process has grown by more than a quarter since the last trim; returns whether it trimmed.

        Source: glibc, malloc_trim(3).
        """
        # trimming walks the whole heap, so it waits until the process has grown by more than noise
        if self._trim is None or _resident_bytes() <= GROWTH * self._left + SLACK:
            return False
        self._trim(0)
        self._left = _resident_bytes()
        return True


def limit_primitive_cache() -> None:
    """Make oneDNN cache fewer kernels; has no effect after its first computation, or if the user set a number.

    Source: oneDNN developer guide, "Primitive Cache".
    """
    if "DNNL_PRIMITIVE_CACHE_CAPACITY" not in os.environ:  # its older name
        os.environ.setdefault(CACHE_CAPACITY, str(PRIMITIVES))


def _resident_bytes() -> int:
    """Memory of this process that is in RAM, as Linux counts it."""
    # the second field counts resident pages
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")


@functools.cache
def _malloc_trim() -> Callable[[int], int] | None:
    if sys.platform != "linux" or not Path("/proc/self/statm").is_file():
        return None
    function = getattr(ctypes.CDLL(None), "malloc_trim", None)  # musl has none
    if function is not None:
        function.argtypes = [ctypes.c_size_t]
        function.restype = ctypes.c_int
    return function


class Counted(Protocol):
    """Environments that count their failures."""

    @property
    def counts(self) -> Mapping[str, int]:
        """Failures since the environments were created, by kind."""
        ...


@runtime_checkable
class InProcesses(Protocol):
    """Environments in separate processes."""

    failures: FailureLog
    """Failures with their tracebacks."""

    def memory_mb(self) -> float:
        """Memory of the largest process including its children, in 10^6 bytes."""
        ...


class SimCounts(Mapping[str, int]):
    """Counts that survive an interruption; environments themselves count from their start."""

    def __init__(self, sim: Counted, run_dir: Path) -> None:
        self._sim = sim
        self._elsewhere: Counter[str] = Counter()
        self._before: dict[str, int] = {}
        # a worker's traceback goes to the run it happened in
        if isinstance(sim, InProcesses):
            sim.failures.folder = run_dir / "failures"

    def update(self, counts: Mapping[str, int]) -> None:
        """Add the counts of environments in rollout workers and other processes."""
        self._elsewhere.update(counts)

    def __getitem__(self, name: str) -> int:
        # environments here, and what workers and other processes have reported
        return int(self._sim.counts[name]) + self._elsewhere[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._sim.counts)

    def __len__(self) -> int:
        return len(self._sim.counts)

    def metrics(self) -> dict[str, float | Metric]:
        """Totals, and the memory of the largest worker."""
        found: dict[str, float | Metric] = {f"sim/{name}": float(n) for name, n in self.state_dict().items()}
        if isinstance(self._sim, InProcesses):
            found["memory/worker_mb"] = Metric(self._sim.memory_mb(), 1.0, "max")
        return found

    def state_dict(self) -> dict[str, int]:
        """Totals since the start of the run, for a checkpoint."""
        return {name: self._before.get(name, 0) + count for name, count in self.items()}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue from the counts of a checkpoint."""
        self._before = {name: int(count) for name, count in state.items()}
