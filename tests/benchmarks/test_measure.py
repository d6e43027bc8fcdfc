"""Stages, warm-up and peak memory as an arm measures them in its own process."""

import time
from pathlib import Path

import numpy as np
import pytest

from benchmarks.measure import Recorder, repeat


def busy(seconds):
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass


def test_cpu_seconds_do_not_count_waiting_and_wall_seconds_do():
    def once(watch):
        with watch.stage("waits"):
            time.sleep(0.1)
        with watch.stage("works"):
            busy(0.1)

    found = repeat(once, 1)
    assert found["cpu_s"]["waits"] < 0.05
    assert found["wall_s"]["waits"] >= 0.1
    assert found["cpu_s"]["works"] >= 0.1
    assert found["cpu_s"]["total"] >= 0.1
    assert found["wall_s"]["total"] >= 0.2


def test_a_stage_that_is_entered_twice_adds_up_and_stages_may_nest():
    def once(watch):
        for _ in range(2):
            with watch.stage("outer"), watch.stage("inner"):
                busy(0.05)

    found = repeat(once, 1)["cpu_s"]
    assert found["inner"] >= 0.1
    assert found["outer"] >= found["inner"]


@pytest.mark.slow
def test_the_first_repetition_warms_up_and_the_median_of_the_others_counts():
    waits = iter([0.5, 0.01, 0.3, 0.02])
    found = repeat(lambda watch: time.sleep(next(waits)), 3)
    assert 0.02 <= found["wall_s"]["total"] < 0.3


def test_a_stage_that_only_some_repetitions_have_counts_as_zero_in_the_others():
    turns = iter(range(4))

    def once(watch):
        if next(turns) == 1:
            with watch.stage("rare"):
                busy(0.05)

    assert repeat(once, 3)["cpu_s"]["rare"] == 0.0


def can_reset_peaks():
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


@pytest.mark.skipif(not can_reset_peaks(), reason="this system does not let a process reset its peak")
def test_peak_memory_is_that_of_its_stage():
    def once(watch):
        with watch.stage("large"):
            np.ones(2**24)
        with watch.stage("small"):
            np.ones(2**20)

    peaks = repeat(once, 1)["peak_mb"]
    # a part of the block may lie on pages that were in use before
    assert peaks["large"] == pytest.approx(2**27 / 1e6, rel=0.2)
    assert peaks["small"] < peaks["large"] / 2
    assert peaks["total"] == peaks["large"]


def test_what_the_warm_up_leaves_behind_is_held():
    kept = []

    def once(watch):
        if not kept:
            kept.append(np.ones(2**24))

    assert repeat(once, 1)["held_mb"] == pytest.approx(2**27 / 1e6, rel=0.2)


def test_laps_can_be_driven_from_outside():
    recorder = Recorder()
    recorder.start()
    for _ in range(3):
        with recorder.watch.stage("step"):
            busy(0.02)
        recorder.lap()
    assert recorder.result()["cpu_s"]["step"] >= 0.02


def test_another_clock_may_count_the_cpu_seconds():
    ticks = iter(range(0, 100, 5))
    found = repeat(lambda watch: busy(0.02), 2, cpu_clock=lambda: float(next(ticks)))
    assert found["cpu_s"] == {"total": 5.0}
    assert found["wall_s"]["total"] < 5.0
