"""Clearance of arm and hand from the table, the object and the rest of the scene.

Shapes are boxes around the geoms of the arm's model with open fingers, which errs on the safe side.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from robotics.flow3d.geometry import FloatArray, IndexArray, apply_pose, inverse_pose, make_pose

if TYPE_CHECKING:
    import mujoco

    from robotics.flow3d.kinematics import FlowArm

SKIPPED_LINKS = 2
"""Links at the base that cannot reach the table."""


class ArmClearance:
    """Boxes around an arm's links."""

    def __init__(self, arm: FlowArm) -> None:
        import mujoco

        self._model = model = arm.load()
        self._data = mujoco.MjData(model)
        self._joints = [int(model.joint(name).qposadr[0]) for name in arm.joints]
        self._data.qpos[:] = _open_posture(model, self._joints)
        links = [int(model.joint(name).bodyid[0]) for name in arm.joints]
        mujoco.mj_kinematics(model, self._data)
        self._low_geoms = _geoms_below(model, links[min(SKIPPED_LINKS, len(links) - 1)])
        hand = _geoms_below(model, links[-1])
        site = int(model.site(arm.grip_site).id)
        T_grip_world = inverse_pose(_frame(self._data.site_xmat[site], self._data.site_xpos[site]))
        self._boxes = T_grip_world @ _frame(self._data.geom_xmat[hand], self._data.geom_xpos[hand])
        self._boxes[:, :3, 3] += np.einsum("gij,gj->gi", self._boxes[:, :3, :3], model.geom_aabb[hand, :3])
        self._halves = model.geom_aabb[hand, 3:].copy()

    def lowest_m(self, joint_rad: FloatArray) -> FloatArray:
        """(M,) height of the lowest corner of the arm, without its base, at angles (M, J)."""
        import mujoco

        geoms = self._low_geoms
        centre, half = self._model.geom_aabb[geoms, :3], self._model.geom_aabb[geoms, 3:]
        lowest = np.empty(len(joint_rad))
        for row, angles in enumerate(joint_rad):
            self._data.qpos[self._joints] = angles
            mujoco.mj_kinematics(self._model, self._data)
            up = self._data.geom_xmat[geoms].reshape(-1, 3, 3)[:, 2]
            height = self._data.geom_xpos[geoms, 2] + (up * centre).sum(-1) - (np.abs(up) * half).sum(-1)
            lowest[row] = height.min()
        return lowest

    def hand_points_m(self, T_world_grip: FloatArray) -> FloatArray:
        """(n, 3) corners, edges and centers of the hand's boxes at a pose (4, 4) of the grip."""
        grid = np.stack(np.meshgrid(*[(-1.0, 0.0, 1.0)] * 3), -1).reshape(-1, 3)
        return apply_pose(T_world_grip @ self._boxes, grid * self._halves[:, None]).reshape(-1, 3)

    def inside(self, T_world_grip: FloatArray, points_m: FloatArray, margin_m: float = 0.0) -> IndexArray:
        """(M,) number of points (n, 3) inside the hand at poses (M, 4, 4) of the grip."""
        to_boxes = inverse_pose(T_world_grip[:, None] @ self._boxes[None])
        local = np.einsum("mgij,nj->mgni", to_boxes[..., :3, :3], points_m) + to_boxes[..., None, :3, 3]
        within = (np.abs(local) <= np.maximum(self._halves + margin_m, 0.0)[None, :, None]).all(-1)
        return within.any(1).sum(-1)


def _open_posture(model: mujoco.MjModel, arm_joints: list[int]) -> FloatArray:
    """The default posture with the fingers' joints at the upper end of their range."""
    posture: FloatArray = model.qpos0.copy()
    for joint in np.flatnonzero(model.jnt_limited):
        if int(model.jnt_qposadr[joint]) not in arm_joints:
            posture[model.jnt_qposadr[joint]] = model.jnt_range[joint, 1]
    return posture


def _geoms_below(model: mujoco.MjModel, ancestor: int) -> IndexArray:
    """Geoms of a body and of its descendants."""
    members = {ancestor}
    for body in range(ancestor + 1, model.nbody):  # parents come before their children
        if int(model.body_parentid[body]) in members:
            members.add(body)
    return np.flatnonzero(np.isin(model.geom_bodyid, list(members)))


def _frame(rotation: FloatArray, position_m: FloatArray) -> FloatArray:
    return make_pose(rotation.reshape(*position_m.shape[:-1], 3, 3), position_m)
