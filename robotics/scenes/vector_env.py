"""The tabletop tasks as Gymnasium's `VectorEnv`, for other training loops: `TabletopBatch` with autoreset.

    envs = TabletopVectorEnv("push", 16, settings=BatchSettings(image_size=None, state="full"))
    observations, infos = envs.reset(seed=0)
    observations, rewards, terminations, truncations, infos = envs.step(actions)

Equal, bit for bit, to `TabletopEnv` in `gymnasium.vector.SyncVectorEnv` with the same seeds and actions; the physics
runs in threads.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from gymnasium import spaces
from gymnasium.error import ClosedEnvironmentError
from gymnasium.utils.seeding import np_random
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

from mmrl.errors import UserError
from mmrl.workers.vector.env import row_seeds, rows_to_reset
from robotics.scenes.batch import BatchSettings, TabletopBatch
from robotics.scenes.envs import observation_space
from robotics.scenes.tabletop_tasks import LAYOUTS, layout_seed
from robotics.sim.episodes import ChunkResult, EpisodeSpec

if TYPE_CHECKING:
    from numpy.typing import NDArray

Step = tuple[dict[str, Any], "NDArray[np.float64]", "NDArray[np.bool_]", "NDArray[np.bool_]", dict[str, Any]]
STATE_KEYS = {"full": "state", "proprio": "proprio"}


class TabletopVectorEnv(VectorEnv[Any, Any, Any]):
    """N episodes of tabletop tasks, or of your own tasks, in the threads of this process.

    Observations are a dictionary: `state` (N, S) or `proprio` (N, 10) float32, see `TabletopEnv`; with images `rgb`
    (N, H, W, 3) uint8, and with further cameras `views` (N, V, H, W, 3) uint8. `infos` has success, instruction, layout
    and split, and randomization where something is randomised. The autoreset modes are those of Gymnasium's vector
    environments, see `mmrl.workers.PoolVectorEnv`.

    An episode whose simulation diverges ends with `truncations` True, reward `failed_reward`, its last valid
    observation, and `failed` and `failure`, the reason, in its info.

    Args:
        task: key in `TASKS` or module:Class of your own `MjcfTask`, or a list with one per environment.
        num_envs: N.
        arm: key in `ARMS`, or module:Class of your own `ArmModel`.
        settings: observation, reward, horizon and control.
        split: split from which layouts are drawn.
        autoreset_mode: when the next episode begins.
        failed_reward: reward of the step in which a simulation diverged.
        workers: number of threads; None = the usable cores.
        backend: name of a probed renderer; None = chosen and probed.

    Raises:
        UserError: there is no such task, arm, split, camera, state or reward, or no renderer.
    """

    closed = True  # until the scenes are there; `__del__` closes what is not closed

    def __init__(
        self,
        task: str | Sequence[str] = "reach",
        num_envs: int = 1,
        *,
        arm: str = "panda",
        settings: BatchSettings | None = None,
        split: str = "train",
        autoreset_mode: AutoresetMode | str = AutoresetMode.NEXT_STEP,
        failed_reward: float = math.nan,
        workers: int | None = None,
        backend: str | None = None,
    ) -> None:
        tasks = [task] * num_envs if isinstance(task, str) else list(task)
        if num_envs < 1 or len(tasks) != num_envs:
            raise UserError(
                f"{len(tasks)} tasks for num_envs={num_envs}; expected one task per environment, and at least one "
                "environment"
            )
        layout_seed(split, 0)  # refuses a split that does not exist
        self.num_envs = num_envs
        self.split = split
        self.autoreset_mode = AutoresetMode(autoreset_mode)
        self._failed_reward = failed_reward
        names = list(dict.fromkeys(tasks))
        self.batch = TabletopBatch(names, arm, settings, workers=workers, backend=backend)
        """The simulator; see its `full_state` and `counts`."""
        named = dict(zip(names, self.batch.tasks(), strict=True))
        self._tasks = [named[name] for name in tasks]
        self._key = STATE_KEYS[self.batch.settings.state]
        kinds = [self._key, *(["rgb"] if self.batch.image_size else []), *(["views"] if self.batch.views else [])]
        sizes = {self._key: self.batch.state_size}
        space = observation_space(kinds, self.batch.image_size or (0, 0), len(self.batch.views), sizes)
        self._seen: dict[str, NDArray[Any]] = {
            name: np.zeros((num_envs, *(space[name].shape or ())), space[name].dtype) for name in kinds
        }
        self.single_observation_space = space
        self.single_action_space = spaces.Box(-1.0, 1.0, (self.batch.action_size,), np.float32)
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        rate = self.batch.control_hz
        self.metadata = {"render_modes": ["rgb_array"], "render_fps": rate, "autoreset_mode": self.autoreset_mode}
        self.render_mode = "rgb_array" if "rgb" in kinds else None
        self._rngs: list[np.random.Generator | None] = [None] * num_envs
        self._layouts = [-1] * num_envs
        self._drawn: dict[int, Mapping[str, Any]] = {}
        self._over = np.zeros(num_envs, bool)
        self._begun = False
        self.closed = False

    @property
    def counts(self) -> Mapping[str, int]:
        """Failures by kind since the start."""
        return self.batch.counts

    def reset(
        self, *, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Begin episodes.

        Args:
            seed: seed of the first environment, the next ones count up; a list with a seed or None for each; or None.
            options: `layout`, a number, or a list with one for each environment, drawn where it is missing;
                `reset_mask`, (N,) bool, the environments that begin an episode.

        Returns:
            Observations of all environments, and infos of those that were reset.
        """
        self._check_open()
        seeds = row_seeds(seed, self.num_envs)
        mask, others = rows_to_reset(options, self.num_envs)
        layouts = self._wanted_layouts(others or {})
        for row in np.flatnonzero(mask).tolist():
            # as in Gymnasium: without a new seed an environment continues its own stream
            if seeds[row] is not None or self._rngs[row] is None:
                self._rngs[row] = np_random(seeds[row])[0]
        if not self._begun and not mask.all():
            raise UserError(
                "options['reset_mask'] chooses some environments, but none has begun yet; reset all environments first"
            )
        infos = self._begin(np.flatnonzero(mask).tolist(), layouts)
        return self._look(), self._join(infos)

    def step(self, actions: Any) -> Step:
        """Move every arm for one control step, a tenth of a second at the table; terminations are solved tasks.

        Args:
            actions: (N, A), at the table dx, dy, dz, dyaw, gripper; clipped to -1..1.

        Raises:
            UserError: the actions have another shape or are not finite, or an episode has to be begun first.
        """
        self._check_open()
        given = np.asarray(actions)
        if given.shape != (self.num_envs, self.batch.action_size):
            raise UserError(f"actions have the shape {given.shape}; expected {(self.num_envs, self.batch.action_size)}")
        if not self._begun or (self.autoreset_mode is AutoresetMode.DISABLED and self._over.any()):
            row = int(np.argmax(self._over))
            raise UserError(
                f"no episode is running in environment {row}; reset it first (options={{'reset_mask': bools}})"
            )
        # NEXT_STEP: rows that ended in the last step begin in this one, with reward 0 and their action ignored
        ended = np.flatnonzero(self._over).tolist()
        rewards, flags = np.zeros(self.num_envs), np.zeros((2, self.num_envs), bool)
        infos: dict[int, Any] = {}
        if len(self.batch.live):
            result = self.batch.step_chunk(given[self.batch.live][:, None])
            infos = self._enter(result, rewards, flags)
        if ended:
            # after the step, so that the rows that began do not move in it
            infos.update(self._begin(ended, [None] * self.num_envs))
        over = flags[0] | flags[1]
        if self.autoreset_mode is AutoresetMode.SAME_STEP:
            infos.update(self._begin_next(np.flatnonzero(over).tolist(), infos))
        else:
            self._over = over
        return self._look(), rewards, flags[0], flags[1], self._join(infos)

    def render(self) -> tuple[Any, ...] | None:
        """Images (H, W, 3) as last observed; None without images."""
        return tuple(self._seen["rgb"].copy()) if "rgb" in self._seen else None

    def close_extras(self, **kwargs: Any) -> None:
        """Stop the threads and free the renderers."""
        self.batch.close()

    def _begin(self, rows: Sequence[int], layouts: Sequence[int | None]) -> dict[int, Any]:
        """Begin episodes in the given rows; returns their infos."""
        episodes = {}
        for row in rows:
            rng, layout = self._rngs[row], layouts[row]
            assert rng is not None
            # As in TabletopEnv: a layout is drawn only where none is wanted.
            self._layouts[row] = int(rng.integers(LAYOUTS)) if layout is None else layout
            episodes[row] = EpisodeSpec(self._tasks[row], "", self._layouts[row], self.split)
        # the first time all rows begin together; later only some of them
        result = self.batch.restart(episodes) if self._begun else self.batch.reset(list(episodes.values()))
        self._begun = True
        self._over[list(rows)] = False
        self._drawn |= result.drawn
        self._observe(result, np.ones(len(result.rows), bool))
        return {row: self._info(row, success=False) for row in rows}

    def _begin_next(self, rows: Sequence[int], infos: Mapping[int, Any]) -> dict[int, Any]:
        """Begin the next episodes in rows that have just ended; returns infos with how they ended."""
        if not rows:
            return {}
        # copied before the next episodes overwrite the buffers
        last = {row: {name: part[row].copy() for name, part in self._seen.items()} for row in rows}
        begun = self._begin(rows, [None] * self.num_envs)
        return {row: {"final_info": infos[row], "final_obs": last[row], **begun[row]} for row in rows}

    def _enter(self, result: ChunkResult, rewards: NDArray[np.float64], flags: NDArray[np.bool_]) -> dict[int, Any]:
        """Write a control step into rewards and (2, N) terminations and truncations; returns infos."""
        rows, failed = result.rows, result.failed
        rewards[rows] = np.where(failed, self._failed_reward, result.rewards[:, 0])
        flags[0, rows] = result.terminated & ~failed
        flags[1, rows] = result.truncated | failed
        # a diverged row keeps its last valid observation
        self._observe(result, ~failed)
        infos = {int(row): self._info(int(row), bool(done)) for row, done in zip(rows, result.success, strict=True)}
        for row in rows[failed].tolist():
            infos[row] |= {"failed": True, "failure": result.reasons[row]}
        return infos

    def _observe(self, result: ChunkResult, sound: NDArray[np.bool_]) -> None:
        seen = result.observation
        for name, part in ((self._key, seen.state), ("rgb", seen.images), ("views", seen.views)):
            if part is not None:
                self._seen[name][result.rows[sound]] = part[sound]

    def _look(self) -> dict[str, Any]:
        return {name: part.copy() for name, part in self._seen.items()}

    def _info(self, row: int, success: bool) -> dict[str, Any]:
        task = self._tasks[row]
        instruction = self.batch.tasks()[task]
        info = {"success": success, "instruction": instruction, "layout": self._layouts[row], "split": self.split}
        return info | {"randomization": dict(self._drawn[row])} if row in self._drawn else info

    def _join(self, infos: Mapping[int, Any]) -> dict[str, Any]:
        joined: dict[str, Any] = {}
        for row in sorted(infos):
            joined = self._add_info(joined, infos[row], row)
        return joined

    def _wanted_layouts(self, options: dict[str, Any]) -> list[int | None]:
        wanted = options.pop("layout", None)
        if options:
            raise UserError(
                f"unknown options of reset: {', '.join(map(str, options))}; available: layout and reset_mask; the "
                "split is set when the environment is created"
            )
        each = list(wanted) if isinstance(wanted, (Sequence, np.ndarray)) else [wanted] * self.num_envs
        if len(each) != self.num_envs:
            raise UserError(f"layout has {len(each)} entries; expected {self.num_envs}, one per environment")
        return [None if layout is None else int(layout) for layout in each]

    def _check_open(self) -> None:
        if self.closed:
            raise ClosedEnvironmentError("this TabletopVectorEnv has been closed")
