"""Order and environment of the processes, failed arms, ratios and verdicts."""

import json
import os

import pytest

from benchmarks.harness import Arm, BenchOptions, check, comparison, ratio, run_arms
from mmrl.errors import UserError


def arm(tmp_path, name, seconds=(1.0,), function="given", **options):
    values = {"journal": str(tmp_path / "journal"), "name": name, "seconds": list(seconds)}
    return Arm(name, f"tests.benchmarks.arms:{function}", values, **options)


def journal(tmp_path):
    return [json.loads(line) for line in (tmp_path / "journal").read_text().splitlines()]


def test_arms_take_turns_in_their_own_processes(tmp_path):
    arms = [arm(tmp_path, "a", environment={"EXTRA": "yes"}), arm(tmp_path, "b")]
    runs = run_arms("test", arms, BenchOptions(blocks=2, threads=3))
    notes = journal(tmp_path)
    assert [note["name"] for note in notes] == ["a", "b", "a", "b", "a", "b"]
    assert len({note["pid"] for note in notes} | {os.getpid()}) == 7
    assert {note["OMP_NUM_THREADS"] for note in notes} == {"3"}
    assert {note["CUDA_VISIBLE_DEVICES"] for note in notes} == {""}
    assert [note["EXTRA"] for note in notes] == ["yes", None] * 3
    assert [note["MALLOC_MMAP_THRESHOLD_"] is not None for note in notes] == [False] * 4 + [True] * 2
    assert runs["a"]["counts"] == {"rows": 8}
    assert len(runs["a"]["blocks"]) == 2


def test_a_crash_and_an_exception_are_reported_and_the_others_continue(tmp_path):
    arms = [arm(tmp_path, "raises", function="broken"), arm(tmp_path, "dies", function="dies"), arm(tmp_path, "good")]
    runs = run_arms("test", arms, BenchOptions(blocks=1))
    assert runs["raises"]["error"] == "ValueError: no such thing"
    assert runs["dies"]["error"] == "the process exited with code 7"
    assert [note["name"] for note in journal(tmp_path)] == ["raises", "good", "good"]
    assert "error" not in runs["good"]
    assert comparison(runs)["failed"]
    assert ratio(runs, "raises", "good")["error"] == "raises failed"


@pytest.fixture
def quick():
    return BenchOptions(quick=True, blocks=3)


def test_medians_over_blocks_and_ratios_block_by_block(tmp_path, quick):
    arms = [arm(tmp_path, "slow", (8.0, 6.0, 20.0)), arm(tmp_path, "fast", (2.0, 3.0, 4.0))]
    runs = run_arms("test", arms, quick)
    assert runs["slow"]["cpu_s"] == {"total": 8.0, "half": 4.0}
    found = ratio(runs, "slow", "fast", minimum=3.0, goal=4.5, bound=8.0)
    assert (found["median"], found["min"], found["max"]) == (4.0, 2.0, 5.0)
    assert (found["met"], found["goal_met"], found["of_bound"]) == (True, False, 0.5)
    assert ratio(runs, "slow", "fast", "wall_s", "half")["median"] == 4.0
    assert ratio(runs, "slow", "fast", minimum=4.1)["met"] is False
    assert ratio(runs, "slow", "fast", "peak_mb")["median"] == 5.0


def test_quick_runs_stay_in_this_process_and_leave_the_environment_alone(tmp_path, quick):
    before = dict(os.environ)
    run_arms("test", [arm(tmp_path, "a", environment={"EXTRA": "yes"})], quick)
    assert dict(os.environ) == before
    notes = journal(tmp_path)
    assert {note["pid"] for note in notes} == {os.getpid()}
    assert {note["EXTRA"] for note in notes} == {"yes"}


def test_an_arm_for_orientation_runs_less_often_and_one_for_checks_once(tmp_path, quick):
    arms = [arm(tmp_path, "a"), arm(tmp_path, "b", blocks=2), arm(tmp_path, "c", timed=False)]
    run_arms("test", arms, quick)
    assert [note["name"] for note in journal(tmp_path)] == ["a", "b", "c", "a", "b", "a"]


def test_no_process_measures_memory_that_is_not_wanted(tmp_path):
    run_arms("test", [arm(tmp_path, "a", memory=False), arm(tmp_path, "b")], BenchOptions(blocks=1))
    assert [note["name"] for note in journal(tmp_path)] == ["a", "b", "b"]


def test_a_failed_check_fails_the_comparison():
    good, bad = check(1.0, 2.0), check(1.0, 2.0, above=True)
    assert (good["passed"], bad["passed"]) == (True, False)
    assert not comparison({}, checks={"good": good})["failed"]
    assert comparison({}, checks={"good": good, "bad": bad})["failed"]
    assert not check(float("nan"), 2.0)["passed"]
    run = {"blocks": [], "checks": {"bad": bad}}
    found = comparison({"arm": run})
    assert found["failed"]
    assert set(found["checks"]) == {"arm/bad"}


def test_names_are_chosen_in_order_and_unknown_ones_named():
    assert BenchOptions().chosen(("a", "b")) == ["a", "b"]
    assert BenchOptions(only=["b", "a"]).chosen(("a", "b", "c")) == ["a", "b"]
    with pytest.raises(UserError, match="--only d: unknown comparison; available: a, b"):
        BenchOptions(only=["d"]).chosen(("a", "b"))


@pytest.mark.parametrize("field", ["blocks", "repetitions", "threads"])
def test_counts_must_be_positive(field):
    options = BenchOptions(**{field: -1})
    with pytest.raises(UserError, match=f"--{field} is -1; must be at least 1"):
        options.validate()


def test_defaults_depend_on_quick():
    usual, quick = BenchOptions(), BenchOptions(quick=True)
    assert (quick.blocks, quick.repetitions) == (1, 1)
    assert min(usual.blocks, usual.repetitions) > 1, "a spread needs several"
    assert BenchOptions(quick=True, blocks=4).blocks == 4
