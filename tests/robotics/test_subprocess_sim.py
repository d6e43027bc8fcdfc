import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from mmrl.errors import RunError, UserError
from robotics.sim import subprocess_sim
from robotics.sim.episodes import EpisodeSpec
from robotics.sim.subprocess_sim import SubprocessSettings, SubprocessSim, layout_seed
from tests.programs import is_alive, wait_until

FAKES = Path(__file__).with_name("fake_envs.py")


@pytest.fixture(autouse=True)
def _no_renderer(monkeypatch):
    """Skip finding a renderer, which takes seconds; the fakes draw with numpy."""
    monkeypatch.setattr(subprocess_sim, "find_backend", lambda preferred: None)


@pytest.fixture(scope="module")
def calm():
    """Two workers for tests without faults."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess_sim, "find_backend", lambda preferred: None)
        with SubprocessSim(settings(count=2)) as sim:
            yield sim


def settings(function: str = "make", count: int = 1, **options) -> SubprocessSettings:
    limits = {"call_timeout_s": 20.0, "heartbeat_timeout_s": 20.0, "start_timeout_s": 30.0}
    return SubprocessSettings(f"{FAKES}:{function}", workers=count, **{**limits, **options})


def specs(*tasks: str, layout: int = 0) -> list[EpisodeSpec]:
    return [EpisodeSpec(task, "", layout + number) for number, task in enumerate(tasks)]


def zeros(sim: SubprocessSim, length: int = 4) -> np.ndarray:
    return np.zeros((len(sim.live), length, sim.action_size))


def test_episodes_run_side_by_side_to_the_horizon():
    with SubprocessSim(settings(count=3, kwargs={"horizon": 6})) as sim:
        assert (sim.action_size, sim.state_size, sim.image_size, sim.horizon, sim.capacity) == (2, 4, (6, 8), 6, 3)
        assert sim.tasks()["walk"] == "walk on"
        first = sim.reset(specs("walk", "walk", layout=4))
        assert first.rewards.shape == (2, 0)
        np.testing.assert_array_equal(first.observation.state, [[0, 0, 4, 0], [0, 0, 5, 0]])
        actions = np.zeros((2, 4, 2))
        actions[0], actions[1] = 0.25, 2.0  # the second is clipped to 1
        chunk = sim.step_chunk(actions)
        np.testing.assert_array_equal(chunk.rewards, [[1, 2, 3, 4]] * 2)
        np.testing.assert_array_equal(chunk.observation.state, [[4, 0, 4, 2], [4, 0, 5, 8]])
        assert (chunk.observation.images == 4).all()
        assert not (chunk.terminated | chunk.truncated | chunk.failed | chunk.success).any()
        chunk = sim.step_chunk(actions)
        np.testing.assert_array_equal(chunk.rewards, [[5, 6, 0, 0]] * 2)
        np.testing.assert_array_equal(chunk.steps, [2, 2])
        assert chunk.truncated.all()
        assert not chunk.terminated.any()
        assert len(sim.live) == 0


@pytest.mark.parametrize("ends", [True, False])
def test_success_ends_an_episode_where_it_is_meant_to(ends):
    with SubprocessSim(settings(kwargs={"success_at": 2}, end_at_success=ends)) as sim:
        sim.reset(specs("walk"))
        chunk = sim.step_chunk(zeros(sim))
        assert chunk.success[0]
        assert chunk.terminated[0] == ends
        assert chunk.steps[0] == (2 if ends else 4)
        assert sim.live.tolist() == ([] if ends else [0])


def test_only_recorded_rows_and_the_ends_of_chunks_are_drawn():
    with SubprocessSim(settings(count=2)) as sim:
        sim.reset(specs("walk", "walk"))
        chunk = sim.step_chunk(zeros(sim, 3), record=[1])
        assert list(chunk.frames) == [1]
        np.testing.assert_array_equal(chunk.frames[1][:, 0, 0, 0], [1, 2, 3])
        np.testing.assert_array_equal(sim.render(0), np.full((6, 8, 3), 3))
    with SubprocessSim(settings(images=False)) as sim:
        assert sim.image_size is None
        assert sim.reset(specs("walk")).observation.images is None
        assert sim.step_chunk(zeros(sim), record=[0]).frames[0].shape == (4, 6, 8, 3)


def test_three_workers_break_down_and_the_others_continue(hanging):
    tasks = ("die", "walk", "hang", "raise", "walk")
    with SubprocessSim(settings(count=5, call_timeout_s=1.5)) as sim:
        old = sim.processes()
        sim.reset(specs(*tasks))
        chunk = sim.step_chunk(zeros(sim))
        assert chunk.failed.tolist() == [True, False, True, True, False]
        assert np.isnan(chunk.rewards[chunk.failed]).all()
        np.testing.assert_array_equal(chunk.rewards[~chunk.failed], [[1, 2, 3, 4]] * 2)
        assert chunk.steps.tolist() == [0, 4, 0, 0, 4]
        assert not chunk.success.any()
        assert not (chunk.terminated | chunk.truncated).any()
        assert (chunk.observation.state[chunk.failed] == 0).all()
        assert chunk.reasons[0].startswith("crashed: killed by SIGKILL")
        assert chunk.reasons[2].startswith("hung: no reply within 1.5 s")
        assert chunk.reasons[3] == "raised: ValueError: the hinge broke"
        assert sim.live.tolist() == [1, 4]
        expected = {"crashed": 1, "hung": 1, "memory": 0, "raised": 1, "restarted": 3, "dropped": 3, "diverged": 0}
        assert sim.counts == expected
        assert not any(is_alive(old[row]) for row in (0, 2, 3))
        assert sim.step_chunk(zeros(sim)).rewards.tolist() == [[5, 6, 7, 8]] * 2
        again = sim.reset(specs(*["walk"] * 5))
        assert not again.failed.any()
        assert sim.counts == expected
        assert {old[1], old[4]} <= set(sim.processes())
        running = sim.processes()
    assert len(running) == 5
    assert not any(map(is_alive, running))


@pytest.mark.parametrize("task", ["lock", "stop"])
def test_a_worker_without_heartbeat_is_given_up_before_the_time_of_a_call_is_over(task, hanging):
    with SubprocessSim(settings(call_timeout_s=1000.0, heartbeat_timeout_s=1.0)) as sim:
        sim.reset(specs(task))
        chunk = sim.step_chunk(zeros(sim))
        assert chunk.reasons[0].startswith("hung: no heartbeat for 1 s")
        assert sim.counts["hung"] == 1


def test_a_slow_step_with_a_heartbeat_does_not_count_as_hung():
    with SubprocessSim(settings(call_timeout_s=6.2, heartbeat_timeout_s=5.0)) as sim:
        sim.reset(specs("hang"))
        start = time.monotonic()
        chunk = sim.step_chunk(zeros(sim))
        assert time.monotonic() - start >= 6.2
        assert chunk.reasons[0].startswith("hung: no reply within 6.2 s")


def test_prints_do_not_touch_the_messages(calm):
    calm.reset(specs("chatty"))
    chunk = calm.step_chunk(zeros(calm))
    assert not chunk.failed.any()
    np.testing.assert_array_equal(chunk.rewards, [[1, 2, 3, 4]])


def test_a_state_that_is_not_finite_has_diverged_and_keeps_its_process():
    with SubprocessSim(settings()) as sim:
        sim.reset(specs("nan"))
        before = sim.processes()
        chunk = sim.step_chunk(zeros(sim))
        assert chunk.failed[0]
        assert np.isnan(chunk.rewards).all()
        assert chunk.reasons[0].startswith("diverged: entry 0 of the state is nan at control step 3")
        assert np.isfinite(chunk.observation.state).all()
        assert sim.counts["diverged"] == sim.counts["dropped"] == 1
        assert sim.counts["restarted"] == 0
        assert not sim.reset(specs("walk")).failed.any()
        assert sim.processes() == before


def test_a_reset_is_tried_again_in_a_fresh_process(tmp_path):
    with SubprocessSim(settings(count=2, kwargs={"marks": str(tmp_path)})) as sim:
        result = sim.reset(specs("walk", "flaky"))
        assert not result.failed.any()
        assert len((tmp_path / "flaky").read_text().split()) == 2
        assert {name: count for name, count in sim.counts.items() if count} == {"crashed": 1, "restarted": 1}


def test_an_episode_that_never_begins_is_dropped_and_counted():
    with SubprocessSim(settings(count=2, reset_retries=1)) as sim:
        result = sim.reset(specs("walk", "stubborn"))
        assert result.failed.tolist() == [False, True]
        assert result.reasons[1] == "raised: RuntimeError: cannot begin, ever"
        assert sim.live.tolist() == [0]
        assert sim.counts["raised"] == 2
        assert sim.counts["dropped"] == 1


def test_restarts_without_end_stop_the_run_with_the_last_traceback():
    message = r"3 restarts without one completed episode(.|\n)*in reset\n(.|\n)*cannot begin, ever"
    with SubprocessSim(settings(reset_retries=9, max_restarts=2)) as sim, pytest.raises(RunError, match=message):
        sim.reset(specs("stubborn"))


def test_as_many_restarts_as_workers_are_one_incident():
    with SubprocessSim(settings(count=3, reset_retries=2, max_restarts=1)) as sim:
        sim.reset(specs("walk", "walk", "walk"))
        for number in sim.processes():
            os.kill(number, signal.SIGKILL)
        assert sim.step_chunk(zeros(sim)).failed.all()
        assert not sim.reset(specs("walk", "walk", "walk")).failed.any()
        assert sim.counts["restarted"] == 3


def test_an_episode_that_ends_forgives_the_restarts_before_it():
    with SubprocessSim(settings(kwargs={"horizon": 4}, reset_retries=1, max_restarts=2)) as sim:
        for _ in range(2):
            assert sim.reset(specs("stubborn")).failed[0]
            assert not sim.reset(specs("walk")).failed[0]
            assert sim.step_chunk(zeros(sim)).truncated[0]


def test_a_worker_that_was_killed_between_two_calls_costs_one_episode():
    with SubprocessSim(settings(count=2)) as sim:
        sim.reset(specs("walk", "walk"))
        os.kill(sim.processes()[1], signal.SIGKILL)
        chunk = sim.step_chunk(zeros(sim))
        assert chunk.failed.tolist() == [False, True]
        os.kill(sim.processes()[0], signal.SIGKILL)
        assert not sim.reset(specs("walk", "walk")).failed.any()
        assert sim.counts["crashed"] == sim.counts["restarted"] == 2
        assert sim.counts["dropped"] == 1


def test_what_a_worker_started_ends_with_it(tmp_path):
    with SubprocessSim(settings(kwargs={"marks": str(tmp_path)})) as sim:
        sim.reset(specs("parent"))
        assert sim.step_chunk(zeros(sim)).failed[0]
        child = int((tmp_path / "child").read_text())
        wait_until(lambda: not is_alive(child))


def test_environments_are_closed_where_they_can_be(tmp_path):
    with SubprocessSim(settings(count=2, kwargs={"marks": str(tmp_path)})) as sim:
        pids = sim.processes()
    assert sorted(map(int, (tmp_path / "closed").read_text().split())) == sorted(pids)


@pytest.mark.parametrize("ending", ["", "os.kill(os.getpid(), signal.SIGKILL)", "raise SystemExit(3)"])
def test_no_worker_outlives_its_owner(ending):
    program = f"""
import os, signal, sys, threading, time
from robotics.sim import subprocess_sim
from robotics.sim.episodes import EpisodeSpec
subprocess_sim.find_backend = lambda preferred: None
sim = subprocess_sim.SubprocessSim(subprocess_sim.SubprocessSettings({str(FAKES)!r} + ":make", workers=2))
sim.reset([EpisodeSpec("hang", "", 0), EpisodeSpec("walk", "", 0)])
print(*sim.processes(), flush=True)
threading.Thread(target=sim.step_chunk, args=([[[0, 0]] * 4] * 2,), daemon=True).start()
time.sleep(0.3)
{ending}
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    pids = [int(pid) for pid in done.stdout.split()]
    assert len(pids) == 2, done.stderr
    wait_until(lambda: not any(map(is_alive, pids)))


@pytest.mark.parametrize(
    ("function", "error", "message"),
    [
        ("broken", RunError, r"did not start; it raised: OSError: no licence found(.|\n)*line \d+, in broken"),
        ("unusable", UserError, "^set ARM_FOLDER to where the arms lie$"),
        ("dies", RunError, "did not start; it crashed: ended with code 7"),
        ("missing", UserError, "has no 'missing'; "),
    ],
)
def test_what_does_not_start_says_why(function, error, message):
    with pytest.raises(error, match=message):
        SubprocessSim(settings(function, count=2))


def test_a_state_of_another_shape_fails_its_row():
    with SubprocessSim(settings("misshapen")) as sim:
        assert not sim.reset(specs("walk")).failed[0]
        assert (
            sim.step_chunk(zeros(sim)).reasons[0].startswith("raised: ValueError: the state has 3 entries at control")
        )


def test_the_same_task_goes_to_the_worker_that_has_it(calm):
    first = calm._assign(["walk", "nan"])
    assert calm._assign(["nan", "walk"]) == first[::-1]
    assert calm._assign(["nan"]) == first[1:]


def test_the_expert_of_the_environment_is_asked(calm):
    calm.reset(specs("walk", "walk"))
    calm.step_chunk(zeros(calm, 3))
    np.testing.assert_allclose(calm.expert_actions(), np.full((2, 2), 0.03))


@pytest.mark.parametrize(
    ("episode", "message"),
    [
        (EpisodeSpec("fly", "", 0), r"unknown task 'fly'; tasks\(\) has: chatty, die"),
        (EpisodeSpec("walk", "", 0, "test"), "unknown split 'test'; available: held_out, train"),
        (EpisodeSpec("walk", "", 50), "layout 50 of train does not exist; available: 0 to 49"),
        (EpisodeSpec("walk", "", -1), "layout -1 of train does not exist"),
    ],
)
def test_an_episode_that_does_not_exist_is_refused(calm, episode, message):
    with pytest.raises(UserError, match=message):
        calm.reset([episode])
    with pytest.raises(UserError, match="3 episodes for 2 workers"):
        calm.reset([episode] * 3)


def test_actions_that_do_not_fit_are_refused_and_harm_nothing():
    with SubprocessSim(settings(kwargs={"draws": False}, images=False)) as sim:
        with pytest.raises(UserError, match="all episodes have ended"):
            sim.step_chunk(np.zeros((0, 1, 2)))
        sim.reset(specs("walk"))
        for shape in [(1, 2), (2, 1, 2), (1, 0, 2), (1, 1, 3)]:
            with pytest.raises(UserError, match="actions have the shape"):
                sim.step_chunk(np.zeros(shape))
        with pytest.raises(UserError, match="of control step 0 in row 0 is nan"):
            sim.step_chunk(np.full((1, 1, 2), np.nan))
        with pytest.raises(UserError, match="does not render images"):
            sim.step_chunk(zeros(sim), record=[0])
        assert sim.step_chunk(zeros(sim)).rewards.tolist() == [[1, 2, 3, 4]]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"count": 0}, "workers is 0"),
        ({"reset_retries": -1}, "reset_retries is -1"),
        ({"call_timeout_s": 0.0}, "call_timeout_s is 0.0"),
        ({"kwargs": {"x": object()}}, "kwargs .* must be JSON"),
    ],
)
def test_settings_out_of_range_are_refused(options, message):
    with pytest.raises(UserError, match=message):
        SubprocessSim(settings(**options))


def test_a_closed_simulator_does_not_begin_again():
    sim = SubprocessSim(settings())
    sim.close()
    sim.close()
    with pytest.raises(RuntimeError, match="SubprocessSim has been closed"):
        sim.reset(specs("walk"))


def test_the_renderer_is_chosen_once_and_handed_on(monkeypatch):
    monkeypatch.setattr(subprocess_sim.importlib.util, "find_spec", lambda name: object())
    found = subprocess_sim.Backend
    monkeypatch.setattr(subprocess_sim, "find_backend", lambda preferred: found(preferred or "osmesa", "test 1"))
    with SubprocessSim(settings()) as sim:
        assert sim.describe()["gl"] == "osmesa"
        assert sim.describe()["renderer"] == "osmesa: test 1"
    with SubprocessSim(settings(renderer="egl")) as sim:
        assert sim.describe()["gl"] == "egl"


def test_seeds_of_different_layouts_and_splits_differ():
    episodes = [EpisodeSpec("a", "", layout, split) for layout in range(50) for split in ("train", "held_out", "all")]
    assert len({layout_seed(episode) for episode in episodes}) == len(episodes)
    assert layout_seed(EpisodeSpec("a", "", 7)) == 7


class TestGymnasium:
    gymnasium = pytest.importorskip("gymnasium", reason="needs pip install 'mmrl-suite[sim]'")

    def test_an_id_runs_as_it_does_alone(self):
        sim_settings = SubprocessSettings("gymnasium:make", {"id": "Pendulum-v1"}, images=False, workers=1)
        actions = np.random.default_rng(0).uniform(-1, 1, (1, 5, 1))
        with SubprocessSim(sim_settings) as sim:
            assert sim.horizon == 200
            first = sim.reset([EpisodeSpec("Pendulum-v1", "", 3)])
            chunk = sim.step_chunk(actions)
        env = self.gymnasium.make("Pendulum-v1")
        observation, _ = env.reset(seed=3)
        np.testing.assert_array_equal(first.observation.state[0], observation)
        rewards = []
        for action in actions[0]:
            observation, reward, *_ = env.step((2.0 * action).astype(np.float32))
            rewards.append(reward)
        np.testing.assert_allclose(chunk.rewards[0], rewards)
        np.testing.assert_allclose(chunk.observation.state[0], observation)

    def test_discrete_actions_are_refused(self):
        with pytest.raises(UserError, match=r"the action space is Discrete\(2\); only a Box"):
            SubprocessSim(SubprocessSettings("gymnasium:make", {"id": "CartPole-v1"}, images=False, workers=1))
