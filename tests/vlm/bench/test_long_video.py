"""Frames of a long video: memory, computation, and cached reads in a second epoch."""

import numpy as np
import pytest

from benchmarks.vlm import long_video
from benchmarks.vlm.long_video import BESIDE_BATCH, QUICK, CountingEncoder, pick_arm
from mmrl.hub.video_reading import read_index


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("long-video")


def _run(folder, kept, **changes):
    common = {"folder": str(folder), "repetitions": 1, "device": "cpu", "judged": False}
    return pick_arm({**QUICK, **common, "kept": kept, **changes})


@pytest.mark.slow
def test_a_second_epoch_embeds_nothing_and_picks_the_same_number(folder):
    first, second = _run(folder, kept=False), _run(folder, kept=True)
    assert (first["counts"]["embedded"], second["counts"]["embedded"]) == (1, 0)
    assert first["counts"]["picked"] == second["counts"]["picked"] == QUICK["picks"]
    assert second["counts"]["most_decoded_frames"] == 0
    assert "features" in first["cpu_s"]
    assert read_index(folder / "video.mp4").total == QUICK["frames"]


@pytest.mark.parametrize("batch", [4, 16])
def test_decoded_frames_in_memory_go_with_the_batch_and_not_with_the_video(folder, batch):
    found = _run(folder, kept=False, batch=batch)
    assert batch <= found["counts"]["most_decoded_frames"] <= batch + BESIDE_BATCH
    assert all(check["passed"] for check in found["checks"].values())


def test_frames_that_are_held_back_fail_the_check(folder, monkeypatch):
    held = []

    def hold(encoder, frames, count=CountingEncoder._counted):
        for frame in count(encoder, frames):
            held.append(frame)
            yield frame

    monkeypatch.setattr(CountingEncoder, "_counted", hold)
    found = _run(folder, kept=False)
    assert found["counts"]["most_decoded_frames"] >= QUICK["frames"]
    assert not found["checks"]["decoded frames in memory"]["passed"]


def test_the_video_shows_a_flash_before_the_digit_in_the_middle():
    shots = long_video._shots(18_000)
    assert sum(shot.frames for shot in shots) == 18_000
    (flash,) = [place for place, shot in enumerate(shots) if shot.cue]
    assert shots[flash + 1].scan is not None
    frames = list(long_video._frames(4, 2))
    assert np.stack(frames).shape == (4, 112, 112, 3)
