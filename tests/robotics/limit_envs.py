"""Environments that cut their episodes off themselves; workers import this file, so it imports nothing heavy."""

import json
from pathlib import Path

import gymnasium
import numpy as np

GOLDEN = Path(__file__).parents[1] / "golden" / "time_limits.json"


def golden_episodes():
    """Episodes of the golden file: rewards, values before each step and after the last one, and how it ended.

    The rollout of Stable-Baselines3 cuts off what still runs at its end.
    """
    given = json.loads(GOLDEN.read_text(encoding="utf-8"))["inputs"]
    ends = {(step, env): how for step, env, how in given["ends"]}
    episodes, count = [], len(given["rewards"])
    for env in range(len(given["rewards"][0])):
        start = 0
        for step in range(count):
            last = step == count - 1
            if (step, env) not in ends and not last:
                continue
            after = given["terminal_values"][step][env] if (step, env) in ends else given["values"][count][env]
            rows = range(start, step + 1)
            episodes.append(
                {
                    "places": [(row, env) for row in rows],
                    "rewards": [given["rewards"][row][env] for row in rows],
                    "values": [*(given["values"][row][env] for row in rows), after],
                    "how": ends.get((step, env), "truncated"),
                }
            )
            start = step + 1
    return episodes


class Replay(gymnasium.Env):
    """The golden episodes, one a layout; the observation is the value of the state."""

    observation_space = gymnasium.spaces.Box(-9, 9, (1,), np.float32)
    action_space = gymnasium.spaces.Box(-1, 1, (1,), np.float32)

    def reset(self, *, seed=None, options=None):
        self.episode, self.steps = golden_episodes()[(seed or 0) % len(golden_episodes())], 0
        return np.array(self.episode["values"][:1], np.float32), {}

    def step(self, action):
        self.steps += 1
        over = self.steps == len(self.episode["rewards"])
        seen = np.array([self.episode["values"][self.steps]], np.float32)
        how = self.episode["how"] if over else ""
        return (
            seen,
            self.episode["rewards"][self.steps - 1],
            how == "terminated",
            how == "truncated",
            {"success": False},
        )


class Watchdog(gymnasium.Env):
    """Pays 1 a step for ever, and cuts itself off at a random age of 5 to 15."""

    observation_space = gymnasium.spaces.Box(-9, 9, (2,), np.float32)
    action_space = gymnasium.spaces.Box(-1, 1, (1,), np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps, self.limit = 0, int(self.np_random.integers(5, 16))
        return np.zeros(2, np.float32), {}

    def step(self, action):
        self.steps += 1
        return np.zeros(2, np.float32), 1.0, False, self.steps >= self.limit, {"success": False}
