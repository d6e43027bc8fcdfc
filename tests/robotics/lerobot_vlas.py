"""Tiny random pi0.5, X-VLA and GR00T policies for the tabletop that lerobot builds, saves and runs.

    python -m tests.robotics.lerobot_vlas build FOLDER
    python -m tests.robotics.lerobot_vlas select POLICY TEXT ARRAYS

Run with lerobot's interpreter. `build` writes `pi05`, `xvla` and `groot` with two cameras, as published ones are: their
processors name a tokenizer of the hub. It lies in `text`, for `groot` in `backbone`, and GR00T's base model in `base`.
`select` loads a policy, with the tokenizer of TEXT, and writes into ARRAYS what its `select_action` chooses for a
sequence of observations.

X-VLA and GR00T are small by their own configurations. Those of pi0.5 know two large sizes, which `lerobot_flows`
replaces.
"""

import json
import sys
from pathlib import Path

import numpy as np

from tests.robotics import lerobot_flows

CAMERAS = ("observation.images.front", "observation.images.wrist")
CHUNK, EXECUTED = 8, 5
SIDE, STATE, ACTION = 64, 10, 5
"""Sizes at the tabletop: the side of an image, the robot's state, an action."""
HUB = {"pi05": "google/paligemma-3b-pt-224", "xvla": "facebook/bart-large", "groot": "nvidia/Cosmos-Reason2-2B"}
"""Tokenizers that published policies name."""
STEPS = {"pi05": "tokenizer_processor", "xvla": "tokenizer_processor", "groot": "groot_n1_7_vlm_encode_v1"}
ENTRIES = {"pi05": "tokenizer_name", "xvla": "tokenizer_name", "groot": "model_name"}
SPECIAL = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")
TEMPLATE = (
    "{% for part in messages[0]['content'] %}{% if part['type'] == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}"
)


def build(folder: Path) -> None:
    """Build and save the policies."""
    import torch
    from lerobot.policies.factory import get_policy_class, make_pre_post_processors

    lerobot_flows.write_backbone(folder / "text")
    lerobot_flows.name_tokenizer(folder / "text")
    lerobot_flows.shrink_pi()
    _write_qwen(folder / "backbone")
    _write_base(folder / "base", folder / "backbone")
    for name, config in _configs(folder).items():
        torch.manual_seed(0)
        policy = get_policy_class(name)(config)
        for weight in policy.parameters():  # large enough that every input moves the actions
            if weight.dim() > 1 and weight.requires_grad:
                torch.nn.init.normal_(weight, std=0.7 / weight.shape[-1] ** 0.5)
        before, after = make_pre_post_processors(config, dataset_stats=_statistics())
        for part in (policy, before, after):
            part.save_pretrained(folder / name)
        _name_hub(folder / name / "policy_preprocessor.json", name)


def _configs(folder: Path) -> dict:
    from lerobot.configs.types import FeatureType, PolicyFeature
    from lerobot.policies.groot.configuration_groot import GrootConfig
    from lerobot.policies.pi05.configuration_pi05 import PI05Config
    from lerobot.policies.xvla.configuration_xvla import XVLAConfig

    inputs = {camera: PolicyFeature(FeatureType.VISUAL, (3, SIDE, SIDE)) for camera in CAMERAS}
    inputs |= {"observation.state": PolicyFeature(FeatureType.STATE, (STATE,))}
    shared = {"output_features": {"action": PolicyFeature(FeatureType.ACTION, (ACTION,))}, "device": "cpu"}
    shared |= {"push_to_hub": False, "chunk_size": CHUNK, "n_action_steps": EXECUTED}
    pi05 = {"image_resolution": (28, 28), "max_action_dim": 6, "tokenizer_max_length": 40, "num_inference_steps": 3}
    vision = {"depths": (1, 1), "embed_dim": (8, 16), "num_heads": (2, 2), "num_groups": (2, 2), "window_size": 4}
    vision |= {"patch_size": (7, 3), "patch_stride": (8, 2), "patch_padding": (3, 1), "patch_prenorm": (False, True)}
    text = {"d_model": 16, "encoder_layers": 1, "encoder_ffn_dim": 32, "encoder_attention_heads": 2}
    text |= {"decoder_layers": 1, "decoder_ffn_dim": 32, "decoder_attention_heads": 2, "max_position_embeddings": 64}
    florence = {
        "vision_config": vision | {"projection_dim": 16, "drop_path_rate": 0.0},
        "text_config": text | {"vocab_size": lerobot_flows.VOCABULARY, "dropout": 0.0},
    }
    xvla = {"hidden_size": 16, "depth": 2, "num_heads": 2, "num_domains": 2, "len_soft_prompts": 2, "dim_time": 8}
    xvla |= {"max_len_seq": 96, "action_mode": "auto", "max_action_dim": 6, "num_denoising_steps": 3}
    return {
        "pi05": PI05Config(input_features=dict(inputs), **pi05, **shared),
        "xvla": XVLAConfig(
            input_features=dict(inputs),
            florence_config=florence,
            tokenizer_name=str(folder / "text"),
            tokenizer_max_length=12,
            **xvla,
            **shared,
        ),
        "groot": GrootConfig(
            input_features=dict(inputs),
            base_model_path=str(folder / "base"),
            max_state_dim=12,
            max_action_dim=6,
            use_bf16=False,
            tune_llm=True,
            tune_visual=True,
            **shared,
        ),
    }


def _write_qwen(folder: Path) -> None:
    """The configuration, tokenizer and image processors of a tiny Qwen3-VL."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3VLConfig

    vocabulary = {word: number for number, word in enumerate(("<pad>", "<unk>", *SPECIAL, *lerobot_flows.WORDS))}
    plain = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    plain.pre_tokenizer = pre_tokenizers.Whitespace()
    tokens = dict(zip(("image_token", "video_token", "vision_bos_token", "vision_eos_token"), SPECIAL, strict=True))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=plain, pad_token="<pad>", unk_token="<unk>", extra_special_tokens=tokens
    )
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    text = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    text |= {"num_key_value_heads": 1, "head_dim": 8, "vocab_size": len(vocabulary)}
    text |= {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}}
    vision = {"hidden_size": 16, "depth": 1, "num_heads": 2, "intermediate_size": 32, "out_hidden_size": 16}
    vision |= {"num_position_embeddings": 16, "deepstack_visual_indexes": [0], "patch_size": 32}
    ids = {f"{name.strip('<|>').replace('_pad', '')}_token_id": 2 + at for at, name in enumerate(SPECIAL)}
    Qwen3VLConfig(text_config=text, vision_config=vision, **ids).save_pretrained(folder)
    pixels = {"patch_size": 32, "merge_size": 2, "temporal_patch_size": 2}
    pixels |= {"size": {"shortest_edge": 1024, "longest_edge": 1 << 20}}
    for file, kind in (("preprocessor", "Qwen2VLImageProcessor"), ("video_preprocessor", "Qwen3VLVideoProcessor")):
        (folder / f"{file}_config.json").write_text(json.dumps({"image_processor_type": kind, **pixels}))


def _write_base(folder: Path, backbone: Path) -> None:
    """A tiny GR00T N1.7, which its policies are built on."""
    from lerobot.policies.groot.groot_n1_7 import GR00TN17, GR00TN17Config

    blocks = {"num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 2, "dropout": 0.0}
    blocks |= {"positional_embeddings": None, "final_dropout": True}
    diffusion = blocks | {"norm_type": "ada_norm", "output_dim": 16, "interleave_self_attention": True}
    config = GR00TN17Config(
        model_name=str(backbone),
        backbone_embedding_dim=16,
        select_layer=2,
        model_dtype="float32",
        dtype="float32",
        max_state_dim=12,
        max_action_dim=6,
        action_horizon=CHUNK,
        hidden_size=16,
        input_embedding_dim=16,
        diffusion_model_cfg=diffusion,
        vl_self_attention_cfg=blocks,
        num_inference_timesteps=3,
    )
    GR00TN17(config, load_backbone_weights=False).save_pretrained(folder)


def _name_hub(file: Path, kind: str) -> None:
    saved = json.loads(file.read_text())
    for step in saved["steps"]:
        if step.get("registry_name") == STEPS[kind]:
            step["config"][ENTRIES[kind]] = HUB[kind]
    file.write_text(json.dumps(saved))


def _statistics() -> dict:
    import torch

    def spread(size: int, width: float) -> dict:
        low, high = torch.full((size,), -width), torch.full((size,), width)
        ends = {"min": low, "max": high, "q01": low, "q99": high}
        return {"mean": torch.zeros(size), "std": torch.full((size,), width / 2), **ends}

    return {"observation.state": spread(STATE, 1.0), "action": spread(ACTION, 0.8)}


def select(folder: Path, text: Path, arrays: Path) -> None:
    """Ask for an action at each control step; the noise of a chunk is drawn from its seed."""
    import torch
    from lerobot.configs.policies import PreTrainedConfig
    from lerobot.policies.factory import get_policy_class, make_pre_post_processors

    lerobot_flows.shrink_pi()
    config = PreTrainedConfig.from_pretrained(folder)
    policy = get_policy_class(config.type).from_pretrained(folder, config=config).eval()
    before, after = make_pre_post_processors(
        config,
        pretrained_path=str(folder),
        preprocessor_overrides={STEPS[config.type]: {ENTRIES[config.type]: str(text)}},
    )
    with np.load(arrays) as given:
        parts = {name: given[name] for name in given.files}
    policy.reset()
    actions = []
    for step in range(len(parts["state"])):  # (T, B, ...)
        if step % EXECUTED == 0:
            torch.manual_seed(int(parts["seeds"][step // EXECUTED]))
        images = (parts["images"][step], parts["views"][step, :, 0])
        seen = {
            camera: torch.from_numpy(image).permute(0, 3, 1, 2).float() / 255
            for camera, image in zip(CAMERAS, images, strict=True)
        }
        seen |= {"observation.state": torch.from_numpy(parts["state"][step]), "task": parts["tasks"].tolist()}
        actions.append(after(policy.select_action(before(seen))).numpy())
    np.savez(arrays, **parts, actions=np.stack(actions))


if __name__ == "__main__":
    if sys.argv[1] == "build":
        build(Path(sys.argv[2]))
    else:
        select(*map(Path, sys.argv[2:]))
