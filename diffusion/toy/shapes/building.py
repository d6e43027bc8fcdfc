"""Build functions for configurations: prompts, captioned images and an untrained pipeline of coloured shapes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from diffusion.toy.shapes.captions import all_scenes, parse_caption, split_scenes, write_prompt_file
from diffusion.toy.shapes.render import render_dataset
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
    """Write captions of shapes with their scenes."""
    if part not in PARTS:
        raise UserError(f"part={part!r}; must be one of {', '.join(PARTS)}")
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
    from diffusion.data.captioned_images import write_images

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
    from diffusion.toy.pipelines.patches import PatchAutoencoder
    from diffusion.toy.pipelines.tiny import TinySd3Sizes, build_tiny_sd3

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


def build_pairs(
    path: str,
    *,
    model: str,
    count: int = 2000,
    kinds: Sequence[str] | None = None,
    flipped: float = 0.3,
    garbled: float = 0.1,
    steps: int = 10,
    guidance: float = 3.0,
    max_sequence_length: int = 1,
    seed: int = 0,
) -> Path:
    """Draw two images of each caption from different seeds, and mark the one with the higher score as preferred.

    The scores of both (`shapes_geneval`, without the flips) and the captions' quality are written too: what a reward
    model and a language model would say of human data.

    Args:
        path: .npz file to write.
        model: pipeline or saved weights that draw.
        count: number of pairs.
        kinds: kinds of scenes, see `all_scenes`.
        flipped: fraction of pairs whose order is turned round after scoring, and of equal scores one half by nature.
        garbled: fraction of pairs whose caption has its words in another order, after the images were drawn.
        steps: denoising steps.
        guidance: guidance scale.
        max_sequence_length: tokens of the T5 encoder, see `PipelineConfig`.
        seed: seed of captions, images, flips and words.

    Returns:
        The file.

    Raises:
        UserError: an unknown kind, or a model that cannot be loaded.
    """
    from diffusion.data.image_pairs import write_pairs
    from diffusion.models.diffusion_policy import PipelineConfig, load_policy
    from diffusion.toy.shapes.geneval import shapes_geneval

    rng = np.random.default_rng([seed, 11])
    wanted = _draw_captions([scene.caption for scene in all_scenes(kinds)], count, rng)
    policy = load_policy(PipelineConfig(path=model, max_sequence_length=max_sequence_length))
    images = _draw(policy, [caption for caption in wanted for _ in (0, 1)], rng, steps, guidance)
    scores = np.array(shapes_geneval([c for c in wanted for _ in (0, 1)], list(images))).reshape(count, 2)
    order = _preferred_first(scores, flipped, rng)
    chosen, rejected = (2 * np.arange(count)[:, None] + order).T
    sides = np.take_along_axis(scores, order, 1)
    shown = [_garble(text, rng) if rng.random() < garbled else text for text in wanted]
    return write_pairs(
        path,
        shown,
        images[chosen],
        images[rejected],
        score_chosen=sides[:, 0].tolist(),
        score_rejected=sides[:, 1].tolist(),
        text_quality=caption_quality(shown),
    )


def _draw_captions(captions: Sequence[str], count: int, rng: np.random.Generator) -> list[str]:
    """So many captions in random order, each as often as the others or once more."""
    rounds = -(-count // len(captions))
    return [captions[index] for _ in range(rounds) for index in rng.permutation(len(captions))][:count]


def _preferred_first(scores: np.ndarray, flipped: float, rng: np.random.Generator) -> np.ndarray:
    """(n, 2) the columns of scores (n, 2) in the order of preference, turned round for a fraction of the rows."""
    first_wins = scores[:, 0] + 1e-9 * rng.standard_normal(len(scores)) > scores[:, 1]  # ties either way
    first_wins ^= rng.random(len(scores)) < flipped
    return np.where(first_wins[:, None], [[0, 1]], [[1, 0]])


def caption_quality(captions: Sequence[str]) -> list[float]:
    """10 for a valid caption of shapes, otherwise 0: a rule that stands in for a language model's score."""
    return [10.0 if _readable(caption) else 0.0 for caption in captions]


def _draw(policy: Any, captions: Sequence[str], rng: np.random.Generator, steps: int, guidance: float) -> np.ndarray:
    import torch

    from diffusion.data.prompts import DiffusionTask
    from diffusion.models.pipelines import decode_latents
    from diffusion.sampling.latent_sampler import LatentSamplerConfig, sample_latents, text_of

    tasks = [DiffusionTask(caption, caption) for caption in dict.fromkeys(captions)]
    index = {task.prompt: number for number, task in enumerate(tasks)}
    text = text_of(policy, tasks, torch.tensor([index[caption] for caption in captions]))
    seeds = torch.from_numpy(rng.integers(2**62, size=(len(captions), 2)))
    config = LatentSamplerConfig(steps=steps, guidance=guidance)
    with torch.no_grad():
        latents = sample_latents(policy, text, seeds, config)
        return np.asarray(decode_latents(policy.family, latents, batch=config.batch_rows).pixels)


def _garble(caption: str, rng: np.random.Generator) -> str:
    """The words in an order that is no caption."""
    words = caption.split()
    while _readable(" ".join(words)):
        words = [words[index] for index in rng.permutation(len(words))]
    return " ".join(words)


def _readable(caption: str) -> bool:
    try:
        parse_caption(caption)
    except UserError:
        return False
    return True
