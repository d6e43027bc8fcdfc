"""Video rewards: image rewards averaged over frames, and rewards for changes between frames."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mmrl.errors import UserError

PIXEL_LEVELS = 255.0


def over_frames(function: Callable[..., list[float | None]]) -> Callable[..., list[float | None]]:
    """Extend an image reward to videos (K, h, w, 3) by averaging over their frames."""

    @functools.wraps(function)
    def scored(prompts: Sequence[str], completions: Sequence[NDArray[np.uint8]], **columns: Any) -> list[float | None]:
        if not len(completions) or completions[0].ndim == 3:
            return function(prompts=prompts, completions=completions, **columns)
        frames = [frame for video in completions for frame in video]
        count = len(completions[0])

        def each(values: Any) -> Any:
            of_rows = isinstance(values, list) and len(values) == len(completions)
            return [value for value in values for _ in range(count)] if of_rows else values

        repeated = {name: each(values) for name, values in columns.items()}
        values = function(prompts=each(list(prompts)), completions=frames, **repeated)
        # without None, which a prompt has that the reward does not apply to
        given = [[value for value in values[n : n + count] if value is not None] for n in range(0, len(values), count)]
        return [float(np.mean(own)) if own else None for own in given]

    return scored


def smoothness(prompts: Sequence[str], completions: Sequence[NDArray[np.uint8]], **_: Any) -> list[float]:
    """Reward videos (K, h, w, 3) uint8 with similar neighbouring frames: 1 - their mean distance, 0..1."""
    return [1.0 - flicker(video) for video in _videos(completions)]


def motion(prompts: Sequence[str], completions: Sequence[NDArray[np.uint8]], **_: Any) -> list[float]:
    """Reward videos (K, h, w, 3) uint8 that move in the prompt's direction: left, right, up or down.

    The value is the displacement of the centre of brightness from the first to the last frame along that direction, as
    a fraction of width or height, -1..1; 0 if the prompt has no direction.
    """
    return [_way(prompt, video) for prompt, video in zip(prompts, _videos(completions), strict=True)]


def _videos(completions: Sequence[NDArray[np.uint8]]) -> Sequence[NDArray[np.uint8]]:
    if any(completion.ndim != 4 for completion in completions):
        raise UserError("this reward scores videos, but the model generates images")
    return completions


def flicker(video: NDArray[np.uint8]) -> float:
    """Mean absolute difference of neighbouring frames (K, h, w, 3), 0..1; 0 for a single frame."""
    if len(video) < 2:
        return 0.0
    return float(np.abs(np.diff(video.astype(np.float32), axis=0)).mean() / PIXEL_LEVELS)


def _way(prompt: str, video: NDArray[np.uint8]) -> float:
    words = set(prompt.lower().split())
    named = [axis_and_sign for word, axis_and_sign in DIRECTIONS.items() if word in words]
    if not named:
        return 0.0
    axis, sign = named[0]
    return sign * (_centre(video[-1], axis) - _centre(video[0], axis))


def _centre(frame: NDArray[np.uint8], axis: int) -> float:
    """Centre of brightness of a frame (h, w, 3) along an axis, 0..1; 0.5 for a black frame."""
    brightness = frame.astype(np.float64).sum(2)
    weights = brightness.sum(1 - axis)
    places = (np.arange(len(weights)) + 0.5) / len(weights)
    return float((weights * places).sum() / weights.sum()) if weights.any() else 0.5


DIRECTIONS = {"left": (1, -1.0), "right": (1, 1.0), "up": (0, -1.0), "down": (0, 1.0)}
"""Axis of a frame and sign of a direction; rows run downwards."""
