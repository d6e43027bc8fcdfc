"""An image with exact depth: a red sphere above a grey plane, seen from the side of the robot's workspace."""

import numpy as np

from robotics.flow3d.clip import Observation
from robotics.flow3d.geometry import intrinsics, make_pose

CENTRE, RADIUS_M = np.array([0.5, 0.0, 0.03]), 0.03
SIDE_PX = 128


def look_at(eye, target):
    forward = (target - eye) / np.linalg.norm(target - eye)
    right = np.cross(forward, [0.0, 0.0, 1.0])
    right /= np.linalg.norm(right)
    return make_pose(np.stack([right, np.cross(forward, right), forward], -1), eye)


def drawn_sphere(centre=CENTRE, instruction="move the ball", side_px=SIDE_PX, eye=(1.1, 0.1, 0.6)):
    """The observation, rays cast in closed form."""
    K = intrinsics((side_px, side_px), fov_y_rad=0.5)
    T = look_at(np.array(eye), np.array([0.5, 0.0, 0.03]))
    v, u = np.meshgrid(np.arange(side_px) + 0.5, np.arange(side_px) + 0.5, indexing="ij")
    rays_cam = np.stack([(u - K[0, 2]) / K[0, 0], (v - K[1, 2]) / K[1, 1], np.ones_like(u)], -1)
    rays, eye = rays_cam @ T[:3, :3].T, T[:3, 3]
    plane = -eye[2] / rays[..., 2]
    a, b = (rays**2).sum(-1), rays @ (eye - centre)
    root = b**2 - a * (((eye - centre) ** 2).sum() - RADIUS_M**2)
    mask = root > 0
    depth = np.where(mask, (-b - np.sqrt(np.maximum(root, 0))) / a, plane)
    rgb = np.where(mask[..., None], [200, 30, 30], 120 + 10 * ((u // 8 + v // 8) % 2)[..., None]).astype(np.uint8)
    return Observation(rgb, depth.astype(np.float32), K, T, instruction, mask)
