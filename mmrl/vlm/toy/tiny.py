"""Tiny random vision-language models of real architectures, saved as ordinary model folders.

Only sizes and weights are toy: the classes, the processor, the chat markup and the files are those of the
released models, so everything that runs on the folder also runs on a downloaded one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmrl.errors import UserError
from mmrl.fields import bounded, check_config, choice
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


@dataclass(frozen=True)
class _Family:
    """Differences between the model families."""

    config: str
    """Transformers class, like the next two fields."""
    processor: str
    video_processor: str
    patch_size: int
    """Pixels on a side of one patch in the released models."""
    vision: dict[str, Any]
    rope: dict[str, Any] = field(default_factory=dict)
    image: dict[str, Any] = field(default_factory=dict)


FAMILIES = {
    "qwen2_5_vl": _Family("Qwen2_5_VLConfig", "Qwen2_5_VLProcessor", "Qwen2VLVideoProcessor", 14, {"window_size": 112}),
    "qwen3_vl": _Family(
        "Qwen3VLConfig",
        "Qwen3VLProcessor",
        "Qwen3VLVideoProcessor",
        16,
        # features of the first block are added in the first decoder layer, so that deepstack is exercised
        {"num_position_embeddings": 64, "deepstack_visual_indexes": [0]},
        rope={"mrope_interleaved": True},
        image={"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]},
    ),
}


@dataclass(frozen=True)
class TinySizes:
    """Sizes and random weights of a tiny model."""

    hidden: int = bounded(48, at_least=1)
    """Width of the language model; a multiple of 2 * heads."""
    layers: int = bounded(2, at_least=1)
    """Decoder layers."""
    heads: int = bounded(4, at_least=1)
    """Query heads."""
    kv_heads: int = bounded(2, at_least=1)
    """Key and value heads, a divisor of heads."""
    intermediate: int | None = None
    """Width of the gated layers; None is 2 * hidden."""
    vision_hidden: int = bounded(48, at_least=1)
    """Width of the vision tower; a multiple of 4 * vision_heads."""
    vision_depth: int = bounded(1, at_least=1)
    """Blocks of the vision tower."""
    vision_heads: int | None = None
    """Heads of the vision tower; None is as many as heads."""
    vision_intermediate: int | None = None
    """Width of the tower's feed-forward layers; None is 2 * vision_hidden."""
    full_attention: Sequence[int] | None = None
    """Tower blocks that attend over the whole image; the others attend over windows of 112 pixels (Qwen2.5-VL only).
    None means all blocks, because windows only pay off on large images."""
    patch_size: int | None = None
    """Pixels on a side of one patch; None is the released one (14, or 16 for Qwen3-VL)."""
    vocab_size: int = 400
    """Maximum vocabulary size, including the 256 bytes and the control tokens."""
    embedding_rows: int | None = None
    """Rows of the embedding and the head; the last ones have no token, as in released models. None means one row per
    token."""
    min_pixels: int | None = None
    """Minimum image area in pixels after resizing; None means 2 x 2 image tokens."""
    max_pixels: int | None = None
    """Maximum image area in pixels after resizing; None means 16 x 16 image tokens."""
    max_positions: int = 4096
    """Maximum sequence length in tokens."""
    initializer_range: float = 0.05
    """Standard deviation of the random weights."""
    attention_gain: float = 1.0
    """Factor on the query and key weights of decoder and tower. Without it, random weights attend almost uniformly,
    which hides errors in masks and positions. Qwen3-VL's decoder normalises both after these weights, so it is not
    affected."""
    position_gain: float = 1.0
    """Factor on the tower's learned position embeddings (not in Qwen2.5-VL). They are so small compared with random
    patch weights that a model takes long to learn the position of something."""
    smooth_positions: bool = False
    """Make position embeddings (not in Qwen2.5-VL) waves along rows and columns, so that neighbours are similar, as in
    released models. With random embeddings, a model must learn each position separately."""
    dtype: str = choice("float32", ("float32", "bfloat16"))
    """Precision of the saved weights."""
    seed: int = 0
    """Seed of the random weights."""

    def validate(self) -> None:
        """Reject inconsistent sizes; raises UserError."""
        if self.hidden % (2 * self.heads) or self.hidden // self.heads < 6:
            raise UserError(
                f"hidden={self.hidden} must be a multiple of 2*heads={2 * self.heads} with at least 6 per head"
            )
        if self.heads % self.kv_heads:
            raise UserError(f"kv_heads={self.kv_heads} must divide heads={self.heads}")
        if self.vision_hidden % (4 * (self.vision_heads or self.heads)):
            least = 4 * (self.vision_heads or self.heads)
            raise UserError(f"vision_hidden={self.vision_hidden} must be a multiple of 4*heads={least}")


def build_tiny_vlm(
    path: Path | str,
    *,
    family: str = "qwen2_5_vl",
    corpus: Sequence[str],
    tokens: Sequence[str] = (),
    **sizes: Any,
) -> Path:
    """Build a small random vision-language model with its own tokenizer and save it as a model folder.

    Args:
        path: folder to write; created with its parents.
        family: row of `FAMILIES`.
        corpus: texts that the byte-level BPE tokenizer learns its merges from.
        tokens: texts that are one token each, beyond `vocab_size`, such as the fixed parts of an answer's JSON.
        sizes: fields of `TinySizes`.

    Returns:
        The folder, which loads with AutoModelForImageTextToText and AutoProcessor.

    Raises:
        UserError: unknown family or sizes that do not fit together.
    """
    if family not in FAMILIES:
        raise UserError(f"unknown model family {family!r}; available: {', '.join(FAMILIES)}")
    chosen = TinySizes(**sizes)
    check_config(chosen)
    ensure_torchvision()
    tokenizer = train_tokenizer(corpus, chosen.vocab_size, tokens)
    with replaced(Path(path)) as draft:
        _save_model(_config(family, tokenizer, chosen), tokenizer, draft, chosen)
        _save_processor(family, tokenizer, chosen, draft)
    return Path(path)


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
    # every prompt names its roles, so they get a token each, even if rare in the corpus
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


def _config(family: str, tokenizer: Any, sizes: TinySizes) -> Any:
    """Configuration of transformers."""
    import transformers

    chosen = FAMILIES[family]
    head_dim = sizes.hidden // sizes.heads
    # rotary angles split over time, height and width: twice the three parts is the head's width
    third = head_dim // 6
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [head_dim // 2 - 2 * third, third, third]}
    text = {
        "vocab_size": sizes.embedding_rows or len(tokenizer),
        "hidden_size": sizes.hidden,
        "intermediate_size": sizes.intermediate or 2 * sizes.hidden,
        "num_hidden_layers": sizes.layers,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.kv_heads,
        "max_position_embeddings": sizes.max_positions,
        "initializer_range": sizes.initializer_range,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "rope_parameters": rope | chosen.rope,
    }
    vision = {
        "depth": sizes.vision_depth,
        "hidden_size": sizes.vision_hidden,
        "intermediate_size": sizes.vision_intermediate or 2 * sizes.vision_hidden,
        "num_heads": sizes.vision_heads or sizes.heads,
        "patch_size": sizes.patch_size or chosen.patch_size,
        "out_hidden_size": sizes.hidden,
        "initializer_range": sizes.initializer_range,
        "spatial_merge_size": MERGE,
        "temporal_patch_size": 2,
        **chosen.vision,
    }
    if family == "qwen2_5_vl":
        blocks = range(sizes.vision_depth) if sizes.full_attention is None else sizes.full_attention
        vision["fullatt_block_indexes"] = list(blocks)
    else:
        text["head_dim"] = head_dim
    make = getattr(transformers, chosen.config)
    config = make(text_config=text, vision_config=vision, tie_word_embeddings=True)
    for name, token in (
        ("image_token_id", "<|image_pad|>"),
        ("video_token_id", "<|video_pad|>"),
        ("vision_start_token_id", "<|vision_start|>"),
        ("vision_end_token_id", "<|vision_end|>"),
    ):
        setattr(config, name, tokenizer.convert_tokens_to_ids(token))
    return config


def _save_model(config: Any, tokenizer: Any, path: Path, sizes: TinySizes) -> None:
    import torch
    from transformers import AutoModelForImageTextToText, GenerationConfig

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(sizes.seed)
        model = AutoModelForImageTextToText.from_config(config, dtype=getattr(torch, sizes.dtype))
    _scale_attention(model, sizes.attention_gain)
    shape_positions(model, sizes.position_gain, smooth=sizes.smooth_positions)
    end, pad = tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])
    model.generation_config = GenerationConfig(do_sample=True, top_k=0, eos_token_id=[end, pad], pad_token_id=pad)
    with quiet_transformers():
        model.save_pretrained(path)


def _scale_attention(model: Any, gain: float) -> None:
    import torch

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("q_proj.weight", "k_proj.weight")):
                parameter.mul_(gain)
            elif name.endswith("attn.qkv.weight"):
                parameter[: 2 * parameter.shape[0] // 3].mul_(gain)


def shape_positions(model: Any, gain: float, *, smooth: bool) -> None:
    """Scale the learned position embeddings of a vision tower, or make them waves; raises if there are none."""
    import torch

    names = (".pos_embed.weight", ".position_embedding.weight")
    tables = [parameter for name, parameter in model.named_parameters() if name.endswith(names)]
    if not tables and (smooth or gain != 1):
        raise UserError(
            "position_gain and smooth_positions change the learned position embeddings of a vision tower, but "
            f"{model.config.model_type} has none; remove them"
        )
    with torch.no_grad():
        for table in tables:
            if smooth:
                table.copy_(_waves(*table.shape) * table.std())
            table.mul_(gain)


def _waves(positions: int, width: int) -> Tensor:
    """(positions, width) of mean square 1: half a wave to two waves over the rows, and the same over the columns."""
    import torch

    side = math.isqrt(positions)
    frequency = math.pi / side * torch.logspace(0, 2, width // 4, base=2.0)
    angle = (torch.arange(side)[:, None] + 0.5) * frequency
    axis = math.sqrt(2) * torch.cat([angle.sin(), angle.cos()], 1)
    rows, columns = axis[:, None].expand(-1, side, -1), axis[None].expand(side, -1, -1)
    return torch.cat([rows, columns], -1).reshape(positions, width)


def _save_processor(family: str, tokenizer: Any, sizes: TinySizes, path: Path) -> None:
    import transformers

    chosen = FAMILIES[family]
    patch = sizes.patch_size or chosen.patch_size
    token = (MERGE * patch) ** 2
    pixels = {"shortest_edge": sizes.min_pixels or 4 * token, "longest_edge": sizes.max_pixels or 256 * token}
    options = {"patch_size": patch, "merge_size": MERGE, "temporal_patch_size": 2, "size": pixels, **chosen.image}
    if ensure_torchvision() == "absent":
        from mmrl.vlm.model.processor import ImageOnlyProcessor

        images = transformers.Qwen2VLImageProcessorPil(**options)
        ImageOnlyProcessor(images, tokenizer).save_pretrained(path)
        return
    processor = getattr(transformers, chosen.processor)(
        image_processor=transformers.Qwen2VLImageProcessor(**options),
        tokenizer=tokenizer,
        video_processor=getattr(transformers, chosen.video_processor)(**options),
        chat_template=CHAT_TEMPLATE,
    )
    processor.save_pretrained(path)
