"""Grasp proposals on shapes whose good grasps are known."""

import math

import numpy as np
import pytest

from robotics.flow3d.plan.grasps import (
    Grasp,
    ObjectSurface,
    antipodal_grasps,
    part_grasps,
    primitive_grasps,
    with_unseen_side,
)


def box(half, middle=(0.5, 0.0, 0.05), spacing=0.008):
    """The surface of an upright box, with outward normals."""
    points, normals = [], []
    for axis in range(3):
        others = [other for other in range(3) if other != axis]
        spans = [np.arange(-half[other] + spacing / 2, half[other], spacing) for other in others]
        grid = np.stack(np.meshgrid(*spans), -1).reshape(-1, 2)
        for sign in (-1, 1):
            face = np.zeros((len(grid), 3))
            face[:, others], face[:, axis] = grid, sign * half[axis]
            points.append(face + middle)
            normals.append(np.tile(np.eye(3)[axis] * sign, (len(grid), 1)))
    return ObjectSurface(np.concatenate(points), np.concatenate(normals))


def seen_from(surface, viewpoint):
    facing = ((np.array(viewpoint) - surface.points_m) * surface.normals).sum(-1) > 0
    return ObjectSurface(surface.points_m[facing], surface.normals[facing])


def is_rotation(pose):
    return np.allclose(pose[:3, :3] @ pose[:3, :3].T, np.eye(3)) and np.linalg.det(pose[:3, :3]) == pytest.approx(1)


def test_primitives_close_on_the_narrow_sides_at_the_middle():
    surface = box((0.06, 0.02, 0.05))
    grasps = primitive_grasps(surface, 0.08)
    assert grasps
    for grasp in grasps:
        T = grasp.T_world_grip
        assert is_rotation(T)
        assert T[2, 2] < 0.01, "never from below"
        assert grasp.width_m <= 0.08
    straight = [grasp for grasp in grasps if grasp.T_world_grip[2, 2] < -0.99]
    assert [abs(grasp.T_world_grip[1, 1]) for grasp in straight] == [pytest.approx(1)], "only across the short side"
    assert straight[0].width_m == pytest.approx(0.04, abs=1e-3)
    np.testing.assert_allclose(straight[0].T_world_grip[:3, 3], [0.5, 0.0, 0.1 - 0.025], atol=1e-3)
    level = [grasp for grasp in grasps if abs(grasp.T_world_grip[2, 2]) < 0.01]
    assert level
    assert all(abs(grasp.T_world_grip[2, 1]) < 1e-9 for grasp in level), "fingers close level"


def test_parts_of_a_thing_too_large_for_the_fingers_are_taken_where_they_are_thin():
    front, bar = box((0.02, 0.1, 0.1), (0.5, 0.0, 0.11)), box((0.006, 0.05, 0.008), (0.42, 0.0, 0.1), 0.004)
    normals = np.concatenate([front.normals, bar.normals])
    drawer = ObjectSurface(np.concatenate([front.points_m, bar.points_m]), normals)
    grasps = part_grasps(drawer, 0.08)
    assert all(is_rotation(grasp.T_world_grip) and grasp.width_m < 0.08 for grasp in grasps)
    assert all(grasp.T_world_grip[2, 2] < 0.11 for grasp in grasps), "never from below"
    assert [grasp.score for grasp in grasps] == sorted((grasp.score for grasp in grasps), reverse=True)
    at_bar = [grasp for grasp in grasps if abs(grasp.T_world_grip[0, 3] - 0.42) < 0.005]
    down = [grasp for grasp in at_bar if grasp.T_world_grip[2, 2] < -0.99 and abs(grasp.T_world_grip[0, 1]) > 0.99]
    assert down, "from above, across the bar"
    for grasp in down:
        assert grasp.width_m == pytest.approx(0.012, abs=1e-3), "the front behind the gap is not between the fingers"
        np.testing.assert_allclose(grasp.T_world_grip[2, 3], 0.1, atol=0.009)


def test_primitives_are_centred_where_the_fingers_close():
    surface = box((0.03, 0.02, 0.05))
    handle = box((0.01, 0.02, 0.01), (0.5, 0.04, 0.02), 0.004)
    points = np.concatenate([surface.points_m, handle.points_m])
    both = ObjectSurface(points, np.concatenate([surface.normals, handle.normals]))
    grasp = next(grasp for grasp in primitive_grasps(both, 0.08, yaws=1, sides=0))
    assert abs(grasp.T_world_grip[0, 1]) == pytest.approx(1)
    np.testing.assert_allclose(grasp.T_world_grip[0, 3], 0.5, atol=1e-9)


def test_too_wide_things_have_no_primitive():
    assert primitive_grasps(box((0.06, 0.06, 0.06)), 0.08) == []


def test_antipodal_pairs_lie_on_opposite_faces():
    surface = box((0.06, 0.02, 0.05))
    grasps = antipodal_grasps(surface, 0.08, unseen_side=False)
    assert grasps
    for grasp in grasps:
        T = grasp.T_world_grip
        assert is_rotation(T)
        assert abs(T[1, 1]) >= math.cos(math.atan(0.5)) - 1e-9, "the line is within the cone about the only narrow axis"
        assert abs(T[1, 3]) < 1e-9
        assert T[2, 2] < 0.1
        assert 0.04 - 1e-9 <= grasp.width_m <= 0.04 / math.cos(math.atan(0.5)) + 1e-9
    assert [grasp.score for grasp in grasps] == sorted((grasp.score for grasp in grasps), reverse=True)


def test_one_view_of_a_box_has_pairs_only_with_its_unseen_side():
    seen = seen_from(box((0.03, 0.03, 0.05)), (1.2, 0.4, 0.8))
    assert antipodal_grasps(seen, 0.08, unseen_side=False) == []
    found = antipodal_grasps(seen, 0.08)
    assert found
    assert all(abs(grasp.width_m - 0.06) < 0.01 for grasp in found)
    whole = with_unseen_side(seen)
    assert len(whole.points_m) == 2 * len(seen.points_m)
    middle = (whole.points_m.min(0) + whole.points_m.max(0)) / 2
    np.testing.assert_allclose(middle[:2], [0.5, 0.0], atol=0.004)
    np.testing.assert_allclose(whole.points_m.mean(0)[:2], middle[:2], atol=1e-9)


def test_turned_grasp_exchanges_the_fingers():
    grasp = Grasp(np.eye(4), 1.0, 0.02, "user")
    np.testing.assert_allclose(grasp.turned.T_world_grip, np.diag([-1.0, -1, 1, 1]))
    np.testing.assert_allclose(grasp.turned.turned.T_world_grip, grasp.T_world_grip)
