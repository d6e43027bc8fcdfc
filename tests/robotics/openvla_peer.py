"""A tiny random OpenVLA-OFT folder, built, saved and evaluated by SimpleVLA-RL's own code.

    python -m tests.robotics.openvla_peer CHECKOUT FOLDER

needs torch, timm 0.9.16, transformers 4.40.1 with modeling_llama.py of moojink/transformers-openvla-oft (attention in
both directions), and CHECKOUT, a copy of PRIME-RL/SimpleVLA-RL. FOLDER gets the policy, and `golden.npz` greedy
tokens, actions and every eighth of the logits. `openvla-oft.tar.xz` beside this file is such a folder.

    ROBOT_PLATFORM=LIBERO python -m tests.robotics.openvla_peer CHECKOUT FOLDER two.npz

asks the policy of such a folder with two images a row and writes its answers; they are `openvla-oft-two.npz` here.
"""

import json
import sys
from pathlib import Path
from types import ModuleType

import numpy as np

BACKBONE = "dinosiglip-vit-so-224px"
PACKAGE = "verl.utils.vla_utils.openvla_oft"
TEXTS = ("push the red block", "open the drawer")
WORDS = ("In:", "What", "action", "should", "the", "robot", "take", "to", "push", "red", "block?", "Out:", "open")
WORDS += ("drawer?",)
EMPTY_ID, ROWS, PADDING = 29871, 32064, 64
STATISTICS = {
    "q01": [-0.6, -0.5, -0.7, -0.2, -0.3, -0.2, 0.0],
    "q99": [0.8, 0.5, 0.6, 0.3, 0.2, 0.4, 1.0],
    "min": [-1.0, -0.9, -0.9, -0.4, -0.4, -0.4, 0.0],
    "max": [1.0, 0.9, 0.8, 0.4, 0.3, 0.5, 1.0],
    "mean": [0.0] * 7,
    "std": [0.3] * 7,
    "mask": [True] * 6 + [False],
}


def prompt(text: str) -> str:
    """The prompt of OpenVLA."""
    return f"In: What action should the robot take to {text}?\nOut:"


def images() -> np.ndarray:
    """(2, 32, 32, 3) uint8."""
    return (np.arange(2 * 32 * 32 * 3) * 11 % 256).astype(np.uint8).reshape(2, 32, 32, 3)


def wrist_images() -> np.ndarray:
    """(2, 32, 32, 3) uint8."""
    return (np.arange(2 * 32 * 32 * 3) * 7 % 251).astype(np.uint8).reshape(2, 32, 32, 3)


def main(checkout: Path, folder: Path) -> None:
    """Build, save and evaluate the policy."""
    import torch

    configuration, policy_class = _original(checkout)
    text = {"vocab_size": ROWS, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    text |= {"num_attention_heads": 4, "num_key_value_heads": 4, "pad_token_id": 32000, "rms_norm_eps": 1e-6}
    config = configuration.OpenVLAConfig(
        norm_stats={"tiny_no_noops": {"action": STATISTICS}},
        vision_backbone_id=BACKBONE,
        llm_backbone_id="llama2-7b-pure",
        image_resize_strategy="resize-naive",
        text_config=text,
    )
    config.use_proprio = False  # what SimpleVLA-RL's workers set
    torch.manual_seed(0)
    model = policy_class(config).eval()
    _spread(model)
    model.save_pretrained(folder)
    _write_processor(folder)
    np.savez_compressed(folder / "golden.npz", **_asked(model, _pixels(images())))


def ask_with_two_images(checkout: Path, folder: Path, answers: Path) -> None:
    """Load the policy of a folder and evaluate it with `images` and, as the wrist's camera, `wrist_images`."""
    _, policy_class = _original(checkout)
    model = policy_class.from_pretrained(folder).eval()
    model.vision_backbone.set_num_images_in_input(2)
    np.savez_compressed(answers, **_asked(model, np.concatenate([_pixels(images()), _pixels(wrist_images())], 1)))


def _original(checkout: Path):
    """Configurations and the class of policies of the original code, with tiny backbones."""
    from tests.robotics.tiny_timm import register

    names, package = register(), checkout
    for part in PACKAGE.split("."):  # the packages around it import what this does not need
        package = package / part
        module = ModuleType(".".join(package.relative_to(checkout).parts))
        module.__path__ = [str(package)]
        sys.modules[module.__name__] = module
    from verl.utils.vla_utils.openvla_oft import configuration_prismatic as configuration
    from verl.utils.vla_utils.openvla_oft.modeling_prismatic import OpenVLAForActionPrediction

    configuration.VISION_BACKBONE_TO_TIMM_ID[BACKBONE] = list(names)
    configuration.VISION_BACKBONE_TO_RESOLUTION[BACKBONE] = [32, 32]
    return configuration, OpenVLAForActionPrediction


def _spread(model) -> None:
    """Weights so large that every part matters, and zero where no token of the test is, so that the file is small."""
    import torch

    used = [0, 1, 2, EMPTY_ID, *range(3, 3 + len(WORDS))]
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() >= 2:
                torch.nn.init.normal_(weight, std=1.0 / weight[0].numel() ** 0.5)
            elif "scale_factor" in name:
                weight.fill_(0.5)
        table, head = model.language_model.model.embed_tokens.weight, model.language_model.lm_head.weight
        for weight, kept in ((table, used), (head, range(ROWS - PADDING - 256, ROWS - PADDING))):
            rows = torch.randn(len(list(kept)), weight.shape[1])
            weight.zero_()
            weight[list(kept)] = rows
        for weight in model.parameters():  # few different numbers, so that the file is small
            weight.copy_((weight * 64).round() / 64)


def _write_processor(folder: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2} | {word: 3 + number for number, word in enumerate(WORDS)}
    plain = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    plain.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    plain.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    special = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    PreTrainedTokenizerFast(tokenizer_object=plain, **special).save_pretrained(folder)
    entries = {
        "image_processor_type": "PrismaticImageProcessor",
        "image_resize_strategy": "resize-naive",
        "input_sizes": [[3, 32, 32], [3, 32, 32]],
        "interpolations": ["bicubic", "bicubic"],
        "means": [[0.484375, 0.455078125, 0.40625], [0.5, 0.5, 0.5]],
        "stds": [[0.228515625, 0.2236328125, 0.224609375], [0.5, 0.5, 0.5]],
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(entries))


def _asked(model, normalised: np.ndarray) -> dict[str, np.ndarray]:
    """Greedy actions of `generate_action_verl` and the action ids' logits of the training pass, for both texts."""
    import torch

    lines = [[1, *(3 + WORDS.index(word) for word in prompt(text).split()), EMPTY_ID] for text in TEXTS]
    pad, width = 32000, max(map(len, lines))
    # rows are padded in front, as SimpleVLA-RL's rollouts pad them
    ids = torch.tensor([[pad] * (width - len(line)) + line for line in lines])
    attention = ids.ne(pad)
    pixels = torch.from_numpy(normalised)
    inputs = {"input_ids": ids, "attention_mask": attention, "pixel_values": pixels}
    found = {}
    hook = model.language_model.register_forward_hook(lambda *parts: found.update(logits=parts[2].logits.detach()))
    with torch.no_grad():
        actions, tokens = model.generate_action_verl(
            **inputs, unnorm_key="tiny_no_noops", do_sample=False, temperature=1.0, padding_idx=pad
        )
        hook.remove()
        single = [
            model(
                input_ids=torch.tensor([line]), attention_mask=torch.ones(1, len(line)).bool(), pixel_values=one[None]
            )
            for line, one in zip(lines, pixels, strict=True)
        ]
    logits = torch.cat(single)[..., -256 - 64 : -64]
    return {"actions": np.asarray(actions, np.float32), "tokens": tokens.numpy(), "logits": logits[..., ::8].numpy()}


def _pixels(pixels: np.ndarray) -> np.ndarray:
    """(2, 6, 32, 32), normalised as by PrismaticImageProcessor at the images' own size."""
    means = np.array([[0.484375, 0.455078125, 0.40625], [0.5, 0.5, 0.5]])
    stds = np.array([[0.228515625, 0.2236328125, 0.224609375], [0.5, 0.5, 0.5]])
    shares = pixels / 255
    parts = [(shares - mean) / std for mean, std in zip(means, stds, strict=True)]
    return np.concatenate(parts, -1).transpose(0, 3, 1, 2).astype(np.float32)


if __name__ == "__main__":
    if len(sys.argv) > 3:
        ask_with_two_images(*map(Path, sys.argv[1:]))
    else:
        main(Path(sys.argv[1]), Path(sys.argv[2]))
