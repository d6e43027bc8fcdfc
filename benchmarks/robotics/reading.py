"""Reading demonstrations: `read_clip` against PyAV's own loop with `VideoFrame.to_ndarray`.

Both find the same episodes in the same video, decode them with one thread and return the same pixels.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.harness import Arm, BenchOptions, check, comparison, ratio, run_arms
from benchmarks.measure import Stopwatch, repeat
from mmrl.hub.video_writing import write_mp4
from robotics.data.images import read_clip

if TYPE_CHECKING:
    from numpy.typing import NDArray

ARM_FUNCTION = "benchmarks.robotics.reading:reading_arm"
FULL: dict[str, Any] = {"episodes": 8, "frames": 60}
QUICK: dict[str, Any] = {"episodes": 2, "frames": 4}
THEIRS, OURS = "to_ndarray of each frame", "read_clip"
FPS = 10
CHECK = "pixels, difference to PyAV's own loop"


def compare_reading(options: BenchOptions, size_px: int) -> dict[str, Any]:
    """Compare the two on square images.

    Args:
        options: how often, and whether with tiny sizes.
        size_px: side of the images in pixels.
    """
    common: dict[str, Any] = (QUICK if options.quick else FULL) | {"size_px": size_px}
    arms = [Arm(way, ARM_FUNCTION, common | {"way": way}) for way in (THEIRS, OURS)]
    runs = run_arms(f"reading, {size_px} px", arms, options)
    timed = {way: run for way, run in runs.items() if "wall_s" in run}
    return comparison(
        runs,
        ratios={
            "frames per second": ratio(runs, THEIRS, OURS, "wall_s"),
            "frames per CPU second": ratio(runs, THEIRS, OURS),
        },
        floor={
            "frames_per_second": {way: run["counts"]["frames"] / run["wall_s"]["total"] for way, run in timed.items()}
        },
        notes=[f"{common['episodes']} episodes of {common['frames']} frames in one H.264 video"],
    )


def reading_arm(arm: dict[str, Any]) -> dict[str, Any]:
    """Write a video, read its episodes with one reader, compare them, then time them."""
    read = _read_with_pyav if arm["way"] == THEIRS else _read_with_ours
    rng = np.random.default_rng(0)
    small = rng.integers(0, 256, (arm["episodes"] * arm["frames"], 8, 8, 3), dtype=np.uint8)
    each = arm["size_px"] // 8
    with tempfile.TemporaryDirectory() as folder:
        path = write_mp4(Path(folder) / "video.mp4", (frame.repeat(each, 0).repeat(each, 1) for frame in small), FPS)

        def once(watch: Stopwatch) -> None:
            for episode in range(arm["episodes"]):
                read(path, episode, arm)

        checks = {} if arm["way"] == THEIRS else {CHECK: check(_difference(path, arm), 0.0)}
        measured = repeat(once, arm["repetitions"])
    return measured | {"counts": {"frames": arm["episodes"] * arm["frames"]}, "checks": checks}


def _difference(path: Path, arm: dict[str, Any]) -> float:
    """Largest difference of a pixel between the two readers."""
    pairs = [
        (_read_with_ours(path, episode, arm), _read_with_pyav(path, episode, arm)) for episode in range(arm["episodes"])
    ]
    return max(float(np.abs(ours.astype(int) - theirs).max()) for ours, theirs in pairs)


def _read_with_ours(path: Path, episode: int, arm: dict[str, Any]) -> NDArray[Any]:
    images, _ = read_clip(path, episode * arm["frames"] / FPS, arm["frames"], FPS, (arm["size_px"],) * 2)
    return images


def _read_with_pyav(path: Path, episode: int, arm: dict[str, Any]) -> NDArray[Any]:
    import av

    found: list[NDArray[Any]] = []
    start = episode * arm["frames"] / FPS
    with av.open(str(path)) as container:
        video = container.streams.video[0]
        video.codec_context.thread_type = "NONE"
        container.seek(int((start + 5e-4) / float(video.time_base or 1)), stream=video)
        for frame in container.decode(video):
            if frame.time is not None and round((frame.time - start) * FPS) >= 0:
                found.append(frame.to_ndarray(format="rgb24"))
            if len(found) == arm["frames"]:
                break
    return np.stack(found)
