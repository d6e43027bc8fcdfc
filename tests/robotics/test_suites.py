import dataclasses
import json
import os
import re
import sys
from pathlib import Path

import numpy as np
import pytest

from mmrl.errors import UserError
from robotics.episodes.episode_evaluation import MACHINE
from robotics.sim import subprocess_sim, suite_setup
from robotics.sim.episodes import EpisodeSpec
from robotics.sim.subprocess_sim import SubprocessSettings, SubprocessSim
from robotics.sim.suites import libero, metaworld

SUITES = Path(libero.__file__).parent
FAKE_FETCH = """
import gymnasium, numpy as np
SIZES = (("achieved_goal", 3), ("desired_goal", 3), ("observation", 10))
class Reach(gymnasium.Env):
    action_space = gymnasium.spaces.Box(-1, 1, (4,), np.float32)
    observation_space = gymnasium.spaces.Dict(**{k: gymnasium.spaces.Box(-9, 9, (n,)) for k, n in SIZES})
    metadata = {"render_modes": ["rgb_array"], "render_fps": 25}
    def __init__(self, render_mode, width, height, reward_type="sparse"):
        self.render_mode, self.shape, self.dense = render_mode, (height, width, 3), reward_type == "dense"
    def see(self): return {k: np.full(n, self.at, np.float32) for k, n in SIZES}
    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.at = self.np_random.uniform()
        return self.see(), {}
    def step(self, action):
        self.at += float(action[0])
        return self.see(), 0.5 if self.dense else -1.0, False, False, {"is_success": self.at > 2}
    def render(self): return np.full(self.shape, 7, np.uint8)
gymnasium.register("FetchReach-v4", entry_point=Reach, max_episode_steps=50)
"""
FAKE_ROBOSUITE = """
import numpy as np
ALL_ENVIRONMENTS, ALL_ROBOTS = {"Lift": 0, "Stack": 0}, {"Panda": 0, "Sawyer": 0}
class Lift:
    control_freq = 20
    class sim:
        class model: camera_names = ("agentview", "frontview")
    def __init__(self, robots, horizon, **options):
        assert not options["has_offscreen_renderer"] and not options["use_camera_obs"]
        self.robots, self.horizon, self.rng = robots, horizon, np.random.default_rng()
        self.placement = self.rng
    def reset(self):
        self.at, self.steps = self.placement.uniform(), 0
        return self.see()
    def step(self, action):
        self.at, self.steps = self.at + action[0], self.steps + 1
        return self.see(), 0.25, self.steps == self.horizon, {}
    def see(self):
        return {"object-state": np.full(10, self.at), "robot0_proprio-state": np.full(50, self.at)}
    def _check_success(self): return self.at > 2
    def close(self): pass
def make(name, **options): return Lift(**options)
"""
FAKE_WRAPPER = """
import numpy as np
from gymnasium import Env, spaces
class GymWrapper(Env):
    metadata = None
    unwrapped = property(lambda self: self.env)
    def __init__(self, env, keys, flatten_obs):
        self.env, self.keys, seen = env, keys, env.reset()
        self.observation_space = spaces.Dict({key: spaces.Box(-9, 9, seen[key].shape) for key in keys})
        self.action_space = spaces.Box(-1, 1, (7,), np.float64)
    def see(self, seen): return {key: seen[key] for key in self.keys}
    def reset(self, seed=None, options=None):
        np.random.seed(seed)  # which the placements do not read
        return self.see(self.env.reset()), {}
    def step(self, action):
        seen, reward, done, info = self.env.step(action)
        return self.see(seen), reward, done, False, info
    def close(self): self.env.close()
"""
FAKE_INIT = """
import json, os
path = os.path.join(os.environ["LIBERO_CONFIG_PATH"], "config.yaml")
if not os.path.exists(path):
    input("Do you want to specify a custom path? ")
_assets_path_cache = None
def get_libero_path(key):
    return json.load(open(path))[key]
"""
FAKE_BENCHMARK = """
import os
from collections import namedtuple
from libero.libero import get_libero_path
Task = namedtuple("Task", "name language problem_folder init_states_file")
class Benchmark:
    tasks = [Task(n, n.replace("_", " "), "folder", "states.pruned_init") for n in ("lift_it", "lower_it", "lose_it")]
    def get_task(self, number): return self.tasks[number]
    def get_task_bddl_file_path(self, number):
        return os.path.join(get_libero_path("bddl_files"), self.tasks[number].name)
def get_benchmark(name): return Benchmark
"""
FAKE_ENVS = """
import numpy as np
import libero.libero
class Gripper:
    dof, current_action = 1, np.ones(1)
class Robot:
    gripper = Gripper()
class Sim:
    class model: camera_names = ("agentview", "robot0_eye_in_hand")
    def render(self, camera_name, height, width, depth):
        first = 100 * self.model.camera_names.index(camera_name)
        return np.arange(first, first + height * width * 3, dtype=np.uint8).reshape(height, width, 3)
class OffScreenRenderEnv:
    robots, sim, built = [Robot()], Sim(), 0
    def __init__(self, bddl_file_name, **options):
        assert libero.libero._assets_path_cache, "assets would be downloaded"
        assert not options["hard_reset"] and not options["use_camera_obs"]
        if "lose_it" in bddl_file_name:
            raise FileNotFoundError("resource not found: bowl.obj")
        OffScreenRenderEnv.built += 1
    def seed(self, seed): self.seeded = seed
    def reset(self): self.steps, self.seeds = 0, self.seeded
    def set_init_state(self, state):
        assert not Robot.gripper.current_action.any() and self.seeded == 0
        self.number = state[0]
        return self.see()
    def step(self, action):
        self.steps += 1
        Robot.gripper.current_action = np.ones(2)
        self.settled = list(action) == [0, 0, 0, 0, 0, 0, -1]
        return self.see(), 0.5, False, {}
    def check_success(self): return self.steps == 13
    def see(self):
        where = np.array([self.number, self.steps, self.built], float)
        turn = np.array([0, 0, np.sin(0.25), np.cos(0.25)])
        return {"robot0_eef_pos": where, "robot0_eef_quat": turn, "robot0_gripper_qpos": np.array([0.1, -0.1])}
    def close(self): pass
"""


@pytest.fixture
def package(tmp_path):
    """A package with LIBERO's layout, with stored states in torch's older format, and a folder of assets."""
    import torch

    inner = tmp_path / "site" / "libero" / "libero"
    (inner / "init_files" / "folder").mkdir(parents=True)
    (inner / "envs").mkdir()
    (inner.parent / "__init__.py").write_text("")
    (inner / "__init__.py").write_text(FAKE_INIT)
    (inner / "benchmark.py").write_text(FAKE_BENCHMARK)
    (inner / "envs" / "__init__.py").write_text(FAKE_ENVS)
    states = np.arange(50.0)[:, None] * np.ones(3)
    torch.save(states, inner / "init_files" / "folder" / "states.pruned_init", _use_new_zipfile_serialization=False)
    (tmp_path / "assets" / "scenes").mkdir(parents=True)
    installed_as(tmp_path / "site", "hf_libero", "robosuite", "mujoco", "bddl")
    return inner


def installed_as(site, *names):
    """Version 1.0 of some packages."""
    for name in names:
        folder = site / f"{name}-1.0.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")


@pytest.fixture
def fake_settings(package, tmp_path, monkeypatch):
    monkeypatch.setattr(subprocess_sim, "find_backend", lambda preferred: None)
    monkeypatch.delenv("LIBERO_CONFIG_PATH", raising=False)
    variables = {"PYTHONPATH": str(tmp_path / "site"), "LIBERO_ASSETS": str(tmp_path / "assets")}
    variables["LIBERO_CONFIG_PATH"] = str(tmp_path / "config")
    return SubprocessSettings(
        f"{libero.__file__}:make", {"size": 4}, python=sys.executable, environment=variables, workers=1
    )


def test_libero_runs_stored_states_after_the_settling_steps(fake_settings, tmp_path):
    with SubprocessSim(fake_settings) as pool:
        assert pool.layouts() == {"train": 40, "held_out": 10, "all": 50}
        protocol = {name: value for name, value in pool.describe().items() if name not in MACHINE}
        assert not re.search(r"[\w.]/", str(protocol))  # a place of this machine
        assert pool.tasks()["lift_it"] == "lift it"
        assert (pool.horizon, pool.action_size, pool.state_size) == (220, 7, 8)
        result = pool.reset([EpisodeSpec("lift_it", "", 7)])
        assert result.reasons == {}
        np.testing.assert_allclose(result.observation.state, [[7, 10, 1, 0, 0, 0.5, 0.1, -0.1]], atol=1e-6)
        picture = np.arange(48, dtype=np.uint8).reshape(4, 4, 3)
        np.testing.assert_array_equal(result.observation.images[0], np.rot90(picture, 2))
        chunk = pool.step_chunk(np.zeros((1, 8, 7)))
        assert chunk.steps[0] == 3
        assert chunk.success[0]
        assert chunk.terminated[0]
        # The scene of a task is built once; another task's takes its place.
        again = pool.reset([EpisodeSpec("lift_it", "", 2, "held_out")]).observation.state[0]
        np.testing.assert_allclose(again[:3], [42, 10, 1])
        assert pool.reset([EpisodeSpec("lower_it", "", 49, "all")]).observation.state[0, 2] == 2
        with pytest.raises(UserError, match=r"the scene of lose_it cannot be built.*LIBERO_ASSETS"):
            pool.reset([EpisodeSpec("lose_it", "", 0)])
    assert json.loads((tmp_path / "config" / "config.yaml").read_text())["assets"] == str(tmp_path / "assets")


@pytest.mark.parametrize(
    ("options", "assets", "message"),
    [
        ({}, "", "LIBERO_ASSETS is not set"),
        ({}, "/nowhere", "LIBERO_ASSETS is '/nowhere', which has no folder `scenes`"),
        ({"suite": "libero_kitchen"}, None, "no suite 'libero_kitchen'; it has: libero_spatial"),
        ({"horizon": 0}, None, "horizon is 0"),
        ({"tasks": ["fly"]}, None, "no task 'fly'; it has: lift_it, lower_it"),
        ({"colour": 1}, None, "unexpected keyword argument 'colour'; it takes suite, tasks"),
    ],
)
def test_what_libero_cannot_do_is_said_before_an_episode(fake_settings, options, assets, message):
    variables = dict(fake_settings.environment)
    if assets is not None:
        variables["LIBERO_ASSETS"] = assets
    kwargs = {**fake_settings.kwargs, **options}
    with pytest.raises(UserError, match=message):
        SubprocessSim(dataclasses.replace(fake_settings, environment=variables, kwargs=kwargs))


def test_libero_draws_further_cameras_and_names_those_it_has(fake_settings):
    views = {**fake_settings.kwargs, "views": ["robot0_eye_in_hand"]}
    with SubprocessSim(dataclasses.replace(fake_settings, kwargs=views)) as pool:
        assert pool.views == ("robot0_eye_in_hand",)
        observation = pool.reset([EpisodeSpec("lift_it", "", 7)]).observation
        np.testing.assert_array_equal(observation.views[0, 0], observation.images[0] + 100)
        assert pool.step_chunk(np.zeros((1, 2, 7))).observation.views.shape == (1, 1, 4, 4, 3)
        assert pool.describe()["views"] == ["robot0_eye_in_hand"]
    wrong = {**fake_settings.kwargs, "views": ["wrist"]}
    pool = SubprocessSim(dataclasses.replace(fake_settings, kwargs=wrong))
    with pool, pytest.raises(UserError, match="no camera 'wrist'; it has: agentview, robot0_eye_in_hand"):
        pool.reset([EpisodeSpec("lift_it", "", 7)])


def test_a_config_of_the_users_own_is_left_alone(package, tmp_path, monkeypatch):
    own = tmp_path / "own"
    own.mkdir()
    (own / "config.yaml").write_text("assets: mine")
    monkeypatch.setenv("LIBERO_CONFIG_PATH", str(own))
    assert libero.prepare_config(package, tmp_path / "assets") == own / "config.yaml"
    assert (own / "config.yaml").read_text() == "assets: mine"
    (own / "config.yaml").unlink()
    written = libero.prepare_config(package, tmp_path / "assets")
    assert written == own / "config.yaml"
    assert json.loads(written.read_text()) == {
        "benchmark_root": str(package),
        "bddl_files": str(package / "bddl_files"),
        "init_states": str(package / "init_files"),
        "datasets": str(package.parent / "datasets"),
        "assets": str(tmp_path / "assets"),
    }


def test_without_a_variable_the_config_goes_into_the_environment(package, tmp_path, monkeypatch):
    monkeypatch.setenv("LIBERO_CONFIG_PATH", "")
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "environment"))
    written = libero.prepare_config(package, tmp_path)
    assert written == tmp_path / "environment" / "libero-config" / "config.yaml"
    assert os.environ["LIBERO_CONFIG_PATH"] == str(written.parent)
    assert [path.name for path in written.parent.iterdir()] == ["config.yaml"]


def test_assets_of_the_package_are_taken_where_none_are_named(package, monkeypatch):
    monkeypatch.delenv("LIBERO_ASSETS", raising=False)
    (package / "assets" / "scenes").mkdir(parents=True)
    assert libero.find_assets(package) == package / "assets"


def test_stored_states_cannot_run_code(tmp_path):
    import torch

    torch.save({"run": os.system}, tmp_path / "bad.pruned_init", _use_new_zipfile_serialization=False)
    with pytest.raises(Exception, match=r"weights_only|Unsupported|not an allowed"):
        libero.load_states(tmp_path / "bad.pruned_init")


def test_axis_angle_turns_vectors_as_the_quaternion_does():
    rng = np.random.default_rng(0)
    for quaternion in rng.normal(size=(20, 4)):
        x, y, z, w = quaternion = quaternion / np.linalg.norm(quaternion)
        turn = libero.axis_angle(quaternion)
        angle = np.linalg.norm(turn)
        axis, vector = turn / angle, rng.normal(size=3)
        rotated = vector * np.cos(angle) + np.cross(axis, vector) * np.sin(angle)
        rotated += axis * (axis @ vector) * (1 - np.cos(angle))
        cross = np.cross([x, y, z], vector)
        np.testing.assert_allclose(rotated, vector + 2 * (w * cross + np.cross([x, y, z], cross)), atol=1e-9)
    np.testing.assert_array_equal(libero.axis_angle(np.array([0, 0, 0, 1.0])), np.zeros(3))


@pytest.fixture
def adapted(tmp_path, monkeypatch):
    """Settings of a pool of a fake robosuite or gymnasium-robotics."""
    monkeypatch.setattr(subprocess_sim, "find_backend", lambda preferred: None)
    (tmp_path / "robosuite").mkdir()
    (tmp_path / "robosuite" / "__init__.py").write_text(FAKE_ROBOSUITE)
    (tmp_path / "robosuite" / "wrappers.py").write_text(FAKE_WRAPPER)
    (tmp_path / "gymnasium_robotics.py").write_text(FAKE_FETCH)
    installed_as(tmp_path, "robosuite", "gymnasium_robotics")

    def settings(name, images=False, **options):
        factory = f"{SUITES / suite_setup.RECIPES[name].factory}:make"
        variables = {"PYTHONPATH": str(tmp_path)}
        return SubprocessSettings(
            factory, options, python=sys.executable, environment=variables, workers=1, images=images
        )

    return settings


def test_an_environment_of_gymnasium_robotics_goes_through_the_adapter(adapted):
    with SubprocessSim(adapted("gymnasium_robotics", images=True, size=6, horizon=9)) as pool:
        assert dict(pool.tasks()) == {"FetchReach-v4": "move the gripper to the red target"}
        assert (pool.horizon, pool.state_size, pool.action_size, pool.image_size) == (9, 16, 4, (6, 6))
        pool.reset([EpisodeSpec("FetchReach-v4", "", 5)])
        chunk = pool.step_chunk(np.ones((1, 9, 4)))
        assert chunk.success[0]
        assert chunk.terminated[0]
        assert chunk.steps[0] < 4
        assert (chunk.rewards[0][: chunk.steps[0]] == -1).all()
        pool.reset([EpisodeSpec("FetchReach-v4", "", 5)])
        chunk = pool.step_chunk(np.zeros((1, 9, 4)))
        assert chunk.truncated[0]
        assert not chunk.success[0]
        assert chunk.steps[0] == 9
    with SubprocessSim(adapted("gymnasium_robotics", options={"reward_type": "dense"})) as pool:
        pool.reset([EpisodeSpec("FetchReach-v4", "", 5)])
        assert pool.step_chunk(np.zeros((1, 1, 4))).rewards[0, 0] == 0.5


def test_robosuites_episodes_repeat_and_say_how_they_ended(adapted):
    with SubprocessSim(adapted("robosuite", horizon=6)) as pool:
        assert dict(pool.tasks()) == {"Lift": "lift the red cube"}
        assert (pool.horizon, pool.state_size, pool.action_size) == (6, 60, 7)
        starts = [pool.reset([EpisodeSpec("Lift", "", layout)]).observation.state for layout in (3, 4, 3)]
        np.testing.assert_array_equal(starts[0], starts[2])
        assert not np.array_equal(starts[0], starts[1])
        chunk = pool.step_chunk(np.zeros((1, 8, 7)))
        assert chunk.truncated[0]
        assert not chunk.terminated[0]
        assert not chunk.success[0]
        assert chunk.steps[0] == 6
        pool.reset([EpisodeSpec("Lift", "", 3)])
        chunk = pool.step_chunk(np.ones((1, 8, 7)))
        assert chunk.success[0]
        assert chunk.terminated[0]
        assert chunk.steps[0] < 4
    with SubprocessSim(adapted("robosuite", state="proprio")) as pool:
        assert pool.state_size == 50


@pytest.mark.parametrize("name", ["robosuite", "gymnasium_robotics"])
def test_an_adapted_suite_names_itself_and_its_version_wherever_it_lies(adapted, name):
    with SubprocessSim(adapted(name)) as pool:
        about = pool.describe()
    assert (about["suite"], about["versions"][name], about["simulator"]) == (name, "1.0", f"{name}.py:make")


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("gymnasium_robotics", {"tasks": ["Walker-v5"]}, "no 'Walker-v5'; its ids begin with: Fetch"),
        ("gymnasium_robotics", {"tasks": ["FetchReach-v9"]}, "FetchReach"),
        ("gymnasium_robotics", {"tasks": ["FetchReach-v4", "FetchPush-v4"]}, "2 gymnasium-robotics ids.* one of them"),
        ("robosuite", {"tasks": ["Fly"]}, "no environment 'Fly'; it has: Lift, Stack"),
        ("robosuite", {"tasks": ["Lift", "Stack"]}, "2 robosuite environments.* one of them"),
        ("robosuite", {"robots": "Baxter"}, "no robot 'Baxter'; it has: Panda, Sawyer"),
        ("robosuite", {"camera": "top"}, "no camera 'top'; it has: agentview, frontview"),
        ("robosuite", {"views": ["wrist"]}, "no camera 'wrist'; it has: agentview, frontview"),
        ("robosuite", {"state": "all"}, "state is 'all'; allowed: full, proprio"),
    ],
)
def test_what_an_adapted_suite_cannot_do_is_said_before_an_episode(adapted, name, options, message):
    with pytest.raises(UserError, match=message):
        SubprocessSim(adapted(name, **options))


@pytest.mark.parametrize("name", ["robosuite", "gymnasium_robotics"])
def test_an_adapted_suite_repeats_an_episode_bit_for_bit_whatever_came_before(name):
    installed(name)
    runs = []
    with suite_setup.open_suite(name, {"horizon": 20}, images=False, workers=1) as pool:
        task = next(iter(pool.tasks()))
        actions = np.random.default_rng(0).uniform(-1, 1, (1, 20, pool.action_size))
        for layout in (0, 5, 0):
            begun = pool.reset([EpisodeSpec(task, "", layout)]).observation.state
            chunk = pool.step_chunk(actions)
            assert chunk.truncated[0]
            assert chunk.steps[0] == 20
            runs.append((begun, chunk.observation.state))
    np.testing.assert_array_equal(runs[0], runs[2])
    assert not np.array_equal(runs[0], runs[1])


def test_metaworld_has_fifty_tasks_and_refuses_others():
    assert len(metaworld.INSTRUCTIONS) == 50
    assert list(metaworld.make(["reach", "push"]).tasks()) == ["reach", "push"]
    with pytest.raises(metaworld.MetaWorldError, match="no task 'fly'; it has: assembly"):
        metaworld.make(["fly"])
    with pytest.raises(metaworld.MetaWorldError, match="no camera 'side'"):
        metaworld.make(camera="side")
    with pytest.raises(metaworld.MetaWorldError, match=r"no camera 'wrist'; it has: corner.*gripperPOV"):
        metaworld.make(views=["gripperPOV", "wrist"])
    with pytest.raises(metaworld.MetaWorldError, match="horizon is 501"):
        metaworld.make(horizon=501)


class FakeScene:
    """What a row asks of a Meta-World scene."""

    class mujoco_renderer:  # noqa: N801
        viewer = None

    def __init__(self, closed, task):
        self.closed, self.task = closed, task

    def seed(self, seed):
        self.seeded = seed

    def reset(self):
        return np.full(metaworld.STATE_SIZE, self.seeded), {}

    def close(self):
        self.closed.append(self.task)


def test_metaworld_keeps_the_scenes_of_its_last_tasks(monkeypatch):
    loaded, closed = [], []

    def load(task):
        loaded.append(task)
        return FakeScene(closed, task), None

    row = metaworld.make()
    monkeypatch.setattr(row, "_load", load)
    for task in ("reach", "push", "reach", "soccer", "hammer", "reach"):
        row.reset(task, 0, "train", len(loaded))
        assert row.state()[0] == row._env.seeded
    assert (loaded, closed) == (["reach", "push", "soccer", "hammer"], [])
    row.reset("assembly", 0, "train", 1)
    assert closed == ["push"]
    row.close()
    assert sorted(closed) == ["assembly", "hammer", "push", "reach", "soccer"]


def installed(name: str) -> None:
    """Skip if the suite is not installed."""
    try:
        suite_setup.suite_python(name)
    except UserError as error:
        pytest.skip(str(error))


def test_metaworlds_expert_solves_a_task_and_repeats_it_bit_for_bit():
    installed("metaworld")
    episode = EpisodeSpec("reach", "", 3)
    runs = []
    with suite_setup.open_suite("metaworld", {"tasks": ["reach", "push"]}, images=False, workers=1) as pool:
        for first in (EpisodeSpec("push", "", 0), EpisodeSpec("reach", "", 9)):
            pool.reset([first])
            pool.step_chunk(np.full((1, 3, 4), 0.5))
            states = [pool.reset([episode]).observation.state]
            while len(pool.live):
                chunk = pool.step_chunk(pool.expert_actions()[:, None])
                states.append(chunk.observation.state)
            assert chunk.success[0]
            runs.append(np.concatenate(states))
    np.testing.assert_array_equal(*runs)


def test_metaworld_draws_a_scene_as_if_it_were_the_only_one():
    installed("metaworld")
    # one more than a worker keeps, so that the first is built anew
    tasks = ["reach", "drawer-open", "door-open", "button-press", "push"]
    seen = {}
    with suite_setup.open_suite("metaworld", {"tasks": tasks, "size": 32}, workers=1) as pool:
        for task in (*tasks, *tasks):
            images = [pool.reset([EpisodeSpec(task, "", 2)]).observation.images]
            images.append(pool.step_chunk(np.full((1, 5, 4), 0.5)).observation.images)
            np.testing.assert_array_equal(np.concatenate(images), seen.setdefault(task, np.concatenate(images)))
    assert len({images.tobytes() for images in seen.values()}) == len(tasks)


def test_libero_repeats_an_episode_bit_for_bit_whatever_came_before():
    installed("libero")
    if not os.environ.get("LIBERO_ASSETS"):
        pytest.skip("LIBERO_ASSETS does not name the folder of LIBERO's scene assets")
    runs = []
    with suite_setup.open_suite("libero", images=False, workers=1) as pool:
        task = next(iter(pool.tasks()))
        actions = np.random.default_rng(0).uniform(-1, 1, (1, 8, 7))
        for layout in (0, 5, 0):
            begun = pool.reset([EpisodeSpec(task, "", layout)])
            assert begun.reasons == {}
            runs.append((begun.observation.state, pool.step_chunk(actions).observation.state))
    np.testing.assert_array_equal(runs[0], runs[2])
    assert not np.array_equal(runs[0], runs[1])


def test_the_suites_load_without_this_package():
    """Modules that a worker loads by path import nothing that only this package's environment has."""
    for file in SUITES.glob("*.py"):
        source = file.read_text()
        assert "import robotics" not in source
        assert "from robotics" not in source
        assert "import mmrl" not in source
