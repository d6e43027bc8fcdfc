"""Arms of the flow scenes: those of `robotics.sim`, starting out of the camera's way, and others."""

from __future__ import annotations

import dataclasses

from robotics.sim.arms import ARMS, ArmModel

__all__ = ["FLOW_ARMS", "HELD_OUT_ARMS"]

HELD_OUT_ARMS = ("ur5e",)
"""Arms that training data do not show by default."""

FLOW_ARMS: dict[str, ArmModel] = {
    # Drawn back to x = 0.25 m and z = 0.4 m, so that the table is seen.
    "panda": dataclasses.replace(ARMS["panda"], home_rad=(0.0, -1.0294, 0.0, -2.6999, 0.0, 1.6706, 0.7854)),
    "ur5e": dataclasses.replace(ARMS["ur5e"], home_rad=(-2.1364, -2.2458, 1.9651, -1.2901, -1.5708, -2.1364)),
}
