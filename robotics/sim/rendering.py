"""Fast images of MuJoCo scenes.

With default settings a software renderer spends nearly all the time of a frame on one shadow map of 4096 x 4096 pixels.
Three things are skipped here, each with a switch:

- shadows: the light that would be blocked arrives; colours of shaded parts change, shapes do not;
- multisampling: edges are not smoothed;
- parts that never move: they are drawn once, with their depth, and later images only add nearer moving parts. This
  changes no pixel. If it would (shadows, smoothed edges, transparent or mirroring surfaces), or if camera, lights or a
  fixed part move between images, everything is drawn.
"""

from __future__ import annotations

import atexit
import copy
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar

import numpy as np

from mmrl.errors import UserError
from mmrl.fields import bounded, check_fields
from robotics.sim.backends import open_context, require_backend

if TYPE_CHECKING:
    import mujoco
    from numpy.typing import NDArray

FREE_CAMERA = -1
BACKGROUND_ID = -1
Outcome = Literal["", "success", "failure"]
"""End of an episode; empty while it runs."""
SpecOrModel = TypeVar("SpecOrModel")
OPEN_RENDERERS: weakref.WeakSet[FrameRenderer] = weakref.WeakSet()


@dataclass(frozen=True)
class RenderSettings:
    """Size and camera of an image, and what is skipped to save time."""

    width: int = bounded(128, at_least=1)
    """Pixels."""
    height: int = bounded(128, at_least=1)
    """Pixels."""
    camera: str | int = FREE_CAMERA
    """Name or id of a camera of the model; -1 is the free camera at its default pose."""
    views: tuple[str | int, ...] = ()
    """Additional cameras, which `ImageRollout` also renders at the same size."""
    shadows: bool = False
    """Draw shadows."""
    multisampling: bool = False
    """Smooth edges with the model's number of samples."""
    reuse_static: bool = True
    """Draw what never moves once; changes no pixel."""


def fast_visuals(spec_or_model: SpecOrModel, settings: RenderSettings | None = None) -> SpecOrModel:
    """Switch off shadows and multisampling in a model, for renderers other than `FrameRenderer`.

    Args:
        spec_or_model: MjSpec or MjModel; changed in place. The off-screen buffer grows if the image needs it.
        settings: which of the two stay on; None = the defaults of `RenderSettings`.

    Returns:
        The argument. It takes effect in renderers that are made afterwards.
    """
    chosen = settings or RenderSettings()
    visual: Any = spec_or_model.visual if hasattr(spec_or_model, "visual") else spec_or_model.vis  # type: ignore[attr-defined]
    if not chosen.multisampling:
        visual.quality.offsamples = 0
    # MuJoCo refuses images larger than its off-screen buffer
    visual.global_.offwidth = max(visual.global_.offwidth, chosen.width)
    visual.global_.offheight = max(visual.global_.offheight, chosen.height)
    if not chosen.shadows:
        if hasattr(spec_or_model, "light_castshadow"):
            spec_or_model.light_castshadow[:] = False
        else:
            for light in spec_or_model.lights:  # type: ignore[attr-defined]
                light.castshadow = False
    return spec_or_model


@dataclass
class _Background:
    """The parts that never move, seen from one view; rows run from the bottom of the image up."""

    view: NDArray[np.float64]  # poses of camera, lights and those parts
    rgb: NDArray[np.uint8]  # (H*W, 3)
    nearness: NDArray[np.float32]  # (H*W,) depth buffer, larger is nearer; 0 for the background


@dataclass
class _CameraState:
    """A camera, and its background if that can be drawn apart from the moving parts."""

    camera: Any  # MjvCamera
    separable: bool
    last_view: NDArray[np.float64] | None = None
    background: _Background | None = None


class FrameRenderer:
    """Draws images of one model, with one OpenGL context and one scene; belongs to the thread that made it.

    Poses are taken from the MjData as they are: after `mj_step` they are those at the start of the last step
    (`update_poses` brings them up to date). Call `refresh` after a change of colours, materials or sizes, and `show`
    after one of textures or to draw a variant of the model; meshes and `visual/quality` stay those of the first model.

    Args:
        model: MjModel; not changed.
        settings: size, cameras and what to skip.
        backend: name of a probed renderer; None = chosen and probed.
        max_geoms: maximum number of geoms in a scene.

    Raises:
        UserError: a camera does not exist, or there is no renderer.
    """

    def __init__(
        self,
        model: mujoco.MjModel,
        settings: RenderSettings | None = None,
        backend: str | None = None,
        max_geoms: int = 10000,
    ) -> None:
        self.settings = settings or RenderSettings()
        check_fields(self.settings, "image")
        self.backend = backend or require_backend().name

        import mujoco

        self._lib = mujoco
        self._model = model
        check_cameras(model, (self.settings.camera, *self.settings.views))
        self._option = mujoco.MjvOption()
        self._scene = mujoco.MjvScene(model, maxgeom=max_geoms)
        self._scene.flags[mujoco.mjtRndFlag.mjRND_SHADOW] = self.settings.shadows
        self._everything = int(mujoco.mjtCatBit.mjCAT_ALL)
        self._static = int(mujoco.mjtCatBit.mjCAT_STATIC)
        self._sky = bool(self._scene.flags[mujoco.mjtRndFlag.mjRND_SKYBOX])
        self._rect = mujoco.MjrRect(0, 0, self.settings.width, self.settings.height)
        self._gl, self._mjr = self._open()
        self._free = weakref.finalize(self, _free_context, self._gl, self._mjr, threading.get_ident())
        self._free.atexit = False
        # weakref.finalize would run after mujoco has ended the display, and OSMesa's own clean-up after PyOpenGL is
        # gone; a handler registered now, with a context open, runs before both.
        if not OPEN_RENDERERS:
            atexit.register(_close_all)
        OPEN_RENDERERS.add(self)

        height, width = self.settings.height, self.settings.width
        self._rows = np.empty((height, width, 3), np.uint8)
        self._spare_rows = np.empty((height, width, 3), np.uint8)
        self._nearness = np.empty((height, width), np.float32)
        self._image = np.empty((height, width, 3), np.uint8)
        # what the graphics card has, to find the textures that have changed
        self._textures: NDArray[np.uint8] = model.tex_data.copy()
        # shadows and smoothed edges mix moving and fixed parts in one pixel
        self._separable = self.settings.reuse_static and not (self.settings.shadows or self.settings.multisampling)
        self._cameras: dict[str | int, _CameraState] = {}
        self.refresh()

    def rgb(
        self, data: mujoco.MjData, out: NDArray[np.uint8] | None = None, camera: str | int | None = None
    ) -> NDArray[np.uint8]:
        """Draw the colours.

        Args:
            data: state whose poses are drawn.
            out: (H, W, 3) uint8 to write to; None = a buffer of the renderer, which the next call overwrites.
            camera: name or id; None = the settings' camera. Raises UserError if it does not exist.

        Returns:
            (H, W, 3) uint8 RGB, the top row first.
        """
        out = self._image if out is None else out
        self._make_current()
        seen = self._camera(self.settings.camera if camera is None else camera)
        background = self._background_of(data, seen)
        if background is None:
            self._draw(data, seen, self._everything, self._sky)
            self._lib.mjr_readPixels(self._rows, None, self._rect, self._mjr)
        else:
            # moving parts alone, without sky: where nothing is drawn, the depth stays at the far end
            self._draw(data, seen, self._everything & ~self._static, sky=False)
            self._lib.mjr_readPixels(self._rows, self._nearness, self._rect, self._mjr)
            self._lay_over(background)
        # OpenGL's rows run from the bottom up
        out[:] = self._rows[::-1]
        return out

    def depth(self, data: mujoco.MjData, out: NDArray[np.float32] | None = None) -> NDArray[np.float32]:
        """(H, W) float32 metres along the viewing direction, the top row first; empty pixels are at the far plane.

        Args:
            data: state whose poses are drawn.
            out: (H, W) float32 to write to; None = a new array.
        """
        out = np.empty(self._nearness.shape, np.float32) if out is None else out
        self._draw_identities(data)
        self._lib.mjr_readPixels(None, self._nearness, self._rect, self._mjr)
        extent, clip = self._model.stat.extent, self._model.vis.map
        # rounded to float32 first, as OpenGL has them
        near, far = np.float64(np.float32(clip.znear * extent)), np.float64(np.float32(clip.zfar * extent))
        nearness = self._nearness[::-1].astype(np.float64)
        # The buffer holds 1 at the near end of the view, 0 at the far one and a + b / distance in between.
        if self._scene.camera[0].orthographic:
            out[:] = far - nearness * (far - near)
        else:
            out[:] = near * far / (near + nearness * (far - near))
        return out

    def segmentation(self, data: mujoco.MjData, out: NDArray[np.int32] | None = None) -> NDArray[np.int32]:
        """(H, W, 2) int32 object id and type (mjtObj) of each pixel, the top row first; -1 for the background.

        Args:
            data: state whose poses are drawn.
            out: (H, W, 2) int32 to write to; None = a new array.
        """
        out = np.empty((*self._nearness.shape, 2), np.int32) if out is None else out
        self._draw_identities(data)
        self._lib.mjr_readPixels(self._rows, None, self._rect, self._mjr)
        # the renderer writes an id as three bytes: red + 256 green + 65536 blue
        codes = self._rows[::-1].astype(np.int64) @ np.array([1, 2**8, 2**16])
        shapes = [geom for geom in self._scene.geoms[: self._scene.ngeom] if geom.segid >= 0]
        # id -1 becomes row 0, so that the background needs no branch
        table = np.full((self._scene.ngeom + 1, 2), BACKGROUND_ID, np.int32)
        for shape in shapes:
            table[shape.segid + 1] = shape.objid, shape.objtype
        out[:] = table[codes]
        return out

    def refresh(self) -> None:
        """Draw everything again the next time, because colours, materials or visibility have changed."""
        for seen in self._cameras.values():
            seen.separable = self._separable
            seen.last_view = None
            seen.background = None
        # bodies without joints to the world; mocap bodies are among them, so their poses are compared too
        self._fixed_bodies = np.flatnonzero(self._model.body_weldid == 0)

    def show(self, model: mujoco.MjModel) -> None:
        """Draw a copy of the model with other colours, lights, cameras or textures (but as many) from now on."""
        if model is not self._model:
            self._model = model
            self.refresh()
        self._upload_textures()

    def close(self) -> None:
        """Free the context; from the thread that made the renderer."""
        self._free()
        self._mjr = self._gl = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _open(self) -> tuple[Any, Any]:
        settings, library = self.settings, self._lib
        # a copy: the caller's model keeps its visual settings
        visual = fast_visuals(copy.copy(self._model), settings)
        # A buffer of the image's own size, and none for shadows that are off (64 MB by default).
        visual.vis.global_.offwidth = settings.width
        visual.vis.global_.offheight = settings.height
        visual.vis.quality.shadowsize = visual.vis.quality.shadowsize if settings.shadows else 0
        gl = open_context(self.backend, settings.width, settings.height)
        gl.make_current()
        mjr = library.MjrContext(visual, library.mjtFontScale.mjFONTSCALE_50)
        library.mjr_setBuffer(library.mjtFramebuffer.mjFB_OFFSCREEN, mjr)
        # 0 at the far plane: floats resolve far depths better, and "nothing there" is 0
        mjr.readDepthMap = library.mjtDepthMap.mjDEPTH_ZEROFAR
        return gl, mjr

    def _upload_textures(self) -> None:
        """Upload textures whose pixels have changed to the graphics card."""
        bounds = [*self._model.tex_adr.tolist(), len(self._model.tex_data)]
        for number, (start, end) in enumerate(pairwise(bounds)):
            # uploading is slow, so only textures whose pixels differ are sent
            if not np.array_equal(self._model.tex_data[start:end], self._textures[start:end]):
                self._make_current()
                self._lib.mjr_uploadTexture(self._model, self._mjr, number)
                self._textures[start:end] = self._model.tex_data[start:end]
                self.refresh()

    def _make_current(self) -> None:
        if self._gl is None:
            raise RuntimeError("this FrameRenderer has been closed")
        self._gl.make_current()

    def _camera(self, camera: str | int) -> _CameraState:
        if camera not in self._cameras:
            self._cameras[camera] = _CameraState(_find_camera(self._model, camera), self._separable)
        return self._cameras[camera]

    def _draw(self, data: mujoco.MjData, seen: _CameraState, categories: int, sky: bool) -> None:
        self._scene.flags[self._lib.mjtRndFlag.mjRND_SKYBOX] = sky
        self._lib.mjv_updateScene(self._model, data, self._option, None, seen.camera, int(categories), self._scene)
        self._lib.mjr_render(self._rect, self._scene, self._mjr)

    def _draw_identities(self, data: mujoco.MjData) -> None:
        # Depth is read from this image too: with its flat colours it is more accurate far away.
        self._make_current()
        flags = [int(self._lib.mjtRndFlag.mjRND_SEGMENT), int(self._lib.mjtRndFlag.mjRND_IDCOLOR)]
        self._scene.flags[flags] = True
        try:
            self._draw(data, self._camera(self.settings.camera), self._everything, self._sky)
        finally:
            self._scene.flags[flags] = False

    def _background_of(self, data: mujoco.MjData, seen: _CameraState) -> _Background | None:
        if not seen.separable:
            return None
        camera = seen.camera.fixedcamid
        parts = [data.xpos[self._fixed_bodies], data.xquat[self._fixed_bodies], data.light_xpos, data.light_xdir]
        if camera != FREE_CAMERA:
            parts += [data.cam_xpos[camera], data.cam_xmat[camera]]
        view = np.concatenate([np.ravel(part) for part in parts])
        if seen.background is not None and np.array_equal(view, seen.background.view):
            return seen.background
        # Worth drawing only for a view that stays: a camera on a moving hand would pay for it in every image.
        stays = seen.last_view is not None and np.array_equal(view, seen.last_view)
        seen.last_view = view
        seen.background = self._draw_background(data, seen, view) if stays else None
        return seen.background

    def _draw_background(
        self, data: mujoco.MjData, seen: _CameraState, view: NDArray[np.float64]
    ) -> _Background | None:
        self._draw(data, seen, self._everything, self._sky)
        # only known after drawing: MuJoCo marks transparent geoms while it renders
        seen.separable = not any(map(self._mixes, self._scene.geoms[: self._scene.ngeom]))
        if not seen.separable:
            return None
        self._draw(data, seen, self._static, self._sky)
        rgb, nearness = np.empty_like(self._rows), np.empty_like(self._nearness)
        self._lib.mjr_readPixels(rgb, nearness, self._rect, self._mjr)
        return _Background(view, rgb.reshape(-1, 3), nearness.reshape(-1))

    def _mixes(self, shape: Any) -> bool:
        # `transparent` is set by mjr_render itself; a plane seen from behind counts. Only planes and boxes mirror.
        mirrors = shape.reflectance > 0 and shape.type in (self._lib.mjtGeom.mjGEOM_PLANE, self._lib.mjtGeom.mjGEOM_BOX)
        return bool(shape.transparent or mirrors)

    def _lay_over(self, background: _Background) -> None:
        # where no moving part was drawn the nearness is 0, so the background stays
        nearer = np.flatnonzero(self._nearness.reshape(-1) > background.nearness)
        # two buffers that are swapped: the background itself must stay unchanged
        merged = self._spare_rows.reshape(-1, 3)
        np.copyto(merged, background.rgb)
        merged[nearer] = self._rows.reshape(-1, 3)[nearer]
        self._rows, self._spare_rows = self._spare_rows, self._rows


def update_poses(model: mujoco.MjModel, data: mujoco.MjData) -> None:
    """Compute the poses of everything drawn from the positions; `mj_step` leaves the values of the previous step.

    Nothing that the next `mj_step` starts from is changed.
    """
    import mujoco

    # the parts of `mj_forward` that drawing needs; its solver would change the warm start
    mujoco.mj_kinematics(model, data)
    mujoco.mj_comPos(model, data)
    mujoco.mj_camlight(model, data)
    mujoco.mj_flex(model, data)
    mujoco.mj_tendon(model, data)


def update_sensors(model: mujoco.MjModel, data: mujoco.MjData) -> None:
    """Compute poses and sensor values from positions and velocities; `mj_step` leaves the values of the previous step.

    Nothing that the next `mj_step` starts from is changed. Sensors of forces and accelerations need the contact solver,
    as costly as a physics step; it starts from zero, so that their values depend on the state alone.
    """
    import mujoco

    if (model.sensor_needstage == mujoco.mjtStage.mjSTAGE_ACC).any():
        # the solver's start is part of the state: restored, so that the next step is the same as without this call
        warm = data.qacc_warmstart.copy()
        data.qacc_warmstart[:] = 0.0
        mujoco.mj_forward(model, data)
        data.qacc_warmstart[:] = warm
        return
    update_poses(model, data)
    mujoco.mj_transmission(model, data)
    mujoco.mj_sensorPos(model, data)
    mujoco.mj_fwdVelocity(model, data)
    mujoco.mj_sensorVel(model, data)


def _close_all() -> None:
    for renderer in list(OPEN_RENDERERS):
        renderer.close()


def _free_context(gl: Any, mjr: Any, owner: int) -> None:
    # A thread that ended without closing may still hold the context, and EGL lets no other thread take it.
    if threading.get_ident() != owner:
        return
    gl.make_current()
    mjr.free()
    gl.free()


def check_cameras(model: mujoco.MjModel, cameras: Sequence[str | int]) -> None:
    """Check that a model has the cameras, and that each is listed once; raises UserError."""
    for camera in cameras:
        _find_camera(model, camera)
    doubled = sorted({str(camera) for camera in cameras if list(cameras).count(camera) > 1})
    if doubled:
        raise UserError(
            f"the camera {doubled[0]} is listed twice: {', '.join(map(str, cameras))}; list each camera once"
        )


def _find_camera(model: mujoco.MjModel, camera: str | int) -> Any:
    import mujoco

    names = [model.camera(number).name for number in range(model.ncam)]
    number = names.index(camera) if camera in names else camera
    if isinstance(number, str) or not FREE_CAMERA <= number < model.ncam:
        raise UserError(
            f"the model has no camera {camera!r}; it has: {', '.join(names) or 'none'}; -1 is the free camera"
        )
    found = mujoco.MjvCamera()
    found.fixedcamid = number
    if number == FREE_CAMERA:
        mujoco.mjv_defaultFreeCamera(model, found)
    else:
        found.type = mujoco.mjtCamera.mjCAMERA_FIXED
    return found
