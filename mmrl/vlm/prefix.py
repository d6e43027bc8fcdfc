"""What prompts leave behind for the responses that follow them, computed once and used by many passes."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

from mmrl.vlm.payload import Prompt

if TYPE_CHECKING:
    from mmrl.vlm.policy import VlmPolicy

__all__ = ["Prefix", "PrefixStore"]

KEPT_BYTES = 2**31
"""Most memory that is spent on not reading prompts again between sampling and the first update."""


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

    def select(self, index: Tensor) -> Prefix:
        """Prompts `index` (n,), no wider than the longest of them."""
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


@dataclass
class _Shared:
    """A prefix that several micro-batches of an optimiser step read."""

    prompts: tuple[int, ...]
    """Identities of the prompts."""
    whole: Prefix
    """As computed, with its history."""
    leaves: Prefix
    """What the micro-batches see; their gradients gather here."""

    def backward(self) -> None:
        """Send the gathered gradients through the prompts, once."""
        pairs = zip(self.whole.tensors(), self.leaves.tensors(), strict=True)
        used = [(tensor, leaf.grad) for tensor, leaf in pairs if leaf.grad is not None]
        if used:
            torch.autograd.backward([tensor for tensor, _ in used], [grad for _, grad in used])


class PrefixStore:
    """Gives each forward pass its prefix, computed as seldom as the policy's weights allow.

    Two things are remembered: what the sampler computed, until the weights change, and, inside `open`, the prefix of
    the group whose micro-batches are running.

    Args:
        policy: computes prefixes.
    """

    def __init__(self, policy: VlmPolicy) -> None:
        self._policy = weakref.ref(policy)
        self._kept: weakref.WeakKeyDictionary[Prompt, tuple[Prefix, int]] = weakref.WeakKeyDictionary()
        self._state: tuple[object, ...] = ()
        self._shared: dict[str, _Shared] | None = None

    def keep(self, prompts: Sequence[Prompt], prefix: Prefix) -> None:
        """Remember the prefix of prompts that were just sampled from.

        Args:
            prompts: N prompts.
            prefix: theirs; with history it also serves one pass with gradient, after which it is forgotten. Without
                history it is remembered only as long as all that are take less than `KEPT_BYTES`.
        """
        self._forget_outdated()
        held = {id(kept): kept for kept, _ in self._kept.values()}
        size = prefix.num_bytes + sum(kept.num_bytes for kept in held.values())
        if size > KEPT_BYTES and not prefix.last_state.requires_grad:
            return
        for index, prompt in enumerate(prompts):
            self._kept[prompt] = (prefix, index)

    @property
    def is_open(self) -> bool:
        """Whether micro-batches are running that may belong to one group."""
        return self._shared is not None

    def get(self, prompts: Sequence[Prompt], view: str) -> Prefix:
        """Prefix of the prompts, with history where gradients are enabled.

        Args:
            prompts: N prompts.
            view: name of the form that these prompts are; one prefix a view is held open at a time.

        Returns:
            The prefix of all prompts in order.
        """
        if self._shared is not None:
            return self._open_prefix(self._shared, prompts, view)
        kept = self._from_kept(prompts)
        return kept if kept is not None else self._encode(prompts)

    @contextlib.contextmanager
    def open(self) -> Iterator[PrefixStore]:
        """Hold the prefix of a group while its micro-batches run, however many there are.

        Gradients gather at the prefix; `backward` sends them on, and so does the first micro-batch of another group.
        """
        before, self._shared = self._shared, {}
        try:
            yield self
        finally:
            self._shared = before

    def backward(self) -> None:
        """Send the gradients that gathered since through the prompts; call after the last micro-batch."""
        for shared in (self._shared or {}).values():
            shared.backward()
        if self._shared is not None:
            self._shared.clear()

    def _open_prefix(self, held: dict[str, _Shared], prompts: Sequence[Prompt], view: str) -> Prefix:
        names = tuple(id(prompt) for prompt in prompts)
        if view in held and held[view].prompts != names:
            held.pop(view).backward()
        if view not in held:
            whole = (None if torch.is_grad_enabled() else self._from_kept(prompts)) or self._encode(prompts)
            held[view] = _Shared(names, whole, whole.leaves() if torch.is_grad_enabled() else whole)
        return held[view].leaves

    def _from_kept(self, prompts: Sequence[Prompt]) -> Prefix | None:
        self._forget_outdated()
        found = [self._kept[prompt] for prompt in prompts if prompt in self._kept]
        if len(found) < len(prompts):
            return None
        graph = torch.is_grad_enabled()
        if graph and not all(prefix.last_state.requires_grad for prefix, _ in found):
            return None
        parts = _select_runs(found)
        if graph:
            self._kept.clear()  # a graph can be run backwards once
            return Prefix.concat(parts)
        return Prefix.concat([part.detach() for part in parts])

    def _encode(self, prompts: Sequence[Prompt]) -> Prefix:
        policy = self._policy()
        assert policy is not None
        return policy.encode_prefix(prompts)

    def _forget_outdated(self) -> None:
        policy = self._policy()
        assert policy is not None
        state = policy.weights_state()
        if state != self._state:
            self._kept.clear()
            self._state = state


def _select_runs(found: Sequence[tuple[Prefix, int]]) -> list[Prefix]:
    """The prompts found, taken from each prefix in runs as long as possible."""
    runs: list[tuple[Prefix, list[int]]] = []
    for prefix, index in found:
        if runs and runs[-1][0] is prefix:
            runs[-1][1].append(index)
        else:
            runs.append((prefix, [index]))
    return [
        prefix
        if index == list(range(len(prefix)))
        else prefix.select(torch.tensor(index, device=prefix.lengths.device))
        for prefix, index in runs
    ]
