"""Faults of environments inside a chunk, and their messages."""

import logging

import numpy as np
import pytest

from mmrl.errors import RunError, UserError
from robotics.sim.subprocess_sim import SubprocessSim, problem_in_hello
from tests.robotics.test_subprocess_sim import _no_renderer, settings, specs, zeros  # noqa: F401


@pytest.mark.parametrize(
    ("what", "reason"),
    [
        ("reward", "diverged: the reward is nan at control step 3 of the chunk, step 3 of the episode"),
        ("state", "diverged: entry 1 of the state is inf at control step 3 of the chunk, step 3 of the episode"),
        ("state_shape", "raised: ValueError: the state has 3 entries at control step 3 of the chunk"),
        ("image_shape", "raised: ValueError: the image has the shape (5, 8, 3) at step 4 of the episode"),
    ],
)
def test_what_is_wrong_inside_a_chunk_is_noticed_at_its_control_step(what, reason):
    with SubprocessSim(settings("odd", kwargs={"what": what})) as sim:
        sim.reset(specs("walk"))
        chunk = sim.step_chunk(zeros(sim, 4))
        assert chunk.failed.tolist() == [True]
        assert chunk.reasons[0].startswith(reason)
        assert sim.counts["diverged"] == (what in ("reward", "state"))


def test_an_action_that_is_not_finite_is_named_with_its_control_step():
    with SubprocessSim(settings()) as sim:
        sim.reset(specs("walk"))
        actions = zeros(sim, 4)
        actions[0, 2, 1] = np.nan
        with pytest.raises(UserError, match="action 1 of control step 2 in row 0 is nan"):
            sim.step_chunk(actions)


def test_each_reason_is_logged_once_with_its_traceback_in_a_file(tmp_path, caplog):
    caplog.set_level(logging.WARNING)
    with SubprocessSim(settings("odd", kwargs={"what": ""})) as sim:
        sim.failures.folder = tmp_path / "failures"
        for layout in (0, 1, 2):
            sim.reset(specs("raise", layout=layout))
            sim.step_chunk(zeros(sim, 4))
        (kept,) = (tmp_path / "failures").iterdir()
        assert "Traceback" in kept.read_text()
        assert "in _raise" in kept.read_text()
        (line,) = [record.getMessage() for record in caplog.records if "hinge" in record.getMessage()]
        assert str(kept) in line
        assert sim.failures.counts == {"raised: ValueError: hinge # broke": 3}
    assert "3 times in total: raised: ValueError: hinge # broke" in caplog.text


def test_memory_is_measured_and_limited():
    with SubprocessSim(settings("hungry", memory_mb=250)) as sim:
        assert 5 < sim.memory_mb() < 250
        sim.reset(specs("walk"))
        chunk = sim.step_chunk(zeros(sim, 1))
        assert chunk.reasons[0].startswith("memory: it used ")
        assert "at most 250 MiB" in chunk.reasons[0]
        assert sim.counts["memory"] == 1


@pytest.mark.parametrize(
    "claims",
    [
        {"action_size": 0},
        {"state_size": -1},
        {"state_size": 1 << 40},
        {"horizon": 1 << 40},
        {"image_size": [6, 1 << 40]},
    ],
    ids=str,
)
def test_an_environment_that_describes_itself_wrongly_is_refused(claims):
    with pytest.raises(RunError, match=f"reports an invalid description: {next(iter(claims))}"):
        SubprocessSim(settings("lying", kwargs=claims, images=False))


GOOD = {
    "action_size": 2,
    "state_size": 0,
    "horizon": 9,
    "image_size": None,
    "tasks": {"a": "go"},
    "layouts": {"x": None},
}
GOOD |= {"describe": {}, "python": "3", "numpy": "2", "expert": False}


@pytest.mark.parametrize(
    "change",
    [{"tasks": ["a"]}, {"tasks": {"a": 1}}, {"layouts": {"x": "many"}}, {"image_size": 3}, {"horizon": True}, {}],
    ids=str,
)
def test_a_workers_description_of_itself_is_checked(change):
    assert problem_in_hello(GOOD) == ""
    changed = {**GOOD, **change}
    if not change:
        del changed["numpy"]
    assert next(iter(change), "numpy") in problem_in_hello(changed)
