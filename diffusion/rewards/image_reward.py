"""ImageReward, a learned model of human preference that its own package loads."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from mmrl.errors import UserError

WEIGHTS_FILE, CONFIG_FILE = "ImageReward.pt", "med_config.json"


def image_reward(
    prompts: Sequence[str], completions: Sequence[NDArray[np.uint8]], *, path: str, device: str = "cpu", **_: Any
) -> list[float]:
    """Score how people would like an image for its prompt, standardised over the training images.

    Options: `path`, a folder with ImageReward.pt and med_config.json, and `device`. The package fetches the tokenizer
    bert-base-uncased unless it is in the Hugging Face cache.

    Source: ImageReward, arXiv 2304.05977; THUDM/ImageReward.
    """
    model = _load(path, device)
    pairs = zip(prompts, completions, strict=True)
    return [float(model.score(prompt, Image.fromarray(image))) for prompt, image in pairs]


@functools.lru_cache(maxsize=1)
def _load(path: str, device: str) -> Any:
    missing = [name for name in (WEIGHTS_FILE, CONFIG_FILE) if not (Path(path) / name).is_file()]
    if missing:
        raise UserError(f"weights not found at {path}, expected {WEIGHTS_FILE} and {CONFIG_FILE}; no {missing[0]}")
    try:
        import ImageReward
    except ModuleNotFoundError as error:
        raise UserError(
            "reward image_reward needs the package ImageReward; install it with pip install image-reward"
        ) from error
    folder = Path(path)
    return ImageReward.load(
        str(folder / WEIGHTS_FILE), device=device, med_config=str(folder / CONFIG_FILE), download_root=str(folder)
    )
