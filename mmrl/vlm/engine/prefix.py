"""What responses need of a prompt's forward pass (keys, values, last states), and decoding from it token by token."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from itertools import accumulate
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from mmrl.core.payload import take_rows, to_device
from mmrl.vlm.data.prompt import Prompt
from mmrl.vlm.engine.attention import FIXED_ROOM, TokenRows
from mmrl.vlm.engine.step_graph import StepGraph


@dataclass
class CachedPart:
    """Prompts in one transformers cache, right-padded to the longest."""

    numbers: Tensor
    """(n,) int64, index of each prompt in the prefix."""
    cache: Any
    """Their keys, values and other states. Never modified: `select` copies it before decoding extends it."""
    lengths: Tensor
    """(n,) int64, tokens of each prompt."""
    next_position: Tensor
    """(n,) int64, position of the first response token."""
    last_state: Tensor
    """(n, H), state after the final norm of each prompt's last token."""
    real: Tensor | None = None
    """(n, P) bool, False on padding; None if nothing is padded."""
    routes: Tensor | None = None
    """(n, 2, E), sums of `Routes` over each prompt; None without the router loss."""

    def select(self, rows: Tensor) -> CachedPart:
        """Prompts `rows` (b,), with repeats, in a separate cache."""
        return replace(
            self.map(lambda state: take_rows(state, rows)),
            numbers=self.numbers[rows],
            lengths=self.lengths[rows],
            next_position=self.next_position[rows],
            real=None if self.real is None else self.real[rows],
        )

    def fixed(self, room: int) -> CachedPart:
        """The same prompts in memory that does not move while up to `room` tokens are read."""
        from mmrl.vlm.engine.cache import fixed_cache

        real = None if self.real is None else functional.pad(self.real, (0, room), value=True)
        return replace(self, cache=fixed_cache(self.cache, room), real=real)

    def map(self, function: Callable[[Tensor], Tensor]) -> CachedPart:
        """The same prompts with a function applied to all states."""
        from mmrl.vlm.engine.cache import mapped

        routes = None if self.routes is None else function(self.routes)
        return replace(self, cache=mapped(self.cache, function), last_state=function(self.last_state), routes=routes)


@dataclass
class Prefix:
    """Caches and last states of N prompts."""

    parts: list[CachedPart]

    def __len__(self) -> int:
        """Number of prompts N."""
        return sum(len(part.numbers) for part in self.parts)

    @property
    def last_state(self) -> Tensor:
        """(N, H), state after the final norm of each prompt's last token."""
        return torch.cat([part.last_state for part in self.parts])[self._order]

    @property
    def num_bytes(self) -> int:
        """Memory of all states."""
        return sum(x.numel() * x.element_size() for x in self.tensors())

    @property
    def routes(self) -> Tensor | None:
        """(N, 2, E), sums of `Routes` over each prompt; None without the router loss."""
        found = [part.routes for part in self.parts if part.routes is not None]
        return torch.cat(found)[self._order] if found else None

    @property
    def _order(self) -> Tensor:
        """(N,) place of each prompt in the parts, which are ordered by prompt length."""
        return torch.cat([part.numbers for part in self.parts]).argsort()

    @property
    def has_history(self) -> bool:
        """Whether gradients can flow into the prompts."""
        return any(part.last_state.requires_grad for part in self.parts)

    def select(self, index: Tensor | list[int]) -> Prefix:
        """Select the prompts `index` (n,)."""
        parts = []
        for part in self.parts:
            wanted = torch.as_tensor(index, device=part.numbers.device)
            # a prompt may be wanted several times: each match becomes a row, numbered by its place in `index`
            numbers, rows = torch.nonzero(wanted[:, None] == part.numbers, as_tuple=True)
            if len(rows):
                parts.append(replace(part.select(rows), numbers=numbers))
        return Prefix(parts)

    def detach(self) -> Prefix:
        """The same values without autograd history."""
        return Prefix([part.map(Tensor.detach) for part in self.parts])

    def leaves(self) -> Prefix:
        """The same numbers as leaves, which collect the gradients of the passes that use them."""
        return Prefix([part.map(lambda x: x.detach().requires_grad_(x.requires_grad)) for part in self.parts])

    def tensors(self) -> list[Tensor]:
        """All tensors that gradients flow through."""
        from mmrl.vlm.engine.cache import states

        found = [x for part in self.parts for x in (*states(part.cache), part.last_state, part.routes)]
        return [x for x in found if x is not None]

    @staticmethod
    def concat(parts: Sequence[Prefix]) -> Prefix:
        """Concatenate the prompts of all parts."""
        starts = [0, *accumulate(len(part) for part in parts)]
        pairs = [(part, start) for prefix, start in zip(parts, starts, strict=False) for part in prefix.parts]
        return Prefix([replace(part, numbers=part.numbers + start) for part, start in pairs])


KEPT_BYTES = 2**31
"""Maximum memory for prefixes kept between sampling and the first update."""


class KeepPrefill(Enum):
    """Part of the prefill that sampling keeps."""

    NOTHING = "nothing"
    """Every later pass recomputes the prompts."""
    VALUES = "values"
    """Keys, values and last states: for the passes without gradient before the first update (old log-probs, values)."""
    GRAPH = "graph"
    """The same with their autograd history, which also serves the forward and backward pass of one update."""


class KeptPrefill:
    """The prefixes that sampling kept, by prompt, until the weights change; see `docs/internals/how_it_works.md`.

    A prefix with history serves one pass with gradient and is then dropped, because backward can run through a graph
    only once. `weights` returns a value that changes with the weights; it is called only if a prefix may be used.
    """

    def __init__(self) -> None:
        # weak keys: a prefix is freed as soon as no rollout holds any of its prompts
        self._found: weakref.WeakKeyDictionary[Prompt, tuple[Prefix, int]] = weakref.WeakKeyDictionary()
        self._computed_by: Hashable = None

    def put(self, prompts: Sequence[Prompt], prefix: Prefix, weights: Callable[[], Hashable]) -> None:
        """Keep the prefix of prompts that were just sampled from; without history, only up to `KEPT_BYTES`."""
        self._forget_outdated(weights)
        # many prompts point into one prefix, whose memory counts once
        held = {id(kept): kept for kept, _ in self._found.values()}
        size = prefix.num_bytes + sum(kept.num_bytes for kept in held.values())
        # a graph stays in any case: the update needs it, and would build it again at the same size
        if size > KEPT_BYTES and not prefix.has_history:
            return
        for index, prompt in enumerate(prompts):
            self._found[prompt] = (prefix, index)

    def take(self, prompts: Sequence[Prompt], weights: Callable[[], Hashable]) -> Prefix | None:
        """Prefix of the prompts, with history if gradients are enabled; None unless all prompts were kept."""
        if not any(prompt in self._found for prompt in prompts):
            return None  # before the weights are read, which takes time
        self._forget_outdated(weights)
        found = [self._found[prompt] for prompt in prompts if prompt in self._found]
        with_history = torch.is_grad_enabled()
        # all or nothing: computing the missing prompts alone would be a second pass through the model
        if len(found) < len(prompts):
            return None
        # values alone would end the gradient at the prompt
        if with_history and not all(prefix.has_history for prefix, _ in found):
            return None
        parts = _select_runs(found)
        if with_history:
            # backward frees the graph, so nobody may read these prefixes again
            self._found.clear()
            return Prefix.concat(parts)
        return Prefix.concat([part.detach() for part in parts])

    def _forget_outdated(self, weights: Callable[[], Hashable]) -> None:
        # any change of weights, adapter or precision makes all prefixes wrong, not only those asked for
        now = weights()
        if now != self._computed_by:
            self._found.clear()
            self._computed_by = now


def _select_runs(found: Sequence[tuple[Prefix, int]]) -> list[Prefix]:
    """The prompts found, taken from each prefix in the longest possible runs."""
    runs: list[tuple[Prefix, list[int]]] = []
    for prefix, index in found:
        # the order of the prompts has to stay, so only neighbours from one prefix are selected together
        if not runs or runs[-1][0] is not prefix:
            runs.append((prefix, []))
        runs[-1][1].append(index)
    # a whole prefix is passed on as it is: selecting from it would copy all keys and values
    return [prefix if index == list(range(len(prefix))) else prefix.select(index) for prefix, index in runs]


@dataclass
class _SharedPrefix:
    """A prefix that several micro-batches of an optimiser step read."""

    prompts: tuple[int, ...]
    """The `id` of each prompt."""
    whole: Prefix
    """The computed prefix, with its history."""
    leaves: Prefix
    """What the micro-batches read; their gradients accumulate here."""

    def backward(self) -> None:
        """Backpropagate the accumulated gradients through the prompts once."""
        pairs = zip(self.whole.tensors(), self.leaves.tensors(), strict=True)
        # a leaf without gradient has no history or was not read; autograd takes no None for a tensor
        used = [(tensor, leaf.grad) for tensor, leaf in pairs if leaf.grad is not None]
        if used:
            torch.autograd.backward([tensor for tensor, _ in used], [grad for _, grad in used])


class PrefixStore:
    """The prefixes of a policy: those kept from sampling, and those shared by the running micro-batches.

    Inside `open`, the micro-batches of a group read one prefix. With gradient they read it as leaves: their backward
    passes end there, and one backward pass through the prompts follows the last micro-batch. See the diagram in
    `docs/internals/how_it_works.md`.
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
        """Whether a prefix scope is open, in which micro-batches may share a group."""
        return self._shared is not None

    def get(self, prompts: Sequence[Prompt], view: str) -> Prefix:
        """Prefix of the prompts, with history if gradients are enabled."""
        if self._shared is None:
            return self._kept_or_new(prompts)
        # identities are enough: the rollouts hold their prompts for as long as the scope is open
        shared, names = self._shared, tuple(id(prompt) for prompt in prompts)
        # micro-batches come group by group, so the gradients of the group before are complete
        if view in shared and shared[view].prompts != names:
            shared.pop(view).backward()
        if view not in shared:
            # a kept graph is not used here: it is kept only for one update on all rows, without micro-batches
            whole = self._policy().encode_prefix(prompts) if torch.is_grad_enabled() else self._kept_or_new(prompts)
            shared[view] = _SharedPrefix(names, whole, whole.leaves() if torch.is_grad_enabled() else whole)
        return shared[view].leaves

    @contextlib.contextmanager
    def open(self) -> Iterator[PrefixStore]:
        """Share the prefix of a group between any number of its micro-batches.

        Gradients accumulate at the prefix until `backward`, or until the first micro-batch of another group.
        """
        # not cleared at the end but restored, so that scopes can be nested
        before, self._shared = self._shared, {}
        try:
            yield self
        finally:
            self._shared = before

    def backward(self) -> None:
        """Backpropagate the accumulated gradient through the prompts; call after the last micro-batch."""
        for shared in (self._shared or {}).values():
            shared.backward()
        if self._shared is not None:
            self._shared.clear()

    def _kept_or_new(self, prompts: Sequence[Prompt]) -> Prefix:
        policy = self._policy()
        kept = self._kept.take(prompts, policy.weights_state)
        return policy.encode_prefix(prompts) if kept is None else kept


class Decoder(Protocol):
    """Rows that are decoded together."""

    def keep(self, index: Tensor) -> None:
        """Keep only the rows `index` (n,), which is on the CPU."""

    def advance(self, token: Tensor) -> Tensor:
        """Read one token (b,), or embedding (b, H), of each row; returns the states (b, H) that predict the next."""

    def next_logp(self, states: Tensor, temperature: float) -> Tensor:
        """Log-probabilities (b, V) of the next token."""


class CacheDecoder:
    """Rows that are decoded together; `part` contains their prompts, one per row, in a separate cache.

    Args:
        policy: the model.
        reader: its `ModelReader`.
        part: the prompts.
        replays: whether a GPU may repeat the step of a token as a CUDA graph.
    """

    def __init__(self, policy: Any, reader: Any, part: CachedPart, *, replays: bool = False) -> None:
        self._policy, self._reader, self._part = policy, reader, part
        self._fixed, self._room = replays, 0
        self._graph = StepGraph(replays, reader.refuse_replays)

    def keep(self, index: Tensor) -> None:
        """Drop all rows but some."""
        self._part = self._part.select(to_device(index, self._part.lengths.device))
        self._graph.forget()

    def advance(self, token: Tensor) -> Tensor:
        """Read one token (b,), or embedding (b, H), of each row; returns the states (b, H) that predict the next."""
        if self._fixed:
            if self._room == 0:
                self._room = FIXED_ROOM
                self._part = self._part.fixed(self._room)
                self._graph.forget()
            self._room -= 1
        return self._graph(self._step, token)

    def _step(self, token: Tensor) -> Tensor:
        return self._reader.advance(self._policy, token[:, None], self._part, fixed=self._fixed)[:, -1]

    def next_logp(self, states: Tensor, temperature: float) -> Tensor:
        """Log-probabilities (b, V) of the next token."""
        return self._policy.next_logp(states, temperature)


class GroupDecoder:
    """Rows that share the keys and values of their prompts, as in Hydragen (arXiv 2402.05099).

    Args:
        policy: the model.
        reader: its `ModelReader`, whose `joins` is True.
        part: N prompts.
        prompt: (b,) int64 on the CPU, the prompt of each row in ascending order; every prompt has a row.
        replays: whether a GPU repeats the step of a token as a CUDA graph; None: as the reader says.
    """

    def __init__(
        self, policy: Any, reader: Any, part: CachedPart, prompt: Tensor, *, replays: bool | None = None
    ) -> None:
        self._policy, self._reader = policy, reader
        self._graph = StepGraph(reader.replays(policy) if replays is None else replays, reader.refuse_replays)
        layers = part.cache.layers
        keys, values = [layer.keys for layer in layers], [layer.values for layer in layers]
        self._rows = TokenRows(keys, values, part.real, prompt, fixed=self._graph.wanted)
        self._position = part.next_position[to_device(prompt, part.next_position.device)]

    def keep(self, index: Tensor) -> None:
        """Keep only the rows `index` (n,) and their prompts."""
        self._rows.keep(index)
        self._position = self._position[to_device(index, self._position.device)]
        self._graph.forget()

    def cached(self, index: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Keys and values of the tokens that rows (n,) have read, for each layer (n, Hk, t, d)."""
        return self._rows.cached(index)

    def advance(self, token: Tensor) -> Tensor:
        """Read one token (b,), or embedding (b, H), of each row; returns the states (b, H) that predict the next."""
        if self._rows.make_room():
            self._graph.forget()
        return self._graph(self._step, token)

    def _step(self, token: Tensor) -> Tensor:
        self._rows.begin_step()
        position = self._position[:, None].expand(3, -1, -1)
        states: Tensor = self._reader.run_shared(self._policy, token[:, None], position, self._rows)
        # rows that have ended go on until they are dropped, perhaps beyond the model's positions
        self._position.add_(1).clamp_(max=self._policy.positions - 1)
        return states[:, -1]

    def next_logp(self, states: Tensor, temperature: float) -> Tensor:
        """Log-probabilities (b, V) of the next token."""
        return self._policy.next_logp(states, temperature)


def make_decoder(
    policy: Any, reader: Any, part: CachedPart, prompt: Tensor, *, replays: bool | None = None
) -> CacheDecoder | GroupDecoder:
    """A decoder of rows whose prompts in a part are `prompt` (b,) int64, ascending, on the CPU."""
    live, own = torch.unique_consecutive(prompt, return_inverse=True)
    replays = reader.replays(policy) if replays is None else replays
    if reader.joins(policy):
        used = part if len(live) == len(part.lengths) else part.select(live)
        return GroupDecoder(policy, reader, used, own, replays=replays)
    return CacheDecoder(policy, reader, part.select(prompt), replays=replays)
