"""The prompts' prefill that sampling leaves for the update, and for how long it may be used."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Sequence
from enum import Enum

import torch

from mmrl.vlm.payload import Prompt
from mmrl.vlm.prefix import Prefix

KEPT_BYTES = 2**31
"""Most memory that is spent on not reading prompts again between sampling and the first update."""


class KeepPrefill(Enum):
    """Part of the prefill that sampling leaves behind."""

    NOTHING = "nothing"
    """Every later pass computes the prompts again."""
    VALUES = "values"
    """Keys, values and last states: for the passes without gradient before the first update (old log-probs, values)."""
    GRAPH = "graph"
    """The same with their autograd history, which also serves the forward and backward pass of one update."""


class KeptPrefill:
    """The prefixes that sampling left, by prompt, until the weights change; see `docs/how_it_works/kept_prefill.md`.

    A prefix with history serves one pass with gradient and is then forgotten, because a graph can be run backwards
    once. `weights` returns something that changes with the weights; it is called only where prefixes may be used.
    """

    def __init__(self) -> None:
        self._found: weakref.WeakKeyDictionary[Prompt, tuple[Prefix, int]] = weakref.WeakKeyDictionary()
        self._computed_by: Hashable = None

    def put(self, prompts: Sequence[Prompt], prefix: Prefix, weights: Callable[[], Hashable]) -> None:
        """Remember the prefix of prompts that were just sampled from."""
        self._forget_outdated(weights)
        held = {id(kept): kept for kept, _ in self._found.values()}
        size = prefix.num_bytes + sum(kept.num_bytes for kept in held.values())
        # a graph stays in any case: the update needs it, and would build it again at the same size
        if size > KEPT_BYTES and not prefix.last_state.requires_grad:
            return
        for index, prompt in enumerate(prompts):
            self._found[prompt] = (prefix, index)

    def take(self, prompts: Sequence[Prompt], weights: Callable[[], Hashable]) -> Prefix | None:
        """Prefix of the prompts, with history where gradients are enabled; None where it is not here as a whole."""
        if not any(prompt in self._found for prompt in prompts):
            return None  # before the weights are read, which takes time
        self._forget_outdated(weights)
        found = [self._found[prompt] for prompt in prompts if prompt in self._found]
        with_history = torch.is_grad_enabled()
        if len(found) < len(prompts):
            return None
        if with_history and not all(prefix.last_state.requires_grad for prefix, _ in found):
            return None
        parts = _select_runs(found)
        if with_history:
            self._found.clear()
            return Prefix.concat(parts)
        return Prefix.concat([part.detach() for part in parts])

    def _forget_outdated(self, weights: Callable[[], Hashable]) -> None:
        now = weights()
        if now != self._computed_by:
            self._found.clear()
            self._computed_by = now


def _select_runs(found: Sequence[tuple[Prefix, int]]) -> list[Prefix]:
    """The prompts found, taken from each prefix in runs as long as possible."""
    runs: list[tuple[Prefix, list[int]]] = []
    for prefix, index in found:
        if not runs or runs[-1][0] is not prefix:
            runs.append((prefix, []))
        runs[-1][1].append(index)
    return [prefix if index == list(range(len(prefix))) else prefix.select(index) for prefix, index in runs]
