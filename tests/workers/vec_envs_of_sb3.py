"""`VecEnv` and `DummyVecEnv` of Stable-Baselines3, or where it is not installed stand-ins of their documentation.

Source of the stand-ins: DLR-RM/stable-baselines3 2.9, docs/guide/vec_envs.rst ("VecEnv API vs Gym API"). Their module
is put in place of the package's, so that `mmrl.workers.vector.sb3` can be imported.
"""

import sys
from types import ModuleType

import numpy as np

try:
    from stable_baselines3.common.vec_env import DummyVecEnv, VecEnv
except ImportError:

    class VecEnv:
        def __init__(self, num_envs, observation_space, action_space):
            self.num_envs, self.observation_space, self.action_space = num_envs, observation_space, action_space
            self.reset_infos = [{} for _ in range(num_envs)]
            self._reset_seeds()
            self._reset_options()
            self.render_mode = self.get_attr("render_mode")[0]

        def _reset_seeds(self):
            self._seeds = [None] * self.num_envs

        def _reset_options(self):
            self._options = [{} for _ in range(self.num_envs)]

        def seed(self, seed=None):
            self._seeds = [seed + row for row in range(self.num_envs)]
            return self._seeds

        def set_options(self, options=None):
            self._options = [options or {}] * self.num_envs if not isinstance(options, list) else options

        def step(self, actions):
            self.step_async(actions)
            return self.step_wait()

        def _get_indices(self, indices):
            return range(self.num_envs) if indices is None else [indices] if isinstance(indices, int) else indices

    class DummyVecEnv(VecEnv):
        """Environments one after the other, in this process."""

        def __init__(self, env_fns):
            self.envs = [make() for make in env_fns]
            super().__init__(len(self.envs), self.envs[0].observation_space, self.envs[0].action_space)

        def get_attr(self, attr_name, indices=None):
            return [self.envs[row].get_wrapper_attr(attr_name) for row in self._get_indices(indices)]

        def reset(self):
            found = [
                env.reset(seed=seed, options=options or None)
                for env, seed, options in zip(self.envs, self._seeds, self._options, strict=True)
            ]
            self.reset_infos = [info for _, info in found]
            self._reset_seeds()
            self._reset_options()
            return self._stack([seen for seen, _ in found])

        def step_async(self, actions):
            self.actions = actions

        def step_wait(self):
            seen, rewards, dones, infos = [], [], [], []
            for row, env in enumerate(self.envs):
                now, reward, terminated, truncated, info = env.step(self.actions[row])
                info["TimeLimit.truncated"] = truncated and not terminated
                if terminated or truncated:
                    info["terminal_observation"] = now
                    now, self.reset_infos[row] = env.reset()
                entry = (now, reward, terminated or truncated, info)
                for part, value in zip((seen, rewards, dones, infos), entry, strict=True):
                    part.append(value)
            return self._stack(seen), np.array(rewards, np.float32), np.array(dones), infos

        def close(self):
            for env in self.envs:
                env.close()

        def _stack(self, seen):
            if isinstance(seen[0], dict):
                return {key: np.stack([one[key] for one in seen]) for key in seen[0]}
            return np.stack(seen)

    for name in ("stable_baselines3", "stable_baselines3.common", "stable_baselines3.common.vec_env"):
        sys.modules.setdefault(name, ModuleType(name))
    sys.modules["stable_baselines3.common.vec_env"].VecEnv = VecEnv

from mmrl.workers.vector.sb3 import GymnasiumVecEnv

__all__ = ["DummyVecEnv", "GymnasiumVecEnv", "VecEnv"]
