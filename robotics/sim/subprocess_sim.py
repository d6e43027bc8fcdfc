"""Environments in subprocesses as one simulator, each with time and memory limits, restarted when it fails.

    settings = SubprocessSettings("gymnasium:make", {"id": "FetchReach-v4", "render_mode": "rgb_array"}, workers=4)
    with SubprocessSim(settings) as sim:
        first = sim.reset([EpisodeSpec("FetchReach-v4", "reach", layout) for layout in range(4)])
        while len(sim.live):
            chunk = sim.step_chunk(policy(first.observation.of(sim.live)))

A worker that dies, hangs or raises costs one episode: its row has failed, and another process starts while the other
episodes continue. An episode that cannot begin is tried again in a fresh process a few times and then dropped. None of
this is ever a reward of 0. A worker runs other people's code and may send anything, so every reply is checked before it
is used.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Collection, Mapping, Sequence
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from mmrl.errors import RunError, UserError
from mmrl.fields import check_config
from mmrl.workers.engine import FailureLog, WorkerFailure, one_line
from mmrl.workers.pool import WorkerPool
from mmrl.workers.slots import Answer, Request
from mmrl.workers.wire import Message
from robotics.sim.backends import Backend
from robotics.sim.episodes import ChunkResult, EpisodeSpec
from robotics.sim.subprocess_settings import SubprocessSettings, choose_renderer, worker_spec

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray


LOGGER = logging.getLogger("mmrl")
LARGEST = {"action_size": 1 << 16, "state_size": 1 << 24, "horizon": 1 << 31, "image_size": 1 << 14}
HELD_OUT_SEED = 1 << 30


class SubprocessSim:
    """A `RobotSim` whose rows are processes; the environment's adapter defines the state.

    Args:
        settings: environment and time limits.

    Raises:
        UserError: a setting is out of range, or the environment refuses an option.
        RunError: the environment cannot be started; the message holds its traceback.
    """

    def __init__(self, settings: SubprocessSettings) -> None:
        check_config(settings)
        self._settings = settings
        self.renderer = choose_renderer(settings)
        goal = f"episode of {settings.factory} that came to its end"
        spec = worker_spec(settings, self.renderer)
        self._pool = WorkerPool(spec, settings.workers, max_restarts=settings.max_restarts, goal=goal)
        self.live: NDArray[np.int64] = np.zeros(0, np.int64)
        self._dropped = self._diverged = 0
        self.failures = FailureLog(settings.factory)
        """Reasons of failures; tracebacks are written once its `folder` is set."""
        self._slots: list[int] = []
        self._broken: dict[int, WorkerFailure] = {}
        self._past = 0
        self._tasks_at: list[str | None] = [None] * settings.workers
        self._hello = self._start()
        self.action_size, self.state_size = self._hello["action_size"], self._hello["state_size"]
        self.horizon, self.capacity = self._hello["horizon"], settings.workers
        size = self._hello["image_size"]
        self._frame_size: tuple[int, int] | None = (size[0], size[1]) if size else None
        self.image_size = self._frame_size if settings.images else None
        self.views: tuple[str, ...] = tuple(self._hello.get("views", ()))
        """Names of the further cameras."""
        self.action_bounds: Sequence[Sequence[float]] | None = self._hello.get("action_bounds") or None
        """Meaning of -1 and 1 in the environment's own units, A numbers each; None where unknown."""
        if self.renderer is not None and self.renderer.on_cpu and self._hello.get("shadow_lights"):
            _say_shadows(settings.factory, self._hello["shadow_lights"], self.renderer)
        self.image_fit = _say_fit(settings.factory, self._hello.get("fitted_camera"))
        """How images of a camera that is not square were fitted, pad or stretch; None if nothing was."""
        self.action_integer = bool(self._hello.get("action_integer"))
        """Whether the environment's own units are whole numbers."""
        self.state_names: Sequence[str] = self._hello.get("state_names") or ()
        """Names of the entries of the state; empty where unknown."""
        self.action_names: Sequence[str] = self._hello.get("action_names") or ()
        """Names of the entries of an action; empty where unknown."""
        self.camera = str(self._hello.get("camera") or "")
        """Name of the camera of the images; empty where unknown."""
        self.control_hz: float | None = self._hello.get("control_hz")
        """Control steps a second; None if unknown."""

    @property
    def counts(self) -> Mapping[str, int]:
        """Failures of workers by kind, restarts, episodes dropped and episodes whose numbers diverged."""
        return {**self._pool.counts, "dropped": self._dropped, "diverged": self._diverged}

    def tasks(self) -> Mapping[str, str]:
        """Names of the tasks with their instructions."""
        return dict(self._hello["tasks"])

    def layouts(self) -> Mapping[str, int | None]:
        """Names of the splits with their numbers of layouts; None for any number."""
        return dict(self._hello["layouts"])

    def reset(self, episodes: Sequence[EpisodeSpec], past: int = 0) -> ChunkResult:
        """Begin episodes, see `RobotSim.reset`; with a past of P control steps until the next reset.

        One that does not begin is retried in a fresh process, then it has failed. Raises RunError when there are only
        restarts, but no completed episodes.
        """
        self._check_episodes(episodes)
        self._slots, self._broken, self._past = self._assign(episodes), {}, past
        requests = {slot: _reset_request(episode, past) for slot, episode in zip(self._slots, episodes, strict=True)}
        found = self._pool.ask_with_retries(
            requests, self._settings.reset_timeout_s, self._settings.reset_retries, check=self._misshapen
        )
        answers = {row: found[slot] for row, slot in enumerate(self._slots)}
        result = self._assemble(np.arange(len(episodes)), 0, self._note_failures(answers), ())
        self.live = result.rows[~result.failed]
        return result

    def step_chunk(self, actions: ArrayLike, record: Collection[int] = ()) -> ChunkResult:
        """Step the live rows; see `RobotSim.step_chunk`."""
        controls = np.asarray(actions, np.float64)
        self._check_actions(controls, record)
        rows = self.live
        requests = {
            int(row): Request({"kind": "step_chunk", "record": int(row) in record}, {"actions": chunk})
            for row, chunk in zip(rows, controls, strict=True)
        }
        result = self._assemble(rows, controls.shape[1], self._ask(requests), record)
        over = result.terminated | result.truncated
        if over.any():
            self._pool.note_success()
        self.live = rows[~(over | result.failed)]
        self._pool.start_missing()
        return result

    def expert_actions(self) -> NDArray[np.float64]:
        """(L, A) next actions of the environments' own experts, in the order of `live`; zeros for a failed row.

        Raises UserError where the environment has none.
        """
        if not self._hello["expert"]:
            raise UserError(f"the environment {self._settings.factory} has no expert of its own")
        answers = self._ask({int(row): Request({"kind": "expert"}) for row in self.live})
        actions = np.zeros((len(self.live), self.action_size))
        for place, row in enumerate(self.live):
            answer = answers[int(row)]
            if isinstance(answer, Message):
                actions[place] = answer.arrays["action"]
        return actions

    def render(self, row: int) -> NDArray[np.uint8]:
        """Draw (H, W, 3) RGB of a row of the last `reset`, ended or not.

        Raises:
            UserError: there is no such row, or the environment cannot draw.
            RunError: the row failed.
        """
        if not 0 <= row < len(self._slots) or self._frame_size is None:
            raise UserError(f"there is no image of row {row}: {len(self._slots)} rows, images {self._frame_size}")
        answer = self._ask({row: Request({"kind": "render"})})[row]
        if isinstance(answer, WorkerFailure):
            raise RunError(f"row {row} {answer.kind}: {answer.reason}\n{answer.evidence}")
        return answer.arrays["image"]

    def describe(self) -> Mapping[str, Any]:
        """Everything that a measured number depends on."""
        settings = self._settings
        return {
            "simulator": PurePath(settings.factory).name,  # wherever the file lies
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
        """PIDs of the running workers."""
        return self._pool.processes()

    def memory_mb(self) -> float:
        """Memory in 10^6 bytes of the worker that holds most, its children included."""
        return self._pool.memory_bytes() / 1e6

    def close(self) -> None:
        """End all processes; also done when the interpreter ends."""
        self.failures.summary()
        self.failures.counts.clear()
        self.live = np.zeros(0, np.int64)
        self._pool.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _start(self) -> dict[str, Any]:
        hello = self._pool.start()
        if isinstance(hello, WorkerFailure):
            raise _start_error(self._settings.factory, hello, self.renderer)
        problem = problem_in_hello(hello.fields)
        if problem:
            self._pool.close()
            raise RunError(f"the environment {self._settings.factory} describes itself wrongly: {problem}")
        return hello.fields

    def _check_episodes(self, episodes: Sequence[EpisodeSpec]) -> None:
        if self._pool.closed:
            raise RuntimeError("this SubprocessSim has been closed")
        if not 1 <= len(episodes) <= self.capacity:
            raise UserError(f"{len(episodes)} episodes for {self.capacity} workers; 1 to that many are possible")
        tasks, layouts = self._hello["tasks"], self._hello["layouts"]
        for episode in episodes:
            if episode.task not in tasks:
                raise UserError(
                    f"there is no task {episode.task!r}; tasks() has: {', '.join(sorted(tasks))}. The adapter's option "
                    "task names the only task of a Gymnasium environment"
                )
            if episode.split not in layouts:
                raise UserError(f"there is no split {episode.split!r}; there are: {', '.join(sorted(layouts))}")
            if episode.draw != 0 and not self._hello.get("draws"):
                raise UserError(
                    f"the draw of {episode.task}/{episode.layout} is {episode.draw}, but {self._settings.factory} "
                    "randomises nothing; leave it at 0"
                )
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
        if not np.isfinite(controls).all():
            place, step, entry = np.argwhere(~np.isfinite(controls))[0]
            value, row = controls[place, step, entry], self.live[place]
            raise UserError(f"action {entry} of control step {step} in row {row} is {value}; nothing was stepped")
        if self._frame_size is None and any(int(row) in record for row in self.live):
            raise UserError(f"rows cannot be recorded: {self._settings.factory} does not draw")

    def _assign(self, episodes: Sequence[EpisodeSpec]) -> list[int]:
        """A worker for each row, preferably one with the task's scene: changing it may take seconds."""
        free = list(range(self.capacity))
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

    def _ask(self, requests: Mapping[int, Request]) -> dict[int, Answer]:
        """Answers by row; failed rows are not asked again."""
        answers: dict[int, Answer] = {row: self._broken[row] for row in requests if row in self._broken}
        asked = {self._slots[row]: request for row, request in requests.items() if row not in answers}
        found = self._pool.ask(asked, self._settings.call_timeout_s, check=self._misshapen)
        answers |= self._note_failures({row: found[self._slots[row]] for row in requests if row not in answers})
        return answers

    def _misshapen(self, request: Request, answer: Message) -> WorkerFailure | None:
        """Error in the shapes of an answer, if any."""
        kind, past = request.fields["kind"], self._past
        size = self._frame_size if kind == "render" else self.image_size
        expected: dict[str, tuple[int, ...]] = {}
        if "diverged" in answer.fields:
            return None
        if kind in ("reset", "step_chunk"):
            expected["state"] = (self.state_size,)
            if self.views and size is not None:
                expected["views"] = (len(self.views), *size, 3)
        if kind == "expert":
            expected["action"] = (self.action_size,)
        elif size is not None:
            expected["image"] = (*size, 3)
        if kind == "step_chunk":
            steps, most = len(answer.arrays.get("rewards", ())), len(request.arrays["actions"])
            expected |= {"flags": (3,), "rewards": (min(max(1, steps), most),)}
            if request.fields["record"]:
                expected["frames"] = (steps, *(self._frame_size or ()), 3)
        if past and not (kind == "step_chunk" and np.any(answer.arrays.get("flags", ())[1:])):
            seen = ("state", "image", "views") if kind in ("reset", "step_chunk") else ()
            expected |= {f"past_{name}": (past, *expected[name]) for name in seen if name in expected}
        for name, shape in expected.items():
            came = answer.arrays[name].shape if name in answer.arrays else None
            if came != shape:
                return WorkerFailure("raised", f"{name} has the shape {came}; expected {shape}")
        return None

    def _note_failures(self, answers: Mapping[int, Answer]) -> dict[int, Answer]:
        """Remember rows that failed, including those with numbers that are not finite."""
        noted: dict[int, Answer] = {}
        for row, answer in answers.items():
            failure = divergence(answer) if isinstance(answer, Message) else answer
            noted[row] = failure or answer
            if failure is not None:
                self._diverged += failure.kind == "diverged"
                self._broken[row] = failure
                self.failures.note(failure)
        return noted

    def _assemble(
        self, rows: NDArray[np.int64], length: int, answers: Mapping[int, Answer], record: Collection[int]
    ) -> ChunkResult:
        result = ChunkResult.empty(rows, length, self.state_size, self.image_size, len(self.views), self._past)
        reasons: dict[int, str] = {}
        frames: dict[int, NDArray[np.uint8]] = {}
        drawn: dict[int, Mapping[str, Any]] = {}
        for place, row in enumerate(rows.tolist()):
            answer = answers[row]
            if isinstance(answer, WorkerFailure):
                reasons[row] = f"{answer.kind}: {answer.reason}"
                result.failed[place], result.rewards[place] = True, np.nan
                self._dropped += 1
                continue
            _fill(result, place, answer)
            if row in record:
                frames[row] = answer.arrays["frames"]
            if isinstance(answer.fields.get("drawn"), dict):
                drawn[row] = answer.fields["drawn"]
        return ChunkResult(**{**vars(result), "reasons": reasons, "frames": frames, "drawn": drawn})


def layout_seed(episode: EpisodeSpec) -> int:
    """Seed of an episode below 2**32: the layout's number, in a separate range for every split."""
    known = {"train": 0, "held_out": HELD_OUT_SEED}
    start = known[episode.split] if episode.split in known else 2 * HELD_OUT_SEED + zlib.crc32(episode.split.encode())
    return (start + episode.layout) % (1 << 32)


def _say_shadows(factory: str, count: Any, renderer: Backend) -> None:
    LOGGER.warning(
        "%s lights of %s cast shadows, for which the renderer on the CPU (%s) draws a map of 4096 x 4096 pixels each: "
        '50 ms an image instead of 0.4 to 3. Set castshadow="false" at the lights, or call '
        "robotics.sim.fast_visuals(model) in the environment before it draws",
        *(count, factory, renderer.device),
    )


def _say_fit(factory: str, found: Any) -> str | None:
    """Say how a camera that is not square is fitted into a square; returns how."""
    if not isinstance(found, dict) or "fit" not in found:
        return None
    (height, width), size, fit = found["camera_size"], found["size"], str(found["fit"])
    how = {"pad": "with black bars", "stretch": "and stretched"}
    LOGGER.warning(
        "the camera of %s draws %d x %d pixels (height x width), which become %d x %d %s; sim.options.adapter takes "
        "fit: pad, as the processors of pi0 and SmolVLA do, fit: stretch, as that of OpenVLA, and size: null, which "
        "leaves images as they are drawn",
        *(factory, height, width, size, size, how.get(fit, fit)),
    )
    return fit


def problem_in_hello(hello: Mapping[str, Any]) -> str:
    """Error in a worker's description of its environment; empty if there is none."""
    sizes, views, bounds = hello.get("image_size"), hello.get("views", []), hello.get("action_bounds", [])
    if sizes is not None and (not isinstance(sizes, list) or len(sizes) != 2):
        return f"image_size is {sizes!r:.80}; expected two numbers"
    numbers = {name: hello.get(name) for name in ("action_size", "state_size", "horizon")}
    numbers |= {f"image_size[{index}]": size for index, size in enumerate(sizes or ())}
    for name, number in numbers.items():
        least, most = int(name != "state_size"), LARGEST[name.partition("[")[0]]
        if type(number) is not int or not least <= number <= most:
            return f"{name} is {number!r:.80}; expected a whole number from {least} to {most}"
    for name in ("tasks", "layouts", "describe"):
        if not isinstance(hello.get(name), dict):
            return f"{name} is {hello.get(name)!r:.80}; expected a dict"
    if not all(isinstance(text, str) for text in hello["tasks"].values()):
        return f"tasks is {hello['tasks']!r:.80}; expected the instruction of each task"
    if not all(count is None or (type(count) is int and count >= 0) for count in hello["layouts"].values()):
        return f"layouts is {hello['layouts']!r:.80}; expected a number or None for each split"
    if not isinstance(views, list) or not all(isinstance(name, str) for name in views):
        return f"views is {views!r:.80}; expected the names of further cameras"
    if bounds and np.shape(bounds) != (2, hello["action_size"]):
        return f"action_bounds is {bounds!r:.80}; expected two lists of {hello['action_size']} numbers"
    for name, size in (("state_names", hello["state_size"]), ("action_names", hello["action_size"])):
        names = hello.get(name) or []
        if not isinstance(names, list) or not all(isinstance(one, str) for one in names) or len(names) not in (0, size):
            return f"{name} is {names!r:.80}; expected {size} names"
    missing = [name for name in ("python", "numpy", "expert") if name not in hello]
    return f"{missing[0]} is missing" if missing else ""


def divergence(answer: Message) -> WorkerFailure | None:
    """Find numbers that are not finite: they would come again from the same layout, so nothing is retried."""
    if "diverged" in answer.fields:
        return WorkerFailure("diverged", one_line(str(answer.fields["diverged"])))
    for name in ("state", "past_state", "rewards", "action"):
        if name in answer.arrays and not np.isfinite(answer.arrays[name]).all():
            return WorkerFailure("diverged", f"{name} is not finite")
    return None


def _reset_request(episode: EpisodeSpec, past: int) -> Request:
    fields = {
        "kind": "reset",
        "task": episode.task,
        "layout": episode.layout,
        "split": episode.split,
        "seed": layout_seed(episode),
    }
    asked = {"draw": episode.draw} if episode.draw != 0 else {}
    return Request(fields | asked | ({"past": past} if past else {}))


def _fill(result: ChunkResult, place: int, answer: Message) -> None:
    """Copy an answer into its row."""
    arrays, seen = answer.arrays, result.observation
    seen.state[place] = arrays["state"]
    parts = {"image": seen.images, "views": seen.views, "past_state": seen.past_state}
    for name, part in (parts | {"past_image": seen.past_images, "past_views": seen.past_views}).items():
        if part is not None and name in arrays:
            part[place] = arrays[name]
    if "rewards" in arrays:
        steps = len(arrays["rewards"])
        result.rewards[place, :steps], result.steps[place] = arrays["rewards"], steps
        result.success[place], result.terminated[place], result.truncated[place] = arrays["flags"]


def _start_error(factory: str, failure: WorkerFailure, renderer: Backend | None) -> UserError | RunError:
    if failure.for_user:
        return UserError(failure.reason)
    drawing = renderer is None and any(word in failure.evidence for word in ("GL", "OSMesa"))
    hint = "; no OpenGL was found to draw with, which may be why" if drawing else ""
    return RunError(
        f"the environment {factory} did not start; it {failure.kind}: {failure.reason}{hint}\n{failure.evidence}"
    )
