"""Tiny random diffusion policies with several consecutive observations that lerobot builds, saves and evaluates.

    python -m tests.robotics.lerobot_rows build FOLDER
    python -m tests.robotics.lerobot_rows select POLICY ARRAYS

Run with lerobot's interpreter. `build` writes `row2` and `row3`, for the observations and in the units of `ball_env`,
and `vqbet`, of another type. `select` loads one of the first two and writes into ARRAYS what its `select_action`
chooses for a sequence of observations.
"""

import sys
from pathlib import Path

import numpy as np

CAMERAS = ("observation.images.top", "observation.images.side")
CHUNK = 4
LOW, HIGH = [0.0, -2.0], [512.0, 6.0]


def build(folder: Path) -> None:
    """Build and save the policies."""
    import torch
    from lerobot.configs.types import FeatureType, PolicyFeature
    from lerobot.policies.diffusion.configuration_diffusion import DiffusionConfig
    from lerobot.policies.factory import get_policy_class, make_pre_post_processors

    inputs = {camera: PolicyFeature(FeatureType.VISUAL, (3, 64, 64)) for camera in CAMERAS}
    inputs |= {"observation.state": PolicyFeature(FeatureType.STATE, (2,))}
    outputs = {"action": PolicyFeature(FeatureType.ACTION, (2,))}
    small = {"down_dims": (8, 16), "n_groups": 4, "diffusion_step_embed_dim": 8, "use_group_norm": True}
    small |= {"horizon": 8, "n_action_steps": CHUNK, "num_train_timesteps": 4, "pretrained_backbone_weights": None}
    for rows in (2, 3):
        config = DiffusionConfig(
            n_obs_steps=rows,
            input_features=dict(inputs),
            output_features=outputs,
            device="cpu",
            push_to_hub=False,
            **small,
        )
        torch.manual_seed(rows)
        policy = get_policy_class(config.type)(config)
        for name, weight in policy.named_parameters():  # large enough that every observation moves the actions
            if "unet" in name and weight.dim() > 1:
                torch.nn.init.normal_(weight, std=0.4 / weight[0].numel() ** 0.5)
            if "cond_encoder" in name and weight.dim() > 1:
                torch.nn.init.normal_(weight, std=2.0 / weight[0].numel() ** 0.5)
        before, after = make_pre_post_processors(config, dataset_stats=_statistics())
        for part in (policy, before, after):
            part.save_pretrained(folder / f"row{rows}")
    _build_vqbet(folder / "vqbet", {name: part for name, part in inputs.items() if name != CAMERAS[1]}, outputs)


def _build_vqbet(folder: Path, inputs: dict, outputs: dict) -> None:
    """A policy of another type that takes several observations."""
    from lerobot.policies.factory import get_policy_class, make_pre_post_processors
    from lerobot.policies.vqbet.configuration_vqbet import VQBeTConfig

    small = {"gpt_input_dim": 16, "gpt_output_dim": 16, "gpt_n_layer": 1, "gpt_n_head": 2, "gpt_hidden_dim": 16}
    small |= {"vqvae_embedding_dim": 8, "vqvae_enc_hidden_dim": 8, "crop_shape": None, "use_group_norm": True}
    shared = {"pretrained_backbone_weights": None, "device": "cpu", "push_to_hub": False}
    config = VQBeTConfig(input_features=inputs, output_features=outputs, **small, **shared)
    for part in (get_policy_class(config.type)(config), *make_pre_post_processors(config, dataset_stats=_statistics())):
        part.save_pretrained(folder)


def _statistics() -> dict:
    import torch

    least, most = torch.tensor(LOW), torch.tensor(HIGH)
    found = {camera: {name: torch.full((3, 1, 1), 0.5) for name in ("mean", "std", "max")} for camera in CAMERAS}
    for camera in CAMERAS:
        found[camera]["min"] = torch.zeros(3, 1, 1)
    state = {"min": torch.zeros(2), "max": torch.full((2,), 200.0)}
    found["observation.state"] = state | {"mean": torch.full((2,), 100.0), "std": torch.full((2,), 50.0)}
    found["action"] = {"min": least, "max": most, "mean": (least + most) / 2, "std": (most - least) / 4}
    return found


def select(folder: Path, arrays: Path) -> None:
    """Ask for an action at each control step; the noise of a chunk is drawn from its seed."""
    import torch
    from lerobot.configs.policies import PreTrainedConfig
    from lerobot.policies.factory import get_policy_class, make_pre_post_processors

    config = PreTrainedConfig.from_pretrained(folder)
    config.pretrained_backbone_weights = None
    policy = get_policy_class(config.type).from_pretrained(folder, config=config).eval()
    before, after = make_pre_post_processors(config, pretrained_path=folder)
    with np.load(arrays) as given:
        parts = {name: given[name] for name in given.files}
    policy.reset()
    actions = []
    for step in range(len(parts["state"])):  # (T, B, ...)
        if step % CHUNK == 0:
            torch.manual_seed(int(parts["seeds"][step // CHUNK]))
        images = (parts["images"][step], parts["views"][step, :, 0])
        seen = {camera: _picture(image) for camera, image in zip(CAMERAS, images, strict=True)}
        seen |= {"observation.state": torch.from_numpy(parts["state"][step]), "task": [""] * parts["state"].shape[1]}
        actions.append(after(policy.select_action(before(seen))).numpy())
    np.savez(arrays, **parts, actions=np.stack(actions))


def _picture(image: np.ndarray):
    import torch

    return torch.from_numpy(image).permute(0, 3, 1, 2).float() / 255


if __name__ == "__main__":
    if sys.argv[1] == "build":
        build(Path(sys.argv[2]))
    else:
        select(Path(sys.argv[2]), Path(sys.argv[3]))
