"""What the loop needs of several processes: shards, global counts, and statistics over every rank's rows."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import DistributedDataParallelKwargs, gather_object
from torch import Tensor, nn

from mmrl.core.aggregation import Denominators
from mmrl.core.rollouts import Rollouts
from mmrl.training.loop.machine import avoid_refused_instructions

ItemT = TypeVar("ItemT")
BUCKET_ELEMENTS = 2**24
"""Gradient entries in one message between processes."""


def make_accelerator(mixed_precision: str = "none") -> Accelerator:
    """Create the process group and pick the device, as `accelerate launch` or a plain `python` asks for."""
    if mixed_precision == "bf16":
        avoid_refused_instructions()
    # a micro-batch without images leaves the vision tower unused; buffers are constants, and writing them between
    # two forward passes of one loss would break the backward pass of the first
    options = DistributedDataParallelKwargs(find_unused_parameters=True, broadcast_buffers=False)
    return Accelerator(
        mixed_precision="no" if mixed_precision == "none" else mixed_precision, kwargs_handlers=[options]
    )


def leave(code: int = 0) -> None:
    """End this process at once if it is one of several, else do nothing; call it when all work is on disk.

    With gloo a communication thread may outlive the interpreter, whose teardown then aborts about one run in ten
    ("terminate called without an active exception", torch 2.13), after everything has succeeded.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def shard(items: Sequence[ItemT], accelerator: Accelerator) -> list[ItemT]:
    """This process's share of `items`: every world-size-th one, starting at its rank."""
    return list(items[accelerator.process_index :: accelerator.num_processes])


def sum_over_processes(values: Mapping[str, float]) -> dict[str, float]:
    """Add numbers up over all processes, name by name; every process calls it, with names of its own."""
    if PartialState().num_processes == 1:
        return dict(values)
    total: Counter[str] = Counter()
    for part in gather_object([dict(values)]):
        total.update(part)
    return dict(total)


def all_ranks(flag: bool, accelerator: Accelerator) -> bool:
    """Whether `flag` holds on every process."""
    if accelerator.num_processes == 1:
        return flag
    votes = accelerator.gather(torch.tensor([int(flag)], device=accelerator.device))
    return bool(votes.all())


def merge_lists(items: list[ItemT], accelerator: Accelerator) -> list[ItemT]:
    """Concatenate picklable lists of all processes, in rank order, on every process."""
    if accelerator.num_processes == 1:
        return items
    return list(gather_object(items))


def average_gradients(parameters: Sequence[nn.Parameter], accelerator: Accelerator) -> None:
    """Replace each gradient by its mean over all processes, as a data-parallel wrapper does during backward."""
    if accelerator.num_processes == 1:
        return
    used = torch.tensor([int(parameter.grad is not None) for parameter in parameters], device=accelerator.device)
    torch.distributed.all_reduce(used, torch.distributed.ReduceOp.MAX)
    gradients = []
    for parameter, anywhere in zip(parameters, used.tolist(), strict=True):
        if anywhere:
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            gradients.append(parameter.grad)
    for bucket in _buckets(gradients):
        flat = torch.cat([gradient.flatten() for gradient in bucket]) / accelerator.num_processes
        torch.distributed.all_reduce(flat)
        for gradient, mean in zip(bucket, flat.split([gradient.numel() for gradient in bucket]), strict=True):
            gradient.copy_(mean.view_as(gradient))


def global_denominators(local: Denominators, accelerator: Accelerator) -> Denominators:
    """Sum this optimiser step's counts over all processes; the row length is common to them."""
    if accelerator.num_processes == 1:
        return local
    return Denominators.total(merge_lists([local], accelerator))


def global_advantages(
    estimate: Callable[[Rollouts], Rollouts], rollouts: Rollouts, accelerator: Accelerator
) -> Rollouts:
    """Run an advantage estimator over the rows of all processes and keep this process's part.

    Only rewards, masks and per-decision numbers are sent; prompts and images stay with their process.
    """
    if accelerator.num_processes == 1:
        return estimate(rollouts)
    parts = merge_lists([rollouts.replace(payload=None).to("cpu")], accelerator)
    joined = estimate(Rollouts.concat(parts))
    start = sum(part.num_rows for part in parts[: accelerator.process_index])
    rows = torch.arange(start, start + rollouts.num_rows)
    mine = joined.select(rows)
    length = rollouts.mask.shape[1]
    return rollouts.replace(
        advantage=_cut(mine.advantage, length, accelerator), returns=_cut(mine.returns, length, accelerator)
    )


def _buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Neighbours of one type, about `BUCKET_ELEMENTS` at a time: few messages, and little memory for the copy."""
    bucket: list[Tensor] = []
    for tensor in tensors:
        full = sum(other.numel() for other in bucket) + tensor.numel() > BUCKET_ELEMENTS
        if bucket and (full or tensor.dtype != bucket[0].dtype):
            yield bucket
            bucket = []
        bucket.append(tensor)
    if bucket:
        yield bucket


def _cut(values: Any, length: int, accelerator: Accelerator) -> Any:
    return None if values is None else values[:, :length].to(accelerator.device)
