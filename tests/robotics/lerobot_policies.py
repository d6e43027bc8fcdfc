"""Tiny random policies that the package lerobot builds and saves; run with its interpreter.

    python -m tests.robotics.lerobot_policies FOLDER

writes `act` and `diffusion`, for the observations of `tests.robotics.line_sim`, `act_two` and `diffusion_two`, which
see one further camera, `act_ensemble`, which averages overlapping chunks, and `expected.npz`, the actions that lerobot
chooses for `observations`.
"""

import sys
from functools import partial
from pathlib import Path

import numpy as np

CAMERAS = ("observation.images.front", "observation.images.wrist")


def observations() -> dict[str, np.ndarray]:
    """Three observations: (3, 32, 32, 3) images, (3, 1, 32, 32, 3) views and (3, 2) states."""
    images = (np.arange(3 * 32 * 32 * 3) * 7 % 256).astype(np.uint8).reshape(3, 32, 32, 3)
    views = (np.arange(images.size) * 11 % 256).astype(np.uint8).reshape(3, 1, 32, 32, 3) // 2
    return {"images": images, "state": np.array([[0.0, 0.5], [-0.2, 0.3], [0.4, -0.6]], np.float32), "views": views}


def main(folder: Path) -> None:
    """Build, save and evaluate the policies."""
    import torch
    from lerobot.configs.types import FeatureType, PolicyFeature
    from lerobot.policies.act.configuration_act import ACTConfig
    from lerobot.policies.diffusion.configuration_diffusion import DiffusionConfig
    from lerobot.policies.factory import get_policy_class, make_pre_post_processors

    inputs = {
        "observation.images.front": PolicyFeature(FeatureType.VISUAL, (3, 32, 32)),
        "observation.state": PolicyFeature(FeatureType.STATE, (2,)),
    }
    two = inputs | {"observation.images.wrist": PolicyFeature(FeatureType.VISUAL, (3, 32, 32))}
    shared = {"output_features": {"action": PolicyFeature(FeatureType.ACTION, (1,))}}
    shared |= {"device": "cpu", "pretrained_backbone_weights": None, "push_to_hub": False}
    small = {"dim_model": 16, "n_heads": 2, "dim_feedforward": 32, "n_encoder_layers": 1, "n_vae_encoder_layers": 1}
    unet = {"down_dims": (8, 16), "n_groups": 4, "diffusion_step_embed_dim": 8, "use_group_norm": True}
    configs = {
        kind + name: make(input_features=dict(seen), **shared)
        for kind, make in (
            ("act", partial(ACTConfig, chunk_size=6, n_action_steps=6, latent_dim=4, **small)),
            ("diffusion", partial(DiffusionConfig, horizon=8, n_action_steps=4, num_train_timesteps=4, **unet)),
        )
        for name, seen in (("", inputs), ("_two", two))
    }
    averaging = {"chunk_size": 6, "n_action_steps": 1, "temporal_ensemble_coeff": 0.5, "latent_dim": 4}
    configs["act_ensemble"] = ACTConfig(input_features=dict(inputs), **averaging, **small, **shared)
    expected = {}
    for name, config in configs.items():
        torch.manual_seed(0)
        policy = get_policy_class(config.type)(config)
        before, after = make_pre_post_processors(config, dataset_stats=statistics())
        for part in (policy, before, after):
            part.save_pretrained(folder / name)
        expected[name] = _selected(policy.eval(), before, after, name.endswith("_two"))
    np.savez(folder / "expected.npz", **expected)


def _selected(policy, before, after, two: bool) -> np.ndarray:
    """The first actions of an episode with a constant observation, by lerobot's `select_action`."""
    import torch

    seen = observations()
    policy.reset()
    torch.manual_seed(5)
    actions = []
    for _ in range(4):
        batch = {
            "observation.images.front": torch.from_numpy(seen["images"]).permute(0, 3, 1, 2).float() / 255,
            "observation.state": torch.from_numpy(seen["state"]),
            "task": ["go"] * 3,
        }
        if two:
            batch["observation.images.wrist"] = torch.from_numpy(seen["views"][:, 0]).permute(0, 3, 1, 2).float() / 255
        with torch.inference_mode():
            actions.append(after(policy.select_action(before(batch))).numpy())
    return np.stack(actions, 1)


def statistics() -> dict:
    """Statistics of the data that the policies would have learned from."""
    import torch

    found = {
        **{camera: {name: torch.full((3, 1, 1), 0.5) for name in ("mean", "std", "max")} for camera in CAMERAS},
        "observation.state": _statistics([0.1, -0.1], [0.5, 0.4]),
        "action": _statistics([0.2], [0.3]),
    }
    for camera in CAMERAS:
        found[camera]["min"] = torch.zeros(3, 1, 1)
    return found


def _statistics(mean: list[float], spread: list[float]) -> dict:
    import torch

    centre, width = torch.tensor(mean), torch.tensor(spread)
    ends = {"min": centre - width, "max": centre + width, "q01": centre - 2 * width, "q99": centre + 1.5 * width}
    return {"mean": centre, "std": width, **ends}


if __name__ == "__main__":
    main(Path(sys.argv[1]))
