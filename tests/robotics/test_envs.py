import copy
import subprocess
import sys

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from mmrl.errors import RunError, UserError
from robotics.scenes.arms import ARMS
from robotics.scenes.envs import OBSERVATIONS, SimulationDiverged, TabletopEnv
from robotics.scenes.experts import Expert
from robotics.scenes.registration import ENVIRONMENT_IDS, register
from robotics.scenes.tabletop_tasks import TASKS

mujoco = pytest.importorskip("mujoco", reason="needs pip install 'mmrl-suite[sim]'")


def random_episode(env: TabletopEnv, seed: int, steps: int = 8) -> list:
    observation, info = env.reset(seed=seed)
    rng = np.random.default_rng(seed)
    seen = [observation, info]
    for _ in range(steps):
        seen.append(env.step(rng.uniform(-1, 1, 5).astype(np.float32)))
    return seen


def equal(one, other) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(equal, one, other))
    return bool(np.array_equal(one, other))


@pytest.mark.filterwarnings("error", "ignore:.*A Box observation space m.*:UserWarning")  # the state has no bounds
@pytest.mark.parametrize("name", ENVIRONMENT_IDS)
def test_gymnasiums_own_checks_pass(name):
    check_env(gymnasium.make(name, observation="state").unwrapped, skip_render_check=True)


@pytest.mark.filterwarnings("error", "ignore:.*A Box observation space m.*:UserWarning")
@pytest.mark.usefixtures("backend")
def test_gymnasiums_own_checks_pass_with_images(monkeypatch):
    monkeypatch.setitem(TabletopEnv.metadata, "render_modes", ["rgb_array"])  # they would open a window
    env = gymnasium.make(
        "mmrl/PickPlace-v0", arm="ur5e", observation=OBSERVATIONS, image_size=(24, 32), render_mode="rgb_array"
    )
    check_env(env.unwrapped)
    env.close()


def test_the_module_registers_when_make_imports_it():
    code = (
        "import gymnasium\n"
        "env = gymnasium.make('robotics.scenes.registration:mmrl/Drawer-v0', observation='state', arm='ur5e')\n"
        "print(env.reset(seed=0)[1]['instruction'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "open the drawer"
    register("robotics.scenes.envs:TabletopEnv", ENVIRONMENT_IDS)
    assert set(ENVIRONMENT_IDS.values()) == set(TASKS)


def test_importing_the_package_stays_light():
    code = (
        "import sys, robotics, robotics.sim; print([m for m in ('mujoco', 'transformers', 'PIL') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_robots_own_program_needs_no_more_than_gymnasium_and_mujoco():
    """An environment such as the one of the policy server's client: without torch, OmegaConf and accelerate."""
    code = """
import sys
for name in ("torch", "omegaconf", "accelerate", "transformers", "yaml"):
    sys.modules[name] = None  # importing it raises ImportError
import gymnasium
env = gymnasium.make("robotics.scenes.registration:mmrl/Push-v0", observation=("proprio", "rgb"))
seen, info = env.reset(seed=0, options={"layout": 3})
seen, *_ = env.step(env.action_space.sample())
print(sorted(seen), info["instruction"])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("['proprio', 'rgb'] push")


@pytest.mark.parametrize("arm", ARMS)
def test_equal_seeds_and_actions_give_equal_bits(arm):
    env, other = (TabletopEnv("push", arm, "state") for _ in range(2))
    first = random_episode(env, 3)
    random_episode(env, 4)
    assert equal(random_episode(env, 3), first)
    assert equal(random_episode(other, 3), first)
    assert not equal(random_episode(other, 5), first)


@pytest.mark.usefixtures("backend")
def test_kinds_of_observation(closing):
    env = closing(TabletopEnv("reach", observation=OBSERVATIONS, image_size=(20, 30)))
    observation, info = env.reset(seed=0)
    assert env.observation_space.contains(observation)
    assert {kind: value.shape for kind, value in observation.items()} == {
        "state": (22,),
        "proprio": (10,),
        "rgb": (20, 30, 3),
        "depth": (20, 30),
        "segmentation": (20, 30, 2),
    }
    assert np.array_equal(observation["proprio"], observation["state"][:10])
    cube = env.model.geom("red_cube").id
    mask = (observation["segmentation"] == [cube, mujoco.mjtObj.mjOBJ_GEOM]).all(axis=-1)
    colour = observation["rgb"][mask].mean(axis=0)
    assert colour[0] > 3 * colour[1:].max()
    camera, place = env.model.cam("front").pos0, observation["state"][10:13]
    assert observation["depth"][mask].min() == pytest.approx(np.linalg.norm(camera - place), abs=0.06)
    assert info == {
        "success": False,
        "instruction": "touch the red cube",
        "layout": info["layout"],
        "split": "train",
        "dense_reward": pytest.approx(TASKS["reach"].dense_reward(env.scene.sensors.read(env.data.sensordata))),
    }


@pytest.mark.usefixtures("backend")
def test_images_are_the_callers_and_rendered_only_on_request():
    env = TabletopEnv("reach", observation="state", render_mode="rgb_array", render_size=(20, 24))
    env.reset(seed=0)
    env.step(np.zeros(5))
    assert env._video is None
    first = env.render()
    assert env._video is not None
    copy = first.copy()
    for _ in range(3):
        env.step(np.ones(5))
    second = env.render()
    assert first.shape == (20, 24, 3)
    assert np.array_equal(first, copy)
    assert not np.array_equal(first, second)
    env.close()
    assert TabletopEnv("reach", observation="state").render() is None


def test_the_horizon_truncates_once_and_is_not_an_end():
    env = TabletopEnv("reach", observation="state", horizon=3)
    env.reset(seed=0)
    ends = [env.step(np.zeros(5))[1:4] for _ in range(3)]
    assert ends == [(0.0, False, False), (0.0, False, False), (0.0, False, True)]
    with pytest.raises(UserError, match="call reset first"):
        env.step(np.zeros(5))
    env.reset()
    assert env.step(np.zeros(5))[3] is False


@pytest.mark.parametrize("reward", ["sparse", "dense"])
def test_success_ends_an_episode_with_a_reward_of_one(reward):
    env, expert = TabletopEnv("reach", observation="state", reward=reward), Expert("reach")
    observation, info = env.reset(seed=1)
    rewards, terminated, truncated = [], False, False
    while not (terminated or truncated):
        observation, value, terminated, truncated, info = env.step(expert.act(observation["state"], info))
        rewards.append(value)
        assert info["success"] == terminated
        if reward == "dense":
            assert value == info["dense_reward"]
    assert terminated
    assert not truncated
    assert rewards[-1] == 1.0
    assert all(value == 0.0 for value in rewards[:-1]) if reward == "sparse" else np.all(np.diff(rewards) > 0)


def test_success_with_the_last_step_is_not_truncated():
    env, expert = TabletopEnv("reach", observation="state"), Expert("reach")
    observation, _ = env.reset(seed=1)
    steps, ended = 0, False
    while not ended:
        observation, _, ended, _, _ = env.step(expert.act(observation["state"]))
        steps += 1
    env = TabletopEnv("reach", observation="state", horizon=steps)
    observation, _ = env.reset(seed=1)
    for _ in range(steps):
        observation, _, terminated, truncated, _ = env.step(expert.act(observation["state"]))
    assert (terminated, truncated) == (True, False)


def test_layouts_and_splits_can_be_chosen():
    env = TabletopEnv("stack", observation="state")
    start, info = env.reset(seed=0, options={"layout": 7, "split": "held_out"})
    again, _ = env.reset(seed=9, options={"layout": 7, "split": "held_out"})
    trained, _ = env.reset(options={"layout": 7})
    assert (info["layout"], info["split"]) == (7, "held_out")
    assert equal(start, again)
    assert not equal(start, trained)
    drawn = {env.reset(seed=seed)[1]["layout"] for seed in range(5)}
    assert len(drawn) == 5
    assert TabletopEnv("stack", observation="state", split="held_out").reset(seed=0)[1]["split"] == "held_out"


def test_a_diverging_simulation_does_not_count_as_a_failure_of_the_policy():
    env = TabletopEnv("push", observation="state")
    env.reset(seed=0)
    env.data.qvel[0] = 1e12
    with pytest.raises(SimulationDiverged, match="push failed in control step 1 of layout") as caught:
        env.step(np.zeros(5))
    assert isinstance(caught.value, RunError)
    with pytest.raises(UserError, match="call reset first"):
        env.step(np.zeros(5))
    env.reset(seed=0)
    env.step(np.zeros(5))


@pytest.mark.parametrize(
    ("action", "message"),
    [
        (np.zeros(4), r"shape \(4,\); expected \(5,\)"),
        (np.zeros((1, 5)), r"shape \(1, 5\)"),
        (np.array([0, np.nan, 0, 0, 0]), "action 1 .* is nan"),
        (np.array([0, 0, 0, 0, -np.inf]), "is -inf"),
    ],
)
def test_bad_actions_are_named(action, message):
    env = TabletopEnv("reach", observation="state")
    env.reset(seed=0)
    with pytest.raises(UserError, match=message):
        env.step(action)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"task": "fly"}, "unknown task 'fly'; available: reach"),
        ({"arm": "hand"}, "unknown arm 'hand'; available: panda, ur5e"),
        ({"observation": ("state", "sound")}, "state, proprio, rgb, depth, segmentation"),
        ({"observation": ()}, "at least one of"),
        ({"horizon": 0}, "horizon is 0"),
        ({"render_mode": "ansi"}, "must be human, rgb_array or None"),
        ({"split": "test"}, "must be train or held_out"),
        ({"reward": "dens"}, "must be sparse or dense"),
        ({"image_size": (0, 4)}, "image.height is 0; must be at least 1|image.width is 0; must be at least 1"),
    ],
)
def test_bad_arguments_are_named(arguments, message):
    with pytest.raises(UserError, match=message):
        TabletopEnv(**{"observation": "state", **arguments})


def test_bad_options_of_reset_are_named():
    env = TabletopEnv("reach", observation="state")
    with pytest.raises(UserError, match="unknown options of reset: layuot"):
        env.reset(options={"layuot": 1})
    with pytest.raises(UserError, match="layout is -3"):
        env.reset(options={"layout": -3})
    with pytest.raises(UserError, match="split is 'dev'"):
        env.reset(options={"split": "dev"})


@pytest.mark.parametrize("task", ["push", "drawer"])
def test_observation_success_and_reward_are_those_of_the_positions(task):
    env, expert = TabletopEnv(task, observation=("state",)), Expert(task)
    env.reset(options={"layout": 3})
    for _ in range(30):
        seen, _, terminated, _, info = env.step(expert.act(env.state[None])[0])
        reached = copy.copy(env.data)
        mujoco.mj_forward(env.model, reached)
        state = env.scene.sensors.state(reached.sensordata[None], env.controller.commands((0,)))[0]
        assert np.array_equal(seen["state"], state)
        reading = env.scene.sensors.read(reached.sensordata[None])
        assert info["success"] == bool(env.scene.task.success(reading)[0])
        assert info["dense_reward"] == float(env.scene.task.dense_reward(reading)[0])
        if terminated:
            break
    env.close()
