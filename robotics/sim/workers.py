"""Episodes in processes of their own: other engines, other Pythons, and environments that may break.

    settings = WorkerSettings("gymnasium:make", {"id": "FetchReach-v4", "render_mode": "rgb_array"}, workers=4)
    with WorkerPool(settings) as sim:
        first = sim.reset([EpisodeSpec("FetchReach-v4", "reach", layout) for layout in range(4)])
        while len(sim.live):
            chunk = sim.step_chunk(policy(first.observation.of(sim.live)))

A worker that dies, hangs or raises takes one episode with it: the row has failed, its group of processes is killed and
another one started, whose start overlaps with the episodes that go on. An episode that cannot begin is tried again in
a fresh process a few times and then dropped. Nothing of this is ever a reward of 0.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import weakref
import zlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from mmrl.errors import RunError, UserError
from robotics.sim.backends import PROBED, Backend, find_backend
from robotics.sim.episodes import ChunkResult, EpisodeSpec
from robotics.sim.worker_process import StartSpec, WorkerFailure, WorkerProcess, stop_all, wait_for_answers

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

    from robotics.sim.wire import Message

__all__ = ["WorkerPool", "WorkerSettings", "layout_seed"]

HELD_OUT_SEED = 1 << 30


@dataclass(frozen=True)
class WorkerSettings:
    """Which environment, in which Python, and how long to wait for it."""

    factory: str
    """`gymnasium:make`, `module:function` or `file.py:function`; returns a gymnasium.Env or an env_worker.RowEnv."""
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of the factory; JSON."""
    adapter: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of gym_adapter.GymRow, where the factory returns a gymnasium.Env."""
    workers: int = 2
    """Processes, one episode each at a time."""
    python: str | None = None
    """Interpreter of the environment; this one, with its module paths, when None."""
    images: bool = True
    """Whether observations carry a picture."""
    renderer: str | None = None
    """egl, osmesa, glfw or cgl; found out when None."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Environment variables on top of this process's."""
    end_at_success: bool = True
    """Whether the control step that succeeds ends the episode where the environment itself goes on."""
    start_timeout_s: float = 180.0
    """Seconds for imports and construction."""
    reset_timeout_s: float = 120.0
    """Seconds for beginning an episode, which may load another scene."""
    call_timeout_s: float = 120.0
    """Seconds for a chunk of actions."""
    heartbeat_timeout_s: float = 30.0
    """Seconds without a sign of life, which only code that keeps Python's lock, or a stopped process, makes."""
    reset_retries: int = 2
    """How often an episode that did not begin is tried again."""
    max_restarts: int = 20
    """Restarts a worker without one episode that came to its end, after which the run stops."""

    def validate(self) -> None:
        """Refuse what cannot work.

        Raises:
            UserError: a number is out of range, or options are not JSON.
        """
        for name in ("workers", "max_restarts"):
            if getattr(self, name) < 1:
                raise UserError(f"{name} is {getattr(self, name)}; must be at least 1")
        if self.reset_retries < 0:
            raise UserError(f"reset_retries is {self.reset_retries}; must be at least 0")
        for name in ("start_timeout_s", "reset_timeout_s", "call_timeout_s", "heartbeat_timeout_s"):
            if not getattr(self, name) > 0:
                raise UserError(f"{name} is {getattr(self, name)}; must be above 0")
        for name in ("kwargs", "adapter"):
            try:
                json.dumps(getattr(self, name), allow_nan=False)
            except (TypeError, ValueError) as error:
                raise UserError(f"{name} of an environment must be what JSON can say: {error}") from None


def layout_seed(episode: EpisodeSpec) -> int:
    """Seed of an episode: the layout's number, in a range of its own for every split.

    Args:
        episode: what is to begin.

    Returns:
        Seed below 2**32; that of `train` is the layout itself.
    """
    known = {"train": 0, "held_out": HELD_OUT_SEED}
    start = known[episode.split] if episode.split in known else 2 * HELD_OUT_SEED + zlib.crc32(episode.split.encode())
    return (start + episode.layout) % (1 << 32)


class WorkerPool:
    """A `RobotSim` whose rows are processes; the state is what the environment's adapter makes of it.

    Args:
        settings: environment and time limits.

    Raises:
        UserError: a setting is out of range, or the environment says that it was asked for something impossible.
        RunError: the environment cannot be started; the message holds its traceback.
    """

    def __init__(self, settings: WorkerSettings) -> None:
        settings.validate()
        self._settings = settings
        self.renderer = _choose_renderer(settings)
        self._spec = _start_spec(settings, self.renderer)
        self.counts: dict[str, int] = dict.fromkeys(COUNTS, 0)
        self.live: NDArray[np.int64] = np.zeros(0, np.int64)
        self._restarts_in_a_row, self._last = 0, WorkerFailure("", "")
        self._slots: list[int] = []
        self._broken: dict[int, WorkerFailure] = {}
        self._tasks_at: list[str | None] = [None] * settings.workers
        self._processes: list[WorkerProcess | None] = [WorkerProcess(self._spec) for _ in range(settings.workers)]
        self._stop = weakref.finalize(self, _stop_and_forget, self._processes)
        self._hello = self._first_hello()
        self.action_size, self.state_size = int(self._hello["action_size"]), int(self._hello["state_size"])
        self.horizon, self.capacity = int(self._hello["horizon"]), settings.workers
        size = self._hello["image_size"]
        self._frame_size: tuple[int, int] | None = (int(size[0]), int(size[1])) if size else None
        self.image_size = self._frame_size if settings.images else None

    def tasks(self) -> Mapping[str, str]:
        """Names of the tasks with their instructions."""
        return dict(self._hello["tasks"])

    def layouts(self) -> Mapping[str, int | None]:
        """Names of the splits with their numbers of layouts; None for any number."""
        return dict(self._hello["layouts"])

    def reset(self, episodes: Sequence[EpisodeSpec]) -> ChunkResult:
        """Begin episodes; what does not begin is tried again in a fresh process, then it has failed.

        Args:
            episodes: R of them, at most one a worker.

        Returns:
            Result of a chunk of no steps.

        Raises:
            UserError: there are too many, or there is no such task, split or layout.
            RunError: no episode comes to an end any more, only restarts happen.
        """
        self._check_episodes(episodes)
        self._slots, self._broken = self._assign(episodes), {}
        answers: dict[int, Message | WorkerFailure] = {}
        waiting = list(range(len(episodes)))
        for _ in range(1 + self._settings.reset_retries):
            if not waiting:
                break
            begun = self._begin(waiting, episodes)
            answers.update(begun)
            waiting = [row for row, answer in begun.items() if _may_have_had_bad_luck(answer)]
        result = self._assemble(np.arange(len(episodes)), 0, answers, ())
        self.live = result.rows[~result.failed]
        return result

    def step_chunk(self, actions: ArrayLike, record: Collection[int] = ()) -> ChunkResult:
        """Step the live rows.

        Args:
            actions: (L, K, A) in -1..1, in the order of `live`; what lies outside is clipped.
            record: rows of which every control step is drawn.

        Returns:
            What happened; rows that ended or failed have left `live`.

        Raises:
            UserError: the shape does not fit, an action is not finite, or the environment cannot draw.
        """
        controls = np.asarray(actions, np.float64)
        self._check_actions(controls, record)
        rows = self.live
        commands: dict[int, tuple[dict[str, Any], dict[str, np.ndarray]]] = {
            int(row): ({"kind": "step_chunk", "record": int(row) in record}, {"actions": chunk})
            for row, chunk in zip(rows, controls, strict=True)
        }
        answers = self._ask(commands, self._settings.call_timeout_s)
        result = self._assemble(rows, controls.shape[1], answers, record)
        over = result.terminated | result.truncated
        if over.any():
            self._restarts_in_a_row = 0
        self.live = rows[~(over | result.failed)]
        self._restart_missing()
        return result

    def expert_actions(self) -> NDArray[np.float64]:
        """What the environments' own experts would do now.

        Returns:
            (L, A) in the order of `live`; zeros for a row that broke down, which the next `step_chunk` reports.

        Raises:
            UserError: the environment has no expert.
        """
        if not self._hello["expert"]:
            raise UserError(f"the environment {self._settings.factory} has no expert of its own")
        answers = self._ask({int(row): ({"kind": "expert"}, {}) for row in self.live}, self._settings.call_timeout_s)
        actions = np.zeros((len(self.live), self.action_size))
        for place, row in enumerate(self.live):
            answer = answers[int(row)]
            if not isinstance(answer, WorkerFailure):
                actions[place] = answer.arrays["action"]
        return actions

    def render(self, row: int) -> NDArray[np.uint8]:
        """Draw a row as it is now.

        Args:
            row: number of an episode of the last `reset`, ended or not.

        Returns:
            (H, W, 3) RGB.

        Raises:
            UserError: there is no such row, or the environment cannot draw.
            RunError: the row broke down.
        """
        if not 0 <= row < len(self._slots) or self._frame_size is None:
            raise UserError(f"there is no picture of row {row}: {len(self._slots)} rows, pictures {self._frame_size}")
        answer = self._ask({row: ({"kind": "render"}, {})}, self._settings.call_timeout_s)[row]
        if isinstance(answer, WorkerFailure):
            raise RunError(f"row {row} {answer.kind}: {answer.reason}\n{answer.evidence}")
        return answer.arrays["image"]

    def describe(self) -> Mapping[str, Any]:
        """Everything that a number measured here depends on."""
        settings = self._settings
        return {
            "simulator": settings.factory,
            "kwargs": dict(settings.kwargs),
            "adapter": dict(settings.adapter),
            "renderer": f"{self.renderer.name}: {self.renderer.device}" if self.renderer else "none",
            "horizon": self.horizon,
            "image_size": list(self._frame_size) if self._frame_size else None,
            "end_at_success": settings.end_at_success,
            "python": self._hello["python"],
            "numpy": self._hello["numpy"],
            **self._hello["describe"],
        }

    def processes(self) -> list[int]:
        """Numbers of the processes that run now."""
        return [process.pid for process in self._processes if process is not None]

    def close(self) -> None:
        """End all processes; also done when the interpreter ends."""
        self.live = np.zeros(0, np.int64)
        self._stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _first_hello(self) -> dict[str, Any]:
        started = [process for process in self._processes if process is not None]
        wait_for_answers(started)
        for slot, process in enumerate(started):
            if isinstance(process.answer, WorkerFailure):
                trouble = process.answer
                if trouble.for_user or all(isinstance(other.answer, WorkerFailure) for other in started):
                    self._stop()
                    _refuse_to_start(self._settings.factory, trouble, self.renderer)
                self._lose(slot, trouble)
        return next(process.hello for process in started if process.hello is not None)

    def _check_episodes(self, episodes: Sequence[EpisodeSpec]) -> None:
        if not self._stop.alive:
            raise RuntimeError("this WorkerPool has been closed")
        if not 1 <= len(episodes) <= len(self._processes):
            raise UserError(f"{len(episodes)} episodes for {len(self._processes)} workers; 1 to that many are possible")
        tasks, layouts = self._hello["tasks"], self._hello["layouts"]
        for episode in episodes:
            if episode.task not in tasks:
                raise UserError(f"there is no task {episode.task!r}; there are: {', '.join(sorted(tasks))}")
            if episode.split not in layouts:
                raise UserError(f"there is no split {episode.split!r}; there are: {', '.join(sorted(layouts))}")
            count = layouts[episode.split]
            if episode.layout < 0 or (count is not None and episode.layout >= count):
                last = "any number" if count is None else count - 1
                raise UserError(f"there is no layout {episode.layout} of {episode.split}; there are 0 to {last}")

    def _check_actions(self, controls: NDArray[np.float64], record: Collection[int]) -> None:
        if not len(self.live):
            raise UserError("no row is live; reset first")
        expected = (len(self.live), self.action_size)
        if controls.ndim != 3 or (controls.shape[0], controls.shape[2]) != expected or controls.shape[1] < 1:
            raise UserError(
                f"actions have the shape {controls.shape}; expected ({expected[0]} live rows, K >= 1, "
                f"{expected[1]} entries)"
            )
        bad = self.live[~np.isfinite(controls).all(axis=(1, 2))]
        if len(bad):
            raise UserError(f"actions of the rows {bad.tolist()} are not finite")
        if self._frame_size is None and any(int(row) in record for row in self.live):
            raise UserError(f"rows cannot be recorded: {self._settings.factory} does not draw")

    def _assign(self, episodes: Sequence[EpisodeSpec]) -> list[int]:
        """A worker each, the one that has the task's scene where there is one: changing it may take seconds."""
        free = list(range(len(self._processes)))
        slots: dict[int, int] = {}
        for row, episode in enumerate(episodes):
            same = next((slot for slot in free if self._tasks_at[slot] == episode.task), None)
            if same is not None:
                slots[row] = same
                free.remove(same)
        for row in range(len(episodes)):
            if row not in slots:
                slots[row] = free.pop(0)
        for row, episode in enumerate(episodes):
            self._tasks_at[slots[row]] = episode.task
        return [slots[row] for row in range(len(episodes))]

    def _begin(self, rows: Iterable[int], episodes: Sequence[EpisodeSpec]) -> dict[int, Message | WorkerFailure]:
        """Start what is not running, then reset these rows."""
        self._broken = {}
        self._restart_missing()
        if self._restarts_in_a_row > self._settings.max_restarts * len(self._processes):
            last = self._last
            raise RunError(
                f"{self._restarts_in_a_row} restarts without one episode of {self._settings.factory} that came to its "
                f"end; the last worker {last.kind}: {last.reason}\n{last.evidence}"
            )
        commands: dict[int, tuple[dict[str, Any], dict[str, np.ndarray]]] = {
            row: (
                {
                    "kind": "reset",
                    "task": episodes[row].task,
                    "layout": episodes[row].layout,
                    "split": episodes[row].split,
                    "seed": layout_seed(episodes[row]),
                },
                {},
            )
            for row in rows
        }
        return self._ask(commands, self._settings.reset_timeout_s)

    def _ask(
        self, commands: Mapping[int, tuple[Mapping[str, Any], Mapping[str, np.ndarray]]], timeout_s: float
    ) -> dict[int, Message | WorkerFailure]:
        """Give rows their commands and wait for all; who has no good answer is killed and counted."""
        processes = {row: process for row in commands if (process := self._processes[self._slots[row]]) is not None}
        self._await_hello(processes)
        ready = {row: process for row, process in processes.items() if row not in self._broken}
        for row, process in ready.items():
            process.send(*commands[row], timeout_s=timeout_s)
        wait_for_answers(list(ready.values()))
        answers: dict[int, Message | WorkerFailure] = {
            row: self._broken[row] for row in commands if row in self._broken
        }
        for row, process in ready.items():
            answers[row] = answer = self._note_failure(process.answer, str(commands[row][0]["kind"]))
            if isinstance(answer, WorkerFailure):
                self._lose(self._slots[row], answer)
                self._broken[row] = answer
        return answers

    def _await_hello(self, processes: Mapping[int, WorkerProcess]) -> None:
        starting = {row: process for row, process in processes.items() if process.hello is None}
        wait_for_answers(list(starting.values()))
        for row, process in starting.items():
            if isinstance(process.answer, WorkerFailure):
                self._lose(self._slots[row], process.answer)
                self._broken[row] = process.answer

    def _note_failure(self, answer: Message | WorkerFailure | None, kind: str) -> Message | WorkerFailure:
        if answer is None or isinstance(answer, WorkerFailure):
            return answer or WorkerFailure("crashed", "no answer")
        expected: dict[str, tuple[int, ...]] = {}
        if kind in ("reset", "step_chunk"):
            expected["state"] = (self.state_size,)
        if kind == "expert":
            expected["action"] = (self.action_size,)
        if kind == "render" or (kind != "expert" and self.image_size is not None):
            expected["image"] = (*(self._frame_size or ()), 3)
        for name, shape in expected.items():
            came = answer.arrays[name].shape if name in answer.arrays else None
            if came != shape:
                return WorkerFailure("raised", f"{name} has the shape {came}; expected {shape}")
        for name in ("state", "rewards", "action"):
            if name in answer.arrays and not np.isfinite(answer.arrays[name]).all():
                return WorkerFailure("diverged", f"{name} is not finite")
        return answer

    def _lose(self, slot: int, trouble: WorkerFailure) -> None:
        """Count what went wrong and end the process, except where only its numbers did."""
        if trouble.for_user:
            self._stop()
            raise UserError(trouble.reason)
        self.counts[trouble.kind] += 1
        if trouble.kind == "diverged":
            return
        self._last = trouble
        process, self._processes[slot] = self._processes[slot], None
        if process is not None:
            process.kill()

    def _restart_missing(self) -> None:
        for slot, process in enumerate(self._processes):
            if process is None:
                self._processes[slot] = WorkerProcess(self._spec)
                self.counts["restarted"] += 1
                self._restarts_in_a_row += 1

    def _assemble(
        self,
        rows: NDArray[np.int64],
        length: int,
        answers: Mapping[int, Message | WorkerFailure],
        record: Collection[int],
    ) -> ChunkResult:
        result = ChunkResult.empty(rows, length, self.state_size, self.image_size)
        reasons: dict[int, str] = {}
        frames: dict[int, NDArray[np.uint8]] = {}
        for place, row in enumerate(rows.tolist()):
            answer = answers[row]
            if isinstance(answer, WorkerFailure):
                reasons[row] = f"{answer.kind}: {answer.reason}"
                result.failed[place], result.rewards[place] = True, np.nan
                self.counts["dropped"] += 1
                continue
            _fill(result, place, answer)
            if row in record:
                frames[row] = answer.arrays["frames"]
        return ChunkResult(**{**vars(result), "reasons": reasons, "frames": frames})


def _may_have_had_bad_luck(answer: Message | WorkerFailure) -> bool:
    """Numbers that are not finite come again from the same layout; a process may fare better."""
    return isinstance(answer, WorkerFailure) and answer.kind != "diverged"


def _fill(result: ChunkResult, place: int, answer: Message) -> None:
    """Copy an answer into its row."""
    arrays = answer.arrays
    result.observation.state[place] = arrays["state"]
    if result.observation.images is not None:
        result.observation.images[place] = arrays["image"]
    if "rewards" in arrays:
        steps = len(arrays["rewards"])
        result.rewards[place, :steps], result.steps[place] = arrays["rewards"], steps
        result.success[place], result.terminated[place], result.truncated[place] = arrays["flags"]


def _choose_renderer(settings: WorkerSettings) -> Backend | None:
    """The one that draws here; a foreign Python's own mujoco is not probed, its OpenGL libraries are the same."""
    if settings.renderer is None and importlib.util.find_spec("mujoco") is None:
        return None
    found = find_backend(settings.renderer)
    if found is None and settings.renderer is not None:
        raise UserError(f"the renderer {settings.renderer!r} does not draw on this machine; leave it out to try others")
    return found


def _start_spec(settings: WorkerSettings, renderer: Backend | None) -> StartSpec:
    variables = {**os.environ}
    if settings.python is not None:
        for name in ("PYTHONPATH", "PYTHONHOME"):
            variables.pop(name, None)
    # Threads that wait for each other's cores cost more than they bring with a process a row.
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        variables.setdefault(name, "1")
    if renderer is not None:
        variables["MUJOCO_GL"] = renderer.name
        variables[PROBED] = f"{renderer.name}|{renderer.device}"
        if renderer.name in ("egl", "osmesa"):
            variables["PYOPENGL_PLATFORM"] = renderer.name
    options = {
        "kwargs": dict(settings.kwargs),
        "adapter": dict(settings.adapter),
        "images": settings.images,
        "end_at_success": settings.end_at_success,
        # The same interpreter finds what this process finds, as with multiprocessing's spawn.
        "paths": [path or os.getcwd() for path in sys.path] if settings.python is None else [os.getcwd()],
    }
    return StartSpec(
        settings.python or sys.executable,
        settings.factory,
        options,
        {**variables, **settings.environment},
        settings.start_timeout_s,
        settings.heartbeat_timeout_s,
    )


def _refuse_to_start(factory: str, trouble: WorkerFailure, renderer: Backend | None) -> None:
    if trouble.for_user:
        raise UserError(trouble.reason)
    drawing = renderer is None and any(word in trouble.evidence for word in ("GL", "OSMesa"))
    hint = "; no OpenGL was found to draw with, which may be why" if drawing else ""
    raise RunError(
        f"the environment {factory} did not start; it {trouble.kind}: {trouble.reason}{hint}\n{trouble.evidence}"
    )


def _stop_and_forget(processes: list[WorkerProcess | None]) -> None:
    stop_all(processes)
    processes[:] = [None] * len(processes)


COUNTS = ("crashed", "hung", "raised", "restarted", "dropped", "diverged")
