"""Needle-in-a-haystack videos from any videos: clips of one video are spliced into clips of others.

    build_spliced("needles.jsonl", questions="questions.jsonl", haystack="videos/")

The needle is the video of a question: 1 to 4 clips of 50 of its frames, drawn in the order of time, among 12 clips of
as many frames of other videos, resized to its size. Everything is decoded and encoded frame by frame.

Source: arXiv 2508.04369, section 4; Hui-design/TSPO src/open_tspo/trainer/utils.py (`load_video`, `repeat_videos`,
`shuffle_clips`). The public code splices again whenever a row is drawn; here a file is written once, so that its
features are computed once.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mmrl.errors import UserError
from mmrl.files import expanded, is_file
from mmrl.hub.tables import DataRow, good_rows
from mmrl.hub.video_reading import VideoError, VideoIndex, decode_frames, read_index
from mmrl.hub.video_writing import write_mp4
from mmrl.vlm.data.dataset import ANSWER_KEYS, CHAT_KEYS, PROMPT_KEYS, VERL_ANSWER, VIDEO_KEYS, write_media_rows
from mmrl.vlm.data.task import TaskError, read_video_cell

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Frame = NDArray[np.uint8]

VIDEO_SUFFIXES = (".mp4", ".mkv", ".webm", ".mov", ".avi", ".m4v")
FEWEST, MOST = 50, 128
"""Videos with fewer or more frames at one frame per second are sampled to this many (MOST), evenly spaced."""
KEPT_COLUMNS = (
    *(*PROMPT_KEYS, *CHAT_KEYS, *ANSWER_KEYS, VERL_ANSWER[0]),
    *("query", "original_question", "original_answer"),
)


def build_spliced(
    path: str | Path,
    *,
    questions: str,
    haystack: str,
    count: int = 0,
    clip_frames: int = 50,
    clips: int = 12,
    repeats: Sequence[int] = (1, 4),
    seed: int = 0,
) -> Path:
    """Write spliced videos at one frame per second and the questions about them.

    Args:
        path: JSONL file to write; columns of the questions, videos, needle and type.
        questions: data set of questions with a video each.
        haystack: folder of other videos.
        count: number of questions; 0 = those of the data set.
        clip_frames: frames of a clip.
        clips: clips of the haystack in a video.
        repeats: fewest and most clips of the needle.
        seed: random seed.

    Raises:
        UserError: rows or videos cannot be used.
    """
    rows = list(good_rows(questions))
    if not rows:
        raise UserError(f"{questions} has no rows")
    others = sorted(file for file in expanded(haystack).rglob("*") if file.suffix.lower() in VIDEO_SUFFIXES)
    if clip_frames < 1 or clips < 0 or not 1 <= repeats[0] <= repeats[1]:
        raise UserError(f"clip_frames={clip_frames}, clips={clips}, repeats={list(repeats)}: all must be positive")
    # a second number keeps this stream apart from others with the same seed
    rng = np.random.default_rng([seed, 10])
    source, made = expanded(questions), itertools.count()
    folder = source.parent if is_file(source) else source

    def save(place: Path, stem: str) -> dict[str, Any]:
        row = rows[next(made) % len(rows)]
        own = _own_video(row, folder)
        # the needle's own video is no haystack
        pool = [file for file in others if file.resolve() != own.resolve()]
        if clips and not pool:
            raise UserError(
                f"{haystack} has no video other than {own}; it needs files with {', '.join(VIDEO_SUFFIXES)}"
            )
        try:
            plan = _plan(rng, own, pool, clip_frames, clips, int(rng.integers(repeats[0], repeats[1] + 1)))
            write_mp4(place / f"{stem}.mp4", _frames(plan), 1.0)
        except VideoError as error:
            raise UserError(f"a video cannot be spliced around {own}: {error}") from error
        stops = list(itertools.accumulate(len(clip.numbers) for clip in plan))
        spans = [[stop - len(clip.numbers), stop] for clip, stop in zip(plan, stops, strict=True) if clip.needle]
        kept = {name: row.cells[name] for name in KEPT_COLUMNS if name in row.cells}
        return {
            **kept,
            "videos": [f"{Path(path).with_suffix('').name}/{stem}.mp4"],
            "needle": spans,
            "type": "specific",
        }

    return write_media_rows(Path(path), count or len(rows), save)


@dataclass(frozen=True)
class _Clip:
    index: VideoIndex
    numbers: list[int]
    needle: bool


def sampled_numbers(total: int, fps: float) -> list[int]:
    """Frames of a video at one per second; `MOST` evenly spaced ones if that gives fewer than 50 or more than 128.

    Source: Hui-design/TSPO src/open_tspo/trainer/utils.py `load_video`.
    """
    numbers = list(range(0, total, max(round(fps), 1)))
    if FEWEST <= len(numbers) <= MOST:
        return numbers
    return [int(number) for number in np.linspace(0, total - 1, MOST, dtype=int)]


def _numbers_by_time(index: VideoIndex) -> list[int]:
    """As `sampled_numbers`, for a variable rate: the frames that are shown at each second from the first on."""
    start_s, end_s = index.times_s[0], index.times_s[-1]
    numbers = [index.frame_at(start_s + second) for second in range(int(end_s - start_s) + 1)]
    return numbers if FEWEST <= len(numbers) <= MOST else _spread(index, MOST)


def _spread(index: VideoIndex, count: int) -> list[int]:
    """Evenly spaced frames, by time in a video of variable rate."""
    if index.constant:
        return [int(number) for number in np.linspace(0, index.total - 1, count, dtype=int)]
    return [index.frame_at(time_s) for time_s in np.linspace(index.times_s[0], index.times_s[-1], count)]


def _own_video(row: DataRow, folder: Path) -> Path:
    """The file of a question's only video."""
    cell = next((row.cells[key] for key in VIDEO_KEYS if row.cells.get(key)), None)
    try:
        videos = read_video_cell(cell, folder, row.place)
    except TaskError as error:
        raise UserError(str(error)) from None
    if len(videos) != 1 or not isinstance(videos[0].source, str) or videos[0].options:
        raise UserError(
            f"{row.place}: needs one video file without options in the column videos or video, found {cell!r:.100}; "
            f"its columns are: {', '.join(row.cells)}"
        )
    return Path(videos[0].source)


def _plan(
    rng: np.random.Generator, own: Path, pool: Sequence[Path], frames: int, clips: int, repeats: int
) -> list[_Clip]:
    """Clips in a random order of needle and haystack; each kind keeps its own order."""
    index = _index(own)
    numbers = sampled_numbers(index.total, index.fps) if index.constant else _numbers_by_time(index)
    # a short video gives shorter clips, and all clips have one length
    length = min(frames, len(numbers))
    needle = [
        _Clip(index, [numbers[i] for i in np.sort(rng.choice(len(numbers), length, replace=False))], True)
        for _ in range(repeats)
    ]
    hay: list[_Clip] = []
    for file in rng.choice(len(pool), clips) if clips else ():
        other = _index(pool[int(file)])
        hay.append(_Clip(other, _spread(other, length), False))
    # kinds are shuffled and each kind keeps its order, so that the needle's clips stay in time
    kinds = rng.permutation([True] * len(needle) + [False] * len(hay))
    coming = {True: iter(needle), False: iter(hay)}
    return [next(coming[bool(kind)]) for kind in kinds]


def _index(file: Path) -> VideoIndex:
    try:
        return read_index(file)
    except VideoError as error:
        raise UserError(f"{file} cannot be spliced: {error}") from error


def _frames(plan: Sequence[_Clip]) -> Iterator[Frame]:
    """All frames, in the size of the needle's."""
    from PIL import Image

    first = next(clip for clip in plan if clip.needle)
    # one frame is decoded for the size, which the index does not have
    height, width, _ = next(decode_frames(first.index, first.numbers[:1])).shape
    size = (width, height)
    for clip in plan:
        for frame in decode_frames(clip.index, clip.numbers):
            image = Image.fromarray(frame)
            yield np.asarray(image if image.size == size else image.resize(size, Image.Resampling.BILINEAR))
