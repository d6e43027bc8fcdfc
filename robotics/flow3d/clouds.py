"""Point clouds with open3d: of depth images, drawn, fused from several cameras, in PLY files and in a viewer.

Points are in the world frame unless noted, in metres; colours are uint8.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mmrl.errors import RunError, UserError, require_packages
from mmrl.files import expanded, replaced, write_atomically
from robotics.flow3d.clip import FlowClip, Observation
from robotics.flow3d.geometry import BoolArray, DepthArray, FloatArray, ImageArray, IndexArray, inverse_pose
from robotics.flow3d.metrics import path_colours

FAR_M = 1e6
"""open3d drops depths above a limit; no depth is above this one."""
NEIGHBOURS = 16
"""A fused point with fewer others within the distance field is an outlier, such as a pixel between two surfaces."""
TRUNCATION = 4.0
"""Half the width of the distance field around a surface in voxels; it must exceed the noise of the depth."""
VIEW_M = 0.004
"""Spacing of the scene's points in the viewer."""
AROUND_M = 0.5
"""Distance from the middle of the flow up to which the viewer shows the scene."""
PATH_M = 0.001
"""Spacing of the points along a path in a PLY file."""


def load_open3d(what: str) -> Any:
    """Import open3d, which takes seconds; raises UserError if `what` needs it and it is not installed."""
    require_packages(what, ["open3d"], "flow3d")
    try:
        import open3d
    except (ImportError, OSError) as error:  # such as a system library that is missing
        raise UserError(f"{what} needs open3d, which cannot be imported: {error}") from error
    return open3d


def point_cloud(points_m: FloatArray, rgb: ImageArray | None = None) -> Any:
    """open3d's cloud of points (n, 3) and colours (n, 3)."""
    open3d = load_open3d("a point cloud")
    cloud = open3d.geometry.PointCloud(open3d.utility.Vector3dVector(points_m))
    if rgb is not None:
        cloud.colors = open3d.utility.Vector3dVector(rgb / 255.0)
    return cloud


def colours_of(cloud: Any) -> ImageArray:
    """(n, 3) uint8 colours of open3d's cloud."""
    return np.rint(255 * np.asarray(cloud.colors)).astype(np.uint8)


def depth_points(
    depth_m: DepthArray, K: FloatArray, T_world_cam: FloatArray | None = None
) -> tuple[FloatArray, BoolArray]:
    """(H, W, 3) points of a depth image (H, W), NaN in holes, and (H, W) whether the depth is known."""
    open3d = load_open3d("lifting a depth image")
    height, width = depth_m.shape
    # open3d takes 0 for a hole
    known = np.isfinite(depth_m) & (depth_m > 0)
    image = open3d.geometry.Image(np.where(known, depth_m, 0.0).astype(np.float32))
    T_cam_world = np.eye(4) if T_world_cam is None else inverse_pose(T_world_cam)
    cloud = open3d.geometry.PointCloud.create_from_depth_image(
        image,
        _camera(K, (width, height)),
        T_cam_world,
        depth_scale=1.0,
        depth_trunc=FAR_M,
        project_valid_depth_only=False,
    )
    return np.asarray(cloud.points).reshape(height, width, 3), known


def world_points(observation: Observation) -> tuple[FloatArray, BoolArray]:
    """(H, W, 3) points of the pixels in the world frame, NaN in holes, and (H, W) whether their depth is known."""
    return depth_points(observation.depth_m, observation.K, observation.T_world_cam)


def _camera(K: FloatArray, size_px: tuple[int, int]) -> Any:
    """open3d's camera, whose pixel centres are at integers."""
    open3d = load_open3d("a camera")
    return open3d.camera.PinholeCameraIntrinsic(*size_px, K[0, 0], K[1, 1], K[0, 2] - 0.5, K[1, 2] - 0.5)


def draw_points(
    points_cam_m: FloatArray, rgb: ImageArray, K: FloatArray, size_px: tuple[int, int]
) -> tuple[ImageArray, FloatArray]:
    """Draw points (n, 3) of the camera frame, one pixel each, the nearest one in front, without a display.

    Args:
        points_cam_m: (n, 3) in the camera frame.
        rgb: (n, 3) colours.
        K: (3, 3) intrinsics in pixels.
        size_px: width and height.

    Returns:
        (H, W, 3) image, and (H, W) depth in metres, infinite if nothing was drawn.
    """
    open3d = load_open3d("rendering points")
    width, height = size_px
    # the nearest depth that float32 can tell from a hole
    ahead = points_cam_m[:, 2] > 1e-6
    if not ahead.any():
        return np.zeros((height, width, 3), np.uint8), np.full((height, width), np.inf)
    core, points = open3d.core, points_cam_m[ahead]
    cloud = open3d.t.geometry.PointCloud(core.Tensor(points.astype(np.float32)))
    cloud.point.colors = core.Tensor(rgb[ahead].astype(np.float32) / 255)
    camera = core.Tensor(_camera(K, size_px).intrinsic_matrix)
    drawn = cloud.project_to_rgbd_image(width, height, camera, depth_scale=1.0, depth_max=float(points[:, 2].max()) + 1)
    depth = np.asarray(drawn.depth.as_tensor().numpy(), dtype=np.float64).reshape(height, width)
    image = np.rint(255 * np.asarray(drawn.color.as_tensor().numpy())).clip(0, 255).astype(np.uint8)
    return image, np.where(depth > 0, depth, np.inf)


def normals_towards(points_m: FloatArray, viewpoint_m: FloatArray, neighbours: int = 12) -> FloatArray:
    """(n, 3) unit normals of points (n >= 3, 3), across the least spread of their neighbours, towards a viewpoint."""
    open3d, cloud = load_open3d("normals"), point_cloud(points_m)
    cloud.estimate_normals(open3d.geometry.KDTreeSearchParamKNN(neighbours))
    # what the camera sees faces it
    cloud.orient_normals_towards_camera_location(viewpoint_m)
    return np.asarray(cloud.normals)


def distances_m(points_m: FloatArray, others_m: FloatArray) -> FloatArray:
    """(n,) distance of each point (n, 3) to the nearest of the others (m, 3)."""
    return np.asarray(point_cloud(points_m).compute_point_cloud_distance(point_cloud(others_m)))


def farthest_points(points_m: FloatArray, count: int, first: int = 0) -> IndexArray:
    """Indices in rising order of points (n, 3) that are spread out: each was the farthest from those found before."""
    open3d, count = load_open3d("choosing points"), min(count, len(points_m))
    if count < 1:
        return np.zeros(0, dtype=np.intp)
    cloud = open3d.t.geometry.PointCloud(open3d.core.Tensor(np.ascontiguousarray(points_m)))
    cloud.point.index = open3d.core.Tensor(np.arange(len(points_m))[:, None])
    return np.asarray(cloud.farthest_point_down_sample(count, first).point.index.numpy())[:, 0].astype(np.intp)


@dataclass(frozen=True)
class FusedSurface:
    """A surface seen by several cameras."""

    points_m: FloatArray
    """(n, 3) in the world frame."""
    normals: FloatArray
    """(n, 3) outward unit vectors."""
    rgb: ImageArray
    """(n, 3)."""


def fused_surface(
    observations: Sequence[Observation], voxel_m: float = 0.004, *, only_object: bool = False
) -> FusedSurface:
    """Fuse views of one moment, from several cameras or of a still scene, into one surface.

    Averages depth noise in a truncated signed distance field and removes points far from their neighbours.

    Args:
        observations: with depth and `T_world_cam`; their instructions are ignored.
        voxel_m: side of a voxel, which is also the smallest detail.
        only_object: whether to fuse only the pixels of the masks.

    Returns:
        The surface.

    Raises:
        UserError: there is no observation, `voxel_m` is not positive, a mask is missing, or no depth is known.

    Source: Curless and Levoy 1996; Newcombe et al. 2011 (KinectFusion).
    """
    if not observations or not voxel_m > 0:
        raise UserError(f"{len(observations)} observations, voxel_m is {voxel_m}; need at least 1, and more than 0")
    if only_object and any(seen.mask is None for seen in observations):
        raise UserError("only_object needs a mask in every observation")
    open3d = load_open3d("fusing views")
    core, image = open3d.core, open3d.t.geometry.Image
    grid = open3d.t.geometry.VoxelBlockGrid(("tsdf", "weight", "color"), (core.float32,) * 3, (1, 1, 3), voxel_m)
    for seen in observations:
        known = np.isfinite(seen.depth_m) & (seen.depth_m > 0)
        known &= seen.mask if only_object and seen.mask is not None else True
        if not known.any():
            continue
        depth_m, rgb = np.where(known, seen.depth_m, 0.0).astype(np.float32), seen.rgb.astype(np.float32) / 255
        depth, colours = (image(core.Tensor(np.ascontiguousarray(pixels))) for pixels in (depth_m, rgb))
        K = core.Tensor(_camera(seen.K, seen.size_px).intrinsic_matrix)
        # where the camera is, the scale of its depth, the largest depth, and half the width of the field in voxels
        view = core.Tensor(inverse_pose(seen.T_world_cam)), 1.0, float(depth_m.max()) + 1, TRUNCATION
        blocks = grid.compute_unique_block_coordinates(depth, K, *view)
        grid.integrate(blocks, depth, colours, K, K, *view)
    # a voxel that one view has seen weighs 1
    cloud = grid.extract_point_cloud(weight_threshold=0.5).to_legacy() if grid.hashmap().size() else None
    if cloud is None or cloud.is_empty():
        raise UserError(f"{len(observations)} observations have no surface; is their depth known?")
    cloud, _ = cloud.remove_radius_outlier(NEIGHBOURS, TRUNCATION * voxel_m)
    return FusedSurface(np.asarray(cloud.points), np.asarray(cloud.normals), colours_of(cloud))


def write_ply(
    path: Path | str, points_m: FloatArray, rgb: ImageArray | None = None, normals: FloatArray | None = None
) -> Path:
    """Write a point cloud as binary PLY, which MeshLab, CloudCompare and Blender read.

    Args:
        path: file to write; must end in .ply.
        points_m: (n, 3) metres.
        rgb: (n, 3) uint8 colours.
        normals: (n, 3) unit vectors.

    Returns:
        The file.

    Raises:
        UserError: the file has another suffix, or the arrays differ in length.
        RunError: the file could not be written.
    """
    place, lengths = expanded(Path(path)), {len(each) for each in (points_m, rgb, normals) if each is not None}
    if place.suffix != ".ply" or len(lengths) > 1:
        raise UserError(f"{place} must end in .ply, and points, colours and normals must be equally many: {lengths}")
    open3d, cloud = load_open3d("writing PLY"), point_cloud(points_m, rgb)
    if normals is not None:
        cloud.normals = open3d.utility.Vector3dVector(normals)
    with replaced(place) as draft:
        # open3d reports a failure as False
        if not open3d.io.write_point_cloud(str(draft), cloud):
            raise RunError(f"{place} could not be written")
    return place


def flow_cloud(clip: FlowClip) -> tuple[FloatArray, ImageArray]:
    """Points (n, 3) and colours (n, 3) of a clip's scene and of the paths of its flow, from blue to red over time.

    A path is a row of points, because not every viewer shows lines of PLY files.
    """
    points, known = world_points(clip.observation)
    paths = np.concatenate([clip.points_world_m[None], clip.flow_world_m])
    steps = np.linalg.norm(np.diff(paths, axis=0), axis=-1)
    parts = max(1, int(np.ceil(float(steps.max()) / PATH_M)))
    share = (np.arange(parts) / parts)[:, None, None]
    dense = (paths[:-1, None] * (1 - share) + paths[1:, None] * share).reshape(-1, *paths.shape[1:])
    colours = path_colours(np.repeat(np.linspace(0, 1, len(dense)), paths.shape[1]))
    return (
        np.concatenate([points[known], dense.reshape(-1, 3), paths[-1]]),
        np.concatenate([clip.observation.rgb[known], colours, path_colours(np.ones(paths.shape[1]))]),
    )


def write_flow_page(path: Path | str, clip: FlowClip, moved_m: FloatArray | None = None, title: str = "") -> Path:
    """Write a page that shows a clip's scene, flow and predicted outcome as points that can be turned and zoomed.

    It needs no network: the script of plotly, which comes with open3d, is written next to it.

    Args:
        path: file to write; should end in .html.
        clip: scene and flow.
        moved_m: (n, 3) points of the object at the end of its motion, in the world frame.
        title: shown above.

    Returns:
        The file.
    """
    load_open3d("the viewer of point clouds")
    from plotly import graph_objects, offline

    place, (points, known) = expanded(Path(path)), world_points(clip.observation)
    middle = np.concatenate([clip.points_world_m[None], clip.flow_world_m]).mean((0, 1))
    near = known & (np.linalg.norm(points - middle, axis=-1) < AROUND_M)
    # a wrong prediction may leave the scene
    known = near if near.any() else known
    scene = point_cloud(points[known], clip.observation.rgb[known]).voxel_down_sample(VIEW_M)
    traces = [_dots("scene", np.asarray(scene.points), colours_of(scene)), _path_lines(clip)]
    if moved_m is not None:
        traces.append(_dots("object at the end", moved_m, path_colours(np.ones(len(moved_m))), 0.5))
    view = {"aspectmode": "data", "camera": _eye(clip.observation, np.asarray(scene.points))}
    view |= {f"{axis}axis": {"title": f"{axis}, m", "showbackground": False} for axis in "xyz"}
    figure = graph_objects.Figure([each.to_plotly_json() for each in traces])
    figure.update_layout(
        title=title, scene=view, margin={"l": 0, "r": 0, "b": 0, "t": 40}, legend={"itemsizing": "constant"}
    )
    write_atomically(place.with_name("plotly.min.js"), offline.get_plotlyjs())
    write_atomically(place, figure.to_html(include_plotlyjs="directory", config={"displaylogo": False}))
    return place


def _dots(name: str, points_m: FloatArray, rgb: ImageArray, opacity: float = 1.0) -> Any:
    from plotly import graph_objects

    x, y, z = points_m.astype(np.float32).T
    marker = {"size": 2, "opacity": opacity, "color": _hex(rgb)}
    return graph_objects.Scatter3d(x=x, y=y, z=z, mode="markers", marker=marker, name=name, hoverinfo="skip")


def _path_lines(clip: FlowClip) -> Any:
    """The paths of all points as one trace; a gap (NaN) ends each path."""
    from plotly import graph_objects

    start, flow = clip.points_world_m[None], clip.flow_world_m
    paths = np.concatenate([start, flow, np.full_like(start, np.nan)])
    x, y, z = paths.swapaxes(0, 1).reshape(-1, 3).T
    frames = np.tile(np.arange(len(paths)), len(clip.points_world_m))
    line = {"width": 5, "color": _hex(path_colours(np.minimum(frames / len(flow), 1)))}
    text = "frame %{customdata}<extra>flow</extra>"
    return graph_objects.Scatter3d(
        x=x, y=y, z=z, mode="lines", line=line, name="flow, blue to red", customdata=frames, hovertemplate=text
    )


def _hex(rgb: ImageArray) -> list[str]:
    return [f"#{r:02x}{g:02x}{b:02x}" for r, g, b in rgb.tolist()]


def _eye(observation: Observation, points_m: FloatArray) -> dict[str, Any]:
    """Plotly's camera, looking from the side of the observation's; its unit is the largest side of the scene's box."""
    low, high = points_m.min(0), points_m.max(0)
    away = observation.T_world_cam[:3, 3] - (low + high) / 2
    x, y, z = 1.6 * away / max(float(np.linalg.norm(away)), 1e-9)
    return {"eye": {"x": x, "y": y, "z": z}, "up": {"x": 0, "y": 0, "z": 1}}
