"""Decode token by token without the transformers modules: few, large operations in preallocated buffers.

A prompt's keys and values are read once for all rows of its group, and each row has its own keys and values for its
response, as in Hydragen (arXiv 2402.05099), but with one softmax over both. The rows of a group use adjacent slots:

    prompt              0              1
    slot                0    1    2    3    4    5      N groups of R slots, R = rows of the largest group
    row                 0    1    2    3    4    -      an unused slot repeats row 0 and is never read
    scores of a slot    [far: the P tokens of its prompt | near: the tokens that it has read]

`lean.py` lists the supported text decoders. Shapes: b rows, N prompts, H query heads, r of them per key head, Hk key
heads, d the width of a head, t tokens read, V the vocabulary size.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from mmrl.core.transfer import to_device
from mmrl.vlm.engine.lean import LeanLayer, LeanWeights
from mmrl.vlm.engine.prefix import Prefix

ROOM = 64
"""Initial capacity of the caches in steps; it doubles when used up."""


class PrefixDecoder:
    """Decodes rows together, at most `steps` tokens each.

    `prefix` holds N prompts without history. `prompt` (b,) int64, on the CPU, is the prompt of each row, in ascending
    order; every prompt has a row. The tokens `banned` (K,) int64 are never drawn. Row indices are also on the CPU.
    """

    def __init__(self, weights: LeanWeights, prefix: Prefix, prompt: Tensor, steps: int, banned: Tensor) -> None:
        self._weights = weights
        self._banned = banned
        self._attention = _GroupAttention(weights, prefix, prompt, steps)

    def keep(self, index: Tensor) -> None:
        """Keep only the rows `index` (n,) and their prompts."""
        self._attention.keep(index)

    def cached(self, index: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Keys and values of the tokens that rows (n,) have read, for each layer (n, Hk, t, d)."""
        return self._attention.cached(index)

    def advance(self, token: Tensor) -> Tensor:
        """Read one token of each row (b,) and return the states (b, width) that predict the next."""
        weights, attention = self._weights, self._attention
        # `lean_weights` has cast the weights once; autocast would cast them again at every token
        with torch.autocast(token.device.type, enabled=False):
            attention.begin_step()
            # a fresh tensor at every token, so the residual stream can be added to in place
            hidden = functional.embedding(token, weights.embedding)
            for number, layer in enumerate(weights.layers):
                x = layer.norm_attention(hidden).to(weights.dtype)
                # the residual stream stays in the precision of the embedding; only layer inputs are cast
                hidden.add_(layer.out(attention(number, layer, x)))
                hidden.add_(layer.mlp(layer.norm_mlp(hidden).to(weights.dtype)))
            return weights.norm(hidden).to(hidden.dtype)

    def next_logp(self, states: Tensor, temperature: float) -> Tensor:
        """Log-probabilities (b, V) float32 of the next token."""
        with torch.autocast(states.device.type, enabled=False):
            logits = self._weights.head(states).float()
        if temperature != 1.0:
            logits.div_(temperature)
        # before the softmax, so that the other tokens add up to 1, as they do in scoring
        return logits.index_fill_(1, self._banned, float("-inf")).log_softmax(-1)


class _Slots:
    """Slots of b rows in N groups; on the CPU, and on the device what every step reads."""

    def __init__(self, prompt: Tensor, groups: int, device: torch.device) -> None:
        number = torch.arange(len(prompt))
        counts = torch.bincount(prompt, minlength=groups)
        self.prompt = prompt
        self.size = int(counts.max())  # R
        self.host_of_row = prompt * self.size + number - (counts.cumsum(0) - counts)[prompt]  # (b,)
        row = torch.zeros(groups * self.size, dtype=torch.int64).index_copy_(0, self.host_of_row, number)  # (N R,)
        self.of_row, self.row = to_device(self.host_of_row, device), to_device(row, device)
        self.ragged = len(row) != len(prompt)  # some slots are unused, so rows and slots need an index between them


class _Buffers:
    """Preallocated tensors that all layers and steps write to, and the views that the operations need."""

    def __init__(self, weights: LeanWeights, slots: _Slots, prompt_width: int) -> None:
        heads, kv_heads, d = weights.heads, weights.kv_heads, weights.head_dim
        groups = len(slots.row) // slots.size
        rows = weights.frequencies.new_empty(len(slots.prompt), heads + 2 * kv_heads, d)
        self.incoming = rows.flatten(1)  # (b, (H + 2 Hk) d), the projections of a layer
        self.heads_in, self.values_in = rows.split([heads + kv_heads, kv_heads], 1)
        self.first_half, self.second_half = self.heads_in.chunk(2, -1)
        self.rotated = rows.new_empty(self.heads_in.shape)
        self.rotated_first, self.rotated_second = self.rotated.chunk(2, -1)
        # without unused slots the rows are already in slot order
        self.slot_heads, self.slot_values = self.rotated, self.values_in
        if slots.ragged:
            self.slot_heads = rows.new_empty(groups * slots.size, heads + kv_heads, d)
            self.slot_values = rows.new_empty(groups * slots.size, kv_heads, d)
        queries, keys = self.slot_heads.unflatten(0, (groups, slots.size)).split([heads, kv_heads], 2)
        self.unscaled_queries = queries.unflatten(2, (kv_heads, -1)).transpose(1, 2)  # (N, Hk, R, r, d)
        self.keys = keys.transpose(1, 2)  # (N, Hk, R, d)
        self.values = self.slot_values.unflatten(0, (groups, slots.size)).transpose(1, 2)  # (N, Hk, R, d)
        # attention computes in the precision of the layers, its softmax in float32, as in scoring
        self.queries = rows.new_empty(self.unscaled_queries.shape, dtype=weights.dtype)
        self.far_queries = self.queries.flatten(2, 3).flatten(0, 1)  # (N Hk, R r, d)
        self.near_queries = self.queries.flatten(0, 2)  # (N Hk R, r, d)
        # one memory, seen by prompt and by slot: the product with the row's own values is added onto the prompt's
        context = torch.empty_like(self.queries)
        self.far_context, self.near_context = context.flatten(2, 3).flatten(0, 1), context.flatten(0, 2)
        self.slot_context = context.transpose(1, 2)  # (N, R, Hk, r, d)
        # the scores of the prompt, computed once a group; seen by slot, they join the near ones in a single softmax
        self.far = self.queries.new_empty(*self.far_queries.shape[:2], prompt_width)  # (N Hk, R r, P)
        self.far_by_group = self.far.view(groups, -1, prompt_width)
        self.far_by_slot = self.far.view(*self.near_queries.shape[:2], -1)


class _Step:
    """Tensors of step t, made once for all layers: small calls between large products are slow (cold caches)."""

    def __init__(self, buffers: _Buffers, keys: list[Tensor], values: list[Tensor], t: int) -> None:
        (batch, _, width), (slots, heads, _) = buffers.far.shape, buffers.near_queries.shape
        self.near = buffers.far.new_empty(slots, heads, t)
        self.scores = buffers.far.new_empty(slots, heads, width + t)
        self.probabilities = torch.empty_like(self.scores)
        self.far_probabilities = self.probabilities.view(batch, -1, width + t)[..., :width]
        self.near_probabilities = self.probabilities[..., width:]
        self.new_keys = [layer.select(4, t - 1) for layer in keys]
        self.new_values = [layer.select(3, t - 1) for layer in values]
        self.keys = [layer.narrow(4, 0, t).flatten(0, 2) for layer in keys]
        self.values = [layer.narrow(3, 0, t).flatten(0, 2) for layer in values]


class _GroupAttention:
    """Attention of each row to the prompt of its group (`far`) and to its own response (`near`)."""

    def __init__(self, weights: LeanWeights, prefix: Prefix, prompt: Tensor, steps: int) -> None:
        self.weights = weights
        self.lengths, self.next_position, self.device = prefix.lengths, prefix.next_position, prefix.last_state.device
        # (N Hk, d, P) and (N Hk, P, d): matrix products are the fastest in this order
        self.prefix_keys = [x.transpose(2, 3).to(weights.dtype).contiguous().flatten(0, 1) for x in prefix.keys]
        self.prefix_values = [x.to(weights.dtype).contiguous().flatten(0, 1) for x in prefix.values]
        self.read, self.steps, self.room = 0, steps, 0
        self._arrange(prompt)
        # keys are transposed so that both products are plain bmm calls: (N, Hk, R, d, room) and (N, Hk, R, room, d)
        shape, width = (len(prefix), weights.kv_heads, self.slots.size), weights.head_dim
        self.keys = [self.buffers.queries.new_empty(*shape, width, 0) for _ in prefix.keys]
        self.values = [self.buffers.queries.new_empty(*shape, 0, width) for _ in prefix.values]

    def keep(self, index: Tensor) -> None:
        """Keep only the rows `index` (n,) and their prompts."""
        kv_heads, before, size = self.weights.kv_heads, self.slots.host_of_row[index], self.slots.size
        live, prompt = torch.unique_consecutive(self.slots.prompt[index], return_inverse=True)
        # gathering copies all keys and values of the prompts, so only when a whole group has finished
        if len(live) < len(self.lengths):
            self.lengths, self.next_position = self.lengths[live], self.next_position[live]
            kept = to_device(live, self.device)
            self.prefix_keys, self.prefix_values = (
                [x.unflatten(0, (-1, kv_heads))[kept].flatten(0, 1) for x in layers]
                for layers in (self.prefix_keys, self.prefix_values)
            )
        # before the caches move: it gives the rows their new slots, and all views the new shape
        self._arrange(prompt)
        # source is the old slot of each new one; unused slots copy slot 0, which is never read
        source = torch.zeros(len(live) * self.slots.size, dtype=torch.int64)
        source.index_copy_(0, self.slots.host_of_row, before)
        source = to_device(source, self.device).view(-1, 1, self.slots.size)
        head = torch.arange(kv_heads, device=self.device)[None, :, None]
        for layers in (self.keys, self.values):
            layers[:] = [old[source // size, head, source % size] for old in layers]

    def cached(self, index: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Keys and values of the tokens that rows (n,) have read, for each layer (n, Hk, t, d)."""
        slot, read = self.slots.of_row[to_device(index, self.device)], self.read
        group, number = slot // self.slots.size, slot % self.slots.size
        keys = [keys[group, :, number, :, :read].transpose(2, 3).contiguous() for keys in self.keys]
        return keys, [values[group, :, number, :read].contiguous() for values in self.values]

    def begin_step(self) -> None:
        """Make room for one more token of each row."""
        if self.read == self.room:
            self._make_room()
        self.cosine, self.sine = self.cosines[self.read], self.sines[self.read]
        # counted before attending: a token attends to itself, and its keys go to the last of the `read` columns
        self.read += 1
        self.step = _Step(self.buffers, self.keys, self.values, self.read)

    def __call__(self, number: int, layer: LeanLayer, x: Tensor) -> Tensor:
        """Attention (b, H d) of a layer for its normed states (b, width)."""
        buffers, step = self.buffers, self.step
        # into fixed memory, since all views in `buffers` were made of it
        buffers.incoming.copy_(layer.qkv(x))
        if layer.norm_heads is not None:
            buffers.heads_in.copy_(layer.norm_heads(buffers.heads_in))
        self._rotate()
        # scaling the queries once also casts them, and is cheaper than scaling both score matrices
        torch.mul(buffers.unscaled_queries, self.weights.head_dim**-0.5, out=buffers.queries)
        step.new_keys[number].copy_(buffers.keys)
        step.new_values[number].copy_(buffers.values)
        torch.bmm(buffers.far_queries, self.prefix_keys[number], out=buffers.far)
        # only prompts are padded: a row's own tokens all count, so `near` needs no mask
        if self.padding is not None:
            buffers.far_by_group.add_(self.padding)
        torch.bmm(buffers.near_queries, step.keys[number], out=step.near)
        # one softmax over both parts, so that nothing has to be merged by log-sum-exps
        torch.cat((buffers.far_by_slot, step.near), -1, out=step.scores)
        torch.softmax(step.scores, -1, out=step.probabilities)
        torch.bmm(step.far_probabilities, self.prefix_values[number], out=buffers.far_context)
        # in place on the memory of `far_context`: this is the sum of both parts
        buffers.near_context.baddbmm_(step.near_probabilities, step.values[number])
        context = buffers.slot_context.reshape(len(self.slots.row), -1)
        return context.index_select(0, self.slots.of_row) if self.slots.ragged else context

    def _rotate(self) -> None:
        """Apply the rotary embedding to queries and keys, and scatter them to the slots."""
        buffers = self.buffers
        # (x1, x2) to (x1 cos - x2 sin, x2 cos + x1 sin), half a head at a time
        torch.mul(buffers.heads_in, self.cosine, out=buffers.rotated)
        buffers.rotated_first.addcmul_(buffers.second_half, self.sine, value=-1)
        buffers.rotated_second.addcmul_(buffers.first_half, self.sine)
        if self.slots.ragged:
            torch.index_select(buffers.rotated, 0, self.slots.row, out=buffers.slot_heads)
            torch.index_select(buffers.values_in, 0, self.slots.row, out=buffers.slot_values)

    def _arrange(self, prompt: Tensor) -> None:
        """Assign a slot to each row and reallocate all tensors whose shape depends on the rows."""
        self.slots = _Slots(prompt, len(self.lengths), self.device)
        width = self.prefix_keys[0].shape[2]
        padding = torch.arange(width) >= self.lengths[:, None]
        self.padding = None
        if bool(padding.any()):
            self.padding = to_device(padding.float().masked_fill_(padding, float("-inf"))[:, None], self.device)
        self.buffers = _Buffers(self.weights, self.slots, width)
        self._make_rotations()

    def _make_room(self) -> None:
        self.room = min(max(ROOM, 2 * self.room), self.steps)
        for layers, axis in ((self.keys, 4), (self.values, 3)):
            for number, old in enumerate(layers):
                shape = list(old.shape)
                shape[axis] = self.room
                layers[number] = old.new_empty(shape)
                layers[number].narrow(axis, 0, self.read).copy_(old.narrow(axis, 0, self.read))
        self._make_rotations()

    def _make_rotations(self) -> None:
        """Cosines and sines (room, b, 1, ...) of every step; a response token's three positions are equal."""
        steps = torch.arange(self.room, device=self.device)
        position = steps[:, None] + to_device(self.next_position[self.slots.prompt], self.device)
        angle = position.float()[..., None, None] * self.weights.frequencies
        self.cosines = torch.cat([angle.cos()] * 2, -1) * self.weights.rotary_scale
        self.sines = angle.sin() * self.weights.rotary_scale
