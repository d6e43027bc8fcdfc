"""Tiny random models of many families, with media as their processors would make them."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from mmrl.hub.compat import ensure_torchvision
from mmrl.vlm.data.prompt import Prompt
from mmrl.vlm.engine.model_loading import prepare
from mmrl.vlm.engine.vlm_policy import VlmPolicy
from mmrl.vlm.model.model_config import ModelConfig

IMAGE, VIDEO, BEGIN, END = 500, 501, 502, 503
ENTRIES, EOS, PAD = 512, 2, 0
SLIDING = ["sliding_attention", "full_attention"] * 2
"""Layers whose window of 8 tokens is shorter than every prompt."""

TEXT = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": ENTRIES,
    "max_position_embeddings": 256,
    "pad_token_id": PAD,
    "bos_token_id": 1,
    "eos_token_id": EOS,
    "tie_word_embeddings": False,
    "initializer_range": 0.2,
}
WINDOW = {"sliding_window": 8, "layer_types": SLIDING}
TOWER = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
SIGLIP = TOWER | {"image_size": 32, "patch_size": 8}
GRID_TOWER = {"depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 64}
LINEAR = {
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "decoder_sparse_step": 1}
QWEN_IDS = {
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "vision_start_token_id": BEGIN,
    "vision_end_token_id": END,
}


def sections(*sizes: int, **options: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [*sizes], **options}}


def squares(*shape: int) -> Callable[[int], dict[str, Tensor]]:
    """Media of n square images, `shape` each."""
    return lambda count: {"pixel_values": torch.randn(count, *shape)}


def grids(patch: int) -> Callable[[int], dict[str, Tensor]]:
    """Media of n images of 4 x 4 patches of `patch` pixels."""
    return lambda count: {
        "pixel_values": torch.randn(16 * count, 3 * 2 * patch**2),
        "image_grid_thw": torch.tensor([[1, 4, 4]] * count),
    }


def in_one_row(count: int) -> dict[str, Tensor]:
    """Media as Idefics3 and SmolVLM take them: the images of a prompt in one row."""
    return {
        "pixel_values": torch.randn(1, count, 3, 32, 32),
        "pixel_attention_mask": torch.ones(1, count, 32, 32, dtype=torch.bool),
    }


def with_sizes(count: int) -> dict[str, Tensor]:
    """Media of LLaVA-OneVision: each image whole and as one tile."""
    return {"pixel_values": torch.randn(count, 2, 3, 32, 32), "image_sizes": torch.tensor([[32, 32]] * count)}


def with_places(count: int) -> dict[str, Tensor]:
    """Media of Gemma4: 4 x 4 patches with their coordinates."""
    x, y = torch.meshgrid(torch.arange(4), torch.arange(4), indexing="xy")
    return {
        "pixel_values": torch.rand(count, 16, 3 * 8 * 8),
        "image_position_ids": torch.stack([x, y], -1).reshape(1, 16, 2).repeat(count, 1, 1),
    }


@dataclass(frozen=True)
class Species:
    """How a tiny model of a family is made."""

    released: str
    """Released models whose architecture it is."""
    options: dict[str, Any]
    """Options of its configuration."""
    media: Callable[[int], dict[str, Tensor]] | None = None
    """Processor outputs for n images."""
    tokens: int = 4
    """Tokens of an image."""
    attention: str = "sdpa"
    """Its attention kernels."""
    types: dict[str, str] = field(default_factory=dict)
    """Further arguments of the model's own forward with one entry a token: "image" for 1 on images, "prompt" for 0 in
    the prompt and 1 behind."""


ZOO: dict[str, Species] = {
    "qwen2": Species("Qwen2.5", TEXT),
    "qwen3": Species("Qwen3", TEXT),
    "qwen3_moe": Species("Qwen3 mixture of experts", TEXT | EXPERTS),
    "llama": Species("Llama", TEXT),
    "mistral": Species("Mistral", TEXT | {"sliding_window": None}),
    "gemma3_text": Species("Gemma3 (text)", TEXT | WINDOW | {"final_logit_softcapping": 5.0}),
    "gpt_oss": Species(
        "gpt-oss", TEXT | WINDOW | {"num_local_experts": 4, "num_experts_per_tok": 2}, attention="eager"
    ),
    "smollm3": Species("SmolLM3", TEXT | {"no_rope_layer_interval": 2}),
    "qwen3_5_text": Species("Qwen3.5 (text)", TEXT | LINEAR),
    "qwen2_vl": Species(
        "Qwen2-VL",
        {
            "text_config": TEXT | sections(2, 3, 3),
            "vision_config": {"depth": 2, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "patch_size": 8},
            **QWEN_IDS,
        },
        grids(8),
        types={"mm_token_type_ids": "image"},
    ),
    "qwen2_5_vl": Species(
        "Qwen2.5-VL",
        {
            "text_config": TEXT | sections(2, 3, 3),
            "vision_config": GRID_TOWER | {"patch_size": 8, "fullatt_block_indexes": [1], "window_size": 32},
            **QWEN_IDS,
        },
        grids(8),
        types={"mm_token_type_ids": "image"},
    ),
    "qwen3_vl": Species(
        "Qwen3-VL",
        {
            "text_config": TEXT | sections(2, 3, 3, mrope_interleaved=True),
            "vision_config": GRID_TOWER
            | {"patch_size": 8, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]},
            **QWEN_IDS,
        },
        grids(8),
        types={"mm_token_type_ids": "image"},
    ),
    "qwen3_vl_moe": Species(
        "Qwen3-VL mixture of experts",
        {
            "text_config": TEXT | EXPERTS | sections(2, 3, 3, mrope_interleaved=True),
            "vision_config": GRID_TOWER
            | {"patch_size": 8, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]},
            **QWEN_IDS,
        },
        grids(8),
        types={"mm_token_type_ids": "image"},
    ),
    "qwen3_5": Species(
        "Qwen3.5",
        {
            "text_config": TEXT | LINEAR | sections(2, 3, 3, mrope_interleaved=True, partial_rotary_factor=1.0),
            "vision_config": GRID_TOWER | {"patch_size": 8, "num_position_embeddings": 16},
            **QWEN_IDS,
        },
        grids(8),
        types={"mm_token_type_ids": "image"},
    ),
    "glm4v": Species(
        "GLM-4.1V",
        {
            "text_config": TEXT | sections(2, 3, 3),
            "vision_config": GRID_TOWER | {"patch_size": 8, "image_size": 32},
            "image_token_id": IMAGE,
            "video_token_id": VIDEO,
            "image_start_token_id": BEGIN,
            "image_end_token_id": END,
            "video_start_token_id": 504,
            "video_end_token_id": 505,
        },
        grids(8),
        types={"mm_token_type_ids": "image"},
    ),
    "internvl": Species(
        "InternVL3",
        {
            "text_config": TEXT | {"model_type": "qwen2"},
            "vision_config": TOWER | {"model_type": "internvl_vision", "image_size": [32, 32], "patch_size": [8, 8]},
            "image_token_id": IMAGE,
            "downsample_ratio": 0.5,
        },
        squares(3, 32, 32),
    ),
    "smolvlm": Species(
        "SmolVLM2",
        {
            "text_config": TEXT | {"model_type": "llama"},
            "vision_config": SIGLIP,
            "image_token_id": IMAGE,
            "scale_factor": 2,
        },
        in_one_row,
    ),
    "idefics3": Species(
        "Idefics3",
        {
            "text_config": TEXT | {"model_type": "llama"},
            "vision_config": SIGLIP,
            "image_token_id": IMAGE,
            "scale_factor": 2,
        },
        in_one_row,
    ),
    "llava_onevision": Species(
        "LLaVA-OneVision",
        {
            "text_config": TEXT | {"model_type": "qwen2"},
            "vision_config": SIGLIP | {"model_type": "siglip_vision_model"},
            "image_token_index": IMAGE,
            "video_token_index": VIDEO,
            "image_grid_pinpoints": [[32, 32]],
        },
        with_sizes,
        tokens=16 + 4 * 5,
    ),
    "gemma3": Species(
        "Gemma3",
        {
            "text_config": TEXT | WINDOW | {"model_type": "gemma3_text"},
            "vision_config": SIGLIP | {"model_type": "siglip_vision_model"},
            "mm_tokens_per_image": 4,
            "image_token_index": IMAGE,
            "boi_token_index": BEGIN,
            "eoi_token_index": END,
        },
        squares(3, 32, 32),
        types={"token_type_ids": "image"},
    ),
    "gemma4": Species(
        "Gemma4",
        {
            "text_config": TEXT
            | WINDOW
            | {
                "model_type": "gemma4_text",
                "use_bidirectional_attention": "vision",
                "hidden_size_per_layer_input": 8,
                "vocab_size_per_layer_input": ENTRIES,
                "final_logit_softcapping": 5.0,
                "global_head_dim": 16,
            },
            "vision_config": TOWER
            | {"num_key_value_heads": 2, "head_dim": 16, "patch_size": 8, "pooling_kernel_size": 2},
            "audio_config": None,
            "image_token_id": IMAGE,
            "video_token_id": VIDEO,
            "audio_token_id": 504,
            "boi_token_id": BEGIN,
            "eoi_token_id": END,
            "boa_token_id": 505,
            "eoa_token_index": 506,
        },
        with_places,
        types={"mm_token_type_ids": "image"},
    ),
    "paligemma": Species(
        "PaliGemma",
        {
            "text_config": TEXT | {"model_type": "gemma"},
            "vision_config": SIGLIP | {"model_type": "siglip_vision_model", "projection_dim": 64},
            "projection_dim": 64,
            "image_token_index": IMAGE,
        },
        squares(3, 32, 32),
        tokens=16,
        types={"token_type_ids": "prompt"},
    ),
}


class Letters:
    """A tokenizer of the ids alone."""

    pad_token_id, eos_token_id = PAD, EOS
    added_tokens_decoder: ClassVar[dict[int, Any]] = {}

    def convert_ids_to_tokens(self, ids: Any) -> Any:
        return [str(number) for number in ids] if isinstance(ids, list) else str(ids)

    def convert_tokens_to_ids(self, tokens: list[str]) -> list[int]:
        return [int(token) for token in tokens]

    def get_vocab(self) -> dict[str, int]:
        return {str(number): number for number in range(ENTRIES)}

    def __len__(self) -> int:
        return ENTRIES

    def batch_decode(self, rows: list[list[int]], **_: Any) -> list[str]:
        return [" ".join(map(str, row)) for row in rows]


class Processor:
    tokenizer, chat_template = Letters(), "none"

    def apply_chat_template(self, messages: Any, **_: Any) -> str:
        raise ValueError("letters have no turns")


def make_model(kind: str) -> nn.Module:
    """The model as transformers makes it, in float64."""
    import transformers

    ensure_torchvision()
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **ZOO[kind].options)
    auto = transformers.AutoModelForCausalLM if ZOO[kind].media is None else transformers.AutoModelForImageTextToText
    model = auto.from_config(config, dtype=torch.float64, attn_implementation=ZOO[kind].attention).eval()
    model.set_experts_implementation("eager")  # kernels of experts know no float64
    model.generation_config.pad_token_id, model.generation_config.eos_token_id = PAD, EOS
    return model


def make_policy(kind: str, **options: Any) -> VlmPolicy:
    """A policy around the model."""
    config, model = ModelConfig(**{"path": kind} | options), make_model(kind)
    return VlmPolicy(prepare(model, config, None), Processor(), config).eval()


def make_prompt(policy: VlmPolicy, kind: str, images: int, text: int, seed: int) -> Prompt:
    """A prompt of `images` images, each behind two tokens, and `text` tokens."""
    species = ZOO[kind]
    torch.manual_seed(seed)
    parts = [
        part for _ in range(images) for part in (torch.randint(3, 400, (2,)), torch.full((species.tokens,), IMAGE))
    ]
    ids = torch.cat([*parts, torch.randint(3, 400, (text,))])
    media = species.media(images) if images and species.media is not None else {}
    media = {
        name: value.to(policy.network.dtype) if value.is_floating_point() else value for name, value in media.items()
    }
    types, positions = policy.layout.tables(
        {"input_ids": ids[None], "mm_token_type_ids": (ids == IMAGE).long()[None], **media}
    )
    return Prompt(ids, types, positions, int(positions.max()) + 1, media)


def make_video_prompt(policy: VlmPolicy, kind: str, frames: int, text: int) -> Prompt:
    """A prompt of a video of `frames` frames (in pairs for Qwen) and `text` tokens."""
    torch.manual_seed(frames)
    if kind == "llava_onevision":  # pooled by two, and a token at the end
        tokens, media = 4 * frames + 1, {"pixel_values_videos": torch.randn(1, frames, 3, 32, 32)}
    else:
        pixels, grid = torch.randn(16 * frames, 3 * 2 * 8**2), torch.tensor([[frames, 4, 4]])
        tokens, media = 4 * frames, {"pixel_values_videos": pixels, "video_grid_thw": grid}
    token = IMAGE if kind == "glm4v" else VIDEO
    runs = [torch.full((tokens,), token)]
    if kind in ("qwen3_vl", "glm4v"):  # timestamps between the frames
        runs = [part for _ in range(frames) for part in (torch.randint(3, 400, (2,)), torch.full((4,), token))]
    ids = torch.cat([torch.randint(3, 400, (2,)), *runs, torch.randint(3, 400, (text,))])
    media = {name: value.double() if value.is_floating_point() else value for name, value in media.items()}
    types, positions = policy.layout.tables(
        {"input_ids": ids[None], "mm_token_type_ids": 2 * (ids == token).long()[None], **media}
    )
    return Prompt(ids, types, positions, int(positions.max()) + 1, media)


def own_inputs(kind: str, prompt: Prompt, response: Tensor) -> dict[str, Tensor]:
    """Arguments of the model's own forward for a prompt and a response (T,)."""
    ids = torch.cat([prompt.input_ids, response])
    images = 2 if kind == "glm4v" and "video_grid_thw" in prompt.media else 1
    rows = {
        "image": images * (ids == IMAGE).long() + 2 * (ids == VIDEO).long(),
        "prompt": (torch.arange(len(ids)) >= len(prompt)).long(),
    }
    types = {name: rows[what][None] for name, what in ZOO[kind].types.items()}
    return {"input_ids": ids[None], **types, **prompt.media}
