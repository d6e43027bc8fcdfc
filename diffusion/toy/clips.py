"""Clips of a moving handwritten digit: clips for pre-training, prompts, and judges of what a clip shows.

A clip is 5 frames of 12 x 12 pixels, in which one of scikit-learn's scans moves by a pixel a frame. The reward follows
the centre of brightness and asks a logistic regression for the digit; the held-out judge compares neighbouring frames
at all shifts and asks a network that was fitted to other scans.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from diffusion.rewards.video_rewards import DIRECTIONS
from diffusion.toy.digits import SIDE_PX, digit_scans, fit_classifier
from mmrl.errors import UserError
from mmrl.files import write_atomically

FRAMES = 5
FRAME_PX = 12
JITTER = 0
"""Maximum offset in pixels between the middle of the digit's path and the middle of the frame."""
LEAST_STEP = 0.25
"""Minimum shift between frames, in pixels, that counts as a move."""
LONGEST_STEP = 3
"""Maximum shift between frames that the judge searches for."""
CAPTIONS = tuple(f"a {digit} moving {way}" for digit in range(10) for way in DIRECTIONS)

Clips = Sequence[NDArray[np.uint8]]
Value = TypeVar("Value")


class _Wanted(NamedTuple):
    digit: int
    step: tuple[int, int]
    """Rows and columns of a step."""


def moving_digit(prompts: Sequence[str], completions: Clips, **_: Any) -> list[float]:
    """Give the product of `moving_digit_shape` and `moving_digit_direction`."""
    shapes, ways = moving_digit_shape(prompts, completions), moving_digit_direction(prompts, completions)
    return [shape * way for shape, way in zip(shapes, ways, strict=True)]


def moving_digit_shape(prompts: Sequence[str], completions: Clips, **_: Any) -> list[float]:
    """Give the probability of the prompt's digit under a logistic regression, the mean over the frames."""
    return _shapes("reward", prompts, completions)


def moving_digit_direction(prompts: Sequence[str], completions: Clips, **_: Any) -> list[float]:
    """Give the fraction of steps in which the centre of brightness moves in the prompt's direction."""
    return _ways(_centre_step, prompts, completions)


def moving_digit_judge(prompts: Sequence[str], completions: Clips, **_: Any) -> list[float]:
    """Give the product of digit and direction, as judged by a network and by the best match of neighbouring frames."""
    shapes, ways = _shapes("judge", prompts, completions), _ways(_matched_step, prompts, completions)
    return [shape * way for shape, way in zip(shapes, ways, strict=True)]


def build_prompts(path: str) -> Path:
    """Write one prompt for each digit and direction."""
    file = Path(path)
    write_atomically(file, "".join(json.dumps({"prompt": caption}) + "\n" for caption in CAPTIONS))
    return file


def build_clips(path: str, *, scans: int | None = None, seed: int = 0) -> Path:
    """Write a captioned clip of each scan (or of some) in each direction, as one .npz file."""
    from diffusion.data.captioned_images import write_images

    clips, captions = draw_clips(scans, seed)
    return write_images(path, clips, captions)


def build_pipeline(path: str, *, scans: int | None = None, seed: int = 0, **sizes: Any) -> Path:
    """Write a tiny Wan pipeline with a random transformer and an autoencoder fitted to clips of some scans."""
    from diffusion.toy.pipelines.wan import BlockAutoencoder, build_tiny_wan

    autoencoder = BlockAutoencoder.fit(draw_clips(scans, seed=0)[0])
    return build_tiny_wan(path, autoencoder, corpus=CAPTIONS, seed=seed, **sizes)


def draw_clips(scans: int | None, seed: int) -> tuple[NDArray[np.uint8], list[str]]:
    """Clips uint8 (N, F, h, w, 3) of the first scans, None = all, in all directions, and their captions."""
    rng = np.random.default_rng(seed)
    halves = [digit_scans(half) for half in ("reward", "judge")]
    clips, captions = [], []
    known = [pair for half in halves for pair in zip(*half, strict=True)]
    for scan, digit in known[:scans]:
        ink = (scan.reshape(SIDE_PX, SIDE_PX) * 255).round().astype(np.uint8)
        for way, (axis, sign) in DIRECTIONS.items():
            middle = (FRAME_PX - SIDE_PX) // 2 + rng.integers(-JITTER, JITTER + 1, 2)
            clip = np.zeros((FRAMES, FRAME_PX, FRAME_PX), np.uint8)
            for number, frame in enumerate(clip):
                place = middle.copy()
                place[axis] += int(sign) * (number - FRAMES // 2)
                frame[place[0] : place[0] + SIDE_PX, place[1] : place[1] + SIDE_PX] = ink
            clips.append(clip)
            captions.append(f"a {digit} moving {way}")
    return np.repeat(np.stack(clips)[..., None], 3, 4), captions


def _shapes(half: str, prompts: Sequence[str], clips: Clips) -> list[float]:
    wanted = [_wanted(prompt) for prompt in prompts]
    if not len(clips):
        return []
    scans = np.stack([_centred(frame) for clip in _grey(clips) for frame in clip])
    table = _classifier(half).predict_proba(scans).reshape(len(clips), -1, 10).mean(1)
    return [float(row[want.digit]) for row, want in zip(table, wanted, strict=True)]


def _ways(step_of: Callable[..., NDArray[Any]], prompts: Sequence[str], clips: Clips) -> list[float]:
    wanted = [_wanted(prompt) for prompt in prompts]
    shares = []
    for want, clip in zip(wanted, _grey(clips), strict=True):
        steps = [step_of(before, after) for before, after in pairwise(clip)]
        shares.append(float(np.mean([_goes(step, want.step) for step in steps])))
    return shares


def _goes(step: NDArray[Any], wanted: tuple[int, int]) -> bool:
    """Whether a step (rows, columns) goes mainly where it should, and not aside."""
    along = float(np.dot(step, wanted))
    return along > LEAST_STEP and along > abs(float(np.dot(step, wanted[::-1])))


def _centre_step(before: NDArray[np.float32], after: NDArray[np.float32]) -> NDArray[Any]:
    return _centre(after) - _centre(before)


def _matched_step(before: NDArray[np.float32], after: NDArray[np.float32]) -> NDArray[Any]:
    """The whole shift (rows, columns) by which a frame is most like the next."""
    reach, side = LONGEST_STEP, len(before)
    wide = np.pad(before, reach)
    shifts = [(row, column) for row in range(-reach, reach + 1) for column in range(-reach, reach + 1)]
    moved = [wide[reach - row : reach - row + side, reach - column : reach - column + side] for row, column in shifts]
    errors = [float(np.abs(frame - after).sum()) for frame in moved]
    return np.asarray(shifts[int(np.argmin(errors))])


def _centre(frame: NDArray[np.float32]) -> NDArray[np.float64]:
    """Centre of brightness (row, column) in pixels; the middle of a black frame."""
    total = float(frame.sum())
    places = np.arange(len(frame))
    if total == 0:
        return np.full(2, (len(frame) - 1) / 2)
    return np.array([float(frame.sum(1 - axis) @ places) / total for axis in (0, 1)])


def _centred(frame: NDArray[np.float32]) -> NDArray[np.float32]:
    """The 8 x 8 pixels (64,) around a frame's centre of brightness, black where they lie outside."""
    top, left = (round(place - (SIDE_PX - 1) / 2) + SIDE_PX for place in _centre(frame).tolist())
    return np.pad(frame, SIDE_PX)[top : top + SIDE_PX, left : left + SIDE_PX].ravel()


@functools.cache
def _classifier(half: str) -> Any:
    """A classifier of the scans of a half, moved to their centre as those of a clip are."""
    scans, labels = digit_scans(half)
    return fit_classifier(half, np.stack([_centred(scan.reshape(SIDE_PX, SIDE_PX)) for scan in scans]), labels)


def _grey(clips: Clips) -> list[NDArray[np.float32]]:
    """Brightness 0..1 (F, h, w) of clips (F, h, w, 3)."""
    if any(clip.ndim != 4 for clip in clips):
        raise UserError("this reward scores videos, but the model generates images")
    return [clip.mean(3, dtype=np.float32) / 255 for clip in clips]


def _wanted(prompt: str) -> _Wanted:
    words = prompt.lower().split()
    digits = [int(word) for word in words if word.isdecimal() and len(word) == 1]
    ways = [DIRECTIONS[word] for word in words if word in DIRECTIONS]
    if len(digits) != 1 or len(ways) != 1:
        raise UserError(f"the prompt {prompt!r} must have one digit and one direction of {', '.join(DIRECTIONS)}")
    axis, sign = ways[0]
    return _Wanted(digits[0], (int(sign), 0) if axis == 0 else (0, int(sign)))
