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

import math
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.error import ClosedEnvironmentError
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

from mmrl.errors import RunError, UserError
from mmrl.fields import bounded, check_config
from mmrl.workers import wire
from mmrl.workers.engine import WorkerFailure, one_line
from mmrl.workers.loading import names_function
from mmrl.workers.memory import usable_cores
from mmrl.workers.row_pool import RowLimits, RowPool
from mmrl.workers.vector import board
from mmrl.workers.wire import Message
from mmrl.workers.worker import Request

if TYPE_CHECKING:
    from numpy.typing import NDArray

SERVICE = Path(__file__).resolve().with_name("vector_service.py")


@dataclass(frozen=True)
class VectorSettings(RowLimits):
    """Distribution of environments over processes, and limits for environments that break."""

    workers: int | None = bounded(None, at_least=1)
    """Number of processes; None uses the number of usable cores, but at most one per environment. The environments of a
    process step one after the other and break together; use `workers=num_envs` for one process each."""
    failed_reward: float = bounded(math.nan, any_float=True)
    """Reward of the step in which an environment broke. It has no reward, so the default is NaN; a training loop that
    cannot skip such steps needs a number."""
    step_timeout_s: float = bounded(120.0, above=0)
    """Time limit in seconds for a step of the environments of a process."""


class EnvironmentProcesses(RowPool[Any]):
    """Processes that each run some of N environments; arguments as for `PoolVectorEnv`."""

    def __init__(
        self,
        env: str,
        num_envs: int,
        kwargs: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None,
        mode: str,
        settings: VectorSettings,
    ) -> None:
        self._mode = mode
        self._start_timeout_s = settings.start_timeout_s
        # Environments are named, not pickled, so that a fresh process can make them from any request.
        self._make, self._kwargs = _what_to_make(env, num_envs, kwargs)
        # As many processes as cores at most: more would only take turns.
        workers = min(settings.workers or usable_cores(), num_envs)
        # Neighbouring environments share a process, so that their rows of the board are a slice.
        self.members = [rows.tolist() for rows in np.array_split(np.arange(num_envs), workers)]
        """Indices of the environments of each process."""
        spec = settings.worker_spec(SERVICE, f"the environment {env}", {})
        super().__init__(env, spec, workers, settings, settings.step_timeout_s)

    def describe(self) -> list[dict[str, Any]]:
        """Start all processes; returns each one's report of its environments."""
        self.start()
        return self._contents("describe", {slot: {} for slot in range(self.size)}, self._start_timeout_s)

    def requests(self, kind: str, contents: Mapping[int, Mapping[str, Any]]) -> dict[int, Request]:
        """Requests by process, each with the setup that a fresh process needs first."""
        requests = {}
        # With every request and not only the first: any process may be a fresh one.
        for slot, content in contents.items():
            members = self.members[slot]
            kwargs = [self._kwargs[member] for member in members]
            make = {"factory": self._make, "kwargs": kwargs, "first": members[0], "mode": self._mode}
            try:
                tree, arrays = wire.encode({**content, "make": make})
            except TypeError as error:
                raise UserError(f"options of an environment: {error}") from None
            requests[slot] = Request({"kind": kind, "content": tree}, arrays)
        return requests

    def ask_all(self, kind: str, content: Mapping[str, Any], each: Sequence[Any] | None = None) -> list[Any]:
        """Replies of all environments, in order; `each` has a value for every environment."""
        contents = {}
        for slot, members in enumerate(self.members):
            contents[slot] = {**content, "values": [each[member] for member in members] if each is not None else []}
        return [value for part in self._contents(kind, contents) for value in part or ()]

    def _contents(
        self, kind: str, contents: Mapping[int, Mapping[str, Any]], timeout_s: float | None = None
    ) -> list[Any]:
        # Not `ask`: a process that is fresh after a failure makes its environments and can answer, too.
        answers = self._pool.ask(self.requests(kind, contents), timeout_s or self._step_timeout_s)
        found = []
        for slot, answer in answers.items():
            if isinstance(answer, WorkerFailure):
                # For the whole vector environment: a call has no result if one environment has none.
                self.broken[slot] = answer
                raise self.error("did not start" if kind == "describe" else f"failed at {kind}", answer)
            found.append(self._read(answer))
        return found

    def _read(self, answer: Message) -> Any:
        if not answer.fields:
            return None
        try:
            return wire.decode(answer.fields["content"], answer.arrays)
        except Exception as error:
            raise RunError(f"an environment's worker sent something unreadable: {error!r:.200}") from None


def row_seeds(seed: int | Sequence[int | None] | None, rows: int) -> list[int | None]:
    """Seeds of all rows."""
    if seed is None:
        return [None] * rows
    # The numbers of Gymnasium's own vector environments.
    if isinstance(seed, (int, np.integer)):
        return [int(seed) + row for row in range(rows)]
    if len(seed) != rows:
        raise UserError(f"seed is a list of {len(seed)}; expected {rows}, one per environment")
    return [None if value is None else int(value) for value in seed]


def rows_to_reset(options: Mapping[str, Any] | None, rows: int) -> tuple[NDArray[np.bool_], dict[str, Any] | None]:
    """Remove `reset_mask` from the options of a reset."""
    if options is None or "reset_mask" not in options:
        return np.ones(rows, bool), None if options is None else dict(options)
    mask = options["reset_mask"]
    # The checks of Gymnasium, with a message instead of an assertion.
    if not isinstance(mask, np.ndarray) or mask.shape != (rows,) or mask.dtype != np.bool_ or not mask.any():
        raise UserError(
            f"options['reset_mask'] is {mask!r:.80}; expected a NumPy array of {rows} bools, at least one of them True"
        )
    return mask.copy(), {key: value for key, value in options.items() if key != "reset_mask"}


def fresh_seed(seed: int | None, failures: int) -> int | None:
    """Seed for an environment that has to restart, derived from its first seed and its number of failures."""
    # A hash, so that the new seeds of neighbouring environments do not meet.
    return None if seed is None else int(np.random.SeedSequence([abs(seed), failures]).generate_state(1)[0])


STEP = Request({})
Step = tuple[Any, "NDArray[np.float64]", "NDArray[np.bool_]", "NDArray[np.bool_]", dict[str, Any]]


class PoolVectorEnv(VectorEnv[Any, Any, Any]):
    """N environments in worker processes.

    With `NEXT_STEP`, Gymnasium's default, the step after the end of an episode ignores its action and returns the first
    observation of the next episode, with reward 0. With `SAME_STEP` the step that ends an episode already returns that
    observation, and `infos` has `final_obs` and `final_info`. With `DISABLED` the caller resets, see `reset`.

    An environment that breaks (raises, hangs, dies, gives a reward that is not finite or an observation that is NaN)
    ends its episode with `truncations` True, reward `settings.failed_reward`, its last valid observation, and `failed`
    and `failure`, the reason, in its info. If its process is lost, the next episode runs in a fresh one, seeded from
    the first seed and the number of failures so far.

    Args:
        env: id of a registered environment, with a prefix `module:` for the module that registers it, or
            `module:function` or `path/to/file.py:function` that returns an environment.
        num_envs: N.
        kwargs: keyword arguments of the environment, or a list of them, one per environment; JSON and NumPy arrays.
        autoreset_mode: when the next episode begins.
        settings: processes, time limits and failures.

    Raises:
        UserError: there is no such environment, its spaces have no fixed size or differ, or a setting is out of range.
        RunError: an environment cannot be started; the message contains its traceback.
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
        self.num_envs = num_envs
        self.autoreset_mode = AutoresetMode(autoreset_mode)
        self._envs = EnvironmentProcesses(env, num_envs, kwargs, self.autoreset_mode.value, self.settings)
        self.failures = self._envs.failures
        self._rows = self._envs.members
        self._over = np.ones(num_envs, bool)
        self._failed = np.zeros(num_envs, np.int64)
        self._seeds: list[int | None] = [None] * num_envs
        # Workers run from here on, and an error in between must not leave them behind.
        try:
            self._learn_spaces()
        except BaseException:
            self._envs.close()
            raise
        self.closed = False

    @property
    def counts(self) -> Mapping[str, int]:
        """Failures of workers by kind, and restarts."""
        return self._envs.counts

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
            RunError: an environment does not begin an episode; the message contains its traceback.
        """
        self._check_open()
        # Checked before any environment begins.
        seeds = row_seeds(seed, self.num_envs)
        mask, options = rows_to_reset(options, self.num_envs)
        # Remembered for processes that are lost later; a reset without a seed keeps the earlier one.
        for row in np.flatnonzero(mask):
            self._seeds[row] = seeds[row] if seeds[row] is not None else self._seeds[row]
        infos = self._begin(np.flatnonzero(mask).tolist(), seeds, options)
        return self._look(), self._join(infos)

    def step(self, actions: Any) -> Step:
        """Take one step in every environment.

        Args:
            actions: value of `action_space`: a row for each environment.

        Returns:
            Observations, (N,) rewards, (N,) terminations, (N,) truncations, infos.

        Raises:
            UserError: the actions do not fit, or an episode has to be begun first.
            RunError: no episode comes to an end any more, only restarts happen.
        """
        self._check_open()
        # With DISABLED the caller resets: an episode that has ended, or never begun, cannot be stepped.
        self._check_begun()
        try:
            board.write_batch(self._action, self._board.arrays, "action", actions)
        except board.SpaceError as error:
            raise UserError(str(error)) from None
        # With NEXT_STEP, the step after a failure is the one in which the next episode begins.
        restarting = sorted(self._envs.broken)
        # Built once: the usual step sends the same empty request to every process.
        asked = self._all if not restarting else {slot: STEP for slot in self._all if slot not in self._envs.broken}
        infos = self._gather(self._envs.ask(asked))
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
        # A list is for each environment, anything else is for all.
        given = list(values) if isinstance(values, (list, tuple)) else [values] * self.num_envs
        if len(given) != self.num_envs:
            raise UserError(f"there are {len(given)} values for {self.num_envs} environments")
        self._check_open()
        self._envs.ask_all("set", {"name": name}, given)

    def processes(self) -> list[int]:
        """Ids of the running processes."""
        return self._envs.processes()

    def close_extras(self, **kwargs: Any) -> None:
        """End all processes; arguments exist for other vector environments and have no effect."""
        self._envs.close()

    def _learn_spaces(self) -> None:
        """Start the workers and make the shared memory for actions and observations."""
        said = self._envs.describe()
        first = said[0]
        self._observation = first["observation"][0]
        self._action = first["action"][0]
        self.single_observation_space = _common_space("observation", said)
        self.single_action_space = _common_space("action", said)
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self.action_space = batch_space(self.single_action_space, self.num_envs)
        self.metadata = {**first["metadata"], "autoreset_mode": self.autoreset_mode}
        self.render_mode = first["render_mode"]
        # The registry's entry, as Gymnasium's wrappers expect it; None for a function of the user.
        self.spec = gymnasium.registry.get(first["id"])
        layout = board.leaves(self._observation, "observation", self.num_envs)
        self._seen_names = [name for name, *_ in layout]
        # A place of their own: with SAME_STEP the observation of the next episode is already in the other one.
        layout += board.leaves(self._observation, "final", self.num_envs)
        layout += board.leaves(self._action, "action", self.num_envs)
        layout += [["reward", "<f8", [self.num_envs]]]
        layout += [[name, "|b1", [self.num_envs]] for name in ("terminated", "truncated", "failed")]
        self._board = board.Board.create(layout)
        self._all = dict.fromkeys(range(len(self._rows)), STEP)
        self._look()

    def _begin(
        self, rows: Iterable[int], seeds: Sequence[int | None], options: Mapping[str, Any] | None
    ) -> dict[int, Any]:
        """Begin episodes in some rows; returns their infos."""
        # A lost process has no environments, so all of its rows begin.
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
        answers = self._envs.begin(self._envs.requests("reset", contents), retries=None if whole else 0)
        infos: dict[int, Any] = {}
        for slot, found in answers.items():
            if isinstance(found, WorkerFailure):
                raise self._envs.error("did not begin an episode", found)
            infos.update({row: found[row - self._rows[slot][0]] if found else {} for row in chosen[slot]})
            self._over[chosen[slot]] = False
        return infos

    def _choose(self, rows: Container[int]) -> dict[int, list[int]]:
        """Rows to start by worker: the requested ones, and all of a fresh process."""
        # Processes without a requested row are left alone.
        chosen = {slot: [row for row in members if row in rows] for slot, members in enumerate(self._rows)}
        return {slot: self._rows[slot] if slot in self._envs.broken else some for slot, some in chosen.items() if some}

    def _gather(self, answers: Mapping[int, Any]) -> dict[int, Any]:
        """Infos by row of a step; rows whose process failed are written as failed."""
        infos: dict[int, Any] = {}
        lost = [slot for slot, found in answers.items() if isinstance(found, WorkerFailure)]
        for slot, found in answers.items():
            if slot in lost:
                infos.update(self._note_lost(self._rows[slot], found))
            elif found:
                infos.update(zip(self._rows[slot], found, strict=True))
        if lost and self.autoreset_mode is AutoresetMode.SAME_STEP:
            after = self._restart(lost, keep=True)
            infos.update({row: {"final_info": infos[row], **info} for row, info in after.items()})
        elif lost:
            self._envs.start_missing()  # its start overlaps with what the caller does next
        return infos

    def _note_lost(self, rows: Sequence[int], failure: WorkerFailure) -> dict[int, Any]:
        arrays = self._board.arrays
        # A broken episode ends as truncated: no terminal state was reached.
        arrays["terminated"][rows], arrays["truncated"][rows], arrays["failed"][rows] = False, True, True
        return {row: {"failed": True, "failure": f"{failure.kind}: {failure.reason}"} for row in rows}

    def _restart(self, slots: Sequence[int], *, keep: bool = False) -> dict[int, Any]:
        """Begin episodes in fresh processes; the flags of the step keep the failure."""
        rows = [row for slot in slots for row in self._rows[slot]]
        # A fresh process has not stepped: these numbers are those of the failed step, which was reported before.
        if not keep:
            for name in ("reward", "terminated", "truncated", "failed"):
                self._board.arrays[name][rows] = 0
        # A new seed for each failure, or an environment that fails in this episode would fail for ever.
        self._failed[rows] += 1
        seeds = [fresh_seed(seed, int(count)) for seed, count in zip(self._seeds, self._failed, strict=True)]
        return self._begin(rows, seeds, None)

    def _finish(self, infos: Mapping[int, Any]) -> Step:
        arrays = self._board.arrays
        # Copies: the caller keeps them, and processes write the next step into the same memory.
        rewards, terminations, truncations = (arrays[name].copy() for name in ("reward", "terminated", "truncated"))
        over = terminations | truncations
        found = dict(infos)
        # Most steps end no episode, and skip all of this.
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
            # The last sound observation: the one that came with the failure may be half written.
            for name in self._seen_names:
                shown = name.replace("observation", "final", 1) if same else name
                arrays[shown][row] = self._seen[name][row]
            # Failures of a process are noted by the pool; numbers that diverged, by nobody yet.
            told = infos[row]["final_info"] if same else infos[row]
            if told["failure"].startswith("diverged: "):
                self.failures.note(WorkerFailure("diverged", one_line(told["failure"].removeprefix("diverged: "))))
        # An episode that ended by itself shows that the environment works.
        if (over & ~failed).any():
            self._envs.note_success()
        if same:
            for row in np.flatnonzero(over).tolist():
                # Gymnasium's `final_obs`: the observation of the episode that ended.
                last = board.read(self._observation, arrays, "final", row)
                infos[row] = {"final_info": {}, **infos.get(row, {}), "final_obs": last}

    def _look(self) -> Any:
        """Copy the observations out of the shared memory."""
        # Kept apart from what the caller gets, since it is the last sound one if the next step fails.
        self._seen = {name: self._board.arrays[name].copy() for name in self._seen_names}
        return board.read(self._observation, self._seen, "observation")

    def _join(self, infos: Mapping[int, Any]) -> dict[str, Any]:
        joined: dict[str, Any] = {}
        # In order of rows, so that the arrays of `infos` do not depend on which process answered first.
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
                f"no episode is running in environment {row}; reset it first (to reset only some environments, "
                "use options={'reset_mask': (N,) bools})"
            )


def _common_space(name: str, said: Sequence[Mapping[str, Any]]) -> gymnasium.Space[Any]:
    """The space that all environments report."""
    # One space for all: observations are stacked.
    found = [_build_space(tree) for one in said for tree in one[name]]
    for row, space in enumerate(found):
        if space != found[0]:
            raise UserError(f"environment {row} has the {name} space {space}, but environment 0 has {found[0]}")
    return found[0]


def _build_space(tree: Mapping[str, Any]) -> spaces.Space[Any]:
    """Build a space from its description."""
    kind = tree["kind"]
    if kind == "Dict":
        return spaces.Dict({key: _build_space(part) for key, part in tree["parts"]})
    if kind == "Tuple":
        return spaces.Tuple([_build_space(part) for _, part in tree["parts"]])
    dtype: Any = np.dtype(tree["dtype"])
    if kind == "Box":
        return spaces.Box(tree["low"], tree["high"], tuple(tree["shape"]), dtype.type)
    if kind == "Discrete":
        return spaces.Discrete(int(tree["n"]), start=int(tree["start"]), dtype=dtype.type)
    if kind == "MultiDiscrete":
        return spaces.MultiDiscrete(tree["nvec"], dtype=dtype.type, start=tree["start"])
    shape = tuple(tree["shape"])
    # Gymnasium takes a number for one axis.
    return spaces.MultiBinary(shape if len(shape) > 1 else shape[0])


def _what_to_make(
    env: str, num_envs: int, kwargs: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None
) -> tuple[str, list[dict[str, Any]]]:
    """A factory, and the arguments with which each environment calls it."""
    # A list gives each environment its own.
    each = [dict(kwargs or {})] * num_envs if kwargs is None or isinstance(kwargs, Mapping) else [*map(dict, kwargs)]
    if len(each) != num_envs:
        raise UserError(f"kwargs has {len(each)} entries; expected {num_envs}, one per environment")
    if names_function(env):
        return env, each
    # An id of Gymnasium goes through `gymnasium.make`.
    return "gymnasium:make", [{"id": env, **options} for options in each]
