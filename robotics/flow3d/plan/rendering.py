"""Renders the predicted outcome: the object's points moved, the scene without it, from the same camera.

Source: arXiv 2506.06199, flow-guided rendering; Hoyyyaard/3DFlowAction scripts/flow_generation/viz_3d_flow_batch.py.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, TypeAlias

import numpy as np

from mmrl.errors import UserError
from robotics.flow3d.clip import Observation
from robotics.flow3d.geometry import BoolArray, FloatArray, ImageArray, apply_pose, inverse_pose, project
from robotics.flow3d.plan.clouds import scene_cloud

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
