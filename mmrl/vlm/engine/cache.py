"""A cache of transformers whose states can be read by several rows and differentiated."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import DynamicCache
from transformers.cache_utils import LinearAttentionLayer


def new_cache(config: Any) -> DynamicCache:
    """An empty cache for a model of this configuration."""
    cache = DynamicCache(config=config)
    for layer in cache.layers:
        if type(layer) is LinearAttentionLayer:
            layer.__class__ = AssignedStates
    return cache


class AssignedStates(LinearAttentionLayer):
    """States of linear attention that are assigned, where transformers copies them in place, which ends gradients."""

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
        """Keep the states of some rows, each as often as it is named."""
        for states in (self.conv_states, self.recurrent_states):
            for index, state in states.items():
                states[index] = None if state is None else state[indices]
