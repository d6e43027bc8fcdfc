"""Text embeddings once per distinct prompt, whatever the number of images, steps and epochs.

Shapes: U distinct prompts, B rows (images), L text tokens, D their width, P width of the pooled embedding.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from diffusion.encoders import Embedding, TextEncoders, shortened
from mmrl.errors import UserError


@dataclass(frozen=True)
class TextRows:
    """Embeddings of U distinct prompts and which of them each of B rows takes; read only, the cache holds the same."""

    tokens: Tensor
    """Text tokens (U, L, D)."""
    pooled: Tensor
    """Pooled text embeddings (U, P)."""
    index: Tensor
    """Prompt of each row (B,) int64, on the CPU."""

    def __len__(self) -> int:
        return len(self.index)

    def select(self, rows: Tensor | slice) -> TextRows:
        """Other rows of the same prompts; the embeddings are shared.

        Args:
            rows: (B',) int64 on the CPU, or a slice.

        Returns:
            The B' rows.
        """
        return TextRows(self.tokens, self.pooled, self.index[rows])

    def followed_by(self, other: TextRows) -> TextRows:
        """These rows and then those of another object.

        Args:
            other: rows with tokens of the same length and width.

        Returns:
            Both, over U + U' prompts.
        """
        return TextRows(
            torch.cat([self.tokens, other.tokens]),
            torch.cat([self.pooled, other.pooled]),
            torch.cat([self.index, other.index + len(self.tokens)]),
        )

    def expanded(self) -> tuple[Tensor, Tensor]:
        """One embedding for each row.

        Returns:
            Tokens (B, L, D) and pooled (B, P). Where all rows have one prompt, or each prompt has one row in order,
            they are views and cost no memory; rows of several prompts are no strides over one tensor and are gathered.
        """
        return self._for_rows(self.tokens), self._for_rows(self.pooled)

    def _for_rows(self, values: Tensor) -> Tensor:
        first = int(self.index[0]) if len(self) else 0
        if bool((self.index == first).all()):
            return values[first : first + 1].expand(len(self), *values.shape[1:])
        if torch.equal(self.index, torch.arange(len(values))):
            return values
        return values.index_select(0, self.index.to(values.device))


class PromptEmbeddings:
    """Embeddings of a pipeline's frozen text encoders, made once per distinct prompt by its own `encode_prompt`.

    Prompts are encoded one at a time, so that an embedding does not depend, not even in its last bit, on the prompts
    that were asked for with it. Rows carry no gradient. The least recently used embeddings leave memory first.

    Args:
        pipeline: StableDiffusion3Pipeline or FluxPipeline with frozen text encoders in evaluation mode.
        max_bytes: embeddings kept in memory; the newest always stays.
        max_sequence_length: tokens of the T5 encoder; None = the pipeline's own default.

    Raises:
        UserError: unknown pipeline, a missing text encoder, or text encoders that could still change.
    """

    def __init__(self, pipeline: Any, *, max_bytes: int = 2**28, max_sequence_length: int | None = None) -> None:
        self.encoders = TextEncoders(pipeline, max_sequence_length)
        self.encoders.check_constant()
        self.encoded = 0
        """Prompts that went through the text encoders."""
        self.max_bytes = max_bytes
        self._held: OrderedDict[str, Embedding] = OrderedDict()
        self._evicted: set[str] = set()

    def rows(self, prompts: Sequence[str], samples: int = 1, *, allow_empty: bool = False) -> TextRows:
        """Embeddings of prompts, of each distinct one once.

        Args:
            prompts: prompts, at least one, repeated ones allowed.
            samples: consecutive rows of each prompt, the group size.
            allow_empty: whether a prompt may be empty, as it is without a caption.

        Returns:
            len(prompts) * samples rows.

        Raises:
            UserError: a prompt is empty, too long for a tokenizer or not to be had after `free_encoders`; the encoders
                have become trainable.
        """
        if not prompts:
            raise UserError("there are no prompts to embed")
        for number, prompt in enumerate(prompts, start=1):
            if not isinstance(prompt, str) or not (prompt.strip() or allow_empty):
                raise UserError(f"prompt {number} of {len(prompts)} is empty: {prompt!r}")
        self.encoders.check_constant()
        numbers = {prompt: number for number, prompt in enumerate(dict.fromkeys(prompts))}
        found = [self._embedding(prompt) for prompt in numbers]
        index = torch.tensor([numbers[prompt] for prompt in prompts]).repeat_interleave(samples)
        if len(found) == 1:
            return TextRows(found[0].tokens[None], found[0].pooled[None], index)
        return TextRows(torch.stack([one.tokens for one in found]), torch.stack([one.pooled for one in found]), index)

    def negative(self, prompt: str = "", rows: int = 1) -> TextRows:
        """Rows of the negative prompt of classifier-free guidance, which may be empty."""
        return self.rows([prompt], rows, allow_empty=True)

    def free_encoders(self) -> int:
        """Take the text encoders out of the pipeline, so that they leave memory.

        Afterwards only prompts in memory can be had, and the pipeline is saved without text encoders.

        Returns:
            Bytes of weights that the pipeline no longer holds.

        Raises:
            UserError: embeddings were evicted and could not be made again.
        """
        if self._evicted:
            raise UserError(
                f"{len(self._evicted)} prompts left the {self.max_bytes} bytes of memory and could not be embedded "
                f"again, the first {shortened(min(self._evicted))}; raise max_bytes"
            )
        return self.encoders.free()

    def _embedding(self, prompt: str) -> Embedding:
        if prompt not in self._held:
            self._hold(prompt, self._encode(prompt))
        self._held.move_to_end(prompt)
        return self._held[prompt]

    def _encode(self, prompt: str) -> Embedding:
        cuts = self.encoders.cuts(prompt)
        if cuts:
            where = "; ".join(
                f"{cut.tokenizer} reads {cut.limit} of {cut.tokens} tokens and drops {cut.text!r}" for cut in cuts
            )
            raise UserError(f"{shortened(prompt)} is too long: {where}; shorten it")
        if self.encoders.freed:
            raise UserError(
                f"{shortened(prompt)} is not cached and the text encoders were freed; ask for it before that"
            )
        self.encoded += 1
        return self.encoders.encode(prompt)

    def _hold(self, prompt: str, embedding: Embedding) -> None:
        self._held[prompt] = embedding
        self._evicted.discard(prompt)
        while len(self._held) > 1 and sum(held.nbytes for held in self._held.values()) > self.max_bytes:
            self._evicted.add(self._held.popitem(last=False)[0])
