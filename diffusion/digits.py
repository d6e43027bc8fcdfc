"""Build functions for configurations: the handwritten digits that scikit-learn ships, as captioned 8 x 8 images."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from diffusion.rewards.digits import digit_scans
from mmrl.files import write_atomically

NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
CAPTIONS = tuple(f"the digit {name}" for name in NAMES)


def build_prompts(path: str) -> Path:
    """Write one prompt for each digit, with its label."""
    file = Path(path)
    rows = [{"prompt": caption, "metadata": {"label": label}} for label, caption in enumerate(CAPTIONS)]
    write_atomically(file, "".join(json.dumps(row) + "\n" for row in rows))
    return file


def build_images(path: str) -> Path:
    """Write all scans with their captions as one .npz file."""
    from diffusion.images import write_images

    images, labels = _scans()
    return write_images(path, images, [CAPTIONS[label] for label in labels.tolist()])


def build_pipeline(path: str, *, shift: float = 1.5, seed: int = 0, **sizes: Any) -> Path:
    """Write a tiny Stable Diffusion 3 pipeline of 8 x 8 grey images whose transformer is random."""
    from diffusion.patches import PatchAutoencoder
    from diffusion.tiny import TinySd3Sizes, build_tiny_sd3

    chosen: dict[str, Any] = {"t5_layers": 0, "clip_tokens": 8} | sizes
    return build_tiny_sd3(
        path,
        corpus=CAPTIONS,
        sizes=TinySd3Sizes(latent_size=8, latent_channels=1, vae_widths=(4,), **chosen),
        shift=shift,
        seed=seed,
        autoencoder=PatchAutoencoder.fit(_scans()[0], 1, 1),
    )


def _scans() -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """All scans as grey RGB images (N, 8, 8, 3), and their digits (N,)."""
    halves = [digit_scans(half) for half in ("reward", "judge")]
    scans = np.concatenate([scan for scan, _ in halves]).reshape(-1, 8, 8, 1)
    labels = np.concatenate([label for _, label in halves])
    return np.repeat((scans * 255).round().astype(np.uint8), 3, 3), labels
