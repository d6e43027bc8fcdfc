"""Sampling the turns of many conversations in one batch, so that no turn re-reads its history.

A turn appends to the keys and values of its row: what the row was given since the last turn passes the vision tower and
the language model once, and the sampled tokens stay as the decoder leaves them. Nothing is ever dropped from the
middle; a row whose history is truncated starts again with another prompt.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from mmrl.core.payload import to_device, to_host
from mmrl.vlm.data.prompt import Prompt, join_prompts
from mmrl.vlm.engine.cache import filled_cache
from mmrl.vlm.engine.prefix import CachedPart, GroupDecoder
from mmrl.vlm.engine.rows import text_prompt
from mmrl.vlm.engine.vlm_policy import VlmPolicy
from mmrl.vlm.engine.vlm_sampler import GenerationState, SamplerConfig, Samples, decode, sample
from mmrl.vlm.inference.inference_sampler import EngineSampler

GROWTH = 1.5
"""Factor by which the tables grow if they are too small."""


class Histories:
    """Keys, values and last states of B rows of different lengths; row numbers and lengths are on the CPU."""

    def __init__(self, policy: VlmPolicy, rows: int) -> None:
        self._policy = policy
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []
        self.lengths = torch.zeros(rows, dtype=torch.int64)
        """(B,) int64, tokens that each row has read."""
        self.next_position = torch.zeros(rows, dtype=torch.int64)
        """(B,) int64, rotary position of each row's next token."""
        self._last_state = torch.zeros(rows, policy.width, device=policy.device)

    def begin(self, rows: Tensor, prompts: Sequence[Prompt], prompt: Tensor) -> None:
        """Start or restart rows (b,) from prompts that they may share; each prompt is read once."""
        (read,) = self._policy.encode_prefix(prompts).select(prompt).parts
        keys = [layer.keys for layer in read.cache.layers]
        values = [layer.values for layer in read.cache.layers]
        # heads, widths and dtypes are those of the first prefill
        if not self._keys:
            count = len(self.lengths)
            # no columns yet: `_append` grows the tables
            self._keys = [layer.new_zeros(count, layer.shape[1], 0, layer.shape[3]) for layer in keys]
            self._values = [layer.new_zeros(count, layer.shape[1], 0, layer.shape[3]) for layer in values]
            self._last_state = self._last_state.to(read.last_state.dtype)
        # a restarted row writes over its old history
        lengths, positions = to_host([read.lengths, read.next_position])
        self.lengths[rows] = 0
        self._append(rows, lengths, [*zip(keys, values, strict=True)])
        self.next_position[rows] = positions
        self._last_state[self._on_device(rows)] = read.last_state.to(self._last_state.dtype)

    def extend(self, rows: Tensor, parts: Sequence[Prompt]) -> None:
        """Read the parts that were appended to some rows (b,), packed into one pass."""
        lengths = torch.tensor([len(part) for part in parts])
        last, layers = self._policy.reader.read_behind(self._policy, self.prefix(rows), parts)
        self._append(rows, lengths, layers)
        self.next_position[rows] += torch.tensor([part.next_position for part in parts])
        # the state behind the observation, from which the next turn's first token is drawn
        self._last_state[self._on_device(rows)] = last.to(self._last_state.dtype)

    def append(self, rows: Tensor, lengths: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor]) -> None:
        """Append sampled tokens that a decoder has read; the last state is then that before the next of them."""
        self._append(rows, lengths, [*zip(keys, values, strict=True)])
        self.next_position[rows] += lengths

    def prefix(self, rows: Tensor) -> CachedPart:
        """The histories of rows (b,) as prompts to continue."""
        # the widest of these rows, not of the table: attention runs over every column
        width, index = int(self.lengths[rows].max()), self._on_device(rows)
        lengths = self._on_device(self.lengths[rows])
        real = torch.arange(width, device=lengths.device) < lengths[:, None]
        return CachedPart(
            numbers=torch.arange(len(rows), device=lengths.device),
            cache=filled_cache(
                self._policy.network.config,
                [layer[index, :, :width] for layer in self._keys],
                [layer[index, :, :width] for layer in self._values],
            ),
            lengths=lengths,
            next_position=self._on_device(self.next_position[rows]),
            last_state=self._last_state[index],
            real=None if bool((self.lengths[rows] == width).all()) else real,
        )

    def drop(self, rows: Tensor) -> None:
        """Forget rows (b,); the tables shrink once the widest rows are gone."""
        self.lengths[rows] = 0
        # freed only at half the width: each change of the table is a copy of it
        width = int(self.lengths.max())
        if self._keys and 2 * width < self._keys[0].shape[2]:
            self._keys = [keys[:, :, :width].clone() for keys in self._keys]
            self._values = [values[:, :, :width].clone() for values in self._values]

    def _append(self, rows: Tensor, lengths: Tensor, layers: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Write keys and values (b, Hk, t, d) of each layer after those of the rows."""
        start = self.lengths[rows]
        needed, width = int((start + lengths).max()), self._keys[0].shape[2]
        # by a factor, so that appending turn by turn does not copy the table every time
        grown = max(needed, int(GROWTH * width)) if needed > width else width
        # only real tokens: the widest row of a chunk pads the others
        row, offset = torch.nonzero(torch.arange(layers[0][0].shape[2]) < lengths[:, None], as_tuple=True)
        target, column, row, offset = map(self._on_device, (rows[row], start[row] + offset, row, offset))
        for store, kind in ((self._keys, 0), (self._values, 1)):
            for layer, table in enumerate(store):
                if grown > width:
                    store[layer] = table = torch.nn.functional.pad(table, (0, 0, 0, grown - width))
                table[target, :, column] = layers[layer][kind][row, :, offset].to(table.dtype)
        self.lengths[rows] = start + lengths

    def _on_device(self, index: Tensor) -> Tensor:
        return to_device(index, self._policy.device)


class TurnSampler:
    """Conversations of B rows, sampled turn by turn.

    Keys, values and vision features of the history stay from turn to turn, and the decoder's cache of a sampled turn is
    appended to them, so that no token passes the model twice. The log-probabilities are those of the whole conversation
    up to then. Models whose prompts are copied for every response (`ModelReader`), and `reread`, read the whole
    conversation in every turn; an inference engine gets it too, and keeps what it has read by itself. Numbers of
    rows are on the CPU.

        turns = TurnSampler(policy, config, rows)
        turns.begin(rows, prompts, group)
        samples = turns.sample(rows, uniforms)
        turns.extend(rows, observations)
    """

    def __init__(
        self,
        policy: VlmPolicy,
        config: SamplerConfig,
        rows: int,
        *,
        reread: bool = False,
        engine: EngineSampler | None = None,
    ) -> None:
        self._policy = policy
        self._config = config
        self._rows = rows
        self._engine = engine
        keeps = policy.reader.joins(policy) and not reread and engine is None
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
            # with a history too: the last part begins what `_continue` returns as text
            self._parts[row].append(given[-1])
        if self._histories is not None:
            with self._sampling():
                self._histories.extend(rows, given)

    def sample(self, rows: Tensor, uniforms: Tensor | None) -> Samples:
        """Sample the next turn of some rows from uniform numbers (b, max_new_tokens); None is greedy.

        The samples are on the CPU.
        """
        with self._sampling():
            if self._histories is not None:
                drawn = self._continue(self._histories, rows, uniforms)
            else:
                prompts = [join_prompts(self._parts[row]) for row in rows.tolist()]
                if self._engine is None:
                    # rows finish at different turns, and the runner works with them on the CPU
                    drawn = _on_host(sample(self._policy, prompts, 1, self._config, uniforms))
                else:
                    drawn = _on_host(self._engine.draw(prompts, 1, uniforms))
        lengths = drawn.mask.sum(1).long().tolist()
        for index, (row, length) in enumerate(zip(rows.tolist(), lengths, strict=True)):
            # With a history, only the last token was drawn without being read.
            self._unread[row] = drawn.response_ids[index, 0 if self._histories is None else length - 1 : length]
        return drawn

    def give(self, row: int, ids: Sequence[int]) -> None:
        """Use a given answer for a row's next turn, instead of sampling one."""
        # all of its tokens are unread, unlike those of a sampled answer
        self._unread[row] = torch.tensor(ids, dtype=torch.int64)

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
        left = []
        for chunk in torch.arange(len(rows)).split(self._config.batch_rows):
            before = histories.prefix(rows[chunk])
            own = torch.arange(len(chunk))
            decoder = _KeepingDecoder(GroupDecoder(self._policy, self._policy.reader, before, own), own)
            # the history of each row counts towards the model's positions
            decode(draw, decoder, chunk, draw.budget(chunk, histories.lengths[rows[chunk]]), before.last_state)
            decoder.finish()
            left += [(chunk[index], keys, values) for index, keys, values in decoder.left]
        drawn = _on_host(draw.collect([self._parts[row][-1] for row in rows.tolist()]))
        # the decoder has read all sampled tokens but the last
        read = drawn.mask.sum(1).long() - 1
        for index, keys, values in left:
            histories.append(rows[index], read[index], keys, values)
        return drawn

    @contextlib.contextmanager
    def _sampling(self) -> Iterator[None]:
        training = self._policy.training
        self._policy.eval()  # checkpointed layers drop the cache in training mode
        try:
            with torch.no_grad():
                yield
        finally:
            self._policy.train(training)


def _on_host(samples: Samples) -> Samples:
    ids, mask, logp = to_host([samples.response_ids, samples.mask, samples.logp])
    return replace(samples, response_ids=ids, mask=mask, logp=logp)


class _KeepingDecoder:
    """A decoder that saves the keys and values of rows that leave it."""

    def __init__(self, decoder: GroupDecoder, rows: Tensor) -> None:
        self._decoder = decoder
        self._rows = rows
        self._read = 0
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
        self._save(torch.arange(len(self._rows)))

    def _save(self, index: Tensor) -> None:
        if self._read and len(index):
            self.left.append((self._rows[index], *self._decoder.cached(index)))
