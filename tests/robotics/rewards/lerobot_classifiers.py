"""Tiny random reward classifiers that the package lerobot builds and saves; run with its interpreter.

    python -m tests.robotics.rewards.lerobot_classifiers FOLDER

writes `two`, a classifier of two cameras with a small ResNet, `short`, which lacks its head, `code`, whose encoder has
code, `robometer`, of another type, and `expected.npz`, what lerobot's own model and processor make of `pictures`.
"""

import json
import shutil
import sys
from pathlib import Path

import numpy as np

CAMERAS = ("observation.images.wrist", "observation.images.front")


def pictures() -> np.ndarray:
    """(4, 2, 128, 128, 3) images."""
    shape = (4, 2, 128, 128, 3)
    pixels = (np.arange(np.prod(shape)) * 7 % 251).astype(np.uint8).reshape(shape)
    return pixels // np.arange(1, 5, dtype=np.uint8)[:, None, None, None, None]


def main(folder: Path) -> None:
    """Build, save and evaluate the classifiers."""
    import torch
    from lerobot.configs.types import FeatureType, PolicyFeature
    from lerobot.rewards.classifier.configuration_classifier import RewardClassifierConfig
    from lerobot.rewards.factory import get_reward_model_class, make_reward_pre_post_processors
    from safetensors.torch import load_file, save_file
    from transformers import ResNetConfig, ResNetModel

    torch.manual_seed(0)
    sizes = {"embedding_size": 8, "hidden_sizes": [8, 8, 8, 8], "depths": [1, 1, 1, 1], "layer_type": "basic"}
    ResNetModel(ResNetConfig(**sizes)).save_pretrained(folder / "encoder")
    config = RewardClassifierConfig(
        input_features={key: PolicyFeature(FeatureType.VISUAL, (3, 128, 128)) for key in CAMERAS},
        model_name=str(folder / "encoder"),
        hidden_dim=16,
        latent_dim=16,
        push_to_hub=False,
    )
    model = get_reward_model_class(config.type)(config).eval()
    stats = {key: {"mean": torch.full((3, 1, 1), 0.4), "std": torch.full((3, 1, 1), 0.2)} for key in CAMERAS}
    before, after = make_reward_pre_post_processors(config, dataset_stats=stats)
    for part in (model, before, after):
        part.save_pretrained(folder / "two")
    seen = torch.from_numpy(pictures()).permute(0, 1, 4, 2, 3) / 255
    batch = {key: seen[:, number] for number, key in enumerate(CAMERAS)}
    with torch.no_grad():
        ready = before(dict(batch))
        found = model.predict([ready[key] for key in CAMERAS]).probabilities
        bare = model.predict([batch[key] for key in CAMERAS]).probabilities
    np.savez(folder / "expected.npz", found=found.numpy(), bare=bare.numpy())

    weights = load_file(_changed(folder, "short", {}) / "model.safetensors")
    save_file({name: weights[name] for name in weights if "head" not in name}, folder / "short/model.safetensors")
    _changed(folder, "robometer", {"type": "robometer"})
    coded = shutil.copytree(folder / "encoder", folder / "coded")
    about = json.loads((coded / "config.json").read_text())
    about |= {"model_type": "own", "auto_map": {"AutoConfig": "own.Own", "AutoModel": "own.Model"}}
    (coded / "config.json").write_text(json.dumps(about))
    _changed(folder, "code", {"model_name": str(coded)})


def _changed(folder: Path, name: str, change: dict[str, str]) -> Path:
    copied = shutil.copytree(folder / "two", folder / name)
    about = json.loads((copied / "config.json").read_text())
    (copied / "config.json").write_text(json.dumps(about | change))
    return copied


if __name__ == "__main__":
    main(Path(sys.argv[1]))
