"""Environments and experts as users write them; workers import this file, so it imports nothing heavy."""

import random
from typing import ClassVar

import gymnasium
import numpy as np


class Slider(gymnasium.Env):
    """Solved beyond the goal, which every second layout puts out of reach; actions are centimetres."""

    metadata: ClassVar = {"render_fps": 7, "render_modes": ["rgb_array"], "instruction": "slide"}
    render_mode = "rgb_array"
    observation_space = gymnasium.spaces.Dict({"place": gymnasium.spaces.Box(-99, 99, (2,), np.float64)})
    action_space = gymnasium.spaces.Box(np.float32(-10), np.float32(30), (1,), np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.place, self.goal = 0.0, 50.0 if seed % 2 else 5000.0
        return {"place": np.array([self.place, self.goal])}, {}

    def step(self, action):
        self.place += float(action[0])
        done = self.place >= self.goal
        return {"place": np.array([self.place, self.goal])}, 0.0, done, False, {"success": done}

    def render(self):
        return np.full((16, 16, 3), int(np.clip(self.place, 0, 255)), np.uint8)


class Helped(Slider):
    """As with SERL's wrapper for a SpaceMouse, somebody pushes from 20 to 45 cm and says so."""

    def step(self, action):
        helps = 20 <= self.place < 45
        observation, *others, info = super().step(np.array([25.0]) if helps else action)
        return observation, *others, {**info, "intervene_action": np.array([25.0])} if helps else info


class GymHil(Slider):
    """As gym-hil 0.1.13 (0.1.9 with another `key`): every action is reported, and a person may want another try."""

    def __init__(self, key="teleop_action", rerecords=False):
        self.key, self.rerecords = key, rerecords

    def step(self, action):
        helps = 20 <= self.place < 45
        action = np.array([25.0]) if helps else action
        observation, _, done, _, _ = super().step(action)
        again = self.rerecords and self.place >= 45
        info = {"succeed": done, "is_intervention": helps, self.key: action, "rerecord_episode": again}
        return observation, float(done), done or again, False, info


def slide(observation):
    """25 cm, and at the end more than the bounds allow."""
    return [25.0 if observation["place"][0] < 20 else 99.0]


def fails(observation):
    return 1 / 0


def wide(observation):
    return [0.0, 0.0]


class PaysEarly(gymnasium.Env):
    """Pays 5 or -5 for the sign of its first three actions and nothing later; the state is what was paid so far."""

    observation_space = gymnasium.spaces.Box(-99, 99, (1,), np.float32)
    action_space = gymnasium.spaces.Box(-1, 1, (1,), np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps, self.paid = 0, 0.0
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.steps += 1
        reward = (5.0 if action[0] > 0 else -5.0) if self.steps <= 3 else 0.0
        self.paid += reward
        return np.array([self.paid], np.float32), reward, False, False, {}


class SmallSteps(PaysEarly):
    action_space = gymnasium.spaces.Box(np.float32(-0.15), np.float32(0.25), (1,), np.float32)


class DictImg(gymnasium.Env):
    """Image and state are the step count; keeps one observation and one dictionary, as Gymnasium#1132 describes."""

    observation_space = gymnasium.spaces.Dict(
        {
            "image": gymnasium.spaces.Box(0, 255, (16, 16, 3), np.uint8),
            "state": gymnasium.spaces.Box(-1e6, 1e6, (2,), np.float32),
        }
    )
    action_space = gymnasium.spaces.Box(-1, 1, (1,), np.float32)

    def __init__(self):
        self.seen = {"image": np.zeros((16, 16, 3), np.uint8), "state": np.zeros(2, np.float32)}
        self.info = {"success": False}

    def _tell(self):
        self.seen["image"][:] = self.steps
        self.seen["state"][:] = self.key, self.steps
        return self.seen

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.key, self.steps = int(self.np_random.integers(1000)), 0
        return self._tell(), self.info

    def step(self, action):
        self.steps += 1
        return self._tell(), 0.0, False, self.steps >= 5, self.info


class Drawn(gymnasium.Env):
    """Starts where a generator says that reset does not seed: one of all code ("shared"), or one of its own ("own")."""

    observation_space = gymnasium.spaces.Box(0, 1, (2,), np.float32)
    action_space = gymnasium.spaces.Box(-1, 1, (1,), np.float32)

    def __init__(self, kind="shared"):
        self.own = np.random.default_rng() if kind == "own" else None

    def reset(self, *, seed=None, options=None):
        draws = (random.random(), np.random.rand()) if self.own is None else self.own.random(2)
        return np.array(draws, np.float32), {"success": False}

    def step(self, action):
        return np.zeros(2, np.float32), 0.0, False, False, {"success": False}


class Wide(gymnasium.Env):
    """A camera of 48 x 96 pixels, white."""

    observation_space = gymnasium.spaces.Dict({"image": gymnasium.spaces.Box(0, 255, (48, 96, 3), np.uint8)})
    action_space = gymnasium.spaces.Box(-1, 1, (1,), np.float32)

    def reset(self, *, seed=None, options=None):
        return {"image": np.full((48, 96, 3), 255, np.uint8)}, {"success": False}

    def step(self, action):
        return {"image": np.full((48, 96, 3), 255, np.uint8)}, 0.0, False, False, {"success": False}


class Lit(gymnasium.Env):
    """A MuJoCo scene with two lights that cast shadows, and one that does not, unless it is told otherwise."""

    metadata: ClassVar = {"render_modes": ["rgb_array"]}
    render_mode = "rgb_array"
    observation_space = gymnasium.spaces.Box(0, 1, (1,), np.float32)
    action_space = gymnasium.spaces.Box(-1, 1, (1,), np.float32)

    def __init__(self, shadows=True):
        import mujoco

        lights = "<light pos='0 0 2'/><light pos='1 0 2'/><light pos='0 1 2' castshadow='false'/>"
        scene = f"<mujoco><worldbody>{lights}<geom type='sphere' size='.2'/></worldbody></mujoco>"
        self.model = mujoco.MjModel.from_xml_string(scene)
        if not shadows:
            self.model.light_castshadow[:] = False

    def reset(self, *, seed=None, options=None):
        return np.zeros(1, np.float32), {"success": False}

    def step(self, action):
        return np.zeros(1, np.float32), 0.0, False, False, {"success": False}

    def render(self):
        return np.zeros((8, 8, 3), np.uint8)
