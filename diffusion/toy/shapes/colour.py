"""Dense, smooth rewards for colour and position, which make it possible to test a training loop in seconds."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from diffusion.toy.shapes.captions import COLOURS, RELATIONS
from diffusion.toy.shapes.geneval import metadata_rows

LARGEST_DISTANCE = 255.0 * math.sqrt(3.0)
FAINT = 1e-3
"""Weight spread evenly over the image, so that the centre of an absent colour is the middle."""


def caption_colour(
    prompts: Sequence[str],
    completions: Sequence[NDArray[np.uint8]],
    *,
    metadata: Sequence[Mapping[str, Any] | None] | None = None,
    **_: Any,
) -> list[float | None]:
    """Reward pixels close to the colours of the caption: 1 - mean distance to the nearest of them.

    Images are (H, W, 3) uint8; colours come from `metadata` in GenEval's format, or from the caption if it is missing.
    """
    rows = metadata or [None] * len(prompts)
    return [
        _nearness(image, _colours_asked(prompt, row))
        for prompt, image, row in zip(prompts, completions, rows, strict=True)
    ]


def caption_position(
    prompts: Sequence[str],
    completions: Sequence[NDArray[np.uint8]],
    *,
    metadata: Sequence[Mapping[str, Any] | None] | None = None,
    **_: Any,
) -> list[float | None]:
    """Reward the distance between two colours' centres of mass along the relation of the caption.

    Images are (H, W, 3) uint8; `metadata` is in GenEval's format and is read from the caption if missing.
    """
    rewards: list[float | None] = []
    for image, row in zip(completions, metadata_rows(prompts, metadata), strict=True):
        include = row["include"]
        related = next((wanted for wanted in include if "position" in wanted), None)
        rewards.append(None if related is None else _separation(image, related, include))
    return rewards


def _colours_asked(prompt: str, row: Mapping[str, Any] | None) -> list[str]:
    if row is not None:
        named = [wanted.get("color") for wanted in row.get("include", [])]
    else:
        named = re.findall(r"[a-z]+", prompt.lower())
    return [name for name in named if name in COLOURS]


def _nearness(image: NDArray[np.uint8], names: Sequence[str]) -> float | None:
    if not names:
        return None
    asked = np.asarray([COLOURS[name] for name in names], dtype=np.float32)
    distance = np.linalg.norm(image[..., None, :].astype(np.float32) - asked, axis=-1)
    return float(1.0 - distance.min(-1).mean() / LARGEST_DISTANCE)


def _separation(image: NDArray[np.uint8], related: Mapping[str, Any], include: Sequence[Mapping[str, Any]]) -> float:
    relation, target = related["position"]
    offset = _centre(image, related["color"]) - _centre(image, include[target]["color"])
    return float(offset @ np.asarray(RELATIONS[relation], dtype=np.float32))


def _centre(image: NDArray[np.uint8], name: str) -> NDArray[np.float32]:
    """Centre of mass (x, y) of a colour, 0..1, pixels weighted by how close their hue is to it."""
    pixels = image.astype(np.float32)
    hue = np.asarray(COLOURS[name], dtype=np.float32)
    hue = hue - hue.mean()
    weight = ((pixels - pixels.mean(-1, keepdims=True)) @ (hue / (hue @ hue))).clip(0.0, None) ** 2 + FAINT
    height, width = weight.shape
    x, y = (np.arange(width) + 0.5) / width, (np.arange(height) + 0.5) / height
    moments = np.asarray([weight.sum(0) @ x, weight.sum(1) @ y], dtype=np.float32)
    centre: NDArray[np.float32] = moments / np.float32(weight.sum())
    return centre
