"""Text embeddings once per distinct prompt, whatever the number of images, steps and epochs.

Shapes: U distinct prompts, B rows (images), L text tokens, D their width, P width of the pooled embedding.
"""

from __future__ import annotations

import hashlib
import logging
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from diffusion.encoders import Embedding, TextEncoders, shortened
from mmrl.errors import RunError, UserError
from mmrl.files import replaced

LOGGER = logging.getLogger("mmrl")
OVER_LONG = ("error", "cut")


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


@dataclass
class EmbeddingCounts:
    """Counts of a `PromptEmbeddings` so far."""

    encoded: int = 0
    """Prompts that went through the text encoders."""
    memory_hits: int = 0
    """Prompts found in memory."""
    disk_hits: int = 0
    """Prompts read from the folder."""
    evicted: int = 0
    """Prompts that left memory for others."""
    damaged_files: int = 0
    """Files of the folder that could not be read and were written again."""
    cut_prompts: int = 0
    """Distinct prompts of which a tokenizer dropped the end."""
    cut_tokens: int = 0
    """Tokens that were dropped of them, summed over the tokenizers."""


class PromptEmbeddings:
    """Embeddings of a pipeline's frozen text encoders, made once per distinct prompt by its own `encode_prompt`.

    Prompts are encoded one at a time, so that an embedding does not depend, not even in its last bit, on the prompts
    that were asked for with it. Rows carry no gradient.

    Args:
        pipeline: StableDiffusion3Pipeline or FluxPipeline with frozen text encoders in evaluation mode.
        max_bytes: embeddings kept in memory; the least recently used leave first, the newest always stays.
        folder: folder in which embeddings outlive the process, keyed by the encoders' fingerprint and the prompt.
        max_sequence_length: tokens of the T5 encoder; None = the pipeline's own default.
        over_long: "error" refuses prompts of which a tokenizer would drop the end, "cut" counts and logs them.

    Raises:
        UserError: unknown pipeline or option, a missing text encoder, or text encoders that could still change.
    """

    def __init__(
        self,
        pipeline: Any,
        *,
        max_bytes: int = 2**28,
        folder: Path | str | None = None,
        max_sequence_length: int | None = None,
        over_long: str = "error",
    ) -> None:
        if over_long not in OVER_LONG:
            raise UserError(f"over_long={over_long!r}; there are: {', '.join(OVER_LONG)}")
        self.encoders = TextEncoders(pipeline, max_sequence_length)
        self.encoders.check_constant()
        self.counts = EmbeddingCounts()
        self.max_bytes = max_bytes
        self.nbytes = 0
        self._folder = None if folder is None else EmbeddingFolder(Path(folder) / self.encoders.fingerprint())
        self._over_long = over_long
        self._held: OrderedDict[str, Embedding] = OrderedDict()
        self._evicted: set[str] = set()
        self._cut: set[str] = set()

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
        return self._stack(prompts, samples)

    def negative(self, prompt: str = "", rows: int = 1) -> TextRows:
        """The other side of classifier-free guidance.

        Args:
            prompt: negative prompt; here it may be empty.
            rows: rows that take it.

        Returns:
            The rows, of one prompt.
        """
        return self._stack([prompt], rows)

    def free_encoders(self) -> int:
        """Take the text encoders out of the pipeline, so that they leave memory.

        Afterwards only prompts in memory or in the folder can be had, and the pipeline is saved without text encoders.

        Returns:
            Bytes of weights that the pipeline no longer holds.

        Raises:
            UserError: embeddings were evicted and there is no folder to read them from again.
        """
        if self._evicted and self._folder is None:
            raise UserError(
                f"{len(self._evicted)} prompts left the {self.max_bytes} bytes of memory and could not be embedded "
                f"again, the first {shortened(min(self._evicted))}; raise max_bytes or give a folder"
            )
        return self.encoders.free()

    def _stack(self, prompts: Sequence[str], samples: int) -> TextRows:
        self.encoders.check_constant()
        numbers = {prompt: number for number, prompt in enumerate(dict.fromkeys(prompts))}
        found = [self._embedding(prompt) for prompt in numbers]
        index = torch.tensor([numbers[prompt] for prompt in prompts]).repeat_interleave(samples)
        if len(found) == 1:
            return TextRows(found[0].tokens[None], found[0].pooled[None], index)
        return TextRows(torch.stack([one.tokens for one in found]), torch.stack([one.pooled for one in found]), index)

    def _embedding(self, prompt: str) -> Embedding:
        held = self._held.get(prompt)
        if held is not None:
            self.counts.memory_hits += 1
            self._held.move_to_end(prompt)
            return held
        self._check_length(prompt)
        embedding = self._read(prompt)
        if embedding is None:
            embedding = self._encode(prompt)
        self._hold(prompt, embedding)
        return embedding

    def _hold(self, prompt: str, embedding: Embedding) -> None:
        self._held[prompt] = embedding
        self._evicted.discard(prompt)
        self.nbytes += embedding.nbytes
        while self.nbytes > self.max_bytes and len(self._held) > 1:
            oldest, left = self._held.popitem(last=False)
            self.nbytes -= left.nbytes
            self.counts.evicted += 1
            self._evicted.add(oldest)

    def _encode(self, prompt: str) -> Embedding:
        if self.encoders.freed:
            raise UserError(
                f"{shortened(prompt)} is not cached and the text encoders were freed; ask for it before that"
            )
        embedding = self.encoders.encode(prompt)
        self.counts.encoded += 1
        if self._folder is not None:
            self._folder.write(prompt, embedding)
        return embedding

    def _read(self, prompt: str) -> Embedding | None:
        if self._folder is None:
            return None
        try:
            embedding = self._folder.read(prompt, self.encoders.pipeline.device)
        except RunError as error:
            if self.encoders.freed:
                raise
            self.counts.damaged_files += 1
            LOGGER.warning("%s; it is written again", error)
            return None
        self.counts.disk_hits += embedding is not None
        return embedding

    def _check_length(self, prompt: str) -> None:
        cuts = self.encoders.cuts(prompt)
        if not cuts or prompt in self._cut:
            return
        where = "; ".join(
            f"{cut.tokenizer} reads {cut.limit} of {cut.tokens} tokens and drops {cut.text!r}" for cut in cuts
        )
        message = f"{shortened(prompt)} is too long: {where}"
        if self._over_long == "error":
            raise UserError(f'{message}; shorten it, or allow it with over_long="cut"')
        self._cut.add(prompt)
        self.counts.cut_prompts += 1
        self.counts.cut_tokens += sum(cut.tokens - cut.limit for cut in cuts)
        LOGGER.warning("%s", message)


class EmbeddingFolder:
    """Embeddings of one set of text encoders as files, one for each prompt; several processes may share it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, prompt: str) -> Path:
        """File of a prompt, existing or not."""
        return self.folder / f"{hashlib.blake2b(prompt.encode(), digest_size=16).hexdigest()}.safetensors"

    def read(self, prompt: str, device: Any) -> Embedding | None:
        """Read an embedding."""
        path = self.path(prompt)
        if not path.is_file():
            return None
        try:
            with safe_open(str(path), framework="pt", device=str(device)) as file:
                if (file.metadata() or {}).get("prompt") == prompt:
                    return Embedding(file.get_tensor("tokens"), file.get_tensor("pooled"))
        except (SafetensorError, OSError) as error:
            raise RunError(f"{path} cannot be read: {error}") from error
        raise RunError(f"{path} does not hold {shortened(prompt)}")

    def write(self, prompt: str, embedding: Embedding) -> None:
        """Write an embedding in one step, so that a reader sees all of it or nothing."""
        path = self.path(prompt)
        tensors = {"tokens": embedding.tokens.contiguous(), "pooled": embedding.pooled.contiguous()}
        with replaced(path) as draft:
            save_file(tensors, draft, metadata={"prompt": prompt})
