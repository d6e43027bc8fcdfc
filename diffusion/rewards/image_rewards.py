"""Image and video rewards by name, and how a run gets them as functions."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from mmrl.errors import UserError, did_you_mean
from mmrl.recipes import world_table
from mmrl.rewards import RewardConfig, RewardSum


def over_frames(function: Callable[..., list[float]]) -> Callable[..., list[float]]:
    """Extend an image reward to videos (K, h, w, 3) by averaging over their frames."""

    @functools.wraps(function)
    def scored(prompts: Sequence[str], completions: Sequence[NDArray[np.uint8]], **columns: Any) -> list[float]:
        if not len(completions) or completions[0].ndim == 3:
            return function(prompts=prompts, completions=completions, **columns)
        frames = [frame for video in completions for frame in video]
        count = len(completions[0])

        def each(values: Any) -> Any:
            of_rows = isinstance(values, list) and len(values) == len(completions)
            return [value for value in values for _ in range(count)] if of_rows else values

        repeated = {name: each(values) for name, values in columns.items()}
        values = function(prompts=each(list(prompts)), completions=frames, **repeated)
        means: list[float] = np.asarray(values, dtype=np.float64).reshape(-1, count).mean(1).tolist()
        return means

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
        raise UserError("this reward scores videos, but the model draws images")
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


PIXEL_LEVELS = 255.0


def kept(
    prompts: Sequence[str],
    completions: Sequence[NDArray[np.uint8]],
    *,
    reference: Sequence[NDArray[np.uint8]],
    box: Sequence[Sequence[float] | None] | None = None,
    **_: Any,
) -> list[float]:
    """Reward leaving the image unchanged: 1 - mean distance of the pixels (h, w, 3) uint8 to the reference's, 0..1.

    The column `box` can give the region to be edited, (left, top, right, bottom) as fractions of width and height; its
    pixels are ignored.
    """
    boxes = box or [None] * len(completions)
    return [_likeness(*row) for row in zip(completions, reference, boxes, strict=True)]


def _likeness(image: NDArray[np.uint8], reference: NDArray[np.uint8], box: Sequence[float] | None) -> float:
    distance = np.abs(image.astype(np.float64) - reference).mean(2) / PIXEL_LEVELS
    counted = np.ones(distance.shape, bool)
    if box is not None:
        left, top, right, bottom = _checked(box)
        height, width = distance.shape
        counted[round(top * height) : round(bottom * height), round(left * width) : round(right * width)] = False
    if not counted.any():
        raise ValueError(f"the box {list(box or ())} covers the whole image; nothing is left to compare")
    return float(1 - distance[counted].mean())


def _checked(box: Any) -> Sequence[float]:
    fits = len(box) == 4 and 0 <= box[0] < box[2] <= 1 and 0 <= box[1] < box[3] <= 1
    if not fits:
        raise ValueError(f"the box {list(box)} must be left, top, right and bottom as shares of width and height")
    return box  # type: ignore[no-any-return]


QUALITY = 95


def jpeg_incompressibility(prompts: Sequence[str], completions: Sequence[NDArray[np.uint8]], **_: Any) -> list[float]:
    """Reward images (H, W, 3) uint8 whose JPEG file is large.

    Source: DDPO, arXiv 2305.13301; kvablack/ddpo-pytorch ddpo_pytorch/rewards.py.
    """
    return [jpeg_kilobytes(image) for image in completions]


def jpeg_compressibility(
    prompts: Sequence[str], completions: Sequence[NDArray[np.uint8]], *, scale: str = "ddpo", **_: Any
) -> list[float]:
    """Reward images whose JPEG file is small; option `scale`: "ddpo" for -kB, "flow_grpo" for -kB / 500.

    Source: as `jpeg_incompressibility`; the second scale is that of yifan123/flow_grpo flow_grpo/rewards.py.
    """
    if scale not in SCALES:
        raise UserError(f"jpeg_compressibility: scale is {scale!r}; use one of {', '.join(SCALES)}")
    return [-jpeg_kilobytes(image) / SCALES[scale] for image in completions]


def jpeg_kilobytes(image: NDArray[np.uint8]) -> float:
    """Size in kB of an RGB image (H, W, 3) uint8 as a JPEG file of quality 95."""
    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, format="JPEG", quality=QUALITY)
    return buffer.tell() / 1000.0


SCALES = {"ddpo": 1.0, "flow_grpo": 500.0}


@dataclass(frozen=True)
class ImageReward:
    """One row of the table of image rewards."""

    name: str
    """Name in configs and metrics."""
    function: str
    """`module:function`, imported on first use."""
    summary: str
    """One-line description of the measured property."""
    citation: str
    """Source of the rule."""
    range: tuple[float | None, float | None]
    """Minimum and maximum value; None if unbounded."""
    offline: bool = True
    """Whether it works without user-provided weights or a server."""
    video: bool = False
    """Whether it scores videos; other rewards are averaged over the frames of a video."""
    needs: str = "nothing"
    """Requirements beyond the installed package."""

    def load(self) -> Callable[..., Any]:
        """Import the function."""
        module, _, name = self.function.partition(":")
        function: Callable[..., Any] = getattr(importlib.import_module(module), name)
        if self.video:
            return function

        return over_frames(function)


def load_image_rewards(
    names: Sequence[str], options: Mapping[str, Mapping[str, Any]] | None = None
) -> dict[str, Callable[..., Any]]:
    """Load image rewards as functions for `mmrl.rewards.RewardSum`.

    Rewards whose required options are all given are called once without rows, so that missing weights, programs and
    packages are reported before the run.

    Args:
        names: keys of `IMAGE_REWARDS`.
        options: keyword arguments by reward, fixed in the function; those of a `RewardConfig` override them.

    Returns:
        f(prompts, completions, **columns) -> list of numbers, by name.

    Raises:
        UserError: a reward or an option does not exist, or what a reward needs is missing.
    """
    options = options or {}
    for name in (*names, *options):
        if name not in IMAGE_REWARDS:
            raise UserError(f"there is no image reward {name!r}{_hint(name, list(IMAGE_REWARDS))}")
    return {name: _bound(IMAGE_REWARDS[name], options.get(name, {})) for name in names}


def load_rewards(rewards: Sequence[RewardConfig], heldout_rewards: Sequence[RewardConfig]) -> RewardSum:
    """Load all terms as one sum in which the held-out rewards have no weight."""
    terms = [*rewards, *(dataclasses.replace(reward, weight=0.0) for reward in heldout_rewards)]
    functions: dict[str, Any] = {}
    for term in terms:
        name = term.function or term.name
        if ":" not in name:
            load_image_rewards([name], {name: term.options})  # wrong options and missing weights show before the run
            # without the options: the sum passes them with every call
            functions |= load_image_rewards([name])
    return RewardSum(terms, functions=functions)


def _bound(reward: ImageReward, options: Mapping[str, Any]) -> Callable[..., Any]:
    function = reward.load()
    parameters = [*inspect.signature(function).parameters.values()]
    allowed = {
        parameter.name: parameter
        for parameter in parameters
        # options are keyword-only; positional arguments are prompts and images
        if parameter.kind is parameter.KEYWORD_ONLY and parameter.name not in COLUMNS
    }
    for key in options:
        if key not in allowed:
            raise UserError(f"image reward {reward.name!r} has no option {key!r}{_hint(key, list(allowed))}")
    bound = functools.partial(function, **options) if options else function
    missing = [name for name, parameter in allowed.items() if parameter.default is parameter.empty]
    if all(name in options for name in missing):
        columns = (name for name in COLUMNS if any(name == parameter.name for parameter in parameters))
        # with no rows it loads weights and programs but scores nothing
        bound(prompts=[], completions=[], **{name: [] for name in columns})
    return bound


def _hint(wanted: str, known: Sequence[str]) -> str:
    return f"; {did_you_mean(wanted, known)}known are: {', '.join(known) or 'none'}"


COLUMNS = ("metadata", "reference", "box")
"""Arguments of rewards that are columns of the data and no options."""

_TABLE = (
    ImageReward(
        "jpeg_incompressibility", "diffusion.rewards.image_rewards:jpeg_incompressibility",
        "size in kB of the image as a JPEG file", "DDPO, arXiv 2305.13301", (0.0, None),
    ),
    ImageReward(
        "jpeg_compressibility", "diffusion.rewards.image_rewards:jpeg_compressibility",
        "minus the size in kB of the image as a JPEG file", "DDPO, arXiv 2305.13301", (None, 0.0),
    ),
    ImageReward(
        "kept", "diffusion.rewards.image_rewards:kept",
        "likeness of an edited image with its reference, outside of the column box where there is one", "this suite",
        (0.0, 1.0),
    ),
    ImageReward(
        "smoothness", "diffusion.rewards.image_rewards:smoothness", "likeness of neighbouring frames of a video",
        "this suite", (0.0, 1.0), video=True,
    ),
    ImageReward(
        "motion", "diffusion.rewards.image_rewards:motion",
        "way of the bright parts of a video in the direction that the prompt names", "this suite", (-1.0, 1.0),
        video=True,
    ),
    ImageReward(
        "ocr", "diffusion.rewards.ocr:ocr",
        "1 for an image in which the quoted text can be read, less by edit distance",
        "Flow-GRPO, arXiv 2505.05470", (0.0, 1.0), needs="the program tesseract",
    ),
    ImageReward(
        "pickscore", "diffusion.rewards.learned:pickscore", "human preference for the image given the prompt",
        "Pick-a-Pic, arXiv 2305.01569", (None, None), offline=False,
        needs="the option path: folder of PickScore_v1 with its processor",
    ),
    ImageReward(
        "clip_score", "diffusion.rewards.learned:clip_score", "fit of image and prompt", "CLIPScore, arXiv 2104.08718",
        (None, None), offline=False, needs="the option path: folder of CLIP ViT-L/14",
    ),
    ImageReward(
        "image_similarity", "diffusion.rewards.learned:image_similarity",
        "likeness of an edited image with its reference, by CLIP", "yifan123/flow_grpo, on CLIP, arXiv 2103.00020",
        (-1.0, 1.0), offline=False, needs="the option path: folder of CLIP ViT-L/14",
    ),
    ImageReward(
        "hpsv2", "diffusion.rewards.learned:hpsv2", "human preference for the image given the prompt",
        "HPS v2, arXiv 2306.09341", (-1.0, 1.0), offline=False,
        needs="the option path: folder of HPS v2.1, and open_clip for the released file",
    ),
    ImageReward(
        "image_reward", "diffusion.rewards.learned:image_reward",
        "human preference for the image given the prompt", "ImageReward, arXiv 2304.05977", (None, None), offline=False,
        needs="the option path: folder of ImageReward, and the package ImageReward",
    ),
    ImageReward(
        "aesthetic", "diffusion.rewards.learned:aesthetic", "beauty of the image, regardless of its content",
        "christophschuhmann/improved-aesthetic-predictor; DDPO, arXiv 2305.13301", (None, None), offline=False,
        needs="the option path: folder of CLIP ViT-L/14 with the head",
    ),
    ImageReward(
        "unified_reward", "diffusion.rewards.remote:unified_reward",
        "score that a vision-language model at a server gives", "UnifiedReward, arXiv 2503.05236", (0.0, 1.0),
        offline=False, needs="the option url: an OpenAI-compatible server",
    ),
)  # fmt: skip

IMAGE_REWARDS: dict[str, ImageReward] = {
    **{name: ImageReward(name, **row) for name, row in world_table("IMAGE_REWARDS").items()},
    **{reward.name: reward for reward in _TABLE},
}
