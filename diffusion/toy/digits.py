"""Does the image look like the handwritten digit that was asked for? Classifiers of scikit-learn's scans.

The reward's classifier and the judge's see different halves of the 1797 scans and are of different kinds, so that a
image which only pleases the weights of the first does not please the second.
"""

from __future__ import annotations

import functools
import json
import re
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from mmrl.errors import UserError
from mmrl.files import write_atomically

SIDE_PX = 8
INK = 16.0
"""Brightest value of a scan."""
SPLIT_SEED = 0
JUDGE_SEED = 7
LEAST = 1e-12
"""Minimum probability of which the logarithm is taken."""


def class_prob(
    prompts: Sequence[str],
    completions: Sequence[NDArray[np.uint8]],
    *,
    metadata: Sequence[Mapping[str, Any] | None] | None = None,
    **_: Any,
) -> list[float]:
    """Give the probability of the captioned digit under a logistic regression.

    Images are (H, W, 3) uint8 of any size, white ink on black as in the scans; the digit is the only one in the prompt,
    or `metadata` {"label": digit}.
    """
    return _probabilities("reward", prompts, completions, metadata)


def class_log_prob(
    prompts: Sequence[str],
    completions: Sequence[NDArray[np.uint8]],
    *,
    metadata: Sequence[Mapping[str, Any] | None] | None = None,
    **_: Any,
) -> list[float]:
    """Give the logarithm of `class_prob`, which still has a slope when the digit is improbable."""
    return [float(np.log(max(value, LEAST))) for value in _probabilities("reward", prompts, completions, metadata)]


def class_prob_judge(
    prompts: Sequence[str],
    completions: Sequence[NDArray[np.uint8]],
    *,
    metadata: Sequence[Mapping[str, Any] | None] | None = None,
    **_: Any,
) -> list[float]:
    """Give the probability of the captioned digit under a neural network fitted to the other half of the scans.

    It is for measuring and not for training; arguments and result are those of `class_prob`.
    """
    return _probabilities("judge", prompts, completions, metadata)


def digit_scans(half: str) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Load one half ("reward" or "judge") of the scans (N, 64), 0..1, and their digits (N,)."""
    try:
        from sklearn.datasets import load_digits
    except ModuleNotFoundError as error:
        raise UserError("the digit rewards need scikit-learn; install it with pip install scikit-learn") from error
    scans, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(SPLIT_SEED).permutation(len(labels))
    rows = order[: len(order) // 2] if half == "reward" else order[len(order) // 2 :]
    return (scans[rows] / INK).astype(np.float32), labels[rows].astype(np.int64)


@functools.cache
def _classifier(half: str) -> Any:
    """The fitted classifier of a half."""
    return fit_classifier(half, *digit_scans(half))


def fit_classifier(half: str, scans: NDArray[np.float32], labels: NDArray[np.int64]) -> Any:
    """Fit the classifier of a half: a logistic regression for the reward, a network for the judge."""
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.linear_model import LogisticRegression
    from sklearn.neural_network import MLPClassifier

    if half == "reward":
        return LogisticRegression(max_iter=500).fit(scans, labels)
    network = MLPClassifier((64,), alpha=1e-2, learning_rate_init=1e-2, max_iter=120, random_state=JUDGE_SEED)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # the limit is meant
        return network.fit(scans, labels)


def _probabilities(
    half: str,
    prompts: Sequence[str],
    completions: Sequence[NDArray[np.uint8]],
    metadata: Sequence[Mapping[str, Any] | None] | None,
) -> list[float]:
    classifier = _classifier(half)
    if not len(completions):
        return []
    labels = [_label(prompt, row) for prompt, row in zip(prompts, metadata or [None] * len(prompts), strict=True)]
    table = classifier.predict_proba(np.stack([_as_scan(image) for image in completions]))
    return [float(row[label]) for row, label in zip(table, labels, strict=True)]


def _label(prompt: str, row: Mapping[str, Any] | None) -> int:
    if row is not None:
        label = row.get("label")
        if isinstance(label, int) and 0 <= label <= 9:
            return label
        raise UserError(f"metadata['label'] is {label!r}; must be a digit 0 to 9")
    found = re.findall(r"\d+", prompt)
    if len(found) != 1 or len(found[0]) != 1:
        raise UserError(f"the prompt {prompt!r} must have one digit, or the row metadata with a label")
    return int(found[0])


def _as_scan(image: NDArray[np.uint8]) -> NDArray[np.float32]:
    grey = Image.fromarray(image).convert("L").resize((SIDE_PX, SIDE_PX), Image.Resampling.BOX)
    return np.asarray(grey, dtype=np.float32).ravel() / 255.0


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
    from diffusion.data.captioned_images import write_images

    images, labels = _scans()
    return write_images(path, images, [CAPTIONS[label] for label in labels.tolist()])


def build_pipeline(path: str, *, shift: float = 1.5, seed: int = 0, **sizes: Any) -> Path:
    """Write a tiny Stable Diffusion 3 pipeline with a random transformer, for 8 x 8 grey images."""
    from diffusion.toy.pipelines.patches import PatchAutoencoder
    from diffusion.toy.pipelines.tiny import TinySd3Sizes, build_tiny_sd3

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
