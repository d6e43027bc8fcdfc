"""The part of a prompt's forward pass that its responses need: keys, values and last states."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional


@dataclass
class Prefix:
    """Keys, values and last states of N prompts, right-padded to the longest, P tokens."""

    keys: list[Tensor]
    """One for each decoder layer, (N, Hk, P, d), rotary applied."""
    values: list[Tensor]
    """One for each decoder layer, (N, Hk, P, d)."""
    lengths: Tensor
    """(N,) int64, tokens of each prompt."""
    next_position: Tensor
    """(N,) int64, rotary position of the first response token, the same along all three axes."""
    last_state: Tensor
    """(N, H), state after the final norm of each prompt's last token."""

    def __len__(self) -> int:
        """Number of prompts N."""
        return self.lengths.shape[0]

    @property
    def num_bytes(self) -> int:
        """Memory of all keys and values."""
        return sum(x.numel() * x.element_size() for x in (*self.keys, *self.values))

    @property
    def real(self) -> Tensor | None:
        """(N, P) bool, False on padding; None where nothing is padded."""
        width = self.keys[0].shape[2]
        if bool((self.lengths == width).all()):
            return None
        return torch.arange(width, device=self.lengths.device) < self.lengths[:, None]

    def select(self, index: Tensor | list[int]) -> Prefix:
        """Prompts `index` (n,), no wider than the longest of them."""
        index = torch.as_tensor(index, device=self.lengths.device)
        lengths = self.lengths[index]
        width = int(lengths.max())
        return Prefix(
            keys=[x[index, :, :width] for x in self.keys],
            values=[x[index, :, :width] for x in self.values],
            lengths=lengths,
            next_position=self.next_position[index],
            last_state=self.last_state[index],
        )

    def detach(self) -> Prefix:
        """The same numbers without their history."""
        return self._map(Tensor.detach)

    def leaves(self) -> Prefix:
        """The same numbers as leaves that collect the gradients of the passes that use them."""
        return self._map(lambda x: x.detach().requires_grad_(x.requires_grad))

    def tensors(self) -> list[Tensor]:
        """Everything that gradients flow through."""
        return [*self.keys, *self.values, self.last_state]

    def _map(self, function: Callable[[Tensor], Tensor]) -> Prefix:
        return Prefix(
            keys=[function(x) for x in self.keys],
            values=[function(x) for x in self.values],
            lengths=self.lengths,
            next_position=self.next_position,
            last_state=function(self.last_state),
        )

    @staticmethod
    def concat(parts: Sequence[Prefix]) -> Prefix:
        """Prompts of all parts, one after another."""
        if len(parts) == 1:
            return parts[0]
        width = max(part.keys[0].shape[2] for part in parts)

        def join(layers: Sequence[Tensor]) -> Tensor:
            return torch.cat([functional.pad(x, (0, 0, 0, width - x.shape[2])) for x in layers])

        return Prefix(
            keys=[join(layers) for layers in zip(*(part.keys for part in parts), strict=True)],
            values=[join(layers) for layers in zip(*(part.values for part in parts), strict=True)],
            lengths=torch.cat([part.lengths for part in parts]),
            next_position=torch.cat([part.next_position for part in parts]),
            last_state=torch.cat([part.last_state for part in parts]),
        )
