"""The model's processor, or an image-only one if torchvision is missing."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from mmrl.errors import UserError
from mmrl.files import own_config, read_text
from mmrl.hub.compat import ensure_number_words, ensure_torchvision
from mmrl.vlm.families.family import family_of


class ImageOnlyProcessor:
    """Tokenizer and Pillow image processor with the interface of a Qwen-VL processor, as far as mmrl uses it.

    transformers cannot build the official processors without torchvision, not even for images, because their
    video part needs it.

    Source: huggingface/transformers models/qwen2_5_vl/processing_qwen2_5_vl.py (what the placeholders expand to).
    """

    image_token = "<|image_pad|>"
    video_token = "<|video_pad|>"
    video_processor = None

    def __init__(self, image_processor: Any, tokenizer: Any) -> None:
        self.image_processor = image_processor
        self.tokenizer = tokenizer

    @property
    def chat_template(self) -> str | None:
        """Jinja template of the chat markup."""
        return self.tokenizer.chat_template

    def apply_chat_template(self, messages: Sequence[dict[str, Any]], **options: Any) -> Any:
        """Render chat turns with the tokenizer's template."""
        return self.tokenizer.apply_chat_template(messages, **options)

    def __call__(
        self,
        *,
        text: Sequence[str],
        images: Sequence[Sequence[Any]] | None = None,
        return_tensors: str = "pt",
        add_special_tokens: bool = False,
    ) -> dict[str, torch.Tensor]:
        """Tokenise one rendered prompt and process its images."""
        prompt = text[0]
        output: dict[str, torch.Tensor] = {}
        if images:
            processed = self.image_processor(images=images, return_tensors=return_tensors)
            output = {name: processed[name] for name in ("pixel_values", "image_grid_thw")}
            prompt = self._expand(prompt, output["image_grid_thw"])
        ids = self.tokenizer([prompt], return_tensors=return_tensors)["input_ids"]
        image_id = self.tokenizer.convert_tokens_to_ids(self.image_token)
        return {"input_ids": ids, "mm_token_type_ids": (ids == image_id).long(), **output}

    def save_pretrained(self, path: Path | str) -> None:
        """Write tokenizer and image processor; `load_processor` reads them with or without torchvision."""
        self.tokenizer.save_pretrained(path)
        self.image_processor.save_pretrained(path)

    def _expand(self, prompt: str, grids: torch.Tensor) -> str:
        merge = self.image_processor.merge_size**2
        first, *pieces = prompt.split(self.image_token)
        counts = (grids.prod(-1) // merge).tolist()
        return first + "".join(self.image_token * n + piece for n, piece in zip(counts, pieces, strict=True))


class TextProcessor:
    """A tokenizer with the interface of a processor, as far as mmrl uses it."""

    image_token = video_token = image_processor = video_processor = None

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    @property
    def chat_template(self) -> str | None:
        """Jinja template of the chat markup."""
        return self.tokenizer.chat_template

    def apply_chat_template(self, messages: Sequence[dict[str, Any]], **options: Any) -> Any:
        """Render chat turns with plain strings, because templates of language models do not read lists of parts."""
        turns = [turn | {"content": _joined(turn["content"])} for turn in messages]
        return self.tokenizer.apply_chat_template(turns, **options)

    def __call__(
        self, *, text: Sequence[str], images: None = None, add_special_tokens: bool = False, **options: Any
    ) -> dict[str, torch.Tensor]:
        """Tokenise one rendered prompt."""
        return {"input_ids": self.tokenizer(list(text), add_special_tokens=add_special_tokens, **options)["input_ids"]}

    def save_pretrained(self, path: Path | str) -> None:
        """Write the tokenizer."""
        self.tokenizer.save_pretrained(path)


def _joined(content: Any) -> Any:
    """Join the text parts of a message; other parts stay, so that the template rejects them."""
    texts = content if isinstance(content, list) and all(part.get("type") == "text" for part in content) else None
    return content if texts is None else "".join(part["text"] for part in texts)


def load_processor(path: str, chat_template: str | None = None) -> Any:
    """Load the processor of a model, or the tokenizer of a language model as one.

    Args:
        path: folder or hub id.
        chat_template: Jinja file that replaces the model's chat template.

    Raises:
        UserError: the processor or the file cannot be read, or there is no chat template.
    """
    absent = ensure_torchvision() == "absent"
    from transformers import AutoProcessor, AutoTokenizer, Qwen2VLImageProcessorPil

    try:
        if absent:
            tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
            kind = _image_processor_of(path)
            if kind and not kind.startswith("Qwen2VLImageProcessor"):
                raise UserError(
                    f"its images need {kind}, which requires torchvision. Install it with: pip install "
                    "'mmrl-suite[vlm]'"
                )
            images = Qwen2VLImageProcessorPil.from_pretrained(path) if kind else None
            processor: Any = TextProcessor(tokenizer) if images is None else ImageOnlyProcessor(images, tokenizer)
        else:
            ensure_number_words()
            found = AutoProcessor.from_pretrained(path, trust_remote_code=False)
            processor = found if hasattr(found, "tokenizer") else TextProcessor(found)
    except Exception as error:  # hub, JSON and tokenizer files each raise their own kinds
        raise UserError(f"the processor of {path} cannot be loaded: {type(error).__name__}: {error}") from error
    if chat_template is not None:
        set_chat_template(processor, own_config(Path(chat_template).expanduser()))
    if processor.tokenizer.chat_template is None and processor.chat_template is None:
        raise UserError(
            f"{path} has no chat template; set model.chat_template, or add chat_template.jinja to the folder"
        )
    processor.tokenizer.padding_side = "left"
    return processor


def set_chat_template(processor: Any, file: Path) -> None:
    """Replace the chat template of a processor and its tokenizer; raises UserError."""
    if not file.is_file():
        raise UserError(f"model.chat_template: {file} is not a file; it must be a Jinja template")
    processor.tokenizer.chat_template = read_text(file)
    if not isinstance(getattr(type(processor), "chat_template", None), property):  # ours read the tokenizer's
        processor.chat_template = processor.tokenizer.chat_template
    try:
        processor.apply_chat_template([{"role": "user", "content": [{"type": "text", "text": "?"}]}], tokenize=False)
    except Exception as error:  # Jinja's kinds, and those of the template's own functions
        raise UserError(f"model.chat_template: {file} cannot be rendered: {type(error).__name__}: {error}") from error


def _image_processor_of(path: str) -> str:
    """Name of a model's image processor, by its files; empty for a language model."""
    from transformers import ImageProcessingMixin

    try:
        content, _ = ImageProcessingMixin.get_image_processor_dict(path)
    except OSError:
        return ""
    return str(content.get("image_processor_type") or content.get("feature_extractor_type") or "")


def eos_ids(network: Any, tokenizer: Any) -> tuple[int, ...]:
    """Ids that end a response: those of the generation config, then the tokenizer's."""
    found = getattr(network.generation_config, "eos_token_id", None)
    ids = [] if found is None else [found] if isinstance(found, int) else list(found)
    if tokenizer.eos_token_id is not None:
        ids.append(tokenizer.eos_token_id)
    if not ids:
        raise UserError("neither generation_config.json nor the tokenizer defines an end-of-turn token")
    return tuple(dict.fromkeys(ids))


def file_eos_ids(base: str, settings: Any, tokenizer: Any) -> tuple[int, ...]:
    """The same of a model folder and its configuration, without the network."""
    from transformers import GenerationConfig

    try:
        generation = GenerationConfig.from_pretrained(base)
    except OSError:
        # as transformers does for a model without the file
        generation = GenerationConfig.from_model_config(settings)
    return eos_ids(SimpleNamespace(generation_config=generation), tokenizer)


def stop_at(network: Any, ends: Sequence[int]) -> None:
    """Set all end tokens in the generation config, which is part of exports."""
    found = getattr(network.generation_config, "eos_token_id", None)
    named = [] if found is None else [found] if isinstance(found, int) else list(found)
    if more := [end for end in ends if end not in named]:
        network.generation_config.eos_token_id = [*named, *more]


def banned_ids(network: Any, tokenizer: Any) -> Tensor:
    """Ids that must never be sampled: image markup breaks the next forward pass, and unused ids have no text."""
    config, vocabulary = network.config, tokenizer.get_vocab()
    family, entries = family_of(config.model_type), config.get_text_config().vocab_size
    ids = {vocabulary[token] for token in family.media_tokens if token in vocabulary}
    ids |= {token for token in family.banned(config) if token < entries}
    ids |= set(range(len(tokenizer), entries))
    return torch.tensor(sorted(ids), dtype=torch.int64)
