"""How a pipeline's own text encoders embed one prompt."""

from __future__ import annotations

import gc
from typing import Any, NamedTuple

import torch
from torch import Tensor

from diffusion.flux import family_of
from mmrl.errors import UserError

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
        if self.max_sequence_length < 1:
            raise UserError(f"max_sequence_length={max_sequence_length} must be at least 1")
        for part in self._family.text:
            if getattr(pipeline, part.encoder) is None and not part.optional:
                raise UserError(f"{type(pipeline).__name__} has no {part.encoder}; it cannot embed prompts")
        self._parts = [part for part in self._family.text if getattr(pipeline, part.encoder) is not None]

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
        with torch.no_grad():
            tokens, pooled = self._family.encode(self.pipeline, prompt, self.max_sequence_length)
        return Embedding(tokens[0], pooled[0])

    def cuts(self, prompt: str) -> list[Cut]:
        """Find the ends of a prompt that diffusers would drop with only a warning."""
        found = []
        for part in self._parts:
            limit = self.max_sequence_length if part.is_t5 else self.pipeline.tokenizer_max_length
            tokenizer = getattr(self.pipeline, part.tokenizer)
            ids = tokenizer(prompt, truncation=False, verbose=False).input_ids
            if len(ids) > limit:
                # the end token is kept, so one more token of text is lost
                found.append(Cut(part.tokenizer, len(ids), limit, tokenizer.decode(ids[limit - 1 : -1])))
        return found

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
