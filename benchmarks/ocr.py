"""How well the reward `ocr` reads text that is known to be present: words drawn in known fonts and sizes.

    python -m benchmarks.ocr [--images 500] [--side 256] [--case page] [--out FILE]

Every image has one to three words, dark on light or light on dark, in one of six fonts; the sizes take turns. Case
`page` puts the text anywhere in a square image, where the reader has to find it; `line` cuts the same text out and
reads it as one line; `tesseract`, if it is installed, reads the pages. For each size, `right` is the fraction of images
with the full reward and `reward` the mean of 1 - normalised edit distance. Times are CPU seconds an image on one
thread; a reader that fails ends the command.
"""

from __future__ import annotations

import shutil
import time
from importlib.resources import files
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from benchmarks.report import print_each
from diffusion.rewards.ocr import ocr

SIZES_PX = (6, 8, 12, 20, 36)
"""Sizes of the fonts; capital letters are about 0.7 times as high."""
FONTS = (
    "DejaVuSans.ttf", "DejaVuSans-Bold.ttf", "DejaVuSerif.ttf", "DejaVuSansMono.ttf", "STIXGeneral.ttf", "cmss10.ttf",
)  # fmt: skip
"""Fonts that matplotlib ships."""
WORDS = (
    "Open", "Sale", "Coffee", "Garden", "Hello", "World", "Station", "Museum", "Bakery", "North", "River", "Bridge",
    "Summer", "Winter", "Market", "Corner", "Ticket", "Music", "Library", "Welcome", "Danger", "Exit", "Today",
    "Fresh", "Bread", "Happy", "Birthday", "Street", "Number", "Seven", "Radio", "Ocean", "Mountain", "Light",
)  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "page": {},
    "line": {"whole_line": True},
    **({"tesseract": {"program": "tesseract"}} if shutil.which("tesseract") else {}),
}
"""Options of the reward."""
EDGE_PX = 4
"""Minimum distance of the text from the edge of its image."""


def main() -> None:
    """Print the agreement of each case."""
    torch.set_num_threads(1)
    print_each(compare, CASES, images=500, side=256)


def compare(case: str, images: int, side: int) -> dict[str, Any]:
    """Read rendered images and compare with what was drawn, by the size of the letters."""
    rng = np.random.default_rng(0)
    ocr([], [], **CASES[case])  # loads the weights
    scores: dict[str, list[tuple[float, float]]] = {f"{size} px": [] for size in SIZES_PX}
    for number in range(images):
        size = SIZES_PX[number % len(SIZES_PX)]
        text, image = draw(rng, size, side, case == "line")
        start = time.process_time()
        (score,) = ocr([f'"{text}"'], [image], **CASES[case])
        assert score is not None  # the prompt quotes a text
        scores[f"{size} px"].append((score, time.process_time() - start))
    scores["all"] = [row for rows in scores.values() for row in rows]
    return {name: _summary(np.array(rows)) for name, rows in scores.items()}


def draw(rng: np.random.Generator, size: int, side: int, line: bool) -> tuple[str, NDArray[np.uint8]]:
    """A text and its image, `side` pixels square or cut close; words that do not fit are dropped."""
    font = ImageFont.truetype(str(files("matplotlib") / "mpl-data" / "fonts" / "ttf" / rng.choice(FONTS)), size)
    words = [str(word) for word in rng.choice(WORDS, rng.integers(1, 4), replace=False)]
    while font.getlength(" ".join(words)) > side - 2 * EDGE_PX and len(words) > 1:
        words.pop()
    text = " ".join(words)
    left, top, right, bottom = map(round, font.getbbox(text))
    width, height = right - left, bottom - top
    free = np.maximum([side - width - 2 * EDGE_PX, side - height - 2 * EDGE_PX], 1)
    x, y = EDGE_PX + rng.integers(0, free)
    shades = rng.integers(0, 80, 3), rng.integers(176, 256, 3)
    paper, ink = (tuple(shade.tolist()) for shade in rng.permutation(shades))
    image = Image.new("RGB", (width + 2 * EDGE_PX, height + 2 * EDGE_PX) if line else (side, side), paper)
    place = (EDGE_PX, EDGE_PX) if line else (int(x), int(y))
    ImageDraw.Draw(image).text((place[0] - left, place[1] - top), text, fill=ink, font=font)
    return text, np.asarray(image)


def _summary(rows: NDArray[np.float64]) -> dict[str, float]:
    """Means of scores and CPU seconds (N, 2)."""
    score, seconds = rows.T
    return {
        "images": len(rows),
        "right": round(float((score == 1.0).mean()), 3),
        "reward": round(float(score.mean()), 3),
        "cpu_seconds": round(float(seconds.mean()), 4),
    }


if __name__ == "__main__":
    main()
