"""Tiny random vision-language models of real architectures, saved as ordinary model folders.

Only sizes and weights are toy: the classes, the processor, the chat markup and the files are those of the
released models, so whatever runs on the folder also runs on a downloaded one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmrl.errors import UserError
from mmrl.files import replaced
from mmrl.hub.compat import ensure_torchvision, quiet_transformers

if TYPE_CHECKING:
    from torch import Tensor

CONTROL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
ANSWER_TOKENS = ("<think>", "</think>", "<answer>", "</answer>")
ROLES = ("system", "user", "assistant")
MERGE = 2
"""Patches on a side that the vision towers merge into one token."""

CHAT_TEMPLATE = """\
{%- macro parts(content) -%}
{%- if content is string -%}{{ content }}{%- else -%}
{%- for part in content -%}
{%- if part.type == 'image' -%}<|vision_start|><|image_pad|><|vision_end|>
{%- elif part.type == 'video' -%}<|vision_start|><|video_pad|><|vision_end|>
{%- else -%}{{ part.text }}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{%- endmacro -%}
{%- for turn in messages -%}
{{ '<|im_start|>' + turn.role + '\\n' + parts(turn.content) + '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}
"""


def build_tiny_vlm(
    path: Path | str,
    *,
    family: str = "qwen2_5_vl",
    corpus: Sequence[str],
    hidden: int = 48,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    intermediate: int | None = None,
    vision_hidden: int = 48,
    vision_depth: int = 1,
    vision_heads: int | None = None,
    vision_intermediate: int | None = None,
    full_attention: Sequence[int] | None = None,
    patch_size: int | None = None,
    vocab_size: int = 400,
    tokens: Sequence[str] = (),
    embedding_rows: int | None = None,
    min_pixels: int | None = None,
    max_pixels: int | None = None,
    max_positions: int = 4096,
    initializer_range: float = 0.05,
    attention_gain: float = 1.0,
    position_gain: float = 1.0,
    smooth_positions: bool = False,
    dtype: str = "float32",
    seed: int = 0,
) -> Path:
    """Build a small random vision-language model with its own tokenizer and save it as a model folder.

    Args:
        path: folder to write; created with its parents.
        family: row of `FAMILIES`.
        corpus: texts that the byte-level BPE tokenizer learns its merges from.
        hidden: width of the language model; a multiple of 2 * heads.
        layers: decoder layers.
        heads: query heads.
        kv_heads: key and value heads, a divisor of heads.
        intermediate: width of the gated layers; None is 2 * hidden.
        vision_hidden: width of the vision tower; a multiple of 4 * vision_heads.
        vision_depth: blocks of the vision tower.
        vision_heads: heads of the vision tower; None is as many as heads.
        vision_intermediate: width of the tower's feed-forward layers; None is 2 * vision_hidden.
        full_attention: tower blocks that attend over the whole image, the others over windows of 112 pixels
            (Qwen2.5-VL only); None is all blocks, since windows only pay on large images.
        patch_size: pixels on a side of one patch; None is the released one (14, or 16 for Qwen3-VL).
        vocab_size: most tokens, counting the 256 bytes and the control tokens.
        tokens: texts that are one token each, beyond `vocab_size`, such as the fixed parts of an answer's JSON.
        embedding_rows: rows of the embedding and the head, the last of them without a token, as released models
            have; None is one a token.
        min_pixels: smallest image area in pixels after resizing; None is 2 x 2 image tokens.
        max_pixels: largest image area in pixels after resizing; None is 16 x 16 image tokens.
        max_positions: longest sequence in tokens.
        initializer_range: standard deviation of the random weights.
        attention_gain: factor on the query and key weights of decoder and tower; random weights attend almost
            uniformly without, which hides errors in masks and positions. Qwen3-VL's decoder normalises both after
            these weights and does not change.
        position_gain: factor on the tower's learnt position embeddings (Qwen3-VL), which beside random patch weights
            are so small that a model takes long to tell where something is.
        smooth_positions: position embeddings (Qwen3-VL) that are waves along rows and columns, so that places near each
            other look alike, as in released models; random ones make a model learn every place by itself.
        dtype: precision of the saved weights, float32 or bfloat16.
        seed: seed of the random weights.

    Returns:
        The folder, which loads with AutoModelForImageTextToText and AutoProcessor.

    Raises:
        UserError: unknown family or sizes that do not fit together.
    """
    if family not in FAMILIES:
        raise UserError(f"unknown model family {family!r}; there are: {', '.join(FAMILIES)}")
    vision_heads = vision_heads or heads
    _check_sizes(hidden, heads, kv_heads, layers)
    _check_tower(vision_hidden, vision_heads, vision_depth)
    ensure_torchvision()
    path = Path(path)
    patch = patch_size or DEFAULT_PATCH[family]
    tokenizer = train_tokenizer(corpus, vocab_size, tokens)
    text = {
        "vocab_size": embedding_rows or len(tokenizer),
        "hidden_size": hidden,
        "intermediate_size": intermediate or 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": max_positions,
        "initializer_range": initializer_range,
        **_text_constants(tokenizer, hidden // heads),
    }
    vision: dict[str, Any] = {
        "depth": vision_depth,
        "hidden_size": vision_hidden,
        "intermediate_size": vision_intermediate or 2 * vision_hidden,
        "num_heads": vision_heads,
        "patch_size": patch,
        "out_hidden_size": hidden,
        "initializer_range": initializer_range,
        **VISION_CONSTANTS,
    }
    if family == "qwen2_5_vl":
        vision["fullatt_block_indexes"] = list(range(vision_depth) if full_attention is None else full_attention)
    token = (MERGE * patch) ** 2
    pixels = {"shortest_edge": min_pixels or 4 * token, "longest_edge": max_pixels or 256 * token}
    with replaced(path) as draft:
        _save_model(
            FAMILIES[family](text, vision),
            tokenizer,
            draft,
            _Weights(attention_gain, position_gain, smooth_positions, dtype, seed),
        )
        _save_processor(family, tokenizer, patch, pixels, draft)
    return path


@dataclass(frozen=True)
class _Weights:
    attention_gain: float
    position_gain: float
    smooth_positions: bool
    dtype: str
    seed: int


def _check_sizes(hidden: int, heads: int, kv_heads: int, layers: int) -> None:
    if min(hidden, heads, kv_heads, layers) < 1:
        raise UserError("hidden, layers, heads and kv_heads must be at least 1")
    if hidden % (2 * heads) or hidden // heads < 6:
        raise UserError(f"hidden={hidden} must be a multiple of 2*heads={2 * heads} with at least 6 per head")
    if heads % kv_heads:
        raise UserError(f"kv_heads={kv_heads} must divide heads={heads}")


def _check_tower(hidden: int, heads: int, depth: int) -> None:
    if min(hidden, heads, depth) < 1:
        raise UserError("vision_hidden, vision_heads and vision_depth must be at least 1")
    if hidden % (4 * heads):
        raise UserError(f"vision_hidden={hidden} must be a multiple of 4*heads={4 * heads}")


def _text_constants(tokenizer: Any, head_dim: int) -> dict[str, Any]:
    return {
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "rope_parameters": _rope(head_dim),
    }


def _rope(head_dim: int) -> dict[str, Any]:
    """Rotary angles split over time, height and width: twice the three parts is the head's width."""
    third = head_dim // 6
    section = [head_dim // 2 - 2 * third, third, third]
    return {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": section}


def train_tokenizer(corpus: Sequence[str], vocab_size: int, tokens: Sequence[str] = ()) -> Any:
    """Train a byte-level BPE tokenizer whose digits are single tokens."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    reserved = len(CONTROL_TOKENS) + len(ANSWER_TOKENS)
    if vocab_size < 256 + reserved:
        raise UserError(f"vocab_size={vocab_size} is too small: 256 bytes and {reserved} control tokens")
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - reserved,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    # every prompt names its roles, so they are worth a token each whatever the corpus says
    core.train_from_iterator([*corpus, *list(ROLES) * max(len(corpus), 100)], trainer)
    core.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in CONTROL_TOKENS])
    # not special: decoding must keep them, the reward functions read them
    core.add_tokens([AddedToken(token, special=False, normalized=False) for token in (*ANSWER_TOKENS, *tokens)])
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        padding_side="left",
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def _qwen2_5_config(text: dict[str, Any], vision: dict[str, Any]) -> Any:
    from transformers import Qwen2_5_VLConfig

    vision = vision | {"window_size": 112}
    return Qwen2_5_VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=True)


def _qwen3_config(text: dict[str, Any], vision: dict[str, Any]) -> Any:
    from transformers import Qwen3VLConfig

    text = text | {
        "head_dim": text["hidden_size"] // text["num_attention_heads"],
        "rope_parameters": text["rope_parameters"] | {"mrope_interleaved": True},
    }
    # features of the first block are added in the first decoder layer, so that deepstack is exercised
    vision = vision | {"num_position_embeddings": 64, "deepstack_visual_indexes": [0]}
    return Qwen3VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=True)


def _save_model(config: Any, tokenizer: Any, path: Path, weights: _Weights) -> None:
    import torch
    from transformers import AutoModelForImageTextToText, GenerationConfig

    ids = {token: tokenizer.convert_tokens_to_ids(token) for token in CONTROL_TOKENS}
    config.image_token_id = ids["<|image_pad|>"]
    config.video_token_id = ids["<|video_pad|>"]
    config.vision_start_token_id = ids["<|vision_start|>"]
    config.vision_end_token_id = ids["<|vision_end|>"]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(weights.seed)
        model = AutoModelForImageTextToText.from_config(config, dtype=getattr(torch, weights.dtype))
    _scale_weights(model, weights)
    model.generation_config = GenerationConfig(
        do_sample=True,
        top_k=0,
        eos_token_id=[ids["<|im_end|>"], ids["<|endoftext|>"]],
        pad_token_id=ids["<|endoftext|>"],
    )
    with quiet_transformers():
        model.save_pretrained(path)


def _scale_weights(model: Any, weights: _Weights) -> None:
    import torch

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("q_proj.weight", "k_proj.weight")):
                parameter.mul_(weights.attention_gain)
            elif name.endswith("attn.qkv.weight"):
                parameter[: 2 * parameter.shape[0] // 3].mul_(weights.attention_gain)
            elif name.endswith("visual.pos_embed.weight"):
                if weights.smooth_positions:
                    parameter.copy_(_waves(*parameter.shape) * parameter.std())
                parameter.mul_(weights.position_gain)


def _waves(places: int, width: int) -> Tensor:
    """(places, width) of mean square 1: half a wave to two waves over the rows, and the same over the columns."""
    import torch

    side = math.isqrt(places)
    frequency = math.pi / side * torch.logspace(0, 2, width // 4, base=2.0)
    angle = (torch.arange(side)[:, None] + 0.5) * frequency
    axis = math.sqrt(2) * torch.cat([angle.sin(), angle.cos()], 1)
    rows, columns = axis[:, None].expand(-1, side, -1), axis[None].expand(side, -1, -1)
    return torch.cat([rows, columns], -1).reshape(places, width)


def _save_processor(family: str, tokenizer: Any, patch: int, pixels: dict[str, int], path: Path) -> None:
    import transformers

    options: dict[str, Any] = {"patch_size": patch, "merge_size": MERGE, "temporal_patch_size": 2, "size": pixels}
    if family == "qwen3_vl":
        options |= {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}
    if ensure_torchvision() == "absent":
        from mmrl.vlm.processing import ImageOnlyProcessor

        images = transformers.Qwen2VLImageProcessorPil(**options)
        ImageOnlyProcessor(images, tokenizer).save_pretrained(path)
        return
    prefix = {"qwen2_5_vl": "Qwen2_5_VL", "qwen3_vl": "Qwen3VL"}[family]
    video_prefix = {"qwen2_5_vl": "Qwen2VL", "qwen3_vl": "Qwen3VL"}[family]
    processor = getattr(transformers, f"{prefix}Processor")(
        image_processor=transformers.Qwen2VLImageProcessor(**options),
        tokenizer=tokenizer,
        video_processor=getattr(transformers, f"{video_prefix}VideoProcessor")(**options),
        chat_template=CHAT_TEMPLATE,
    )
    processor.save_pretrained(path)


VISION_CONSTANTS = {"spatial_merge_size": MERGE, "temporal_patch_size": 2}

DEFAULT_PATCH = {"qwen2_5_vl": 14, "qwen3_vl": 16}

FAMILIES: dict[str, Callable[[dict[str, Any], dict[str, Any]], Any]] = {
    "qwen2_5_vl": _qwen2_5_config,
    "qwen3_vl": _qwen3_config,
}
