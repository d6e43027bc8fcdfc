"""Point clouds of an observation, and the predicted outcome rendered: the object's points moved, from the same camera.

Source: arXiv 2506.06199, flow-guided rendering; Hoyyyaard/3DFlowAction scripts/flow_generation/viz_3d_flow_batch.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np

from robotics.flow3d.clip import Observation
from robotics.flow3d.clouds import distances_m, draw_points, world_points
from robotics.flow3d.geometry import BoolArray, FloatArray, ImageArray, apply_pose, inverse_pose, project

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
    pixels, known = world_points(observation)
    found = known.copy()
    # without a mask, the flow's points are all that is known about the object
    near = distances_m(pixels[known], points_world_m) <= reach_m
    found[known] = near & (pixels[known][:, 2] >= points_world_m[:, 2].min() - 1e-9)
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


HOLE_PX = 1
"""Gaps of up to twice this width in a rendered surface are closed."""
INPAINT_PX = 3.0
"""Neighbourhood from which a hole is filled."""


def render_outcome(observation: Observation, mask: BoolArray, T_t_0_world: FloatArray) -> ImageArray:
    """(H, W, 3) image of the scene with the object, its mask (H, W), moved by (4, 4), from the observation's camera.

    The background that the object hid is inpainted.
    """
    draw, cloud = partial(draw_points, K=observation.K, size_px=observation.size_px), scene_cloud(observation, mask)
    T_cam_world = inverse_pose(observation.T_world_cam)
    # the scene without the object first: what the object hid before the motion shows afterwards
    behind, far = draw(apply_pose(T_cam_world, cloud.rest_m), cloud.rest_rgb)
    background = _inpaint(behind, ~np.isfinite(far))
    moved = apply_pose(T_t_0_world, cloud.object_m)
    thing, near = draw(apply_pose(T_cam_world, moved), cloud.object_rgb)
    drawn = np.isfinite(near)
    # one pixel per point leaves gaps where the object comes closer to the camera
    closed = _closed(drawn)
    thing, near = _inpaint(thing, closed & ~drawn, among=drawn), _nearest(near, closed & ~drawn)
    # the moved object may end up behind something
    front = closed & (near <= np.where(np.isfinite(far), far, np.inf))
    return np.where(front[..., None], thing, background)


def _closed(drawn: BoolArray) -> BoolArray:
    """A drawn region without its gaps."""
    from scipy.ndimage import binary_closing

    square = np.ones((2 * HOLE_PX + 1,) * 2, dtype=np.bool_)
    # closing erodes from the border, so regions at the edge of the image would lose pixels
    padded = np.pad(drawn, 2 * HOLE_PX)
    inner = slice(2 * HOLE_PX, -2 * HOLE_PX)
    closed: BoolArray = binary_closing(padded, square)[inner, inner]
    return closed


def _nearest(depth: FloatArray, holes: BoolArray) -> FloatArray:
    """Depth with holes filled from the nearest pixel that has one."""
    from scipy.ndimage import distance_transform_edt

    known = np.isfinite(depth)
    if not known.any():
        return depth
    rows, columns = distance_transform_edt(~known, return_distances=False, return_indices=True)
    return np.where(holes, depth[rows, columns], depth)


def _inpaint(image: ImageArray, holes: BoolArray, among: BoolArray | None = None) -> ImageArray:
    """Fill holes from their surroundings, or only from the pixels `among`."""
    if not holes.any() or holes.all():
        return image
    import cv2

    unknown = holes if among is None else ~among
    if unknown.all():
        return image
    filled: ImageArray = np.asarray(
        cv2.inpaint(np.ascontiguousarray(image), unknown.astype(np.uint8), INPAINT_PX, cv2.INPAINT_TELEA)
    )
    return np.where(holes[..., None], filled, image)


POINTS, REPLAY = "open3d", "replay"
"""Renderers of a predicted outcome: the points of the image, or the simulator; see `FlowPlanner`."""
RENDERERS = (POINTS, REPLAY)
