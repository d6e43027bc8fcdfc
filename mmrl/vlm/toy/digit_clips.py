"""Questions about short clips of handwritten digits: which one follows the red flash, or came first or last.

The answer needs the order of the frames: every digit of a clip is a different one, and where the flash comes is drawn.
Training and test clips use disjoint scans (`mmrl.vlm.toy.digits`), the drawing is in `mmrl.vlm.toy.digit_clips`.

Synthetic video clips of real handwritten digits, of any length, drawn frame by frame while they are encoded.

A clip is a list of shots. Each draws its own background, colours and motion from the seed of the clip and its place in
it, so a frame of a long clip does not depend on the shots before its own, and the same plan gives the same clip.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from mmrl.hub.video_writing import VideoSettings, write_mp4
from mmrl.vlm.data.dataset import write_media_rows
from mmrl.vlm.toy import digits
from mmrl.vlm.toy.digits import CELL_PX, scan_pool, scans_and_labels, texture

CUE_RGB = (0.9, 0.1, 0.1)
SMALLEST_PX = 40
"""Minimum side of a digit in pixels."""


@dataclass(frozen=True)
class Shot:
    """Consecutive frames of one thing."""

    frames: int
    """Number of frames."""
    scan: int | None = None
    """Index of a scan in `scans_and_labels` whose digit drifts across the image; None shows no digit."""
    cue: bool = False
    """Whether the image flashes red, the cue for the next shot."""


def clip_frames(shots: Sequence[Shot], *, noise: float = 0.1, seed: int = 0) -> Iterator[np.ndarray]:
    """Draw the frames of a clip, one at a time.

    Args:
        shots: what is shown, in order.
        noise: strength of background texture and pixel noise, as a fraction of full contrast.
        seed: of backgrounds, colours, motion and noise.

    Yields:
        (56, 56, 3) uint8.
    """
    for number, shot in enumerate(shots):
        yield from _draw_shot(shot, noise, np.random.default_rng([seed, number]))


def write_clip(path: Path, shots: Sequence[Shot], *, fps: float, noise: float = 0.1, seed: int = 0) -> Path:
    """Encode a clip as mp4 while it is drawn; memory does not depend on its length.

    Args:
        path: file to write.
        shots: what is shown, in order.
        fps: frames a second.
        noise: see `clip_frames`.
        seed: see `clip_frames`.
    """
    # a key frame every ten seconds lets readers of long clips jump
    settings = VideoSettings(gop=max(1, round(10 * fps)))
    return write_mp4(path, clip_frames(shots, noise=noise, seed=seed), fps, settings)


def first_frames(shots: Sequence[Shot]) -> list[int]:
    """Index of the first frame of each shot."""
    return [sum(shot.frames for shot in shots[:index]) for index in range(len(shots))]


def _draw_shot(shot: Shot, noise: float, rng: np.random.Generator) -> Iterator[np.ndarray]:
    ground = texture(rng, CELL_PX, CELL_PX) * noise
    light, dark = rng.uniform(0.75, 1.0, 3), rng.uniform(0.0, 0.25, 3)
    if shot.cue:
        light, dark = np.array([0.2, 0.0, 0.0]), np.array(CUE_RGB)
    glyph = None if shot.scan is None else _glyph(shot.scan, int(rng.integers(SMALLEST_PX, CELL_PX - 3)))
    room = CELL_PX - (0 if glyph is None else len(glyph))
    first, last = rng.uniform(0, room, (2, 2))
    path = np.linspace(first, last, num=shot.frames)
    for top, left in path.round().astype(int):
        ink = ground + rng.normal(0.0, 0.2 * noise, ground.shape)
        if glyph is not None:
            ink[top : top + len(glyph), left : left + len(glyph)] += glyph
        pixels = dark + np.clip(ink, 0.0, 1.0)[..., None] * (light - dark)
        yield (pixels * 255).astype(np.uint8)


def _glyph(scan: int, side: int) -> np.ndarray:
    image = Image.fromarray((scans_and_labels()[0][scan] * 255).astype(np.uint8))
    return np.asarray(image.resize((side, side), Image.Resampling.BICUBIC)) / 255.0


FPS = 2.0
"""Frame rate of the clips, which is also qwen-vl-utils' rate, so every frame is seen."""
SHOT_FRAMES = 2
"""Frames per shot: as many as a Qwen-VL model reads as one."""


@dataclass(frozen=True)
class ClipQuestion:
    """One kind of question about the digits of a clip."""

    texts: tuple[str, ...]
    """Wordings, one drawn at random."""
    answer: Callable[[Sequence[int], int], int]
    """Correct answer, from the digits in order and the number of digits before the flash."""


def build_questions(
    path: str | Path,
    *,
    count: int = 1000,
    split: str = "train",
    kinds: Sequence[str] = ("after_cue", "first", "last"),
    min_digits: int = 2,
    max_digits: int = 4,
    noise: float = 0.1,
    scans: int = 0,
    seed: int = 0,
) -> Path:
    """Write questions about clips as JSON lines next to their mp4 files.

    Args:
        path: JSONL file to write; columns problem (with <video>), answer, videos, completion, kind, digits (what the
            clip shows, in order) and answer_s (when the asked digit appears, in seconds).
        count: number of questions.
        split: "train" or "test", which choose disjoint scans.
        kinds: keys of `QUESTIONS`, drawn evenly.
        min_digits: fewest digits of a clip.
        max_digits: most digits of a clip, at most 10.
        noise: strength of background texture and pixel noise, as a fraction of full contrast.
        scans: use only the first so many scans of the split; 0 = all.
        seed: random seed.

    Returns:
        The file.

    Raises:
        ValueError: the numbers of digits do not fit.
    """
    if not 1 <= min_digits <= max_digits <= 10:
        raise ValueError(
            f"min_digits is {min_digits} and max_digits is {max_digits}; expected 1 <= min_digits <= max_digits <= 10"
        )
    path = Path(path)
    rng = np.random.default_rng([seed, 5 if split == "test" else 4])
    pool = scan_pool(split, scans)

    def save(folder: Path, stem: str) -> dict[str, Any]:
        shown = _draw_scans(rng, pool, int(rng.integers(min_digits, max_digits + 1)))
        before = int(rng.integers(0, len(shown)))
        shots = [Shot(SHOT_FRAMES, scan) for scan in shown]
        shots.insert(before, Shot(SHOT_FRAMES, cue=True))
        write_clip(folder / f"{stem}.mp4", shots, fps=FPS, noise=noise, seed=int(rng.integers(2**31)))
        kind = str(rng.choice(list(kinds)))
        row = _ask(rng, kind, shown, before, shots)
        return {**row, "videos": [f"{path.with_suffix('').name}/{stem}.mp4"]}

    return write_media_rows(path, count, save)


def corpus() -> list[str]:
    """All words used by the questions, answers and roles, to train a tokenizer on."""
    return [*[text for question in QUESTIONS.values() for text in question.texts] * 20, *digits.corpus()]


def build_model(path: str | Path, **options: Any) -> Path:
    """Build a tiny random model with the words of these questions; `options` are those of `build_tiny`."""
    from mmrl.vlm.toy.tiny_generic import build_tiny

    return build_tiny(path, corpus=corpus(), **options)


def _draw_scans(rng: np.random.Generator, pool: np.ndarray, count: int) -> list[int]:
    """Scans of different digits."""
    labels = scans_and_labels()[1][pool]
    shown = rng.choice(np.unique(labels), size=count, replace=False)
    return [int(rng.choice(pool[labels == digit])) for digit in shown]


def _ask(
    rng: np.random.Generator, kind: str, shown: Sequence[int], before: int, shots: Sequence[Shot]
) -> dict[str, Any]:
    seen = [int(scans_and_labels()[1][scan]) for scan in shown]
    answer = QUESTIONS[kind].answer(seen, before)
    asked = next(index for index, shot in enumerate(shots) if shot.scan == shown[seen.index(answer)])
    said = " ".join(str(digit) for digit in seen)
    return {
        "problem": f"<video>{rng.choice(QUESTIONS[kind].texts)}",
        "answer": str(answer),
        "completion": f"<think>{said}</think><answer>{answer}</answer>",
        "kind": kind,
        "digits": said,
        "answer_s": first_frames(shots)[asked] / FPS,
    }


QUESTIONS: dict[str, ClipQuestion] = {
    "after_cue": ClipQuestion(
        ("Which digit comes right after the red flash?", "What follows the red flash?"),
        lambda digits, before: digits[before],
    ),
    "first": ClipQuestion(
        ("Which digit is shown first?", "What is the first digit?"), lambda digits, before: digits[0]
    ),
    "last": ClipQuestion(("Which digit is shown last?", "What is the last digit?"), lambda digits, before: digits[-1]),
}
