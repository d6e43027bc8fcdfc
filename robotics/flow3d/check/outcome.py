"""A picture of the predicted outcome: the object's points moved, the scene without it, and the same camera.

Source: arXiv 2506.06199, flow-guided rendering; Hoyyyaard/3DFlowAction scripts/flow_generation/viz_3d_flow_batch.py.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from mmrl.errors import UserError
from robotics.flow3d.clouds import SceneCloud, scene_cloud
from robotics.flow3d.geometry import apply_pose, inverse_pose, project

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from robotics.flow3d.clip import Observation

HOLE_PX = 1
"""Gaps in a drawn surface up to twice as wide are closed."""
INPAINT_PX = 3.0
"""Neighbourhood from which a hole is filled."""

Drawer: TypeAlias = Callable[..., "tuple[NDArray[np.uint8], NDArray[np.float64]]"]
"""From points (n, 3) in the camera frame, their colours (n, 3) and the camera to a picture (H, W, 3) and its depth
(H, W), infinite where nothing was drawn."""


def moved_cloud(observation: Observation, mask: NDArray[np.bool_], T_t_0_world: NDArray[np.float64]) -> SceneCloud:
    """The predicted scene as points.

    Args:
        observation: before.
        mask: (H, W) pixels of the object.
        T_t_0_world: (4, 4) motion of the object.
    """
    cloud = scene_cloud(observation, mask)
    moved = apply_pose(T_t_0_world, cloud.object_m)
    return SceneCloud(moved, cloud.object_rgb, cloud.rest_m, cloud.rest_rgb)


def render_outcome(
    observation: Observation,
    mask: NDArray[np.bool_],
    T_t_0_world: NDArray[np.float64],
    renderer: str = "numpy",
) -> NDArray[np.uint8]:
    """Draw the predicted scene into the camera of the observation.

    Args:
        observation: before.
        mask: (H, W) pixels of the object.
        T_t_0_world: (4, 4) motion of the object.
        renderer: row of `RENDERERS`.

    Returns:
        (H, W, 3); what was hidden behind the object is guessed from its surroundings.
    """
    check_renderer(renderer)
    draw, cloud = RENDERERS[renderer], moved_cloud(observation, mask, T_t_0_world)
    T_cam_world = inverse_pose(observation.T_world_cam)
    behind, far = draw(apply_pose(T_cam_world, cloud.rest_m), cloud.rest_rgb, observation)
    background = _inpaint(behind, ~np.isfinite(far))
    thing, near = draw(apply_pose(T_cam_world, cloud.object_m), cloud.object_rgb, observation)
    drawn = np.isfinite(near)
    closed = _closed(drawn)
    thing, near = _inpaint(thing, closed & ~drawn, among=drawn), _nearest(near, closed & ~drawn)
    front = closed & (near <= np.where(np.isfinite(far), far, np.inf))
    return np.where(front[..., None], thing, background)


def check_renderer(renderer: str) -> None:
    """Raise UserError where there is no such row of `RENDERERS`, or open3d or OpenCV is not installed."""
    if renderer not in RENDERERS:
        raise UserError(f"renderer is {renderer!r}; there are {', '.join(RENDERERS)}")
    if renderer == "open3d" and not find_spec("open3d"):
        raise UserError("the renderer open3d needs open3d, which is not installed; take numpy")
    if not find_spec("cv2"):
        raise UserError("pictures of outcomes need OpenCV; pip install opencv-python-headless")


def draw_with_numpy(
    points_cam_m: NDArray[np.float64], rgb: NDArray[np.uint8], observation: Observation
) -> tuple[NDArray[np.uint8], NDArray[np.float64]]:
    """Each point colours one pixel, far ones first; see `Drawer`."""
    width, height = observation.size_px
    picture, depth = np.zeros((height, width, 3), np.uint8), np.full((height, width), np.inf)
    uvz = project(points_cam_m, observation.K)
    uvz, rgb = uvz[uvz[:, 2] > 0], rgb[uvz[:, 2] > 0]
    inside = (uvz[:, 0] >= 0) & (uvz[:, 0] < width) & (uvz[:, 1] >= 0) & (uvz[:, 1] < height)
    uvz, rgb = uvz[inside], rgb[inside]
    order = np.argsort(-uvz[:, 2], kind="stable")
    u, v = uvz[order, 0].astype(int), uvz[order, 1].astype(int)
    picture[v, u], depth[v, u] = rgb[order], uvz[order, 2]
    return picture, depth


def draw_with_open3d(
    points_cam_m: NDArray[np.float64], rgb: NDArray[np.uint8], observation: Observation
) -> tuple[NDArray[np.uint8], NDArray[np.float64]]:
    """open3d's projection of a point cloud, which needs no display; see `Drawer`."""
    import open3d

    core, width, height = open3d.core, *observation.size_px
    if len(points_cam_m) == 0:
        return np.zeros((height, width, 3), np.uint8), np.full((height, width), np.inf)
    cloud: Any = open3d.t.geometry.PointCloud(core.Tensor(points_cam_m.astype(np.float32)))
    cloud.point.colors = core.Tensor(rgb.astype(np.float32) / 255)
    K = observation.K.copy()
    K[:2, 2] -= 0.5  # open3d has the middles of pixels at whole numbers
    image = cloud.project_to_rgbd_image(
        width, height, core.Tensor(K), depth_scale=1.0, depth_max=float(points_cam_m[:, 2].max()) + 1.0
    )
    depth = np.asarray(image.depth.as_tensor().numpy(), dtype=np.float64).reshape(height, width)
    picture = np.rint(255 * np.asarray(image.color.as_tensor().numpy())).clip(0, 255).astype(np.uint8)
    return picture, np.where(depth > 0, depth, np.inf)


def _closed(drawn: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """A drawn region without its gaps."""
    from scipy.ndimage import binary_closing

    square = np.ones((2 * HOLE_PX + 1,) * 2, dtype=np.bool_)
    padded = np.pad(drawn, 2 * HOLE_PX)
    inner = slice(2 * HOLE_PX, -2 * HOLE_PX)
    closed: NDArray[np.bool_] = binary_closing(padded, square)[inner, inner]
    return closed


def _nearest(depth: NDArray[np.float64], holes: NDArray[np.bool_]) -> NDArray[np.float64]:
    """Depth with holes filled from the nearest pixel that has one."""
    from scipy.ndimage import distance_transform_edt

    known = np.isfinite(depth)
    if not known.any():
        return depth
    rows, columns = distance_transform_edt(~known, return_distances=False, return_indices=True)
    return np.where(holes, depth[rows, columns], depth)


def _inpaint(
    picture: NDArray[np.uint8], holes: NDArray[np.bool_], among: NDArray[np.bool_] | None = None
) -> NDArray[np.uint8]:
    """Fill holes from their surroundings, or only from some pixels of them."""
    if not holes.any() or holes.all():
        return picture
    import cv2

    unknown = holes if among is None else ~among
    if unknown.all():
        return picture
    filled: NDArray[np.uint8] = np.asarray(
        cv2.inpaint(np.ascontiguousarray(picture), unknown.astype(np.uint8), INPAINT_PX, cv2.INPAINT_TELEA)
    )
    return np.where(holes[..., None], filled, picture)


RENDERERS: dict[str, Drawer] = {"numpy": draw_with_numpy, "open3d": draw_with_open3d}
REPLAY = "replay"
"""Name of the renderer for which a simulator puts the object where the plan ends; see `FlowPlanner`."""
