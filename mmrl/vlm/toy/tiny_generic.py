"""Tiny random models outside the Qwen-VL family, as ordinary model folders: one text-only, two that see images."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmrl.errors import UserError
from mmrl.files import replaced
from mmrl.hub.compat import ensure_number_words, ensure_torchvision, quiet_transformers
from mmrl.vlm.toy.tiny import CHAT_TEMPLATE, MERGE, build_tiny_vlm, shape_positions, train_tokenizer
from mmrl.vlm.toy.tiny import FAMILIES as QWEN

QWEN_IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
QWEN_VIDEO = QWEN_IMAGE.replace("image", "video")


@dataclass(frozen=True)
class _TinyFamily:
    placeholder: str = ""
    """Placeholder token for an image in a prompt."""
    video: str = "<video>"
    """Placeholder text for a video, if the processor supports it."""
    tokens: dict[str, str] | None = None
    """Special tokens by the names that the processor looks for."""
    config: Callable[[dict[str, Any], dict[str, Any], Any], Any] | None = None
    """Builds the configuration from those of language model and tower, and the tokenizer; None for a plain language
    model."""
    processor: Callable[[Any, int, int], Any] | None = None
    """Builds a processor around a tokenizer, for images with a given side in pixels and number of tokens."""


def build_tiny(
    path: Path | str,
    *,
    family: str = "qwen2_5_vl",
    corpus: Sequence[str],
    vision_hidden: int = 48,
    vision_depth: int = 1,
    patch_size: int | None = None,
    min_pixels: int | None = None,
    max_pixels: int | None = None,
    **sizes: Any,
) -> Path:
    """Build a tiny model that sees images: Qwen-VL, or one whose images are all resized to one square.

    Args:
        path: folder to write.
        family: qwen2_5_vl, qwen3_vl, smolvlm or gemma3.
        corpus: texts that the tokenizer learns its merges from.
        vision_hidden: width of the tower.
        vision_depth: its blocks.
        patch_size: pixels on a side of a patch, of which an image token has 2 x 2; None is the family's own, here 14.
        min_pixels: smallest image area of Qwen-VL; the others refuse more than that of every image.
        max_pixels: largest image area, and of the others that of every image; None is the family's own default.
        sizes: further options of `build_tiny_vlm` or `build_tiny_generic`.

    Raises:
        UserError: an unknown family, an option that it does not have, or images that are no whole number of tokens.
    """
    tower: dict[str, Any] = {"vision_hidden": vision_hidden, "vision_depth": vision_depth, "patch_size": patch_size}
    if family in QWEN:
        pixels: dict[str, Any] = {"min_pixels": min_pixels, "max_pixels": max_pixels}
        return build_tiny_vlm(path, family=family, corpus=corpus, **tower, **pixels, **sizes)
    seeing = [name for name, row in FAMILIES.items() if row.config is not None]
    if family not in seeing:
        raise UserError(f"unknown model family {family!r}; available: {', '.join((*QWEN, *seeing))}")
    named = {**inspect.signature(build_tiny).parameters, **inspect.signature(build_tiny_generic).parameters}
    known = sorted(set(named) - {"path", "vision", "sizes"})
    if unknown := sorted(set(sizes) - set(known)):
        raise UserError(f"tiny models of {family} have no option {', '.join(unknown)}; they have: {', '.join(known)}")
    default = TOWER["image_size"] ** 2
    side, token = math.isqrt(max_pixels or default), MERGE * (patch_size or TOWER["patch_size"])
    if side % token or (max_pixels is not None and side**2 != max_pixels):
        raise UserError(
            f"max_pixels={max_pixels or default} is not the area of a square whose side is a multiple of {token} (an "
            f"image token); try {(token * max(1, round(side / token))) ** 2}"
        )
    if min_pixels is not None and min_pixels > side**2:
        raise UserError(f"min_pixels={min_pixels} exceeds the {side**2} pixels of every image; raise max_pixels")
    vision = {"hidden_size": vision_hidden, "intermediate_size": 2 * vision_hidden, "num_hidden_layers": vision_depth}
    vision |= {"image_size": side, "patch_size": token // MERGE}
    return build_tiny_generic(path, family=family, corpus=corpus, vision=vision, **{"max_positions": 4096, **sizes})


def build_tiny_generic(
    path: Path | str,
    *,
    family: str = "qwen3",
    corpus: Sequence[str],
    tokens: Sequence[str] = (),
    hidden: int = 48,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    intermediate: int | None = None,
    vision: Mapping[str, int] | None = None,
    vocab_size: int = 400,
    max_positions: int = 1024,
    initializer_range: float = 0.1,
    position_gain: float = 1.0,
    smooth_positions: bool = False,
    seed: int = 0,
) -> Path:
    """Build a small random model with its own tokenizer and save it as a model folder.

    Args:
        path: folder to write; created with its parents.
        family: row of `FAMILIES`: `model_type` of a language model, smolvlm or gemma3.
        corpus: texts that the byte-level BPE tokenizer learns its merges from.
        tokens: texts that are one token each, beyond `vocab_size`.
        hidden: width; a multiple of 2 * heads.
        layers: decoder layers.
        heads: query heads.
        kv_heads: key and value heads, a divisor of heads.
        intermediate: width of the gated layers; None is 2 * hidden.
        vision: changes to the tower's configuration; `image_size` is the side of all images, a multiple of twice
            `patch_size`.
        vocab_size: most tokens, without `tokens` and those of images.
        max_positions: longest sequence in tokens.
        initializer_range: standard deviation of the language model's random weights.
        position_gain: factor on the tower's position embeddings, as in `TinySizes`.
        smooth_positions: whether these are waves along rows and columns, as in `TinySizes`.
        seed: seed of the random weights.

    Returns:
        The folder, which loads with transformers' Auto classes.

    Raises:
        UserError: an unknown family, or options for positions of a model that does not learn them.
    """
    import torch
    import transformers

    if family not in FAMILIES:
        raise UserError(f"unknown model family {family!r}; available: {', '.join(FAMILIES)}")
    ensure_torchvision()
    row = FAMILIES[family]
    plain = train_tokenizer(corpus, vocab_size, tokens)
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=plain.backend_tokenizer,
        eos_token=plain.eos_token,
        pad_token=plain.pad_token,
        padding_side="left",
        chat_template=CHAT_TEMPLATE.replace(QWEN_IMAGE, row.placeholder).replace(QWEN_VIDEO, row.video),
        extra_special_tokens=row.tokens or {},
        clean_up_tokenization_spaces=False,
    )
    text = {
        "hidden_size": hidden,
        "intermediate_size": intermediate or 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": hidden // heads,
        "vocab_size": len(tokenizer),
        "max_position_embeddings": max_positions,
        "initializer_range": initializer_range,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "tie_word_embeddings": True,
    }
    tower: dict[str, Any] = {**TOWER, **(vision or {})}
    if row.config is None:
        config = transformers.AutoConfig.for_model(family, **text)
    else:
        config = row.config(text, tower, tokenizer)
    auto: Any = transformers.AutoModelForCausalLM if row.config is None else transformers.AutoModelForImageTextToText
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = auto.from_config(config, dtype=torch.float32)
    shape_positions(model, position_gain, smooth=smooth_positions)
    ends = [tokenizer.eos_token_id, tokenizer.pad_token_id]
    model.generation_config = transformers.GenerationConfig(
        do_sample=True, top_k=0, eos_token_id=ends, pad_token_id=tokenizer.pad_token_id
    )
    with replaced(Path(path)) as draft, quiet_transformers():
        model.save_pretrained(draft)
        side, count = tower["image_size"], _image_tokens(tower)
        (tokenizer if row.processor is None else row.processor(tokenizer, side, count)).save_pretrained(draft)
    return Path(path)


def _image_tokens(tower: Mapping[str, int]) -> int:
    return (tower["image_size"] // (MERGE * tower["patch_size"])) ** 2


def _smolvlm_config(text: dict[str, Any], vision: dict[str, Any], tokenizer: Any) -> Any:
    from transformers import AutoConfig

    return AutoConfig.for_model(
        "smolvlm",
        text_config=text | {"model_type": "llama"},
        vision_config=vision | {"model_type": "smolvlm_vision"},
        image_token_id=tokenizer.image_token_id,
        scale_factor=MERGE,
        tie_word_embeddings=True,
    )


def _smolvlm_processor(tokenizer: Any, side_px: int, tokens: int) -> Any:
    from transformers import SmolVLMImageProcessor, SmolVLMProcessor, SmolVLMVideoProcessor

    ensure_number_words()
    size = {"longest_edge": side_px}
    images = SmolVLMImageProcessor(size=size, max_image_size=size, do_image_splitting=False)
    videos = SmolVLMVideoProcessor(size=size, max_image_size=size, num_frames=2, fps=1)
    return SmolVLMProcessor(images, tokenizer, videos, image_seq_len=tokens, chat_template=tokenizer.chat_template)


def _gemma3_config(text: dict[str, Any], vision: dict[str, Any], tokenizer: Any) -> Any:
    from transformers import AutoConfig

    kinds = [
        "sliding_attention" if number % 2 == 0 else "full_attention" for number in range(text["num_hidden_layers"])
    ]
    return AutoConfig.for_model(
        "gemma3",
        text_config=text | {"model_type": "gemma3_text", "sliding_window": 16, "layer_types": kinds},
        vision_config=vision | {"model_type": "siglip_vision_model"},
        mm_tokens_per_image=_image_tokens(vision),
        image_token_index=tokenizer.image_token_id,
        boi_token_index=tokenizer.boi_token_id,
        eoi_token_index=tokenizer.eoi_token_id,
        tie_word_embeddings=True,
    )


def _gemma3_processor(tokenizer: Any, side_px: int, tokens: int) -> Any:
    from transformers import Gemma3ImageProcessor, Gemma3Processor

    images = Gemma3ImageProcessor(size={"height": side_px, "width": side_px})
    return Gemma3Processor(images, tokenizer, chat_template=tokenizer.chat_template, image_seq_length=tokens)


TOWER: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 56,
    "patch_size": 14,
}
"""Configuration of the vision towers."""


FAMILIES = {
    "qwen3": _TinyFamily(),
    "llama": _TinyFamily(),
    "smolvlm": _TinyFamily(
        "<image>",
        tokens={
            "image_token": "<image>",
            "fake_image_token": "<fake_token_around_image>",
            "global_image_token": "<global-img>",
            "end_of_utterance_token": "<end_of_utterance>",
        },
        config=_smolvlm_config,
        processor=_smolvlm_processor,
    ),
    "gemma3": _TinyFamily(
        "<start_of_image>",
        tokens={"image_token": "<image_soft_token>", "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"},
        config=_gemma3_config,
        processor=_gemma3_processor,
    ),
}
