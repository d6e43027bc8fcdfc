"""Sampling the turns of many conversations at once, each continuing from what it has read."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from mmrl.agents.histories import Histories
from mmrl.vlm.decoder import PrefixDecoder
from mmrl.vlm.generation import GenerationState, decode
from mmrl.vlm.lean_weights import lean_weights, unsupported_reason
from mmrl.vlm.payload import Prompt, join_prompts
from mmrl.vlm.policy import VlmPolicy
from mmrl.vlm.reading import text_prompt
from mmrl.vlm.sampler import sample
from mmrl.vlm.sampling import SamplerConfig, Samples


class TurnSampler:
    """Conversations of B rows, sampled turn by turn.

    Keys, values and vision features of the history stay from turn to turn, and the decoder's cache of a sampled turn is
    appended to them, so that no token passes the model twice. The log-probabilities are those of the whole conversation
    up to then. Models that the lean decoder does not support, and `reread`, read the whole conversation in every turn.

        turns = TurnSampler(policy, config, rows)
        turns.begin(rows, prompts, group)
        samples = turns.sample(rows, uniforms)
        turns.extend(rows, observations)
    """

    def __init__(self, policy: VlmPolicy, config: SamplerConfig, rows: int, *, reread: bool = False) -> None:
        self._policy, self._config, self._rows = policy, config, rows
        keeps = config.lean and unsupported_reason(policy) is None and not reread
        self._histories = Histories(policy, rows) if keeps else None
        self._parts: dict[int, list[Prompt]] = {}
        """The whole conversation of each row."""
        self._unread: dict[int, Tensor] = {}
        """Sampled tokens that the model has not read yet."""

    def begin(self, rows: Tensor, prompts: Sequence[Prompt], prompt: Tensor) -> None:
        """Start or restart rows (b,) after the prompts with these indices (b,)."""
        for row, number in zip(rows.tolist(), prompt.tolist(), strict=True):
            self._parts[row] = [prompts[number]]
            self._unread.pop(row, None)
        if self._histories is not None:
            with self._sampling():
                self._histories.begin(rows, prompts, prompt)

    def extend(self, rows: Tensor, parts: Sequence[Prompt]) -> None:
        """Append an observation to each of some rows."""
        given = []
        for row, part in zip(rows.tolist(), parts, strict=True):
            unread = self._unread.pop(row, None)
            given.append(part if unread is None else join_prompts([text_prompt(unread), part]))
            self._parts[row].append(given[-1])
        if self._histories is not None:
            with self._sampling():
                self._histories.extend(rows, given)

    def sample(self, rows: Tensor, uniforms: Tensor | None) -> Samples:
        """Sample the next turn of some rows from uniform numbers (b, max_new_tokens); None is greedy."""
        with self._sampling():
            if self._histories is not None:
                drawn = self._continue(self._histories, rows, uniforms)
            else:
                prompts = [join_prompts(self._parts[row]) for row in rows.tolist()]
                drawn = sample(self._policy, prompts, 1, self._config, uniforms)
        lengths = drawn.mask.sum(1).long().tolist()
        ids = drawn.response_ids.cpu()
        for index, (row, length) in enumerate(zip(rows.tolist(), lengths, strict=True)):
            # With a history, only the last token was drawn without being read.
            self._unread[row] = ids[index, 0 if self._histories is None else length - 1 : length]
        return drawn

    def room(self, rows: Tensor) -> list[int]:
        """Positions of the model left in each of some rows (b,), unread tokens counted as used."""
        if self._histories is not None:
            read = self._histories.lengths[rows].tolist()
        else:
            read = [sum(len(part) for part in self._parts[row]) for row in rows.tolist()]
        unread = [len(self._unread.get(row, ())) for row in rows.tolist()]
        return [self._policy.positions - a - b for a, b in zip(read, unread, strict=True)]

    def drop(self, rows: Tensor) -> None:
        """Forget rows (b,) whose conversation is over."""
        for row in rows.tolist():
            self._parts.pop(row, None)
            self._unread.pop(row, None)
        if self._histories is not None and len(rows):
            self._histories.drop(rows)

    def _continue(self, histories: Histories, rows: Tensor, uniforms: Tensor | None) -> Samples:
        """Sample after the kept histories, and append to them what the decoder has read."""
        draw = GenerationState(self._policy, self._config, len(rows), uniforms)
        weights = lean_weights(self._policy)
        for chunk in torch.arange(len(rows), device=rows.device).split(self._config.batch_rows):
            prefix = histories.prefix(rows[chunk])
            own = torch.arange(len(chunk), device=rows.device)
            steps = max(self._config.max_new_tokens - 1, 1)
            decoder = _KeepingDecoder(PrefixDecoder(weights, prefix, own, steps, self._policy.banned_ids), own)
            decode(draw, decoder, chunk, draw.max_positions - prefix.lengths, prefix.last_state)
            decoder.finish()
            read = draw.mask[:, chunk].sum(0).long() - 1
            for index, keys, values in decoder.left:
                histories.append(rows[chunk[index]], read[index], keys, values)
        return draw.collect()

    @contextlib.contextmanager
    def _sampling(self) -> Iterator[None]:
        training = self._policy.training
        self._policy.eval()  # checkpointed layers drop the cache in training mode
        try:
            with torch.no_grad():
                yield
        finally:
            self._policy.train(training)


class _KeepingDecoder:
    """A decoder that saves the keys and values of rows that leave it."""

    def __init__(self, decoder: PrefixDecoder, rows: Tensor) -> None:
        self._decoder, self._rows, self._read = decoder, rows, 0
        self.next_logp = decoder.next_logp
        self.left: list[tuple[Tensor, list[Tensor], list[Tensor]]] = []
        """Rows (n,) that left together, with their keys and values by layer (n, Hk, t, d)."""

    def keep(self, index: Tensor) -> None:
        """Drop all other rows."""
        gone = torch.ones_like(self._rows, dtype=torch.bool)
        gone[index] = False
        self._save(torch.nonzero(gone).flatten())
        self._rows = self._rows[index]
        self._decoder.keep(index)

    def advance(self, token: Tensor) -> Tensor:
        """Read one token of each row and return the states (b, H) that predict the next."""
        self._read += 1
        return self._decoder.advance(token)

    def finish(self) -> None:
        """Save the remaining rows."""
        self._save(torch.arange(len(self._rows), device=self._rows.device))

    def _save(self, index: Tensor) -> None:
        if self._read and len(index):
            self.left.append((self._rows[index], *self._decoder.cached(index)))
