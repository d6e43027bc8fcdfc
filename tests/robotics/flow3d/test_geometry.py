"""Cameras and rigid motions against closed forms, scipy and finite differences."""

import math

import numpy as np
import pytest
from scipy.spatial.transform import Rotation

from mmrl.errors import UserError
from robotics.flow3d.geometry import (
    angle_rad,
    apply_pose,
    depth_at,
    intrinsics,
    inverse_pose,
    lift,
    make_pose,
    project,
)


def random_pose(rng, size_m=1.0):
    return make_pose(Rotation.random(random_state=rng).as_matrix(), rng.normal(size=3) * size_m)


def test_the_focal_length_of_the_public_code():
    K = intrinsics((256, 256), fov_x_rad=math.radians(55))
    assert K[0, 0] == pytest.approx(245.8859, abs=1e-3)  # 0.5 W / tan(27.5 degrees)
    assert K[:2, 2].tolist() == [128, 128]
    assert K[0, 0] == K[1, 1]


@pytest.mark.parametrize("angles", [{}, {"fov_x_rad": 1.0, "fov_y_rad": 1.0}, {"fov_y_rad": 3.2}])
def test_intrinsics_need_one_angle(angles):
    with pytest.raises(UserError, match="pass exactly one of them"):
        intrinsics((64, 48), **angles)


def test_lift_is_the_inverse_of_project():
    rng = np.random.default_rng(0)
    K = intrinsics((64, 48), fov_y_rad=0.8)
    points = rng.uniform([-1, -1, 0.3], [1, 1, 2], (5, 7, 3))
    np.testing.assert_allclose(lift(project(points, K), K), points, atol=1e-12)
    assert np.isnan(project(np.array([0.1, 0.1, -1.0]), K)[:2]).all()


def test_the_derivative_of_a_projection():
    K, point, step = intrinsics((64, 48), fov_y_rad=0.8), np.array([0.2, -0.3, 1.5]), np.array([1e-6, 0, 0])
    found = (project(point + step, K) - project(point - step, K))[0] / 2e-6
    assert found == pytest.approx(K[0, 0] / point[2], rel=1e-6)


def test_depth_between_pixels_of_a_plane_and_next_to_an_edge():
    v, u = np.mgrid[0:6, 0:8] + 0.5
    plane = (1 + 0.01 * u + 0.02 * v).astype(np.float32)
    where = np.array([[3.2, 2.7], [1.0, 1.0], [6.9, 4.1]])
    np.testing.assert_allclose(
        depth_at(plane, where, edge_m=0.5), 1 + 0.01 * where[:, 0] + 0.02 * where[:, 1], atol=1e-6
    )
    stepped = np.where(u < 4, 1.0, 2.0).astype(np.float32)
    assert depth_at(stepped, np.array([3.8, 2.0])) == 1.0
    assert depth_at(stepped, np.array([4.2, 2.0])) == 2.0


def test_holes_and_positions_outside_the_image_have_no_depth():
    depth = np.ones((4, 4), np.float32)
    depth[1, 1] = 0
    found = depth_at(depth, np.array([[1.5, 1.5], [-0.1, 1], [4.0, 1], [3.5, 3.5]]))
    assert np.isnan(found).tolist() == [True, True, True, False]


def test_poses_compose_and_invert():
    rng = np.random.default_rng(1)
    a, b = random_pose(rng), random_pose(rng)
    points = rng.normal(size=(9, 3))
    np.testing.assert_allclose(apply_pose(a @ b, points), apply_pose(a, apply_pose(b, points)), atol=1e-12)
    np.testing.assert_allclose(inverse_pose(a) @ a, np.eye(4), atol=1e-12)


@pytest.mark.parametrize("angle", [0.0, 1e-9, 1e-3, 1.0, 3.0, math.pi])
def test_the_angle_between_orientations(angle):
    rng = np.random.default_rng(2)
    base, axis = Rotation.random(random_state=rng), rng.normal(size=3)
    turned = base * Rotation.from_rotvec(angle * axis / np.linalg.norm(axis))
    assert angle_rad(base.as_matrix(), turned.as_matrix()) == pytest.approx(angle, abs=2e-7 if angle > 3 else 1e-12)
