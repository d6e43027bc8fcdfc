"""A table with objects, seen by one camera, without physics: layouts, arms, colours and true poses for 3D flow.

The arms start out of the camera's way. The free gripper is an arm with slides, whose "radians" are metres.
"""

from __future__ import annotations

import dataclasses
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

import numpy as np

from mmrl.errors import UserError
from mmrl.fields import bounded, check_config, choice
from robotics.flow3d.clip import Observation
from robotics.flow3d.geometry import intrinsics, inverse_pose, make_pose
from robotics.flow3d.objects.criteria import CriteriaOutcome, SceneState
from robotics.flow3d.objects.flow_tasks import FLOW_TASKS, FlowTask, find_flow_task
from robotics.scenes.arms import ARMS, ASSETS, ArmModel, find_arm
from robotics.scenes.tabletop import add_model, compile_scene, include_files, place_body
from robotics.scenes.tabletop_tasks import SPLITS, layout_seed
from robotics.sim.rendering import FrameRenderer, RenderSettings, update_poses

if TYPE_CHECKING:
    import mujoco
    from numpy.typing import NDArray

SCENE_ASSETS = Path(__file__).parent / "assets"
HELD_OUT_ARMS = ("ur5e", "gen3")
"""Arms that training data do not show by default."""

# Home: drawn back, the grip at x = 0.25 m and z = 0.4 m and pointing down, so that the table is visible.
FLOW_ARMS: dict[str, ArmModel] = {
    "panda": dataclasses.replace(ARMS["panda"], home_rad=(0.0, -1.0294, 0.0, -2.6999, 0.0, 1.6706, 0.7854)),
    "ur5e": dataclasses.replace(ARMS["ur5e"], home_rad=(-2.1364, -2.2458, 1.9651, -1.2901, -1.5708, -2.1364)),
    "gen3": ArmModel(
        name="gen3",
        file=str(SCENE_ASSETS / "gen3.xml"),
        joints=("joint_1", "joint_2", "joint_3", "joint_4", "joint_5", "joint_6", "joint_7"),
        home_rad=(0.1735, -0.1482, 3.0038, -1.8127, -0.0204, -1.4756, 0.0393),
        licence="Kinova Gen3, google-deepmind/mujoco_menagerie kinova_gen3 (BSD-3-Clause)",
    ),
    "free_gripper": ArmModel(
        name="free_gripper",
        file=str(SCENE_ASSETS / "free_gripper.xml"),
        joints=("slide_x", "slide_y", "slide_z", "turn_z", "turn_y", "turn_x", "spin"),
        home_rad=(0.25, 0.0, 0.4, 0.0, 0.0, 0.0, 0.0),
        licence="made up",
    ),
}


OBJECT_RGB = {
    "train": ((0.93, 0.93, 0.9), (0.3, 0.5, 0.85), (0.92, 0.8, 0.25), (0.5, 0.52, 0.56), (0.35, 0.25, 0.2)),
    "held_out": ((0.6, 0.25, 0.7), (0.95, 0.55, 0.15), (0.2, 0.65, 0.7)),
}
FLOOR_RGB = {
    "train": ((0.45, 0.5, 0.55), (0.3, 0.3, 0.33), (0.6, 0.58, 0.55)),
    "held_out": ((0.7, 0.75, 0.6), (0.42, 0.16, 0.44)),
}
JITTER = 0.04
"""Maximum change of a colour in an episode."""
LIGHT = (0.75, 1.15)
"""Minimum and maximum factor of the lamp's light."""
HAND, NOBODY = "hand", "nobody"
ACTORS = (*FLOW_ARMS, HAND, NOBODY)
"""What moves the object: an arm, a floating hand, or nobody in view."""
DEPTHS = ("clean", "holed", "missing")
OUT_OF_VIEW_M = (-0.6, 0.0, 0.6)
"""Position of a hand until it is posed."""


def find_flow_arm(actor: str) -> ArmModel | None:
    """A row of `FLOW_ARMS`, or what a user's module:Class or module:function returns; None for a hand and nobody."""
    return find_arm(actor) if ":" in actor else FLOW_ARMS.get(actor)


@dataclass(frozen=True)
class SceneConfig:
    """A task, an actor and a shape; the distribution of episodes; and the camera."""

    task: str = choice("place_red", lambda: FLOW_TASKS)
    """Task."""
    actor: str = choice("panda", ACTORS, or_function=True)
    """Actor in view: an arm, hand, nobody, or your own `ArmModel` as module:Class or module:function."""
    shape: str = ""
    """Shape of the object; empty = the first one of the training data."""
    layouts: str = choice("train", SPLITS)
    """Split of the layouts."""
    colours: str = choice("train", SPLITS)
    """Split of the colours of the object, or of the cabinet."""
    background: str = choice("train", SPLITS)
    """Split of table tops and floors."""
    width: int = bounded(128, at_least=16)
    """Pixels of an image."""
    height: int = bounded(128, at_least=16)
    """Pixels of an image."""
    depth: str = choice("clean", DEPTHS)
    """clean; holed: patches of zeros, as sensors have at edges and on shiny things; missing: zeros everywhere."""
    depth_noise: float = bounded(0.0, at_least=0, below=1)
    """Standard deviation of the relative error of each pixel's depth."""
    hole_share: float = bounded(0.1, above=0, below=1)
    """Approximate fraction of pixels covered by holes."""
    lose_after_m: float = bounded(0.0, at_least=0)
    """Distance after which an arm's gripper drops the object, once per episode; 0 = never."""

    @property
    def actor_name(self) -> str:
        """Name of the actor; a custom arm's own name."""
        arm = find_flow_arm(self.actor)
        return self.actor if arm is None else arm.name

    def validate(self) -> None:
        """Reject a shape that the task does not have; raises UserError."""
        find_flow_arm(self.actor)
        shapes = FLOW_TASKS[self.task].shapes
        if self.shape and self.shape not in shapes:
            raise UserError(f"{self.task} has no shape {self.shape!r}; it has {', '.join(shapes)}")


class FlowScene:
    """A scene without physics: objects are posed, looked at, and judged.

    Args:
        config: settings of the scene; None for the defaults.
        changes: fields of the configuration by name, such as task="pour".

    Raises:
        UserError: a field is out of range, or there is no renderer.
    """

    def __init__(self, config: SceneConfig | None = None, **changes: object) -> None:
        import mujoco

        self.config = dataclasses.replace(config or SceneConfig(), **changes)  # type: ignore[arg-type]
        check_config(self.config, "scene")
        self.task: FlowTask = find_flow_task(self.config.task)
        self.shape = self.task.shapes[self.config.shape or next(iter(self.task.shapes))]
        self.arm = find_flow_arm(self.config.actor)
        self.model = build_model(self.task, self.shape.name, self.config.actor)
        self.data = mujoco.MjData(self.model)
        self._lib = mujoco
        self._body = int(self.model.body(self.task.moved).id)
        painted = int(self.model.body(self.task.furniture.painted).id)
        self._painted = np.flatnonzero(self.model.geom_bodyid == painted)
        # the model's own colours, from which every episode is painted
        self._grey = self.model.geom_rgba[self._painted, :3].copy()
        self._lamp = self.model.light_diffuse.copy()
        self._renderer: FrameRenderer | None = None
        camera = self.model.camera("scene")
        size_px = self.config.width, self.config.height
        self.K = intrinsics(size_px, fov_y_rad=math.radians(float(camera.fovy[0])))
        mujoco.mj_kinematics(self.model, self.data)
        mujoco.mj_camlight(self.model, self.data)
        # MuJoCo's cameras look along -z with y up.
        rotation = self.data.cam_xmat[camera.id].reshape(3, 3) * np.array([1.0, -1.0, -1.0])
        self.T_world_cam = make_pose(rotation, self.data.cam_xpos[camera.id].copy())
        self.reset(0)

    def reset(self, seed: int) -> None:
        """Begin an episode, whose seed is its number within the split of its layouts: draw layout and looks."""
        rng = np.random.default_rng(layout_seed(self.config.layouts, seed))
        layout = self.task.furniture.draw(self.config.layouts, rng)
        self._lib.mj_resetData(self.model, self.data)
        for name, (x, y, yaw) in layout.items():
            quaternion = math.cos(yaw / 2), 0.0, 0.0, math.sin(yaw / 2)
            place_body(self.model, self.data, name, (x, y, 0.0), quaternion)
        if self.config.actor == HAND:
            self.put_hand(make_pose(np.eye(3), np.array(OUT_OF_VIEW_M)))
        # depth noise has its own stream: it is drawn per image and must not change the looks
        self._rng = np.random.default_rng([seed, 1])
        self._pose_actor()
        self._lib.mj_forward(self.model, self.data)
        self.seed = seed
        self.start = self.object_pose()
        # after the layout from the same stream, so that equal layouts have equal looks with every actor
        self._paint(rng)
        if self._renderer is not None:
            self._renderer.refresh()

    def give(self, task: str) -> None:
        """Give another instruction in the same episode; raises UserError if it needs other furniture."""
        other = find_flow_task(task)
        if other.furniture is not self.task.furniture:
            fitting = [name for name, known in FLOW_TASKS.items() if known.furniture is self.task.furniture]
            raise UserError(f"{task} needs other furniture; here there are {', '.join(fitting)}")
        self.task = other
        self.config = dataclasses.replace(self.config, task=task)
        self._body = int(self.model.body(other.moved).id)
        # another task may move another body
        self.start = self.object_pose()

    @property
    def instruction(self) -> str:
        """Language instruction."""
        return self.task.instruction

    def object_pose(self) -> NDArray[np.float64]:
        """(4, 4) T_world_object, true."""
        return self.body_pose(self.task.moved)

    def body_pose(self, name: str) -> NDArray[np.float64]:
        """(4, 4) pose of a body in the world frame."""
        body = self.data.body(name)
        return make_pose(body.xmat.reshape(3, 3).copy(), body.xpos.copy())

    def put_object(self, T_world_object: NDArray[np.float64]) -> None:
        """Place the moved object; a drawer only moves along its slide."""
        address = int(self.model.jnt_qposadr[int(self.model.body(self.task.moved).jntadr[0])])
        if self.task.moved == "object":
            self.data.qpos[address : address + 7] = self._pose_numbers(T_world_object)
        else:
            self.data.qpos[address] = self._opening(T_world_object)
        # kinematics only: nothing in this scene moves by itself
        update_poses(self.model, self.data)

    def replay(self, T_t_0_world: NDArray[np.float64]) -> NDArray[np.uint8]:
        """Image (H, W, 3) of the scene with the object moved by (4, 4); the object itself stays where it is."""
        before = self.data.qpos.copy()
        try:
            self.put_object(T_t_0_world @ self.object_pose())
            return self.renderer.rgb(self.data).copy()
        finally:
            # restored exactly: posing back by inverse would leave rounding
            self.data.qpos[:] = before
            update_poses(self.model, self.data)

    def put_hand(self, T_world_grip: NDArray[np.float64]) -> None:
        """Pose the floating hand; raises UserError in a scene without one."""
        if self.config.actor != HAND:
            raise UserError(f"the actor of this scene is {self.config.actor}; put_hand needs actor='hand'")
        address = int(self.model.joint("floating_hand").qposadr[0])
        self.data.qpos[address : address + 7] = self._pose_numbers(T_world_grip)
        update_poses(self.model, self.data)

    def put_arm(self, joint_rad: NDArray[np.float64], opening_m: float | None = None) -> None:
        """Pose the arm, with each finger `opening_m` from the middle; None = open."""
        if self.arm is None:
            raise UserError(f"the actor of this scene is {self.config.actor}; available arms: {', '.join(FLOW_ARMS)}")
        way = self.arm.opening_m if opening_m is None else opening_m
        for name, angle in zip((*self.arm.joints, *self.arm.fingers), (*joint_rad, way, way), strict=True):
            self.data.qpos[int(self.model.joint(name).qposadr[0])] = angle
        update_poses(self.model, self.data)

    def state(self, T_world_object: NDArray[np.float64] | None = None) -> SceneState:
        """Input of the criteria: the current state, or one with the object released at another pose."""
        furniture, names = self.task.furniture, self.task.furniture.movable
        pieces = {name: self.body_pose(name) for name in furniture.areas if name != "object"}
        openings = {name: float(self.data.joint(name).qpos[0]) for name in names if name != "object"}
        # at a predicted pose the object counts as released: `SceneState` says so by default
        if T_world_object is None:
            return SceneState(self.object_pose(), self.start, pieces, openings, self.shape, self.released())
        if self.task.moved in openings:
            openings[self.task.moved] = self._opening(T_world_object)
        return SceneState(T_world_object, self.start, pieces, openings, self.shape)

    def released(self) -> bool:
        """Whether no gripper holds the object; always so without physics."""
        return True

    def success(self, T_world_object: NDArray[np.float64] | None = None) -> CriteriaOutcome:
        """Judge the task's criteria with the object as it is or at another (such as predicted) pose."""
        return self.task.outcome(self.state(T_world_object))

    def ideal_motion(self, frames: int) -> NDArray[np.float64]:
        """(frames, 4, 4) T_world_object of a motion that solves the task from the current state."""
        return self.task.ideal_motion(self.state(), frames)

    def observe(self) -> Observation:
        """Image, depth with the configuration's noise, camera, instruction and the object's true mask."""
        renderer = self.renderer
        update_poses(self.model, self.data)
        return Observation(
            rgb=renderer.rgb(self.data).copy(),
            depth_m=self._spoil(renderer.depth(self.data)),
            K=self.K,
            T_world_cam=self.T_world_cam,
            instruction=self.instruction,
            mask=self.object_mask(),
        )

    def object_mask(self) -> NDArray[np.bool_]:
        """(H, W) pixels of the object."""
        return self._shown_bodies() == self._body

    def actor_mask(self) -> NDArray[np.bool_]:
        """(H, W) pixels of the arm or the hand."""
        if self.config.actor == NOBODY:
            return np.zeros((self.config.height, self.config.width), dtype=np.bool_)
        grip = self.arm.grip_site if self.arm is not None else "grip"
        # arms may have many bodies; all of them share one root
        root = self.model.body_rootid[int(self.model.site_bodyid[int(self.model.site(grip).id)])]
        bodies = self._shown_bodies()
        return (bodies >= 0) & (self.model.body_rootid[np.maximum(bodies, 0)] == root)

    def true_depth(self) -> NDArray[np.float32]:
        """(H, W) metres, without noise and holes."""
        return self.renderer.depth(self.data)

    @property
    def renderer(self) -> FrameRenderer:
        """Renderer of the camera `scene`, without shadows and multisampling."""
        if self._renderer is None:
            self._renderer = FrameRenderer(
                self.model, RenderSettings(self.config.width, self.config.height, camera="scene")
            )
        return self._renderer

    def close(self) -> None:
        """Free the renderer."""
        if self._renderer is not None:
            self._renderer.close()
            self._renderer = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _shown_bodies(self) -> NDArray[np.int32]:
        """(H, W) id of the body that each pixel shows; -1 for the background."""
        shown = self.renderer.segmentation(self.data)
        geoms = shown[..., 1] == int(self._lib.mjtObj.mjOBJ_GEOM)
        return np.where(geoms, self.model.geom_bodyid[np.where(geoms, shown[..., 0], 0)], -1)

    def _paint(self, rng: np.random.Generator) -> None:
        """Draw an episode's colours and light."""
        model, split = self.model, self.config.background
        tops = [index for index in range(model.nmat) if re.fullmatch(f"top_.*{split}", model.material(index).name)]
        model.geom_rgba[self._painted, :3] = self._grey * _jittered(OBJECT_RGB[self.config.colours], rng)
        model.geom_matid[int(model.geom("table").id)] = tops[int(rng.integers(1 << 16)) % len(tops)]
        model.mat_rgba[int(model.material("floor").id), :3] = _jittered(FLOOR_RGB[split], rng)
        model.light_diffuse[:] = self._lamp * rng.uniform(*LIGHT)

    def _pose_actor(self) -> None:
        if self.arm is not None:
            self.put_arm(np.array(self.arm.home_rad))

    def _pose_numbers(self, T: NDArray[np.float64]) -> NDArray[np.float64]:
        quaternion = np.empty(4)
        self._lib.mju_mat2Quat(quaternion, np.ascontiguousarray(T[:3, :3]).reshape(9))
        return np.concatenate([T[:3, 3], quaternion])

    def _opening(self, T_world_object: NDArray[np.float64]) -> float:
        low, high = self.model.joint(self.task.moved).range
        now = float(self.data.joint(self.task.moved).qpos[0])
        # the slide is along the object's x axis
        way = float((inverse_pose(self.object_pose()) @ T_world_object)[0, 3])
        return float(np.clip(now + way, low, high))

    def _spoil(self, depth_m: NDArray[np.float32]) -> NDArray[np.float32]:
        config = self.config
        if config.depth == "missing":
            return np.zeros_like(depth_m)
        if config.depth_noise:
            # relative, as the noise of stereo and time-of-flight sensors grows with distance
            depth_m = depth_m * (1 + config.depth_noise * self._rng.standard_normal(depth_m.shape)).astype(np.float32)
        if config.depth == "holed":
            depth_m = np.where(depth_holes(depth_m.shape, config.hole_share, self._rng), np.float32(0), depth_m)
        return depth_m


def _jittered(palette: tuple[tuple[float, ...], ...], rng: np.random.Generator) -> NDArray[np.float64]:
    base = np.array(palette[int(rng.integers(len(palette)))])
    return np.clip(base + rng.uniform(-JITTER, JITTER, 3), 0.0, 1.0)


def depth_holes(shape: tuple[int, ...], share: float, rng: np.random.Generator) -> NDArray[np.bool_]:
    """(H, W) holes of a depth image: squares of 2 to 8 pixels that cover a fraction of it."""
    holes = np.zeros(shape, dtype=np.bool_)
    # squares overlap, so the fraction is measured instead of computed
    while holes.mean() < share:
        side = int(rng.integers(2, 9))
        row = int(rng.integers(shape[0]))
        column = int(rng.integers(shape[1]))
        holes[row : row + side, column : column + side] = True
    return holes


def build_model(task: FlowTask, shape: str, actor: str) -> mujoco.MjModel:
    """Model of furniture, an object and an actor at the table, with the camera `scene`.

    With an arm it has an inactive weld `hold_BODY` between its hand and each movable body.
    """
    import mujoco

    arm = find_flow_arm(actor)
    # nobody in view needs no file
    own = [SCENE_ASSETS / "hand.xml"] if actor == HAND else []
    files = [ASSETS / "tabletop.xml", SCENE_ASSETS / "studio.xml", *own]
    spec = include_files(f"{task.furniture.name}_{arm.name if arm else actor}", files)
    if arm:
        add_model(spec, arm.spec())
    task.furniture.build(spec, task.shapes[shape])
    if arm:
        hand = spec.site(arm.grip_site).parent.name
        for name in task.furniture.movable:
            # inactive: `FlowTabletop` activates it when the fingers close on the body
            weld = spec.add_equality(name=f"hold_{name}", type=mujoco.mjtEq.mjEQ_WELD, active=False)
            weld.objtype = mujoco.mjtObj.mjOBJ_BODY
            weld.name1 = hand
            weld.name2 = name
            weld.data[10] = 1.0  # torque scale
    return compile_scene(spec)
