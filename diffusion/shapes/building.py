"""Build functions for configurations: prompts, captioned images and an untrained pipeline of coloured shapes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from diffusion.shapes.captions import all_scenes, split_scenes, write_prompt_file
from diffusion.shapes.render import render_dataset
from mmrl.errors import UserError

PARTS = ("train", "held_out", "all")


def build_prompts(
    path: str,
    *,
    kinds: Sequence[str] | None = None,
    part: str = "all",
    held_out_share: float = 0.2,
    seed: int = 0,
) -> Path:
    """Write captions of shapes with what they ask for."""
    if part not in PARTS:
        raise UserError(f"part={part!r}; there are: {', '.join(PARTS)}")
    scenes = all_scenes(kinds)
    train, held_out = split_scenes(scenes, held_out_share=held_out_share, seed=seed)
    return write_prompt_file(path, {"train": train, "held_out": held_out, "all": scenes}[part])


def build_images(
    path: str, *, count: int = 16000, kinds: Sequence[str] | None = None, size: int = 32, seed: int = 0
) -> Path:
    """Write rendered scenes with their captions.

    Args:
        path: .npz file to write.
        count: images, the scenes in turn.
        kinds: kinds of scenes, see `all_scenes`.
        size: side in pixels.
        seed: seed of sizes, places and shades.
    """
    from diffusion.images import write_images

    scenes = all_scenes(kinds)
    images, index = render_dataset(scenes, count, size=size, seed=seed)
    return write_images(path, images, [scenes[scene].caption for scene in index.tolist()])


def build_pipeline(
    path: str,
    *,
    size: int = 32,
    patch: int = 4,
    channels: int = 12,
    shift: float = 1.5,
    seed: int = 0,
    **sizes: Any,
) -> Path:
    """Write a tiny Stable Diffusion 3 pipeline whose autoencoder fits rendered scenes and whose transformer is random.

    Args:
        path: folder to write.
        size: side of an image in pixels.
        patch: pixels on a side of a latent pixel, a power of 2.
        channels: latent channels.
        shift: timestep shift of the scheduler; small images need less than the 3 of the released models.
        seed: seed of the weights.
        sizes: further fields of `TinySd3Sizes`.
    """
    from diffusion.patches import PatchAutoencoder
    from diffusion.tiny import TinySd3Sizes, build_tiny_sd3

    scenes = all_scenes()
    images, _ = render_dataset(scenes, FITTED_IMAGES, size=size, seed=seed)
    chosen: dict[str, Any] = {"t5_layers": 0, "clip_tokens": 16} | sizes
    return build_tiny_sd3(
        path,
        corpus=[scene.caption for scene in scenes],
        sizes=TinySd3Sizes(latent_size=size // patch, latent_channels=channels, **chosen),
        shift=shift,
        seed=seed,
        autoencoder=PatchAutoencoder.fit(images, patch, channels),
    )


FITTED_IMAGES = 1000
"""Images that the autoencoder is fitted to."""
