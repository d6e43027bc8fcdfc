"""A transformers cache whose states can be shared by several rows and differentiated."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import Cache, DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer, LinearAttentionLayer, StaticLayer


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


class FixedLayer(StaticLayer):
    """Keys and values of all tokens in memory that does not move; masks hide columns without a token.

    Those of a sliding window stay too: transformers' masks of a static layer hide what has left the window, while
    its own layer counts the tokens in Python, where a captured step does not count.
    """

    @staticmethod
    def of(layer: Any, room: int) -> FixedLayer:
        """The states of a layer, plus room for more tokens; a fixed layer must be full."""
        held = layer.keys.shape[2]
        read = layer.get_seq_length() if type(layer) is DynamicSlidingWindowLayer else held
        made = FixedLayer(read + room)
        # as `lazy_initialization` would, which waits for the device
        made.dtype, made.device = layer.keys.dtype, layer.keys.device  # type: ignore[attr-defined]
        made.batch_size, made.num_heads = layer.keys.shape[:2]
        made.keys, made.values = (functional.pad(x, (0, 0, read - held, room)) for x in (layer.keys, layer.values))
        made.cumulative_length = torch.full((), read, device=made.device)
        made.is_initialized = True
        return made


def fixed_cache(cache: Any, room: int) -> Cache:
    """The states of a cache in memory that does not move while up to `room` tokens are read.

    Raises ValueError for layers whose states have no such form.
    """
    layers: list[Any] = []
    for layer in cache.layers:
        if type(layer) in (DynamicLayer, DynamicSlidingWindowLayer, FixedLayer):
            layers.append(FixedLayer.of(layer, room))
        elif type(layer) in (AssignedStates, LinearAttentionLayer):
            layers.append(_in_place(layer))
        else:
            raise ValueError(f"layers of type {type(layer).__name__} have no fixed-size states")
    return Cache(layers=layers)


def _in_place(layer: Any) -> LinearAttentionLayer:
    """A copy whose states transformers writes in place."""
    made = copy.copy(layer)
    made.__class__ = LinearAttentionLayer
    for name in ("conv_states", "recurrent_states"):
        states = getattr(layer, name)
        setattr(made, name, {key: None if state is None else state.clone() for key, state in states.items()})
    return made


def mapped(cache: DynamicCache, function: Callable[[Tensor], Tensor]) -> DynamicCache:
    """A copy of a cache with `function` applied to all states; updates of the copy leave the given cache unchanged."""
    made = copy.copy(cache)
    made.layers = [copy.copy(layer) for layer in cache.layers]
    for layer in made.layers:
        for name, value in vars(layer).items():
            if isinstance(value, dict):
                setattr(layer, name, {key: function(x) if _is_state(x) else x for key, x in value.items()})
            elif isinstance(value, Tensor):  # counters are written in place
                setattr(layer, name, function(value) if _is_state(value) else value.clone())
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
