"""A Gymnasium vector environment as a `VecEnv` of Stable-Baselines3.

    envs = PoolVectorEnv("CartPole-v1", 8, autoreset_mode="SameStep", settings=VectorSettings(failed_reward=0.0))
    model = PPO("MlpPolicy", VecMonitor(GymnasiumVecEnv(envs)))

Observations, rewards, ends, `info` and `reset_infos` are those of Stable-Baselines3's `DummyVecEnv` over the same
environments. Importing this file imports stable_baselines3, which no extra of the suite installs.

Source: DLR-RM/stable-baselines3 2.9, common/vec_env/dummy_vec_env.py and docs/guide/vec_envs.rst.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv

from mmrl.errors import UserError

try:
    from stable_baselines3.common.vec_env import VecEnv
except ImportError as error:
    raise UserError("Stable-Baselines3 is not installed: pip install stable-baselines3") from error

if TYPE_CHECKING:
    from numpy.typing import NDArray

Indices = int | Iterable[int] | None
ENDING = ("final_obs", "final_info")
"""Entries of the infos about the episodes that ended; other entries are about the episodes that began."""


class GymnasiumVecEnv(VecEnv):
    """N environments of a `gymnasium.vector.VectorEnv` in which the step that ends an episode also begins the next one.

    Args:
        envs: a `PoolVectorEnv`, `TabletopVectorEnv` or one of Gymnasium's, with the autoreset mode SAME_STEP.

    Raises:
        UserError: it has another mode.
    """

    def __init__(self, envs: VectorEnv[Any, Any, Any]) -> None:
        mode = envs.metadata.get("autoreset_mode")
        if mode is None or AutoresetMode(mode) is not AutoresetMode.SAME_STEP:
            raise UserError(f"the autoreset mode is {mode}; Stable-Baselines3 requires autoreset_mode='SameStep'")
        self.envs = envs
        self._actions: Any = None
        super().__init__(envs.num_envs, envs.single_observation_space, envs.single_action_space)

    def reset(self) -> Any:
        """Begin episodes with the seeds and options that were set since the last reset; returns observations."""
        seeds = None if self._seeds[0] is None else [int(seed) for seed in self._seeds]
        if any(options != self._options[0] for options in self._options):
            raise UserError(
                "the environments have different options, but a vector environment takes the same options for all"
            )
        # Gymnasium's vector environments take a list of seeds, its base class declares one
        observations, infos = self.envs.reset(seed=seeds, options=self._options[0] or None)  # type: ignore[arg-type]
        self.reset_infos = [info_of(infos, row) for row in range(self.num_envs)]
        self._reset_seeds()
        self._reset_options()
        return observations

    def step_async(self, actions: NDArray[Any]) -> None:
        """Store the actions for `step_wait`."""
        self._actions = actions

    def step_wait(self) -> tuple[Any, NDArray[np.float32], NDArray[np.bool_], list[dict[str, Any]]]:
        """Step with the stored actions.

        Returns:
            Observations, those of the next episodes where one ended; (N,) rewards; (N,) whether an episode ended; N
            infos, with `TimeLimit.truncated` and, where it ended, `terminal_observation`.
        """
        observations, rewards, terminations, truncations, infos = self.envs.step(self._actions)
        over = terminations | truncations
        begun = {key: values for key, values in infos.items() if key.removeprefix("_") not in ENDING}
        each = []
        for row in range(self.num_envs):
            now = info_of(begun, row)
            if over[row]:
                self.reset_infos[row] = now
                now = info_of(infos.get("final_info", {}), row) | {"terminal_observation": infos["final_obs"][row]}
            # Solved in the last step that is allowed: nothing follows, so the value of the end is not estimated.
            each.append(now | {"TimeLimit.truncated": bool(truncations[row] and not terminations[row])})
        return observations, rewards.astype(np.float32), over, each

    def close(self) -> None:
        """Close the environments."""
        self.envs.close()

    def get_images(self) -> Sequence[Any]:
        """Images of the environments' `render`; None for each without a render mode."""
        return self.envs.render() or [None] * self.num_envs

    def get_attr(self, attr_name: str, indices: Indices = None) -> list[Any]:
        """Read an attribute of some environments."""
        if attr_name == "render_mode":  # read by the base class of environments that have no `get_attr`, too
            return [self.envs.render_mode for _ in self._get_indices(indices)]
        found = self.envs.get_attr(attr_name)  # type: ignore[attr-defined]
        return [found[row] for row in self._get_indices(indices)]

    def set_attr(self, attr_name: str, value: Any, indices: Indices = None) -> None:
        """Set an attribute of some environments to a value."""
        chosen = set(self._get_indices(indices))
        if len(chosen) == self.num_envs:
            values = [value] * self.num_envs
        else:
            values = [value if row in chosen else old for row, old in enumerate(self.get_attr(attr_name))]
        self.envs.set_attr(attr_name, values)  # type: ignore[attr-defined]

    def env_method(self, method_name: str, *args: Any, indices: Indices = None, **kwargs: Any) -> list[Any]:
        """Call a method of all environments; raises UserError if `indices` omits any."""
        if len(set(self._get_indices(indices))) < self.num_envs:
            raise UserError(
                f"env_method({method_name!r}) with indices {indices}: the method can only be called on all environments"
            )
        return list(self.envs.call(method_name, *args, **kwargs))  # type: ignore[attr-defined]

    def env_is_wrapped(self, wrapper_class: type[Any], indices: Indices = None) -> list[bool]:
        """False for each, since wrappers run with the environments."""
        return [False for _ in self._get_indices(indices)]


def info_of(infos: Mapping[str, Any], row: int) -> dict[str, Any]:
    """The info of one environment from a vector environment's infos, whose keys `_name` tell which rows have `name`."""
    found = {}
    for key, values in infos.items():
        present = infos.get(f"_{key}")
        if present is None or not present[row]:  # a mask, or of other rows
            continue
        value = info_of(values, row) if isinstance(values, Mapping) else values[row]
        found[key] = value.item() if isinstance(value, np.generic) else value
    return found
