"""Robot arms that come with the package: model files, home poses and kinematics.

Both are MJCF with primitives; kinematics, masses and gains are those of the real arms (sources in the files). The site
`grip` is between the fingertips, z along the fingers and y along the line on which they close; at home z points down at
the table and x away from the base.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from mmrl.errors import UserError

if TYPE_CHECKING:
    import mujoco
    from numpy.typing import NDArray

ASSETS = Path(__file__).parent / "assets"


@dataclass(frozen=True)
class ArmModel:
    """An arm with a two-finger gripper, its base at the origin of the scene."""

    name: str
    file: str  # MJCF in the folder of assets, or an absolute path
    joints: tuple[str, ...]  # hinges from base to hand; an actuator of the same name takes a target angle in rad
    home_rad: tuple[float, ...]  # at the start of an episode
    licence: str  # source of the numbers and its licence
    fingers: tuple[str, str] = ("left_finger", "right_finger")  # slide joints, metres from the closed position each
    gripper: str = "gripper"  # actuator that takes the target of one finger in metres
    grip_site: str = "grip"
    opening_m: float = 0.04  # travel of one finger

    @property
    def path(self) -> Path:
        """The MJCF file."""
        return ASSETS / self.file

    @property
    def max_opening_m(self) -> float:
        """Maximum width between the fingers."""
        return 2 * self.opening_m

    def load(self) -> mujoco.MjModel:
        """Load the arm alone, its joints and actuators without table and light."""
        import mujoco

        return mujoco.MjModel.from_xml_path(str(self.path))

    @cached_property
    def kinematics(self) -> ForwardKinematics:
        """Pose of the grip as a function of the angles, read from the model once."""
        return ForwardKinematics(self.load(), self)


class ForwardKinematics:
    """Pose and Jacobian of the grip, batched over sets of angles."""

    def __init__(self, model: mujoco.MjModel, arm: ArmModel) -> None:
        joints = [int(model.joint(name).id) for name in arm.joints]
        site = int(model.site(arm.grip_site).id)
        self.low_rad: NDArray[np.float64] = model.jnt_range[joints, 0].copy()
        self.high_rad: NDArray[np.float64] = model.jnt_range[joints, 1].copy()
        bodies = [int(model.jnt_bodyid[joint]) for joint in joints]
        parents = [0, *bodies[:-1]]
        links = np.stack([_between(model, *pair) for pair in zip(parents, bodies, strict=True)])
        tool = _between(model, bodies[-1], int(model.site_bodyid[site]))
        self._tool = tool @ transform(model.site_pos[site], model.site_quat[site])
        self._axes: NDArray[np.float64] = model.jnt_axis[joints][:, :, None].copy()
        # Rodrigues' formula, R = I + sin(q) K + (1 - cos(q)) K K, multiplied from the left by the fixed part of a link.
        cross = np.stack([_cross_matrix(axis) for axis in model.jnt_axis[joints]])
        self._links = links
        self._sines = links @ cross
        self._cosines = links @ cross @ cross

    def __call__(self, joint_rad: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """(R, 4, 4) T_world_grip at angles (R, J) in rad, and its Jacobian (R, 6, J).

        Rows of the Jacobian: velocity of the grip's origin (m/s), then angular velocity (rad/s), in world axes.
        """
        sine, cosine = np.sin(joint_rad)[..., None, None], np.cos(joint_rad)[..., None, None]
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
    data.ctrl[[int(model.actuator(name).id) for name in (*arm.joints, arm.gripper)]] = pose[:-1]
    # Targets pass through a filter whose state must start at them, or the arm would move from zero angles.
    data.act[:] = data.ctrl[np.flatnonzero(model.actuator_actadr >= 0)]


def find_arm(name: str) -> ArmModel:
    """Row of `ARMS` with a name; raises UserError if it does not exist."""
    if name not in ARMS:
        raise UserError(f"unknown arm {name!r}; available: {', '.join(ARMS)}")
    return ARMS[name]


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
