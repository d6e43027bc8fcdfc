"""Environments whose units, order and rate are not those that a policy may expect; workers import this file."""

from typing import ClassVar

import gymnasium
import numpy as np

Box = gymnasium.spaces.Box


class Cart(gymnasium.Env):
    """Bring the cart to 0; actions are metres a step, -0.06 to 0.03."""

    metadata: ClassVar = {"render_fps": 12.5, "state_names": ["x", "one"]}
    observation_space = Box(-9, 9, (2,), np.float32)
    action_space = Box(np.array([-0.06], np.float32), np.array([0.03], np.float32))

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.x, self.t = float(self.np_random.uniform(-0.4, 0.4)), 0
        return self.see(), {"success": False}

    def see(self):
        return np.array([self.x, 1.0], np.float32)

    def step(self, action):
        self.t += 1
        self.x += float(action[0])
        done = abs(self.x) < 0.01
        return self.see(), 0.0, done, self.t >= 30, {"success": done}


def cart_expert(seen):
    return np.clip(-seen[:1], -0.06, 0.03)


class DictCart(Cart):
    """The same, with a Dict whose keys a run may order as it likes."""

    metadata: ClassVar = {"render_fps": 12.5}
    observation_space = gymnasium.spaces.Dict({"x": Box(-9, 9, (1,)), "speed": Box(-9, 9, (1,))})

    def see(self):
        return {"x": np.array([self.x], np.float32), "speed": np.ones(1, np.float32)}


class Whole(gymnasium.Env):
    """Whole numbers as commands; the state is the last one."""

    observation_space = Box(-(2**30), 2**30, (1,), np.float64)

    def __init__(self, low=0, high=10, dtype="int64"):
        self.action_space = Box(low, high, (1,), np.dtype(dtype))

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(1), {"success": False}

    def step(self, action):
        assert action.dtype == self.action_space.dtype
        return action.astype(np.float64), 0.0, False, False, {"success": False}


class Locked(gymnasium.Env):
    """An arm of two joints, the second of which is locked at 0.5."""

    metadata: ClassVar = {"render_fps": 10}
    observation_space = Box(-9, 9, (2,), np.float32)
    action_space = Box(np.array([-2, 0.5], np.float32), np.array([2, 0.5], np.float32))

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.x, self.t = float(self.np_random.uniform(-1, 1)), 0
        return np.array([self.x, 0], np.float32), {"success": False}

    def step(self, action):
        assert float(action[1]) == 0.5
        self.t += 1
        self.x += 0.2 * float(action[0])
        done = abs(self.x) < 0.1
        return np.array([self.x, action[1]], np.float32), 0.0, done, self.t >= 20, {"success": done}


def locked_expert(seen):
    return [-3 * seen[0], 0.5]
