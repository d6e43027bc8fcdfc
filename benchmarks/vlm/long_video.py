"""The comparison `long-video`: embedding every frame of a 10-minute video once, and reading the cached features.

The video is drawn while it is encoded, 18,000 frames of 224 px at 30 a second: digits that drift, nothing, and a red
flash before one digit. The CLIP is the small one of the needle recipes and the temporal agent is new; both have random
weights, which cost as much as trained ones.
"""

from __future__ import annotations

import shutil
import weakref
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.harness import Arm, check, comparison, ratio, run_arms
from benchmarks.measure import Recorder, Stopwatch
from benchmarks.vlm.setup import Bench
from mmrl.hub.video_writing import VideoSettings, write_mp4
from mmrl.vlm.toy.digit_clips import Shot, clip_frames
from mmrl.vlm.toy.digits import CELL_PX, scan_pool
from mmrl.vlm.toy.needles import QUESTIONS
from mmrl.vlm.toy.tiny_clip import build_clip
from mmrl.vlm.tspo.agent import AgentSettings, TemporalAgent
from mmrl.vlm.tspo.features import ClipEncoder, FeatureStore
from mmrl.vlm.tspo.picking import FramePicker

if TYPE_CHECKING:
    from numpy.typing import NDArray

FPS = 30
FULL = {"frames": 18_000, "scale": 4, "batch": 64, "picks": 64}
QUICK = {"frames": 90, "scale": 1, "batch": 8, "picks": 8}
SHOT_FRAMES, FLASH_FRAMES = 3 * FPS, FPS // 2
MOST_MB = 2048.0
"""Maximum memory of the whole process."""
BESIDE_BATCH = 2
"""Decoded frames in memory in addition to a batch: the decoder's last one, and the one being handed over."""


def compare_long_video(bench: Bench) -> dict[str, Any]:
    """Pick frames of a long video for a question, with new features versus cached features."""
    full = bench.full
    sizes = FULL if full else QUICK
    options = {**sizes, "folder": str(bench.options.folder / f"long-video-{sizes['frames']}"), "repetitions": 1}
    arms = [
        Arm(name, "benchmarks.vlm.long_video:pick_arm", options | {"kept": kept, "judged": full}, blocks=2)
        for name, kept in (("first epoch", False), ("second epoch", True))
    ]
    runs = run_arms("long-video", arms, bench.options)
    ratios = {
        "second epoch time": ratio(runs, "first epoch", "second epoch"),
        "second epoch wall time": ratio(runs, "first epoch", "second epoch", "wall_s"),
    }
    notes = [
        f"{sizes['frames']} frames of {CELL_PX * sizes['scale']} px at {FPS} per second, all of them candidates, "
        f"{sizes['picks']} picks; first epoch: decode, embed, store on disk, pick; second epoch: read, pick",
        f"at most {sizes['batch']} + {BESIDE_BATCH} decoded frames are in memory at once, regardless of the video's "
        "length",
        "process_mb is the peak of the whole process, including libraries and models",
    ]
    return comparison(runs, ratios=ratios, notes=notes)


def pick_arm(options: dict[str, Any]) -> dict[str, Any]:
    """Pick frames of the video.

    Returns:
        The result of `Recorder.result`, with the stage "features"; counts hold the frames a second that are picked from
        and the most decoded ones in memory at once.
    """
    folder = Path(options["folder"])
    video, encoder = _prepare(folder, options)
    recorder = Recorder(options["device"])
    agent = TemporalAgent(encoder.width, heads=4).to(options["device"])
    settings = AgentSettings(encoder.path, 0.0, 0, options["picks"])
    recorder.start()
    for _ in range(options["repetitions"] + 1):
        if not options["kept"]:
            shutil.rmtree(folder / "features", ignore_errors=True)
        encoder.watch = recorder.watch
        store = FeatureStore(encoder, folder / "features")
        picked = FramePicker(agent, settings, store).pick(video, QUESTIONS[0])
        recorder.lap()
    found = recorder.result()
    counts = _counts(found, options, encoder) | {"picked": len(picked.numbers), "embedded": store.computed}
    counts["process_mb"] = recorder.memory.start_mb + found["peak_mb"]["total"]
    return found | {"counts": counts, "checks": _checks(counts, options)}


class CountingEncoder(ClipEncoder):
    """A CLIP that counts the decoded frames in memory while it embeds them."""

    watch: Stopwatch
    alive = 0
    most_alive = 0

    def frames(self, frames: Iterable[NDArray[np.uint8]]) -> Tensor:
        """See `ClipEncoder.frames`."""
        with self.watch.stage("features"):
            return super().frames(self._counted(frames))

    def _counted(self, frames: Iterable[NDArray[np.uint8]]) -> Iterator[NDArray[np.uint8]]:
        for frame in frames:
            self.alive += 1
            self.most_alive = max(self.most_alive, self.alive)
            weakref.finalize(frame, self._forget)
            yield frame

    def _forget(self) -> None:
        self.alive -= 1


def _counts(found: dict[str, Any], options: dict[str, Any], encoder: CountingEncoder) -> dict[str, float]:
    seconds = found["wall_s"]["total"]
    return {
        "frames": options["frames"],
        "frames_per_second": options["frames"] / seconds,
        "times_real_time": options["frames"] / FPS / seconds,
        "most_decoded_frames": encoder.most_alive,
    }


def _checks(counts: dict[str, float], options: dict[str, Any]) -> dict[str, dict[str, Any]]:
    found = {"decoded frames in memory": check(counts["most_decoded_frames"], options["batch"] + BESIDE_BATCH)}
    if options["judged"]:
        found["process MB"] = check(counts["process_mb"], MOST_MB)
        found["times real time"] = check(counts["times_real_time"], 1.0, above=True)
    return found


def _prepare(folder: Path, options: dict[str, Any]) -> tuple[Path, CountingEncoder]:
    """Video and CLIP, written unless they are there."""
    video, clip = folder / "video.mp4", folder / "clip"
    if not video.is_file():
        write_mp4(video, _frames(options["frames"], options["scale"]), FPS, VideoSettings(gop=10 * FPS))
    if not clip.is_dir():
        build_clip(clip, steps=1, examples=1)
    return video, CountingEncoder(str(clip), options["batch"], torch.device(options["device"]))


def _frames(count: int, scale: int) -> Iterator[NDArray[np.uint8]]:
    """Frames of the video, one at a time."""
    for frame in clip_frames(_shots(count), seed=1):
        yield frame.repeat(scale, 0).repeat(scale, 1)


def _shots(count: int) -> list[Shot]:
    """Digits in turns with nothing, and a flash before the one in the middle."""
    rng = np.random.default_rng(0)
    shots: list[Shot] = []
    flashed = False
    left = count
    while left:
        if not flashed and left <= count // 2:
            kind: dict[str, Any] = {"frames": FLASH_FRAMES, "cue": True}
            flashed = True
        else:
            kind = {"frames": SHOT_FRAMES, "scan": int(rng.choice(scan_pool("test"))) if len(shots) % 2 else None}
        kind["frames"] = min(kind["frames"], left)
        left -= kind["frames"]
        shots.append(Shot(**kind))
    return shots
