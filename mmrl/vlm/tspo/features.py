"""CLIP features of frames and questions: computed once per video of any length, and kept on disk."""

from __future__ import annotations

import hashlib
import itertools
import logging
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mmrl.errors import UserError
from mmrl.files import expanded, replaced
from mmrl.hub.compat import LOADING_ERRORS, ensure_torchvision, quiet_transformers
from mmrl.runs.export import foreign_model
from mmrl.vlm.tspo.needle_tasks import Candidates

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

LOGGER = logging.getLogger("mmrl")


class ClipEncoder:
    """A frozen CLIP that embeds frames and texts.

    Args:
        path: folder or hub id.
        batch: frames embedded together.
        device: where it runs.

    Raises:
        UserError: it cannot be loaded.
    """

    def __init__(self, path: str, batch: int = 64, device: torch.device | str = "cpu") -> None:
        ensure_torchvision()
        from transformers import AutoImageProcessor, AutoTokenizer, CLIPModel

        name = foreign_model(path, "a CLIP")
        try:
            with quiet_transformers():
                self.model: Any = CLIPModel.from_pretrained(name)
                self.tokenizer: Any = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
                self.tokenizer.split_special_tokens = True  # a question that spells a control token means characters
                self.processor: Any = AutoImageProcessor.from_pretrained(name, trust_remote_code=False)
            self.model.eval().requires_grad_(False).to(device)
        except LOADING_ERRORS as error:
            reason = " ".join(str(error).split())[:200]
            raise UserError(
                f"no CLIP can be loaded from {path!r}: {type(error).__name__}: {reason}; use a folder or hub id such "
                "as openai/clip-vit-large-patch14"
            ) from error
        self.path = path
        self.batch = batch
        self._fingerprint = ""

    @property
    def width(self) -> int:
        """Width D of the embeddings."""
        return int(self.model.config.projection_dim)

    @property
    def fingerprint(self) -> str:
        """Digest of the weights and settings that every embedding depends on."""
        if not self._fingerprint:
            digest = hashlib.blake2b(digest_size=16)
            digest.update(self.processor.to_json_string().encode())
            # sorted: the order of a state dict is that of the code
            for name, weight in sorted(self.model.state_dict().items()):
                digest.update(f"{name} {weight.dtype} {tuple(weight.shape)}".encode())
                digest.update(weight.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
            self._fingerprint = digest.hexdigest()
        return self._fingerprint

    @torch.no_grad()
    def frames(self, frames: Iterable[NDArray[np.uint8]]) -> Tensor:
        """Embed frames, `batch` at a time.

        Args:
            frames: (H, W, 3) uint8 each, such as those of a decoder: they are taken one by one, and those of a batch
                are freed before the next ones are taken.

        Returns:
            (T, D) float32.
        """
        parts, left = [], iter(frames)
        while (pixels := self._next_pixels(left)) is not None:
            found = self.model.get_image_features(pixel_values=pixels.to(self.model.device, self.model.dtype))
            parts.append(_embedding(found).float().cpu())
        return torch.cat(parts) if parts else torch.zeros(0, self.width)

    def _next_pixels(self, left: Iterator[NDArray[np.uint8]]) -> Tensor | None:
        """The next batch as the model reads it; a separate function, so that its frames are freed at once."""
        some = list(itertools.islice(left, self.batch))
        return self.processor(images=some, return_tensors="pt").pixel_values if some else None

    @torch.no_grad()
    def texts(self, texts: Sequence[str]) -> Tensor:
        """Embed texts, (N, D) float32; those too long for the model are truncated."""
        longest = min(self.tokenizer.model_max_length, self.model.config.text_config.max_position_embeddings)
        inputs = self.tokenizer(list(texts), padding=True, truncation=True, max_length=longest, return_tensors="pt")
        inputs = inputs.to(self.model.device)
        found = self.model.get_text_features(input_ids=inputs.input_ids, attention_mask=inputs.attention_mask)
        return _embedding(found).float().cpu()


class FeatureStore:
    """Features of videos, in files named by a digest of content, candidate frames and encoder.

    A file is written whole or not at all and carries a digest of its numbers. A damaged one is computed again with a
    warning.

    Args:
        encoder: computes the features.
        folder: where they are kept; None keeps them in memory only.
        memory_mb: most megabytes in memory.
    """

    def __init__(self, encoder: ClipEncoder, folder: Path | str | None = None, memory_mb: float = 512.0) -> None:
        self.encoder = encoder
        self.folder = None if folder is None else expanded(folder)
        self.memory_bytes = memory_mb * 1e6
        self.counts = Counter(embedded=0)
        self._texts: dict[str, Tensor] = {}
        self._kept: OrderedDict[str, Tensor] = OrderedDict()
        self._bytes = 0

    @property
    def computed(self) -> int:
        """Videos that were embedded rather than read."""
        return self.counts["embedded"]

    def frames(self, candidates: Candidates) -> Tensor:
        """Embeddings of a video's candidates (T, D) float32; raises VideoError."""
        from safetensors.torch import save_file

        key = hashlib.blake2b(f"{candidates.digest} {self.encoder.fingerprint}".encode(), digest_size=16).hexdigest()
        # least recently used first out
        if key in self._kept:
            self._kept.move_to_end(key)
            return self._kept[key]
        file = None if self.folder is None else self.folder / f"{key}.safetensors"
        found = None if file is None else _read(file, len(candidates), self.encoder.width)
        if found is None:
            found = self.encoder.frames(candidates.frames())
            self.counts["embedded"] += 1
            if file is not None:
                # whole or not at all: other processes read the same folder
                with replaced(file) as draft:
                    save_file({"features": found.contiguous()}, draft, metadata={"digest": _digest(found)})
        self._keep(key, found)
        return found

    def text(self, text: str) -> Tensor:
        """Embedding of a text (D,) float32, kept in memory."""
        if text not in self._texts:
            self._texts[text] = self.encoder.texts([text])[0]
        return self._texts[text]

    def _keep(self, key: str, value: Tensor) -> None:
        self._kept[key] = value
        self._bytes += value.nbytes
        # the newest stays, even if it alone is larger than the limit
        while self._bytes > self.memory_bytes and len(self._kept) > 1:
            self._bytes -= self._kept.popitem(last=False)[1].nbytes


def _embedding(found: Any) -> Tensor:
    """Embeddings from a tensor, or from the output object of newer versions of transformers."""
    return found if isinstance(found, Tensor) else found.pooler_output


def _digest(features: Tensor) -> str:
    return hashlib.blake2b(features.contiguous().numpy().tobytes(), digest_size=16).hexdigest()


def _read(file: Path, count: int, width: int) -> Tensor | None:
    """Features in a file; None if it is missing or, with a warning, damaged."""
    from safetensors import SafetensorError, safe_open

    if not file.exists():
        return None
    try:
        with safe_open(str(file), framework="pt") as opened:
            features: Tensor = opened.get_tensor("features")
            expected = (opened.metadata() or {}).get("digest")
    except (SafetensorError, OSError, KeyError, ValueError) as error:
        LOGGER.warning("the features in %s are damaged (%s) and will be recomputed", file, error)
        return None
    # numbers that differ from those written would train on nonsense
    if tuple(features.shape) != (count, width) or _digest(features) != expected:
        LOGGER.warning(
            "the features in %s are damaged (numbers differ from those written) and will be recomputed", file
        )
        return None
    return features
