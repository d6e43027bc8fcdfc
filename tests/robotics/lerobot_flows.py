"""Tiny random SmolVLA, pi0 and pi0.5 policies that lerobot builds, saves and evaluates; run with its interpreter.

    python -m tests.robotics.lerobot_flows build FOLDER
    python -m tests.robotics.lerobot_flows check POLICY ARRAYS

`build` writes `smolvla`, `pi0` and `pi05` with the backbone and tokenizer that they name, for the observations of
`tests.robotics.line_sim`, `smolvla_two`, which sees one further camera and has a place for a third, `pi05_two`, which
does so too and predicts actions relative to the state, and `expected.npz`: what `predict_action_chunk` answers to
`lerobot_policies.observations` for the noise of `noise`. `check` loads a policy afresh and writes its answers, and the
log-densities of a chain and their gradients by autograd, into ARRAYS.
"""

import json
import math
import sys
from pathlib import Path

import numpy as np

from tests.robotics.lerobot_policies import observations, statistics

KINDS = ("smolvla", "pi0", "pi05", "smolvla_two", "pi05_two")
CHUNK, WIDTH, STEPS = 5, 4, 3
"""K, M and S of all."""
WORDS = ("go", "right", "left", "Ċ", "<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>")
PROMPT = ("Task", ":", ",", "State", ";", "Action", *map(str, range(256)))
"""Further words of pi0.5's prompt, with the bins of the state."""
VOCABULARY = 2 + len(WORDS) + len(PROMPT)


def noise() -> np.ndarray:
    """(3, K, M), the start of the chunks of three observations."""
    return np.random.default_rng(3).normal(size=(3, CHUNK, WIDTH)).astype(np.float32)


def shrink_pi() -> None:
    """Let lerobot build a tiny PaliGemma; the configurations of pi0 and pi0.5 know two large ones."""
    from lerobot.policies.pi0 import modeling_pi0
    from lerobot.policies.pi05 import modeling_pi05

    for module in (modeling_pi0, modeling_pi05):
        _shrink(module)


def _shrink(module) -> None:
    def variant(_: str):
        # the training pass takes eight heads for granted
        return module.GemmaConfig(width=16, depth=2, mlp_dim=32, num_heads=8, num_kv_heads=1, head_dim=4)

    def both(config):
        small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
        for name, value in {**small, "projection_dim": 16}.items():
            setattr(config.vision_config, name, value)
        config.text_config.vocab_size = VOCABULARY
        return whole(config=config)

    def head(config):
        config.vocab_size = VOCABULARY
        return expert(config=config)

    whole, expert = module.PaliGemmaForConditionalGenerationWithPiGemma, module.PiGemmaForCausalLM
    module.get_gemma_config = variant
    module.PaliGemmaForConditionalGenerationWithPiGemma, module.PiGemmaForCausalLM = both, head


def write_backbone(folder: Path) -> None:
    """Write a SmolVLM without weights: configuration, processor and a tokenizer of a few words."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, SmolVLMConfig

    vocabulary = {word: number for number, word in enumerate(("<pad>", "<unk>", *WORDS, *PROMPT))}
    plain = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    plain.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=plain, pad_token="<pad>", unk_token="<unk>", extra_special_tokens=_special()
    )
    text = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    text |= {"num_key_value_heads": 2, "head_dim": 8, "vocab_size": len(vocabulary), "model_type": "llama"}
    text |= {"pad_token_id": 0}
    vision = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision |= {"image_size": 32, "patch_size": 8}
    config = SmolVLMConfig(text_config=text, vision_config=vision, scale_factor=2, image_token_id=6, pad_token_id=0)
    config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    processors = {"processor_class": "SmolVLMProcessor", "image_seq_len": 4}
    (folder / "processor_config.json").write_text(json.dumps(processors))
    images = {"image_processor_type": "SmolVLMImageProcessor", "size": {"longest_edge": 32}}
    (folder / "preprocessor_config.json").write_text(json.dumps(images))


def _special() -> dict[str, str]:
    names = {"image_token": "<image>", "fake_image_token": "<fake_token_around_image>"}
    return names | {"global_image_token": "<global-img>", "end_of_utterance_token": "<end_of_utterance>"}


def build(folder: Path) -> None:
    """Build, save and evaluate the policies."""
    import torch
    from lerobot.configs.types import FeatureType, PolicyFeature
    from lerobot.policies.factory import get_policy_class, make_pre_post_processors
    from lerobot.policies.pi0.configuration_pi0 import PI0Config
    from lerobot.policies.pi05.configuration_pi05 import PI05Config
    from lerobot.policies.smolvla.configuration_smolvla import SmolVLAConfig

    backbone = folder / "backbone"
    write_backbone(backbone)
    name_tokenizer(backbone)
    inputs = {
        "observation.images.front": PolicyFeature(FeatureType.VISUAL, (3, 32, 32)),
        "observation.state": PolicyFeature(FeatureType.STATE, (2,)),
    }
    two = inputs | {"observation.images.wrist": PolicyFeature(FeatureType.VISUAL, (3, 32, 32))}
    shared = {"output_features": {"action": PolicyFeature(FeatureType.ACTION, (1,))}}
    shared |= {"device": "cpu", "push_to_hub": False, "chunk_size": CHUNK, "n_action_steps": CHUNK}
    shared |= {"max_action_dim": WIDTH, "max_state_dim": 3, "tokenizer_max_length": 6}
    smolvla = {"vlm_model_name": str(backbone), "num_vlm_layers": 2, "resize_imgs_with_padding": (32, 32)}
    smolvla |= {"num_steps": STEPS, "expert_width_multiplier": 0.5, **shared}
    pi = {"num_inference_steps": STEPS, "image_resolution": (28, 28), **shared}
    pi05 = pi | {"tokenizer_max_length": 14}
    configs = {
        "smolvla": SmolVLAConfig(input_features=dict(inputs), **smolvla),
        "pi0": PI0Config(input_features=dict(inputs), **pi),
        "pi05": PI05Config(input_features=dict(inputs), **pi05),
        "smolvla_two": SmolVLAConfig(input_features=dict(two), empty_cameras=1, **smolvla),
        "pi05_two": PI05Config(input_features=dict(two), empty_cameras=1, use_relative_actions=True, **pi05),
    }
    shrink_pi()
    expected = {}
    for name, config in configs.items():
        torch.manual_seed(0)
        policy = get_policy_class(config.type)(config)
        _spread(policy)
        before, after = make_pre_post_processors(config, dataset_stats=statistics())
        for part in (policy, before, after):
            part.save_pretrained(folder / name)
        expected[name] = _chunks(policy.eval(), before, after)
    np.savez(folder / "expected.npz", **expected)


def name_tokenizer(backbone: Path) -> None:
    """Replace the tokenizer of the hub that the processors of pi0 and pi0.5 name when they are built."""
    from lerobot.policies.pi0 import processor_pi0
    from lerobot.policies.pi05 import processor_pi05

    real = processor_pi0.TokenizerProcessorStep

    def named(**options):
        return real(**options | {"tokenizer_name": str(backbone)})

    processor_pi0.TokenizerProcessorStep = processor_pi05.TokenizerProcessorStep = named


def _spread(policy) -> None:
    """Weights so large that state, time and noise matter; lerobot's initial ones hardly move the velocity."""
    import torch

    for name, weight in policy.named_parameters():
        if any(part in name for part in ("action_", "state_proj", "expert")) and weight.dim() == 2:
            torch.nn.init.normal_(weight, std=1.2 / math.sqrt(weight.shape[1]))


def _batch(policy, before) -> dict:
    import torch

    seen = observations()
    images = {"observation.images.front": seen["images"], "observation.images.wrist": seen["views"][:, 0]}
    known = {name: pixels for name, pixels in images.items() if name in policy.config.input_features}
    return before(
        {
            **{name: torch.from_numpy(pixels).permute(0, 3, 1, 2).float() / 255 for name, pixels in known.items()},
            "observation.state": torch.from_numpy(seen["state"]),
            "task": ["go right", "go left", "go right"],
        }
    )


def _chunks(policy, before, after) -> np.ndarray:
    import torch

    chunk = policy.predict_action_chunk(_batch(policy, before), noise=torch.from_numpy(noise()))
    return torch.stack([after(chunk[:, step]) for step in range(chunk.shape[1])], 1).numpy()


def check(folder: Path, arrays: Path) -> None:
    """Answers of a policy that lerobot loads, and the log-densities of a chain by a formula of its own."""
    import torch
    from lerobot.configs.policies import PreTrainedConfig
    from lerobot.policies.factory import get_policy_class, make_pre_post_processors

    shrink_pi()
    config = PreTrainedConfig.from_pretrained(folder)
    policy = get_policy_class(config.type).from_pretrained(folder, config=config)
    policy.eval()
    before, after = make_pre_post_processors(config, pretrained_path=folder)
    with np.load(arrays) as given:
        chain, level = torch.from_numpy(given["chain"]), float(given["level"])
    logp = _log_densities(policy, _batch(policy, before), chain, level)
    logp.sum().backward()
    gradients = {f"grad:{name}": weight.grad.numpy() for name, weight in policy.named_parameters() if _has(weight)}
    np.savez(arrays, chunks=_chunks(policy, before, after), logp=logp.detach().numpy(), **gradients)


def _has(weight) -> bool:
    return weight.grad is not None and bool(weight.grad.abs().max() > 0)


def _log_densities(policy, batch, chain, level):
    """(B, S) by lerobot's training pass, which computes prefix and head at once, and by Flow-GRPO's eq. 9."""
    import torch

    count = chain.shape[1] - 1
    scores = []
    for step in range(count):
        now, later = 1 - step / count, 1 - (step + 1) / count
        velocity = _velocity(policy, dict(batch), chain[:, step], torch.full((len(chain),), now))
        shown = now if step else 1 - 1 / count  # stands in for 1 in the noise's size at time 1
        spread = level * math.sqrt(now / (1 - shown))
        drift = velocity + spread**2 / (2 * now) * (chain[:, step] + (1 - now) * velocity)
        mean, std = chain[:, step] + drift * (later - now), spread * math.sqrt(now - later)
        scores.append(torch.distributions.Normal(mean, std).log_prob(chain[:, step + 1]).sum((1, 2)))
    return torch.stack(scores, 1)


def _velocity(policy, batch, latents, time):
    """The velocity of the training pass: its loss is the squared error (noise - actions - velocity)^2.

    With noise = latents / time and actions = 0 the noisy actions are the latents, so two losses, at this target and one
    that is shifted by 1 through actions and noise, would give the velocity; reading the head's last layer is simpler.
    """
    found = {}
    hook = policy.model.action_out_proj.register_forward_hook(lambda *parts: found.update(velocity=parts[2]))
    state = [policy.prepare_state(batch)] if hasattr(policy, "prepare_state") else []  # pi0.5 reads it as text
    prepare = getattr(policy, "prepare_images", None) or policy._preprocess_images
    tokens = (batch["observation.language.tokens"], batch["observation.language.attention_mask"])
    noise = latents / time[:, None, None]
    policy.model.forward(*prepare(batch), *tokens, *state, latents * 0, noise, time)
    hook.remove()
    return found["velocity"]


if __name__ == "__main__":
    if sys.argv[1] == "build":
        build(Path(sys.argv[2]))
    else:
        check(Path(sys.argv[2]), Path(sys.argv[3]))
