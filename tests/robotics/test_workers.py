import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from mmrl.errors import RunError, UserError
from robotics.sim import workers
from robotics.sim.episodes import EpisodeSpec
from robotics.sim.workers import WorkerPool, WorkerSettings, layout_seed

FAKES = Path(__file__).with_name("fake_envs.py")


@pytest.fixture(autouse=True)
def _no_renderer(monkeypatch):
    """The fakes draw with numpy; finding a renderer takes seconds."""
    monkeypatch.setattr(workers, "find_backend", lambda preferred: None)


@pytest.fixture(scope="module")
def calm():
    """Two workers for tests that harm none."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(workers, "find_backend", lambda preferred: None)
        with WorkerPool(settings(count=2)) as pool:
            yield pool


def settings(function: str = "make", count: int = 1, **options) -> WorkerSettings:
    limits = {"call_timeout_s": 20.0, "heartbeat_timeout_s": 20.0, "start_timeout_s": 30.0}
    return WorkerSettings(f"{FAKES}:{function}", workers=count, **{**limits, **options})


def specs(*tasks: str, layout: int = 0) -> list[EpisodeSpec]:
    return [EpisodeSpec(task, "", layout + number) for number, task in enumerate(tasks)]


def zeros(pool: WorkerPool, length: int = 4) -> np.ndarray:
    return np.zeros((len(pool.live), length, pool.action_size))


def is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    # A grandchild whose parents are dead stays a zombie where nobody adopts it.
    return "Z" in Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]


def test_episodes_run_side_by_side_to_the_horizon():
    with WorkerPool(settings(count=3, kwargs={"horizon": 6})) as pool:
        assert (pool.action_size, pool.state_size, pool.image_size, pool.horizon, pool.capacity) == (2, 4, (6, 8), 6, 3)
        assert pool.tasks()["walk"] == "walk on"
        first = pool.reset(specs("walk", "walk", layout=4))
        assert first.rewards.shape == (2, 0)
        np.testing.assert_array_equal(first.observation.state, [[0, 0, 4, 0], [0, 0, 5, 0]])
        actions = np.zeros((2, 4, 2))
        actions[0], actions[1] = 0.25, 2.0  # the second is clipped to 1
        chunk = pool.step_chunk(actions)
        np.testing.assert_array_equal(chunk.rewards, [[1, 2, 3, 4]] * 2)
        np.testing.assert_array_equal(chunk.observation.state, [[4, 0, 4, 2], [4, 0, 5, 8]])
        assert (chunk.observation.images == 4).all()
        assert not (chunk.terminated | chunk.truncated | chunk.failed | chunk.success).any()
        chunk = pool.step_chunk(actions)
        np.testing.assert_array_equal(chunk.rewards, [[5, 6, 0, 0]] * 2)
        np.testing.assert_array_equal(chunk.steps, [2, 2])
        assert chunk.truncated.all()
        assert not chunk.terminated.any()
        assert len(pool.live) == 0


@pytest.mark.parametrize("ends", [True, False])
def test_success_ends_an_episode_where_it_is_meant_to(ends):
    with WorkerPool(settings(kwargs={"success_at": 2}, end_at_success=ends)) as pool:
        pool.reset(specs("walk"))
        chunk = pool.step_chunk(zeros(pool))
        assert chunk.success[0]
        assert chunk.terminated[0] == ends
        assert chunk.steps[0] == (2 if ends else 4)
        assert pool.live.tolist() == ([] if ends else [0])


def test_only_recorded_rows_and_the_ends_of_chunks_are_drawn():
    with WorkerPool(settings(count=2)) as pool:
        pool.reset(specs("walk", "walk"))
        chunk = pool.step_chunk(zeros(pool, 3), record=[1])
        assert list(chunk.frames) == [1]
        np.testing.assert_array_equal(chunk.frames[1][:, 0, 0, 0], [1, 2, 3])
        np.testing.assert_array_equal(pool.render(0), np.full((6, 8, 3), 3))
    with WorkerPool(settings(images=False)) as pool:
        assert pool.image_size is None
        assert pool.reset(specs("walk")).observation.images is None
        assert pool.step_chunk(zeros(pool), record=[0]).frames[0].shape == (4, 6, 8, 3)


def test_three_workers_break_down_and_the_others_go_on():
    tasks = ("die", "walk", "hang", "raise", "walk")
    with WorkerPool(settings(count=5, call_timeout_s=1.5)) as pool:
        old = pool.processes()
        pool.reset(specs(*tasks))
        start = time.monotonic()
        chunk = pool.step_chunk(zeros(pool))
        assert time.monotonic() - start < 6.0
        assert chunk.failed.tolist() == [True, False, True, True, False]
        assert np.isnan(chunk.rewards[chunk.failed]).all()
        np.testing.assert_array_equal(chunk.rewards[~chunk.failed], [[1, 2, 3, 4]] * 2)
        assert chunk.steps.tolist() == [0, 4, 0, 0, 4]
        assert not chunk.success.any()
        assert not (chunk.terminated | chunk.truncated).any()
        assert (chunk.observation.state[chunk.failed] == 0).all()
        assert chunk.reasons[0].startswith("crashed: killed by SIGKILL")
        assert chunk.reasons[2].startswith("hung: no answer in 1.5 s")
        assert chunk.reasons[3] == "raised: ValueError: the hinge broke"
        assert pool.live.tolist() == [1, 4]
        expected = {"crashed": 1, "hung": 1, "raised": 1, "restarted": 3, "dropped": 3, "diverged": 0}
        assert pool.counts == expected
        assert all(is_gone(old[row]) for row in (0, 2, 3))
        assert pool.step_chunk(zeros(pool)).rewards.tolist() == [[5, 6, 7, 8]] * 2
        again = pool.reset(specs(*["walk"] * 5))
        assert not again.failed.any()
        assert pool.counts == expected
        assert {old[1], old[4]} <= set(pool.processes())
        running = pool.processes()
    assert len(running) == 5
    assert all(is_gone(pid) for pid in running)


@pytest.mark.parametrize("task", ["lock", "stop"])
def test_a_worker_without_heartbeat_is_given_up_before_the_time_of_a_call_is_over(task):
    with WorkerPool(settings(call_timeout_s=100.0, heartbeat_timeout_s=1.0)) as pool:
        pool.reset(specs(task))
        chunk = pool.step_chunk(zeros(pool))
        assert chunk.reasons[0].startswith("hung: no sign of life for 1 s")
        assert pool.counts["hung"] == 1


def test_a_slow_step_that_shows_life_is_no_hang():
    with WorkerPool(settings(call_timeout_s=2.2, heartbeat_timeout_s=1.6)) as pool:
        pool.reset(specs("hang"))
        start = time.monotonic()
        chunk = pool.step_chunk(zeros(pool))
        assert time.monotonic() - start >= 2.2
        assert chunk.reasons[0].startswith("hung: no answer in 2.2 s")


def test_prints_do_not_touch_the_messages(calm):
    calm.reset(specs("chatty"))
    chunk = calm.step_chunk(zeros(calm))
    assert not chunk.failed.any()
    np.testing.assert_array_equal(chunk.rewards, [[1, 2, 3, 4]])


def test_a_state_that_is_not_finite_has_diverged_and_keeps_its_process():
    with WorkerPool(settings()) as pool:
        pool.reset(specs("nan"))
        before = pool.processes()
        chunk = pool.step_chunk(zeros(pool))
        assert chunk.failed[0]
        assert np.isnan(chunk.rewards).all()
        assert chunk.reasons[0] == "diverged: state is not finite"
        assert np.isfinite(chunk.observation.state).all()
        assert pool.counts["diverged"] == pool.counts["dropped"] == 1
        assert pool.counts["restarted"] == 0
        assert not pool.reset(specs("walk")).failed.any()
        assert pool.processes() == before


def test_a_reset_is_tried_again_in_a_fresh_process(tmp_path):
    with WorkerPool(settings(count=2, kwargs={"marks": str(tmp_path)})) as pool:
        result = pool.reset(specs("walk", "flaky"))
        assert not result.failed.any()
        assert len((tmp_path / "flaky").read_text().split()) == 2
        assert pool.counts == {"crashed": 1, "hung": 0, "raised": 0, "restarted": 1, "dropped": 0, "diverged": 0}


def test_an_episode_that_never_begins_is_dropped_and_counted():
    with WorkerPool(settings(count=2, reset_retries=1)) as pool:
        result = pool.reset(specs("walk", "stubborn"))
        assert result.failed.tolist() == [False, True]
        assert result.reasons[1] == "raised: RuntimeError: cannot begin, ever"
        assert pool.live.tolist() == [0]
        assert pool.counts["raised"] == 2
        assert pool.counts["dropped"] == 1


def test_restarts_without_end_stop_the_run_with_the_last_traceback():
    message = r"3 restarts without one episode(.|\n)*in reset\n(.|\n)*cannot begin, ever"
    with WorkerPool(settings(reset_retries=9, max_restarts=2)) as pool, pytest.raises(RunError, match=message):
        pool.reset(specs("stubborn"))


def test_as_many_restarts_as_workers_are_one_incident():
    with WorkerPool(settings(count=3, reset_retries=2, max_restarts=1)) as pool:
        pool.reset(specs("walk", "walk", "walk"))
        for number in pool.processes():
            os.kill(number, signal.SIGKILL)
        assert pool.step_chunk(zeros(pool)).failed.all()
        assert not pool.reset(specs("walk", "walk", "walk")).failed.any()
        assert pool.counts["restarted"] == 3


def test_an_episode_that_ends_forgives_the_restarts_before_it():
    with WorkerPool(settings(kwargs={"horizon": 4}, reset_retries=1, max_restarts=2)) as pool:
        for _ in range(2):
            assert pool.reset(specs("stubborn")).failed[0]
            assert not pool.reset(specs("walk")).failed[0]
            assert pool.step_chunk(zeros(pool)).truncated[0]


def test_a_worker_that_was_killed_between_two_calls_costs_one_episode():
    with WorkerPool(settings(count=2)) as pool:
        pool.reset(specs("walk", "walk"))
        os.kill(pool.processes()[1], signal.SIGKILL)
        chunk = pool.step_chunk(zeros(pool))
        assert chunk.failed.tolist() == [False, True]
        os.kill(pool.processes()[0], signal.SIGKILL)
        assert not pool.reset(specs("walk", "walk")).failed.any()
        assert pool.counts["crashed"] == pool.counts["restarted"] == 2
        assert pool.counts["dropped"] == 1


def test_what_a_worker_started_ends_with_it(tmp_path):
    with WorkerPool(settings(kwargs={"marks": str(tmp_path)})) as pool:
        pool.reset(specs("parent"))
        assert pool.step_chunk(zeros(pool)).failed[0]
        child = int((tmp_path / "child").read_text())
        deadline = time.monotonic() + 5.0
        while not is_gone(child) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert is_gone(child)


def test_environments_are_closed_where_they_can_be(tmp_path):
    with WorkerPool(settings(count=2, kwargs={"marks": str(tmp_path)})) as pool:
        pids = pool.processes()
    assert sorted(map(int, (tmp_path / "closed").read_text().split())) == sorted(pids)


@pytest.mark.parametrize("ending", ["", "os.kill(os.getpid(), signal.SIGKILL)", "raise SystemExit(3)"])
def test_no_worker_outlives_its_owner(ending):
    program = f"""
import os, signal, sys, threading, time
from robotics.sim import workers
from robotics.sim.episodes import EpisodeSpec
workers.find_backend = lambda preferred: None
pool = workers.WorkerPool(workers.WorkerSettings({str(FAKES)!r} + ":make", workers=2))
pool.reset([EpisodeSpec("hang", "", 0), EpisodeSpec("walk", "", 0)])
print(*pool.processes(), flush=True)
threading.Thread(target=pool.step_chunk, args=([[[0, 0]] * 4] * 2,), daemon=True).start()
time.sleep(0.3)
{ending}
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    pids = [int(pid) for pid in done.stdout.split()]
    assert len(pids) == 2, done.stderr
    deadline = time.monotonic() + 5.0
    while not all(map(is_gone, pids)) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert all(map(is_gone, pids))


@pytest.mark.parametrize(
    ("function", "error", "message"),
    [
        ("broken", RunError, r"did not start; it raised: OSError: no licence found(.|\n)*line \d+, in broken"),
        ("unusable", UserError, "^set ARM_FOLDER to where the arms lie$"),
        ("dies", RunError, "did not start; it crashed: ended with code 7"),
        ("missing", UserError, "there is no 'missing' in"),
    ],
)
def test_what_does_not_start_says_why(function, error, message):
    with pytest.raises(error, match=message):
        WorkerPool(settings(function, count=2))


def test_a_state_of_another_shape_fails_its_row():
    with WorkerPool(settings("misshapen")) as pool:
        assert not pool.reset(specs("walk")).failed[0]
        assert pool.step_chunk(zeros(pool)).reasons[0] == "raised: state has the shape (3,); expected (4,)"


def test_the_same_task_goes_to_the_worker_that_has_it(calm):
    first = calm._assign(specs("walk", "nan"))
    assert calm._assign(specs("nan", "walk")) == first[::-1]
    assert calm._assign(specs("nan")) == first[1:]


def test_the_expert_of_the_environment_is_asked(calm):
    calm.reset(specs("walk", "walk"))
    calm.step_chunk(zeros(calm, 3))
    np.testing.assert_allclose(calm.expert_actions(), np.full((2, 2), 0.03))


@pytest.mark.parametrize(
    ("episode", "message"),
    [
        (EpisodeSpec("fly", "", 0), "no task 'fly'; there are: chatty, die"),
        (EpisodeSpec("walk", "", 0, "test"), "no split 'test'; there are: held_out, train"),
        (EpisodeSpec("walk", "", 50), "no layout 50 of train; there are 0 to 49"),
        (EpisodeSpec("walk", "", -1), "no layout -1"),
    ],
)
def test_an_episode_that_does_not_exist_is_refused(calm, episode, message):
    with pytest.raises(UserError, match=message):
        calm.reset([episode])
    with pytest.raises(UserError, match="3 episodes for 2 workers"):
        calm.reset([episode] * 3)


def test_actions_that_do_not_fit_are_refused_and_harm_nothing():
    with WorkerPool(settings(kwargs={"draws": False}, images=False)) as pool:
        with pytest.raises(UserError, match="no row is live"):
            pool.step_chunk(np.zeros((0, 1, 2)))
        pool.reset(specs("walk"))
        for shape in [(1, 2), (2, 1, 2), (1, 0, 2), (1, 1, 3)]:
            with pytest.raises(UserError, match="actions have the shape"):
                pool.step_chunk(np.zeros(shape))
        with pytest.raises(UserError, match=r"rows \[0\] are not finite"):
            pool.step_chunk(np.full((1, 1, 2), np.nan))
        with pytest.raises(UserError, match="does not draw"):
            pool.step_chunk(zeros(pool), record=[0])
        assert pool.step_chunk(zeros(pool)).rewards.tolist() == [[1, 2, 3, 4]]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"count": 0}, "workers is 0"),
        ({"reset_retries": -1}, "reset_retries is -1"),
        ({"call_timeout_s": 0.0}, "call_timeout_s is 0.0"),
        ({"kwargs": {"x": object()}}, "kwargs .* must be what JSON can say"),
    ],
)
def test_settings_out_of_range_are_refused(options, message):
    with pytest.raises(UserError, match=message):
        WorkerPool(settings(**options))


def test_a_closed_pool_does_not_begin_again():
    pool = WorkerPool(settings())
    pool.close()
    pool.close()
    with pytest.raises(RuntimeError, match="closed"):
        pool.reset(specs("walk"))


def test_the_renderer_is_chosen_once_and_handed_on(monkeypatch):
    monkeypatch.setattr(workers.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(workers, "find_backend", lambda preferred: workers.Backend(preferred or "osmesa", "test 1"))
    with WorkerPool(settings()) as pool:
        assert pool.describe()["gl"] == "osmesa"
        assert pool.describe()["renderer"] == "osmesa: test 1"
    with WorkerPool(settings(renderer="egl")) as pool:
        assert pool.describe()["gl"] == "egl"


def test_seeds_of_different_layouts_and_splits_differ():
    episodes = [EpisodeSpec("a", "", layout, split) for layout in range(50) for split in ("train", "held_out", "all")]
    assert len({layout_seed(episode) for episode in episodes}) == len(episodes)
    assert layout_seed(EpisodeSpec("a", "", 7)) == 7


class TestGymnasium:
    gymnasium = pytest.importorskip("gymnasium", reason="needs pip install 'mmrl-suite[sim]'")

    def test_an_id_runs_as_it_does_without_the_pool(self):
        pool_settings = WorkerSettings("gymnasium:make", {"id": "Pendulum-v1"}, images=False, workers=1)
        actions = np.random.default_rng(0).uniform(-1, 1, (1, 5, 1))
        with WorkerPool(pool_settings) as pool:
            assert pool.horizon == 200
            first = pool.reset([EpisodeSpec("Pendulum-v1", "", 3)])
            chunk = pool.step_chunk(actions)
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
        with pytest.raises(UserError, match=r"actions are Discrete\(2\); only a Box"):
            WorkerPool(WorkerSettings("gymnasium:make", {"id": "CartPole-v1"}, images=False, workers=1))
