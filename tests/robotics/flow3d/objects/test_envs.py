"""The flow scenes as Gymnasium environments."""

import copy

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from mmrl.errors import UserError

mujoco = pytest.importorskip("mujoco", reason="needs pip install 'mmrl-suite[sim]'")
pytest.importorskip("mink", reason="needs pip install 'mmrl-suite[flow3d]'")

from robotics.flow3d.kinematics import ArmIk  # noqa: E402
from robotics.flow3d.objects.envs import FLOW_ENVIRONMENT_IDS, FlowTabletopEnv  # noqa: E402
from robotics.flow3d.objects.flow_tasks import FLOW_TASKS  # noqa: E402

BARE = {"arm": "free_gripper", "image_size": 24}
UNBOUNDED = "ignore:.*A Box observation space m.*:UserWarning"


def test_every_task_has_a_name():
    assert set(FLOW_ENVIRONMENT_IDS.values()) == set(FLOW_TASKS)


@pytest.mark.filterwarnings("error", UNBOUNDED)
@pytest.mark.parametrize("name", ["mmrl/Flow3DPlaceRed-v0", "mmrl/Flow3DInsertBlue-v0", "mmrl/Flow3DOpenRed-v0"])
def test_gymnasiums_own_checks_pass(name):
    check_env(gymnasium.make(name, observation=("joints", "object"), **BARE).unwrapped, skip_render_check=True)


@pytest.mark.filterwarnings("error", UNBOUNDED)
@pytest.mark.usefixtures("backend")
def test_gymnasiums_own_checks_pass_with_images():
    kinds = ("joints", "object", "rgb", "depth", "mask")
    env = gymnasium.make("mmrl/Flow3DPour-v0", arm="panda", observation=kinds, image_size=24, render_mode="rgb_array")
    check_env(env.unwrapped)
    env.close()


def test_actions_grasp_carry_and_set_down():
    """Joint moves towards scripted grips solve a task: the reward comes with the step that solves it."""
    env = FlowTabletopEnv("place_red", observation="joints", **BARE)
    observation, info = env.reset(seed=0, options={"layout": 0})
    assert not info["success"]
    scene, ik = env.scene, ArmIk(env.scene.arm)
    thing, pad = scene.object_pose(), scene.body_pose("red_pad")
    down = np.array([[1.0, 0, 0], [0, -1, 0], [0, 0, -1]])

    def grip(place, height):
        found = np.eye(4)
        found[:3, :3], found[:3, 3] = down, [*place[:2, 3], height]
        return found

    taken = 0.6 * scene.shape.height_m
    plan = [(grip(thing, 0.25), 0), (grip(thing, taken), 0), (grip(thing, taken), 1), (grip(thing, 0.25), 1)]
    plan += [(grip(pad, 0.25), 1), (grip(pad, taken + 0.005), 1), (grip(pad, taken + 0.005), 0)]
    joints, held, rewards = np.array(scene.arm.home_rad), [], []
    for pose, closed in plan:
        joints = ik.follow(pose[None], joints).joint_rad[-1]
        for _ in range(12):
            share = (joints - scene.target_rad()) * 10 / scene.speeds
            observation, reward, done, truncated, info = env.step(np.append(share, 1.0 if closed else -1.0))
            rewards.append(reward)
            if done:
                break
        held.append(bool(observation["joints"][-1]))
    assert held == [False, False, True, True, True, True, False]
    assert (done, truncated, info["success"], info["failed"]) == (True, False, True, ())
    assert sum(rewards) == 1 == rewards[-1]
    with pytest.raises(UserError, match="call reset first"):
        env.step(np.zeros(8))


def test_an_episode_is_cut_off_at_the_horizon_and_repeats_itself():
    env = FlowTabletopEnv("pour", observation=("joints", "object"), horizon=2, **BARE)
    ends = []
    for _ in range(2):
        env.reset(seed=3)
        rng = np.random.default_rng(0)
        results = [env.step(rng.uniform(-1, 1, 8)) for _ in range(2)]
        assert [truncated for _, _, _, truncated, _ in results] == [False, True]
        ends.append(results[-1][0])
    assert all(np.array_equal(ends[0][kind], ends[1][kind]) for kind in ends[0])


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"observation": "smell"}, "observation is"),
        ({"horizon": 0}, "horizon is 0"),
        ({"arm": "hand"}, "physics needs an arm"),
        ({"render_mode": "human"}, "rgb_array or None"),
    ],
)
def test_what_does_not_exist_is_refused(given, said):
    with pytest.raises(UserError, match=said):
        FlowTabletopEnv(**{**BARE, **given})


def test_success_is_judged_by_the_positions_that_a_step_reached(closing):
    env = closing(FlowTabletopEnv("place_red", observation="joints", arm="panda", image_size=24))
    env.reset(seed=0, options={"layout": 0})
    scene, judged = env.scene, []
    success = scene.success
    scene.success = lambda: judged.append(scene.object_pose()) or success()
    push = np.zeros(env.action_space.shape)
    push[1] = 1.0  # the shoulder, down onto the table and its pieces
    for _ in range(12):
        env.step(push)
        reached = copy.copy(scene.data)
        mujoco.mj_forward(scene.model, reached)
        body = reached.body(scene.task.moved)
        assert np.array_equal(judged[-1][:3, 3], body.xpos)
