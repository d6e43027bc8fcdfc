"""Short words to draw: images for pre-training, prompts and a held-out judge.

A picture is one line of 32 x 16 pixels with a word of three letters, white on black. The reward is
`diffusion.rewards.ocr` with `whole_line`; the held-out judge compares pixels with drawings of the word, so that strokes
which only please the reader do not please it.
"""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from diffusion.rewards.ocr import quoted_text
from mmrl.errors import UserError
from mmrl.files import write_atomically

WIDTH_PX, HEIGHT_PX = 32, 16
LETTER_PX = 13
"""Size of the font."""
WORDS = (
    "bus", "cat", "cup", "dog", "egg", "fox", "hat", "jam", "key", "leg", "map", "net", "owl", "pen", "sun", "wig",
)  # fmt: skip
CAPTIONS = tuple(f'the word "{word}"' for word in WORDS)
FONTS = ("DejaVuSans.ttf", "DejaVuSans-Bold.ttf", "DejaVuSerif.ttf", "DejaVuSansMono-Bold.ttf")
"""Fonts that matplotlib ships."""
SHIFT_PX = 1
"""Maximum offset from the centre, in pixels, at which the judge still accepts a word."""


def word_match(prompts: Sequence[str], completions: Sequence[NDArray[np.uint8]], **_: Any) -> list[float]:
    """Give the correlation of an image with the most similar drawing of the quoted word, at least 0.

    The drawings are the word in each font of the pictures to pre-train on, also a pixel off the middle. It is for
    measuring and not for training. Images are (H, W, 3) uint8 of any size, white on black.
    """
    pairs = zip(prompts, completions, strict=True)
    return [max(float((_drawings(_word(prompt)) @ _standardised(image)).max()), 0.0) for prompt, image in pairs]


def draw_word(word: str, font: str, shift: tuple[int, int] = (0, 0)) -> NDArray[np.uint8]:
    """Draw a word in the middle of an image (16, 32, 3) uint8, or shifted by columns and rows."""
    letters = ImageFont.truetype(str(files("matplotlib") / "mpl-data" / "fonts" / "ttf" / font), LETTER_PX)
    left, top, right, bottom = letters.getbbox(word)
    place = ((WIDTH_PX - right + left) // 2 - left + shift[0], (HEIGHT_PX - bottom + top) // 2 - top + shift[1])
    picture = Image.new("L", (WIDTH_PX, HEIGHT_PX))
    ImageDraw.Draw(picture).text(place, word, fill=255, font=letters)
    return np.repeat(np.asarray(picture)[..., None], 3, 2)


def draw_words() -> NDArray[np.uint8]:
    """Draw every word in every font, the fonts of a word one after the other: uint8 (N, 16, 32, 3)."""
    return np.stack([draw_word(word, font) for word in WORDS for font in FONTS])


def build_prompts(path: str) -> Path:
    """Write one prompt for each word."""
    file = Path(path)
    write_atomically(file, "".join(json.dumps({"prompt": caption}) + "\n" for caption in CAPTIONS))
    return file


def build_images(path: str) -> Path:
    """Write every word in every font with its caption as one .npz file."""
    from diffusion.data.captioned_images import write_images

    return write_images(path, draw_words(), [caption for caption in CAPTIONS for _ in FONTS])


def build_pipeline(path: str, *, shift: float = 1.5, seed: int = 0, **sizes: Any) -> Path:
    """Write a tiny Stable Diffusion 3 pipeline with a random transformer, for images of words."""
    from diffusion.toy.pipelines.patches import PatchAutoencoder
    from diffusion.toy.pipelines.tiny import TinySd3Sizes, build_tiny_sd3

    patch, channels = 2, 4  # four channels hold a grey patch of four pixels without loss
    chosen: dict[str, Any] = {"t5_layers": 0, "clip_tokens": 8} | sizes
    return build_tiny_sd3(
        path,
        corpus=CAPTIONS,
        sizes=TinySd3Sizes(latent_size=WIDTH_PX // patch, latent_channels=channels, vae_widths=(4, 4), **chosen),
        shift=shift,
        seed=seed,
        autoencoder=PatchAutoencoder.fit(draw_words(), patch, channels),
    )


@functools.cache
def _drawings(word: str) -> NDArray[np.float32]:
    """All drawings of a word as rows of mean 0 and norm 1."""
    steps = range(-SHIFT_PX, SHIFT_PX + 1)
    places = itertools.product(FONTS, steps, steps)
    return np.stack([_standardised(draw_word(word, font, (x, y))) for font, x, y in places])


def _standardised(image: NDArray[np.uint8]) -> NDArray[np.float32]:
    grey = Image.fromarray(image).convert("L").resize((WIDTH_PX, HEIGHT_PX), Image.Resampling.BOX)
    pixels = np.asarray(grey, dtype=np.float32).ravel()
    pixels -= pixels.mean()
    return pixels / max(float(np.linalg.norm(pixels)), 1.0)


def _word(prompt: str) -> str:
    word = quoted_text(prompt)
    if word is None:
        raise UserError(f"the prompt {prompt!r} has no word in double quotes")
    return word
