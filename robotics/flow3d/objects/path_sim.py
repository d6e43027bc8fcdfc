"""The tabletop tasks as a simulator of policies whose single action is a whole path of the gripper.

    sim: {kind: "robotics.flow3d.objects.path_sim:open_path_sim", tasks: [panda/pour, ur5e/pour], image_size: 64}

A task is an arm and a task of `FLOW_TASKS`. An episode is one control step: the policy sees the first image, the pose
of the grip and the object's query points, and the arm follows the poses of its answer as far as it can reach. Criteria,
physics and layouts are those of plans of flow.

The path of a gripper as one action of a policy, for behaviour cloning on the data of flow world models.

A path is W poses of the grip in the frame of the robot's base, each with open or closed fingers: two on the approach,
the grasp, and one for each frame of the flow. A policy that predicts a path looks once and decides everything, as the
planner does, and any arm with a two-finger gripper can try to follow it. A path may also be W rows of joint angles, the
usual actions of robot datasets, which fit one arm only.
"""

from __future__ import annotations

import platform
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from mmrl.errors import RunError, UserError
from robotics.flow3d.clip import FlowEncoding, grid_in_mask
from robotics.flow3d.geometry import apply_pose, depth_at, lift, make_pose
from robotics.flow3d.objects.demonstrator import arm_ik
from robotics.flow3d.objects.flow_tasks import FLOW_TASKS, find_flow_task
from robotics.flow3d.objects.scene import FLOW_ARMS, SceneConfig
from robotics.flow3d.objects.tabletop import FlowTabletop
from robotics.flow3d.rigid_motion import interpolate_poses
from robotics.scenes.tabletop_tasks import LAYOUTS, SPLITS
from robotics.sim.episodes import ChunkResult, EpisodeSpec
from robotics.sim.gym_adapter import resize

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

    from robotics.flow3d.clip import Observation
    from robotics.flow3d.kinematics import ArmIk
    from robotics.sim.opening import SimConfig


POSE_NUMBERS = 9
"""x, y, z in metres, and the directions along the fingers and along the line on which they close."""
NUMBERS = POSE_NUMBERS + 1
"""A pose, and 1 for closed fingers or -1 for open ones."""
ACTIONS = ("grips", "joints")
APPROACH_POSES = 2
"""Poses before the object moves: 8 cm behind the grip, and the grip."""
HALF_TURN = np.diag([-1.0, -1.0, 1.0, 1.0])
TURN_RAD = 2 * np.pi
"""Angle that is 1 in an action; no joint of an arm turns farther."""
SHORT = 1e-6
"""Length below which a predicted direction is meaningless."""


def canonical_grip(T_world_grip: NDArray[np.float64]) -> NDArray[np.float64]:
    """The pose, or the one turned by half a turn about the fingers, which is the same grip."""
    # one of two equal grips for the policy, so that it never has to average between opposite directions
    turned = T_world_grip @ HALF_TURN
    return np.where((T_world_grip[..., 1, 1] < 0)[..., None, None], turned, T_world_grip)


def action_of_poses(T_world_grip: NDArray[np.float64], closed: NDArray[np.bool_]) -> NDArray[np.float32]:
    """Action (W * 10,) of poses (W, 4, 4) and closed fingers (W,); in -1..1 within a metre of the robot's base."""
    return _with_fingers(_pose_numbers(T_world_grip), closed)


def poses_of_action(action: NDArray[np.floating]) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Poses (W, 4, 4) and closed fingers (W,) of any action (W * 10,), directions made orthogonal."""
    rows = _rows(action, NUMBERS)
    along = _unit(rows[:, 3:6], np.array([0.0, 0.0, -1.0]))
    # predicted directions are not exactly orthogonal: the fingers' direction is kept, the other one follows
    close = rows[:, 6:9] - (rows[:, 6:9] * along).sum(-1, keepdims=True) * along
    close = _unit(close, np.cross(along, np.array([0.9, 0.1, 0.3])))
    rotation = np.stack([np.cross(close, along), close, along], -1)
    return make_pose(rotation, rows[:, :3]), rows[:, 9] > 0


def action_of_angles(joint_rad: NDArray[np.float64], closed: NDArray[np.bool_]) -> NDArray[np.float32]:
    """Action (W * (J + 1),) of angles (W, J) and closed fingers (W,); in -1..1 within a whole turn."""
    return _with_fingers(joint_rad / TURN_RAD, closed)


def angles_of_action(action: NDArray[np.floating], joints: int) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Angles (W, J) in rad and closed fingers (W,) of an action (W * (J + 1),)."""
    rows = _rows(action, joints + 1)
    return rows[:, :-1] * TURN_RAD, rows[:, -1] > 0


def path_state(T_world_grip: NDArray[np.float64], points_world_m: NDArray[np.float64]) -> NDArray[np.float32]:
    """State (9 + 3 n,) of a policy: the grip (4, 4) before the path, and the object's query points (n, 3) in metres."""
    return np.concatenate([_pose_numbers(canonical_grip(T_world_grip)), points_world_m.reshape(-1)]).astype(np.float32)


def _with_fingers(numbers: NDArray[np.float64], closed: NDArray[np.bool_]) -> NDArray[np.float32]:
    return np.concatenate([numbers, np.where(closed, 1.0, -1.0)[:, None]], -1).reshape(-1).astype(np.float32)


def _rows(action: NDArray[np.floating], numbers: int) -> NDArray[np.float64]:
    if action.ndim != 1 or len(action) % numbers or not np.isfinite(action).all():
        raise UserError(f"an action has the shape {action.shape}; expected W * {numbers} finite numbers")
    return np.asarray(action, np.float64).reshape(-1, numbers)


def _pose_numbers(T: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.concatenate([T[..., :3, 3], T[..., :3, 2], T[..., :3, 1]], -1)


def _unit(vectors: NDArray[np.float64], otherwise: NDArray[np.float64]) -> NDArray[np.float64]:
    """Unit vectors (W, 3); a vector that is too short is replaced by another direction."""
    length = np.linalg.norm(vectors, axis=-1, keepdims=True)
    chosen = np.where(length > SHORT, vectors, otherwise)
    unit: NDArray[np.float64] = chosen / np.linalg.norm(chosen, axis=-1, keepdims=True)
    return unit


RENDER_PX = 128
"""Size of the images before they are downscaled, as in clips."""
OPTIONS = ("arms", "num_frames", "grid", "actions", "shapes", "colours", "background")


def open_path_sim(config: SimConfig) -> PathSim:
    """The simulator of a configuration; its `options` are arms and those of `PathSim` from num_frames on."""
    if unknown := sorted(set(config.options) - set(OPTIONS)):
        raise UserError(f"sim.options has {', '.join(unknown)}; allowed: {', '.join(OPTIONS)}")
    if config.randomization.active():
        raise UserError(
            "sim.randomization is only for tabletop and gymnasium; here shapes and colours are set in sim.options"
        )
    options = dict(config.options)
    arms = options.pop("arms", None)
    if arms and config.tasks:
        raise UserError("sim.options.arms has no effect with sim.tasks; leave one of them out")
    tasks = config.tasks or [f"{arm}/{task}" for arm in arms or FLOW_ARMS for task in FLOW_TASKS]
    return PathSim(tasks, image_size=config.image_size or 64, **options)


class PathSim:
    """Runs one path per episode; implements `robotics.sim.episodes.RobotSim`.

    Args:
        tasks: arm/task, such as ur5e/place_red.
        image_size: size of the policy's images in pixels.
        num_frames: T, frames of a flow; a path has T + 4 poses.
        grid: N, query points per side.
        actions: grips: poses of the gripper; joints: angles, for arms with the same number of joints.
        shapes: shapes of the objects, one per layout; empty = those of the training data.
        colours: split of colours, train or held_out.
        background: split of table tops and floors.
    """

    horizon = 1
    capacity: int | None = None

    def __init__(
        self,
        tasks: Sequence[str],
        *,
        image_size: int = 64,
        num_frames: int = 8,
        grid: int = 4,
        actions: str = "grips",
        shapes: Sequence[str] = (),
        colours: str = "train",
        background: str = "train",
    ) -> None:
        form = FlowEncoding(num_frames=num_frames, grid=grid)
        self._tasks = {name: _split_name(name) for name in tasks}
        self.image_size: tuple[int, int] | None = (image_size, image_size)
        self._joints = _joints_of(actions, [arm for arm, _ in self._tasks.values()])
        self.action_size = (self._joints + 1 if self._joints else NUMBERS) * (form.num_frames + APPROACH_POSES + 2)
        self.state_size = POSE_NUMBERS + 3 * form.grid**2
        self.live: NDArray[np.int64] = np.zeros(0, np.int64)
        self.counts: dict[str, int] = {"diverged": 0, "dropped": 0}
        self._grid = form.grid
        self._shapes = tuple(shapes)
        self._looks = (colours, background)
        self._scenes: dict[tuple[str, ...], FlowTabletop] = {}
        self._episodes: list[EpisodeSpec] = []
        for arm, task in self._tasks.values():
            # raises for a shape that a task does not have, before the first episode
            self._config(arm, task, 0, "train")

    def tasks(self) -> Mapping[str, str]:
        """Names of the tasks with their instructions."""
        return {name: find_flow_task(task).instruction for name, (_, task) in self._tasks.items()}

    def layouts(self) -> Mapping[str, int | None]:
        """Names of the splits with their numbers of layouts."""
        return dict.fromkeys(SPLITS, LAYOUTS)

    def reset(self, episodes: Sequence[EpisodeSpec]) -> ChunkResult:
        """Begin episodes; see `RobotSim.reset`. A row whose object is hidden could not start."""
        self._episodes = list(episodes)
        self.live = np.arange(len(episodes))
        output = ChunkResult.empty(self.live, 0, self.state_size, self.image_size)
        reasons = {}
        for row, episode in enumerate(episodes):
            reason = self._look(self._stage(episode), row, output, begins=True)
            if reason:
                output.failed[row] = True
                reasons[row] = reason
        self.live = self.live[~output.failed]
        self.counts["dropped"] += len(reasons)
        return ChunkResult(**{**vars(output), "reasons": reasons})

    def step_chunk(self, actions: ArrayLike, record: Collection[int] = ()) -> ChunkResult:
        """Follow the first path of each chunk to the end of the episode; see `RobotSim.step_chunk`."""
        paths = np.asarray(actions, np.float64)
        if paths.ndim != 3 or (len(paths), paths.shape[2]) != (len(self.live), self.action_size) or not paths.shape[1]:
            raise UserError(f"actions are {paths.shape}; expected ({len(self.live)} live rows, K, {self.action_size})")
        output = ChunkResult.empty(self.live, paths.shape[1], self.state_size, self.image_size)
        reasons, frames = {}, {}
        for index, row in enumerate(self.live.tolist()):
            # rows share scenes, so each is put back to its start before its path
            scene = self._stage(self._episodes[row])
            try:
                self._follow(scene, np.clip(paths[index, 0], -1.0, 1.0))
            except RunError as error:
                output.failed[index] = True
                # NaN, as a simulation that failed says nothing about the path
                output.rewards[index] = np.nan
                reasons[row] = str(error)
                self.counts["diverged"] += 1
                continue
            ended = scene.success()
            output.steps[index] = 1
            output.success[index] = ended.success
            output.rewards[index, 0] = float(ended.success)
            if not ended.success:
                reasons[row] = f"not {', '.join(ended.failed)}"
            self._look(scene, index, output, begins=False)
            if row in record and output.observation.images is not None:
                frames[row] = output.observation.images[index][None].copy()
        output.terminated[:] = ~output.failed  # nothing follows a path, so nothing is cut off
        self.live = self.live[:0]
        return ChunkResult(**{**vars(output), "reasons": reasons, "frames": frames})

    def describe(self) -> Mapping[str, Any]:
        """Everything that a measurement depends on."""
        import mujoco

        return {
            "simulator": "flow3d ways",
            "tasks": dict.fromkeys(self._tasks, 1),
            "grid": self._grid,
            "actions": "joints" if self._joints else "grips",
            "image_size": self.image_size,
            "shapes": list(self._shapes),
            "looks": list(self._looks),
            "mujoco": mujoco.__version__,
            "numpy": np.__version__,
            "machine": platform.machine(),
        }

    def close(self) -> None:
        """Free the renderers."""
        while self._scenes:
            self._scenes.popitem()[1].close()

    def _config(self, arm: str, task: str, layout: int, split: str) -> SceneConfig:
        found = find_flow_task(task)
        shapes = self._shapes or found.shape_names(held_out=False)
        shape = shapes[layout % len(shapes)]  # as in the episodes of closed loops
        if shape not in found.shapes:
            raise UserError(f"{task} has no shape {shape!r}; it has {', '.join(found.shapes)}")
        colours, background = self._looks
        return SceneConfig(
            task, arm, shape, layouts=split, colours=colours, background=background, width=RENDER_PX, height=RENDER_PX
        )

    def _stage(self, episode: EpisodeSpec) -> FlowTabletop:
        """The scene of an episode at its start; equal models are built once."""
        if episode.task not in self._tasks:
            raise UserError(f"unknown task {episode.task!r}; available: {', '.join(self._tasks)}")
        arm, task = self._tasks[episode.task]
        config = self._config(arm, task, episode.layout, episode.split)
        # tasks with the same furniture share a model; `give` and `reset` set the rest
        key = arm, find_flow_task(task).furniture.name, config.shape, episode.split
        if key not in self._scenes:
            self._scenes[key] = FlowTabletop(config)
        scene = self._scenes[key]
        scene.give(task)
        scene.reset(episode.layout)
        return scene

    def _look(self, scene: FlowTabletop, row: int, output: ChunkResult, *, begins: bool) -> str:
        """Write a row's observation; returns why the episode cannot begin, or an empty string."""
        observation, seen = scene.observe(), output.observation
        if seen.images is not None:
            seen.images[row] = resize(observation.rgb, seen.images.shape[1])
        points = _points_world_m(observation, self._grid)
        if points is None:
            return "the object is hidden in the first image" if begins else ""
        seen.state[row] = path_state(arm_ik(scene.arm).pose(scene.joint_rad()), points)
        return ""

    def _follow(self, scene: FlowTabletop, action: NDArray[np.float64]) -> None:
        """Go from pose to pose, as far as each can be reached, and close or open the fingers as the path requires."""
        ik = arm_ik(scene.arm)
        if self._joints:
            targets, closed = angles_of_action(action, self._joints)
            # a predicted angle may be beyond the limits, where the servo could not follow
            targets = np.clip(targets, ik.low_rad, ik.high_rad)
        else:
            targets, closed = poses_of_action(action)
            # grips are canonical in the action, but the wrist may only reach their half turn
            targets = _farther_half(ik, scene.joint_rad(), targets)
        is_closed = False
        for target, close in zip(targets, closed, strict=True):
            scene.move(target[None] if self._joints else _path_to(ik, scene.joint_rad(), target))
            if close and not is_closed:
                scene.close_gripper()
            elif is_closed and not close:
                scene.open_gripper()
            is_closed = bool(close)


def _path_to(ik: ArmIk, here: NDArray[np.float64], pose: NDArray[np.float64]) -> NDArray[np.float64]:
    """(M, J) angles on the straight line to a pose, as far as it can be reached."""
    dense, _ = interpolate_poses(np.stack([ik.pose(here), pose]))
    return ik.follow(dense, here).joint_rad


def _farther_half(ik: ArmIk, joint_rad: NDArray[np.float64], poses: NDArray[np.float64]) -> NDArray[np.float64]:
    """The poses, or all of them turned by half a turn about the fingers, whichever the arm can follow farther.

    A wrist that begins near a limit cannot tilt what it holds. Of two equally good halves the shorter path wins.
    """
    turned = poses @ HALF_TURN
    paths = []
    for half in (poses, turned):
        dense, _ = interpolate_poses(np.concatenate([ik.pose(joint_rad)[None], half]))
        paths.append(ik.follow(dense, joint_rad))
    first, second = ((int(path.reached.sum()), -path.length_rad) for path in paths)
    return turned if second > first else poses


def _points_world_m(observation: Observation, grid: int) -> NDArray[np.float64] | None:
    """(N * N, 3) query points on the object, as in `Predictor.query_points`; None if it is not visible."""
    mask = observation.mask
    # holes in the depth cannot be lifted to points
    known = None if mask is None else mask & np.isfinite(observation.depth_m) & (observation.depth_m > 0)
    if known is None or not known.any():
        return None
    uv = grid_in_mask(known, grid)
    points = np.concatenate([uv, depth_at(observation.depth_m, uv)[..., None]], -1)
    return apply_pose(observation.T_world_cam, lift(points, observation.K).reshape(-1, 3))


def _joints_of(actions: str, arms: Sequence[str]) -> int:
    """J of a path of angles, 0 for a path of grips; raises UserError if the arms differ in J."""
    if actions not in ACTIONS:
        raise UserError(f"sim.options.actions is {actions!r}; expected {' or '.join(ACTIONS)}")
    found = {arm: len(FLOW_ARMS[arm].joints) for arm in arms}
    if actions == "joints" and len(set(found.values())) > 1:
        counts = ", ".join(f"{arm} {count}" for arm, count in found.items())
        raise UserError(
            f"sim.options.actions is joints, but the arms have different numbers of joints: {counts}; choose one in "
            "sim.options.arms"
        )
    return next(iter(found.values())) if actions == "joints" else 0


def _split_name(name: str) -> tuple[str, str]:
    arm, _, task = name.partition("/")
    if arm not in FLOW_ARMS or task not in FLOW_TASKS:
        raise UserError(
            f"task is {name!r}; expected arm/task with an arm of {', '.join(FLOW_ARMS)} and a task of "
            f"{', '.join(FLOW_TASKS)}"
        )
    return arm, task
