"""FSDP2: trained weights, their gradients and the optimiser state are sharded over the processes of a run.

`fully_shard` shards the weights, block by block, and gathers them; its forward and backward hooks are removed. They
gather a block whenever it is called, so all processes would have to call the same blocks in the same order. But the
processes of a run sample answers of different lengths, see different numbers of images and skip different groups. So
the weights are whole between optimiser steps, and sharded (in parts) only within them:

    whole: sample, score, forward, backward -> gradients: sum, each process keeps its part
    in parts: clip, AdamW                   -> whole

Samplers, shared prompts, LoRA and evaluations use whole weights, as without FSDP2. Always sharded are the moments of
the optimiser, the reference policy while nothing is scored with it, and with `gathered=torch.bfloat16` the float32
weights: the whole ones are then a bfloat16 copy.
"""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from mmrl.core.payload import numbers
from mmrl.errors import UserError

if TYPE_CHECKING:  # they take a second to import, and most runs need none of them
    from torch.distributed.device_mesh import DeviceMesh

ATTRIBUTE = "_weights_in_parts"
"""Attribute of a sharded module that contains its `Shards`."""
HOOKS = "torch.distributed.fsdp"
"""Package in which FSDP2 defines its hooks."""


def shard(
    module: nn.Module, accelerator: Accelerator, names: frozenset[str], gathered: torch.dtype | None = None
) -> Shards:
    """Shard weights of a module over the processes.

    Args:
        module: A policy, the same on every process.
        accelerator: The processes.
        names: Names of the weights to shard. Scalars, and weights that do not have the most common dtype, stay whole.
        gathered: Dtype of the gathered weights; None keeps their own.

    Raises:
        UserError: There is only one process, or none of the weights can be sharded.

    Source: torch.distributed.fsdp.fully_shard (FSDP2).
    """
    check_processes(accelerator)
    from torch.distributed.device_mesh import init_device_mesh

    # one mesh of all processes: weights are sharded, and never replicated
    mesh = init_device_mesh(accelerator.device.type, (accelerator.num_processes,))
    shards = Shards(module, mesh, names, gathered)
    # on the module, so that code that is handed a policy finds its shards
    setattr(module, ATTRIBUTE, shards)
    return shards


def check_processes(accelerator: Accelerator) -> None:
    """Reject sharding in a run with one process."""
    if accelerator.num_processes == 1:
        raise UserError(
            "trainer.sharding is fsdp2, which divides the weights between processes, but this run has one process; "
            "start several with --processes or torchrun, or set trainer.sharding=none"
        )


def shards_of(module: nn.Module) -> Shards | None:
    """The `Shards` of a sharded module; None for others."""
    return getattr(module, ATTRIBUTE, None)


@contextlib.contextmanager
def whole_weights(module: nn.Module | None) -> Iterator[None]:
    """Gather a sharded module for the duration of the context; all processes must enter it. Others are unchanged."""
    shards = None if module is None else shards_of(module)
    # already whole: an outer context gathers and releases
    if shards is None or shards.whole:
        yield
        return
    shards.gather()
    try:
        yield
    finally:
        shards.release()


@contextlib.contextmanager
def in_parts(module: nn.Module) -> Iterator[None]:
    """Free the whole weights of a sharded module and gather them again afterwards; the reverse of `whole_weights`."""
    shards = shards_of(module)
    if shards is None or not shards.whole:
        yield
        return
    # memory of the whole weights is free meanwhile
    shards.release()
    yield
    shards.gather()


@contextlib.contextmanager
def saving(module: nn.Module, *, keep: bool) -> Iterator[None]:
    """Give a module full-precision weights for reading; all processes must enter it, with `keep` if they need them."""
    shards = shards_of(module)
    # a module that is not sharded has full-precision weights at any time
    with contextlib.nullcontext() if shards is None else shards.exact(keep=keep, write=False):
        yield


@contextlib.contextmanager
def loading(module: nn.Module) -> Iterator[None]:
    """Copy weights written into a module inside the context back to its shards; all processes must enter it."""
    shards = shards_of(module)
    with contextlib.nullcontext() if shards is None else shards.exact(keep=True, write=True):
        yield


def exact_weights(module: nn.Module, names: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
    """Yield names and full-precision values of weights one by one; all processes must consume all of them."""
    shards = shards_of(module)
    weights = dict(module.named_parameters())
    for name in names:
        # the whole weights are a rounded copy, so the parts are read instead
        rounded = shards is not None and shards.gathered is not None and name in shards.parts
        # detached: a reader must not enter the graph of the update
        yield name, _full(shards.parts[name]) if shards is not None and rounded else weights[name].detach()


def gather_state(optimizer: Any, keep: bool) -> dict[str, Any]:
    """State of an optimiser with whole moments on the CPU, the same for any number of processes.

    Args:
        optimizer: Its weights may be in parts; all processes must call this.
        keep: Whether this process needs the state; otherwise the moments are omitted.
    """
    state: dict[str, Any] = optimizer.state_dict()
    if not any(is_part(value) for moments in state["state"].values() for value in moments.values()):
        return state
    found: dict[Any, dict[str, Any]] = {}
    for number, moments in state["state"].items():
        # every process gathers every moment, since it is a collective call; only `keep` copies them to the CPU
        whole = {name: _full(value) if is_part(value) else value for name, value in moments.items()}
        if keep:
            found[number] = {k: v.cpu() if torch.is_tensor(v) and v.ndim else v for k, v in whole.items()}
    return {**state, "state": found}


def scatter_state(optimizer: Any, state: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the result of `gather_state` to the state that an optimiser with sharded weights loads."""
    # in the order of groups, by which an optimiser numbers its state
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    found = {
        # scalar moments such as the step count stay whole
        number: {name: _like(value, weights[number]) for name, value in moments.items()}
        for number, moments in state["state"].items()
    }
    return {**state, "state": found}


def clip(parameters: Sequence[nn.Parameter], limit: float, loss: Tensor) -> tuple[float, float]:
    """Clip the gradients to a total norm over all weights and processes (0 = no clipping).

    Returns the norm before clipping and the loss as numbers, with one synchronisation for both. If the norm is not
    finite the gradients are left alone: scaling would spread it to all of them and hide where it came from.
    """
    gradients = [p.grad for p in parameters if p.grad is not None]
    parts = [local(gradient) for gradient in gradients if is_part(gradient)]
    # the foreach norm takes no mix of DTensors and tensors
    norm = torch.nn.utils.get_total_norm([gradient for gradient in gradients if not is_part(gradient)])
    if parts:
        # parts differ between processes and their squares add up; whole gradients are equal on all and count once
        squares = torch.nn.utils.get_total_norm(parts).double() ** 2
        torch.distributed.all_reduce(squares)
        norm = (norm.to(squares) ** 2 + squares).sqrt().float()
    # read together, since each read waits for the GPU
    norm_value, loss_value = numbers([norm, loss])
    if limit and math.isfinite(norm_value):
        torch.nn.utils.clip_grads_with_norm_([p for p in parameters if not is_part(p)], limit, norm)
        if parts:
            # as clip_grads_with_norm_ does, which does not take DTensors next to tensors
            torch._foreach_mul_(parts, (limit / (norm + 1e-6)).clamp(max=1.0))
    return norm_value, loss_value


def is_part(tensor: Any) -> bool:
    """Whether a tensor is sharded over the processes."""
    return hasattr(tensor, "placements")


def local(tensor: Tensor) -> Tensor:
    """The local part of a sharded tensor; other tensors unchanged."""
    return tensor.to_local() if is_part(tensor) else tensor  # type: ignore[attr-defined]


class Shards:
    """The weights of a module that are sharded over the processes of a mesh."""

    def __init__(
        self, module: nn.Module, mesh: DeviceMesh, names: frozenset[str], gathered: torch.dtype | None
    ) -> None:
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        self.gathered = gathered
        """Dtype of the whole weights if it differs from that of the parts."""
        self.whole = False
        """Whether the module currently holds the whole weights."""
        self._module = module
        self._mesh = mesh
        chosen = _divisible(module, names)
        if not chosen:
            raise UserError(
                f"trainer.sharding is fsdp2, but {type(module).__name__} has no trained weights that could be "
                "divided between processes; set trainer.sharding=none"
            )
        # then the whole weights are no rounded copy, and nothing has to be kept apart
        if gathered in {weight.dtype for weight in chosen.values()}:
            self.gathered = gathered = None
        # otherwise fully_shard would also take frozen weights and scalars
        ignored = {weight for name, weight in module.named_parameters() if name not in chosen}
        # inputs stay as they are: the forward pass is called on whole weights, without FSDP2's hooks
        precision = MixedPrecisionPolicy(param_dtype=gathered, cast_forward_inputs=False)
        # one group a block, so that the buffer of a gather is no larger than a block
        self._groups: list[Any] = [*_blocks(module), module]
        for part in self._groups:
            # inner blocks first: the call on the whole module then takes what is left
            fully_shard(part, mesh=mesh, reshard_after_forward=False, mp_policy=precision, ignored_params=ignored)
        self.parts: dict[str, Any] = {name: part for name, part in module.named_parameters() if name in chosen}
        """The sharded weights, by name."""
        # a weight that is left whole would silently be trained by each process alone
        whole = [name for name, weight in self.parts.items() if not is_part(weight)]
        if whole:
            raise RuntimeError(f"fully_shard did not shard these weights: {', '.join(whole[:4])}")
        self._sums: dict[str, Tensor] = {}
        self._fresh = True

    def gather(self) -> None:
        """Make the weights whole; all processes must call it."""
        for part in self._groups:
            part.unshard()
        self.whole = True
        if self._fresh:  # some hooks, and the whole weights, are made by the first gathering
            self._fresh = False
            _without_hooks(self._module)
            if self.gathered is not None:
                for name, weight in self._whole().items():
                    if weight.requires_grad:  # not in a reference
                        # bfloat16 gradients of many micro-batches, added in bfloat16, would lose the small ones
                        weight.register_post_accumulate_grad_hook(self._summing(name))

    def release(self) -> None:
        """Free the whole weights."""
        for part in self._groups:
            part.reshard()
        self.whole = False

    def sum_gradients(self) -> None:
        """Sum the gradients over all processes; afterwards the weights are sharded, each with its part of the sum."""
        from torch.distributed.tensor import DTensor, Partial

        whole = self._whole()
        # sums in full precision if the whole weights are bfloat16, else the gradients themselves
        found = {name: self._sums.pop(name, weight.grad) for name, weight in whole.items()}
        # the whole weights are freed next, and their gradients with them
        for weight in whole.values():
            weight.grad = None
        self.release()
        # for every part and not only those used here, or the processes' calls would not match
        used = torch.tensor([int(found[name] is not None) for name in self.parts], device=self._mesh.device_type)
        # a weight that any process has used is summed on all of them; one used nowhere has no gradient, for AdamW to
        # skip
        torch.distributed.all_reduce(used, torch.distributed.ReduceOp.MAX)
        for (name, part), anywhere in zip(self.parts.items(), used.tolist(), strict=True):
            if anywhere:
                own = found.pop(name)
                own = torch.zeros(part.shape, dtype=part.dtype, device=part.device) if own is None else own
                # Partial to sharded is a reduce-scatter: each process gets the sum of its part alone
                summed = DTensor.from_local(own, self._mesh, [Partial()], run_check=False)
                part.grad = summed.redistribute(placements=part.placements)

    @contextlib.contextmanager
    def exact(self, *, keep: bool, write: bool) -> Iterator[None]:
        """See `saving` and `loading`."""
        places: dict[tuple[nn.Module, str], nn.Parameter] = {}
        # reading parts is collective, so processes that keep nothing take part too
        if self.gathered is not None or keep:
            whole = exact_weights(self._module, list(self.parts))
            # copies: the memory of whole weights may be longer than they are, which safetensors refuses
            copies = {name: nn.Parameter(weight.to("cpu", copy=True)) for name, weight in whole if keep}
            # readers of the module see the copies
            places = self._swap(copies)
        yield
        if write:
            # what was written into the module is in the copies
            weights = self._whole()
            with torch.no_grad():
                for name, part in self.parts.items():
                    # every process has written the same whole weights, and keeps its part
                    part.to_local().copy_(_like(weights[name], part).to_local())
        # the parameters that the optimiser holds come back
        for (owner, key), weight in places.items():
            owner._parameters[key] = weight
        if write:
            self.refresh()

    def refresh(self) -> None:
        """Gather again after the shards have changed; all processes must call it."""
        self.release()
        self.gather()

    def _swap(self, weights: Mapping[str, nn.Parameter]) -> dict[tuple[nn.Module, str], nn.Parameter]:
        """Replace weights, tied ones at every place they occur; returns the originals."""
        # remove_duplicate=False, or a tied weight would be replaced under one of its names only
        names: dict[nn.Parameter, str] = {}
        places: dict[tuple[nn.Module, str], nn.Parameter] = {}
        for name, weight in list(self._module.named_parameters(remove_duplicate=False)):
            # tied weights occur under several names and are one parameter under the first
            first = names.setdefault(weight, name)
            if first in weights:
                path, _, key = name.rpartition(".")
                # through the owner: named_parameters yields the tensors, not where they are
                owner = self._module.get_submodule(path)
                places[owner, key] = weight
                weights[first].requires_grad_(weight.requires_grad)
                owner._parameters[key] = weights[first]
        return places

    def _whole(self) -> dict[str, nn.Parameter]:
        # by name, since the parts are other objects than the whole weights
        return {name: weight for name, weight in self._module.named_parameters() if name in self.parts}

    def _summing(self, name: str) -> Any:
        """Return a hook that accumulates the gradients of micro-batches in the precision of the part."""

        def add(weight: Tensor) -> None:
            assert weight.grad is not None
            # freed at once: a bfloat16 gradient that stays would be added to by the next micro-batch
            gradient, weight.grad = weight.grad.to(self.parts[name].dtype), None
            self._sums[name] = gradient if name not in self._sums else self._sums[name].add_(gradient)

        return add


def _divisible(module: nn.Module, names: frozenset[str]) -> dict[str, nn.Parameter]:
    """Weights that `fully_shard` accepts in one group: non-scalar, contiguous, and of the most common dtype."""
    weights = {name: weight for name, weight in module.named_parameters() if name in names}
    weights = {name: weight for name, weight in weights.items() if weight.ndim and weight.is_contiguous()}
    sizes: Counter[torch.dtype] = Counter()
    for weight in weights.values():
        sizes[weight.dtype] += weight.numel()
    common = sizes.most_common(1)[0][0] if sizes else None
    # a group of fully_shard has one dtype; the most common one by number of weights, not of tensors
    return {name: weight for name, weight in weights.items() if weight.dtype == common}


def _blocks(module: nn.Module) -> list[nn.Module]:
    """Entries of the innermost module lists of a network, such as its layers; they are gathered one by one."""
    # innermost: a list of lists of layers is gathered layer by layer
    lists = [part for part in module.modules() if isinstance(part, nn.ModuleList)]
    entries = dict.fromkeys(entry for part in lists for entry in part if not isinstance(entry, nn.ModuleList))
    return [
        entry
        for entry in entries
        if type(entry).forward is not nn.Module.forward  # a container
        and not any(isinstance(part, nn.ModuleList) for part in entry.modules())
        and next(entry.parameters(), None) is not None
    ]


def _without_hooks(module: nn.Module) -> None:
    """Remove the hooks of FSDP2: on calls they gather and free the weights, in `state_dict` they return parts."""
    for part in module.modules():
        for hooks in (
            part._forward_pre_hooks,
            part._forward_hooks,
            part._state_dict_pre_hooks,
            part._load_state_dict_pre_hooks,
            part._load_state_dict_post_hooks,
        ):
            # only FSDP2's: hooks of the model or of a user stay
            for number in [key for key, hook in hooks.items() if HOOKS in str(getattr(hook, "__module__", ""))]:
                del hooks[number]


def _full(part: Any) -> Tensor:
    with torch.no_grad():
        return part.full_tensor().detach()


def _like(value: Any, weight: Any) -> Any:
    """Shard a whole tensor like `weight`; other values, and those of whole weights, are returned unchanged."""
    # scalars, and moments of weights that stayed whole
    if not is_part(weight) or not torch.is_tensor(value) or value.shape != weight.shape:
        return value
    from torch.distributed.tensor import DTensor

    rank = weight.device_mesh.get_local_rank()
    pieces = value.chunk(weight.device_mesh.size(), 0)  # as fully_shard cuts: the last processes may have nothing
    own = pieces[rank] if rank < len(pieces) else value[:0]
    # copied, so that the whole moment is freed
    own = own.to(weight.device, copy=True).contiguous()
    return DTensor.from_local(
        own, weight.device_mesh, weight.placements, run_check=False, shape=weight.shape, stride=weight.stride()
    )
