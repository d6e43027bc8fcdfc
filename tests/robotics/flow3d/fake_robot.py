"""A robot without physics: a sphere that follows the hand while it is held, rendered with exact depth."""

import numpy as np

from robotics.flow3d.clip import FlowClip, grid_in_mask
from robotics.flow3d.geometry import apply_pose, depth_at, inverse_pose, lift, make_pose, project
from robotics.flow3d.kinematics import ArmIk
from tests.robotics.flow3d.drawn import CENTRE, RADIUS_M, drawn_sphere


class FakeRobot:
    """Kinematics only; `slip_after` moves after the grasp the object falls straight down."""

    def __init__(self, arm, *, misses=0, slip_after=None, nudge_m=(0.0, 0.0, 0.0)):
        self.arm, self.ik = arm, ArmIk(arm)
        self.joints, self.centre = np.array(arm.home_rad), CENTRE.copy()
        self.misses, self.slip_after, self.nudge_m = misses, slip_after, np.array(nudge_m)
        self.held, self.moves_held, self.paths, self.opened = None, 0, [], 0

    def observe(self):
        return drawn_sphere(self.centre)

    def joint_rad(self):
        return self.joints.copy()

    def move(self, joint_rad):
        self.paths.append(joint_rad)
        self.joints = np.array(joint_rad[-1])
        if self.held is None:
            return True
        self.moves_held += 1
        self.centre = (self.ik.pose(self.joints) @ self.held)[:3]
        if self.slip_after == self.moves_held:
            if self.nudge_m.any():
                self.centre = self.centre + self.nudge_m
                self.held = np.linalg.inv(self.ik.pose(self.joints)) @ [*self.centre, 1.0]
            else:
                self.centre[2], self.held = RADIUS_M, None
        return True

    def close_gripper(self):
        near = np.linalg.norm(self.ik.pose(self.joints)[:3, 3] - self.centre) < RADIUS_M
        if self.misses or not near:
            self.misses -= 1
            return False
        self.held = np.linalg.inv(self.ik.pose(self.joints)) @ [*self.centre, 1.0]
        return True

    def open_gripper(self):
        self.opened += 1
        self.held = None


class StraightModel:
    """Predicts that the object moves along an arc to a goal; each seed may aim up to `spread_m` away along y."""

    def __init__(self, goal_m, frames=8, spread_m=0.0):
        self.goal_m, self.frames, self.spread_m, self.seeds = np.array(goal_m), frames, spread_m, []

    def predict(self, observation, points, samples=1, seed=0):
        self.seeds.append(seed)
        start = lift(points, observation.K).reshape(-1, 3)
        world = apply_pose(observation.T_world_cam, start)
        mask = observation.mask
        seen = np.concatenate([grid_in_mask(mask, 8).reshape(-1, 2)])
        cloud = apply_pose(
            observation.T_world_cam,
            lift(np.concatenate([seen, depth_at(observation.depth_m, seen)[:, None]], -1), observation.K),
        )
        # the seen half of a sphere tells its middle by least squares
        A = np.concatenate([2 * cloud, np.ones((len(cloud), 1))], -1)
        middle = np.linalg.lstsq(A, (cloud**2).sum(-1), rcond=None)[0][:3]
        way = self.goal_m + np.array([0, self.spread_m * (seed % 4), 0]) - middle
        shares = np.linspace(0, 1, self.frames + 1)[1:]
        lifts = np.sin(np.pi * shares) * 0.08
        T = np.stack([make_pose(np.eye(3), way * s + [0, 0, up]) for s, up in zip(shares, lifts, strict=True)])
        moved = project(apply_pose(inverse_pose(observation.T_world_cam), apply_pose(T, world)), observation.K)
        side = points.shape[0]
        flow = np.concatenate([moved, np.ones((*moved.shape[:-1], 1))], -1).reshape(self.frames, side, side, 4)
        return np.repeat(flow[None], samples, axis=0)


def clip_to(goal_m, frames=8):
    observation = drawn_sphere()
    uv = grid_in_mask(observation.mask, 4)
    points = np.concatenate([uv, depth_at(observation.depth_m, uv)[..., None]], -1)
    return FlowClip(observation, points, StraightModel(goal_m, frames).predict(observation, points)[0])
