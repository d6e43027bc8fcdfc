"""What the planner needs of a robot: an environment of the suite, a user's own simulator, or a real arm."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import mujoco
    import numpy as np
    from numpy.typing import NDArray

    from robotics.flow3d.clip import Observation


class FlowArm(Protocol):
    """An arm on its own; its base stands at the origin of the world frame.

    The frame of the grip site has z along the fingers, towards the object, and y along the line on which they close.
    """

    @property
    def name(self) -> str:
        """What it is called in reports."""

    @property
    def joints(self) -> tuple[str, ...]:
        """Joints from the base to the hand: hinges, or slides with metres in place of radians."""

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
    """An arm in front of something to do."""

    @property
    def arm(self) -> FlowArm:
        """Its kinematics."""

    def observe(self) -> Observation:
        """Picture, depth, camera and instruction now."""

    def joint_rad(self) -> NDArray[np.float64]:
        """(J,) angles now."""

    def move(self, joint_rad: NDArray[np.float64]) -> bool:
        """Follow a path with the fingers as they are.

        Args:
            joint_rad: (M, J) angles, one after the other.
        """

    def close_gripper(self) -> bool:
        """Close the fingers; returns whether they hold something."""

    def open_gripper(self) -> None:
        """Open the fingers."""
