"""The planner's robot interface: an environment of the suite, a user's simulator, or a real arm."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from robotics.flow3d.geometry import FloatArray

if TYPE_CHECKING:
    import mujoco

    from robotics.flow3d.clip import Observation


class FlowArm(Protocol):
    """An arm without its surroundings; its base is at the origin of the world frame.

    The frame of the grip site has z along the fingers, towards the object, and y along the closing direction.
    """

    @property
    def name(self) -> str:
        """Name in reports."""

    @property
    def joints(self) -> tuple[str, ...]:
        """Joints from base to hand: hinges, or slides in metres instead of radians."""

    @property
    def home_rad(self) -> tuple[float, ...]:
        """Angles at the start of an episode."""

    @property
    def grip_site(self) -> str:
        """Site between the fingertips."""

    @property
    def max_opening_m(self) -> float:
        """Greatest width between the fingers."""

    def load(self) -> mujoco.MjModel:
        """The arm alone, without table and objects, for kinematics."""


class FlowRobot(Protocol):
    """An arm in a scene."""

    @property
    def arm(self) -> FlowArm:
        """The arm."""

    def observe(self) -> Observation:
        """Current image, depth, camera and instruction."""

    def joint_rad(self) -> FloatArray:
        """(J,) current angles."""

    def move(self, joint_rad: FloatArray) -> bool:
        """Follow angles (M, J) with the fingers unchanged; returns whether the last ones were reached."""

    def close_gripper(self) -> bool:
        """Close the fingers; returns whether they hold something."""

    def open_gripper(self) -> None:
        """Open the fingers."""
