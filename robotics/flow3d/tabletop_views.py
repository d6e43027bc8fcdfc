"""Tabletop episodes as the world model sees them: the first picture with depth and mask, and the object's ideal flow.

    views = TabletopViews("panda")
    observation = views.observe(EpisodeSpec("push", "push the red cube into the blue zone", 7))

They are the pictures of `TabletopBatch` with the same layouts, with the arm where an episode begins. The ideal flow is
that of the object on the straight way that solves the task, as a demonstration by a hand out of view would show it.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Self

import numpy as np

from mmrl.errors import RunError, UserError
from robotics.flow3d.clip import FlowClip, Observation
from robotics.flow3d.geometry import intrinsics, inverse_pose, make_pose
from robotics.flow3d.rigid_flow import moved_points, points_in_mask, points_visible
from robotics.flow3d.scenes.motions import along, moved, over
from robotics.sim.arms import find_arm
from robotics.sim.episodes import EpisodeSpec
from robotics.sim.object_poses import object_poses
from robotics.sim.rendering import FrameRenderer, RenderSettings, update_poses
from robotics.sim.tabletop import CUBE_HALF_M, PIECES, SceneReading
from robotics.sim.tasks import TASKS, TabletopScene, find_task, layout_seed

if TYPE_CHECKING:
    import mujoco
    from numpy.typing import NDArray

LIFT_M = 0.07
PULL_M = 0.11
LEAST_PIXELS = 9
"""Pixels of the object in the first picture without which there is nothing to ask for."""


class TabletopViews:
    """Draws the beginnings of tabletop episodes; scenes and renderers are built once a task.

    Args:
        arm: key in `ARMS`.
        image_size: side of the pictures in pixels.
        camera: front or wrist.
    """

    def __init__(self, arm: str = "panda", image_size: int = 64, camera: str = "front") -> None:
        self.arm = find_arm(arm)
        self._settings = RenderSettings(image_size, image_size, camera)
        self._stages: dict[str, _Stage] = {}

    def observe(self, episode: EpisodeSpec) -> Observation:
        """The first picture of an episode, with true depth and the mask of the piece that is acted on."""
        return self._begun(episode).observe(episode)

    def clip(self, episode: EpisodeSpec, num_frames: int = 8, grid: int = 4) -> FlowClip:
        """The ideal flow of an episode."""
        return self._begun(episode).clip(episode, num_frames, grid)

    def close(self) -> None:
        """Free the renderers."""
        while self._stages:
            self._stages.popitem()[1].renderer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _begun(self, episode: EpisodeSpec) -> _Stage:
        check_moves_object([episode.task])
        if episode.task not in self._stages:
            scene = TabletopScene(find_task(episode.task), self.arm)
            self._stages[episode.task] = _Stage(scene, self._settings)
        return self._stages[episode.task].begun(episode)


class _Stage:
    """One task's scene with a state and a renderer."""

    def __init__(self, scene: TabletopScene, settings: RenderSettings) -> None:
        import mujoco

        self._lib, self._scene, self._settings = mujoco, scene, settings
        self.data: mujoco.MjData = mujoco.MjData(scene.model)
        self.renderer = FrameRenderer(scene.model, settings)
        body = int(scene.model.site(PIECES[scene.task.roles.first].handle).bodyid[0])
        self._geoms = np.flatnonzero(scene.model.geom_bodyid == body)

    def begun(self, episode: EpisodeSpec) -> _Stage:
        scene = self._scene.for_split(episode.split)
        self._lib.mj_resetData(scene.model, self.data)
        scene.reset(scene.model, self.data, np.random.default_rng(layout_seed(episode.split, episode.layout)))
        self._lib.mj_forward(scene.model, self.data)
        return self

    def observe(self, episode: EpisodeSpec) -> Observation:
        shown = self.renderer.segmentation(self.data)
        drawn = (shown[..., 1] == int(self._lib.mjtObj.mjOBJ_GEOM)) & np.isin(shown[..., 0], self._geoms)
        if drawn.sum() < LEAST_PIXELS:
            raise RunError(f"the object is hidden in the first picture of {episode.task}/{episode.layout}")
        camera = self._scene.model.camera(self._settings.camera)
        # MuJoCo's cameras look along -z with y up.
        rotation = self.data.cam_xmat[camera.id].reshape(3, 3) * np.array([1.0, -1.0, -1.0])
        size_px = self._settings.width, self._settings.height
        return Observation(
            rgb=self.renderer.rgb(self.data).copy(),
            depth_m=self.renderer.depth(self.data).copy(),
            K=intrinsics(size_px, fov_y_rad=math.radians(float(camera.fovy[0]))),
            T_world_cam=make_pose(rotation, self.data.cam_xpos[camera.id].copy()),
            instruction=episode.instruction or self._scene.task.instruction,
            mask=drawn,
        )

    def clip(self, episode: EpisodeSpec, num_frames: int, grid: int) -> FlowClip:
        seen, task = self.observe(episode), self._scene.task
        assert seen.mask is not None
        points = points_in_mask(seen.mask, seen.depth_m, grid)
        start = self._pose()
        reading = self._scene.sensors.read(self.data.sensordata)
        way = along(IDEAL_MOTIONS[task.name](start, reading), num_frames + 1)[1:]

        def depth_of(number: int) -> NDArray[np.float32]:
            self._put(start, way[number])
            return self.renderer.depth(self.data)

        uvz = moved_points(points, way @ inverse_pose(start), seen.K, seen.T_world_cam)
        flow = np.concatenate([uvz, points_visible(uvz, depth_of)], -1)
        meta = {"task": task.name, "split": episode.split, "layout": episode.layout, "arm": self._scene.arm.name}
        return FlowClip(seen, points, flow, source=f"tabletop/{self._scene.arm.name}/{task.name}", meta=meta)

    def _pose(self) -> NDArray[np.float64]:
        return object_poses(self._scene, self.data.qpos[None], self.data.sensordata[None])[0]

    def _put(self, start: NDArray[np.float64], pose: NDArray[np.float64]) -> None:
        """Put the piece somewhere; the drawer takes what its slide allows of it."""
        name, model = self._scene.task.roles.first, self._scene.model
        if PIECES[name].kind == "cube":
            address = int(model.jnt_qposadr[int(model.body(PIECES[name].body).jntadr[0])])
            quaternion = np.empty(4)
            self._lib.mju_mat2Quat(quaternion, np.ascontiguousarray(pose[:3, :3]).reshape(9))
            self.data.qpos[address : address + 7] = [*pose[:3, 3], *quaternion]
        else:
            way = float(np.linalg.norm(pose[:3, 3] - start[:3, 3]))
            self.data.qpos[int(model.joint("drawer").qposadr[0])] = way
        update_poses(model, self.data)


def check_moves_object(tasks: Sequence[str]) -> None:
    """Refuse tasks in which nothing is moved, so that there is no flow; raises UserError."""
    for name in tasks:
        if name not in IDEAL_MOTIONS:
            find_task(name)
            raise UserError(f"the task {name} moves no object, so it has no flow; there are {', '.join(IDEAL_MOTIONS)}")


def tabletop_clips(
    tasks: Sequence[str] = ("push",),
    layouts: int = 300,
    first: int = 0,
    split: str = "train",
    arm: str = "panda",
    image_size: int = 64,
    num_frames: int = 8,
    grid: int = 4,
) -> list[FlowClip]:
    """Ideal flow of tabletop episodes, to train a world model on: a `function` of `ClipSetConfig`.

    Args:
        tasks: taken in turn.
        layouts: of each task.
        first: number of the first one.
        split: train or held_out.
        arm: key in `ARMS`; it stands in the picture.
        image_size: side of the pictures in pixels.
        num_frames: T.
        grid: N.
    """
    check_moves_object(tasks)
    numbers = range(first, first + layouts)
    episodes = [EpisodeSpec(name, TASKS[name].instruction, number, split) for number in numbers for name in tasks]
    found = []
    with TabletopViews(arm, image_size) as views:
        for episode in episodes:
            with contextlib.suppress(RunError):
                found.append(views.clip(episode, num_frames, grid))
    return found


def _pushed(start: NDArray[np.float64], found: SceneReading) -> list[NDArray[np.float64]]:
    way = found.goal - start[:3, 3]
    return [start, moved(start, (way[0], way[1], 0.0))]


def _carried(start: NDArray[np.float64], onto_m: NDArray[np.float64]) -> list[NDArray[np.float64]]:
    return over(start, moved(start, onto_m - start[:3, 3]), LIFT_M)


def _placed(start: NDArray[np.float64], found: SceneReading) -> list[NDArray[np.float64]]:
    return _carried(start, found.goal + np.array([0.0, 0.0, CUBE_HALF_M]))


def _stacked(start: NDArray[np.float64], found: SceneReading) -> list[NDArray[np.float64]]:
    return _carried(start, found.second + np.array([0.0, 0.0, 2 * CUBE_HALF_M]))


def _opened(start: NDArray[np.float64], found: SceneReading) -> list[NDArray[np.float64]]:
    return [start, moved(start, -PULL_M * start[:3, 0])]


IDEAL_MOTIONS: Mapping[str, Callable[[NDArray[np.float64], SceneReading], list[NDArray[np.float64]]]] = {
    "push": _pushed,
    "pick_place": _placed,
    "stack": _stacked,
    "drawer": _opened,
}
"""Key poses (4, 4) of the piece that is acted on, by task."""
