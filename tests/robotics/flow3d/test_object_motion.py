"""Motions of the object: frames, smoothing, support and intermediate steps, against closed forms and scipy."""

import numpy as np
import pytest
from scipy.spatial.transform import Rotation, Slerp

from robotics.flow3d.clip import FlowClip, Observation
from robotics.flow3d.geometry import angle_rad, apply_pose, intrinsics, inverse_pose, make_pose, project
from robotics.flow3d.rigid_motion import (
    camera_to_world_motion,
    gripper_poses,
    interpolate_joints,
    interpolate_poses,
    lift_above,
    object_motion,
    smooth_motions,
    turn_by,
    turn_of,
)


def pose(rng, size_m=0.3):
    return make_pose(Rotation.random(random_state=rng).as_matrix(), rng.normal(size=3) * size_m)


@pytest.fixture
def moving():
    """A clip of 25 points that rotate about a vertical axis and translate, and the motion in the world."""
    rng = np.random.default_rng(5)
    T_world_cam = make_pose(np.array([[0.0, -1, 0], [-1, 0, 0], [0, 0, -1]]), np.array([0.5, 0.0, 1.0]))
    points_world = rng.uniform(-0.04, 0.04, (25, 3)) + np.array([0.5, 0.1, 0.05])
    T = np.stack([turned(share, points_world.mean(0)) for share in np.linspace(0.125, 1, 8)])
    K = intrinsics((128, 128), fov_y_rad=0.9)
    to_cam = inverse_pose(T_world_cam)
    observation = Observation(np.zeros((128, 128, 3), np.uint8), np.ones((128, 128), np.float32), K, T_world_cam, "go")
    uvz = project(apply_pose(to_cam, points_world), K).reshape(5, 5, 3)
    moved = project(apply_pose(to_cam, apply_pose(T, points_world)), K).reshape(8, 5, 5, 3)
    flow = np.concatenate([moved, np.ones((8, 5, 5, 1))], -1)
    return FlowClip(observation, uvz, flow), T, points_world


def turned(share, centre):
    turn = Rotation.from_rotvec([0, 0, 1.2 * share]).as_matrix()
    return make_pose(turn, centre - turn @ centre + share * np.array([0.1, -0.15, 0.12]))


def test_motion_of_a_flow_is_that_of_the_object_in_the_world(moving):
    clip, T, points = moving
    motion = object_motion(clip, smooth_window=1)
    np.testing.assert_allclose(motion.T_t_0_world, T, atol=1e-9)
    np.testing.assert_allclose(motion.points_world_m, points, atol=1e-12)
    np.testing.assert_allclose(motion.moved_world_m[3], apply_pose(T[3], points), atol=1e-9)
    assert motion.fit.rmse_m.max() < 1e-9


def test_motion_from_the_first_predicted_frame_leaves_out_the_motion_to_it(moving):
    clip, T, _ = moving
    motion = object_motion(clip, smooth_window=1, from_first_predicted=True)
    np.testing.assert_allclose(motion.T_t_0_world, T @ inverse_pose(T[0]), atol=1e-9)


def test_camera_motion_in_the_world_moves_the_same_points():
    rng = np.random.default_rng(0)
    T, T_world_cam, points_cam = np.stack([pose(rng) for _ in range(4)]), pose(rng), rng.normal(size=(6, 3))
    expected = apply_pose(T_world_cam, apply_pose(T, points_cam))
    found = apply_pose(camera_to_world_motion(T, T_world_cam), apply_pose(T_world_cam, points_cam))
    np.testing.assert_allclose(found, expected, atol=1e-12)


def test_held_object_and_gripper_keep_their_relation():
    rng = np.random.default_rng(1)
    T, grasp, first = np.stack([pose(rng) for _ in range(4)]), pose(rng), pose(rng)
    grips = gripper_poses(T, grasp)
    np.testing.assert_allclose(inverse_pose(grips) @ T @ first, np.tile(inverse_pose(grasp) @ first, (4, 1, 1)))


def test_smoothing_keeps_even_motions_and_both_ends_and_calms_noise():
    rng = np.random.default_rng(2)
    centre = np.array([0.5, 0.1, 0.05])
    even = np.stack([turned(share, centre) for share in np.linspace(1 / 12, 1, 12)])
    np.testing.assert_allclose(smooth_motions(even, centre, 5), even, atol=1e-12)
    shake = [make_pose(turn_by(rng.normal(size=3) * 0.05), rng.normal(size=3) * 0.005) for _ in even]
    about = make_pose(np.eye(3), centre)
    noisy = even @ about @ np.stack(shake) @ inverse_pose(about)
    calm = smooth_motions(noisy, centre, 3)
    np.testing.assert_allclose(calm[-1], noisy[-1], atol=1e-12)
    np.testing.assert_array_equal(smooth_motions(noisy, centre, 1).round(12), noisy.round(12))
    assert angle_rad(calm[:-1], even[:-1]).mean() < 0.8 * angle_rad(noisy[:-1], even[:-1]).mean()


def test_smoothing_goes_no_farther_than_it_may():
    way = np.array([[0, 0, 0.1], [0.1, 0, 0.1], [0.2, 0, 0.1], [0.2, 0, 0.0]])
    corner = np.stack([make_pose(turn_by(np.array([0, 0, x])), np.array([x, 0.0, z])) for x, _, z in way])
    limits = {"shift_m": np.array([0.001, 0, 0.1, 0]), "turn_rad": np.array([0.01, 0, 1.0, 0])}
    free, tight = smooth_motions(corner, np.zeros(3), 3), smooth_motions(corner, np.zeros(3), 3, **limits)
    shifts = np.linalg.norm(tight[:, :3, 3] - corner[:, :3, 3], axis=-1)
    np.testing.assert_allclose(shifts[:2], [0.001, 0.0], atol=1e-9)
    np.testing.assert_allclose(angle_rad(tight[:2], corner[:2]), [0.01, 0.0], atol=1e-6)
    np.testing.assert_allclose(tight[2:], free[2:], atol=1e-12)
    assert np.linalg.norm(free[2, :3, 3] - corner[2, :3, 3]) > 0.01


def test_no_point_comes_below_the_support():
    points = np.array([[0.0, 0, 0.02], [0, 0.1, 0.3]])
    T = np.stack([make_pose(np.eye(3), np.array([0.1, 0, z])) for z in (-0.05, 0.1)])
    raised = lift_above(T, points, 0.01)
    np.testing.assert_allclose(raised[:, :3, 3], [[0.1, 0, -0.01], [0.1, 0, 0.1]])


def test_poses_in_between_are_those_of_slerp_and_near_each_other():
    rng = np.random.default_rng(3)
    given = np.stack([pose(rng, 0.1) for _ in range(3)])
    dense, places = interpolate_poses(given, step_m=0.05, step_rad=0.34)
    np.testing.assert_allclose(dense[places], given)
    assert np.linalg.norm(np.diff(dense[:, :3, 3], axis=0), axis=-1).max() <= 0.05 + 1e-9
    assert angle_rad(dense[:-1], dense[1:]).max() <= 0.34 + 1e-9
    count = places[1]
    between = Slerp([0, 1], Rotation.from_matrix(given[:2, :3, :3]))(np.arange(count + 1) / count).as_matrix()
    np.testing.assert_allclose(dense[: count + 1, :3, :3], between, atol=1e-9)
    alone, place = interpolate_poses(given[:1])
    assert len(alone) == 1
    assert place.tolist() == [0]


def test_joint_steps_are_equal_parts():
    found = interpolate_joints(np.array([[0.0, 1.0], [1.0, 1.0], [1.0, 3.0]]), 2)
    np.testing.assert_allclose(found, [[0, 1], [0.5, 1], [1, 1], [1, 2], [1, 3]])


def test_turns_are_rotation_vectors():
    turns = np.random.default_rng(4).uniform(-1.7, 1.7, (2, 3, 3))
    np.testing.assert_allclose(turn_of(turn_by(turns)), turns, atol=1e-9)
