"""A Gymnasium environment with two cameras and actions in pixels, loaded by path in a worker."""

import gymnasium
import numpy as np
from gymnasium import spaces

LOW, HIGH = [0.0, -2.0], [512.0, 6.0]
SIDE = 64


class Ball(gymnasium.Env):
    """A ball is sent to a position in 512 pixels and pushed further by wind; the task is solved beyond `goal`."""

    def __init__(self, goal=500.0):
        self.goal, self.metadata = goal, {"render_modes": []}
        self.action_space = spaces.Box(np.array(LOW, np.float32), np.array(HIGH, np.float32))
        image = spaces.Box(0, 255, (SIDE, SIDE, 3), np.uint8)
        place = spaces.Box(-np.inf, np.inf, (2,), np.float64)
        self.observation_space = spaces.Dict({"place": place, "top": image, "side": image})

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.place, self.drawn = self.np_random.uniform(0, 100, 2), np.zeros((SIDE, SIDE, 3), np.uint8)
        return self._observe(), {}

    def step(self, action):
        self.place += 0.1 * (action[0] - self.place) + self.np_random.normal(size=2) + action[1]
        solved = bool(self.place[0] > self.goal)
        return self._observe(), float(self.place[0]), solved, False, {"success": solved}

    def _observe(self):
        self.drawn[:] = 0  # the environment's own array, as some return theirs
        column, row = (int(np.clip(at / 8, 0, SIDE - 12)) for at in self.place)
        self.drawn[row : row + 12, column : column + 12] = (255, 160, int(self.place[0]) % 256)
        return {"place": self.place, "top": self.drawn, "side": 255 - self.drawn[::-1] // 2}


def make(**options):
    return Ball(**options)
