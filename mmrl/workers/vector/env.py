"""A pool of workers as Gymnasium's `VectorEnv`, for other training loops.

    envs = PoolVectorEnv("CartPole-v1", 8)
    observations, infos = envs.reset(seed=0)
    observations, rewards, terminations, truncations, infos = envs.step(actions)

Seeds, autoreset, `final_obs` and `infos` are those of `gymnasium.vector.AsyncVectorEnv`. Differences: nothing is
pickled, so environments are given by name; an environment that raises, hangs or dies costs the episodes of its process,
and another process takes over; actions are cast to the dtype of their space. Actions, observations, rewards and flags
are in shared memory; a step is one short message to each process and one back.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import gymnasium
import numpy as np
from gymnasium.error import ClosedEnvironmentError
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

from mmrl.errors import UserError
from mmrl.fields import check_config
from mmrl.workers.engine import FailureLog, WorkerFailure, one_line
from mmrl.workers.pool import Answer, Request
from mmrl.workers.vector import spaces
from mmrl.workers.vector.board import Board
from mmrl.workers.vector.environments import Environments, VectorSettings, content_of
from mmrl.workers.vector.gym_spaces import build_space

if TYPE_CHECKING:
    from numpy.typing import NDArray


def row_seeds(seed: int | Sequence[int | None] | None, rows: int) -> list[int | None]:
    """Seeds of all rows."""
    if seed is None:
        return [None] * rows
    if isinstance(seed, (int, np.integer)):
        return [int(seed) + row for row in range(rows)]
    if len(seed) != rows:
        raise UserError(f"seed is a list of {len(seed)}; expected {rows}, one for each environment")
    return [None if value is None else int(value) for value in seed]


def rows_to_reset(options: Mapping[str, Any] | None, rows: int) -> tuple[NDArray[np.bool_], dict[str, Any] | None]:
    """Take `reset_mask` out of the options of a reset."""
    if options is None or "reset_mask" not in options:
        return np.ones(rows, bool), None if options is None else dict(options)
    mask = options["reset_mask"]
    if not isinstance(mask, np.ndarray) or mask.shape != (rows,) or mask.dtype != np.bool_ or not mask.any():
        raise UserError(
            f"options['reset_mask'] is {mask!r:.80}; expected a NumPy array of {rows} bools, at least one of them True"
        )
    return mask.copy(), {key: value for key, value in options.items() if key != "reset_mask"}


def fresh_seed(seed: int | None, failures: int) -> int | None:
    """Seed for an environment that has to start again, from its first one and the number of its failures."""
    return None if seed is None else int(np.random.SeedSequence([abs(seed), failures]).generate_state(1)[0])


STEP = Request({})
Step = tuple[Any, "NDArray[np.float64]", "NDArray[np.bool_]", "NDArray[np.bool_]", dict[str, Any]]


class PoolVectorEnv(VectorEnv[Any, Any, Any]):
    """N environments in worker processes.

    With `NEXT_STEP`, Gymnasium's default, the step after the end of an episode ignores its action and returns the first
    observation of the next episode, with reward 0. With `SAME_STEP` the step that ends an episode already returns that
    observation, and `infos` has `final_obs` and `final_info`. With `DISABLED` the caller resets, see `reset`.

    An environment that breaks (raises, hangs, dies, gives a reward that is not finite or an observation that is NaN)
    ends its episode with `truncations` True, reward `settings.failed_reward`, its last sound observation, and `failed`
    and `failure`, the reason, in its info. Where its process is lost, the next episode runs in a fresh one, seeded from
    the first seed and the number of failures so far.

    Args:
        env: id of a registered environment, with a prefix `module:` for the module that registers it, or
            `module:function` or `path/to/file.py:function` that returns an environment.
        num_envs: N.
        kwargs: keyword arguments of the environment, or a list of them, one an environment; JSON and NumPy arrays.
        autoreset_mode: when the next episode begins.
        settings: processes, time limits and failures.

    Raises:
        UserError: there is no such environment, its spaces have no fixed size or differ, or a setting is out of range.
        RunError: an environment cannot be started; the message holds its traceback.
    """

    closed = True  # until the processes run; `__del__` closes what is not closed

    def __init__(
        self,
        env: str,
        num_envs: int,
        *,
        kwargs: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
        autoreset_mode: AutoresetMode | str = AutoresetMode.NEXT_STEP,
        settings: VectorSettings | None = None,
    ) -> None:
        self.settings = settings or VectorSettings()
        check_config(self.settings)
        if num_envs < 1:
            raise UserError(f"num_envs is {num_envs}; must be at least 1")
        self.num_envs, self.autoreset_mode = num_envs, AutoresetMode(autoreset_mode)
        self.failures = FailureLog(env)
        """Reasons of failures; tracebacks are written once its `folder` is set."""
        self._envs = Environments(env, num_envs, kwargs, self.autoreset_mode.value, self.settings)
        self._pool, self._rows = self._envs.pool, self._envs.rows
        self._lost: set[int] = set()
        self._over = np.ones(num_envs, bool)
        self._failed = np.zeros(num_envs, np.int64)
        self._seeds: list[int | None] = [None] * num_envs
        try:
            self._learn_spaces()
        except BaseException:
            self._pool.close()
            raise
        self.closed = False

    @property
    def counts(self) -> Mapping[str, int]:
        """Failures of workers by kind, and restarts."""
        return self._pool.counts

    def reset(
        self, *, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Begin episodes.

        Args:
            seed: of the first environment, which counts up; a list with a seed or None for each; None for none.
            options: for the environments; `reset_mask`, (N,) bool, chooses those that begin an episode.

        Returns:
            Observations of all environments, and infos of those that were reset.

        Raises:
            UserError: seed or mask do not fit, or an environment refuses its options.
            RunError: an environment does not begin an episode; the message holds its traceback.
        """
        self._check_open()
        seeds = row_seeds(seed, self.num_envs)
        mask, options = rows_to_reset(options, self.num_envs)
        for row in np.flatnonzero(mask):
            self._seeds[row] = seeds[row] if seeds[row] is not None else self._seeds[row]
        infos = self._begin(np.flatnonzero(mask).tolist(), seeds, options)
        return self._look(), self._join(infos)

    def step(self, actions: Any) -> Step:
        """Act for one step in every environment.

        Args:
            actions: value of `action_space`: a row for each environment.

        Returns:
            Observations, (N,) rewards, (N,) terminations, (N,) truncations, infos.

        Raises:
            UserError: the actions do not fit, or an episode has to be begun first.
            RunError: no episode comes to an end any more, only restarts happen.
        """
        self._check_open()
        self._check_begun()
        try:
            spaces.write_batch(self._action, self._board.arrays, "action", actions)
        except spaces.SpaceError as error:
            raise UserError(str(error)) from None
        restarting = sorted(self._lost)
        asked = self._all if not restarting else {slot: STEP for slot in self._all if slot not in self._lost}
        infos = self._gather(self._pool.ask(asked, self.settings.step_timeout_s))
        if restarting:
            infos.update(self._restart(restarting))
        return self._finish(infos)

    def render(self) -> tuple[Any, ...] | None:
        """Images from `render` of each environment; None without a render mode."""
        self._check_open()
        return tuple(self._envs.ask_all("render", {})) if self.render_mode is not None else None

    def call(self, name: str, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Call a method of every environment, or read an attribute; plain data and arrays only."""
        self._check_open()
        return tuple(self._envs.ask_all("call", {"name": name, "args": list(args), "kwargs": kwargs}))

    def get_attr(self, name: str) -> tuple[Any, ...]:
        """Read an attribute of every environment; plain data and arrays only."""
        return self.call(name)

    def set_attr(self, name: str, values: Any) -> None:
        """Set an attribute of every environment, to one value or to a list with a value for each."""
        given = list(values) if isinstance(values, (list, tuple)) else [values] * self.num_envs
        if len(given) != self.num_envs:
            raise UserError(f"{len(given)} values for {self.num_envs} environments")
        self._check_open()
        self._envs.ask_all("set", {"name": name}, given)

    def processes(self) -> list[int]:
        """Numbers of the processes that run now."""
        return self._pool.processes()

    def close_extras(self, **kwargs: Any) -> None:
        """End all processes; arguments, which are for other vector environments, change nothing."""
        self.failures.summary()
        self._pool.close()

    def _learn_spaces(self) -> None:
        """Start the workers and make the shared memory for actions and observations."""
        said = self._envs.start()
        first = said[0]
        self._observation, self._action = first["observation"][0], first["action"][0]
        self.single_observation_space = _common_space("observation", said)
        self.single_action_space = _common_space("action", said)
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self.action_space = batch_space(self.single_action_space, self.num_envs)
        self.metadata = {**first["metadata"], "autoreset_mode": self.autoreset_mode}
        self.render_mode = first["render_mode"]
        self.spec = gymnasium.registry.get(first["id"])
        layout = spaces.leaves(self._observation, "observation", self.num_envs)
        self._seen_names = [name for name, *_ in layout]
        layout += spaces.leaves(self._observation, "final", self.num_envs)
        layout += spaces.leaves(self._action, "action", self.num_envs)
        layout += [["reward", "<f8", [self.num_envs]]]
        layout += [[name, "|b1", [self.num_envs]] for name in ("terminated", "truncated", "failed")]
        self._board = Board.create(layout)
        self._all = dict.fromkeys(range(len(self._rows)), STEP)
        self._look()

    def _begin(
        self, rows: Iterable[int], seeds: Sequence[int | None], options: Mapping[str, Any] | None
    ) -> dict[int, Any]:
        """Begin episodes in some rows; returns their infos."""
        chosen = self._choose(set(rows))
        contents = {
            slot: {
                "places": [row - self._rows[slot][0] for row in begun],
                "seeds": [seeds[row] for row in begun],
                "options": options,
                "path": self._board.path,
                "layout": self._board.layout,
            }
            for slot, begun in chosen.items()
        }
        # In a fresh process those environments that are not to be reset would have to begin again.
        whole = all(begun == self._rows[slot] for slot, begun in chosen.items())
        retries = self.settings.reset_retries if whole else 0
        requests = self._envs.requests("reset", contents)
        answers = self._pool.ask_with_retries(requests, self.settings.reset_timeout_s, retries)
        infos: dict[int, Any] = {}
        for slot, answer in answers.items():
            if isinstance(answer, WorkerFailure):
                self._lost.add(slot)
                raise self._envs.error("did not begin an episode", answer)
            self._lost.discard(slot)
            found = content_of(answer)
            infos.update({row: found[row - self._rows[slot][0]] if found else {} for row in chosen[slot]})
            self._over[chosen[slot]] = False
        return infos

    def _choose(self, rows: Container[int]) -> dict[int, list[int]]:
        """Rows to start by worker: the requested ones, and all of a fresh process."""
        chosen = {slot: [row for row in members if row in rows] for slot, members in enumerate(self._rows)}
        return {slot: self._rows[slot] if slot in self._lost else some for slot, some in chosen.items() if some}

    def _gather(self, answers: Mapping[int, Answer]) -> dict[int, Any]:
        """Infos by row of a step; rows whose worker failed are written as failed."""
        infos: dict[int, Any] = {}
        for slot, answer in answers.items():
            if isinstance(answer, WorkerFailure):
                infos.update(self._lose(slot, answer))
            elif answer.fields:
                infos.update(zip(self._rows[slot], content_of(answer), strict=True))
        if self.autoreset_mode is AutoresetMode.SAME_STEP and self._lost:
            after = self._restart(sorted(self._lost), keep=True)
            infos.update({row: {"final_info": infos[row], **info} for row, info in after.items()})
        elif self._lost:
            self._pool.start_missing()  # its start overlaps with what the caller does next
        return infos

    def _lose(self, slot: int, failure: WorkerFailure) -> dict[int, Any]:
        self._lost.add(slot)
        rows, arrays = self._rows[slot], self._board.arrays
        arrays["terminated"][rows], arrays["truncated"][rows], arrays["failed"][rows] = False, True, True
        self.failures.note(failure)
        return {row: {"failed": True, "failure": f"{failure.kind}: {failure.reason}"} for row in rows}

    def _restart(self, slots: Sequence[int], *, keep: bool = False) -> dict[int, Any]:
        """Begin episodes in fresh processes; the flags of the step keep the failure."""
        rows = [row for slot in slots for row in self._rows[slot]]
        if not keep:
            for name in ("reward", "terminated", "truncated", "failed"):
                self._board.arrays[name][rows] = 0
        self._failed[rows] += 1
        seeds = [fresh_seed(seed, int(count)) for seed, count in zip(self._seeds, self._failed, strict=True)]
        return self._begin(rows, seeds, None)

    def _finish(self, infos: Mapping[int, Any]) -> Step:
        arrays = self._board.arrays
        rewards, terminations, truncations = (arrays[name].copy() for name in ("reward", "terminated", "truncated"))
        over = terminations | truncations
        found = dict(infos)
        if over.any():
            self._settle(rewards, over, found)
        self._over = over if self.autoreset_mode is AutoresetMode.DISABLED else self._over
        return self._look(), rewards, terminations, truncations, self._join(found)

    def _settle(self, rewards: NDArray[np.float64], over: NDArray[np.bool_], infos: dict[int, Any]) -> None:
        """Add the final observations and infos of steps that ended an episode, failures among them."""
        arrays, failed = self._board.arrays, self._board.arrays["failed"]
        same = self.autoreset_mode is AutoresetMode.SAME_STEP
        for row in np.flatnonzero(failed).tolist():
            rewards[row] = self.settings.failed_reward
            for name in self._seen_names:
                shown = name.replace("observation", "final", 1) if same else name
                arrays[shown][row] = self._seen[name][row]
            told = infos[row]["final_info"] if same else infos[row]
            if told["failure"].startswith("diverged: "):
                self.failures.note(WorkerFailure("diverged", one_line(told["failure"].removeprefix("diverged: "))))
        if (over & ~failed).any():
            self._pool.note_success()
        if same:
            for row in np.flatnonzero(over).tolist():
                last = spaces.read(self._observation, arrays, "final", row)
                infos[row] = {"final_info": {}, **infos.get(row, {}), "final_obs": last}

    def _look(self) -> Any:
        """Copy the observations out of the shared memory."""
        self._seen = {name: self._board.arrays[name].copy() for name in self._seen_names}
        return spaces.read(self._observation, self._seen, "observation")

    def _join(self, infos: Mapping[int, Any]) -> dict[str, Any]:
        joined: dict[str, Any] = {}
        for row in sorted(infos):
            joined = self._add_info(joined, infos[row], row)
        return joined

    def _check_open(self) -> None:
        if self.closed:
            raise ClosedEnvironmentError("this PoolVectorEnv has been closed")

    def _check_begun(self) -> None:
        if self._over.any():
            row = int(np.flatnonzero(self._over)[0])
            raise UserError(
                f"no episode runs in environment {row}; reset it first, some environments alone with "
                "options={'reset_mask': (N,) bools}"
            )


def _common_space(name: str, said: Sequence[Mapping[str, Any]]) -> gymnasium.Space[Any]:
    """The space that all environments report."""
    found = [build_space(tree) for one in said for tree in one[name]]
    for row, space in enumerate(found):
        if space != found[0]:
            raise UserError(f"environment {row} has the {name} space {space}; environment 0 has {found[0]}")
    return found[0]
