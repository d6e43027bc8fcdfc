"""Point clouds of an observation, and the predicted outcome rendered: the object's points moved, from the same camera.

Source: arXiv 2506.06199, flow-guided rendering; Hoyyyaard/3DFlowAction scripts/flow_generation/viz_3d_flow_batch.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, TypeAlias

import numpy as np

from mmrl.errors import UserError
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


HOLE_PX = 1
"""Gaps of up to twice this width in a rendered surface are closed."""
INPAINT_PX = 3.0
"""Neighbourhood from which a hole is filled."""

Renderer: TypeAlias = Callable[..., "tuple[ImageArray, FloatArray]"]
"""(points (n, 3) in the camera frame, colours (n, 3), observation) -> image (H, W, 3) and depth (H, W), infinite where
nothing was drawn."""


def render_outcome(
    observation: Observation, mask: BoolArray, T_t_0_world: FloatArray, renderer: str = "numpy"
) -> ImageArray:
    """(H, W, 3) image of the scene with the object, its mask (H, W), moved by (4, 4), from the observation's camera.

    The background that the object hid is inpainted.
    """
    check_renderer(renderer)
    draw, cloud = RENDERERS[renderer], scene_cloud(observation, mask)
    T_cam_world = inverse_pose(observation.T_world_cam)
    # the scene without the object first: what the object hid before the motion shows afterwards
    behind, far = draw(apply_pose(T_cam_world, cloud.rest_m), cloud.rest_rgb, observation)
    background = _inpaint(behind, ~np.isfinite(far))
    moved = apply_pose(T_t_0_world, cloud.object_m)
    thing, near = draw(apply_pose(T_cam_world, moved), cloud.object_rgb, observation)
    drawn = np.isfinite(near)
    # one pixel per point leaves gaps where the object comes closer to the camera
    closed = _closed(drawn)
    thing, near = _inpaint(thing, closed & ~drawn, among=drawn), _nearest(near, closed & ~drawn)
    # the moved object may end up behind something
    front = closed & (near <= np.where(np.isfinite(far), far, np.inf))
    return np.where(front[..., None], thing, background)


def check_renderer(renderer: str) -> None:
    """Raise UserError for an unknown renderer, or without open3d or OpenCV."""
    if renderer not in RENDERERS:
        raise UserError(f"renderer is {renderer!r}; there are {', '.join(RENDERERS)}")
    if renderer == "open3d" and not find_spec("open3d"):
        raise UserError("the renderer open3d needs open3d, which is not installed; use numpy")
    if not find_spec("cv2"):
        raise UserError("rendering needs OpenCV; pip install opencv-python-headless")


def draw_with_numpy(
    points_cam_m: FloatArray, rgb: ImageArray, observation: Observation
) -> tuple[ImageArray, FloatArray]:
    """Each point colours one pixel, far ones first; see `Renderer`."""
    width, height = observation.size_px
    image, depth = np.zeros((height, width, 3), np.uint8), np.full((height, width), np.inf)
    uvz = project(points_cam_m, observation.K)
    uvz, rgb = uvz[uvz[:, 2] > 0], rgb[uvz[:, 2] > 0]
    inside = (uvz[:, 0] >= 0) & (uvz[:, 0] < width) & (uvz[:, 1] >= 0) & (uvz[:, 1] < height)
    uvz, rgb = uvz[inside], rgb[inside]
    # the nearest point of a pixel is written last
    order = np.argsort(-uvz[:, 2], kind="stable")
    u, v = uvz[order, 0].astype(int), uvz[order, 1].astype(int)
    image[v, u], depth[v, u] = rgb[order], uvz[order, 2]
    return image, depth


def draw_with_open3d(
    points_cam_m: FloatArray, rgb: ImageArray, observation: Observation
) -> tuple[ImageArray, FloatArray]:
    """open3d's projection of a point cloud, without a display; see `Renderer`."""
    import open3d

    core, width, height = open3d.core, *observation.size_px
    if len(points_cam_m) == 0:
        return np.zeros((height, width, 3), np.uint8), np.full((height, width), np.inf)
    cloud: Any = open3d.t.geometry.PointCloud(core.Tensor(points_cam_m.astype(np.float32)))
    cloud.point.colors = core.Tensor(rgb.astype(np.float32) / 255)
    K = observation.K.copy()
    K[:2, 2] -= 0.5  # open3d has pixel centers at integers
    image = cloud.project_to_rgbd_image(
        width, height, core.Tensor(K), depth_scale=1.0, depth_max=float(points_cam_m[:, 2].max()) + 1.0
    )
    depth = np.asarray(image.depth.as_tensor().numpy(), dtype=np.float64).reshape(height, width)
    image = np.rint(255 * np.asarray(image.color.as_tensor().numpy())).clip(0, 255).astype(np.uint8)
    return image, np.where(depth > 0, depth, np.inf)


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


RENDERERS: dict[str, Renderer] = {"numpy": draw_with_numpy, "open3d": draw_with_open3d}
REPLAY = "replay"
"""Renderer by the simulator, with the object at the end of the plan; see `FlowPlanner`."""
