"""`TabletopVectorEnv` step by step against Gymnasium's `SyncVectorEnv` over `TabletopEnv`."""

from functools import partial

import numpy as np
import pytest
from gymnasium.error import ClosedEnvironmentError
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from mmrl.errors import UserError
from robotics import TabletopVectorEnv
from robotics.scenes.batch import BatchSettings
from robotics.scenes.control import ACTION_SIZE
from robotics.scenes.envs import TabletopEnv
from robotics.sim.episodes import EpisodeSpec
from tests.workers.test_vector import same

pytest.importorskip("mujoco", reason="needs pip install 'mmrl-suite[sim]'")
TASKS = ["reach", "push", "reach"]
SHORT = BatchSettings(image_size=None, reward="dense", horizon=4)


def without_dense_reward(infos):
    """TabletopEnv has the dense reward in info too, where it is not the reward."""
    kept = {key: value for key, value in infos.items() if key not in ("dense_reward", "_dense_reward")}
    return {key: without_dense_reward(value) if key == "final_info" else value for key, value in kept.items()}


def same_step(ours, theirs):
    same((*ours[:-1], without_dense_reward(ours[-1])), (*theirs[:-1], without_dense_reward(theirs[-1])))


@pytest.mark.parametrize("mode", list(AutoresetMode))
def test_steps_are_those_of_the_environments_bit_for_bit(mode, closing):
    make = [partial(TabletopEnv, task, observation="state", reward="dense", horizon=4) for task in TASKS]
    theirs = closing(SyncVectorEnv(make, autoreset_mode=mode))
    ours = closing(TabletopVectorEnv(TASKS, 3, settings=SHORT, autoreset_mode=mode, workers=2))
    assert (ours.observation_space, ours.action_space) == (theirs.observation_space, theirs.action_space)
    # The first row starts near its end: so the rows end at different steps.
    same_step(ours.reset(seed=3), theirs.reset(seed=3))
    rng, ends = np.random.default_rng(0), 0
    late = np.array([False, True, False])
    for number in range(11):
        moves = rng.uniform(-1.2, 1.2, (3, ACTION_SIZE)).astype(np.float32)
        step, expected = ours.step(moves), theirs.step(np.clip(moves, -1, 1))
        same_step(step, expected)
        over = step[2] | step[3]
        ends += int(over.sum())
        mask = over if mode is AutoresetMode.DISABLED else late
        if number == 1 or (mode is AutoresetMode.DISABLED and over.any()):
            mask = mask if mask.any() else late
            same_step(
                ours.reset(seed=[5, 6, 7], options={"reset_mask": mask}),
                theirs.reset(seed=[5, 6, 7], options={"reset_mask": mask.copy()}),
            )
    assert ends >= 5


def test_success_terminates_and_layouts_can_be_chosen():
    envs = TabletopVectorEnv("reach", 2, settings=BatchSettings(image_size=None), autoreset_mode="SameStep")
    _, infos = envs.reset(seed=0, options={"layout": [3, 4]})
    assert infos["layout"].tolist() == [3, 4]
    from robotics.scenes.experts import Expert

    expert = Expert("reach")
    for _ in range(60):
        _, rewards, terminations, _, infos = envs.step(expert.act(envs.batch.full_state()).astype(np.float32))
        if terminations.any():
            break
    row = int(terminations.argmax())
    assert rewards[row] == 1.0
    assert infos["final_info"]["success"][row]
    assert infos["final_obs"][row]["state"].shape == (22,)
    assert not infos["success"][row]
    envs.close()
    with pytest.raises(ClosedEnvironmentError):
        envs.reset()


def test_a_simulation_that_diverges_is_a_broken_episode_and_the_next_one_is_sound(closing):
    envs = closing(TabletopVectorEnv("push", 2, settings=SHORT))
    observations, _ = envs.reset(seed=0)
    group = envs.batch._groups[0]
    group.rollout.data(1).qvel[:] = 1e12
    after, rewards, terminations, truncations, infos = envs.step(np.zeros((2, 5)))
    assert np.isnan(rewards[1])
    assert np.isfinite(rewards[0])
    assert (terminations.tolist(), truncations.tolist()) == ([False, False], [False, True])
    assert infos["failure"][1].startswith("diverged: ")
    np.testing.assert_array_equal(after["state"][1], observations["state"][1])
    after, rewards, _, truncations, infos = envs.step(np.zeros((2, 5)))
    assert rewards[1] == 0.0
    assert not truncations[1]
    assert np.isfinite(after["state"]).all()
    assert envs.counts["diverged"] == 1


def test_what_does_not_fit_is_refused_by_name(closing):
    with pytest.raises(UserError, match="2 tasks for num_envs=3"):
        TabletopVectorEnv(["reach", "push"], 3, settings=SHORT)
    with pytest.raises(UserError, match="tomorrow"):
        TabletopVectorEnv("reach", 1, settings=SHORT, split="tomorrow")
    envs = closing(TabletopVectorEnv("reach", 2, settings=SHORT))
    with pytest.raises(UserError, match="reset it first"):
        envs.step(np.zeros((2, 5)))
    with pytest.raises(UserError, match="none has begun yet"):
        envs.reset(options={"reset_mask": np.array([True, False])})
    with pytest.raises(UserError, match="unknown options of reset: colour"):
        envs.reset(options={"colour": 1})
    envs.reset()
    with pytest.raises(UserError, match=r"shape \(5,\); expected \(2, 5\)"):
        envs.step(np.zeros(5))
    with pytest.raises(UserError, match="row 0 runs the task reach of the split train, not push"):
        envs.batch.restart({0: EpisodeSpec("push", "", 0)})
    with pytest.raises(UserError, match="row 7 does not exist"):
        envs.batch.restart({7: EpisodeSpec("reach", "", 0)})
