"""Pose of the piece that a tabletop task acts on."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from robotics.scenes.tabletop import PIECES

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from robotics.scenes.tasks import TabletopScene


def object_poses(
    scene: TabletopScene, qpos: NDArray[np.float64], sensordata: NDArray[np.float64]
) -> NDArray[np.float64]:
    """(R, 4, 4) T_world_object of the task's first piece: of a cube its body, of the drawer its handle.

    Args:
        scene: the task at its table.
        qpos: (R, nq) positions.
        sensordata: (R, nsensordata), see `SceneSensors`.
    """
    name = scene.task.roles.first
    poses = np.tile(np.eye(4), (len(qpos), 1, 1))
    if PIECES[name].kind == "cube":
        body = scene.model.body(PIECES[name].body)
        start = int(scene.model.jnt_qposadr[int(body.jntadr[0])])
        poses[:, :3, 3], poses[:, :3, :3] = qpos[:, start : start + 3], _rotations(qpos[:, start + 3 : start + 7])
        return poses
    reading = scene.sensors.read(sensordata)
    turned = np.stack([np.cos(reading.first_yaw / 2), *np.zeros((2, len(qpos))), np.sin(reading.first_yaw / 2)], -1)
    poses[:, :3, 3], poses[:, :3, :3] = reading.first, _rotations(turned)
    return poses


def _rotations(quaternions: NDArray[np.float64]) -> NDArray[np.float64]:
    """(R, 3, 3) of quaternions (R, 4), w first."""
    w, x, y, z = np.moveaxis(quaternions / np.linalg.norm(quaternions, axis=-1, keepdims=True), -1, 0)
    rows = [
        [1 - 2 * (y * y + z * z), 2 * (x * y - w * z), 2 * (x * z + w * y)],
        [2 * (x * y + w * z), 1 - 2 * (x * x + z * z), 2 * (y * z - w * x)],
        [2 * (x * z - w * y), 2 * (y * z + w * x), 1 - 2 * (x * x + y * y)],
    ]
    return np.moveaxis(np.array(rows), -1, 0)
