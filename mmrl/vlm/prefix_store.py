"""Gives each forward pass the prefix of its prompts, computed as seldom as the weights allow."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mmrl.vlm.kept_prefill import KeptPrefill
from mmrl.vlm.payload import Prompt
from mmrl.vlm.prefix import Prefix


@dataclass
class _SharedPrefix:
    """A prefix that several micro-batches of an optimiser step read."""

    prompts: tuple[int, ...]
    """Identities of the prompts."""
    whole: Prefix
    """The computed prefix, with its history."""
    leaves: Prefix
    """Read by the micro-batches, whose gradients add up here."""

    def backward(self) -> None:
        """Backpropagate the sum of the gradients through the prompts, once."""
        pairs = zip(self.whole.tensors(), self.leaves.tensors(), strict=True)
        used = [(tensor, leaf.grad) for tensor, leaf in pairs if leaf.grad is not None]
        if used:
            torch.autograd.backward([tensor for tensor, _ in used], [grad for _, grad in used])


class PrefixStore:
    """The prefixes of a policy: those that sampling kept, and those that running micro-batches share.

    Inside `open`, the micro-batches of a group read one prefix. With gradient they read it as leaves: their backward
    passes end there, and one backward pass through the prompts follows the last of them. The diagram is in
    `docs/how_it_works/prefix_scope.md`.
    """

    def __init__(self, policy: Any) -> None:
        # weak: the policy holds this store, and its memory must not wait for a garbage collection
        self._policy: Callable[[], Any] = weakref.ref(policy)
        self._kept = KeptPrefill()
        self._shared: dict[str, _SharedPrefix] | None = None

    def keep(self, prompts: Sequence[Prompt], prefix: Prefix) -> None:
        """Keep the prefix of prompts that were just sampled from."""
        self._kept.put(prompts, prefix, self._policy().weights_state)

    @property
    def is_open(self) -> bool:
        """Whether micro-batches are running that may belong to one group."""
        return self._shared is not None

    def get(self, prompts: Sequence[Prompt], view: str) -> Prefix:
        """Prefix of the prompts, with history where gradients are enabled."""
        if self._shared is None:
            return self._kept_or_new(prompts)
        shared, names = self._shared, tuple(id(prompt) for prompt in prompts)
        if view in shared and shared[view].prompts != names:
            shared.pop(view).backward()
        if view not in shared:
            # a kept graph is left alone here: with gradient, micro-batches compute a prefix of their own
            whole = self._policy().encode_prefix(prompts) if torch.is_grad_enabled() else self._kept_or_new(prompts)
            shared[view] = _SharedPrefix(names, whole, whole.leaves() if torch.is_grad_enabled() else whole)
        return shared[view].leaves

    @contextlib.contextmanager
    def open(self) -> Iterator[PrefixStore]:
        """Share the prefix of a group between its micro-batches, however many there are.

        Gradients add up at the prefix; `backward` sends them on, and so does the first micro-batch of another group.
        """
        before, self._shared = self._shared, {}
        try:
            yield self
        finally:
            self._shared = before

    def backward(self) -> None:
        """Backpropagate what has added up through the prompts; call after the last micro-batch."""
        for shared in (self._shared or {}).values():
            shared.backward()
        if self._shared is not None:
            self._shared.clear()

    def _kept_or_new(self, prompts: Sequence[Prompt]) -> Prefix:
        policy = self._policy()
        kept = self._kept.take(prompts, policy.weights_state)
        return policy.encode_prefix(prompts) if kept is None else kept  # type: ignore[no-any-return]
