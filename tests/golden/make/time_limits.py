"""Advantages and returns of Stable-Baselines3 where time limits cut episodes off."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from stable_baselines3.common.buffers import RolloutBuffer
from stable_baselines3.common.on_policy_algorithm import OnPolicyAlgorithm

from tests.golden.make.peers import Made, numbers, package

STEPS, ENVS, GAMMA, LAMBDA = 12, 3, 0.99, 0.95
ENDS = {(3, 0): "truncated", (9, 0): "terminated", (4, 1): "terminated", (8, 1): "truncated", (6, 2): "truncated"}
"""Step and environment of the episodes that end before the rollout does, which cuts off the others."""


class Script:
    """Environments and critic that give numbers of a table; an observation is its index in the table of values."""

    def __init__(self, rewards: Any, values: Any, terminal: Any) -> None:
        self.num_envs, self.step_number, self.squash_output = ENVS, 0, False
        self.rewards, self.values, self.terminal = rewards, values, terminal

    def step(self, actions: Any) -> Any:
        at, self.step_number = self.step_number, self.step_number + 1
        dones = np.array([(at, env) in ENDS for env in range(ENVS)])
        infos = [
            {"terminal_observation": np.array([-1 - at, env]), "TimeLimit.truncated": ENDS[at, env] == "truncated"}
            if (at, env) in ENDS
            else {}
            for env in range(ENVS)
        ]
        return self._observation(), np.array(self.rewards[at], np.float32), dones, infos

    def _observation(self) -> Any:
        return np.array([[self.step_number, env] for env in range(ENVS)])

    def predict_values(self, observation: Any) -> torch.Tensor:
        table = {True: self.values, False: self.terminal}
        rows = np.asarray(observation).reshape(-1, 2).astype(int).tolist()
        return torch.tensor([[table[at >= 0][at if at >= 0 else -1 - at][env]] for at, env in rows])

    def __call__(self, observation: Any) -> Any:
        return torch.zeros(ENVS, 1), self.predict_values(observation), torch.zeros(ENVS)

    def obs_to_tensor(self, observation: Any) -> Any:
        return (observation,)

    def set_training_mode(self, mode: bool) -> None:
        pass


def make() -> Made:
    inputs = {
        "gamma": GAMMA,
        "lam": LAMBDA,
        "rewards": numbers(0, STEPS, ENVS, low=-1.0, high=1.0),
        "values": numbers(1, STEPS + 1, ENVS, low=-1.0, high=1.0),
        "terminal_values": numbers(2, STEPS, ENVS, low=-1.0, high=1.0),
        "ends": [[step, env, how] for (step, env), how in ENDS.items()],
    }
    box = spaces.Box(-1.0, 1.0, (2,), np.float32), spaces.Box(-1.0, 1.0, (1,), np.float32)
    buffer = RolloutBuffer(STEPS, *box, device="cpu", gae_lambda=LAMBDA, gamma=GAMMA, n_envs=ENVS)
    script = Script(inputs["rewards"], inputs["values"], inputs["terminal_values"])
    algorithm = SimpleNamespace(
        policy=script,
        device="cpu",
        gamma=GAMMA,
        use_sde=False,
        action_space=box[1],
        num_timesteps=0,
        _last_obs=np.array([[0, env] for env in range(ENVS)]),
        _last_episode_starts=np.ones(ENVS, bool),
        _update_info_buffer=lambda infos, dones: None,
    )
    callback = SimpleNamespace(on_rollout_start=bool, on_step=lambda: True, on_rollout_end=bool)
    callback.update_locals = lambda names: None
    OnPolicyAlgorithm.collect_rollouts(algorithm, script, callback, buffer, STEPS)
    peer = {
        "program": package("stable_baselines3"),
        "calls": ["OnPolicyAlgorithm.collect_rollouts", "RolloutBuffer.compute_returns_and_advantage"],
        "relative": 2.0**-20,
        "because": "the buffer is float32",
        "advantages": buffer.advantages,
        "returns": buffer.returns,
    }
    return "Time limits, arXiv 1712.00378, section 4, with GAE, arXiv 1506.02438", inputs, [peer]
