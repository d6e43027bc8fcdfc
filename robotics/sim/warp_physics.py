"""Batched GPU physics of many scenes in mujoco_warp; `ImageRollout` does the rest of a rollout.

mujoco_warp steps copies of a scene ("worlds") together, in float32. The controls of a chunk are known before its first
physics step (`robotics.scenes.control`), so a chunk needs one upload of states, one launch for each control step and
one download.

Trajectories agree with MuJoCo's up to float32 rounding and the order of sums, which contacts amplify; they are not
bit-identical, and on a GPU they differ from run to run.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from mmrl.errors import UserError

if TYPE_CHECKING:
    import mujoco
    from numpy.typing import NDArray

LOGGER = logging.getLogger("mmrl")

INPUTS = ("qvel", "qpos", "act", "qacc_warmstart", "mocap_pos", "mocap_quat", "qfrc_applied", "xfrc_applied")
"""Uploaded at the beginning of a chunk: the state, and what a user may have set."""
VARIED = (
    *("body_mass", "body_inertia", "body_subtreemass", "body_invweight0", "dof_invweight0"),
    *("geom_friction", "actuator_gainprm", "actuator_biasprm"),
)
"""Physics fields in which a variant's model may differ; see `robotics.scenes.variant`."""
UNLIMITED = 1e10
"""Larger positions and velocities have diverged; MuJoCo's mjMAXVAL."""
CONTACTS, CONSTRAINTS = 96, 384
"""Maximum number of contacts and rows of constraints of a scene, several times those of the table scenes."""
HARMLESS = ("ITERATIONS", "LS_ITERATIONS")
"""Not overflows: the solver stopped at its last iteration, as MuJoCo does silently."""


def find_warp() -> tuple[Any, Any]:
    """Import warp and mujoco_warp."""
    try:
        import mujoco_warp
        import warp
    except ImportError as error:
        raise UserError(f"physics: warp needs pip install 'mmrl-suite[warp]' ({error})") from error
    warp.config.quiet = True
    return warp, mujoco_warp


def describe_warp(device: str | None = None) -> str:
    """Version and device, for records."""
    warp, library = find_warp()
    return f"mujoco_warp {library.__version__} on {warp.get_device(_find_device(warp, device)).name}"


class WarpPhysics:
    """Steps the scenes of one model together; pass it to `ImageRollout` as `physics`."""

    def __init__(
        self,
        model: mujoco.MjModel,
        scenes: int,
        substeps: int,
        device: str | None = None,
    ) -> None:
        self._warp, self._library = find_warp()
        self.device: str = _find_device(self._warp, device)
        """Name of warp's device."""
        self._model = model
        self._substeps = substeps
        self._scenes = scenes
        _check_state(model)
        self._shown: list[mujoco.MjModel] = [model] * scenes
        self._graph: Any = None
        bits = self._library.OverflowType
        self._harmful = int(bits.ALL) & ~sum(int(getattr(bits, name)) for name in HARMLESS)
        with self._warp.ScopedDevice(self.device):
            self._worlds = self._put()
            # Compiles what is missing, which a graph must not do while it is captured.
            self._library.step(self._constants, self._worlds)
            if self._warp.get_device(self.device).is_cuda:
                with self._warp.ScopedCapture() as capture:
                    self._step()
                # one launch for all substeps
                self._graph = capture.graph

    def run(
        self, models: Sequence[mujoco.MjModel], datas: Sequence[mujoco.MjData], controls: NDArray[np.float64]
    ) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
        """Step L scenes with controls (L, K, nu), each held for the substeps; writes only warm starts to the datas.

        Returns (L, K, nstate) full physics states (time, qpos, qvel, act) after each control step, and (L,) the control
        steps before the one that diverged or overflowed a buffer, else K.
        """
        count, length = controls.shape[:2]
        if count > self._scenes:
            raise UserError(f"{count} scenes for {self._scenes} warp worlds")
        with self._warp.ScopedDevice(self.device):
            self._show(models)
            self._upload(datas)
            states = np.empty((count, length, 1 + self._model.nq + self._model.nv + self._model.na))
            broken = np.zeros((count, length), bool)
            for step in range(length):
                self._assign("ctrl", controls[:, step])
                if self._graph is None:
                    self._step()
                else:
                    self._warp.capture_launch(self._graph)
                self._download(states[:, step], broken[:, step])
            accelerations = self._worlds.qacc_warmstart.numpy()
        duration = self._substeps * self._model.opt.timestep
        begun = np.array([data.time for data in datas])
        # computed in float64: float32 time would drift over an episode
        states[:, :, 0] = begun[:, None] + duration * np.arange(1, length + 1)
        sound = np.where(broken.any(axis=1), broken.argmax(axis=1), length)
        for row, data in enumerate(datas):
            # the solver of a diverged scene has no useful start
            if sound[row] == length:
                data.qacc_warmstart[:] = accelerations[row]
        return states, sound

    def _put(self) -> Any:
        import mujoco

        try:
            self._constants = self._library.put_model(self._model)
        except NotImplementedError as error:
            raise UserError(f"physics: warp cannot run this scene: {error}") from error
        self._constants.opt.warn_overflow = 0  # a full buffer is a scene's failure and counted as such
        for name in VARIED:
            field = getattr(self._constants, name)
            # one value per world, so that each can have its own variant
            values = np.repeat(field.numpy()[:1], self._scenes, axis=0)
            setattr(self._constants, name, self._warp.array(values, dtype=field.dtype))
        data = mujoco.MjData(self._model)
        return self._library.put_data(self._model, data, nworld=self._scenes, nconmax=CONTACTS, njmax=CONSTRAINTS)

    def _step(self) -> None:
        for _ in range(self._substeps):
            self._library.step(self._constants, self._worlds)

    def _show(self, models: Sequence[mujoco.MjModel]) -> None:
        """Update the worlds whose scenes' models have changed."""
        # by identity: a model that was changed in place would not be noticed
        changed = [row for row, model in enumerate(models) if model is not self._shown[row]]
        if not changed:
            return
        for name in VARIED:
            field = getattr(self._constants, name)
            values = field.numpy()
            for row in changed:
                values[row] = getattr(models[row], name).reshape(values[row].shape)
            field.assign(values)
        for row in changed:
            self._shown[row] = models[row]

    def _upload(self, datas: Sequence[mujoco.MjData]) -> None:
        for name in INPUTS:
            if np.size(getattr(datas[0], name)):
                self._assign(name, np.stack([getattr(data, name) for data in datas]))
        # flags stay set until they are cleared, and would fail the next episode too
        self._worlds.overflow.zero_()

    def _assign(self, name: str, values: NDArray[np.float64]) -> None:
        """Write the first worlds' values; the unused others repeat those of the first."""
        # unused worlds compute too; a copy of a real one cannot diverge by itself
        spare = np.repeat(values[:1], self._scenes - len(values), axis=0)
        getattr(self._worlds, name).assign(np.concatenate([values, spare]).astype(np.float32))

    def _download(self, states: NDArray[np.float64], broken: NDArray[np.bool_]) -> None:
        count, worlds = len(states), self._worlds
        parts = [worlds.qpos.numpy(), worlds.qvel.numpy(), worlds.act.numpy()]
        states[:, 1:] = np.concatenate([part[:count] for part in parts], axis=1)
        full = (worlds.overflow.numpy()[:count] & self._harmful) != 0
        broken[:] = full | ~(np.abs(states[:, 1:]) < UNLIMITED).all(axis=1)  # NaN is not below it


def _check_state(model: mujoco.MjModel) -> None:
    import mujoco

    size = mujoco.mj_stateSize(model, int(mujoco.mjtState.mjSTATE_FULLPHYSICS))
    if size != 1 + model.nq + model.nv + model.na:
        raise UserError(
            "physics: warp cannot run this scene: it has more state than positions, velocities and activations"
        )


def _find_device(warp: Any, device: str | None) -> str:
    if device is None:
        name = str(warp.get_preferred_device())
        if not warp.get_device(name).is_cuda:
            LOGGER.warning("physics: warp runs on the CPU, where MuJoCo is many times faster; no GPU was found")
        return name
    try:
        return str(warp.get_device(device))
    except (ValueError, RuntimeError) as error:
        known = ", ".join(str(one) for one in warp.get_devices())
        raise UserError(f"warp has no device {device!r}; available: {known}") from error
