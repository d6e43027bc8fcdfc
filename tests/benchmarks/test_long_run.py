"""Growth of a run's memory: the fitted slope, and the settings of its runs."""

from __future__ import annotations

import math

import numpy as np
import pytest

from benchmarks import long_run
from benchmarks.harness import BenchOptions
from benchmarks.long_run import growth
from mmrl.errors import RunError, UserError


@pytest.fixture(autouse=True)
def no_collection(monkeypatch):
    """Collecting the garbage of a test process takes longer than the steps."""
    monkeypatch.setattr("gc.collect", lambda *_: 0)


def test_a_straight_line_has_its_slope_and_no_error():
    memory = [1000.0] * 50 + [1000.0 + 0.25 * step for step in range(50)]
    slope, error = growth(memory)
    assert slope == pytest.approx(25.0)
    assert error == pytest.approx(0.0, abs=1e-9)


def test_slope_and_error_are_those_of_least_squares():
    # y = x + d with d = (1, -1, -1, 1) at x = 0, 1, 2, 3: d is orthogonal to 1 and x, so the slope stays 1, the
    # residuals are d, and the error is sqrt(sum d^2 / (n - 2) / sum (x - mean)^2) = sqrt(4 / 2 / 5)
    memory = [7.0] * 4 + [0.0 + 1, 1.0 - 1, 2.0 - 1, 3.0 + 1]
    slope, error = growth(memory, batch=1)
    assert slope == pytest.approx(100.0)
    assert error == pytest.approx(100.0 * math.sqrt(0.4))


def test_the_line_goes_through_the_means_of_batches():
    means = np.array([4.0, 6.0, 5.0, 9.0])
    half = np.repeat(means, 10) + np.tile([1.0, -1.0], 20)
    by_hand = np.polyfit(10.0 * np.arange(4), means, 1)[0]
    assert growth([0.0] * 40 + half.tolist())[0] == pytest.approx(100.0 * by_hand)


def test_too_few_steps_have_no_slope():
    assert all(math.isnan(value) for value in growth([1.0, 2.0, 3.0, 4.0]))


def test_memory_is_released_in_one_arm_only(tmp_path):
    settings = {"config": {"recipe": "vlm"}, "folder": str(tmp_path)}
    questions = {"path": "{folder}/questions.jsonl"}
    plan = long_run.LongRun(
        {"recipe": "vlm", "model": {"path": "{folder}/digits-model"}, "data": questions, "rewards": [{"name": "exact"}]}
    )
    for release in (False, True):
        changes = {"trainer": {"release_memory": release}}
        _, config = long_run._load(settings | {"config": plan.config}, "run", changes)
        assert config.trainer.release_memory is release
        assert config.model.path == str(tmp_path / "digits-model")


def test_a_failed_start_ends_the_benchmark(tmp_path):
    plan = long_run.LongRun({"recipe": "vlm"}, prepare={"start": {"recipe": "sft", "model": {"path": "nowhere"}}})
    with pytest.raises(RunError, match="the run start, from which the benchmark starts, failed"):
        long_run.compare_long_run(plan, BenchOptions(quick=True, folder=tmp_path))


def test_on_a_gpu_it_is_left_out_and_refused_where_asked_for(tmp_path):
    plan = long_run.LongRun({"recipe": "vlm"})
    assert long_run.compare_long_run(plan, BenchOptions(device="cuda", folder=tmp_path))["arms"] == {}
    with pytest.raises(UserError, match="measures runs on a CPU"):
        long_run.compare_long_run(plan, BenchOptions(device="cuda", only=["long-run"], folder=tmp_path))
