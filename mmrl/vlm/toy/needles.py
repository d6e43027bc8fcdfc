"""Needles in haystacks: long clips of blank frames and digits, in which one digit follows a red flash.

The question asks for the digit after the flash. Only the flash says which of the digits that is, so frames have to be
picked by the frames before them: a frame alone shows a digit like any other. The needle is the flash and its digit.
The drawing is in `mmrl.vlm.toy.digit_clips`; training and test clips use disjoint scans.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mmrl.hub.video_reading import decode_frames, read_index
from mmrl.vlm.data.dataset import write_media_rows
from mmrl.vlm.toy import digits
from mmrl.vlm.toy.digit_clips import Shot, first_frames, write_clip
from mmrl.vlm.toy.digits import scan_pool, scans_and_labels

if TYPE_CHECKING:
    from numpy.typing import NDArray

CUE_FRAMES = 2
DIGIT_FRAMES = 6
GAP_FRAMES = 6
"""Minimum number of blank frames before a digit or a flash, so that no other digit is near the flash."""
LONGEST_EMPTY = 12
QUESTIONS = ("Which digit comes right after the red flash?", "What follows the red flash?")


def build_needles(
    path: str | Path,
    *,
    count: int = 100,
    split: str = "train",
    frames: int = 96,
    decoys: int = 5,
    noise: float = 0.1,
    fps: float = 1.0,
    seed: int = 0,
) -> Path:
    """Write questions about long clips as JSON lines next to their mp4 files.

    Args:
        path: JSONL file to write; columns problem (with <video>), query, answer, videos, needle (its frames, first and
            one behind the last), type and digits (what the clip shows, in order).
        count: number of questions.
        split: "train" or "test", which choose disjoint scans.
        frames: frames of a clip.
        decoys: other digits that the clip shows, each for as long as the right one.
        noise: strength of background texture and pixel noise, as a fraction of full contrast.
        fps: frames a second.
        seed: random seed.
    """
    path = Path(path)
    rng = np.random.default_rng([seed, 7 if split == "test" else 6])
    pool = scan_pool(split)
    _check_room(frames, decoys)

    def save(folder: Path, stem: str) -> dict[str, Any]:
        shots, needle = _draw_shots(rng, pool, frames, decoys)
        write_clip(folder / f"{stem}.mp4", shots, fps=fps, noise=noise, seed=int(rng.integers(2**31)))
        labels = scans_and_labels()[1]
        start = first_frames(shots)[needle]
        question = str(rng.choice(QUESTIONS))
        return {
            "problem": f"<video>{question}",
            "query": question,
            "answer": str(labels[shots[needle + 1].scan]),
            "videos": [f"{path.with_suffix('').name}/{stem}.mp4"],
            "needle": [[start, start + CUE_FRAMES + DIGIT_FRAMES]],
            "type": "specific",
            "digits": " ".join(str(labels[shot.scan]) for shot in shots if shot.scan is not None),
        }

    return write_media_rows(path, count, save)


def build_readings(
    path: str | Path,
    *,
    count: int = 2000,
    split: str = "train",
    picks: int = 8,
    frames: int = 56,
    decoys: int = 2,
    per_clip: int = 4,
    seed: int = 0,
) -> Path:
    """Write questions about a few frames of such clips, to teach a model to read an agent's picks.

    The frames are drawn from needle and haystack in every proportion, with at least one of the digit after the flash.

    Args:
        path: JSONL file to write; columns problem (with an <image> for each frame), answer, completion and images.
        count: number of questions.
        split: "train" or "test", which choose disjoint scans.
        picks: frames of a question.
        frames: frames of a clip.
        decoys: other digits that a clip shows.
        per_clip: questions about each clip. They share its digit, so many of them are memorised: with 20 a model
            reached a loss of 0.01 in training and 79% on other clips.
        seed: random seed.

    Returns:
        The file.

    Raises:
        ValueError: so many digits do not fit into so few frames.
    """
    path = Path(path)
    rng = np.random.default_rng([seed, 9 if split == "test" else 8])
    pool = scan_pool(split)
    _check_room(frames, decoys)
    clip: list[_NeedleClip] = []
    asked = itertools.count()

    def save(folder: Path, stem: str) -> dict[str, Any]:
        if next(asked) % per_clip == 0:
            clip[:] = [_draw_clip(rng, pool, frames, decoys, folder / "clip.mp4")]
        return _save_reading(rng, clip[0], picks, folder / stem, path.stem)

    return write_media_rows(path, count, save)


def build_model(path: str | Path, **options: Any) -> Path:
    """Build a tiny random model with the words of these questions; `options` are those of `build_tiny`."""
    from mmrl.vlm.toy.tiny_generic import build_tiny

    return build_tiny(path, corpus=[*QUESTIONS * 20, *digits.corpus()], **options)


def _check_room(frames: int, decoys: int) -> None:
    needed = CUE_FRAMES + (DIGIT_FRAMES + GAP_FRAMES) * (decoys + 1) + GAP_FRAMES
    if frames < needed or not 0 <= decoys <= 9:
        raise ValueError(
            f"a clip of {frames} frames has no room for {decoys} decoys; they need {needed} frames, and at most 9 "
            "other digits exist"
        )


def _draw_shots(rng: np.random.Generator, pool: np.ndarray, frames: int, decoys: int) -> tuple[list[Shot], int]:
    """Shots of a clip, and the place of the flash among them."""
    labels = scans_and_labels()[1][pool]
    shown = [int(rng.choice(pool[labels == digit])) for digit in rng.choice(10, size=decoys + 1, replace=False)]
    right = int(rng.integers(decoys + 1))
    used = CUE_FRAMES + (DIGIT_FRAMES + GAP_FRAMES) * len(shown) + GAP_FRAMES
    spare = rng.multinomial(frames - used, np.full(len(shown) + 1, 1 / (len(shown) + 1)))
    shots: list[Shot] = []
    for index, scan in enumerate(shown):
        shots += _empty(GAP_FRAMES + int(spare[index]))
        if index == right:
            flash = len(shots)
            shots.append(Shot(CUE_FRAMES, cue=True))
        shots.append(Shot(DIGIT_FRAMES, scan))
    return shots + _empty(GAP_FRAMES + int(spare[-1])), flash


def _empty(frames: int) -> list[Shot]:
    whole, rest = divmod(frames, LONGEST_EMPTY)
    return [Shot(LONGEST_EMPTY)] * whole + ([Shot(rest)] if rest else [])


@dataclass(frozen=True)
class _NeedleClip:
    """A clip with all its frames, as they are after encoding."""

    frames: list[NDArray[np.uint8]]
    flash: int
    answer: str


def _draw_clip(rng: np.random.Generator, pool: np.ndarray, frames: int, decoys: int, file: Path) -> _NeedleClip:
    shots, flash = _draw_shots(rng, pool, frames, decoys)
    index = read_index(write_clip(file, shots, fps=1.0, seed=int(rng.integers(2**31))))
    images = list(decode_frames(index, range(index.total)))
    file.unlink()
    return _NeedleClip(images, first_frames(shots)[flash], str(scans_and_labels()[1][shots[flash + 1].scan]))


def _save_reading(rng: np.random.Generator, clip: _NeedleClip, picks: int, file: Path, folder: str) -> dict[str, Any]:
    from PIL import Image

    names = []
    for index, number in enumerate(_draw_reading(rng, clip.flash, len(clip.frames), picks)):
        name = f"{file.name}-{index}.png"
        Image.fromarray(clip.frames[number]).save(file.with_name(name), compress_level=1)
        names.append(f"{folder}/{name}")
    return {
        "problem": "<image>" * picks + str(rng.choice(QUESTIONS)),
        "answer": clip.answer,
        "completion": clip.answer,
        "images": names,
    }


def _draw_reading(rng: np.random.Generator, start: int, frames: int, picks: int) -> Sequence[int]:
    """Frames in the order of time: the flash, some of its digit, and others."""
    after = np.arange(start + CUE_FRAMES, start + CUE_FRAMES + DIGIT_FRAMES)
    own = rng.choice(after, size=int(rng.integers(1, min(DIGIT_FRAMES, picks - 1) + 1)), replace=False)
    flash = start + int(rng.integers(CUE_FRAMES))
    rest = np.setdiff1d(np.arange(frames), np.append(own, flash))
    others = rng.choice(rest, size=picks - 1 - len(own), replace=False)
    return [int(number) for number in sorted([flash, *own, *others])]
