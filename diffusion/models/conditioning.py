"""Embeddings of prompts by a pipeline's own text encoders, made once and selected for the rows of a batch."""

from __future__ import annotations

import gc
import logging
import re
import tempfile
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from torch import Tensor

from diffusion.models.pipelines import TextPart, family_of, quiet_diffusers
from mmrl.errors import UserError
from mmrl.files import expanded

LOGGER = logging.getLogger("mmrl")
SHOWN_CHARACTERS = 60


class Embedding(NamedTuple):
    """Embedding of one prompt."""

    tokens: Tensor
    """(L, D) in the encoders' dtype."""
    pooled: Tensor
    """(P,) in the encoders' dtype."""

    @property
    def nbytes(self) -> int:
        """Bytes of both."""
        return self.tokens.nbytes + self.pooled.nbytes


class Cut(NamedTuple):
    """The end of a prompt that a tokenizer drops."""

    tokenizer: str
    """Name of the tokenizer in the pipeline."""
    tokens: int
    """Tokens of the whole prompt, start and end counted."""
    limit: int
    """Tokens that are read."""
    text: str
    """The text that is dropped."""


class TextEncoders:
    """The text encoders and tokenizers of one pipeline."""

    def __init__(self, pipeline: Any, max_sequence_length: int | None = None) -> None:
        self.pipeline = pipeline
        self.freed = False
        self._family = family_of(pipeline)
        default = self._family.text_length
        self.max_sequence_length = default if max_sequence_length is None else max_sequence_length
        for part in self._family.text:
            if getattr(pipeline, part.encoder) is None and not part.optional:
                raise UserError(f"{type(pipeline).__name__} has no {part.encoder}; it cannot embed prompts")
        self._parts = [part for part in self._family.text if getattr(pipeline, part.encoder) is not None]
        for part in self._parts:
            if not part.is_t5:  # CLIP pools at the first end token
                getattr(pipeline, part.tokenizer).split_special_tokens = True

    def modules(self) -> dict[str, Any]:
        """Encoders by their name in the pipeline; none after `free`."""
        return {} if self.freed else {part.encoder: getattr(self.pipeline, part.encoder) for part in self._parts}

    def check_constant(self) -> None:
        """Refuse encoders that could still change or are random; raises UserError with the culprit's name."""
        for name, encoder in self.modules().items():
            trainable = next((key for key, weight in encoder.named_parameters() if weight.requires_grad), None)
            if trainable is not None:
                raise UserError(
                    f"{name} is trainable ({trainable}), so its embeddings cannot be cached; freeze it with "
                    f"pipeline.{name}.requires_grad_(False), or embed the prompts again for every update"
                )
            if encoder.training:
                raise UserError(f"{name} is in training mode and its dropout would be cached; call .eval() on it")

    def encode(self, prompt: str) -> Embedding:
        """Embed one prompt with the pipeline's own `encode_prompt`, without gradient."""
        t5 = next((self._text_of(part, prompt) for part in self._parts if part.is_t5), prompt)
        with torch.no_grad(), quiet_diffusers():  # which would warn of every prompt that CLIP cuts
            tokens, pooled = self._family.encode(self.pipeline, prompt, t5, self.max_sequence_length)
        return Embedding(tokens[0], pooled[0])

    def cuts(self, prompt: str) -> list[Cut]:
        """Find the ends of a prompt that diffusers would drop with only a warning."""
        found = []
        for part in self._parts:
            limit = self.max_sequence_length if part.is_t5 else self.pipeline.tokenizer_max_length
            tokenizer = getattr(self.pipeline, part.tokenizer)
            ids = tokenizer(self._text_of(part, prompt), truncation=False, verbose=False).input_ids
            if len(ids) > limit:
                # the end token is kept, so one more token of text is lost
                found.append(Cut(part.tokenizer, len(ids), limit, tokenizer.decode(ids[limit - 1 : -1])))
        return found

    def lost(self, prompt: str) -> list[Cut]:
        """Find the ends of a prompt that no encoder reads; a T5 encoder reads what is too long for CLIP."""
        found = self.cuts(prompt)
        whole = {part.tokenizer for part in self._parts if part.is_t5} - {cut.tokenizer for cut in found}
        return [] if whole else found

    def _text_of(self, part: TextPart, prompt: str) -> str:
        """What a tokenizer is given: control tokens of T5, which its vocabulary has as pieces, with a space in them."""
        if not part.is_t5:
            return prompt
        tokenizer = getattr(self.pipeline, part.tokenizer)
        normalizer = tokenizer.backend_tokenizer.normalizer
        text = prompt if normalizer is None else normalizer.normalize_str(prompt)
        control = re.compile("|".join(map(re.escape, tokenizer.all_special_tokens)))
        return control.sub(lambda found: f"{found[0][0]} {found[0][1:]}", text) if control.search(text) else prompt

    def free(self) -> int:
        """Take the encoders out of the pipeline; returns their bytes, free unless something else holds them."""
        modules = self.modules()
        tensors = {id(t): t.nbytes for module in modules.values() for t in (*module.parameters(), *module.buffers())}
        for name in modules:
            setattr(self.pipeline, name, None)
        self.freed = True
        del modules
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        return sum(tensors.values())


def shortened(prompt: str) -> str:
    """A prompt for an error message."""
    return f"prompt {prompt[:SHOWN_CHARACTERS]!r}" + ("..." if len(prompt) > SHOWN_CHARACTERS else "")


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
    that were asked for with it. Rows carry no gradient. The least recently used embeddings leave memory first, into
    files where there is a folder; `close` deletes these.

    Args:
        pipeline: StableDiffusion3Pipeline or FluxPipeline with frozen text encoders in evaluation mode.
        max_bytes: embeddings kept in memory; the newest always stays.
        max_sequence_length: tokens of the T5 encoder; None = the pipeline's own default.
        folder: where embeddings go that leave memory; None = they are made again.

    Raises:
        UserError: unknown pipeline, a missing text encoder, or text encoders that could still change.
    """

    def __init__(
        self,
        pipeline: Any,
        *,
        max_bytes: int = 2**28,
        max_sequence_length: int | None = None,
        folder: Path | str | None = None,
    ) -> None:
        self.encoders = TextEncoders(pipeline, max_sequence_length)
        self.encoders.check_constant()
        self.encoded = 0
        """Prompts that went through the text encoders."""
        self.max_bytes = max_bytes
        self._held: OrderedDict[str, Embedding] = OrderedDict()
        self._evicted: set[str] = set()
        self._warned = False
        self._folder = None if folder is None else _temporary(folder)
        self._filed: dict[str, Path] = {}

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
                f"again, the first {shortened(min(self._evicted))}; give a folder or raise max_bytes"
            )
        return self.encoders.free()

    def close(self) -> None:
        """Delete the files."""
        if self._folder is not None:
            self._folder.cleanup()
            self._filed.clear()

    def _embedding(self, prompt: str) -> Embedding:
        if prompt not in self._held:
            filed = self._filed.get(prompt)
            self._hold(prompt, self._encode(prompt) if filed is None else _read(filed))
        self._held.move_to_end(prompt)
        return self._held[prompt]

    def _encode(self, prompt: str) -> Embedding:
        cuts = self.encoders.cuts(prompt)
        where = "; ".join(
            f"{cut.tokenizer} reads {cut.limit} of {cut.tokens} tokens and drops {cut.text!r}" for cut in cuts
        )
        if self.encoders.lost(prompt):
            raise UserError(f"{shortened(prompt)} is too long: {where}; shorten it, or raise max_sequence_length")
        if cuts and not self._warned:
            self._warned = True
            LOGGER.warning(
                "%s is too long for CLIP alone: %s; T5 reads all of it, so such prompts are used",
                shortened(prompt),
                where,
            )
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
            oldest, leaving = self._held.popitem(last=False)
            if self._folder is None:
                self._evicted.add(oldest)
            elif oldest not in self._filed:
                self._filed[oldest] = _write(leaving, Path(self._folder.name) / f"{len(self._filed)}.safetensors")


def _temporary(folder: Path | str) -> tempfile.TemporaryDirectory[str]:
    """A folder of this process inside another one, which is created with its parents."""
    place = expanded(folder)
    try:
        place.mkdir(parents=True, exist_ok=True)
        return tempfile.TemporaryDirectory(prefix="embeddings-", dir=place)
    except OSError as error:
        raise UserError(f"embeddings cannot be kept in {place}: {error}; set model.embedding_cache") from error


def _write(embedding: Embedding, file: Path) -> Path:
    from safetensors.torch import save_file

    try:
        save_file({name: value.cpu().contiguous() for name, value in embedding._asdict().items()}, file)
    except (OSError, SafetensorError) as error:  # a full disk
        raise UserError(f"an embedding cannot be written to {file}: {error}; set model.embedding_cache") from error
    return file


def _read(file: Path) -> Embedding:
    from safetensors.torch import load_file

    return Embedding(**load_file(file))
