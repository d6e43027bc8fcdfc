"""Simulators from their configuration: tabletop, Gymnasium environments in processes, user-defined ones."""

import numpy as np
import pytest

from mmrl.errors import RunError, UserError
from mmrl.fields import check_config
from robotics.sim import opening, subprocess_sim
from robotics.sim.episodes import EpisodeSpec
from robotics.sim.opening import SimConfig, open_sim
from tests.robotics.line_sim import LineSim


@pytest.fixture(autouse=True)
def _no_renderer(monkeypatch):
    """Skip finding a renderer, which takes seconds; nothing is rendered in processes here."""
    monkeypatch.setattr(subprocess_sim, "find_backend", lambda preferred: None)


def opened(**changes):
    config = SimConfig(**changes)
    check_config(config, "sim")
    return open_sim(config)


# ---- tabletop ----


def test_tabletop_has_the_requested_tasks_and_sizes(closing):
    pytest.importorskip("mujoco", reason="needs pip install 'mmrl-suite[sim]'")
    sim = closing(opened(tasks=["reach", "push"], image_size=0, horizon=7, state="full", workers=1))
    assert list(sim.tasks()) == ["reach", "push"]
    assert (sim.action_size, sim.state_size, sim.image_size, sim.horizon) == (5, 22, None, 7)
    result = sim.reset([EpisodeSpec("push", sim.tasks()["push"], 3)])
    for _ in range(7):
        result = sim.step_chunk(np.zeros((1, 1, 5)))
        assert 0 <= float(result.rewards[0, 0]) < 1  # dense, so that progress can be told
    assert result.truncated.tolist() == [True]
    assert not len(sim.live)


def test_tabletop_is_reach_with_proprioception_by_default(closing):
    pytest.importorskip("mujoco", reason="needs pip install 'mmrl-suite[sim]'")
    sim = closing(opened(image_size=0, arm="ur5e"))
    assert list(sim.tasks()) == ["reach"]
    assert sim.state_size == 10
    described = sim.describe()
    assert described["arm"] == "ur5e"
    assert described["renderer"] is None
    assert described["horizon"] == sim.horizon > 0


def test_tabletop_renders_the_requested_camera_and_size(backend, closing):
    sim = closing(opened(image_size=32, camera="wrist"))
    assert sim.image_size == (32, 32)
    images = sim.reset([EpisodeSpec("reach", sim.tasks()["reach"], 0)]).observation.images
    assert images.shape == (1, 32, 32, 3)
    assert images.std() > 0
    assert sim.describe()["camera"] == "wrist"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"options": {"friction": 1}}, "sim.options has friction; allowed: end_at_success"),
        ({"tasks": ["fly"]}, "fly"),
        ({"arm": "octopus"}, "octopus"),
        ({"state": "all"}, "state is 'all'; allowed: full, proprio"),
    ],
)
def test_what_the_tabletop_does_not_have_is_named(changes, message):
    pytest.importorskip("mujoco", reason="needs pip install 'mmrl-suite[sim]'")
    with pytest.raises(UserError, match=message):
        opened(**{"image_size": 0, **changes})


# ---- gymnasium ----

ENVIRONMENT = """
import gymnasium
import numpy as np


class Walk(gymnasium.Env):
    def __init__(self, start=0.0):
        self.observation_space = gymnasium.spaces.Box(-9, 9, (1,), np.float32)
        self.action_space = gymnasium.spaces.Box(-2, 2, (1,), np.float32)
        self.start = start

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.place = self.start + float(self.np_random.uniform(0, 0.1))
        return np.array([self.place], np.float32), {}

    def step(self, action):
        self.place += float(action[0])
        return np.array([self.place], np.float32), self.place, False, False, {"success": self.place > 5}


def make(**options):
    return Walk(**options)


gymnasium.register("Walk-v0", Walk, max_episode_steps=4)
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    """A module of an environment that registers itself; returns its file."""
    pytest.importorskip("gymnasium", reason="needs pip install 'mmrl-suite[sim]'")
    (tmp_path / "walking_env.py").write_text(ENVIRONMENT)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path / "walking_env.py"


def first_state(sim, layout=0):
    task = next(iter(sim.tasks()))
    return float(sim.reset([EpisodeSpec(task, "", layout)]).observation.state[0, 0])


def test_gymnasium_by_a_file_with_options_of_environment_adapter_and_processes(module, closing):
    options = {"start": 3.0, "adapter": {"task": "walk", "instruction": "go on"}, "settings": {"call_timeout_s": 20}}
    sim = closing(opened(kind="gymnasium", env=f"{module}:make", image_size=0, horizon=3, workers=1, options=options))
    assert dict(sim.tasks()) == {"walk": "go on"}
    assert (sim.action_size, sim.state_size, sim.horizon, sim.capacity) == (1, 1, 3, 1)
    assert 3.0 <= first_state(sim) < 3.1
    result = sim.step_chunk(np.full((1, 3, 1), 0.6))  # 1.2 a step in the environment's units
    assert result.success.tolist() == [True]
    assert result.steps.tolist() == [2]


@pytest.mark.parametrize("env", ["walking_env:Walk-v0", "walking_env:make"])
def test_gymnasium_by_module(module, env, closing):
    horizon = 0 if env.endswith("v0") else 4
    sim = closing(opened(kind="gymnasium", env=env, image_size=0, workers=1, horizon=horizon))
    assert sim.horizon == 4
    assert 0.0 <= first_state(sim) < 0.1
    assert first_state(sim, 1) != first_state(sim, 2)
    assert first_state(sim, 1) == first_state(sim, 1)


def test_gymnasium_by_id(closing):
    pytest.importorskip("gymnasium", reason="needs pip install 'mmrl-suite[sim]'")
    sim = closing(opened(kind="gymnasium", env="Pendulum-v1", image_size=0, workers=1))
    assert (sim.action_size, sim.state_size, sim.image_size, sim.horizon) == (1, 3, None, 200)
    assert list(sim.tasks()) == ["Pendulum-v1"]


def test_a_horizon_beyond_that_of_the_id(module, closing):
    sim = closing(opened(kind="gymnasium", env="walking_env:Walk-v0", image_size=0, workers=1, horizon=6))
    assert sim.horizon == 6
    first_state(sim)
    result = sim.step_chunk(np.zeros((1, 9, 1)))
    assert result.steps.tolist() == [6]
    assert result.truncated.tolist() == [True]


def test_an_environment_without_success_stops_with_what_to_name(closing):
    pytest.importorskip("gymnasium", reason="needs pip install 'mmrl-suite[sim]'")
    sim = closing(opened(kind="gymnasium", env="Pendulum-v1", image_size=0, workers=1, horizon=3))
    first_state(sim)
    with pytest.raises(UserError, match="Pendulum-v1: an episode has ended, but info does not report success"):
        sim.step_chunk(np.zeros((1, 3, 1)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"settings": {"timeout": 3}}, "sim.options.settings has timeout; allowed: python, renderer"),
        ({"settings": {"call_timeout_s": 0}}, "call_timeout_s is 0"),
        ({"adapter": {"colour": "red"}}, "colour"),
        ({"speed": 3}, "unexpected keyword argument 'speed'"),
    ],
)
def test_unknown_options_of_gymnasium_are_named(module, options, message):
    with pytest.raises(RunError if "speed" in options else UserError, match=message):
        opened(kind="gymnasium", env=f"{module}:make", image_size=0, horizon=3, workers=1, options=options)


# ---- a user's own, and mistakes ----


def test_a_users_own_simulator():
    sim = opened(kind="tests.robotics.line_sim:open_line", options={"capacity": 3})
    assert isinstance(sim, LineSim)
    assert sim.capacity == 3
    with pytest.raises(UserError, match=r"line_sim:open_line with sim.options {'width': 3} failed: .*'width'"):
        opened(kind="tests.robotics.line_sim:open_line", options={"width": 3})
    with pytest.raises(UserError, match="open_circle"):
        opened(kind="tests.robotics.line_sim:open_circle")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"kind": "isaac"},
            "sim.kind is 'isaac'; allowed: tabletop, gymnasium, libero, metaworld, robosuite, gymnasium_robotics, or "
            "module:function",
        ),
        ({"image_size": -1}, "sim.image_size is -1"),
        ({"horizon": -1}, "sim.horizon is -1"),
        ({"workers": -2}, "sim.workers is -2"),
        ({"kind": "gymnasium"}, "sim.env is '' with sim.kind gymnasium"),
        ({"env": "Pendulum-v1"}, "sim.env is 'Pendulum-v1' with sim.kind tabletop"),
        (
            {"kind": "libero", "options": {"size": 64, "camera": "x"}},
            "options has camera, size; set sim.camera, sim.im",
        ),
        ({"kind": "gymnasium_robotics", "camera": "front"}, "camera is 'front', but gymnasium_robotics has no"),
        ({"kind": "gymnasium", "env": "Pendulum-v1", "camera": "front"}, "gymnasium has no choice of cameras"),
    ],
)
def test_bad_settings(changes, message):
    with pytest.raises(ValueError, match=message):
        check_config(SimConfig(**changes), "sim")


def test_suites_are_given_camera_size_and_the_settings_of_their_processes(monkeypatch):
    from robotics.sim import suite_setup

    given = {}

    def settings(name, options, workers, images):
        given.update(name=name, options=options, images=images)
        return workers_settings(workers)

    def workers_settings(count):
        return subprocess_sim.SubprocessSettings("tests.robotics.fake_envs:make", workers=count)

    monkeypatch.setattr(suite_setup, "suite_settings", settings)
    monkeypatch.setattr(opening, "SubprocessSim", lambda found: found)
    options = {"suite": "libero_goal", "settings": {"call_timeout_s": 7, "max_restarts": 3}}
    found = opened(kind="libero", image_size=96, camera="robot0_eye_in_hand", workers=3, horizon=9, options=options)
    assert (found.workers, found.call_timeout_s, found.max_restarts) == (3, 7, 3)
    wanted = {"suite": "libero_goal", "size": 96, "camera": "robot0_eye_in_hand", "horizon": 9}
    assert given == {"name": "libero", "options": wanted, "images": True}
    opened(kind="libero", image_size=0, workers=1)
    assert given == {"name": "libero", "options": {}, "images": False}
    with pytest.raises(UserError, match=r"sim\.options\.settings has patience; allowed: python"):
        opened(kind="libero", options={"settings": {"patience": 1}})
