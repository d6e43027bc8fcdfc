"""Check whether an image shows the text quoted in its prompt, read with tesseract."""

from __future__ import annotations

import io
import re
import shutil
import subprocess
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from mmrl.errors import UserError

MIN_SIDE_PX = 256
"""Smaller images are enlarged before they are read; tesseract works best on letters about 30 pixels high."""


def ocr(
    prompts: Sequence[str],
    completions: Sequence[NDArray[np.uint8]],
    *,
    program: str = "tesseract",
    language: str = "eng",
    layout: int = 6,
    timeout_s: float = 20.0,
    **_: Any,
) -> list[float | None]:
    """Compare the text read from an image (H, W, 3) uint8 with the text quoted in the prompt, e.g. `a sign "OPEN"`.

    Options: `program`, tesseract's name or path; `language`, its language data; `layout`, its page segmentation mode
    (6: one block of text, 7: one line); `timeout_s`, seconds for one image.

    Source: yifan123/flow_grpo flow_grpo/ocr.py, with another reader; a failure there scores 0.
    """
    found = shutil.which(program)
    if found is None:
        raise UserError(
            f"reward ocr needs the program {program!r}, which is not on the search path; install it "
            "(apt install tesseract-ocr, brew install tesseract) or set the option program"
        )
    command = [found, "stdin", "stdout", "-l", language, "--psm", str(layout)]
    rewards: list[float | None] = []
    for prompt, image in zip(prompts, completions, strict=True):
        target = quoted_text(prompt)
        rewards.append(None if target is None else text_score(_read(image, command, timeout_s), target))
    return rewards


def text_score(text: str, target: str) -> float:
    """Score a text: 1 if it contains the target, otherwise 1 - edit distance / target length, at least 0."""
    text, target = _bare(text), _bare(target)
    if target in text:
        return 1.0
    return 1.0 - min(edit_distance(text, target), len(target)) / len(target)


def quoted_text(prompt: str) -> str | None:
    """Return the first text in double quotes, or None if it is missing or blank."""
    match = re.search(r'["“]([^"“”]+)["”]', prompt)
    return match[1] if match and match[1].strip() else None


def edit_distance(one: str, other: str) -> int:
    """Count the insertions, deletions and substitutions that turn one text into the other."""
    previous = list(range(len(other) + 1))
    for row, character in enumerate(one, start=1):
        current = [row]
        for column, against in enumerate(other, start=1):
            substituted = previous[column - 1] + (character != against)
            current.append(min(previous[column] + 1, current[-1] + 1, substituted))
        previous = current
    return previous[-1]


def _bare(text: str) -> str:
    return "".join(text.lower().split())


def _read(image: NDArray[np.uint8], command: Sequence[str], timeout_s: float) -> str:
    enlarged = Image.fromarray(image)
    factor = MIN_SIDE_PX / min(enlarged.size)
    if factor > 1.0:
        width, height = (round(side * factor) for side in enlarged.size)
        enlarged = enlarged.resize((width, height), Image.Resampling.BICUBIC)
    buffer = io.BytesIO()
    enlarged.save(buffer, format="PNG")
    try:
        done = subprocess.run(command, input=buffer.getvalue(), capture_output=True, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired as error:
        raise TimeoutError(f"{command[0]} took longer than {timeout_s} s") from error
    if done.returncode != 0:
        message = done.stderr.decode(errors="replace").strip()[-300:]
        raise RuntimeError(f"{command[0]} ended with {done.returncode}: {message}")
    return done.stdout.decode(errors="replace")
