"""A GPU that is only a label: tensors that say `cuda:0`, compute on the CPU, and check what a GPU checks.

The numbers are real, so loops that depend on them run as they would on a GPU. Refused are operands on two devices, a
generator of the other device, indices on the wrong device and `.numpy()` of a GPU tensor. Counted by source line are
host syncs, at which the host waits for the GPU: values that are read, copies to the host, shapes that depend on values,
and copies to the GPU that are not `non_blocking`.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_flatten, tree_map

PROJECT = Path(__file__).parents[2]
ROOMS = tuple(f"{PROJECT / room}/" for room in ("mmrl", "diffusion", "robotics"))
CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index", "_unsafe_index_put"}
COPIES = {"copy_", "_to_copy", "_copy_from"}
READS = {"nonzero", "masked_select", "_unique", "_unique2", "unique_dim", "unique_consecutive", "equal", "is_nonzero"}
"""Operations for whose result or shape the host waits."""
PLAIN_RESULTS = {"_local_scalar_dense", "equal", "is_nonzero"}
FACTORIES = {
    *("zeros", "ones", "empty", "full", "arange", "linspace", "logspace", "eye", "tensor", "as_tensor", "asarray"),
    *("rand", "randn", "randint", "randperm", "normal", "range", "scalar_tensor", "empty_strided"),
    *("tril_indices", "triu_indices"),
}
UNTOUCHED = {"device", "autocast", "get_autocast_dtype", "is_autocast_enabled"}
SYNCS: Counter[str] = Counter()
"""Host syncs so far by `file:line function [kind]`."""
_INSIDE = [0]
"""Depth of calls on labelled tensors; factories that C++ calls meanwhile make tensors where the arguments are."""


class DeviceFaultError(RuntimeError):
    """A GPU would have refused this."""


def note_sync(kind: str, *_: Any) -> None:
    """Count a host sync at the innermost line of the packages."""
    frame: Any = sys._getframe(1)
    while frame is not None and not frame.f_code.co_filename.startswith(ROOMS):
        frame = frame.f_back
    if frame is not None:
        file = Path(frame.f_code.co_filename).relative_to(PROJECT)
        SYNCS[f"{file}:{frame.f_lineno} {frame.f_code.co_name} [{kind}]"] += 1


def is_gpu(device: Any) -> bool:
    """Whether a device, or its name, is the GPU."""
    kind = device.type if isinstance(device, torch.device) else device
    return isinstance(kind, str) and kind.split(":")[0] == "cuda"


class Labelled(Tensor):
    """A tensor on the labelled GPU; `inner` holds its numbers."""

    @staticmethod
    def __new__(cls, inner: Tensor) -> Labelled:
        return torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined, no-any-return]
            cls,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=CPU,
            layout=inner.layout,
        )

    def __init__(self, inner: Tensor) -> None:
        self.inner = inner

    device = property(lambda self: GPU)  # type: ignore[assignment]
    is_cuda = property(lambda self: True)  # type: ignore[assignment]
    is_cpu = property(lambda self: False)  # type: ignore[assignment]
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def get_device(self) -> int:
        return 0

    def __repr__(self) -> str:
        return f"Labelled({self.inner!r})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) not in memo:
            with torch.no_grad():
                copied = self.detach().clone()
            parameter = isinstance(self, torch.nn.Parameter)
            grad = self.requires_grad
            memo[id(self)] = torch.nn.Parameter(copied, grad) if parameter else copied.requires_grad_(grad)
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.inner.detach().__reduce_ex__(protocol)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        leaves = tree_flatten((args, kwargs))[0]
        gpu = [leaf for leaf in leaves if isinstance(leaf, Labelled)]
        name, target = func.overloadpacket.__name__, kwargs.get("device")
        _check(name, args, leaves, bool(gpu))
        _count(name, args, kwargs)
        if is_gpu(target):
            kwargs["device"] = CPU
        inner_args, inner_kwargs = tree_map(
            lambda leaf: leaf.inner if isinstance(leaf, Labelled) else leaf, (args, kwargs)
        )
        out = func(*inner_args, **inner_kwargs)
        if not (gpu or is_gpu(target)) or name in PLAIN_RESULTS:
            return out
        return return_and_correct_aliasing(func, args, kwargs, _labelled(out))


def _labelled(tree: Any) -> Any:
    return tree_map(lambda leaf: Labelled(leaf) if _is_plain(leaf) else leaf, tree)


def _is_plain(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and not isinstance(leaf, Labelled)


def _check(name: str, args: Any, leaves: list[Any], gpu: bool) -> None:
    """Refuse what a GPU refuses."""
    plain = [leaf for leaf in leaves if _is_plain(leaf)]
    if name in INDEXING:
        on_gpu, index = isinstance(args[0], Labelled), [one for one in args[1] if one is not None]
        if not on_gpu and any(isinstance(one, Labelled) for one in index):
            raise DeviceFaultError("indices should be on the CPU, where the indexed tensor is; they are on cuda:0")
        values = args[2] if len(args) > 2 else None
        if isinstance(values, Tensor) and values.ndim and isinstance(values, Labelled) != on_gpu:
            raise DeviceFaultError(f"{name}: the values are not on the device of the tensor they go into")
    elif name not in COPIES and gpu and any(leaf.ndim for leaf in plain):
        raise DeviceFaultError(f"{name}: expected all tensors on one device, found cuda:0 and cpu")
    elif name not in COPIES and gpu and plain and name.endswith("_") and _is_plain(args[0]):
        raise DeviceFaultError(f"{name}: the result of a cuda:0 tensor does not go into one on the CPU")
    generators = [leaf for leaf in leaves if isinstance(leaf, torch.Generator)]
    if gpu and any(not is_gpu(generator.device) for generator in generators):
        raise DeviceFaultError(f"{name}: expected a generator of cuda:0, found one of the CPU")


def _count(name: str, args: Any, kwargs: Any) -> None:
    """Count the operations for which the host waits."""
    if name in INDEXING:
        index = [one for one in args[1] if one is not None]
        if isinstance(args[0], Labelled) and any(_is_plain(one) for one in index):
            note_sync("index on the host")
        if any(one.dtype in (torch.bool, torch.uint8) for one in index):
            note_sync("mask as index")
    elif name == "copy_" and _is_plain(args[0]):
        note_sync("copy to the host")
    elif name == "copy_" and isinstance(args[0], Labelled) and _is_plain(args[1]) and not any((*args[2:], *kwargs)):
        note_sync("copy to the GPU")
    elif name == "_local_scalar_dense":
        note_sync("item")
    elif name in READS or (name == "repeat_interleave" and kwargs.get("output_size") is None and _is_tensor(args[-1])):
        note_sync(name)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)


class _ToGpu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return Labelled(x.detach().clone())

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return grad.inner.clone() if isinstance(grad, Labelled) else grad


class _ToHost(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Tensor:
        return x.inner.detach().clone()  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return Labelled(grad.detach().clone())


class _Functions(TorchFunctionMode):
    """Sends transfers and factories to the device that they name."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        own, name = args[0] if args else None, getattr(func, "__name__", "")
        sets_autocast = name in ("set_autocast_enabled", "set_autocast_dtype") and not isinstance(own, Tensor)
        if func is torch.device or getattr(func, "__qualname__", "") in UNTOUCHED or sets_autocast:
            return func(*args, **kwargs)
        if func in (Tensor.numpy, Tensor.__array__) and isinstance(own, Labelled):
            raise DeviceFaultError("a cuda:0 tensor has no numpy view; copy it to the host with .cpu()")
        if func is Tensor.tolist and isinstance(own, Labelled):
            note_sync("tolist")
            return own.inner.tolist()
        if func in (Tensor.cpu, Tensor.cuda):
            return _moved(own, GPU if func is Tensor.cuda else CPU)
        if func in (Tensor.to, Tensor.type):
            return _converted(func, own, args[1:], kwargs)
        if func is Tensor.is_cuda.__get__:  # type: ignore[attr-defined]
            return isinstance(own, Labelled)
        if name in FACTORIES or name.endswith("_like") or name.startswith("new_"):
            placed = [is_gpu(value) for value in args]
            if any(placed) or is_gpu(kwargs.get("device")):
                args = tuple(CPU if gpu else value for gpu, value in zip(placed, args, strict=True))
                return _made(func, name, args, kwargs)
        if _INSIDE[0] or not any(isinstance(leaf, Labelled) for leaf in tree_flatten((args, kwargs))[0]):
            return func(*args, **kwargs)
        _INSIDE[0] += 1
        try:
            return func(*args, **kwargs)
        finally:
            _INSIDE[0] -= 1


class _Factories(TorchDispatchMode):
    """Labels the tensors that calls on labelled tensors make without an argument."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        alone = not any(isinstance(leaf, Tensor) for leaf in tree_flatten((args, kwargs or {}))[0])
        return Labelled(out) if _INSIDE[0] and alone and _is_plain(out) else out


def _moved(tensor: Any, device: torch.device, *, blocking: bool = True) -> Any:
    if isinstance(tensor, Labelled) == is_gpu(device):
        return tensor
    if is_gpu(device):
        if blocking:
            note_sync("to the GPU")
        return _ToGpu.apply(tensor)
    note_sync("to the host")
    return _ToHost.apply(tensor)


def _converted(func: Any, own: Any, rest: Any, kwargs: dict[str, Any]) -> Any:
    """`Tensor.to` and `Tensor.type` with all their forms."""
    blocking = not kwargs.pop("non_blocking", False)
    device, dtype = kwargs.pop("device", None), kwargs.pop("dtype", None)
    blocking = blocking and not next((value for value in rest if isinstance(value, bool)), False)
    for value in (*rest, kwargs.pop("other", None)):
        if isinstance(value, Tensor):
            device, dtype = (GPU if isinstance(value, Labelled) else CPU), value.dtype
        elif isinstance(value, torch.dtype):
            dtype = value
        elif isinstance(value, torch.device) or (isinstance(value, str) and value.split(":")[0] in ("cpu", "cuda")):
            device = torch.device(value)
        elif isinstance(value, str) or (device is None and isinstance(value, int) and not isinstance(value, bool)):
            return func(own, *rest, **kwargs)
    if device is not None and torch.device(device).type not in ("cpu", "cuda"):
        return func(own, device, **kwargs, **({} if dtype is None else {"dtype": dtype}))
    out = own if device is None else _moved(own, torch.device(device), blocking=blocking)
    if dtype is not None:
        out = func(out, dtype, **kwargs)
    return out.clone() if kwargs.get("copy") and out is own else out


def _made(func: Any, name: str, args: Any, kwargs: dict[str, Any]) -> Any:
    """A new tensor on the GPU."""
    own = args[0] if args else None
    if "device" in kwargs:
        kwargs["device"] = CPU
    generator = kwargs.get("generator")
    if generator is not None and not is_gpu(generator.device):
        raise DeviceFaultError(f"{name}: expected a generator of cuda:0, found one of the CPU")
    if isinstance(own, Labelled) and name not in FACTORIES:
        kwargs.pop("device", None)
        return func(*args, **kwargs)
    if isinstance(own, Labelled) and func in (torch.as_tensor, torch.tensor):
        return own.clone() if func is torch.tensor else own.to(kwargs.get("dtype") or own.dtype)
    grad = kwargs.pop("requires_grad", False)
    if func in (torch.tensor, torch.as_tensor):
        note_sync("to the GPU")
        args = tree_map(lambda leaf: leaf.item() if isinstance(leaf, Labelled) else leaf, args)
    out = _labelled(func(*args, **kwargs))
    return out.requires_grad_() if grad else out


class _Event:
    """In place of `torch.cuda.Event`; the time between two is a millisecond."""

    def __init__(self, **options: Any) -> None: ...

    def record(self, stream: Any = None) -> None: ...

    def elapsed_time(self, end: Any) -> float:
        return 1.0


@contextlib.contextmanager
def labelled_gpu() -> Iterator[Counter[str]]:
    """Have runs inside train on the labelled GPU; gives the host syncs so far.

    Nothing is saved meanwhile: files are written from addresses, which a labelled tensor has not.
    """
    from accelerate.state import AcceleratorState, PartialState

    from mmrl.training import processes
    from mmrl.vlm.engine import attention

    SYNCS.clear()
    processes.make_accelerator()
    patches = [
        mock.patch.dict(PartialState._shared_state, {"device": GPU}),
        mock.patch.dict(AcceleratorState._shared_state, {"device": GPU}),
        mock.patch.dict(attention.KERNELS, {"cuda": attention.KERNELS["cpu"]}),
        mock.patch("torch.cuda.synchronize", functools.partial(note_sync, "synchronize")),
        mock.patch("torch.cuda.Event", _Event),
        mock.patch("torch.cuda.current_stream", return_value=None),
        mock.patch("torch.cuda.reset_peak_memory_stats", return_value=None),
        mock.patch("torch.cuda.max_memory_allocated", return_value=0),
        mock.patch("torch.cuda.get_device_name", return_value="label"),
        mock.patch("mmrl.training.saving.RunSaver.save", return_value=None),
        mock.patch("mmrl.training.saving.RunSaver.note_best", return_value=None),
    ]
    from torch.nn.utils import clip_grad

    by_cpp = clip_grad._group_tensors_by_device_and_dtype

    def grouped(nested: Any, *options: Any) -> Any:
        """Groups by device and kind as a GPU's; C++ sees where the numbers really lie."""
        own = GPU if any(isinstance(leaf, Labelled) for leaf in tree_flatten(nested)[0]) else CPU
        return {(own, kind): found for (_, kind), found in by_cpp(nested, *options).items()}

    patches.append(mock.patch.object(clip_grad, "_group_tensors_by_device_and_dtype", grouped))
    swaps = torch.__future__.get_swap_module_params_on_conversion()
    with contextlib.ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        stack.callback(torch.__future__.set_swap_module_params_on_conversion, swaps)
        stack.callback(attention.kernels_for.cache_clear)
        torch.__future__.set_swap_module_params_on_conversion(True)
        stack.enter_context(_Factories())
        stack.enter_context(_Functions())
        yield SYNCS
