"""Copies many small tensors from a device to the host at once; separate transfers would each wait for the GPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def to_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copies on the CPU, without gradient, with one transfer per device; CPU tensors are returned as they are."""
    found = list(tensors)
    by_device: dict[torch.device, list[int]] = {}
    for number, tensor in enumerate(tensors):
        if tensor.device.type != "cpu":
            by_device.setdefault(tensor.device, []).append(number)
    for numbers in by_device.values():
        # the widest entries first, so that each tensor starts at a multiple of its entry size
        numbers.sort(key=lambda number: -tensors[number].element_size())
        parts = [tensors[number].detach().contiguous().reshape(-1).view(torch.uint8) for number in numbers]
        copied = torch.cat(parts).cpu().split([len(part) for part in parts])
        for number, part in zip(numbers, copied, strict=True):
            found[number] = part.clone().view(tensors[number].dtype).view(tensors[number].shape)
    return found


def to_device(tensor: Tensor, device: torch.device | str) -> Tensor:
    """The tensor on a device, without waiting for a GPU, which copies it in stream order."""
    return tensor.to(device, non_blocking=tensor.device.type == "cpu")


def numbers(values: Sequence[float | Tensor]) -> list[float]:
    """Convert scalars to Python numbers with one transfer."""
    copied = iter(to_host([value for value in values if isinstance(value, Tensor)]))
    return [float(next(copied) if isinstance(value, Tensor) else value) for value in values]


def sum_of_bits(weight: torch.Tensor) -> torch.Tensor:
    """Sum of a tensor's eight-byte words, modulo 2^64, and of the bytes that are left."""
    data = weight.contiguous().view(-1).view(torch.uint8)
    words, rest = data.split([len(data) // 8 * 8, len(data) % 8])
    if words.storage_offset() * words.element_size() % 8:  # a part of a larger tensor: not aligned
        words = words.clone()
    return words.view(torch.int64).sum() + rest.sum()
