"""The points of an observation in the world frame: those of the object, and the rest of the scene."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from robotics.flow3d.clip import Observation
from robotics.flow3d.geometry import BoolArray, FloatArray, ImageArray, apply_pose, inverse_pose, lift, project

DILATE_PX = 2
"""Width of the border around the object's mask that belongs to neither part, since masks and depth disagree there."""
HIDDEN_M = (0.01, 0.1)
"""Range of distances behind a surface at which a position counts as inside of something."""


@dataclass(frozen=True)
class SceneCloud:
    """Coloured points of an observation."""

    object_m: FloatArray
    """(n, 3) of the object, in the world frame."""
    object_rgb: ImageArray
    """(n, 3)."""
    rest_m: FloatArray
    """(m, 3) of everything else."""
    rest_rgb: ImageArray
    """(m, 3)."""


def world_points(observation: Observation) -> tuple[FloatArray, BoolArray]:
    """(H, W, 3) points of the pixels in the world frame, and (H, W) whether their depth is known."""
    width, height = observation.size_px
    known = np.isfinite(observation.depth_m) & (observation.depth_m > 0)
    v, u = np.meshgrid(np.arange(height) + 0.5, np.arange(width) + 0.5, indexing="ij")
    uvz = np.stack([u, v, np.where(known, observation.depth_m, 1.0).astype(np.float64)], -1)
    points = apply_pose(observation.T_world_cam, lift(uvz, observation.K).reshape(-1, 3))
    return points.reshape(height, width, 3), known


def object_points(observation: Observation, mask: BoolArray) -> FloatArray:
    """(n, 3) points in the world frame of those pixels of a mask (H, W) that have a depth."""
    points, known = world_points(observation)
    return points[mask & known]


def scene_cloud(observation: Observation, mask: BoolArray, dilate_px: int = DILATE_PX) -> SceneCloud:
    """Split the pixels with depth into the object, a mask (H, W), and the rest."""
    from scipy.ndimage import binary_dilation

    points, known = world_points(observation)
    around = np.ones((2 * dilate_px + 1,) * 2, dtype=np.bool_)
    grown = binary_dilation(mask, around) if dilate_px else mask
    inside, outside = mask & known, ~grown & known
    return SceneCloud(points[inside], observation.rgb[inside], points[outside], observation.rgb[outside])


def find_object(observation: Observation, points_world_m: FloatArray, reach_m: float = 0.02) -> BoolArray:
    """(H, W) pixels of the object, of which only points (n, 3) are known: those within `reach_m` of a point.

    Pixels below the lowest of the points belong to the support.
    """
    if observation.mask is not None:
        return observation.mask
    from scipy.spatial import cKDTree

    pixels, known = world_points(observation)
    distance, _ = cKDTree(points_world_m).query(pixels.reshape(-1, 3))
    # without a mask, the flow's points are all that is known about the object
    near = distance.reshape(known.shape) <= reach_m
    found: BoolArray = known & near & (pixels[..., 2] >= points_world_m[:, 2].min() - 1e-9)
    return found


def hidden_points(observation: Observation, mask: BoolArray, points_m: FloatArray) -> BoolArray:
    """(n,) whether points (n, 3) in the world frame are hidden 1 to 10 cm behind the scene's surface.

    Deeper points may be free again, and nearer ones at the surface. The object's pixels, `mask` (H, W), hide nothing,
    since fingers reach around it.
    """
    uvz = project(apply_pose(inverse_pose(observation.T_world_cam), points_m), observation.K)
    width, height = observation.size_px
    ahead = np.where((uvz[:, 2] > 0)[:, None], uvz[:, :2], -1.0)
    inside = ((ahead >= 0) & (ahead < [width, height])).all(-1)
    columns, rows = np.where(inside, ahead.T, 0.0).astype(int)
    seen = observation.depth_m[rows, columns]
    scene = inside & ~mask[rows, columns] & np.isfinite(seen) & (seen > 0)
    # infinitely far where nothing is known, so that nothing counts as hidden there
    behind = uvz[:, 2] - np.where(scene, seen, np.inf)
    hidden: BoolArray = (behind > HIDDEN_M[0]) & (behind < HIDDEN_M[1])
    return hidden


def normals_towards(points_m: FloatArray, viewpoint_m: FloatArray, neighbours: int = 12) -> FloatArray:
    """Normals of points (n >= 3, 3), from the least spread of their neighbours, towards a viewpoint (3,)."""
    from scipy.spatial import cKDTree

    _, near = cKDTree(points_m).query(points_m, k=min(neighbours, len(points_m)))
    around = points_m[near] - points_m[near].mean(1, keepdims=True)
    _, vectors = np.linalg.eigh(np.swapaxes(around, 1, 2) @ around)
    normals = vectors[:, :, 0]
    facing = ((viewpoint_m - points_m) * normals).sum(-1, keepdims=True)
    # an eigenvector has no sign; what the camera sees faces it
    return np.where(facing < 0, -normals, normals)
