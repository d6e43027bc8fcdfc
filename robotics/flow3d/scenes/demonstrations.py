"""Demonstrations by a hand, an arm, or nobody in view, and their true flow.

Nothing is simulated: the object moves along the ideal way of its task, X_t = T_t T_0^-1 X_0, and the actor with it.
That is exact, quick, and the same for every actor, so that only what is seen differs.

    for clip in demonstrations(range(2400), encoding=FlowEncoding()):
        writer.add(clip)
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np

from mmrl.errors import RunError, UserError
from mmrl.fields import bounded, check_config
from robotics.flow3d.clip import FlowClip
from robotics.flow3d.encoding import FlowEncoding, frame_indices, grid_in_mask
from robotics.flow3d.geometry import apply_pose, depth_at, inverse_pose, lift, make_pose, project
from robotics.flow3d.scenes.grips import arm_path, reach_out, scripted_grips
from robotics.flow3d.scenes.scene import HAND, NOBODY, FlowScene, SceneConfig
from robotics.flow3d.scenes.tasks import FLOW_TASKS, find_flow_task

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from numpy.typing import NDArray

    from robotics.flow3d.act.ik import ArmIk
    from robotics.flow3d.extract.video import RgbdVideo

__all__ = ["TRAINING_ACTORS", "Demonstration", "DemonstrationConfig", "Demonstrator", "demonstrations"]

TRAINING_ACTORS = (HAND, NOBODY)
"""Who is seen in training data by default: no robot at all, as in the paper's fine-tuning on human hands."""
AGREE_M = 0.01
"""A point is visible where the depth picture differs from its depth by less."""
GRIPS = 4
"""Grips among which a hand chooses."""
LEAST_PIXELS = 9
"""Pixels of the object in the first picture without which there is nothing to ask for."""
CLOSED_M = 0.02
"""Way of a finger from the middle while an arm holds something, in pictures."""


@dataclass(frozen=True)
class DemonstrationConfig:
    """Which demonstrations are drawn."""

    tasks: tuple[str, ...] = tuple(FLOW_TASKS)
    """What is done; taken in turn."""
    actors: tuple[str, ...] = TRAINING_ACTORS
    """Who does it: arms, hand or nobody; drawn."""
    shapes: tuple[str, ...] = ()
    """Shapes of the moved things; drawn among those that a task has. Those of training data where empty."""
    approach_frames: int = bounded(10, at_least=1)
    """Frames before the object moves."""
    motion_frames: int = bounded(31, at_least=2)
    """Frames in which it moves."""
    scene: SceneConfig = dataclasses.field(default_factory=SceneConfig)
    """Everything else of a scene; its task, actor and shape are not used."""

    def validate(self) -> None:
        """Refuse unknown tasks and shapes, and an actor that does not exist; raises UserError."""
        known = {shape for name in self.tasks for shape in find_flow_task(name).shapes}
        if unknown := set(self.shapes) - known:
            raise UserError(f"shapes are {', '.join(sorted(unknown))}; the tasks have {', '.join(sorted(known))}")
        if not self.tasks or not self.actors:
            raise UserError("there must be at least one task and one actor")
        for name in self.tasks:
            if not self.shapes_of(name):
                raise UserError(f"{name} has none of the shapes {', '.join(self.shapes)}")
        for actor in self.actors:
            check_config(dataclasses.replace(self.scene, actor=actor, shape=""), "scene")

    def shapes_of(self, task: str) -> tuple[str, ...]:
        """Shapes that a task is shown with."""
        own = FLOW_TASKS[task]
        return tuple(name for name in own.shapes if name in self.shapes) if self.shapes else own.shape_names(False)


@dataclass(frozen=True)
class Demonstration:
    """Who is where in each of L frames."""

    T_world_object: NDArray[np.float64]
    """(L, 4, 4); at rest in the frames of the approach and the first one after it."""
    T_world_hand: NDArray[np.float64] | None
    """(L, 4, 4) of a hand."""
    joint_rad: NDArray[np.float64] | None
    """(L, J) of an arm."""
    approach: int
    """Frames before the object moves."""


class Demonstrator:
    """Plans and shows demonstrations in one scene.

    Args:
        scene: with any actor; its episode is that of the last `reset`.
        approach: frames before the object moves.
        motion: frames in which it moves.
    """

    def __init__(self, scene: FlowScene, approach: int = 10, motion: int = 31) -> None:
        self.scene, self._approach, self._motion = scene, approach, motion
        self._ik: ArmIk | None = None

    def plan(self) -> Demonstration:
        """Choose a grip and the way of everybody; raises RunError where the arm reaches none of the grips all along."""
        scene, still = self.scene, np.tile(self.scene.start, (self._approach, 1, 1))
        scene.put_object(scene.start)
        motion = scene.ideal_motion(self._motion)
        hand = self._hand_way(motion) if scene.config.actor == HAND else None
        joints = self._arm_way(motion) if scene.arm is not None else None
        return Demonstration(np.concatenate([still, motion]), hand, joints, self._approach)

    def show(self, demonstration: Demonstration, frame: int) -> None:
        """Put everybody where they are in a frame."""
        self.scene.put_object(demonstration.T_world_object[frame])
        if demonstration.T_world_hand is not None:
            self.scene.put_hand(demonstration.T_world_hand[frame])
        if demonstration.joint_rad is not None:
            opening = CLOSED_M if frame >= demonstration.approach else None
            self.scene.put_arm(demonstration.joint_rad[frame], opening)

    def clip(self, encoding: FlowEncoding | None = None) -> FlowClip:
        """True flow of the episode: the first picture, before the actor arrives, and T frames of the motion.

        Args:
            encoding: how many frames, and points a side; defaults when None.

        Returns:
            The clip; depth of its points is the true one.

        Raises:
            RunError: the object is hidden in the first picture, or out of reach.
        """
        form, scene, planned = encoding or FlowEncoding(), self.scene, self.plan()
        self.show(planned, 0)
        observation, depth_m = scene.observe(), scene.true_depth()
        if observation.mask is None or observation.mask.sum() < LEAST_PIXELS:
            raise RunError(f"the object is hidden in the first picture of episode {scene.seed}")
        uv = grid_in_mask(observation.mask, form.grid)
        columns, rows = np.floor(uv[..., 0]).astype(int), np.floor(uv[..., 1]).astype(int)
        points = np.concatenate([uv, depth_m[rows, columns, None]], -1)
        frames = planned.approach + frame_indices(self._motion, form.num_frames)[1:]
        flow = self._flow(points, planned, frames)
        return FlowClip(observation, points, flow, source=self._source, meta=self._meta)

    def film(self) -> RgbdVideo:
        """The whole demonstration as a camera sees it, with the true masks and motion of the object.

        Returns:
            approach + motion frames; depth as the configuration of the scene spoils it.

        Raises:
            RunError: the object is out of reach.
        """
        from robotics.flow3d.extract.video import RgbdVideo, VideoTruth

        scene, planned = self.scene, self.plan()
        seen, masks = [], []
        for frame in range(len(planned.T_world_object)):
            self.show(planned, frame)
            seen.append(scene.observe())
            masks.append(scene.object_mask())
        self.show(planned, 0)
        motions = planned.T_world_object @ inverse_pose(scene.start)
        return RgbdVideo(
            rgb=np.stack([one.rgb for one in seen]),
            depth_m=np.stack([one.depth_m for one in seen]),
            K=scene.K,
            T_world_cam=scene.T_world_cam,
            instruction=scene.instruction,
            source=self._source,
            gripper_mask=scene.actor_mask(),
            truth=VideoTruth(np.stack(masks), inverse_pose(scene.T_world_cam) @ motions @ scene.T_world_cam),
            meta=self._meta,
        )

    @property
    def _source(self) -> str:
        return f"simulator/{self.scene.config.actor}/{self.scene.task.name}"

    @property
    def _meta(self) -> dict[str, str | int]:
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
        }

    def _flow(
        self, points: NDArray[np.float64], planned: Demonstration, frames: NDArray[np.intp]
    ) -> NDArray[np.float64]:
        scene = self.scene
        start = apply_pose(scene.T_world_cam, lift(points, scene.K).reshape(-1, 3))
        motions = planned.T_world_object[frames] @ inverse_pose(scene.start)
        in_camera = apply_pose(inverse_pose(scene.T_world_cam) @ motions, start)
        uvz = project(in_camera, scene.K).reshape(len(frames), *points.shape)
        visible = np.zeros((*uvz.shape[:-1], 1))
        for number, frame in enumerate(frames):
            self.show(planned, int(frame))
            seen = depth_at(scene.true_depth(), uvz[number, ..., :2])
            visible[number, ..., 0] = np.abs(seen - uvz[number, ..., 2]) < AGREE_M
        return np.concatenate([uvz, visible], -1)

    def _hand_way(self, motion: NDArray[np.float64]) -> NDArray[np.float64]:
        scene = self.scene
        rng = np.random.default_rng([scene.seed, 3])
        choices = list(islice(scripted_grips(scene.state(), scene.task.family), GRIPS))
        grip = choices[int(rng.integers(len(choices)))]
        # Behind the objects as the camera sees them, and in its view.
        away = np.array([rng.uniform(0.16, 0.28), rng.uniform(-0.22, 0.22), rng.uniform(0.04, 0.14)])
        way = reach_out(make_pose(np.diag([1.0, -1.0, -1.0]), away), motion[0] @ grip, self._approach)
        return np.concatenate([way, motion @ grip])

    def _arm_way(self, motion: NDArray[np.float64]) -> NDArray[np.float64]:
        scene = self.scene
        if scene.arm is None:
            raise UserError("this scene has no arm")
        if self._ik is None:
            from robotics.flow3d.act.ik import ArmIk

            self._ik = ArmIk(scene.arm)
        for grip in scripted_grips(scene.state(), scene.task.family):
            path = arm_path(self._ik, grip, motion, self._approach)
            if path is not None:
                return path
        raise RunError(f"{scene.arm.name} reaches no grip of {scene.task.name} all along in episode {scene.seed}")


def demonstrations(
    seeds: Iterable[int],
    config: DemonstrationConfig | None = None,
    encoding: FlowEncoding | None = None,
    *,
    on_skip: Callable[[int, str], None] | None = None,
) -> Iterator[FlowClip]:
    """True flow of many demonstrations; a clip is a function of its seed and the configuration alone.

    Args:
        seeds: numbers of the episodes; tasks take turns with them.
        config: what is drawn; defaults when None, which show no robot.
        encoding: frames and points of a clip.
        on_skip: told the seed and the reason where an arm reaches nothing or the object is hidden; None to raise.

    Yields:
        The clips, in order.

    Raises:
        UserError: the configuration names something unknown.
        RunError: an episode gives no clip, without `on_skip`.
    """
    chosen = config or DemonstrationConfig()
    check_config(chosen, "demonstrations")
    stage: dict[tuple[str, str, str], Demonstrator] = {}
    try:
        for seed in seeds:
            demonstrator = _prepare(stage, chosen, seed)
            try:
                clip = demonstrator.clip(encoding)
            except RunError as error:
                if on_skip is None:
                    raise
                on_skip(seed, str(error))
                continue
            yield clip
    finally:
        for demonstrator in stage.values():
            demonstrator.scene.close()


def _prepare(stage: dict[tuple[str, str, str], Demonstrator], config: DemonstrationConfig, seed: int) -> Demonstrator:
    """A demonstrator in the episode of a seed; scenes with the same furniture, shape and actor are built once."""
    rng = np.random.default_rng([seed, 2])
    task = config.tasks[seed % len(config.tasks)]
    shapes = config.shapes_of(task)
    shape, actor = shapes[int(rng.integers(len(shapes)))], config.actors[int(rng.integers(len(config.actors)))]
    key = FLOW_TASKS[task].furniture.name, shape, actor
    if key not in stage:
        scene = FlowScene(dataclasses.replace(config.scene, task=task, shape=shape, actor=actor))
        stage[key] = Demonstrator(scene, config.approach_frames, config.motion_frames)
    stage[key].scene.give(task)
    stage[key].scene.reset(seed)
    return stage[key]
