"""Tabletop episodes as inputs of the world model: the first image with depth and mask, and the object's ideal flow.

    views = TabletopViews("panda")
    observation = views.observe(EpisodeSpec("push", "push the red cube into the blue zone", 7))

Images and layouts are those of `TabletopBatch` at the start of an episode. The ideal flow is that of the object on the
straight path that solves the task, without any arm or hand in view.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Self

import numpy as np

from mmrl.errors import RunError, UserError
from robotics.flow3d.clip import FlowClip, Observation
from robotics.flow3d.geometry import DepthArray, FloatArray, intrinsics, inverse_pose, make_pose
from robotics.flow3d.objects.flow_tasks import along, moved, over
from robotics.flow3d.rigid_motion import moved_points, points_in_mask, points_visible
from robotics.scenes.arms import find_arm
from robotics.scenes.tabletop import CUBE_HALF_M, PIECES, SceneReading
from robotics.scenes.tabletop_tasks import TASKS, TabletopScene, find_task, layout_seed
from robotics.sim.episodes import EpisodeSpec
from robotics.sim.rendering import FrameRenderer, RenderSettings, update_poses

if TYPE_CHECKING:
    import mujoco

LIFT_M, PULL_M = 0.07, 0.11
MIN_PIXELS = 9
"""Minimum number of visible object pixels."""
MOVING_TASKS = ("push", "pick_place", "stack", "drawer")


class TabletopViews:
    """Renders the starts of tabletop episodes at `image_size` pixels; scenes are built once per task."""

    def __init__(self, arm: str = "panda", image_size: int = 64, camera: str = "front") -> None:
        self.arm = find_arm(arm)
        self._settings = RenderSettings(image_size, image_size, camera)
        self._stages: dict[str, _Stage] = {}

    def observe(self, episode: EpisodeSpec) -> Observation:
        """The first image of an episode, with true depth and the mask of the object."""
        return self._at_start(episode).observe(episode)

    def clip(self, episode: EpisodeSpec, num_frames: int = 8, grid: int = 4) -> FlowClip:
        """The ideal flow of an episode."""
        return self._at_start(episode).clip(episode, num_frames, grid)

    def close(self) -> None:
        """Free the renderers."""
        while self._stages:
            self._stages.popitem()[1].renderer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _at_start(self, episode: EpisodeSpec) -> _Stage:
        check_moves_object([episode.task])
        if episode.task not in self._stages:
            scene = TabletopScene(find_task(episode.task), self.arm)
            self._stages[episode.task] = _Stage(scene, self._settings)
        return self._stages[episode.task].at_start(episode)


class _Stage:
    """One task's scene with a state and a renderer."""

    def __init__(self, scene: TabletopScene, settings: RenderSettings) -> None:
        import mujoco

        self._lib = mujoco
        self._scene = scene
        self._settings = settings
        self.data: mujoco.MjData = mujoco.MjData(scene.model)
        self.renderer = FrameRenderer(scene.model, settings)
        body = int(scene.model.site(PIECES[scene.task.roles.first].handle).bodyid[0])
        self._geoms = np.flatnonzero(scene.model.geom_bodyid == body)

    def at_start(self, episode: EpisodeSpec) -> _Stage:
        scene = self._scene.for_split(episode.split)
        self._lib.mj_resetData(scene.model, self.data)
        scene.reset(scene.model, self.data, np.random.default_rng(layout_seed(episode.split, episode.layout)))
        self._lib.mj_forward(scene.model, self.data)
        return self

    def observe(self, episode: EpisodeSpec) -> Observation:
        shown = self.renderer.segmentation(self.data)
        # the pixels that show the object, not the ones that it would cover without the arm
        drawn = (shown[..., 1] == int(self._lib.mjtObj.mjOBJ_GEOM)) & np.isin(shown[..., 0], self._geoms)
        if drawn.sum() < MIN_PIXELS:
            raise RunError(f"the object is hidden in the first image of {episode.task}/{episode.layout}")
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
        path = along(_key_poses(task.name, start, reading), num_frames + 1)[1:]

        def depth_of(number: int) -> DepthArray:
            self._put(start, path[number])
            return self.renderer.depth(self.data)

        uvz = moved_points(points, path @ inverse_pose(start), seen.K, seen.T_world_cam)
        flow = np.concatenate([uvz, points_visible(uvz, depth_of)], -1)
        meta = {"task": task.name, "split": episode.split, "layout": episode.layout, "arm": self._scene.arm.name}
        return FlowClip(seen, points, flow, source=f"tabletop/{self._scene.arm.name}/{task.name}", meta=meta)

    def _pose(self) -> FloatArray:
        return self._scene.object_poses(self.data.qpos[None], self.data.sensordata[None])[0]

    def _put(self, start: FloatArray, pose: FloatArray) -> None:
        """Place the object at a pose; the drawer only slides."""
        name, model = self._scene.task.roles.first, self._scene.model
        if PIECES[name].kind == "cube":
            address = int(model.jnt_qposadr[int(model.body(PIECES[name].body).jntadr[0])])
            quaternion = np.empty(4)
            self._lib.mju_mat2Quat(quaternion, np.ascontiguousarray(pose[:3, :3]).reshape(9))
            self.data.qpos[address : address + 7] = [*pose[:3, 3], *quaternion]
        else:
            pulled = float(np.linalg.norm(pose[:3, 3] - start[:3, 3]))
            self.data.qpos[int(model.joint("drawer").qposadr[0])] = pulled
        update_poses(model, self.data)


def check_moves_object(tasks: Sequence[str]) -> None:
    """Raise UserError for tasks that do not move an object and therefore have no flow."""
    for name in tasks:
        if name not in MOVING_TASKS:
            find_task(name)
            raise UserError(
                f"the task {name} does not move an object, so it has no flow; available: {', '.join(MOVING_TASKS)}"
            )


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
    """Ideal flow of tabletop episodes, to train a world model: a `function` of `ClipSetConfig`."""
    check_moves_object(tasks)
    numbers = range(first, first + layouts)
    episodes = [EpisodeSpec(name, TASKS[name].instruction, number, split) for number in numbers for name in tasks]
    found = []
    with TabletopViews(arm, image_size) as views:
        for episode in episodes:
            # an episode whose object is hidden has no clip
            with contextlib.suppress(RunError):
                found.append(views.clip(episode, num_frames, grid))
    return found


def _key_poses(task: str, start: FloatArray, found: SceneReading) -> list[FloatArray]:
    """Key poses (4, 4) of the object along the straight path that solves the task."""
    if task == "drawer":
        return [start, moved(start, -PULL_M * start[:3, 0])]
    if task == "push":
        shift = found.goal - start[:3, 3]
        return [start, moved(start, (shift[0], shift[1], 0.0))]
    stacked = task == "stack"
    target = (found.second if stacked else found.goal) + np.array([0.0, 0.0, CUBE_HALF_M * (2 if stacked else 1)])
    return over(start, moved(start, target - start[:3, 3]), LIFT_M)
