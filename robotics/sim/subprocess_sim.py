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

import importlib.util
import json
import logging
import zlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

import numpy as np

from mmrl.errors import RunError, UserError
from mmrl.fields import bounded, check_config
from mmrl.workers.engine import WorkerFailure, WorkerSpec, one_line
from mmrl.workers.pool import Request
from mmrl.workers.row_pool import RowLimits, RowPool
from mmrl.workers.wire import Message
from robotics.sim.backends import PROBED, Backend, find_backend
from robotics.sim.episodes import ChunkResult, EpisodeSpec

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray


SERVICE = Path(__file__).resolve().with_name("env_service.py")
LOGGER = logging.getLogger("mmrl")
LARGEST = {"action_size": 1 << 16, "state_size": 1 << 24, "horizon": 1 << 31, "image_size": 1 << 14}
HELD_OUT_SEED = 1 << 30
LOST = {"diverged", "discarded"}
"""Fields of an answer that say why an episode has no result."""


@dataclass(frozen=True)
class SubprocessSettings(RowLimits):
    """The environment, its Python, and timeouts."""

    factory: str
    """`gymnasium:make`, `module:function` or `file.py:function`; returns a gymnasium.Env or an env_service.RowEnv."""
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of the factory; JSON."""
    adapter: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of gym_adapter.GymRow, if the factory returns a gymnasium.Env."""
    workers: int = bounded(2, at_least=1)
    """Number of processes; each runs one episode at a time."""
    images: bool = True
    """Whether observations include an image."""
    renderer: str | None = None
    """egl, osmesa, glfw or cgl. Default: the first that works."""
    end_at_success: bool = True
    """Whether success ends an episode even if the environment itself continues."""
    call_timeout_s: float = bounded(120.0, above=0)
    """Time limit in seconds for a chunk of actions."""

    def validate(self) -> None:
        """Check that the environment's options are JSON; raises UserError."""
        for name in ("kwargs", "adapter"):
            try:
                json.dumps(getattr(self, name), allow_nan=False)
            except (TypeError, ValueError) as error:
                raise UserError(f"{name} of an environment must be JSON: {error}") from None


class SubprocessSim(RowPool[Message]):
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
        # probed once here and passed on: each worker would otherwise probe again
        self.renderer = choose_renderer(settings)
        spec = worker_spec(settings, self.renderer)
        kinds = ("dropped", "diverged")
        super().__init__(settings.factory, spec, settings.workers, settings, settings.call_timeout_s, kinds=kinds)
        self._begun = self._past = 0
        self._people = False
        self._hello = self.start().fields
        # Sizes decide how much memory is allocated here, so they are bounded before anything is.
        problem = problem_in_hello(self._hello)
        if problem:
            self._pool.close()
            raise RunError(f"the environment {settings.factory} reports an invalid description: {problem}")
        self.action_size = self._hello["action_size"]
        self.state_size = self._hello["state_size"]
        self.horizon = self._hello["horizon"]
        self.capacity = settings.workers
        size = self._hello["image_size"]
        self._frame_size: tuple[int, int] | None = (size[0], size[1]) if size else None
        # None if the run asks for no images, although the environment can draw
        self.image_size = self._frame_size if settings.images else None
        self.views: tuple[str, ...] = tuple(self._hello.get("views", ()))
        """Names of the additional cameras."""
        self.action_bounds: Sequence[Sequence[float]] | None = self._hello.get("action_bounds") or None
        """Values that correspond to -1 and 1 in the environment's units, A numbers each; None if unknown."""
        if self.renderer is not None and self.renderer.on_cpu and self._hello.get("shadow_lights"):
            _say_shadows(settings.factory, self._hello["shadow_lights"], self.renderer)
        _say_left_out(settings.factory, self._hello.get("left_out"))
        self.image_fit = _say_fit(settings.factory, self._hello.get("fitted_camera"))
        """How non-square images were fitted, pad or stretch; None if they were not."""
        self.action_integer = bool(self._hello.get("action_integer"))
        """Whether the environment's own units are whole numbers."""
        self.state_names: Sequence[str] = self._hello.get("state_names") or ()
        """Names of the entries of the state; empty if unknown."""
        self.action_names: Sequence[str] = self._hello.get("action_names") or ()
        """Names of the entries of an action; empty if unknown."""
        self.camera = str(self._hello.get("camera") or "")
        """Name of the camera of the images; empty if unknown."""
        self.control_hz: float | None = self._hello.get("control_hz")
        """Control steps per second; None if unknown."""

    @property
    def live(self) -> NDArray[np.int64]:
        """Rows with a running episode, in order."""
        return np.array(sorted(self._live), np.int64)

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
        self._begun = len(episodes)
        self._past = past
        self._people = False
        # All rows begin together; those beyond the episodes are idle.
        self._live.clear()
        requests = {row: _reset_request(episode, past) for row, episode in enumerate(episodes)}
        answers = self.begin(requests, scenes=[episode.task for episode in episodes])
        return self._assemble(np.arange(len(episodes)), 0, answers, ())

    def allow_people(self) -> None:
        """Let a person inside the environment replace actions until the next `reset`; results report what was done."""
        self._people = True

    def step_chunk(self, actions: ArrayLike, record: Collection[int] = ()) -> ChunkResult:
        """Step the live rows; see `RobotSim.step_chunk`."""
        controls = np.asarray(actions, np.float64)
        self._check_actions(controls, record)
        rows = self.live
        people = {"people": True} if self._people else {}
        requests = {
            int(row): Request({"kind": "step_chunk", "record": int(row) in record, **people}, {"actions": chunk})
            for row, chunk in zip(rows, controls, strict=True)
        }
        result = self._assemble(rows, controls.shape[1], self.ask(requests), record)
        # ended rows free their workers, and missing ones start while the policy computes
        self.settle(rows[result.terminated | result.truncated | result.failed].tolist())
        self.start_missing()
        return result

    def expert_actions(self) -> NDArray[np.float64]:
        """(L, A) next actions of the environments' own experts, in the order of `live`; zeros for a failed row.

        Raises UserError where the environment has none.
        """
        if not self._hello["expert"]:
            raise UserError(f"the environment {self._settings.factory} has no built-in expert")
        answers = self.ask({int(row): Request({"kind": "expert"}) for row in self.live})
        # zeros for failed rows: the caller steps all live rows and learns of the failure there
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
        if not 0 <= row < self._begun or self._frame_size is None:
            raise UserError(
                f"no image of row {row}: there are {self._begun} rows, and the image size is {self._frame_size}"
            )
        answer = self.ask({row: Request({"kind": "render"})})[row]
        if isinstance(answer, WorkerFailure):
            raise RunError(f"row {row} {answer.kind}: {answer.reason}\n{answer.evidence}")
        return answer.arrays["image"]

    def describe(self) -> Mapping[str, Any]:
        """Everything that a measurement depends on."""
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

    def error(self, what: str, failure: WorkerFailure) -> UserError | RunError:
        """The exception for a failure that ends the run; if no renderer works, it mentions this as a possible cause."""
        if self.renderer is None and any(word in failure.evidence for word in ("GL", "OSMesa")):
            hint = "; no working OpenGL renderer was found, which may be the cause"
            failure = failure if failure.for_user else replace(failure, reason=failure.reason + hint)
        return super().error(what, failure)

    def _check_episodes(self, episodes: Sequence[EpisodeSpec]) -> None:
        self.check_open()
        if not 1 <= len(episodes) <= self.capacity:
            raise UserError(f"{len(episodes)} episodes for {self.capacity} workers; must be 1 to {self.capacity}")
        tasks, layouts = self._hello["tasks"], self._hello["layouts"]
        for episode in episodes:
            if episode.task not in tasks:
                raise UserError(
                    f"unknown task {episode.task!r}; tasks() has: {', '.join(sorted(tasks))}. The adapter's option "
                    "`task` sets the name of a Gymnasium environment's only task"
                )
            if episode.split not in layouts:
                raise UserError(f"unknown split {episode.split!r}; available: {', '.join(sorted(layouts))}")
            if episode.draw != 0 and not self._hello.get("draws"):
                raise UserError(
                    f"the draw of {episode.task}/{episode.layout} is {episode.draw}, but {self._settings.factory} "
                    "does not support randomisation; leave it at 0"
                )
            count = layouts[episode.split]
            if episode.layout < 0 or (count is not None and episode.layout >= count):
                last = "any number" if count is None else count - 1
                raise UserError(f"layout {episode.layout} of {episode.split} does not exist; available: 0 to {last}")

    def _check_actions(self, controls: NDArray[np.float64], record: Collection[int]) -> None:
        if not len(self.live):
            raise UserError("all episodes have ended; call reset() first")
        expected = (len(self.live), self.action_size)
        if controls.ndim != 3 or (controls.shape[0], controls.shape[2]) != expected or controls.shape[1] < 1:
            raise UserError(
                f"actions have the shape {controls.shape}; expected ({expected[0]} live rows, K >= 1, "
                f"{expected[1]} entries)"
            )
        # before any worker is asked: a NaN must fail the policy's run, not the environment
        if not np.isfinite(controls).all():
            place, step, entry = np.argwhere(~np.isfinite(controls))[0]
            value, row = controls[place, step, entry], self.live[place]
            raise UserError(
                f"action {entry} of control step {step} in row {row} is {value}; no environment was stepped"
            )
        if self._frame_size is None and any(int(row) in record for row in self.live):
            raise UserError(f"rows cannot be recorded: {self._settings.factory} does not render images")

    def _misshapen(self, request: Request, answer: Message) -> WorkerFailure | None:
        """Error in the shapes of an answer, if any."""
        kind, past = request.fields["kind"], self._past
        size = self._frame_size if kind == "render" else self.image_size
        expected: dict[str, tuple[int, ...]] = {}
        # It has no arrays: the worker stopped at once.
        if LOST & answer.fields.keys():
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
            # Fewer steps than were asked for: the episode ended within the chunk.
            steps, most = len(answer.arrays.get("rewards", ())), len(request.arrays["actions"])
            expected |= {"flags": (3,), "rewards": (min(max(1, steps), most),)}
            if self._people:
                expected |= {"executed": (steps, self.action_size), "by_person": (steps,)}
            if request.fields["record"]:
                expected["frames"] = (steps, *(self._frame_size or ()), 3)
        # An episode that is over has no next chunk, which alone needs the past.
        if past and not (kind == "step_chunk" and np.any(answer.arrays.get("flags", ())[1:])):
            seen = ("state", "image", "views") if kind in ("reset", "step_chunk") else ()
            expected |= {f"past_{name}": (past, *expected[name]) for name in seen if name in expected}
        for name, shape in expected.items():
            came = answer.arrays[name].shape if name in answer.arrays else None
            if came != shape:
                return WorkerFailure("raised", f"{name} has the shape {came}; expected {shape}")
        return None

    def _read(self, answer: Message) -> Message | WorkerFailure:
        return divergence(answer) or answer

    def _assemble(
        self,
        rows: NDArray[np.int64],
        length: int,
        answers: Mapping[int, Message | WorkerFailure],
        record: Collection[int],
    ) -> ChunkResult:
        result = ChunkResult.empty(rows, length, self.state_size, self.image_size, len(self.views), self._past)
        if self._people:
            executed = np.zeros((len(rows), length, self.action_size), np.float32)
            result = replace(result, executed=executed, by_person=np.zeros((len(rows), length), bool))
        reasons: dict[int, str] = {}
        frames: dict[int, NDArray[np.uint8]] = {}
        drawn: dict[int, Mapping[str, Any]] = {}
        for place, row in enumerate(rows.tolist()):
            answer = answers[row]
            if isinstance(answer, WorkerFailure):
                reasons[row] = f"{answer.kind}: {answer.reason}"
                result.failed[place], result.rewards[place] = True, np.nan
                continue
            # Shapes were checked when the answer came, so nothing here can fail.
            _fill(result, place, answer)
            if row in record:
                frames[row] = answer.arrays["frames"]
            if isinstance(answer.fields.get("drawn"), dict):
                drawn[row] = answer.fields["drawn"]
        return ChunkResult(**{**vars(result), "reasons": reasons, "frames": frames, "drawn": drawn})


def choose_renderer(settings: SubprocessSettings) -> Backend | None:
    """Find a renderer that works here; a foreign Python's own mujoco uses the same OpenGL libraries."""
    if settings.renderer is None and importlib.util.find_spec("mujoco") is None:
        return None
    found = find_backend(settings.renderer)
    if found is None and settings.renderer is not None:
        raise UserError(f"the renderer {settings.renderer!r} does not work on this machine; leave it out to try others")
    return found


def worker_spec(settings: SubprocessSettings, renderer: Backend | None) -> WorkerSpec:
    """Command, environment variables and timeouts of a worker."""
    # JSON, as it crosses a process boundary
    options = {
        "factory": settings.factory,
        "kwargs": dict(settings.kwargs),
        "adapter": dict(settings.adapter),
        "images": settings.images,
        "end_at_success": settings.end_at_success,
    }
    variables = {}
    if renderer is not None:
        variables = {"MUJOCO_GL": renderer.name, PROBED: f"{renderer.name}|{renderer.device}"}
        # PyOpenGL chooses its platform at import, so it has to be set before the worker starts
        if renderer.name in ("egl", "osmesa"):
            variables["PYOPENGL_PLATFORM"] = renderer.name
    return settings.worker_spec(SERVICE, f"the environment {settings.factory}", options, variables)


def layout_seed(episode: EpisodeSpec) -> int:
    """Seed of an episode below 2**32: the layout's number, in a separate range for every split."""
    known = {"train": 0, "held_out": HELD_OUT_SEED}
    # a hash for splits that this module does not know: far from the other two ranges, and fixed
    start = known[episode.split] if episode.split in known else 2 * HELD_OUT_SEED + zlib.crc32(episode.split.encode())
    # NumPy's global generator takes 32 bits.
    return (start + episode.layout) % (1 << 32)


def _say_shadows(factory: str, count: Any, renderer: Backend) -> None:
    LOGGER.warning(
        "%s lights of %s cast shadows, for which the renderer on the CPU (%s) draws a map of 4096 x 4096 pixels each: "
        '50 ms an image instead of 0.4 to 3. Set castshadow="false" at the lights, or call '
        "robotics.sim.fast_visuals(model) in the environment before it draws",
        *(count, factory, renderer.device),
    )


def _say_left_out(factory: str, found: Any) -> None:
    """Say which entries of the observation are neither state nor image."""
    if isinstance(found, dict) and found:
        LOGGER.warning(
            "the observations of %s have %s, which no policy sees; list the entries that make the state in "
            "sim.options.adapter.state_keys to use them, or to leave them out without this warning",
            *(factory, " and ".join(f"{name} ({space})" for name, space in found.items())),
        )


def _say_fit(factory: str, found: Any) -> str | None:
    """Say how a camera that is not square is fitted into a square; returns how."""
    if not isinstance(found, dict) or "fit" not in found:
        return None
    (height, width), size, fit = found["camera_size"], found["size"], str(found["fit"])
    how = {"pad": "with black bars", "stretch": "and stretched"}
    LOGGER.warning(
        "the camera of %s renders %d x %d pixels (height x width), which become %d x %d %s; in sim.options.adapter, "
        "set fit: pad (as for pi0 and SmolVLA), fit: stretch (as for OpenVLA), or size: null to keep the rendered "
        "size",
        *(factory, height, width, size, size, how.get(fit, fit)),
    )
    return fit


def problem_in_hello(hello: Mapping[str, Any]) -> str:
    """Error in a worker's description of its environment; empty if there is none."""
    sizes = hello.get("image_size")
    views = hello.get("views", [])
    bounds = hello.get("action_bounds", [])
    if sizes is not None and (not isinstance(sizes, list) or len(sizes) != 2):
        return f"image_size is {sizes!r:.80}; expected two numbers"
    numbers = {name: hello.get(name) for name in ("action_size", "state_size", "horizon")}
    numbers |= {f"image_size[{index}]": size for index, size in enumerate(sizes or ())}
    for name, number in numbers.items():
        # a state may be empty, an action may not
        least, most = int(name != "state_size"), LARGEST[name.partition("[")[0]]
        # bool is an int in Python, hence the exact type
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
        return f"views is {views!r:.80}; expected the names of additional cameras"
    if bounds and np.shape(bounds) != (2, hello["action_size"]):
        return f"action_bounds is {bounds!r:.80}; expected two lists of {hello['action_size']} numbers"
    for name, size in (("state_names", hello["state_size"]), ("action_names", hello["action_size"])):
        names = hello.get(name) or []
        if not isinstance(names, list) or not all(isinstance(one, str) for one in names) or len(names) not in (0, size):
            return f"{name} is {names!r:.80}; expected {size} names"
    missing = [name for name in ("python", "numpy", "expert") if name not in hello]
    return f"{missing[0]} is missing" if missing else ""


def divergence(answer: Message) -> WorkerFailure | None:
    """Find why an episode has no result: it was discarded, or numbers that the same layout would produce again."""
    for kind in LOST & answer.fields.keys():
        return WorkerFailure(kind, one_line(str(answer.fields[kind])))
    # The state comes in float32; the worker has looked at float64, in which 1e39 is still finite.
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
    # left out if 0, which environments without randomisation do not know
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
        # fewer than K at the end of an episode; the rest keeps zeros
        steps = len(arrays["rewards"])
        result.rewards[place, :steps], result.steps[place] = arrays["rewards"], steps
        result.success[place], result.terminated[place], result.truncated[place] = arrays["flags"]
        if result.executed is not None and result.by_person is not None:
            result.executed[place, :steps], result.by_person[place, :steps] = arrays["executed"], arrays["by_person"]
