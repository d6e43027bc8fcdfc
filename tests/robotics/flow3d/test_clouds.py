"""Clouds of an observation that was drawn by hand: a sphere over a plane."""

import dataclasses

import numpy as np

from robotics.flow3d.clip import Observation
from robotics.flow3d.geometry import apply_pose, inverse_pose, project
from robotics.flow3d.plan.rendering import find_object, hidden_points, normals_towards, scene_cloud, world_points
from tests.robotics.flow3d.drawn import CENTRE, RADIUS_M, drawn_sphere


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
