"""`PoolVectorEnv` step by step against Gymnasium's own vector environments, and their failures."""

import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest

gymnasium = pytest.importorskip("gymnasium", reason="needs pip install 'mmrl-suite[sim]'")
from gymnasium.error import ClosedEnvironmentError  # noqa: E402
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv  # noqa: E402

from mmrl.errors import RunError, UserError  # noqa: E402
from mmrl.workers import PoolVectorEnv, VectorSettings  # noqa: E402
from mmrl.workers.vector import board as boards  # noqa: E402
from tests.workers.vector_envs import Silent, Walk  # noqa: E402

ENVS = Path(__file__).with_name("vector_envs.py")
WALK, SILENT = f"{ENVS}:walk", f"{ENVS}:silent"
TWO = VectorSettings(workers=2)


def same(ours, theirs, where=""):
    """Equal values, types of containers, dtypes and shapes."""
    assert type(ours) is type(theirs), where
    if isinstance(ours, dict):
        assert ours.keys() == theirs.keys(), where
        for key in ours:
            same(ours[key], theirs[key], f"{where}/{key}")
    elif isinstance(ours, (tuple, list)):
        assert len(ours) == len(theirs), where
        for place, pair in enumerate(zip(ours, theirs, strict=True)):
            same(*pair, f"{where}/{place}")
    elif isinstance(ours, np.ndarray):
        assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape), where
        if ours.dtype == object:
            same(list(ours), list(theirs), where)
        else:
            np.testing.assert_array_equal(ours, theirs, err_msg=where)
    else:
        assert ours == theirs, where


def actions(count, rows=3, seed=0):
    return np.random.default_rng(seed).uniform(-1, 1, (count, rows, 2)).astype(np.float32)


@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP])
@pytest.mark.parametrize(("workers", "nested"), [(3, False), (2, True)])
def test_steps_are_those_of_gymnasium(mode, workers, nested, closing):
    theirs = SyncVectorEnv([partial(Walk, nested=nested)] * 3, autoreset_mode=mode)
    settings = VectorSettings(workers=workers)
    ours = closing(PoolVectorEnv(WALK, 3, kwargs={"nested": nested}, autoreset_mode=mode, settings=settings))
    assert ours.metadata == theirs.metadata
    assert (ours.observation_space, ours.action_space) == (theirs.observation_space, theirs.action_space)
    same(ours.reset(seed=[3, 8, 5]), theirs.reset(seed=[3, 8, 5]))
    same(ours.reset(seed=7, options={"shift": 0.5}), theirs.reset(seed=7, options={"shift": 0.5}))
    ends = 0
    for action in actions(14):
        step = ours.step(action)
        same(step, theirs.step(action))
        ends += int((step[2] | step[3]).sum())
    assert ends >= 6
    assert ours.counts["raised"] == 0


def test_without_autoreset_the_mask_chooses_who_begins():
    mode = AutoresetMode.DISABLED
    theirs, ours = SyncVectorEnv([Walk] * 3, autoreset_mode=mode), PoolVectorEnv(WALK, 3, autoreset_mode=mode)
    same(ours.reset(seed=1), theirs.reset(seed=1))
    for action in actions(12):
        step = ours.step(action)
        same(step, theirs.step(action))
        over = step[2] | step[3]
        if over.any():
            with pytest.raises(UserError, match="no episode is running in environment"):
                ours.step(action)
            options = {"reset_mask": over}
            same(ours.reset(options=options), theirs.reset(options={"reset_mask": over.copy()}))
            assert "reset_mask" in options
    ours.close()


def test_discrete_actions_and_tuples_are_those_of_processes():
    theirs, ours = AsyncVectorEnv([Silent] * 2), PoolVectorEnv(SILENT, 2)
    same(ours.reset(seed=4), theirs.reset(seed=4))
    for number in range(7):
        same(ours.step(np.array([number % 3, -1])), theirs.step(np.array([number % 3, -1])))
    theirs.close()
    ours.close()


@pytest.mark.parametrize("breaks", ["raise", "die", "hang", "reward"])
@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP])
def test_an_environment_that_breaks_ends_its_own_episode(breaks, mode, closing, hanging):
    settings = VectorSettings(workers=2, step_timeout_s=1.5 if breaks == "hang" else 60.0)
    kwargs = [{"limit": 30}, {"limit": 30, "breaks": breaks}]
    envs = closing(PoolVectorEnv(WALK, 2, kwargs=kwargs, autoreset_mode=mode, settings=settings))
    alone = Walk(limit=30)
    envs.reset(seed=0)
    alone.reset(seed=0)
    before = None
    for _ in range(3):
        observations, rewards, terminations, truncations, infos = envs.step(np.zeros((2, 2), np.float32))
        before, last = observations, before
    kind = {"raise": "raised", "die": "crashed", "hang": "hung", "reward": "diverged"}[breaks]
    told = infos["final_info"] if mode is AutoresetMode.SAME_STEP else infos
    assert list(told["failed"]) == [False, True]
    assert told["failure"][1].startswith(f"{kind}: ")
    assert np.isnan(rewards[1])
    assert (list(terminations), list(truncations)) == ([False, False], [False, True])
    shown = infos["final_obs"][1] if mode is AutoresetMode.SAME_STEP else observations[1]
    np.testing.assert_array_equal(shown, last[1])
    assert envs.counts["restarted"] == (breaks != "reward")
    if mode is AutoresetMode.NEXT_STEP:
        observations, rewards, _, truncations, infos = envs.step(np.zeros((2, 2), np.float32))
        assert (rewards[1], truncations[1]) == (0.0, False)
    assert infos["begun"][1] == (breaks == "reward")
    # The other one has noticed nothing.
    for _ in range(3 if mode is AutoresetMode.SAME_STEP else 4):
        expected = alone.step(np.zeros(2, np.float32))[0]
    np.testing.assert_array_equal(observations[0], expected)
    assert sum(envs.failures.counts.values()) == 1


def test_a_fresh_process_is_seeded_and_a_loop_may_want_a_number_for_the_reward():
    found = []
    for _ in range(2):
        settings = VectorSettings(failed_reward=-1.0)
        envs = PoolVectorEnv(WALK, 1, kwargs={"breaks": "raise"}, autoreset_mode="SameStep", settings=settings)
        envs.reset(seed=5)
        steps = [envs.step(np.zeros((1, 2), np.float32)) for _ in range(3)]
        assert steps[2][1][0] == -1.0
        found.append(steps[2][0])
        envs.close()
    np.testing.assert_array_equal(*found)


def test_methods_attributes_and_images_of_the_environments():
    envs = PoolVectorEnv(WALK, 3, kwargs={"render_mode": "rgb_array"}, settings=TWO)
    envs.reset(seed=0)
    envs.step(np.zeros((3, 2), np.float32))
    assert envs.call("add", 2) == (3, 3, 3)
    envs.set_attr("limit", [7, 8, 9])
    assert envs.get_attr("limit") == (7, 8, 9)
    same(envs.render(), tuple(np.ones((3, 2, 2, 3), np.uint8)))
    assert len(envs.processes()) == 2
    envs.close()
    envs.close()
    with pytest.raises(ClosedEnvironmentError):
        envs.step(np.zeros((3, 2), np.float32))


def test_requests_that_do_not_fit_are_refused_by_name(closing):
    envs = closing(PoolVectorEnv(WALK, 2, settings=VectorSettings(workers=1)))
    with pytest.raises(UserError, match="no episode is running in environment 0"):
        envs.step(np.zeros((2, 2)))
    envs.reset()
    for given, reason in [
        (np.zeros((2, 3)), r"action has shape \(2, 3\); expected \(2, 2\)"),
        (np.array([[0, 0], [np.nan, 0]]), "action of environment 1 is not finite"),
        (np.zeros((2, 2), complex), "dtype complex128"),
    ]:
        with pytest.raises(UserError, match=reason):
            envs.step(given)
    for mask in ([True, False], np.array([1, 0]), np.array([True]), np.array([False, False])):
        with pytest.raises(UserError, match="reset_mask"):
            envs.reset(options={"reset_mask": mask})
    with pytest.raises(UserError, match="seed is a list of 3; expected 2"):
        envs.reset(seed=[1, 2, 3])


@pytest.mark.parametrize(
    ("env", "options", "error", "reason"),
    [
        ("No-v0", {}, RunError, "No"),
        (f"{ENVS}:texty", {}, UserError, "observation is Text"),
        (WALK, {"kwargs": {"legs": 4}}, RunError, "unexpected keyword argument 'legs'"),
        (SILENT, {"kwargs": {"legs": 4}}, UserError, "options of .*silent: .*'legs'"),
        (WALK, {"kwargs": [{}]}, UserError, "kwargs has 1 entries; expected 2"),
        (WALK, {"kwargs": [{"nested": True}, {}]}, UserError, "environment 1 has the observation space"),
        (WALK, {"settings": VectorSettings(workers=0)}, ValueError, "workers"),
    ],
)
def test_what_cannot_start_says_why(env, options, error, reason):
    with pytest.raises(error, match=reason):
        PoolVectorEnv(env, 2, **options)


def test_something_in_info_that_cannot_be_sent_is_named(closing):
    envs = closing(PoolVectorEnv(f"{ENVS}:secretive", 1))
    envs.reset()
    with pytest.raises(UserError, match=r"info\['model'\] of the environment is a Secretive"):
        envs.step(np.zeros(1, int))


def test_a_board_is_seen_by_another_process():
    board = boards.Board.create([["a", "<f4", [3]], ["b", "|b1", [2, 2]]])
    board.arrays["a"][:] = [1, 2, 3]
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\nimport board\n"
        "b = board.Board.open(sys.argv[2], [['a', '<f4', [3]], ['b', '|b1', [2, 2]]])\n"
        "b.arrays['b'][1] = b.arrays['a'][:2] > 1\n"
    )
    folder = str(Path(boards.__file__).parent)
    subprocess.run([sys.executable, "-c", code, folder, board.path], check=True, timeout=60)
    assert board.arrays["b"].tolist() == [[False, False], [False, True]]


def test_the_last_information_of_an_episode_is_its_own_where_an_environment_keeps_one_dictionary():
    envs = PoolVectorEnv(f"{ENVS}:OneDictionary", 2, autoreset_mode=AutoresetMode.SAME_STEP, settings=TWO)
    envs.reset(seed=0)
    for _ in range(2):
        observations, _, terminations, _, infos = envs.step(np.zeros((2, 2), np.float32))
    envs.close()
    assert terminations.all()
    assert not observations.any()
    assert list(infos["final_info"]["age"]) == list(infos["final_info"]["inner"]["age"]) == [2, 2]
    assert [seen.tolist() for seen in infos["final_obs"]] == [[2, 2], [2, 2]]
    assert list(infos["age"]) == [0, 0]
