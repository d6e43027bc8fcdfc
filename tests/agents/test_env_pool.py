import logging
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from mmrl.agents.environments.agent_tasks import AgentTask
from mmrl.agents.environments.env_pool import EnvironmentConfig, EnvPool
from mmrl.agents.environments.environment import (
    Action,
    MalformedError,
    Observation,
    StepOutcome,
    pack_outcome,
    unpack_outcome,
)
from mmrl.errors import ConfigError, RunError, UserError
from mmrl.fields import check_config
from mmrl.runs.tracking import describe_metric
from mmrl.training.processes import SimCounts
from mmrl.workers.row_pool import RowLimits

FAKES = Path(__file__).with_name("fake_envs.py")


def config(function: str = "Fake", workers: int = 1, **options) -> EnvironmentConfig:
    limits = {"step_timeout_s": 20.0, "reset_timeout_s": 20.0, "start_timeout_s": 60.0}
    return EnvironmentConfig(
        f"{FAKES}:{function}", workers=workers, **(limits if options.get("isolate", True) else {}) | options
    )


def tasks(*names: str) -> dict[int, AgentTask]:
    return {row: AgentTask(f"{name}/{row}", {"name": name}, 10 + row) for row, name in enumerate(names)}


@pytest.fixture(scope="module")
def calm():
    """Two environments for tests without faults."""
    with EnvPool(config(workers=2)) as pool:
        yield pool


def test_episodes_run_side_by_side_to_their_ends(calm):
    begun = calm.reset(tasks("well", "well"))
    assert [begun[row].observation.text for row in (0, 1)] == ["seed 10", "seed 11"]
    assert [begun[row].reward for row in (0, 1)] == [0.0, 0.0]
    assert begun[0].info["pid"] != begun[1].info["pid"]
    assert calm.live == [0, 1]
    assert calm.actions == {"go": "take a step", "end": "end the episode"}

    turns = calm.step({0: Action("go", {"x": [1, None, "ü"]}, "raw"), 1: Action("end")})
    np.testing.assert_array_equal(turns[0].observation.images[0], np.full((2, 3, 3), 1))
    assert (turns[0].reward, turns[0].terminated, turns[0].truncated) == (1.0, False, False)
    assert (turns[0].info["arguments"], turns[0].info["answer"]) == ({"x": [1, None, "ü"]}, "raw")
    np.testing.assert_array_equal(turns[0].info["box"], np.arange(4))
    assert turns[0].info["not_sent"] == ["open"]
    assert (turns[1].terminated, calm.live) == (True, [0])

    calm.step({0: Action("go")})
    last = calm.step({0: Action("go")})[0]
    assert (last.reward, last.terminated, last.truncated, last.failure) == (3.0, False, True, None)
    assert calm.live == []
    assert calm.counts["dropped"] == 0


def test_a_row_restarts_while_another_continues(calm):
    calm.reset(tasks("well", "well"))
    calm.step({0: Action("go"), 1: Action("go")})
    calm.reset({1: AgentTask("again", {}, 99)})
    turns = calm.step({0: Action("go"), 1: Action("go")})
    assert [turns[row].reward for row in (0, 1)] == [2.0, 1.0]
    calm.stop([1])
    assert calm.live == [0]


def test_an_action_that_is_none_spends_the_turn(calm):
    calm.reset(tasks("well"))
    turn = calm.step({0: Action("fly")})[0]
    assert (turn.observation.text, turn.info["action_error"]) == ("what?", "no action fly")
    assert turn.failure is None
    assert calm.live == [0]


def test_invalid_requests_are_refused(calm):
    calm.reset(tasks("well"))
    calm.stop([0])
    with pytest.raises(ValueError, match=r"rows \[0\] have no running episode"):
        calm.step({0: Action("go")})
    with pytest.raises(UserError, match=r"no rows \[2\]; environment.workers is 2"):
        calm.reset({2: AgentTask("x")})
    with pytest.raises(UserError, match=r"reset of an environment: a builtins\.object cannot be sent"):
        calm.reset({0: AgentTask("x", {"door": object()})})


BAD_ACTIONS = {
    "raise": ("raised", "ValueError: the door is stuck"),
    "exit": ("raised", "SystemExit: 0"),
    "die": ("crashed", "ended with code 3"),
    "hang": ("hung", "no reply within 3 s"),
    "nan": ("malformed", "the reward is nan; expected a finite number"),
    "float_image": ("malformed", "an image of shape (2, 2, 3) has type float64; expected uint8"),
    "two_values": ("malformed", "step returned a tuple of str, float; expected"),
    "none": ("malformed", "an image is a NoneType"),
}


def test_an_environment_that_fails_takes_only_its_row(tmp_path, caplog, hanging):
    names = [*BAD_ACTIONS, "print"]
    with EnvPool(config(workers=len(names), step_timeout_s=3.0), tmp_path / "failures") as pool:
        pool.reset(tasks(*["well"] * len(names)))
        with caplog.at_level(logging.WARNING):
            turns = pool.step({row: Action(name) for row, name in enumerate(names)})
        for row, (kind, reason) in enumerate(BAD_ACTIONS.values()):
            failure = turns[row].failure
            assert (failure.kind, failure.reason[: len(reason)]) == (kind, reason)
            assert math.isnan(turns[row].reward)
            assert turns[row].over
            assert turns[row].observation == Observation()
        assert turns[len(BAD_ACTIONS)].observation.text == "printed"
        assert pool.live == [len(BAD_ACTIONS)]
        counts = pool.counts
        assert [counts[kind] for kind in ("raised", "crashed", "hung", "malformed", "dropped")] == [2, 1, 1, 4, 8]
        assert counts["restarted"] == 4, "what is malformed does not cost a process"
        again = pool.reset(tasks(*["well"] * len(names)))
        assert pool.live == list(range(len(names)))
        assert all(turn.failure is None for turn in again.values())
    texts = [path.read_text() for path in (tmp_path / "failures").glob("environment-raised-*.txt")]
    assert any("fake_envs.py" in text and "in _act_raise" in text for text in texts)
    assert sum("the door is stuck" in record.message for record in caplog.records) == 1
    said = [record.message for record in caplog.records if "; it is replaced by a fresh process" in record.message]
    assert len(said) == counts["restarted"]
    assert not any("malformed" in message for message in said)


def test_results_come_as_they_are_ready(tmp_path, hanging):
    with EnvPool(config(workers=3, step_timeout_s=3.0, kwargs={"folder": str(tmp_path)})) as pool:
        pool.reset(tasks("well", "well", "well"))
        assert pool.poll() == {}, "nothing was asked for"
        pool.submit(0, Action("wait"))
        found = []
        for _ in range(2):
            pool.submit(1, Action("go"))
            (turn,) = (turns := pool.poll()).values()
            found.append((*turns, turn.reward))
        assert found == [(1, 1.0), (1, 2.0)], "while the others still execute theirs"
        assert pool.poll(0.0) == {}
        with pytest.raises(ValueError, match=r"rows \[0\] still execute an action; poll\(\) returns its result"):
            pool.submit(0, Action("go"))
        with pytest.raises(ValueError, match=r"rows \[0\] still execute"):
            pool.step({1: Action("go")})
        pool.submit(1, Action("go"))
        pool.submit(2, Action("hang"))
        (tmp_path / "go").touch()
        turns = {}
        while len(turns) < 3:
            turns |= pool.poll()
        assert turns[0].observation.text == "gone"
        assert (turns[1].reward, turns[1].truncated) == (3.0, True), "the refused step sent nothing"
        assert (turns[2].failure.kind, math.isnan(turns[2].reward)) == ("hung", True)
        assert pool.live == [0]
        assert pool.poll() == {}


def test_a_row_that_is_stopped_returns_nothing(tmp_path):
    with EnvPool(config(workers=1, kwargs={"folder": str(tmp_path)})) as pool:
        pool.reset(tasks("well"))
        pool.submit(0, Action("wait"))
        pool.stop([0])
        assert (pool.live, pool.poll()) == ([], {})
        (tmp_path / "go").touch()
        assert pool.reset(tasks("well"))[0].observation.text == "seed 10"
        assert pool.step({0: Action("go")})[0].reward == 1.0


def test_starts_are_tried_again_while_others_act(tmp_path):
    with EnvPool(config(workers=3, kwargs={"folder": str(tmp_path)})) as pool:
        begun = tasks("well", "flaky", "never")
        pool.reset({0: begun[0]})
        for row in (1, 2):
            pool.submit(row, begun[row])
        assert pool.live == [0]
        pool.submit(0, Action("end"))
        turns = {}
        while len(turns) < 3:
            turns |= pool.poll()
        assert (turns[0].terminated, turns[1].observation.text) == (True, "seed 11")
        assert turns[2].failure.reason == "RuntimeError: cannot begin, ever"
        assert pool.live == [1]
        counts = pool.counts
        assert (counts["crashed"], counts["raised"], counts["dropped"]) == (1, 3, 1)


def test_memory_has_a_limit():
    with EnvPool(config(memory_mb=400)) as pool:
        pool.reset(tasks("well"))
        failure = pool.step({0: Action("eat")})[0].failure
    assert failure.kind == "memory"
    assert "at most 400 MiB are allowed" in failure.reason


def test_an_episode_that_does_not_begin_is_tried_again_in_a_fresh_process(tmp_path):
    with EnvPool(config(workers=2, kwargs={"folder": str(tmp_path)})) as pool:
        begun = pool.reset(tasks("flaky", "never"))
        assert begun[0].observation.text == "seed 10"
        assert (begun[1].failure.kind, begun[1].failure.reason) == ("raised", "RuntimeError: cannot begin, ever")
        assert math.isnan(begun[1].reward)
        assert pool.live == [0]
        counts = pool.counts
        assert (counts["crashed"], counts["raised"], counts["dropped"]) == (1, 3, 1)


def test_a_reset_has_its_own_time_limit(hanging):
    with EnvPool(config(reset_timeout_s=0.5)) as pool:
        assert pool.reset(tasks("slowly"))[0].failure.reason.startswith("no reply within 0.5 s")


def test_restarts_without_an_episode_stop_the_run(monkeypatch):
    monkeypatch.setattr(EnvironmentConfig, "limits", lambda self: RowLimits(reset_retries=0, max_restarts=2))
    with EnvPool(config()) as pool:
        for _ in range(3):
            assert pool.reset(tasks("never"))[0].failure is not None
        with pytest.raises(RunError, match=r"3 restarts without one completed episode of .*Fake"):
            pool.reset(tasks("never"))


def test_a_mistake_in_a_task_is_the_users():
    with EnvPool(config(workers=2)) as pool, pytest.raises(UserError, match=r"^there is no task 'unknown'; there is"):
        pool.reset(tasks("well", "unknown"))


def test_actions_may_be_names_only():
    with EnvPool(config("Named")) as pool:
        assert pool.actions == {"go": "", "end": ""}


def test_counts_and_tracebacks_belong_to_the_run(tmp_path):
    with EnvPool(config()) as pool:
        counts = SimCounts(pool, tmp_path)
        counts.load_state_dict({"raised": 3, "dropped": 4})
        pool.reset(tasks("well"))
        pool.step({0: Action("raise")})
        metrics = counts.metrics()
        state = counts.state_dict()
    assert (metrics["sim/raised"], metrics["sim/dropped"], metrics["sim/malformed"]) == (4, 5, 0)
    assert metrics["memory/worker_mb"].value > 0
    assert (state["raised"], state["dropped"]) == (4, 5)
    assert len(list((tmp_path / "failures").iterdir())) == 1
    assert [name for name in metrics if describe_metric(name) is None] == []


def test_environments_learn_whether_the_model_sees_images():
    with EnvPool(config("Looking", isolate=False)) as pool:
        assert pool.reset(tasks("well"))[0].observation.text == "images: True"
        pool.show_images = False
        assert pool.reset(tasks("well"))[0].observation.text == "images: False"


def test_environments_in_this_process(tmp_path):
    with EnvPool(config(workers=2, isolate=False), tmp_path) as pool:
        begun = pool.reset(tasks("well", "well"))
        assert [begun[row].info["pid"] for row in (0, 1)] == [os.getpid()] * 2
        turns = pool.step({0: Action("raise"), 1: Action("go")})
        assert (turns[0].failure.kind, turns[0].failure.reason) == ("raised", "ValueError: the door is stuck")
        assert (turns[1].reward, pool.live) == (1.0, [1])
        assert pool.step({1: Action("nan")})[1].failure.kind == "malformed"
        assert pool.reset({0: AgentTask("again", {}, 5)})[0].observation.text == "seed 5"
        first = pool.step({0: Action("go")})[0].observation.images[0]
        pool.step({0: Action("go")})
        assert (first == 1).all()
        never = pool.reset(tasks("never"))[0]
        assert never.failure.reason == "RuntimeError: cannot begin, ever"
        assert (pool.counts["raised"], pool.counts["restarted"], pool.memory_mb()) == (4, 3, 0)
        with pytest.raises(UserError, match=r"^there is no task 'unknown'; there is: well"):
            pool.reset(tasks("unknown"))
    for limit in ({"memory_mb": 100.0}, {"step_timeout_s": 5.0}, {"variables": {"A": "1"}}):
        with pytest.raises(
            UserError, match=rf"{next(iter(limit))} is .*, but it has no effect .* set environment\.isolate: true"
        ):
            EnvPool(config(isolate=False, **limit))
    with pytest.raises(RunError, match=r"did not start; it raised: OSError: no licence found"):
        EnvPool(config("broken", isolate=False))


def test_processes_end_with_the_pool():
    pool = EnvPool(config())
    (pid,) = pool.processes()
    pool.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    with pytest.raises(RuntimeError, match="closed"):
        pool.reset(tasks("well"))


@pytest.mark.parametrize(
    ("function", "options", "error", "message"),
    [
        ("broken", {}, RunError, r"did not start; it raised: OSError: no licence found(.|\n)*line \d+, in broken"),
        ("unusable", {}, UserError, "^set MAZES to where the mazes lie$"),
        ("dies", {}, RunError, "did not start; it crashed: ended with code 7"),
        ("Fakes", {}, UserError, "environment.factory: .* has no 'Fakes'"),
        ("Counted", {}, UserError, "`actions` of Counted is a int; expected a mapping"),
        ("Functions", {}, UserError, "`tools` of Functions is not a list of JSON schemas: .*not JSON serializable; tr"),
        ("Nameless", {}, UserError, r"of Nameless .*: \{'name': 'search'\} has no function with a name; .*get_json"),
        ("NoStep", {}, UserError, "created a NoStep without step; an environment needs the methods reset, step, close"),
        ("Fake", {"kwargs": {"size": 3}}, UserError, "unexpected keyword argument 'size'; it takes folder, length"),
        ("Fake", {"adapter": {"render": True}}, UserError, "adapter is only for Gymnasium environments; .* a Fake"),
    ],
)
def test_what_does_not_start_says_why(function, options, error, message):
    with pytest.raises(error, match=message):
        EnvPool(config(function, **options))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"workers": 0}, "workers is 0; must be at least 1"),
        ({"step_timeout_s": 0.0}, "step_timeout_s is 0.0; must be positive"),
        ({"step_timeout_s": math.inf}, "step_timeout_s is inf"),
        ({"kwargs": {"x": object()}}, "environment.kwargs must be JSON"),
        ({"adapter": {"x": math.nan}}, "environment.adapter.x is nan; must be finite"),
    ],
)
def test_options_are_checked_before_a_process_starts(options, message):
    with pytest.raises((ConfigError, UserError), match=message):
        check_config(config(**options), "environment")


def test_an_outcome_is_received_as_it_was_sent():
    image = np.random.default_rng(0).integers(0, 256, (5, 4, 3), np.uint8)
    sent = StepOutcome(
        Observation("ü\ud800", (image, image.copy())), -0.25, True, False, {"a": (1, 2.5), "b": {3: None}}
    )
    fields, arrays = pack_outcome(sent)
    back = unpack_outcome(fields, arrays)
    assert (back.reward, back.terminated, back.truncated, back.info) == (-0.25, True, False, sent.info)
    # half of a surrogate pair can be sent, but not read by a tokenizer
    assert back.observation.text == "ü\ufffd"
    np.testing.assert_array_equal(back.observation.images, sent.observation.images)


@pytest.mark.parametrize("fields", [{}, {"outcome": 3}, {"outcome": [1, 2, 3]}, {"outcome": {"array": "9"}}])
def test_anything_else_from_a_process_is_malformed(fields):
    with pytest.raises(MalformedError):
        unpack_outcome(fields, {})


def test_a_worker_and_a_pool_load_nothing_heavy():
    code = "import sys, mmrl.agents.environments.environment_service, mmrl.agents.environments.env_pool;"
    code += "import mmrl.agents.environments.gym, mmrl.agents.environments.videos;"
    code += "print({'torch', 'transformers', 'PIL', 'av', 'gymnasium', 'datasets'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "set()"
