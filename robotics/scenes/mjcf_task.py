"""Your own task in a MuJoCo scene: one class that environments, batches, films and demonstrations take.

    class Touch(MjcfTask):
        scene = "my_scene.xml"
        instruction = "touch the ball"

        def place(self, start):
            start.put("ball", (*start.rng.uniform(-0.3, 0.3, 2), 0.0))

        def success(self, seen):
            return np.linalg.norm(seen.position("tip") - seen.position("ball"), axis=-1) < 0.03

Name it `my_task.py:Touch` wherever a tabletop task is named. Objects, joints, actuators, their ranges, sensors and
cameras are read from the MJCF.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from mmrl.errors import UserError
from robotics.scenes.arms import ArmModel, complete_arm, find_arm, start_arm
from robotics.scenes.control import (
    ACTION_NAMES,
    HOLD,
    CartesianController,
    ControlPlan,
    ControlSettings,
    check_actions,
)
from robotics.scenes.experts import Move, steer
from robotics.scenes.looks import CAMERA, FILM, add_camera, light_sky
from robotics.scenes.scene import Controller, Scene, model_digest, rotations
from robotics.scenes.tabletop import PROPRIO_NAMES, add_model, heading, include_files, place_body, remove_keys
from robotics.scenes.tabletop_tasks import STATE_NOISE, TASKS, TabletopScene, TabletopTask, find_task
from robotics.scenes.variant import SceneParts

if TYPE_CHECKING:
    import mujoco
    from numpy.typing import ArrayLike, NDArray

    from robotics.sim.randomization import RandomizationConfig

POSE_NAMES = ("x", "y", "z", "qw", "qx", "qy", "qz")
MARK = "mmrl/"
"""Prefix of the sensors that are added to a scene, so that no name of the user's is taken."""


class MjcfTask:
    """A task in your own scene. Subclasses set the attributes, place objects and judge success.

    Objects are the bodies of the scene with a free joint, and its mocap bodies. Without an arm, an action has an entry
    for each actuator: -1 and 1 are the ends of its `ctrlrange`. With an arm it is dx, dy, dz, dyaw and gripper, as at
    the table. The state has the robot's own entries first (10 of an arm; of an actuator its length, velocity and
    control), then each object's position and quaternion, the other joints, and the scene's own sensors.

    One instance serves all threads of a batch, so methods must not keep anything.
    """

    scene: str | Path = ""
    """MJCF of the scene: a path, or the text itself. It has the robot, unless an arm is given."""
    instruction: str = ""
    """Language instruction."""
    arm: str | ArmModel | type[ArmModel] | None = None
    """Arm to add at the origin: your own `ArmModel`, or a key of `ARMS`; None = the robot is in the scene."""
    horizon: int = 60
    """Control steps of an episode."""
    control_hz: float = 10.0
    """Control steps per second."""
    control: ControlSettings = ControlSettings()
    """Step sizes and workspace of an arm."""
    target: str = ""
    """Object that videos mark with a ring at the end, and whose pose `object_poses` is; empty = the first, no ring."""
    progress: ClassVar[Callable[..., Any] | None] = None
    """progress(self, seen) in 0..1, for dense rewards; None = success alone."""
    expert: ClassVar[Callable[..., Any] | None] = None
    """expert(self, seen) for one state: an action (A,), or with an arm a `Move`; None = no expert."""
    source: str = ""
    """Name under which the class was found, module:Class."""

    @property
    def name(self) -> str:
        """Name of the task: that of its class."""
        return type(self).__name__

    def place(self, start: Start) -> None:
        """Put objects where an episode begins; equal random numbers must give equal starts."""

    def success(self, seen: Seen) -> NDArray[np.bool_]:
        """Whether the task is solved, for readings with any leading shape (...)."""
        raise NotImplementedError

    def dense_reward(self, seen: Seen) -> NDArray[np.float64]:
        """Reward of readings: 1 at success, else 0.95 of the progress."""
        progress = 0.0 if self.progress is None else np.clip(self.progress(seen), 0.0, 1.0)
        return np.where(self.success(seen), 1.0, 0.95 * progress)


@dataclass(frozen=True)
class Start:
    """The beginning of an episode: everything at home, to be changed."""

    model: mujoco.MjModel
    data: mujoco.MjData
    rng: np.random.Generator

    def put(self, body: str, position: Sequence[float], yaw: float = 0.0) -> None:
        """Put an object at a position (3,) in metres, turned about the vertical by radians."""
        place_body(self.model, self.data, body, position, (np.cos(yaw / 2), 0.0, 0.0, np.sin(yaw / 2)))

    def turn(self, joint: str, value: float) -> None:
        """Set a hinge (rad) or slide (m)."""
        self.data.qpos[int(self.model.joint(joint).qposadr[0])] = value


@dataclass(frozen=True)
class Seen:
    """Sensor values of a scene with any leading shape (...); world frame, metres, radians, seconds."""

    values: Mapping[str, NDArray[np.float64]]
    command: NDArray[np.float64] | None = None
    """Commanded x, y, z, yaw and gripper (5,) of an arm, else the controls (nu,); for experts alone."""

    def position(self, name: str) -> NDArray[np.float64]:
        """(..., 3) of an object or a site."""
        return self._find(name, "position", "object or site")

    def quaternion(self, name: str) -> NDArray[np.float64]:
        """(..., 4) of an object, w first."""
        return self._find(name, "quaternion", "object")

    def velocity(self, name: str) -> NDArray[np.float64]:
        """(..., 3) linear velocity of an object."""
        return self._find(name, "velocity", "object")

    def joint(self, name: str) -> NDArray[np.float64]:
        """(...) position of a hinge or slide."""
        return self._find(name, "joint", "hinge or slide")[..., 0]

    def sensor(self, name: str) -> NDArray[np.float64]:
        """(..., n) of a sensor of the scene's MJCF."""
        return self._find(name, "sensor", "sensor")

    def _find(self, name: str, kind: str, what: str) -> NDArray[np.float64]:
        if f"{kind}/{name}" not in self.values:
            known = [key.removeprefix(f"{kind}/") for key in self.values if key.startswith(f"{kind}/")]
            raise UserError(f"the scene has no {what} {name!r}; it has {', '.join(known) or 'none'}")
        return self.values[f"{kind}/{name}"]


class MjcfScene(Scene):
    """Your own task: what its scene says of itself, and what its class adds."""

    task: MjcfTask
    substeps: int

    def __init__(
        self,
        task: MjcfTask,
        split: str = "train",
        reward: str = "sparse",
        randomization: RandomizationConfig | None = None,
    ) -> None:
        _check_task(task)
        self._patterned: tuple[str, ...] = ()
        self.arm = _arm_of(task)
        spec, self._own = _build(task, self.arm)
        self._robot, self._kinds = _add_sensors(spec, self.arm)
        try:
            super().__init__(task, spec, split, reward, randomization)
        except ValueError as error:
            raise UserError(f"the scene of {task.name} cannot be compiled: {error}") from error
        self.sensors: MjcfSensors = MjcfSensors(self.model, self._robot, self._own)
        self.control_hz = float(task.control_hz)
        self.substeps = _substeps(task, float(self.model.opt.timestep))
        self.action_names = ACTION_NAMES if self.arm else tuple(self._robot)
        self.state_names, noise = self._describe_state()
        self.proprio_size = len(PROPRIO_NAMES) if self.arm else 3 * len(self._robot)
        self.parts = SceneParts(
            pieces={name: name for name in self.sensors.objects},
            servos=self._servos(),
            robot=self._roots(),
            surfaces=self._patterned,
            noise=noise,
            hold=HOLD if self.arm else ServoController(self.model, self._robot).hold,
        )
        self._check_randomization()

    def surfaces(self, spec: Any) -> tuple[str, ...]:
        """Materials without a texture of the geoms that are fixed to the world."""
        import mujoco

        used = dict.fromkeys(geom.material for geom in spec.worldbody.geoms if geom.material)
        rgb = int(mujoco.mjtTextureRole.mjTEXROLE_RGB)
        self._patterned = tuple(name for name in used if not spec.material(name).textures[rgb])
        if not self._patterned:
            raise UserError(
                f"randomization.textures has nothing to change in the scene of {self.task.name}: no geom of the world "
                "has a material without a texture; give its table or floor one"
            )
        return self._patterned

    def reset(self, model: mujoco.MjModel, data: mujoco.MjData, rng: np.random.Generator) -> None:
        """Put the robot at home, and let the task place its objects."""
        import mujoco

        if self.arm is not None:
            start_arm(model, data, self.arm)
        else:
            if _has_home(model):
                mujoco.mj_resetDataKeyframe(model, data, int(model.key("home").id))
            data.ctrl[:] = home_controls(model)
        self.task.place(Start(model, data, rng))

    def controller(self, settings: ControlSettings | None = None) -> Controller:
        """Make the arm's Cartesian controller, or one that sets every actuator."""
        if self.arm is not None:
            return CartesianController(self.arm, settings or self.task.control)
        if settings is not None:
            raise UserError(f"control has no effect on {self.task.name}, which has no arm; leave it out")
        return ServoController(self.model, self._robot)

    def expert(self, sensordata: NDArray[np.float64], commands: NDArray[np.float64]) -> NDArray[np.float32]:
        """(R, A) actions of the class's own expert."""
        if self.task.expert is None:
            raise UserError(
                f"the task {self.task.name} has no expert; give its class a method expert(self, seen) that returns an "
                "action"
            )
        rows = [
            self._expert_action(self.task.expert(replace(self.sensors.read(values), command=command)), command)
            for values, command in zip(sensordata, commands, strict=True)
        ]
        return np.array(rows, np.float32).reshape(len(rows), len(self.action_names))

    def _expert_action(self, found: Any, command: NDArray[np.float64]) -> NDArray[np.float64]:
        action = steer(found, command, self.task.control) if self.arm and isinstance(found, Move) else found
        array = np.ravel(np.asarray(action, np.float64)) if not isinstance(action, Move) else np.zeros(0)
        if array.shape != (len(self.action_names),) or not np.isfinite(array).all():
            raise UserError(
                f"the expert of {self.task.name} returned {found!r:.80}; expected {len(self.action_names)} finite "
                f"numbers: {', '.join(self.action_names)}{', or a Move' if self.arm else ''}"
            )
        return np.clip(array, -1.0, 1.0)

    def object_poses(self, qpos: NDArray[np.float64], sensordata: NDArray[np.float64]) -> NDArray[np.float64]:
        """(R, 4, 4) T_world_object of the target, or of the first object."""
        name = self.task.target or next(iter(self.sensors.objects), "")
        if not name:
            return np.full((len(qpos), 4, 4), np.nan)
        seen, poses = self.sensors.read(sensordata), np.tile(np.eye(4), (len(qpos), 1, 1))
        poses[:, :3, 3], poses[:, :3, :3] = seen.position(name), rotations(seen.quaternion(name))
        return poses

    def film_spec(self) -> tuple[Any, str]:
        """The scene in the lights of films, seen by its camera `film`, or from in front of its centre."""
        import mujoco

        spec, (scene, _) = include_files("film", [FILM]), _build(self.task, self.arm)
        add_model(spec, scene)
        if not any(camera.name == CAMERA for camera in spec.cameras):
            add_camera(spec, np.array(self.model.stat.center), float(self.model.stat.extent))
        if not any(texture.type == mujoco.mjtTexture.mjTEXTURE_SKYBOX for texture in spec.textures):
            spec.add_texture(name=f"{MARK}sky", type=mujoco.mjtTexture.mjTEXTURE_SKYBOX, width=64, height=384)
        light_sky(spec)
        if not self.task.target:
            return spec, ""
        spec.body(self.task.target).add_site(name=f"{MARK}target", rgba=[0.0] * 4)
        return spec, f"{MARK}target"

    def describe(self) -> dict[str, Any]:
        """Digests of the model and of the file of the class."""
        from mmrl.rewards.reward_loading import source_digest

        return {"model": model_digest(self.model), "code": source_digest(self.task.source)}

    def _describe_state(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Names of the entries of the state, and the kinds of their noise."""
        names, noise = list(PROPRIO_NAMES), list(STATE_NOISE[: len(PROPRIO_NAMES)])
        if self.arm is None:
            names = [name + end for end in ("", "_velocity", "_control") for name in self._robot]
            noise = [*(self._kinds[name] for name in self._robot), *(2 * len(self._robot) * ("",))]
        for body in self.sensors.objects:
            names += [f"{body}_{entry}" for entry in POSE_NAMES]
            noise += [*(3 * ("pieces_m",)), *(4 * ("pieces_rad",))]
        names += self.sensors.joints
        noise += [
            self._kinds[name].replace("position", "pieces").replace("yaw", "pieces") for name in self.sensors.joints
        ]
        for name, size in self.sensors.own.items():
            names += [name] if size == 1 else [f"{name}_{entry}" for entry in range(size)]
        return tuple(names), (*noise, *((len(names) - len(noise)) * ("",)))

    def _servos(self) -> dict[str, int]:
        if self.arm is not None:
            return dict(zip(self.arm.joints, self.arm.actuators(self.model)[:-1], strict=True))
        stiff = self.model.actuator_biasprm[:, 1] < 0
        return {name: number for number, name in enumerate(self._robot) if stiff[number]}

    def _roots(self) -> tuple[int, ...]:
        """Ids of the bodies at the roots of the robot."""
        model = self.model
        joints = [int(model.joint(name).id) for name in (self.arm.joints[:1] if self.arm else self.sensors.driven)]
        return tuple(sorted({int(model.body_rootid[model.jnt_bodyid[joint]]) for joint in joints}))

    def _check_randomization(self) -> None:
        """Refuse a part of the randomisation that changes nothing here."""
        things = {"servo_gain": (self.parts.servos, "position servos"), "camera": (self.camera, "named cameras")}
        things["mass"] = [name for name in self.parts.pieces if self.model.body(name).mocapid[0] < 0], "free objects"
        for name, (found, what) in things.items():
            if name in self.randomization.active() and not found:
                raise UserError(
                    f"randomization.{name} has nothing to change: the scene of {self.task.name} has no {what}"
                )


class MjcfSensors:
    """Reads the sensors that are added to a scene, and puts the state together."""

    def __init__(self, model: mujoco.MjModel, robot: Sequence[str], own: Sequence[str]) -> None:
        self._columns: dict[str, slice] = {}
        for number in range(model.nsensor):
            start, name = int(model.sensor_adr[number]), model.sensor(number).name
            key = name.removeprefix(MARK) if name.startswith(MARK) else f"sensor/{name}"
            if name.startswith(MARK) or name in own:
                self._columns[key] = slice(start, start + int(model.sensor_dim[number]))
        self.objects = self._named("quaternion")
        """Free and mocap bodies."""
        self.driven = self._named("driven")
        """Joints of the robot."""
        self.joints = [name for name in self._named("joint") if name not in self.driven]
        """Other hinges and slides."""
        self.own: dict[str, int] = {name: _width(self._columns[f"sensor/{name}"]) for name in own}
        """Numbers of values of the scene's own sensors."""
        self._robot = robot

    def _named(self, kind: str) -> list[str]:
        return [key.removeprefix(f"{kind}/") for key in self._columns if key.startswith(f"{kind}/")]

    def read(self, sensordata: NDArray[np.float64]) -> Seen:
        """Name the sensor values."""
        return Seen({name: sensordata[..., columns] for name, columns in self._columns.items()})

    def state(self, sensordata: NDArray[np.float64], commands: NDArray[np.float64]) -> NDArray[np.float32]:
        """(R, S) state: the robot's own entries, objects, other joints, the scene's own sensors."""
        seen = self.read(sensordata)
        if self._robot:
            parts = [seen.values[f"{kind}/{name}"] for kind in ("length", "speed") for name in self._robot]
        else:
            opening = seen.values["finger/left"] + seen.values["finger/right"]
            parts = [seen.values["grip/position"], heading(seen.values["grip/axis"])[:, None], opening]
        parts = [*parts, commands]
        parts += [part for name in self.objects for part in (seen.position(name), seen.quaternion(name))]
        parts += [seen.joint(name)[:, None] for name in self.joints] + [seen.sensor(name) for name in self.own]
        return np.concatenate(parts, axis=1).astype(np.float32)


class ServoController:
    """Sets every actuator: -1 and 1 are the ends of its range.

    Args:
        model: the scene.
        names: of the actuators.
    """

    def __init__(self, model: mujoco.MjModel, names: Sequence[str]) -> None:
        free = [name for number, name in enumerate(names) if not model.actuator_ctrllimited[number]]
        if free:
            raise UserError(f"the actuators {', '.join(free)} have no ctrlrange, which actions are scaled to; add one")
        self._names = names
        self._low, high = model.actuator_ctrlrange.T.copy()
        self._span: NDArray[np.float64] = high - self._low
        self._home = home_controls(model)
        self._controls = np.zeros((0, len(names)))

    @property
    def hold(self) -> NDArray[np.float64]:
        """(A,) the action that keeps the controls of the start."""
        return (self._home - self._low) / self._span * 2.0 - 1.0

    def reset(self, rows: int) -> None:
        """Begin with the controls of the start."""
        self._controls = np.tile(self._home, (rows, 1))

    def restart(self, rows: ArrayLike) -> None:
        """Give some rows the controls of the start."""
        self._controls[np.asarray(rows, np.int64)] = self._home

    def commands(self, rows: ArrayLike) -> NDArray[np.float64]:
        """(L, nu) current controls."""
        return self._controls[np.asarray(rows, np.int64)]

    def plan(self, rows: ArrayLike, actions: ArrayLike) -> ControlPlan:
        """Controls of a chunk of actions (L, K, A), which are the commands as well."""
        chosen = np.asarray(rows, np.int64)
        controls = self._low + (check_actions(actions, len(chosen), self._names) + 1.0) / 2.0 * self._span
        self._controls[chosen] = controls[:, -1]
        return ControlPlan(controls, controls)


def home_controls(model: mujoco.MjModel) -> NDArray[np.float64]:
    """(nu,) controls at the start: those of the keyframe `home`, or those that hold the pose, else nearest to 0."""
    if _has_home(model):
        found = np.array(model.key("home").ctrl)
    else:
        import mujoco

        # a position servo holds the pose that the model has without a keyframe: gain * control + bias(length) = 0
        data = mujoco.MjData(model)
        mujoco.mj_fwdPosition(model, data)
        gain, bias = model.actuator_gainprm[:, 0], model.actuator_biasprm
        stiff = (bias[:, 1] < 0) & (model.actuator_trntype == 0) & (gain != 0)
        force = bias[:, 0] + bias[:, 1] * data.actuator_length
        found = np.where(stiff, -force / np.where(stiff, gain, 1.0), 0.0)
    return np.clip(found, *model.actuator_ctrlrange.T)


def find_any_task(name: str) -> TabletopTask | MjcfTask:
    """A tabletop task by its name, or one of the user's by module:Class; raises UserError if it does not exist."""
    if name in TASKS or ":" not in name:
        return find_task(name)
    from mmrl.rewards.reward_loading import load_function

    made: Any = load_function(name, what="the task")
    if not (isinstance(made, type) and issubclass(made, MjcfTask)):
        raise UserError(f"the task {name} is {made!r:.80}; expected a subclass of {MjcfTask.__module__}:MjcfTask")
    task = made()
    task.source = name
    return task


def open_scene(
    task: str,
    arm: str = "panda",
    split: str = "train",
    reward: str = "sparse",
    randomization: RandomizationConfig | None = None,
) -> Scene:
    """The scene of a task: of a tabletop task with an arm, or of the user's own, which names its arm itself.

    Raises:
        UserError: task or arm does not exist, or the scene does not say something that is needed.
    """
    found = find_any_task(task)
    if isinstance(found, TabletopTask):
        return TabletopScene(found, find_arm(arm), split, reward, randomization)
    if arm != "panda":
        raise UserError(f"arm is {arm!r}, but {task} names its own arm, if it has one; leave arm out")
    return MjcfScene(found, split, reward, randomization)


def _check_task(task: MjcfTask) -> None:
    for name in ("scene", "instruction"):
        if not getattr(task, name):
            raise UserError(f"the task {task.name} has no {name}; set it in the class")
    if type(task).success is MjcfTask.success:
        raise UserError(f"the task {task.name} has no method success(self, seen)")
    if task.horizon < 1 or not task.control_hz > 0:
        raise UserError(f"{task.name}: horizon {task.horizon} and control_hz {task.control_hz} must be above 0")


def _arm_of(task: MjcfTask) -> ArmModel | None:
    arm: Any = task.arm
    if arm is None or isinstance(arm, str):
        return None if arm is None else find_arm(arm)
    return complete_arm(arm() if isinstance(arm, type) else arm)


def _build(task: MjcfTask, arm: ArmModel | None) -> tuple[Any, list[str]]:
    """The scene with its arm, not compiled yet, and the names of the scene's own sensors."""
    import mujoco

    given = str(task.scene)
    read = mujoco.MjSpec.from_string if given.lstrip().startswith("<") else mujoco.MjSpec.from_file
    try:
        spec = read(given)
    except ValueError as error:
        raise UserError(f"the scene of {task.name} cannot be read: {error}") from error
    own = [sensor.name for sensor in spec.sensors]
    if not all(own):
        raise UserError(f"sensor {own.index('')} of the scene of {task.name} has no name; give it one")
    if arm is not None:
        remove_keys(spec)  # they have no numbers for the arm
        add_model(spec, arm.spec())
    return spec, own


def _add_sensors(spec: Any, arm: ArmModel | None) -> tuple[list[str], dict[str, str]]:
    """Add the sensors of robot, objects, sites and joints.

    Returns:
        Names of the actuators, none with an arm; and the kind of noise of actuators and joints.
    """
    import mujoco

    kinds, types = mujoco.mjtSensor, mujoco.mjtObj
    free, ball = mujoco.mjtJoint.mjJNT_FREE, mujoco.mjtJoint.mjJNT_BALL
    objects = [body for body in spec.bodies if body.mocap or any(joint.type == free for joint in body.joints)]
    joints = [joint for joint in spec.joints if joint.type not in (free, ball)]
    unnamed = [f"a joint of the body {joint.parent.name!r}" for joint in joints if not joint.name]
    unnamed += [f"an object at {body.pos.tolist()}" for body in objects if not body.name]
    if unnamed:
        raise UserError(f"{unnamed[0]} has no name; give it one in the MJCF")
    robot, driven = [], [*arm.joints, *arm.fingers] if arm else []
    if arm is None:
        by_joint = mujoco.mjtTrn.mjTRN_JOINT
        robot = [actuator.name or actuator.target for actuator in spec.actuators]
        driven = [actuator.target for actuator in spec.actuators if actuator.trntype == by_joint]
        if not robot:
            raise UserError("the scene has no actuators; add them, or set `arm`")
    noise = {joint.name: "yaw_rad" if joint.type == mujoco.mjtJoint.mjJNT_HINGE else "position_m" for joint in joints}
    wanted = []
    for actuator, name in zip(spec.actuators, robot, strict=False):
        noise[name] = noise.get(actuator.target, "position_m")
        actuator.name = name
        wanted += [(f"length/{name}", kinds.mjSENS_ACTUATORPOS, types.mjOBJ_ACTUATOR, name)]
        wanted += [(f"speed/{name}", kinds.mjSENS_ACTUATORVEL, types.mjOBJ_ACTUATOR, name)]
    if arm is not None:
        wanted += [("grip/position", kinds.mjSENS_FRAMEPOS, types.mjOBJ_SITE, arm.grip_site)]
        wanted += [("grip/axis", kinds.mjSENS_FRAMEXAXIS, types.mjOBJ_SITE, arm.grip_site)]
        for side, finger in zip(("left", "right"), arm.fingers, strict=True):
            wanted += [(f"finger/{side}", kinds.mjSENS_JOINTPOS, types.mjOBJ_JOINT, finger)]
    for body in objects:
        wanted += [(f"position/{body.name}", kinds.mjSENS_FRAMEPOS, types.mjOBJ_XBODY, body.name)]
        wanted += [(f"quaternion/{body.name}", kinds.mjSENS_FRAMEQUAT, types.mjOBJ_XBODY, body.name)]
        wanted += [(f"velocity/{body.name}", kinds.mjSENS_FRAMELINVEL, types.mjOBJ_XBODY, body.name)]
    taken = {body.name for body in objects}
    sites = [site.name for site in spec.sites if site.name and site.name not in taken]
    wanted += [(f"position/{name}", kinds.mjSENS_FRAMEPOS, types.mjOBJ_SITE, name) for name in sites]
    wanted += [(f"joint/{joint.name}", kinds.mjSENS_JOINTPOS, types.mjOBJ_JOINT, joint.name) for joint in joints]
    wanted += [(f"driven/{name}", kinds.mjSENS_JOINTPOS, types.mjOBJ_JOINT, name) for name in dict.fromkeys(driven)]
    for key, kind, objtype, target in wanted:
        spec.add_sensor(name=f"{MARK}{key}", type=kind, objtype=objtype, objname=target)
    return robot, noise


def _substeps(task: MjcfTask, timestep_s: float) -> int:
    exact = 1.0 / (task.control_hz * timestep_s)
    if round(exact) < 1 or abs(exact - round(exact)) > 1e-6 * exact:
        raise UserError(
            f"a control step of {task.name} ({task.control_hz:g} Hz) is {exact:g} physics steps of {timestep_s:g} s; "
            "expected a whole number; change control_hz, or the scene's timestep"
        )
    return round(exact)


def _has_home(model: mujoco.MjModel) -> bool:
    return "home" in [model.key(number).name for number in range(model.nkey)]


def _width(columns: slice) -> int:
    return int(columns.stop - columns.start)
