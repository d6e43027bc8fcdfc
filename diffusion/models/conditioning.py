"""Prompt embeddings from a pipeline's own text encoders, computed once and selected for the rows of a batch."""

from __future__ import annotations

import gc
import logging
import tempfile
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from torch import Tensor

from diffusion.data.prompts import ReferenceImage
from diffusion.families.base import MASK, REFERENCE, Cut, Family, Text, padded
from diffusion.models.pipelines import own_precision, quiet_diffusers
from mmrl.core.payload import to_device, to_host
from mmrl.errors import UserError
from mmrl.files import expanded

LOGGER = logging.getLogger("mmrl")
SHOWN_CHARACTERS = 60


class TextEncoders:
    """The text encoders and tokenizers of one pipeline."""

    def __init__(self, family: Family) -> None:
        self.family = family
        self.pipeline = family.pipeline
        self.freed = False
        for part in family.text_parts:
            if getattr(self.pipeline, part.encoder) is None and not part.optional:
                raise UserError(f"{type(self.pipeline).__name__} has no {part.encoder}; it cannot embed prompts")
        self.parts = [part for part in family.text_parts if getattr(self.pipeline, part.encoder) is not None]
        for part in self.parts:
            if part.is_clip:  # it pools at the first end token, so one spelled out in a prompt would cut the prompt
                # splitting makes the tokenizer spell such a token out as ordinary text
                getattr(self.pipeline, part.tokenizer).split_special_tokens = True

    def modules(self) -> dict[str, Any]:
        """Encoders by their names in the pipeline; empty after `free`."""
        return {} if self.freed else {part.encoder: getattr(self.pipeline, part.encoder) for part in self.parts}

    def to(self, device: torch.device) -> None:
        """Move the encoders, and the autoencoder for images to be edited, before the networks move."""
        # the autoencoder too: it encodes images to be edited
        for module in (*self.modules().values(), self.pipeline.vae):
            module.to(device)

    def check_constant(self) -> None:
        """Reject encoders that could still change or are random; raises UserError naming the encoder."""
        for name, encoder in self.modules().items():
            trainable = next((key for key, weight in encoder.named_parameters() if weight.requires_grad), None)
            if trainable is not None:
                raise UserError(
                    f"{name} is trainable ({trainable}), so its embeddings cannot be cached; freeze it with "
                    f"pipeline.{name}.requires_grad_(False), or re-embed the prompts for every update"
                )
            if encoder.training:
                raise UserError(
                    f"{name} is in training mode and its dropout would be cached; call pipeline.{name}.eval()"
                )

    def encode(self, prompt: str, image: Tensor | None = None, *, negative: bool = False) -> Text:
        """Embed one prompt, with the image (3, h, w) in -1..1 that it edits, without gradient."""
        # diffusers would warn about every prompt that CLIP truncates
        with torch.no_grad(), own_precision(self.family.text_device), quiet_diffusers():
            if image is None:
                return self.family.encode(prompt, negative=negative)
            return self.family.encode_edit(prompt, image, negative=negative)

    def cuts(self, prompt: str) -> list[Cut]:
        """Find the ends of a prompt that diffusers would truncate with just a warning."""
        found = []
        for part in self.parts:
            tokenizer = getattr(self.pipeline, part.tokenizer)
            limit = tokenizer.model_max_length if part.is_clip else self.family.max_sequence_length
            ids = self.family.token_ids(part, prompt)
            if len(ids) > limit:
                # the end token is kept, so one more token of text is lost
                found.append(Cut(part.tokenizer, len(ids), limit, tokenizer.decode(ids[limit - 1 : -1])))
        return found

    def lost(self, prompt: str) -> list[Cut]:
        """Find the ends of a prompt that no encoder reads; T5 reads prompts that are too long for CLIP."""
        found = self.cuts(prompt)
        # CLIP always truncates long prompts; what counts is whether a long encoder reads all of it
        whole = {part.tokenizer for part in self.parts if not part.is_clip} - {cut.tokenizer for cut in found}
        return [] if whole else found

    def free(self) -> int:
        """Remove the encoders from the pipeline; returns their bytes, freed unless they are referenced elsewhere."""
        modules = self.modules()
        # by identity: encoders may share tensors, which count once
        tensors = {id(t): t.nbytes for module in modules.values() for t in (*module.parameters(), *module.buffers())}
        for name in modules:
            setattr(self.pipeline, name, None)
        self.freed = True
        # the last references here; without it `empty_cache` would find the weights still in use
        del modules
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        return sum(tensors.values())


def shortened(prompt: str) -> str:
    """A prompt, shortened for an error message."""
    return f"prompt {prompt[:SHOWN_CHARACTERS]!r}" + ("..." if len(prompt) > SHOWN_CHARACTERS else "")


@dataclass(frozen=True)
class TextRows:
    """Embeddings of U distinct prompts, and the prompt of each of B rows; read-only, as the cache shares them."""

    values: Text
    """Entries (U, ...) by name."""
    index: Tensor
    """Prompt of each row (B,) int64, on the CPU."""

    def __len__(self) -> int:
        return len(self.index)

    @property
    def tokens(self) -> Tensor:
        """Text tokens (U, L, D)."""
        return self.values["tokens"]

    def select(self, rows: Tensor | slice) -> TextRows:
        """Select rows; the embeddings are shared.

        Args:
            rows: (B',) int64 on the CPU, or a slice.

        Returns:
            The B' rows.
        """
        return TextRows(self.values, self.index[rows])

    def followed_by(self, other: TextRows) -> TextRows:
        """Append the rows of another object.

        Args:
            other: rows of the same family; masked entries are padded if their prompts differ in length.

        Returns:
            All rows, over U + U' prompts.
        """
        joined = {name: _joined(name, self.values, other.values) for name in self.values}
        # the other rows' prompts follow after this object's U
        return TextRows(joined, torch.cat([self.index, other.index + len(self.tokens)]))

    def for_rows_of(self, other: TextRows) -> TextRows:
        """Repeat this single prompt for each row of another object, together with that row's image to be edited."""
        if REFERENCE not in other.values:
            return self.select(torch.zeros(len(other), dtype=torch.int64))
        # one image per distinct row text, so the negative needs as many copies
        count = len(other.values[REFERENCE])
        values = {name: value.expand(count, *value.shape[1:]) for name, value in self.values.items()}
        return TextRows(values | {REFERENCE: other.values[REFERENCE]}, other.index)

    def expanded(self) -> Text:
        """One embedding per row.

        Returns:
            Entries (B, ...). They are views without extra memory if all rows share one prompt or each prompt has one
            row in order; otherwise they are gathered.
        """
        return {name: self._for_rows(value) for name, value in self.values.items()}

    def _for_rows(self, values: Tensor) -> Tensor:
        first = int(self.index[0]) if len(self) else 0
        if bool((self.index == first).all()):
            # expanded, not copied: guidance shares one negative prompt among all rows
            return values[first : first + 1].expand(len(self), *values.shape[1:])
        if torch.equal(self.index, torch.arange(len(values))):
            return values
        return values.index_select(0, to_device(self.index, values.device))


def _joined(name: str, one: Text, other: Text) -> Tensor:
    values = [one[name], other[name]]
    # masks and the entries they belong to have a length axis that may differ
    if name.endswith(MASK) or name + MASK in one:
        size = max(value.shape[1] for value in values)
        # `padded` works on the first axis, the length is the second
        values = [padded(value.transpose(0, 1), size).transpose(0, 1) for value in values]
    return torch.cat(values)


class _Key(NamedTuple):
    """Cache key: a prompt as positive or negative, with or without an image to be edited."""

    prompt: str
    negative: bool = False
    image: str = ""
    """Digest of the image."""


class PromptEmbeddings:
    """Embeddings of a pipeline's frozen text encoders, computed once per distinct prompt by its own `encode_prompt`.

    Prompts are encoded one at a time, so an embedding does not depend on the other prompts of a call, not even in its
    last bit. Rows carry no gradient. The least recently used embeddings are evicted first, to files if there is a
    folder; `close` deletes the files.

    Args:
        family: family of a pipeline with frozen text encoders in evaluation mode.
        max_bytes: memory limit; the newest embedding is always kept.
        folder: where evicted embeddings are written; None means they are computed again.
        size: height and width in pixels of images to be edited.

    Raises:
        UserError: a text encoder is missing or could still change.
    """

    def __init__(
        self,
        family: Family,
        *,
        max_bytes: int = 2**28,
        folder: Path | str | None = None,
        size: tuple[int, int] | None = None,
    ) -> None:
        self.family = family
        self.size = size
        self.encoders = TextEncoders(family)
        self.encoders.check_constant()
        self.encoded = 0
        """Prompts that went through the text encoders."""
        self.max_bytes = max_bytes
        self._lengths: dict[str, int] = {}
        self._held: OrderedDict[_Key, Text] = OrderedDict()
        self._evicted: set[_Key] = set()
        self._warned = False
        self._folder = None if folder is None else _temporary(folder)
        self._filed: dict[_Key, Path] = {}

    def pad_to(self, prompts: Iterable[str], negatives: Iterable[str] = ("",)) -> None:
        """Pad all later rows to the length of the longest of these prompts.

        In low precision, padding affects the result: batched with longer prompts, the same prompt is rounded
        differently. Only families with masked text need this, and only their tokenizers are called.
        """
        if not self.family.ragged:
            return
        for side, texts in ((False, prompts), (True, negatives)):
            for prompt in texts:
                for name, length in self.family.lengths(prompt, negative=side).items():
                    # the maximum over both kinds, since guidance in one call stacks them
                    self._lengths[name] = max(length, self._lengths.get(name, 0))

    def rows(
        self,
        prompts: Sequence[str],
        samples: int = 1,
        *,
        allow_empty: bool = False,
        negative: bool = False,
        images: Sequence[ReferenceImage | None] | None = None,
    ) -> TextRows:
        """Embeddings of prompts; each distinct prompt is embedded once.

        Args:
            prompts: at least one prompt; repetitions are allowed.
            samples: consecutive rows per prompt (the group size).
            allow_empty: whether a prompt may be empty, i.e. without a caption.
            negative: whether these are negative prompts, which some families embed differently.
            images: image to be edited by each prompt, for all prompts or none.

        Returns:
            len(prompts) * samples rows.

        Raises:
            UserError: a prompt is empty, too long for a tokenizer or unavailable after `free_encoders`; or the encoders
                have become trainable.
        """
        if not prompts:
            raise UserError("there are no prompts to embed")
        for number, prompt in enumerate(prompts, start=1):
            if not isinstance(prompt, str) or not (prompt.strip() or allow_empty):
                raise UserError(f"prompt {number} of {len(prompts)} is empty: {prompt!r}")
        self.encoders.check_constant()
        # most families embed both kinds alike; then a prompt has one cache entry for both
        differs = self.family.negative_differs
        given = [None] * len(prompts) if images is None else images
        keys = [
            # An empty prompt is one without a caption, whose prediction guidance reads as that of the negative prompt.
            # Images by content: equal images of different files share an embedding.
            _Key(prompt, differs and (negative or not prompt), "" if image is None else image.digest)
            for prompt, image in zip(prompts, given, strict=True)
        ]
        # in order of first use, which keeps rows of distinct prompts views in `_for_rows`
        numbers = {key: number for number, key in enumerate(dict.fromkeys(keys))}
        sources = dict(zip(keys, given, strict=True))
        found = [self._embedding(key, sources[key]) for key in numbers]
        index = torch.tensor([numbers[key] for key in keys]).repeat_interleave(samples)
        network = getattr(self.family.pipeline, self.family.networks[0])
        device = torch.device("cpu") if network is None else network.device  # some pipelines only have encoders
        collated = self.family.collate(found, self._lengths)
        return TextRows({name: to_device(value, device) for name, value in collated.items()}, index)

    def negative(self, prompt: str = "", rows: int = 1) -> TextRows:
        """Rows of the negative prompt of classifier-free guidance, which may be empty."""
        return self.rows([prompt], rows, allow_empty=True, negative=True)

    def free_encoders(self) -> int:
        """Remove the text encoders from the pipeline to free memory.

        Afterwards only cached prompts are available, and the pipeline is saved without text encoders.

        Returns:
            Bytes of weights removed from the pipeline.

        Raises:
            UserError: some embeddings were evicted and could not be computed again.
        """
        if self._evicted:
            raise UserError(
                f"{len(self._evicted)} prompts were evicted from the cache of {self.max_bytes} bytes and can no "
                f"longer be embedded, the first one {shortened(min(self._evicted).prompt)}; pass a folder or "
                "increase max_bytes"
            )
        return self.encoders.free()

    def close(self) -> None:
        """Delete the files."""
        if self._folder is not None:
            self._folder.cleanup()
            self._filed.clear()

    def _embedding(self, key: _Key, image: ReferenceImage | None) -> Text:
        if key not in self._held:
            filed = self._filed.get(key)
            self._hold(key, self._encode(key, image) if filed is None else _read(filed))
        # most recently used last; eviction starts at the front
        self._held.move_to_end(key)
        return self._held[key]

    def _encode(self, key: _Key, image: ReferenceImage | None) -> Text:
        prompt = key.prompt
        cuts = self.encoders.cuts(prompt)
        where = "; ".join(
            f"{cut.tokenizer} reads {cut.limit} of {cut.tokens} tokens and drops {cut.text!r}" for cut in cuts
        )
        if self.encoders.lost(prompt):
            raise UserError(f"{shortened(prompt)} is too long: {where}; shorten it, or increase max_sequence_length")
        if cuts and not self._warned:
            self._warned = True
            LOGGER.warning(
                "%s is too long for CLIP alone: %s; T5 reads all of it, so these prompts are used",
                shortened(prompt),
                where,
            )
        if self.encoders.freed:
            raise UserError(
                f"{shortened(prompt)} is not cached and the text encoders were freed; embed it before freeing them"
            )
        self.encoded += 1
        embedding = self.encoders.encode(prompt, self._pixels(image), negative=key.negative)
        # held on the CPU: many prompts must not fill the memory of the accelerator
        # one transfer for all entries
        held = dict(zip(embedding, to_host(list(embedding.values())), strict=True))
        for name, value in held.items():
            if not value.isfinite().all():
                raise UserError(
                    f"the embedding of {shortened(prompt)} has NaN or infinite entries ({name}); set model.dtype to "
                    "bfloat16 or float32"
                )
        return held

    def _pixels(self, image: ReferenceImage | None) -> Tensor | None:
        """The image (3, h, w) in -1..1 at the size of the run, as the autoencoder expects it."""
        if image is None:
            return None
        if not self.family.takes_image:
            raise UserError(f"{self.family.pipeline_class} does not support image editing")
        assert self.size is not None
        autoencoder = self.family.pipeline.vae
        pixels = torch.from_numpy(image.pixels(*self.size).copy()).to(autoencoder.device)
        return pixels.permute(2, 0, 1).to(autoencoder.dtype) / 127.5 - 1

    def _hold(self, key: _Key, embedding: Text) -> None:
        self._held[key] = embedding
        self._evicted.discard(key)
        # the newest always stays, even if it alone exceeds the limit
        while len(self._held) > 1 and sum(map(_bytes, self._held.values())) > self.max_bytes:
            oldest, leaving = self._held.popitem(last=False)
            if self._folder is None:
                self._evicted.add(oldest)  # lost for good once the encoders are freed; `free_encoders` checks this
            elif oldest not in self._filed:
                self._filed[oldest] = _write(leaving, Path(self._folder.name) / f"{len(self._filed)}.safetensors")


def _temporary(folder: Path | str) -> tempfile.TemporaryDirectory[str]:
    """A subfolder for this process; the parent folders are created."""
    place = expanded(folder)
    try:
        place.mkdir(parents=True, exist_ok=True)
        # one per process: a shared folder would be deleted by the process that ends first
        return tempfile.TemporaryDirectory(prefix="embeddings-", dir=place)
    except OSError as error:
        raise UserError(
            f"embeddings cannot be stored in {place}: {error}; set model.embedding_cache to another folder"
        ) from error


def _bytes(embedding: Text) -> int:
    return sum(value.nbytes for value in embedding.values())


def _write(embedding: Text, file: Path) -> Path:
    from safetensors.torch import save_file

    try:
        # safetensors refuses views, which embeddings often are
        save_file({name: value.cpu().contiguous() for name, value in embedding.items()}, file)
    except (OSError, SafetensorError) as error:  # a full disk
        raise UserError(
            f"an embedding cannot be written to {file}: {error}; set model.embedding_cache to another folder"
        ) from error
    return file


def _read(file: Path) -> Text:
    from safetensors.torch import load_file

    return dict(load_file(file))
