"""The table of image rewards, and how they are loaded as functions."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mmrl.errors import UserError, did_you_mean
from mmrl.recipes import world_table
from mmrl.rewards import RewardConfig, RewardSum


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
        from diffusion.rewards.video_rewards import over_frames

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
            raise UserError(f"unknown image reward {name!r}{_hint(name, list(IMAGE_REWARDS))}")
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
    return f"; {did_you_mean(wanted, known)}known: {', '.join(known) or 'none'}"


COLUMNS = ("metadata", "reference", "box")
"""Arguments of rewards that are data columns, not options."""

_TABLE = (
    ImageReward(
        "jpeg_incompressibility", "diffusion.rewards.jpeg:jpeg_incompressibility",
        "size in kB of the image as a JPEG file", "DDPO, arXiv 2305.13301", (0.0, None),
    ),
    ImageReward(
        "jpeg_compressibility", "diffusion.rewards.jpeg:jpeg_compressibility",
        "negative size in kB of the image as a JPEG file", "DDPO, arXiv 2305.13301", (None, 0.0),
    ),
    ImageReward(
        "kept", "diffusion.rewards.editing:kept",
        "similarity of an edited image to its reference, outside the box in column box if there is one", "this suite",
        (0.0, 1.0),
    ),
    ImageReward(
        "smoothness", "diffusion.rewards.video_rewards:smoothness", "similarity of neighbouring frames of a video",
        "this suite", (0.0, 1.0), video=True,
    ),
    ImageReward(
        "motion", "diffusion.rewards.video_rewards:motion",
        "movement of the bright parts of a video in the prompt's direction", "this suite", (-1.0, 1.0),
        video=True,
    ),
    ImageReward(
        "ocr", "diffusion.rewards.ocr:ocr",
        "1 if the quoted text can be read in the image, lower by edit distance otherwise",
        "Flow-GRPO, arXiv 2505.05470", (0.0, 1.0), needs="the extra ocr or the program tesseract",
    ),
    ImageReward(
        "pickscore", "diffusion.rewards.learned:pickscore", "human preference for the image given the prompt",
        "Pick-a-Pic, arXiv 2305.01569", (None, None), offline=False,
        needs="the option path: folder of PickScore_v1 with its processor",
    ),
    ImageReward(
        "clip_score", "diffusion.rewards.learned:clip_score", "how well the image matches the prompt",
        "CLIPScore, arXiv 2104.08718", (None, None), offline=False, needs="the option path: folder of CLIP ViT-L/14",
    ),
    ImageReward(
        "image_similarity", "diffusion.rewards.learned:image_similarity",
        "similarity of an edited image to its reference, by CLIP", "yifan123/flow_grpo, on CLIP, arXiv 2103.00020",
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
        "aesthetic", "diffusion.rewards.learned:aesthetic", "aesthetic quality of the image, regardless of its content",
        "christophschuhmann/improved-aesthetic-predictor; DDPO, arXiv 2305.13301", (None, None), offline=False,
        needs="the option path: folder of CLIP ViT-L/14 with the head",
    ),
    ImageReward(
        "unified_reward", "diffusion.rewards.remote:unified_reward",
        "score from a vision-language model on a server", "UnifiedReward, arXiv 2503.05236", (0.0, 1.0),
        offline=False, needs="the option url: an OpenAI-compatible server",
    ),
)  # fmt: skip

IMAGE_REWARDS: dict[str, ImageReward] = {
    **{name: ImageReward(name, **row) for name, row in world_table("IMAGE_REWARDS").items()},
    **{reward.name: reward for reward in _TABLE},
}
