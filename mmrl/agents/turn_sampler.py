"""Sampling the turns of many conversations at once, each going on from what it has read."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from mmrl.agents.histories import Histories
from mmrl.vlm.decoder import PrefixDecoder
from mmrl.vlm.generation import GenerationState, decode
from mmrl.vlm.lean_weights import LeanWeights, lean_weights, unsupported_reason
from mmrl.vlm.payload import Prompt, join_prompts
from mmrl.vlm.policy import VlmPolicy
from mmrl.vlm.reading import text_prompt
from mmrl.vlm.sampler import sample_with
from mmrl.vlm.sampling import SamplerConfig, Samples


def keeps_histories(policy: VlmPolicy, config: SamplerConfig) -> bool:
    """Whether turns go on from what was read before; otherwise each turn reads its whole conversation again."""
    return config.lean and unsupported_reason(policy) is None


class TurnSampler:
    """Conversations of B rows, sampled turn by turn.

    Keys, values and vision features of the history stay from turn to turn, and what the decoder leaves of a sampled
    turn is part of them, so that no token passes the model twice. The log-probabilities are those of the whole
    conversation up to then.

        turns = TurnSampler(policy, config, rows)
        turns.begin(rows, prompts, group)
        samples = turns.sample(rows, uniforms)
        turns.extend(rows, observations)
    """

    def __init__(self, policy: VlmPolicy, config: SamplerConfig, rows: int, *, reread: bool = False) -> None:
        self._policy, self._config, self._rows = policy, config, rows
        self._kept = keeps_histories(policy, config) and not reread
        self._histories = Histories(policy, rows) if self._kept else None
        self._whole: dict[int, list[Prompt]] = {}
        self._unread: dict[int, Tensor] = {}

    def begin(self, rows: Tensor, prompts: Sequence[Prompt], prompt: Tensor) -> None:
        """Start rows behind prompts; rows that had begun start anew."""
        for row, number in zip(rows.tolist(), prompt.tolist(), strict=True):
            self._whole[row] = [prompts[number]]
            self._unread.pop(row, None)
        if self._histories is not None:
            with self._sampling():
                self._histories.begin(rows, prompts, prompt)

    def extend(self, rows: Tensor, parts: Sequence[Prompt]) -> None:
        """Put what rows were given behind what they have sampled."""
        given = []
        for row, part in zip(rows.tolist(), parts, strict=True):
            unread = self._unread.pop(row, None)
            given.append(part if unread is None else join_prompts([text_prompt(unread), part]))
            self._whole[row].append(given[-1])
        if self._histories is not None:
            with self._sampling():
                self._histories.extend(rows, given)

    def sample(self, rows: Tensor, uniforms: Tensor | None) -> Samples:
        """Draw the next turn of some rows."""
        with self._sampling():
            drawn = self._go_on(rows, uniforms) if self._histories is not None else self._reread(rows, uniforms)
        lengths = drawn.mask.sum(1).long().tolist()
        ids = drawn.response_ids.cpu()
        for place, (row, length) in enumerate(zip(rows.tolist(), lengths, strict=True)):
            if self._histories is not None:  # the last token was drawn, not read
                self._unread[row] = ids[place, length - 1 : length]
            else:
                self._unread[row] = ids[place, :length]
        return drawn

    def room(self, rows: Tensor) -> list[int]:
        """Tokens that the model has positions for behind each of some rows (b,), those not read yet counted."""
        unread = [len(self._unread.get(row, ())) for row in rows.tolist()]
        if self._histories is not None:
            read = self._histories.lengths[rows].tolist()
        else:
            read = [sum(len(part) for part in self._whole[row]) for row in rows.tolist()]
        return [self._policy.positions - a - b for a, b in zip(read, unread, strict=True)]

    def drop(self, rows: Tensor) -> None:
        """Forget rows (b,) whose conversation is over."""
        for row in rows.tolist():
            self._whole.pop(row, None)
            self._unread.pop(row, None)
        if self._histories is not None and len(rows):
            self._histories.drop(rows)

    def _go_on(self, rows: Tensor, uniforms: Tensor | None) -> Samples:
        assert self._histories is not None
        draw = GenerationState(self._policy, self._config, len(rows), uniforms)
        weights = lean_weights(self._policy)
        places = torch.arange(len(rows), device=rows.device)
        for chunk in places.split(self._config.batch_rows):
            self._decode(draw, weights, rows, chunk)
        return draw.collect()

    def _decode(self, draw: GenerationState, weights: LeanWeights, rows: Tensor, chunk: Tensor) -> None:
        assert self._histories is not None
        prefix = self._histories.prefix(rows[chunk])
        own = torch.arange(len(chunk), device=rows.device)
        steps = max(self._config.max_new_tokens - 1, 1)
        decoder = _KeepingDecoder(PrefixDecoder(weights, prefix, own, steps, self._policy.banned_ids), own)
        decode(draw, decoder, chunk, draw.max_positions - prefix.lengths, prefix.last_state)
        decoder.finish()
        read = draw.mask[:, chunk].sum(0).long() - 1
        for index, keys, values in decoder.left:
            self._histories.append(rows[chunk[index]], read[index], keys, values)

    def _reread(self, rows: Tensor, uniforms: Tensor | None) -> Samples:
        """Sample behind whole conversations, each read from its beginning."""
        prompts = [join_prompts(self._whole[row]) for row in rows.tolist()]
        return sample_with(self._policy, prompts, 1, self._config, uniforms)

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
    """A decoder that sets aside what rows have read when they leave it."""

    def __init__(self, decoder: PrefixDecoder, rows: Tensor) -> None:
        self._decoder, self._rows, self._read = decoder, rows, 0
        self.left: list[tuple[Tensor, list[Tensor], list[Tensor]]] = []
        """Rows (n,) that left together, with their keys and values by layer (n, Hk, t, d)."""

    def keep(self, index: Tensor) -> None:
        """Drop all rows but some."""
        gone = torch.ones_like(self._rows, dtype=torch.bool)
        gone[index] = False
        self._set_aside(torch.nonzero(gone).flatten())
        self._rows = self._rows[index]
        self._decoder.keep(index)

    def advance(self, token: Tensor) -> Tensor:
        """Read one token of each row and return the states (b, H) that predict the next."""
        self._read += 1
        return self._decoder.advance(token)

    def next_logp(self, states: Tensor, temperature: float) -> Tensor:
        """Log-probabilities (b, V) of the next token."""
        return self._decoder.next_logp(states, temperature)

    def finish(self) -> None:
        """Set aside the rows that are left."""
        self._set_aside(torch.arange(len(self._rows), device=self._rows.device))

    def _set_aside(self, index: Tensor) -> None:
        if self._read and len(index):
            self.left.append((self._rows[index], *self._decoder.cached(index)))
