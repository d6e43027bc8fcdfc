"""A worker thread of `ImageRollout`, which steps and draws one scene at a time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Protocol

import numpy as np

from robotics.sim.rendering import FrameRenderer, Outcome, RenderSettings, update_poses, update_sensors

if TYPE_CHECKING:
    import mujoco
    from numpy.typing import NDArray


class DrawsVideo(Protocol):
    """Draws a scene for people, with its own model, and shows how an episode ended."""

    def rgb(
        self, data: mujoco.MjData, out: NDArray[np.uint8] | None = None, outcome: Outcome = ""
    ) -> NDArray[np.uint8]:
        """Draw (H, W, 3)."""
        ...

    def close(self) -> None:
        """Free the OpenGL context."""


class Physics:
    """Runs a scene, of any variant of the model, through control steps with one call of `mujoco.rollout`."""

    def __init__(self, model: mujoco.MjModel) -> None:
        import mujoco
        from mujoco import rollout

        state = mujoco.mjtState
        self._lib, self._model = mujoco, model
        self._full, self._user = int(state.mjSTATE_FULLPHYSICS), int(state.mjSTATE_USER)
        self._sizes = [mujoco.mj_stateSize(model, int(kind)) for kind in (self._full, self._user)]
        # No separate thread pool: this thread is one of several that each run a scene.
        self._rollout = rollout.Rollout(nthread=0)
        time = mujoco.mj_stateSize(model, int(state.mjSTATE_TIME))
        self._qpos = slice(time, time + model.nq)
        self._qvel = slice(time + model.nq, time + model.nq + model.nv)

    def run(
        self, model: mujoco.MjModel, data: mujoco.MjData, controls: NDArray[np.float64], substeps: int
    ) -> tuple[NDArray[np.float64], int]:
        """Step a scene with controls (K, nu), each held for the substeps; leaves its data as a `mj_step` loop would.

        Returns (K, nstate) full physics states after each control step, and the number of control steps before the one
        in which MuJoCo warned, or K if it did not.
        """
        size, inputs = self._sizes
        steps = len(controls) * substeps
        start, held = np.empty((1, size)), np.empty(inputs)
        self._lib.mj_getState(self._model, data, start[0], self._full)
        # Rollout clears what it is not given, so all that a user may have set is passed: forces, mocap poses, ...
        self._lib.mj_getState(self._model, data, held, self._user)
        given = np.empty((1, len(controls), substeps, inputs))
        given[:] = held
        given[0, :, :, : self._model.nu] = controls[:, None]
        states = np.empty((1, steps, size))
        self._rollout.rollout(
            [model],
            [data],
            start,
            given.reshape(1, steps, inputs),
            control_spec=self._user,
            skip_checks=True,
            nstep=steps,
            initial_warmstart=np.array(data.qacc_warmstart)[None],
            state=states,
        )
        # the last physics step of each control step
        kept = slice(substeps - 1, None, substeps)
        sound = self._count_sound(data, states[0, kept, 0], start[0, 0], substeps)
        return states[0, kept], sound

    def sensors(self, model: mujoco.MjModel, data: mujoco.MjData, states: NDArray[np.float64]) -> NDArray[np.float64]:
        """(K, nsensordata) sensor values of states (K, nstate); leaves the scene in the last of them."""
        values = np.empty((len(states), model.nsensordata))
        # rollout leaves sensors of the step before, see `update_sensors`
        for state, row in zip(states, values, strict=True):
            self.restore(data, state)
            update_sensors(model, data)
            row[:] = data.sensordata
        return values

    def split(self, states: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """(..., nq) positions and (..., nv) velocities of states (..., nstate)."""
        return states[..., self._qpos], states[..., self._qvel]

    def state(self, data: mujoco.MjData) -> NDArray[np.float64]:
        """(nstate,) full physics state of a scene."""
        state = np.empty(self._sizes[0])
        self._lib.mj_getState(self._model, data, state, self._full)
        return state

    def _count_sound(self, data: mujoco.MjData, times: NDArray[np.float64], start: float, substeps: int) -> int:
        if not data.warning.number.any():
            return len(times)
        # From a warning on, rollout repeats the state; where the numbers blew up, time has gone back to 0 before.
        full = np.diff(times, prepend=start) > (substeps - 0.5) * self._model.opt.timestep
        return min(int(full.argmin()) if not full.all() else len(times), len(times) - 1)

    def restore(self, data: mujoco.MjData, state: NDArray[np.float64]) -> None:
        """Set a scene to a state that `run` returned."""
        self._lib.mj_setState(self._model, data, np.ascontiguousarray(state), self._full)


class SceneWorker:
    """A thread with its renderer's OpenGL context, and one scene at a time."""

    def __init__(
        self,
        model: mujoco.MjModel,
        settings: RenderSettings | None,
        backend: str,
        video: Callable[[], DrawsVideo] | None,
    ) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="image-rollout")
        self.physics = Physics(model)
        self.renderer: FrameRenderer | DrawsVideo | None = None
        self._shape: tuple[int, ...] = ()
        self._views = () if settings is None else settings.views
        if settings is not None:
            self._shape = (settings.height, settings.width, 3)
            make: Callable[[], FrameRenderer | DrawsVideo] = video or partial(FrameRenderer, model, settings, backend)
            # an OpenGL context belongs to the thread that made it
            self.renderer = self._thread.submit(make).result()

    def start(self, work: Callable[[SceneWorker, int], None], waiting: deque[int]) -> Future[None]:
        """Work on waiting rows until none is left."""
        return self._thread.submit(self._drain, work, waiting)

    def draw(
        self,
        model: mujoco.MjModel,
        data: mujoco.MjData,
        out: NDArray[np.uint8],
        views: NDArray[np.uint8] | None = None,
    ) -> None:
        """Draw a scene into `out`, and the images of the additional cameras into `views`."""
        if self.renderer is None:
            return
        update_poses(model, data)
        if isinstance(self.renderer, FrameRenderer):  # video renderers have their own model and one camera
            self.renderer.show(model)
            for camera, image in zip(self._views, () if views is None else views, strict=views is not None):
                self.renderer.rgb(data, image, camera)
        self.renderer.rgb(data, out)

    def draw_all(
        self, model: mujoco.MjModel, data: mujoco.MjData, states: NDArray[np.float64], outcome: Outcome
    ) -> NDArray[np.uint8]:
        """Draw a scene in each of the given states, and leave it in the last one."""
        frames = np.empty((len(states), *self._shape), np.uint8)
        for state, frame in zip(states, frames, strict=True):
            self.physics.restore(data, state)
            self.draw(model, data, frame)
        if outcome and self.renderer is not None and not isinstance(self.renderer, FrameRenderer):
            self.renderer.rgb(data, frames[-1], outcome)
        return frames

    def close(self) -> None:
        """Free the renderer in its own thread and end the thread."""
        if self.renderer is not None:
            self._thread.submit(self.renderer.close).result()
        self._thread.shutdown()

    def _drain(self, work: Callable[[SceneWorker, int], None], waiting: deque[int]) -> None:
        while True:
            try:
                # atomic, and shared by all workers: the first free one takes the next row
                row = waiting.popleft()
            except IndexError:
                return
            work(self, row)
