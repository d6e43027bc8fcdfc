"""Video files whose frames encode their index, in black and white blocks that compression does not change."""

from collections.abc import Callable, Iterable, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

HEIGHT, WIDTH, BITS = 48, 96, 16
TICK = Fraction(1, 1000)


def numbered(number: int) -> np.ndarray:
    """(48, 96, 3): bit b of the number as a block of 24 x 12, eight a row; a grey mark shows which side is up."""
    bits = np.array([[number >> (8 * row + column) & 1 for column in range(8)] for row in range(2)])
    picture = np.kron(bits * 255, np.ones((HEIGHT // 2, WIDTH // 8))).astype(np.uint8)
    return np.repeat(picture[..., None], 3, 2)


def number_of(frame: np.ndarray) -> int:
    """The index of a frame of any size that is a multiple of 2 x 8."""
    height, width = frame.shape[:2]
    blocks = frame[..., 0].reshape(2, height // 2, 8, width // 8).mean((1, 3)) > 127
    return sum(int(bit) << place for place, bit in enumerate(blocks.flatten()))


def write_clip(
    path: Path,
    times_s: Sequence[float],
    *,
    gop: int = 8,
    bframes: int = 2,
    turned: float | None = None,
    options: dict[str, str] | None = None,
    frame: Callable[[int], np.ndarray] = numbered,
    fps: int = 10,
) -> Path:
    """Frame i is shown at times_s[i]; milliseconds are the finest time."""
    import av

    with av.open(str(path), "w", options=options or {}) as container:
        settings = {"g": str(gop), "bf": str(bframes), "preset": "ultrafast", "x264-params": f"keyint={gop}:scenecut=0"}
        stream: Any = container.add_stream("libx264", rate=fps, options=settings)
        first = frame(0)
        stream.height, stream.width = first.shape[:2]
        stream.pix_fmt = "yuv420p"
        stream.codec_context.time_base = TICK
        stream.codec_context.thread_count = 1
        if turned is not None:
            stream.set_display_rotation(turned)
        for number, time_s in enumerate(times_s):
            picture = av.VideoFrame.from_ndarray(frame(number), format="rgb24")
            picture.pts, picture.time_base = round(time_s / TICK), TICK
            container.mux(stream.encode(picture))
        container.mux(stream.encode())
    return path


def even_times(frames: int, fps: float = 10) -> list[float]:
    return [number / fps for number in range(frames)]


def numbers_of(frames: Iterable[np.ndarray]) -> list[int]:
    return [number_of(frame) for frame in frames]
