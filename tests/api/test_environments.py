"""Environments that a program defines reach the processes that run them."""

import gymnasium
import numpy as np
import pytest

from mmrl.agents.environments.env_pool import EnvironmentConfig, EnvPool
from mmrl.workers import given


def defined_here():
    """Classes of a function, which no module has."""

    class Guess:
        def reset(self, task, seed):
            return "Say a word."

        def step(self, action):
            return "Done.", 1.0, True

        def close(self):
            pass

    class Cart(gymnasium.Env):
        action_space = gymnasium.spaces.Box(-1, 1, (1,), np.float32)
        observation_space = gymnasium.spaces.Box(-2, 2, (2,), np.float32)

        def reset(self, *, seed=None, options=None):
            super().reset(seed=seed)
            return np.zeros(2, np.float32), {}

        def step(self, action):
            return np.ones(2, np.float32), 1.0, True, False, {"success": True}

    return Guess, Cart


def test_an_agent_s_environment(closing):
    guess, _ = defined_here()
    with given.having({"Guess": guess}):
        pool = closing(EnvPool(EnvironmentConfig(factory="given:Guess", workers=1)))
    assert pool.size == 1


def test_a_robot_s_environment(closing):
    pytest.importorskip("mujoco")
    from robotics.sim.opening import SimConfig, open_sim

    _, cart = defined_here()
    with given.having({"Cart": cart}):
        sim = closing(open_sim(SimConfig(kind="gymnasium", env="given:Cart", image_size=0, workers=1, horizon=5)))
    assert sim.action_size == 1
