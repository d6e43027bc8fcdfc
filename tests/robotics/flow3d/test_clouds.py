"""Clouds of an observation that was drawn by hand: a sphere over a plane."""

import dataclasses
import re

import numpy as np
import open3d
import pytest

from mmrl.errors import UserError
from robotics.flow3d import clouds
from robotics.flow3d.clip import FlowClip, Observation
from robotics.flow3d.clouds import (
    distances_m,
    farthest_points,
    flow_cloud,
    fused_surface,
    load_open3d,
    normals_towards,
    world_points,
    write_flow_page,
    write_ply,
)
from robotics.flow3d.geometry import apply_pose, inverse_pose, lift, project
from robotics.flow3d.plan.rendering import find_object, hidden_points, scene_cloud
from tests.programs import run_after_torch
from tests.robotics.flow3d.drawn import CENTRE, RADIUS_M, drawn_sphere

EYES = ((1.1, 0.1, 0.6), (-0.1, 0.1, 0.6), (0.5, 0.7, 0.6), (0.5, -0.7, 0.6))


def test_points_of_pixels_lie_on_the_drawn_surfaces():
    observation = drawn_sphere()
    points, known = world_points(observation)
    assert known.all()
    away = np.linalg.norm(points[observation.mask] - CENTRE, axis=-1)
    np.testing.assert_allclose(away, RADIUS_M, atol=1e-6)
    np.testing.assert_allclose(points[~observation.mask][:, 2], 0, atol=1e-6)
    uvz = project(apply_pose(inverse_pose(observation.T_world_cam), points.reshape(-1, 3)), observation.K)
    np.testing.assert_allclose(uvz.reshape(*known.shape, 3)[7, 9], [9.5, 7.5, observation.depth_m[7, 9]], atol=1e-5)


def test_object_and_rest_are_split_with_a_border_between():
    observation = drawn_sphere()
    cloud = scene_cloud(observation, observation.mask)
    assert len(cloud.object_m) == observation.mask.sum()
    assert (cloud.object_rgb == [200, 30, 30]).all()
    assert (cloud.rest_rgb != [200, 30, 30]).any(-1).all()
    total = observation.mask.size
    assert total - len(cloud.object_m) - len(cloud.rest_m) > 20
    holed = observation.depth_m.copy()
    holed[:4] = 0
    holed[4, 0] = np.nan
    less = scene_cloud(dataclasses.replace(observation, depth_m=holed), observation.mask, dilate_px=0)
    assert len(less.object_m) + len(less.rest_m) == total - 4 * observation.size_px[0] - 1


def test_object_is_found_around_known_points():
    observation = drawn_sphere()
    points, _ = world_points(observation)
    some = points[observation.mask][::7]
    unmasked = dataclasses.replace(observation, mask=None)
    found = find_object(unmasked, some, reach_m=0.01)
    overlap = (found & observation.mask).sum() / (found | observation.mask).sum()
    assert overlap > 0.6
    assert not found[observation.depth_m > observation.depth_m[observation.mask].max() + 0.05].any()
    assert find_object(observation, some) is observation.mask


def test_normals_of_a_sphere_point_away_from_its_middle():
    observation: Observation = drawn_sphere()
    points, _ = world_points(observation)
    on_sphere = points[observation.mask]
    normals = normals_towards(on_sphere, observation.T_world_cam[:3, 3])
    np.testing.assert_allclose(np.linalg.norm(normals, axis=-1), 1)
    assert np.median((normals * (on_sphere - CENTRE) / RADIUS_M).sum(-1)) > 0.99


def test_places_close_behind_the_scene_are_hidden_and_those_behind_the_object_are_not():
    observation = drawn_sphere()
    points, _ = world_points(observation)
    eye = observation.T_world_cam[:3, 3]

    def hidden_behind(pixel, way_m):
        ray = points[pixel] - eye
        place = points[pixel] + way_m * ray / np.linalg.norm(ray)
        return bool(hidden_points(observation, observation.mask, place[None])[0])

    row, column = np.argwhere(observation.mask)[observation.mask.sum() // 2]
    assert [hidden_behind((9, 9), way) for way in (-0.05, 0.005, 0.05, 0.2)] == [False, False, True, False]
    assert not hidden_behind((row, column), 0.05)
    behind_camera, beside = 2 * eye - points[9, 9], eye + observation.T_world_cam[:3, 0] + points[9, 9] - eye
    assert not hidden_points(observation, observation.mask, np.stack([behind_camera, beside])).any()
    holed = dataclasses.replace(observation, depth_m=np.zeros_like(observation.depth_m))
    assert not hidden_points(holed, observation.mask, points[9, 9:12]).any(), "no depth, no surface"


def test_pixels_without_depth_have_no_point():
    observation = drawn_sphere()
    holed = observation.depth_m.copy()
    holed[3, :4] = [0, np.nan, np.inf, -1]
    points, known = world_points(dataclasses.replace(observation, depth_m=holed))
    assert not known[3, :4].any()
    assert known.sum() == known.size - 4
    assert np.isnan(points[3, :4]).all()
    v, u = np.mgrid[: known.shape[0], : known.shape[1]] + 0.5
    expected = lift(np.stack([u, v, observation.depth_m], -1).astype(np.float64), observation.K)
    expected = apply_pose(observation.T_world_cam, expected.reshape(-1, 3)).reshape(points.shape)
    np.testing.assert_allclose(points[known], expected[known], atol=1e-12)


def test_distances_are_those_to_the_nearest_point():
    rng = np.random.default_rng(0)
    points, others = rng.normal(size=(40, 3)), rng.normal(size=(30, 3))
    expected = np.linalg.norm(points[:, None] - others, axis=-1).min(1)
    np.testing.assert_allclose(distances_m(points, others), expected, rtol=1e-12)


def test_farthest_points_of_a_line():
    line = np.linspace(0, 1, 11)[:, None] * [1.0, 0, 0]
    assert farthest_points(line, 3).tolist() == [0, 5, 10]
    assert len(farthest_points(line, 50)) == 11
    assert len(farthest_points(line, 0)) == 0


def noisy(observation, seed, deviation_m=0.004):
    errors = np.random.default_rng(seed).normal(0, deviation_m, observation.depth_m.shape).astype(np.float32)
    return dataclasses.replace(observation, depth_m=observation.depth_m + errors)


def off_the_sphere_m(points_m):
    return np.abs(np.linalg.norm(points_m - CENTRE, axis=-1) - RADIUS_M)


def test_views_from_four_sides_become_one_surface():
    views = [drawn_sphere(eye=eye) for eye in EYES]
    found = fused_surface(views, only_object=True)
    assert np.median(off_the_sphere_m(found.points_m)) < 1e-3
    one = world_points(views[0])[0][views[0].mask]
    assert (one - CENTRE)[:, 0].min() > -0.8 * RADIUS_M, "the first camera does not see the far side"
    for axis in ([1.0, 0, 0], [-1.0, 0, 0], [0, 1.0, 0], [0, -1.0, 0]):
        assert ((found.points_m - CENTRE) @ axis).max() > 0.9 * RADIUS_M
    assert np.median((found.normals * (found.points_m - CENTRE) / RADIUS_M).sum(-1)) > 0.9
    assert np.abs(found.rgb.astype(int) - [200, 30, 30]).max() <= 2


def test_fusing_averages_the_noise_of_depth():
    views = [noisy(drawn_sphere(), number) for number in range(9)]
    one = world_points(views[0])[0][views[0].mask]
    found = fused_surface(views, only_object=True).points_m
    assert np.median(off_the_sphere_m(found)) < 0.7 * np.median(off_the_sphere_m(one))


def test_flying_pixels_are_removed_from_a_fused_surface(monkeypatch):
    observation, rng = drawn_sphere(), np.random.default_rng(0)
    depth_m = observation.depth_m.copy()
    rows, columns = rng.integers(4, 124, (2, 60))
    depth_m[rows, columns] *= rng.uniform(0.7, 0.9, 60).astype(np.float32)
    spoilt = dataclasses.replace(observation, depth_m=depth_m)
    true = world_points(observation)[0].reshape(-1, 3)

    def flying(view):
        return int((distances_m(fused_surface([view]).points_m, true) > 0.02).sum())

    left, kept = flying(spoilt), len(fused_surface([observation]).points_m)
    monkeypatch.setattr(clouds, "NEIGHBOURS", 1)
    assert left < 0.5 * flying(spoilt)
    assert kept > 0.999 * len(fused_surface([observation]).points_m), "a clean surface keeps its points"


def test_views_that_cannot_be_fused_are_refused():
    observation = drawn_sphere()
    with pytest.raises(UserError, match="0 observations"):
        fused_surface([])
    with pytest.raises(UserError, match="voxel_m is 0"):
        fused_surface([observation], 0)
    with pytest.raises(UserError, match="mask"):
        fused_surface([dataclasses.replace(observation, mask=None)], only_object=True)
    with pytest.raises(UserError, match="have no surface"):
        fused_surface([dataclasses.replace(observation, depth_m=np.zeros_like(observation.depth_m))])


def test_clouds_are_written_as_ply(tmp_path):
    points = np.array([[0.1, 0.2, 0.3], [1.0, 2.0, 3.0]])
    rgb = np.array([[255, 0, 10], [1, 2, 3]], np.uint8)
    file = write_ply(tmp_path / "new" / "cloud.ply", points, rgb, np.array([[0.0, 0, 1], [1.0, 0, 0]]))
    assert file.read_bytes().startswith(b"ply\nformat binary_little_endian 1.0\n")
    found = open3d.io.read_point_cloud(str(file))
    np.testing.assert_array_equal(np.asarray(found.points), points)
    np.testing.assert_array_equal(np.rint(255 * np.asarray(found.colors)), rgb)
    np.testing.assert_array_equal(np.asarray(found.normals)[0], [0, 0, 1])
    with pytest.raises(UserError, match=r"cloud\.xyz must end in \.ply"):
        write_ply(tmp_path / "cloud.xyz", points)
    with pytest.raises(UserError, match="equally many"):
        write_ply(file, points, rgb[:1])
    assert len(list(file.parent.iterdir())) == 1


def flow_of_the_sphere(frames=4):
    """A clip of the sphere that rises by 8 cm."""
    observation = drawn_sphere()
    v, u = np.argwhere(observation.mask)[:: observation.mask.sum() // 4][:4].T
    points = np.stack([u + 0.5, v + 0.5, observation.depth_m[v, u]], -1).astype(np.float64)
    up = observation.T_world_cam[2, :3] * np.linspace(0, 0.08, frames + 1)[1:, None, None]
    uvz = project(lift(points, observation.K) + up, observation.K)
    flow = np.concatenate([uvz, np.ones((frames, 4, 1))], -1)
    return FlowClip(observation, points.reshape(2, 2, 3), flow.reshape(frames, 2, 2, 4))


def test_paths_of_a_flow_are_points_from_blue_to_red():
    clip = flow_of_the_sphere()
    points, rgb = flow_cloud(clip)
    pixels = clip.observation.mask.size
    paths, colours = points[pixels:], rgb[pixels:]
    assert len(points) == len(rgb)
    assert (rgb[:pixels] == clip.observation.rgb.reshape(-1, 3)).all()
    assert paths[:, 2].max() - clip.points_world_m[:, 2].max() == pytest.approx(0.08, abs=1e-9)
    assert (np.diff(paths.reshape(-1, 4, 3), axis=0)[..., 2] < 1.1e-3).all()
    assert colours[0, 2] > 200 > colours[0, 0]
    assert colours[-1, 0] > 200 > colours[-1, 2]


def test_the_page_of_a_flow_needs_no_network(tmp_path):
    clip = flow_of_the_sphere()
    page = write_flow_page(tmp_path / "clouds" / "one.html", clip, clip.flow_world_m[-1], "lift the ball")
    text = page.read_text(encoding="utf-8")
    assert "lift the ball" in text
    assert re.findall(r'<script[^>]* src="([^"]*)"', text) == ["plotly.min.js"]
    assert not re.search(r'(src|href)="(https?:)?//', text)
    assert (page.parent / "plotly.min.js").stat().st_size > 1_000_000
    assert len(text) < 1_000_000
    far = clip.with_flow(clip.flow + np.array([0, 0, 9.0, 0]))
    assert write_flow_page(page, far).stat().st_size > 10_000, "also of a flow that leaves the scene"


def test_missing_open3d_is_named_with_the_extra(monkeypatch):
    monkeypatch.setattr("mmrl.errors.find_spec", lambda name: None)
    with pytest.raises(
        UserError, match=r"normals needs open3d, which is not installed: pip install 'mmrl-suite\[flow3d\]'"
    ):
        load_open3d("normals")


def test_open3d_is_loaded_only_where_it_is_used():
    code = (
        "import sys, robotics.flow3d.clouds, robotics.flow3d.plan.planner, robotics.flow3d.extract.extractor; "
        "print('open3d' in sys.modules, 'plotly' in sys.modules)"
    )
    assert run_after_torch(code).strip() == "False False"
