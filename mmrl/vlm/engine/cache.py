"""A transformers cache whose states can be shared by several rows and differentiated."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, LinearAttentionLayer


def new_cache(config: Any) -> DynamicCache:
    """An empty cache for a model of this configuration."""
    cache = DynamicCache(config=config)
    for layer in cache.layers:
        if type(layer) is LinearAttentionLayer:
            layer.__class__ = AssignedStates
    return cache


def unrepeatable(config: Any) -> list[str]:
    """Kinds of layers in a model's cache whose states cannot be copied for the rows of a group."""
    layers = new_cache(config).layers
    kinds = {type(layer) for layer in layers}
    linear = {kind for kind in kinds if issubclass(kind, LinearAttentionLayer) and kind is not AssignedStates}
    return sorted(kind.__name__ for kind in linear)


def filled_cache(config: Any, keys: Sequence[Tensor], values: Sequence[Tensor]) -> DynamicCache:
    """A cache of keys and values (n, Hk, P, d) by layer, for a model whose cache is plain."""
    cache = new_cache(config)
    layers: list[Any] = cache.layers
    for layer, own_keys, own_values in zip(layers, keys, values, strict=True):
        # as its `update` would, which first makes an empty tensor and waits for the device
        layer.dtype = own_keys.dtype
        layer.device = own_keys.device
        layer.keys = own_keys
        layer.values = own_values
        layer.is_initialized = True
    return cache


def mapped(cache: DynamicCache, function: Callable[[Tensor], Tensor]) -> DynamicCache:
    """A copy of a cache with `function` applied to all states; updates of the copy leave the given cache unchanged."""
    made = copy.copy(cache)
    made.layers = [copy.copy(layer) for layer in cache.layers]
    for layer in made.layers:
        for name, value in vars(layer).items():
            if isinstance(value, dict):
                setattr(layer, name, {key: function(x) if _is_state(x) else x for key, x in value.items()})
            elif _is_state(value):
                setattr(layer, name, function(value))
    return made


def states(cache: DynamicCache) -> Iterator[Tensor]:
    """Keys, values and other states of all layers."""
    for layer in cache.layers:
        for value in vars(layer).values():
            yield from (x for x in (value.values() if isinstance(value, dict) else [value]) if _is_state(x))


def is_plain(cache: DynamicCache) -> bool:
    """Whether every layer keeps the keys and values of all tokens, and nothing else."""
    return all(type(layer) is DynamicLayer for layer in cache.layers)


def _is_state(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


class AssignedStates(LinearAttentionLayer):
    """Linear attention states that are assigned; transformers copies them in place, which breaks gradients."""

    def update_conv_state(
        self, conv_states: Tensor, state_idx: int = 0, conv_kernel_size: int | None = None, **_: Any
    ) -> Tensor:
        """Append inputs (B, D, t) of the convolution to those before; returns all, keeps the last."""
        size = conv_kernel_size or self.conv_kernel_size[state_idx] or conv_states.shape[-1]
        self.conv_kernel_size[state_idx] = size
        self.dtype, self.device = conv_states.dtype, conv_states.device  # type: ignore[assignment]
        before = self.conv_states[state_idx]
        if before is not None and self.has_previous_state[state_idx]:
            full = torch.cat([before, conv_states], -1)
        else:
            full = functional.pad(conv_states, (max(0, size - conv_states.shape[-1]), 0))
        self.has_previous_state[state_idx] = self.is_conv_states_initialized[state_idx] = True
        self.conv_states[state_idx] = full[..., -size:]
        return full

    def update_recurrent_state(self, recurrent_states: Tensor, state_idx: int = 0, **_: Any) -> Tensor:
        """Replace the recurrent state."""
        self.is_recurrent_states_initialized[state_idx] = True
        self.recurrent_states[state_idx] = recurrent_states
        return recurrent_states

    def batch_select_indices(self, indices: Tensor) -> None:
        """Select the states of some rows; a row may occur several times."""
        for states in (self.conv_states, self.recurrent_states):
            for index, state in states.items():
                states[index] = None if state is None else state[indices]
