"""Checks whether an image shows the text quoted in its prompt, as read by PP-OCR or tesseract."""

from __future__ import annotations

import functools
import io
import re
import shutil
import subprocess
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from mmrl.errors import UserError

MIN_SIDE_PX = 256
"""Smaller images are enlarged before text lines are detected; OCR works best on letters about 30 pixels high."""
WEIGHTS = {"Det": "PP-OCRv6_det_small.onnx", "Rec": "PP-OCRv6_rec_small.onnx"}
"""Files of the package rapidocr that find lines and read them."""
ROW_PX = 48
"""Height at which PP-OCR reads a line."""

Reader = Callable[[NDArray[np.uint8]], str]


def ocr(
    prompts: Sequence[str],
    completions: Sequence[NDArray[np.uint8]],
    *,
    whole_line: bool = False,
    program: str | None = None,
    language: str = "eng",
    timeout_s: float = 20.0,
    **_: Any,
) -> list[float | None]:
    """Compare the text read from an image (H, W, 3) uint8 with the text quoted in the prompt, e.g. `a sign "OPEN"`.

    The reader is PP-OCRv6 (small) of the package rapidocr, which brings its weights. An image without text scores 0; a
    reader that fails raises, so that the row counts as failed.

    Options: `whole_line`, read the image as one line of text instead of looking for lines in it, for small images that
    show nothing else; `program`, name or path of tesseract, to read with it instead, `language`, its language data, and
    `timeout_s`, its seconds for one image.

    Source: yifan123/flow_grpo flow_grpo/ocr.py, which reads with PaddleOCR 2.9; a failure there scores 0.
    """
    read = _tesseract(program, language, whole_line, timeout_s) if program else _pp_ocr(whole_line)
    targets = [quoted_text(prompt) for prompt in prompts]
    return [
        None if target is None else text_score(read(image), target)
        for target, image in zip(targets, completions, strict=True)
    ]


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


def _pp_ocr(whole_line: bool) -> Reader:
    """A reader with PP-OCR on as many threads as torch has."""
    missing = [name for name in ("rapidocr", "onnxruntime") if find_spec(name) is None]
    if missing:
        raise UserError(
            f"reward ocr needs the package {missing[0]}; install it with pip install 'mmrl-suite[ocr]', or set the "
            "option program to read with tesseract"
        )
    import torch

    engine = _engine(whole_line, torch.get_num_threads())

    def read(image: NDArray[np.uint8]) -> str:
        pixels = image if whole_line else np.asarray(_enlarged(image))
        # the engine takes blue, green, red
        return "".join(engine(pixels[..., ::-1]).txts or ())

    return read


@functools.cache
def _engine(whole_line: bool, threads: int) -> Any:
    """PP-OCR with the limits of PaddleOCR 2.9: at most 960 pixels on a side, lines of a confidence of 0.5."""
    import rapidocr

    folder = Path(rapidocr.__file__).with_name("models")
    for name in WEIGHTS.values():
        # without a path the engine would download what it does not find
        if not (folder / name).is_file():
            raise UserError(
                f"reward ocr needs {name}, which the installed rapidocr does not have; install rapidocr 3.10"
            )
    runtime = "EngineConfig.onnxruntime"
    chosen = {
        "Global.log_level": "error",
        "Global.use_det": not whole_line,
        "Global.use_cls": False,
        "Global.use_preprocess_img": False,
        "Det.limit_type": "max",
        "Det.limit_side_len": 960,
        # images narrower than this are padded: lines as in PaddleOCR, whole images not at all
        "Rec.rec_img_shape": [3, ROW_PX, ROW_PX if whole_line else 320],
        f"{runtime}.intra_op_num_threads": threads,
        f"{runtime}.inter_op_num_threads": 1,
    }
    return rapidocr.RapidOCR(
        params=chosen | {f"{part}.model_path": str(folder / name) for part, name in WEIGHTS.items()}
    )


def _tesseract(program: str, language: str, whole_line: bool, timeout_s: float) -> Reader:
    """A reader with tesseract, whose page segmentation mode 6 is a block of text and 7 one line."""
    found = shutil.which(program)
    if found is None:
        raise UserError(
            f"reward ocr needs the program {program!r}, which is not on the search path; install it "
            "(apt install tesseract-ocr, brew install tesseract) or leave the option program out to read with PP-OCR"
        )
    command = [found, "stdin", "stdout", "-l", language, "--psm", "7" if whole_line else "6"]

    def read(image: NDArray[np.uint8]) -> str:
        buffer = io.BytesIO()
        _enlarged(image).save(buffer, format="PNG")
        try:
            done = subprocess.run(command, input=buffer.getvalue(), capture_output=True, timeout=timeout_s, check=False)
        except subprocess.TimeoutExpired as error:
            raise TimeoutError(f"{program} took longer than {timeout_s} s") from error
        if done.returncode != 0:
            message = done.stderr.decode(errors="replace").strip()[-300:]
            raise RuntimeError(f"{program} exited with code {done.returncode}: {message}")
        return done.stdout.decode(errors="replace")

    return read


def _enlarged(image: NDArray[np.uint8]) -> Image.Image:
    picture = Image.fromarray(image)
    factor = MIN_SIDE_PX / min(picture.size)
    if factor <= 1.0:
        return picture
    width, height = (round(side * factor) for side in picture.size)
    return picture.resize((width, height), Image.Resampling.BICUBIC)
