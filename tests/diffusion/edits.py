"""Images to be edited, and the rows of data that name them."""

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from diffusion.data.prompts import ReferenceImage


def picture(height: int, width: int, seed: int = 0) -> Image.Image:
    """An image to be edited."""
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8))


def reference(image: Image.Image) -> ReferenceImage:
    """The image as a row of data has it."""
    content = io.BytesIO()
    image.save(content, "PNG")
    return ReferenceImage.of(content.getvalue(), Path(), 2**20)


def write_edits(path: Path, prompts: Any, size: tuple[int, int]) -> Path:
    """A .jsonl file of prompts, each with an image of its own beside it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = []
    for number, prompt in enumerate(prompts):
        picture(*size, seed=number).save(path.parent / f"{number}.png")
        rows.append(json.dumps({"prompt": prompt, "image": f"{number}.png"}))
    path.write_text("\n".join(rows))
    return path
