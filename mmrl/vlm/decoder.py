"""Decoding token by token without the transformers modules: few, large operations in buffers made beforehand.

The text decoders of Qwen2.5-VL and Qwen3-VL differ in their biases and in the norm of each head. A prompt's keys and
values are read once for all rows of its group and each row adds its own, as in Hydragen (arXiv 2402.05099), but with
one softmax over both.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from mmrl.vlm.lean_weights import LeanLayer, LeanWeights
from mmrl.vlm.prefix import Prefix

ROOM = 64
"""Steps that room is made for at first; later for twice as many."""


class PrefixDecoder:
    """Rows that are decoded together.

    Args:
        weights: the decoder.
        prefix: keys, values and last states of N prompts, without history.
        prompt: (b,) int64, ascending, the prompt of each row; each of the N has a row.
        steps: most tokens that will be read.
        banned: (K,) int64, tokens that cannot be drawn.
    """

    def __init__(self, weights: LeanWeights, prefix: Prefix, prompt: Tensor, steps: int, banned: Tensor) -> None:
        self._weights = weights
        self._banned = banned
        self._attention = _GroupAttention(weights, prefix, prompt, steps)

    def keep(self, index: Tensor) -> None:
        """Drop all rows but some, and the prompts that are left without rows."""
        self._attention.keep(index)

    def cached(self, index: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """What some rows keep of the tokens that they have read so far."""
        return self._attention.cached(index)

    def advance(self, token: Tensor) -> Tensor:
        """Read one token of each row."""
        weights = self._weights
        with torch.autocast(token.device.type, enabled=False):
            self._attention.begin_step()
            hidden = functional.embedding(token, weights.embedding)
            for number, layer in enumerate(weights.layers):
                x = layer.norm_attention(hidden).to(weights.dtype)
                hidden.add_(layer.out(self._attend(number, layer, x)))
                hidden.add_(layer.mlp(layer.norm_mlp(hidden).to(weights.dtype)))
            return weights.norm(hidden).to(hidden.dtype)

    def next_logp(self, states: Tensor, temperature: float) -> Tensor:
        """Log-probabilities of the next token.

        Returns:
            (b, V) float32.
        """
        with torch.autocast(states.device.type, enabled=False):
            logits = self._weights.head(states).float()
        if temperature != 1.0:
            logits.div_(temperature)
        return logits.index_fill_(1, self._banned, float("-inf")).log_softmax(-1)

    def _attend(self, number: int, layer: LeanLayer, x: Tensor) -> Tensor:
        attention = self._attention
        attention.incoming.copy_(layer.qkv(x))
        if layer.norm_heads is not None:
            attention.turning.copy_(layer.norm_heads(attention.turning))
        return attention(number).to(x.dtype)


class _GroupAttention:
    """Attention of rows to the prompt of their group, `far`, and to themselves, `near`, in float32.

    The rows of a prompt have slots side by side, as many for each of the N prompts as the largest group has rows, R;
    unused slots repeat row 0 and are never read.
    """

    def __init__(self, weights: LeanWeights, prefix: Prefix, prompt: Tensor, steps: int) -> None:
        self.heads, self.kv_heads, self.head_dim = weights.heads, weights.kv_heads, weights.head_dim
        self.frequencies, self.rotary_scale = weights.frequencies, weights.rotary_scale
        self.lengths, self.next_position = prefix.lengths, prefix.next_position
        # (N * Hk, d, P) and (N * Hk, P, d): matrix products are the fastest in this order
        self.prefix_keys = [x.transpose(2, 3).float().contiguous().flatten(0, 1) for x in prefix.keys]
        self.prefix_values = [x.float().contiguous().flatten(0, 1) for x in prefix.values]
        self.step, self.steps, self.room = -1, steps, 0  # the step that runs, the most, those with room
        self._arrange(prompt)
        # (N, Hk, R, d, room) and (N, Hk, R, room, d)
        shape = (len(prefix), self.kv_heads, self.places)
        self.keys = [self.queries.new_empty(*shape, self.head_dim, 0) for _ in prefix.keys]
        self.values = [self.queries.new_empty(*shape, 0, self.head_dim) for _ in prefix.values]

    def keep(self, index: Tensor) -> None:
        """Drop all rows but some (n,), and the prompts that are left without rows."""
        before, width = self.slot[index], self.places
        live, prompt = torch.unique_consecutive(self.prompt[index], return_inverse=True)
        if len(live) < len(self.lengths):
            self.lengths, self.next_position = self.lengths[live], self.next_position[live]
            self.prefix_keys = [x.unflatten(0, (-1, self.kv_heads))[live].flatten(0, 1) for x in self.prefix_keys]
            self.prefix_values = [x.unflatten(0, (-1, self.kv_heads))[live].flatten(0, 1) for x in self.prefix_values]
        self._arrange(prompt)
        source = torch.zeros(len(live) * self.places, dtype=torch.int64, device=index.device)
        source = source.index_copy_(0, self.slot, before).view(-1, 1, self.places)
        head = torch.arange(self.kv_heads, device=index.device)[None, :, None]
        for layers in (self.keys, self.values):
            for number, old in enumerate(layers):
                layers[number] = old[source // width, head, source % width]

    def cached(self, index: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Keys and values of the tokens that rows (n,) have read, for each layer (n, Hk, t, d)."""
        slot, read = self.slot[index], self.step + 1
        group, place = slot // self.places, slot % self.places
        keys = [keys[group, :, place, :, :read].transpose(2, 3).contiguous() for keys in self.keys]
        return keys, [values[group, :, place, :read].contiguous() for values in self.values]

    def begin_step(self) -> None:
        """Make room for one more token of each row."""
        self.step += 1
        if self.step == self.room:
            self._make_room()
        batch, heads, width = self.far.shape[0], self.heads // self.kv_heads, self.far.shape[2]
        slots, seen = batch * self.places, self.step + 1
        self.near = self.far.new_empty(slots, heads, seen)
        self.scores = self.far.new_empty(slots, heads, width + seen)
        self.probabilities = torch.empty_like(self.scores)
        self.far_probabilities = self.probabilities.view(batch, -1, width + seen)[..., :width]
        self.near_probabilities = self.probabilities[..., width:]
        self.cosine, self.sine = self.cosines[self.step], self.sines[self.step]
        # here and not layer by layer: between large products each small call finds cold caches
        self.new_keys = [keys.select(4, self.step) for keys in self.keys]
        self.new_values = [values.select(3, self.step) for values in self.values]
        self.near_keys = [keys.narrow(4, 0, seen).flatten(0, 2) for keys in self.keys]
        self.near_values = [values.narrow(3, 0, seen).flatten(0, 2) for values in self.values]

    def __call__(self, layer: int) -> Tensor:
        """Attention of one layer for the projections in `incoming`.

        Returns:
            (b, heads * d) float32.
        """
        self._rotate()
        torch.mul(self.slot_queries, self.head_dim**-0.5, out=self.queries)
        self.new_keys[layer].copy_(self.slot_keys)
        self.new_values[layer].copy_(self.slot_values)
        torch.bmm(self.far_queries, self.prefix_keys[layer], out=self.far)
        if self.padding is not None:
            self.far_of_group.add_(self.padding)
        torch.bmm(self.near_queries, self.near_keys[layer], out=self.near)
        torch.cat((self.far_rows, self.near), -1, out=self.scores)
        torch.softmax(self.scores, -1, out=self.probabilities)
        torch.bmm(self.far_probabilities, self.prefix_values[layer], out=self.far_context)
        self.near_context.baddbmm_(self.near_probabilities, self.near_values[layer])
        context = self.slot_context.reshape(self.slots.shape[0], -1)
        return context.index_select(0, self.slot) if self.ragged else context

    def _rotate(self) -> None:
        torch.mul(self.turning, self.cosine, out=self.rotated)
        self.rotated_first.addcmul_(self.turning_second, self.sine, value=-1)
        self.rotated_second.addcmul_(self.turning_first, self.sine)
        if self.ragged:
            torch.index_select(self.rotated, 0, self.row_of_slot, out=self.slots)
            torch.index_select(self.values_in, 0, self.row_of_slot, out=self.value_slots)

    def _arrange(self, prompt: Tensor) -> None:
        """Give each row its slot."""
        self.prompt = prompt
        number = torch.arange(len(prompt), device=prompt.device)
        counts = torch.bincount(prompt, minlength=len(self.lengths))
        self.places = int(counts.max())
        self.slot = prompt * self.places + number - (counts.cumsum(0) - counts)[prompt]
        slots = len(self.lengths) * self.places
        self.ragged = slots != len(prompt)
        self.row_of_slot = torch.zeros(slots, dtype=torch.int64, device=prompt.device)
        self.row_of_slot.index_copy_(0, self.slot, number)
        column = torch.arange(self.prefix_keys[0].shape[2], device=prompt.device)
        padding = column >= self.lengths[:, None]
        self.padding = None
        if bool(padding.any()):
            self.padding = padding.float().masked_fill_(padding, float("-inf"))[:, None]
        self._make_buffers(len(prompt))
        self._rotations()

    def _make_buffers(self, count: int) -> None:
        """What every layer of every step writes to, seen in the shapes that its operations need."""
        groups, places, heads, kv_heads, d = len(self.lengths), self.places, self.heads, self.kv_heads, self.head_dim
        rows = self.frequencies.new_empty(count, heads + 2 * kv_heads, d)
        self.incoming = rows.flatten(1)
        self.turning, self.values_in = rows.split([heads + kv_heads, kv_heads], 1)
        self.turning_first, self.turning_second = self.turning.chunk(2, -1)
        self.rotated = rows.new_empty(self.turning.shape)
        self.rotated_first, self.rotated_second = self.rotated.chunk(2, -1)
        self.slots, self.value_slots = self.rotated, self.values_in
        if self.ragged:
            self.slots = rows.new_empty(groups * places, heads + kv_heads, d)
            self.value_slots = rows.new_empty(groups * places, kv_heads, d)
        queries, keys = self.slots.unflatten(0, (groups, places)).split([heads, kv_heads], 2)
        self.slot_queries = queries.unflatten(2, (kv_heads, -1)).transpose(1, 2)
        self.slot_keys = keys.transpose(1, 2)
        self.slot_values = self.value_slots.unflatten(0, (groups, places)).transpose(1, 2)
        self.queries = rows.new_empty(self.slot_queries.shape)
        self.far_queries, self.near_queries = self.queries.flatten(2, 3).flatten(0, 1), self.queries.flatten(0, 2)
        context = torch.empty_like(self.queries)
        self.far_context, self.near_context = context.flatten(2, 3).flatten(0, 1), context.flatten(0, 2)
        self.slot_context = context.transpose(1, 2)
        self.far = rows.new_empty(*self.far_queries.shape[:2], self.prefix_keys[0].shape[2])
        self.far_of_group = self.far.view(groups, -1, self.far.shape[2])
        self.far_rows = self.far.view(*self.near_queries.shape[:2], -1)

    def _make_room(self) -> None:
        self.room = min(max(ROOM, 2 * self.room), self.steps)
        for layers, axis in ((self.keys, 4), (self.values, 3)):
            for number, old in enumerate(layers):
                shape = list(old.shape)
                shape[axis] = self.room
                layers[number] = old.new_empty(shape)
                layers[number].narrow(axis, 0, self.step).copy_(old.narrow(axis, 0, self.step))
        self._rotations()

    def _rotations(self) -> None:
        """Cosine and sine of the steps that there is room for; a response token's three positions are equal."""
        steps = torch.arange(self.room, device=self.prompt.device)
        position = steps[:, None] + self.next_position[self.prompt]
        angle = position.float()[..., None, None] * self.frequencies
        self.cosines = torch.cat([angle.cos()] * 2, -1) * self.rotary_scale
        self.sines = angle.sin() * self.rotary_scale
