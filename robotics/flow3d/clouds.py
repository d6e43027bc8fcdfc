"""The points of an observation in the world frame: those of the object, and the rest of the scene."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from robotics.flow3d.geometry import apply_pose, inverse_pose, lift, project

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from robotics.flow3d.clip import Observation

DILATE_PX = 2
"""Pixels around the object's mask that belong to neither part, since masks and depth disagree there."""
HIDDEN_M = (0.01, 0.1)
"""Ways behind a surface between which a place is held to be inside of something."""


@dataclass(frozen=True)
class SceneCloud:
    """Coloured points of an observation."""

    object_m: NDArray[np.float64]
    """(n, 3) of the object, in the world frame."""
    object_rgb: NDArray[np.uint8]
    """(n, 3)."""
    rest_m: NDArray[np.float64]
    """(m, 3) of everything else."""
    rest_rgb: NDArray[np.uint8]
    """(m, 3)."""


def world_points(observation: Observation) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Where each pixel lies.

    Returns:
        (H, W, 3) points in the world frame, and (H, W) whether the depth is known; the other points mean nothing.
    """
    width, height = observation.size_px
    known = np.isfinite(observation.depth_m) & (observation.depth_m > 0)
    v, u = np.meshgrid(np.arange(height) + 0.5, np.arange(width) + 0.5, indexing="ij")
    uvz = np.stack([u, v, np.where(known, observation.depth_m, 1.0).astype(np.float64)], -1)
    points = apply_pose(observation.T_world_cam, lift(uvz, observation.K).reshape(-1, 3))
    return points.reshape(height, width, 3), known


def object_points(observation: Observation, mask: NDArray[np.bool_]) -> NDArray[np.float64]:
    """(n, 3) points in the world frame of those pixels of a mask (H, W) that have a depth."""
    points, known = world_points(observation)
    return points[mask & known]


def scene_cloud(observation: Observation, mask: NDArray[np.bool_], dilate_px: int = DILATE_PX) -> SceneCloud:
    """Split an observation into the object and the rest.

    Args:
        observation: picture, depth and camera.
        mask: (H, W) pixels of the object.
        dilate_px: width of the border around the mask that is left out.

    Returns:
        The points; pixels without depth are left out.
    """
    from scipy.ndimage import binary_dilation

    points, known = world_points(observation)
    around = np.ones((2 * dilate_px + 1,) * 2, dtype=np.bool_)
    grown = binary_dilation(mask, around) if dilate_px else mask
    inside, outside = mask & known, ~grown & known
    return SceneCloud(points[inside], observation.rgb[inside], points[outside], observation.rgb[outside])


def find_object(
    observation: Observation, points_world_m: NDArray[np.float64], reach_m: float = 0.02
) -> NDArray[np.bool_]:
    """Pixels of the object where only some points on it are known: those that are connected to them in space.

    Args:
        observation: depth and camera; its own mask is returned where it has one.
        points_world_m: (n, 3) points on the object.
        reach_m: distance from a known point within which a pixel belongs to the object. Pixels as low as the lowest
            of the points belong to what the object stands on.

    Returns:
        (H, W).
    """
    if observation.mask is not None:
        return observation.mask
    from scipy.spatial import cKDTree

    pixels, known = world_points(observation)
    distance, _ = cKDTree(points_world_m).query(pixels.reshape(-1, 3))
    near = distance.reshape(known.shape) <= reach_m
    found: NDArray[np.bool_] = known & near & (pixels[..., 2] >= points_world_m[:, 2].min() - 1e-9)
    return found


def hidden_places(
    observation: Observation, mask: NDArray[np.bool_], places_m: NDArray[np.float64]
) -> NDArray[np.bool_]:
    """Which places lie close behind the surface of the scene.

    Args:
        observation: depth and camera.
        mask: (H, W) pixels of the object, which hides nothing here: fingers reach around it.
        places_m: (n, 3) in the world frame.

    Returns:
        (n,), true from 1 cm to 10 cm behind a pixel of the scene: what lies deeper may be free again, and what lies
        nearer may be at the surface.
    """
    uvz = project(apply_pose(inverse_pose(observation.T_world_cam), places_m), observation.K)
    width, height = observation.size_px
    ahead = np.where((uvz[:, 2] > 0)[:, None], uvz[:, :2], -1.0)
    inside = ((ahead >= 0) & (ahead < [width, height])).all(-1)
    columns, rows = np.where(inside, ahead.T, 0.0).astype(int)
    seen = observation.depth_m[rows, columns]
    scene = inside & ~mask[rows, columns] & np.isfinite(seen) & (seen > 0)
    behind = uvz[:, 2] - np.where(scene, seen, np.inf)
    hidden: NDArray[np.bool_] = (behind > HIDDEN_M[0]) & (behind < HIDDEN_M[1])
    return hidden


def normals_towards(
    points_m: NDArray[np.float64], viewpoint_m: NDArray[np.float64], neighbours: int = 12
) -> NDArray[np.float64]:
    """Outward normals of a surface: the direction in which its neighbourhood is thinnest, on the side of the viewer.

    Args:
        points_m: (n, 3), n at least 3.
        viewpoint_m: (3,) from where they are seen.
        neighbours: points of a neighbourhood.
    """
    from scipy.spatial import cKDTree

    _, near = cKDTree(points_m).query(points_m, k=min(neighbours, len(points_m)))
    around = points_m[near] - points_m[near].mean(1, keepdims=True)
    _, vectors = np.linalg.eigh(np.swapaxes(around, 1, 2) @ around)
    normals = vectors[:, :, 0]
    facing = ((viewpoint_m - points_m) * normals).sum(-1, keepdims=True)
    return np.where(facing < 0, -normals, normals)
