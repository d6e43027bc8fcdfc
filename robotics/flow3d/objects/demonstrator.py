"""Plans and shows demonstrations: scripted grips, the actor's trajectory, and the true flow of the object."""

from __future__ import annotations

import dataclasses
import functools
import math
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from mmrl.errors import RunError, UserError
from robotics.flow3d.clip import FlowClip, FlowEncoding, frame_indices
from robotics.flow3d.geometry import apply_pose, inverse_pose, lift, make_pose
from robotics.flow3d.kinematics import ArmIk
from robotics.flow3d.objects.flow_tasks import FLOW_TASKS, along, find_flow_task, moved
from robotics.flow3d.objects.scene import HAND, FlowScene, SceneConfig
from robotics.flow3d.rigid_motion import moved_points, points_in_mask, points_visible

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from robotics.flow3d.clip import Observation
    from robotics.flow3d.objects.criteria import SceneState
    from robotics.flow3d.video import RgbdVideo
    from robotics.scenes.arms import ArmModel


BACK_M = 0.08
"""Distance from which a grip is approached, along the fingers."""
HANDLE_RAD = math.radians(35)
"""Minimum angle between a vessel's handle and the line on which the fingers close."""
NUM_GRIPS = 4
"""Number of grips from which a hand's is drawn."""
MIN_PIXELS = 9
"""Minimum number of object pixels in the first image; with fewer there is no clip."""
CLOSED_M = 0.02
"""Distance of a finger from the middle in images of an arm that holds something."""


@dataclass(frozen=True)
class FlowDemonstration:
    """Poses of object and actor in each of L frames."""

    T_world_object: NDArray[np.float64]  # (L, 4, 4); at rest during the approach and in the first frame after it
    T_world_hand: NDArray[np.float64] | None  # (L, 4, 4) of a hand
    joint_rad: NDArray[np.float64] | None  # (L, J) of an arm
    approach: int  # frames before the object moves


class Demonstrator:
    """Plans and shows demonstrations in one scene.

    Args:
        scene: a scene with any actor, in the episode of its last `reset`.
        approach: frames before the object moves.
        motion: frames in which it moves.
    """

    def __init__(self, scene: FlowScene, approach: int = 10, motion: int = 31) -> None:
        self.scene = scene
        self._approach = approach
        self._motion = motion

    def plan(self) -> FlowDemonstration:
        """Choose a grip and plan the trajectories; raises RunError if the arm can follow none of the grips."""
        scene, still = self.scene, np.tile(self.scene.start, (self._approach, 1, 1))
        scene.put_object(scene.start)
        motion = scene.ideal_motion(self._motion)
        hand = self._hand_trajectory(motion) if scene.config.actor == HAND else None
        joints = self._arm_trajectory(motion) if scene.arm is not None else None
        return FlowDemonstration(np.concatenate([still, motion]), hand, joints, self._approach)

    def show(self, demonstration: FlowDemonstration, frame: int) -> None:
        """Pose object and actor as in a frame."""
        self.scene.put_object(demonstration.T_world_object[frame])
        if demonstration.T_world_hand is not None:
            self.scene.put_hand(demonstration.T_world_hand[frame])
        if demonstration.joint_rad is not None:
            # the fingers close when the object begins to move
            opening = CLOSED_M if frame >= demonstration.approach else None
            self.scene.put_arm(demonstration.joint_rad[frame], opening)

    def clip(self, encoding: FlowEncoding | None = None) -> FlowClip:
        """True flow of the episode: the first image, before the actor arrives, and T frames of the motion.

        Raises RunError if the object is hidden in the first image or out of reach.
        """
        form = encoding or FlowEncoding()
        scene = self.scene
        planned = self.plan()
        self.show(planned, 0)
        observation = scene.observe()
        # exact depth: the flow is the truth even if the observation's depth has noise and holes
        points = self._query_points(observation, scene.true_depth(), form.grid)
        frames = planned.approach + frame_indices(self._motion, form.num_frames)[1:]
        motion = planned.T_world_object[frames] @ inverse_pose(scene.start)
        uvz = moved_points(points, motion, scene.K, scene.T_world_cam)
        visible = self._visible(uvz, planned, frames)
        return self._clip(observation, points, np.concatenate([uvz, visible], -1))

    def clips_of_first_image(self, tasks: Sequence[str], encoding: FlowEncoding | None = None) -> list[FlowClip]:
        """A clip of the episode's first image for each task with this furniture whose object is visible.

        Nobody executes the motions: later frames are not drawn, every point counts as visible, and an arm's reach is
        not checked. Image, points and poses are those of `clip`.
        """
        form, scene = encoding or FlowEncoding(), self.scene
        # all tasks share one image, so the objects are placed and drawn once
        scene.give(tasks[0])
        if scene.config.actor == HAND:
            scene.put_hand(self._hand_start())
        seen = scene.observe()
        depth_m = scene.true_depth()
        found = []
        moved = scene.task.moved
        for task in tasks:
            scene.give(task)
            mask = seen.mask if scene.task.moved == moved else scene.object_mask()
            observation = dataclasses.replace(seen, instruction=scene.instruction, mask=mask)
            if mask is None or mask.sum() < MIN_PIXELS:
                continue
            points = self._query_points(observation, depth_m, form.grid)
            found.append(self._clip(observation, points, self.flow_of(points, form.num_frames)))
        return found

    def flow_of(self, points: NDArray[np.float64], num_frames: int) -> NDArray[np.float64]:
        """(T, N, N, 4) true flow of points (N, N, 3) of the object as it is now, all visible."""
        scene = self.scene
        motion = scene.ideal_motion(self._motion)[frame_indices(self._motion, num_frames)[1:]]
        uvz = moved_points(points, motion @ inverse_pose(scene.object_pose()), scene.K, scene.T_world_cam)
        return np.concatenate([uvz, np.ones_like(uvz[..., :1])], -1)

    def goals(self, points: NDArray[np.float64]) -> dict[str, list[float]]:
        """Target (3,) of the centre of points (..., 3) at the start, in the world frame, for each instruction."""
        scene, state = self.scene, self.scene.state(self.scene.start)
        start = apply_pose(scene.T_world_cam, lift(points, scene.K).reshape(-1, 3))
        return {
            other.instruction: apply_pose(other.keys(state)[-1] @ inverse_pose(scene.start), start).mean(0).tolist()
            for other in FLOW_TASKS.values()
            if other.furniture is scene.task.furniture and other.moved == scene.task.moved
        }

    def video(self) -> RgbdVideo:
        """The whole demonstration (approach + motion frames) as a camera sees it, with true masks and motion.

        Depth has the noise and holes of the scene's configuration. Raises RunError if the object is out of reach.
        """
        from robotics.flow3d.video import RgbdVideo, VideoTruth

        scene, planned = self.scene, self.plan()
        seen, masks = [], []
        for frame in range(len(planned.T_world_object)):
            self.show(planned, frame)
            seen.append(scene.observe())
            masks.append(scene.object_mask())
        self.show(planned, 0)
        T_cam_world, motions = inverse_pose(scene.T_world_cam), planned.T_world_object @ inverse_pose(scene.start)
        uv = np.argwhere(masks[0])[:, ::-1]
        surface = np.concatenate([uv + 0.5, scene.true_depth()[masks[0]][:, None]], -1)
        return RgbdVideo(
            rgb=np.stack([one.rgb for one in seen]),
            depth_m=np.stack([one.depth_m for one in seen]),
            K=scene.K,
            T_world_cam=scene.T_world_cam,
            instruction=scene.instruction,
            source=self._source,
            gripper_mask=scene.actor_mask(),
            truth=VideoTruth(np.stack(masks), T_cam_world @ motions @ scene.T_world_cam, scene.true_depth()),
            meta=self._meta(surface),
        )

    @property
    def _source(self) -> str:
        return f"simulator/{self.scene.config.actor}/{self.scene.task.name}"

    def _meta(self, points: NDArray[np.float64]) -> dict[str, Any]:
        """The episode's settings, and the target of the points' centre for each instruction about the same object."""
        config, task = self.scene.config, self.scene.task
        return {
            "task": task.name,
            "family": task.family,
            "shape": self.scene.shape.name,
            "actor": config.actor,
            "layouts": config.layouts,
            "colours": config.colours,
            "background": config.background,
            "seed": self.scene.seed,
            "goals_world_m": self.goals(points),
        }

    def _query_points(self, observation: Observation, depth_m: NDArray[np.float32], grid: int) -> NDArray[np.float64]:
        if observation.mask is None or observation.mask.sum() < MIN_PIXELS:
            raise RunError(f"the object is hidden in the first image of episode {self.scene.seed}")
        return points_in_mask(observation.mask, depth_m, grid)

    def _clip(self, observation: Observation, points: NDArray[np.float64], flow: NDArray[np.float64]) -> FlowClip:
        return FlowClip(observation, points, flow, source=self._source, meta=self._meta(points))

    def _visible(
        self, uvz: NDArray[np.float64], planned: FlowDemonstration, frames: NDArray[np.intp]
    ) -> NDArray[np.float64]:
        """(T, N, N, 1) of moved points; draws the depth of their frames."""

        def depth_of(number: int) -> NDArray[np.float32]:
            self.show(planned, int(frames[number]))
            return self.scene.true_depth()

        return points_visible(uvz, depth_of)

    def _hand_start(self) -> NDArray[np.float64]:
        """(4, 4) start of a hand: behind the objects as the camera sees them, and in its view."""
        # a stream apart from those of layout, looks and grip: the start of a hand changes none of them
        rng = np.random.default_rng([self.scene.seed, 4])
        away = np.array([rng.uniform(0.16, 0.28), rng.uniform(-0.22, 0.22), rng.uniform(0.04, 0.14)])
        return make_pose(np.diag([1.0, -1.0, -1.0]), away)

    def _hand_trajectory(self, motion: NDArray[np.float64]) -> NDArray[np.float64]:
        scene = self.scene
        rng = np.random.default_rng([scene.seed, 3])
        # one of the most natural grips, so that hands differ between episodes
        choices = list(islice(scripted_grips(scene.state(), scene.task.family), NUM_GRIPS))
        grip = choices[int(rng.integers(len(choices)))]
        way = reach_out(self._hand_start(), motion[0] @ grip, self._approach)
        return np.concatenate([way, motion @ grip])

    def _arm_trajectory(self, motion: NDArray[np.float64]) -> NDArray[np.float64]:
        scene = self.scene
        if scene.arm is None:
            raise UserError("this scene has no arm")
        # the first grip with which the arm can do the whole motion
        for grip in scripted_grips(scene.state(), scene.task.family):
            path = arm_path(arm_ik(scene.arm), grip, motion, self._approach)
            if path is not None:
                return path
        raise RunError(
            f"{scene.arm.name} cannot follow the whole motion of {scene.task.name} with any grip in episode "
            f"{scene.seed}"
        )


class Stage:
    """Demonstrators by scene, built once for each combination of furniture, shape, actor and looks."""

    def __init__(self, approach: int = 10, motion: int = 31) -> None:
        self._frames = approach, motion
        self._known: dict[tuple[str, SceneConfig], Demonstrator] = {}

    def begin(self, config: SceneConfig, seed: int) -> Demonstrator:
        """A demonstrator of the scene in the episode of a seed."""
        key = find_flow_task(config.task).furniture.name, dataclasses.replace(config, task="")
        if key not in self._known:
            self._known[key] = Demonstrator(FlowScene(config), *self._frames)
        # the scene may have another task of the same furniture; the task comes before the reset
        self._known[key].scene.give(config.task)
        self._known[key].scene.reset(seed)
        return self._known[key]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        for demonstrator in self._known.values():
            demonstrator.scene.close()


@functools.cache
def arm_ik(arm: ArmModel) -> ArmIk:
    """Inverse kinematics of an arm, built once."""
    return ArmIk(arm)


def scripted_grips(state: SceneState, family: str) -> Iterator[NDArray[np.float64]]:
    """T_object_grip (4, 4) of grips, the most natural first."""
    T = state.T_world_object
    place = (T @ np.array([*state.shape.grip_m, 1.0]))[:3]
    for rotation in _orientations(state, family):
        yield inverse_pose(T) @ make_pose(rotation, place)


def reach_out(start: NDArray[np.float64], grip: NDArray[np.float64], frames: int) -> NDArray[np.float64]:
    """(frames, 4, 4) poses of a hand from a start to 8 cm behind a grip and from there almost to it."""
    return along([start, moved(grip, -BACK_M * grip[:3, 2]), grip], frames + 1)[:-1]


def arm_path(
    ik: ArmIk, T_object_grip: NDArray[np.float64], T_world_object: NDArray[np.float64], approach: int
) -> NDArray[np.float64] | None:
    """Angles of an arm that goes from home to a grip and then moves the object by (L, 4, 4); None if out of reach.

    The approach poses are followed too: from a distant start the search may end with an elbow in the table.
    """
    grips = T_world_object @ T_object_grip
    way = reach_out(ik.pose(ik.home_rad), grips[0], approach)
    found = ik.follow(np.concatenate([way, grips]), ik.home_rad)
    return found.joint_rad if found.complete else None


def _orientations(state: SceneState, family: str) -> Iterator[NDArray[np.float64]]:
    T = state.T_world_object
    if family == "drawer":
        # A bar is across the drawer, a knob sticks out along it: the fingers close on its thin side.
        thin = 1 if state.shape.name == "knob" else 0
        for sign in (1.0, -1.0):
            yield _frame(np.array([0.0, 0.0, -1.0]), sign * T[:3, thin])
        return
    # A vessel that is tilted sideways is gripped from the robot's side, so that the hand rolls and does not dive.
    slopes = (30, 50, 15, 70, 90) if family == "pour" else (90, 65, 40)
    headings = (0, 30, -30, 50, -50) if family == "pour" else (0, 30, -30, 60, -60, 90, -90)
    handle = math.atan2(T[1, 0], T[0, 0]) if state.shape.has_front else None
    for slope in np.radians(slopes):
        for heading in np.radians(headings):
            along = np.array([math.cos(heading), math.sin(heading), 0.0])
            close = np.array([-along[1], along[0], 0.0])
            between = abs(math.sin(heading + math.pi / 2 - handle)) if handle is not None else 1.0
            # fingers that come in at a slant from behind would hit the handle
            behind = handle is not None and slope < 1.5 and math.cos(heading - handle) < -math.cos(HANDLE_RAD)
            if between > math.sin(HANDLE_RAD) and not behind:
                fingers = math.cos(slope) * along - math.sin(slope) * np.array([0.0, 0.0, 1.0])
                yield from (_frame(fingers, sign * close) for sign in (1.0, -1.0))


def _frame(fingers: NDArray[np.float64], close: NDArray[np.float64]) -> NDArray[np.float64]:
    """Rotation with z along the fingers and y along the line on which they close."""
    return np.stack([np.cross(close, fingers), close, fingers], -1)
