"""Many scenes of one model at once: physics in threads, images only at the end of an action chunk.

Each scene keeps its own MjData, each worker thread its own renderer, and an idle worker takes the next running scene.
Both the physics (`mujoco.rollout`, one call a chunk) and the drawing release the GIL. The same seeds and actions give
the same bits with any number of workers, the bits of a plain `mj_step` loop: `mujoco.rollout` would start its contact
solver from zero in each call, so every call is given the accelerations that the scene's last step left.

Differences to such a loop: images and sensor values are those of the state they come with, where `mj_step` leaves those
of one physics step before; and where MuJoCo warns (diverging numbers, full contact buffers) the scene has failed and is
dropped, where a loop continues from a reset state.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import wait
from typing import TYPE_CHECKING, Protocol, Self

import numpy as np

from mmrl.errors import UserError
from mmrl.workers.memory import usable_cores
from robotics.sim.backends import require_backend
from robotics.sim.interface import Chunk, Look, SceneObservation, SceneSteps
from robotics.sim.rendering import Outcome, RenderSettings
from robotics.sim.scene_worker import DrawsVideo, SceneWorker

if TYPE_CHECKING:
    import mujoco
    from numpy.typing import ArrayLike, NDArray

    from robotics.sim.warp_physics import WarpPhysics


class Variant(Protocol):
    """A variant of the scene, with different numbers in its model."""

    @property
    def model(self) -> mujoco.MjModel:
        """A copy of the rollout's model in which numbers differ, but not how many there are."""

    @property
    def observation_delay(self) -> int:
        """Control steps by which `SceneObservation.measured` and `frames` are late."""


class SceneTask(Protocol):
    """Start, rewards and end of episodes. Called from several threads, so nothing is kept between calls."""

    def reset(self, model: mujoco.MjModel, data: mujoco.MjData, rng: np.random.Generator) -> None:
        """Write the state at the start of an episode into data that has been reset."""
        ...

    def score(self, steps: SceneSteps) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
        """Return (K,) rewards and (K,) whether the episode ended with that control step."""
        ...


_Past = deque[tuple["NDArray[np.float64]", "NDArray[np.float64]"]]
"""States and sensor values of a scene, the oldest first: its observation delay, the requested past, and the present."""


class ImageRollout:
    """Steps scenes of one model in parallel and renders images on demand.

        with ImageRollout(model, ReachCube(model), scenes=16, settings=RenderSettings(camera="front")) as sim:
            observation = sim.reset(seeds=range(16))
            while len(sim.live):
                chunk = sim.step_chunk(policy(observation))
                observation = chunk.observation.of(sim.live)

    Args:
        model: MjModel that all scenes share; not changed.
        task: start, rewards and end of the episodes.
        scenes: number of scenes.
        settings: images; None for states only.
        substeps: physics steps in a control step.
        horizon: control steps after which an episode is truncated; None for no limit.
        workers: number of threads; None uses all usable cores.
        backend: name of a probed renderer; None probes and picks one.
        video: makes the renderer, called in the thread that draws; default `FrameRenderer`.
        physics: steps all scenes of a call together; None steps them with MuJoCo in the worker threads.
        ends: whether the end that the task reports ends the episode; otherwise it runs to the horizon.

    Raises:
        UserError: a number is out of range, or there is no renderer.
    """

    def __init__(
        self,
        model: mujoco.MjModel,
        task: SceneTask,
        scenes: int,
        settings: RenderSettings | None,
        *,
        substeps: int = 10,
        horizon: int | None = None,
        workers: int | None = None,
        backend: str | None = None,
        video: Callable[[], DrawsVideo] | None = None,
        physics: WarpPhysics | None = None,
        ends: bool = True,
    ) -> None:
        # more threads than scenes would only wait
        count = workers if workers is not None else min(usable_cores(), scenes)
        for name, value in (("scenes", scenes), ("substeps", substeps), ("workers", count), ("horizon", horizon)):
            if value is not None and value < 1:
                raise UserError(f"{name} is {value}; must be at least 1")
        name = backend or (require_backend().name if settings is not None else "")

        import mujoco

        self.model = model
        self.task = task
        self.settings = settings
        self.substeps = substeps
        self.horizon = horizon
        self.live: NDArray[np.int64] = np.zeros(0, np.int64)
        """Running scenes, ascending; `step_chunk` takes their actions in this order."""
        self._data = [mujoco.MjData(model) for _ in range(scenes)]
        self._models = [model] * scenes
        # the present only, until `reset` asks for more
        self._pasts: list[_Past] = [deque(maxlen=1) for _ in range(scenes)]
        self._delays = [0] * scenes
        self._past = 0
        self._elapsed = np.zeros(scenes, np.int64)
        self._physics = physics
        self._ends = ends
        self._workers = [SceneWorker(model, settings, name, video) for _ in range(count)]
        self._close = weakref.finalize(self, _close_workers, self._workers)
        # The interpreter ends the threads first, and they alone could free their contexts.
        self._close.atexit = False

    @property
    def scenes(self) -> int:
        """Number of scenes."""
        return len(self._data)

    def data(self, scene: int) -> mujoco.MjData:
        """State of a scene after the last call; changes to it take effect in the next call."""
        return self._data[scene]

    def reset(self, seeds: Sequence[int], variants: Sequence[Variant | None] = (), past: int = 0) -> SceneObservation:
        """Begin an episode in every scene, or in the first ones.

        Args:
            seeds: one a scene, from the first on; equal seeds give equal starts. Scenes without a seed stay idle.
            variants: one a seed, None for the rollout's own model; all None when empty.
            past: control steps before the end of a chunk that are observed (and drawn) too, until the next call.

        Returns:
            Observation of the scenes that were given a seed.

        Raises:
            UserError: there are more seeds than scenes, or none.
        """
        if not 1 <= len(seeds) <= self.scenes:
            raise UserError(f"{len(seeds)} seeds for {self.scenes} scenes")
        self.live = np.arange(len(seeds))
        self._past = past
        return self._begin(self.live, seeds, variants)

    def restart(
        self, scenes: ArrayLike, seeds: Sequence[int], variants: Sequence[Variant | None] = ()
    ) -> SceneObservation:
        """Begin an episode in R scenes (ascending numbers) while the others continue; arguments as in `reset`."""
        chosen = np.asarray(scenes, np.int64)
        self.live = np.union1d(self.live, chosen)
        return self._begin(chosen, seeds, variants)

    def _begin(
        self, scenes: NDArray[np.int64], seeds: Sequence[int], variants: Sequence[Variant | None]
    ) -> SceneObservation:
        self._elapsed[scenes] = 0
        for scene, variant in zip(scenes.tolist(), variants or [None] * len(scenes), strict=True):
            # a variant differs in numbers, not in sizes, so buffers and data stay valid
            self._models[scene] = self.model if variant is None else variant.model
            self._delays[scene] = 0 if variant is None else variant.observation_delay
            self._pasts[scene] = deque(maxlen=1 + self._delays[scene] + self._past)
        observation = self._allocate(scenes)

        def begin(worker: SceneWorker, row: int) -> None:
            import mujoco

            scene = int(scenes[row])
            model, data = self._models[scene], self._data[scene]
            # also clears warm-start accelerations, which would carry over from the last episode
            mujoco.mj_resetData(model, data)
            self.task.reset(model, data, np.random.default_rng(seeds[row]))
            # positions, contacts and sensors of the start, before any step
            mujoco.mj_forward(model, data)
            self._pasts[scene].append((worker.physics.state(data), np.array(data.sensordata)))
            self._observe(worker, scene, data.sensordata, observation, row)

        self._in_parallel(begin, len(scenes))
        return observation

    def step_chunk(self, actions: ArrayLike, record: Collection[int] = ()) -> Chunk:
        """Step the live scenes through a chunk of actions; those whose episode ends leave `live`.

        Args:
            actions: (L, K, nu) controls of the L live scenes, each held for `substeps` physics steps.
            record: scenes of which every control step is rendered.
        """
        # contiguous float64, as `mujoco.rollout` reads it
        controls = np.ascontiguousarray(actions, np.float64)
        self._check(controls)
        scenes, length = self.live, controls.shape[1]
        # steps left until the horizon
        room = np.full(len(scenes), length) if self.horizon is None else self.horizon - self._elapsed[scenes]
        taken = np.minimum(room, length)
        output = Chunk(
            scenes=scenes,
            rewards=np.zeros((len(scenes), length)),
            dones=np.zeros((len(scenes), length), bool),
            solved=np.zeros(len(scenes), bool),
            steps=np.zeros(len(scenes), np.int64),
            truncated=np.zeros(len(scenes), bool),
            failed=np.zeros(len(scenes), bool),
            observation=self._allocate(scenes),
        )

        # batched physics runs all scenes in one call; only scoring and drawing stay in the workers
        together = None
        if self._physics is not None:
            chosen = scenes.tolist()
            models, datas = [self._models[scene] for scene in chosen], [self._data[scene] for scene in chosen]
            together = self._physics.run(models, datas, controls)

        def advance(worker: SceneWorker, row: int) -> None:
            scene, given = int(scenes[row]), controls[row, : taken[row]]
            if together is None:
                done = worker.physics.run(self._models[scene], self._data[scene], given, self.substeps)
            else:
                states, sound = (part[row] for part in together)
                # batched physics ran the whole chunk; steps after the horizon do not count
                done = states[: len(given)], min(int(sound), len(given))
            self._advance(worker, row, given, done, output, scene in record)

        self._in_parallel(advance, len(scenes))
        self._elapsed[scenes] += output.steps
        ended = output.dones.any(axis=1)
        if self.horizon is not None:
            # an end by the task wins over the time limit
            output.truncated[:] = (self._elapsed[scenes] >= self.horizon) & ~ended & ~output.failed
        # replaced and not changed: callers may hold the old array
        self.live = scenes[~(ended | output.truncated | output.failed)]
        return output

    def close(self) -> None:
        """Stop the threads and free the renderers."""
        self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _check(self, controls: NDArray[np.float64]) -> None:
        if not len(self.live):
            raise UserError("all episodes have ended; call reset() first")
        expected = (len(self.live), self.model.nu)
        if controls.ndim != 3 or (controls.shape[0], controls.shape[2]) != expected or controls.shape[1] < 1:
            raise UserError(
                f"actions have the shape {controls.shape}; expected ({expected[0]} live scenes, K >= 1, "
                f"{expected[1]} actuators)"
            )

    def _allocate(self, scenes: NDArray[np.int64]) -> SceneObservation:
        rows, model = len(scenes), self.model
        frames, views = self._image_buffers(rows)
        return SceneObservation(
            scenes=scenes,
            qpos=np.empty((rows, model.nq)),
            qvel=np.empty((rows, model.nv)),
            sensordata=np.empty((rows, model.nsensordata)),
            measured=np.empty((rows, model.nsensordata)),
            frames=frames,
            views=views,
            earlier=[[] for _ in scenes] if self._past else [],
        )

    def _image_buffers(self, *rows: int) -> tuple[NDArray[np.uint8] | None, NDArray[np.uint8] | None]:
        """Buffers of images (*rows, H, W, 3) and of further cameras (*rows, V, H, W, 3)."""
        if self.settings is None:
            return None, None
        shape, cameras = (self.settings.height, self.settings.width, 3), len(self.settings.views)
        views = np.empty((*rows, cameras, *shape), np.uint8) if cameras else None
        return np.empty((*rows, *shape), np.uint8), views

    def _in_parallel(self, work: Callable[[SceneWorker, int], None], rows: int) -> None:
        if not self._workers:
            raise RuntimeError("this ImageRollout has been closed")
        # shared: an idle worker takes the next row, so slow scenes do not hold up the others
        waiting = deque(range(rows))
        # no more workers than rows
        running = [worker.start(work, waiting) for worker in self._workers[:rows]]
        # all of them end before the first error is raised, as they write into shared arrays
        wait(running)
        for future in running:
            future.result()

    def _advance(
        self,
        worker: SceneWorker,
        row: int,
        controls: NDArray[np.float64],
        done: tuple[NDArray[np.float64], int],
        output: Chunk,
        record: bool,
    ) -> None:
        """Score and observe a scene's chunk, and write its row of the output.

        The physics of all K control steps ran in one call, so the scene may have run past the end of its episode; it is
        then set back to the state of the last step that counts, the one observed.
        """
        scene = int(output.observation.scenes[row])
        model, data = self._models[scene], self._data[scene]
        states, sound = done
        # computed for the states as they are; `mj_step` would leave those of one physics step before
        sensors = worker.physics.sensors(model, data, states[:sound])
        qpos, qvel = worker.physics.split(states[:sound])
        rewards, solved = self._score(SceneSteps(controls[:sound], qpos, qvel, sensors))
        ends = solved & self._ends
        # Failures after the end of the episode, in steps that only fill up the chunk, do not count.
        if sound < len(controls) and not ends.any():
            output.failed[row], output.rewards[row] = True, np.nan
            self._observe(worker, scene, data.sensordata, output.observation, row)
            return
        # the first end; a task may report several in the steps that only fill up the chunk
        last = int(ends.argmax()) if ends.any() else len(controls) - 1
        output.rewards[row, : last + 1] = rewards[: last + 1]
        output.dones[row, last] = ends[last]
        output.solved[row] = solved[: last + 1].any()
        output.steps[row] = last + 1
        late = self.horizon is not None and self._elapsed[scene] + last + 1 >= self.horizon
        if record and worker.renderer is not None:
            outcome: Outcome = "success" if solved[last] else "failure" if late else ""
            output.recorded[scene] = worker.draw_all(model, data, states[: last + 1], outcome)
        # the physics ran past the end, or (batched) left the data at its start
        if last + 1 < len(controls) or self._physics is not None:
            worker.physics.restore(data, states[last])
        self._pasts[scene].extend(zip(states[: last + 1], sensors[: last + 1], strict=True))
        if self._past and not (ends[last] or late):
            output.observation.earlier[row] = self._look_back(worker, scene, min(self._past, last))
        self._observe(worker, scene, sensors[last], output.observation, row)

    def _observe(
        self, worker: SceneWorker, scene: int, sensors: NDArray[np.float64], observation: SceneObservation, row: int
    ) -> None:
        """Write a scene's observation, delayed or not."""
        model, data = self._models[scene], self._data[scene]
        state, measured = self._shown(scene)
        observation.qpos[row], observation.qvel[row] = data.qpos, data.qvel
        observation.sensordata[row], observation.measured[row] = sensors, sensors
        late = self._delays[scene] > 0
        if late:
            observation.measured[row] = measured
        if observation.frames is None:
            return
        if late:
            worker.physics.restore(data, state)
        worker.draw(model, data, observation.frames[row], None if observation.views is None else observation.views[row])
        if late:
            # the physics goes on from the present, not from the state that was drawn
            worker.physics.restore(data, self._pasts[scene][-1][0])

    def _shown(self, scene: int, back: int = 0) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """State and sensor values that a scene reports now, or reported some control steps ago."""
        past = self._pasts[scene]
        # an episode younger than the delay still shows its first state
        return past[max(0, len(past) - 1 - back - self._delays[scene])]

    def _look_back(self, worker: SceneWorker, scene: int, count: int) -> list[Look]:
        """Sensor values and images of the control steps before the present one; the scene's state is left as it is."""
        data, looks = self._data[scene], []
        # the oldest first
        for back in range(count, 0, -1):
            state, measured = self._shown(scene, back)
            frame, views = self._image_buffers()
            if frame is not None:
                worker.physics.restore(data, state)
                worker.draw(self._models[scene], data, frame, views)
            looks.append(Look(measured, frame, views))
        if looks:
            worker.physics.restore(data, self._pasts[scene][-1][0])
        return looks

    def _score(self, steps: SceneSteps) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
        count = len(steps.actions)
        if not count:
            return np.zeros(0), np.zeros(0, bool)
        scored = self.task.score(steps)
        rewards, ends = np.asarray(scored[0], np.float64), np.asarray(scored[1], np.bool_)
        if rewards.shape != (count,) or ends.shape != (count,):
            raise UserError(
                f"{type(self.task).__name__}.score returned the shapes {rewards.shape} and {ends.shape} for {count} "
                f"control steps; expected ({count},) twice"
            )
        return rewards, ends


def _close_workers(workers: list[SceneWorker]) -> None:
    while workers:
        workers.pop().close()
