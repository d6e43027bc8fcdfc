"""Light environments for tests of vector environments; loaded by path in workers."""

import os
import time

import gymnasium
import numpy as np
from gymnasium import spaces


class Walk(gymnasium.Env):
    """A random walk; terminated above 1.5, truncated after `limit` steps. Step 3 of the first episode `breaks`."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 10}  # noqa: RUF012
    action_space = spaces.Box(-1, 1, (2,), np.float32)

    def __init__(self, limit=5, nested=False, breaks="", render_mode=None, size=3):
        self.limit, self.nested, self.breaks, self.render_mode = limit, nested, breaks, render_mode
        box = spaces.Box(-np.inf, np.inf, (size,), np.float32)
        parts = {"place": box, "image": spaces.Box(0, 255, (2, 2, 3), np.uint8), "count": spaces.Discrete(100)}
        self.observation_space = spaces.Dict(parts) if nested else box
        self.episode = -1

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.place = self.np_random.normal(size=self.observation_space["place"].shape if self.nested else 3)
        self.place = self.place + (options or {}).get("shift", 0.0)
        self.steps, self.episode = 0, self.episode + 1
        return self.seen(), {"begun": self.episode}

    def seen(self):
        place = self.place.astype(np.float32)
        if not self.nested:
            return place
        return {"place": place, "image": np.full((2, 2, 3), self.steps, np.uint8), "count": np.int64(self.steps)}

    def step(self, action):
        self.steps += 1
        self.place = self.place + 0.4 * np.concatenate([action, self.np_random.normal(size=1)])
        if self.episode == 0 and self.steps == 3 and self.breaks:
            self.fail()
        reward = np.nan if self.breaks == "reward" and self.episode == 0 and self.steps == 3 else self.place.sum()
        info = {"steps": self.steps, "mean": self.place.mean(), "high": self.place[0] > 0, "deep": {"note": "walking"}}
        info["where"] = self.place.copy()
        return self.seen(), reward, bool(self.place[0] > 1.5), self.steps >= self.limit, info

    def fail(self):
        if self.breaks == "raise":
            raise ValueError("the leg broke")
        if self.breaks == "die":
            os._exit(9)
        if self.breaks == "hang":
            with open(os.environ.get("MMRL_TEST_HANGING", os.devnull), "a") as file:
                file.write(f"{os.getpid()}\n")
            time.sleep(600)

    def render(self):
        return np.full((2, 2, 3), self.steps, np.uint8)

    def add(self, number):
        return self.steps + number


class Silent(gymnasium.Env):
    """Discrete actions and nothing in info; every episode has three steps."""

    observation_space = spaces.Tuple((spaces.MultiDiscrete([9, 9]), spaces.MultiBinary(3)))
    action_space = spaces.Discrete(4, start=-1)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return self.seen(), {}

    def seen(self):
        return self.np_random.integers(0, 9, 2), self.np_random.integers(0, 2, 3).astype(np.int8)

    def step(self, action):
        self.steps += 1
        return self.seen(), float(action), self.steps >= 3, False, {}


class Texty(Silent):
    observation_space = spaces.Text(5)


class Secretive(Silent):
    def step(self, action):
        observation, reward, terminated, truncated, _ = super().step(action)
        return observation, reward, terminated, truncated, {"model": self}


def walk(**options):
    return Walk(**options)


def silent():
    return Silent()


def texty():
    return Texty()


def secretive():
    return Secretive()


class OneDictionary(gymnasium.Env):
    """Ends after two steps; keeps one observation and one dictionary of information, which it fills again and again."""

    observation_space = gymnasium.spaces.Box(0, 9, (2,), np.float32)
    action_space = gymnasium.spaces.Box(-1, 1, (2,), np.float32)

    def __init__(self):
        self.seen, self.info = np.zeros(2, np.float32), {"inner": {}}

    def _tell(self):
        self.seen[:] = self.info["age"] = self.info["inner"]["age"] = self.age
        return self.seen

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.age = 0
        return self._tell(), self.info

    def step(self, action):
        self.age += 1
        return self._tell(), 0.0, self.age == 2, False, self.info
