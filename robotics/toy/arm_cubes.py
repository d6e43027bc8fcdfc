"""The scene of the rendering benchmark and of the documentation's first example."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from robotics.scenes.arms import ASSETS

if TYPE_CHECKING:
    import mujoco
    from numpy.typing import NDArray

    from robotics.sim.interface import SceneSteps

ARM_CUBES = ASSETS / "arm_cubes.xml"


def load_arm_cubes() -> mujoco.MjModel:
    """Load a 6-axis arm with a gripper and two cubes on a table, seen by the camera `front`.

    8 position actuators (6 joint angles in radians, 2 fingers in metres), the sensors `grip_pos`, `red_cube_pos` and
    `green_cube_pos` (world frame, metres) and the keyframe `home`. Lights cast shadows as by MuJoCo's defaults.
    """
    import mujoco

    return mujoco.MjModel.from_xml_path(str(ARM_CUBES))


class ReachCube:
    """Bring the grip to the red cube: reward is minus the distance, done within reach of it.

    Args:
        model: model of `load_arm_cubes`.
        reach_m: distance between grip and cube centre that counts as success.
    """

    def __init__(self, model: mujoco.MjModel, reach_m: float = 0.04) -> None:
        self.reach_m = reach_m
        self._home = model.key("home").id
        self._cubes = [int(model.body(name).jntadr[0]) for name in ("red_cube", "green_cube")]
        self._grip, self._red = (_columns(model, name) for name in ("grip_pos", "red_cube_pos"))

    def reset(self, model: mujoco.MjModel, data: mujoco.MjData, rng: np.random.Generator) -> None:
        """Put the arm into its home pose and the cubes on either side of the table."""
        import mujoco

        mujoco.mj_resetDataKeyframe(model, data, self._home)
        for side, joint in zip((-1, 1), self._cubes, strict=True):
            start = model.jnt_qposadr[joint]
            data.qpos[start : start + 2] = rng.uniform(0.3, 0.55), side * rng.uniform(0.06, 0.25)

    def score(self, steps: SceneSteps) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
        """Reward and success of each control step."""
        distance = np.linalg.norm(steps.sensordata[:, self._grip] - steps.sensordata[:, self._red], axis=1)
        return -distance, distance < self.reach_m


def _columns(model: mujoco.MjModel, sensor: str) -> slice:
    start, size = int(model.sensor(sensor).adr[0]), int(model.sensor(sensor).dim[0])
    return slice(start, start + size)
