"""Arms of the flow scenes: those of `robotics.sim`, starting out of the camera's way, and others.

The free gripper is an arm with slides, whose "radians" are metres.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from robotics.sim.arms import ARMS, ArmModel

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
