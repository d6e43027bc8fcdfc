"""How a pipeline's own text encoders embed one prompt: Stable Diffusion 3 and FLUX."""

from __future__ import annotations

import gc
import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mmrl.errors import UserError

SHOWN_CHARACTERS = 60


class Embedding(NamedTuple):
    """Embedding of one prompt: L tokens of width D and a pooled one of width P."""

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
        self._family = _family_of(pipeline)
        default = self._family.max_sequence_length
        self.max_sequence_length = default if max_sequence_length is None else max_sequence_length
        if self.max_sequence_length < 1:
            raise UserError(f"max_sequence_length={max_sequence_length} must be at least 1")
        for part in self._family.parts:
            if getattr(pipeline, part.encoder) is None and not part.optional:
                raise UserError(f"{type(pipeline).__name__} has no {part.encoder}; it cannot embed prompts")
        self._parts = [part for part in self._family.parts if getattr(pipeline, part.encoder) is not None]

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
                    f"pipeline.{name}.requires_grad_(False), or embed the prompts anew for every update"
                )
            if encoder.training:
                raise UserError(f"{name} is in training mode and its dropout would be cached; call .eval() on it")

    def encode(self, prompt: str) -> Embedding:
        """Embed one prompt with the pipeline's own `encode_prompt`.

        Gradient: none.
        """
        with torch.no_grad():
            tokens, pooled = self._family.encode(self.pipeline, prompt, self.max_sequence_length)
        return Embedding(tokens[0], pooled[0])

    def cuts(self, prompt: str) -> list[Cut]:
        """Find the ends of a prompt that diffusers would drop with only a warning."""
        found = []
        for name, limit in self._limits():
            tokenizer = getattr(self.pipeline, name)
            ids = tokenizer(prompt, truncation=False, verbose=False).input_ids
            if len(ids) > limit:
                # the end token is kept, so the text loses the place before it too
                found.append(Cut(name, len(ids), limit, tokenizer.decode(ids[limit - 1 : -1])))
        return found

    def fingerprint(self) -> str:
        """Digest of everything that an embedding depends on beside its prompt."""
        digest = hashlib.blake2b(digest_size=16)
        digest.update(f"{type(self.pipeline).__name__} {self.max_sequence_length}".encode())
        for name, limit in self._limits():
            digest.update(f"{name} {limit} {_tokenizer_text(getattr(self.pipeline, name))}".encode())
        for encoder_name, encoder in self.modules().items():
            digest.update(f"{encoder_name} {type(encoder).__name__} {encoder.config.to_json_string()}".encode())
            for name, weight in encoder.state_dict().items():
                digest.update(f"{name} {weight.dtype} {tuple(weight.shape)}".encode())
                digest.update(weight.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
        return digest.hexdigest()

    def free(self) -> int:
        """Take the encoders out of the pipeline; they leave memory unless something else holds them."""
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

    def _limits(self) -> Iterator[tuple[str, int]]:
        for part in self._parts:
            yield part.tokenizer, self.max_sequence_length if part.is_t5 else self.pipeline.tokenizer_max_length


def shortened(prompt: str) -> str:
    """A prompt as an error message shows it."""
    return f"prompt {prompt[:SHOWN_CHARACTERS]!r}" + ("..." if len(prompt) > SHOWN_CHARACTERS else "")


def _tokenizer_text(tokenizer: Any) -> str:
    core = getattr(tokenizer, "backend_tokenizer", None)
    if core is None:
        return json.dumps(tokenizer.get_vocab(), sort_keys=True)
    # truncation and padding are only what the last call asked for
    state = json.loads(core.to_str()) | {"truncation": None, "padding": None}
    return json.dumps(state, sort_keys=True)


def _encode_sd3(pipeline: Any, prompt: str, length: int) -> tuple[Tensor, Tensor]:
    tokens, _, pooled, _ = pipeline.encode_prompt(
        prompt, None, None, do_classifier_free_guidance=False, max_sequence_length=length
    )
    return tokens, pooled


def _encode_flux(pipeline: Any, prompt: str, length: int) -> tuple[Tensor, Tensor]:
    tokens, pooled, _ = pipeline.encode_prompt(prompt, max_sequence_length=length)
    return tokens, pooled


def _family_of(pipeline: Any) -> _Family:
    for base in type(pipeline).__mro__:
        if base.__name__ in PIPELINES:
            return PIPELINES[base.__name__]
    raise UserError(f"cannot embed prompts for a {type(pipeline).__name__}; there are: {', '.join(PIPELINES)}")


@dataclass(frozen=True)
class _Part:
    encoder: str
    tokenizer: str
    is_t5: bool = False
    optional: bool = False


@dataclass(frozen=True)
class _Family:
    parts: tuple[_Part, ...]
    max_sequence_length: int
    encode: Callable[[Any, str, int], tuple[Tensor, Tensor]]


PIPELINES = {
    "StableDiffusion3Pipeline": _Family(
        parts=(
            _Part("text_encoder", "tokenizer"),
            _Part("text_encoder_2", "tokenizer_2"),
            _Part("text_encoder_3", "tokenizer_3", is_t5=True, optional=True),
        ),
        max_sequence_length=256,
        encode=_encode_sd3,
    ),
    "FluxPipeline": _Family(
        parts=(_Part("text_encoder", "tokenizer"), _Part("text_encoder_2", "tokenizer_2", is_t5=True)),
        max_sequence_length=512,
        encode=_encode_flux,
    ),
}
"""Pipelines by class name: their encoders and tokenizers, their default length of the T5 encoder, how they embed."""
