"""ReKep's terms on hand-computed numbers, and the optimisation of a chunk around the closed form."""

import numpy as np
import pytest

from mmrl.errors import UserError
from robotics.flow3d.geometry import angle_rad, apply_pose, make_pose
from robotics.flow3d.plan.chunk_solver import (
    ChunkSettings,
    collision_cost,
    flow_keypoint_cost,
    pose_consistency,
    refine_chunk,
)
from robotics.flow3d.rigid_motion import turn_by

GRIP = make_pose(np.diag([1.0, -1.0, -1.0]), np.array([0.5, 0.0, 0.06]))


def shift(x=0.0, y=0.0, z=0.0):
    return make_pose(np.eye(3), np.array([x, y, z]))


def test_terms_are_those_of_rekep():
    """Numbers: calculate_collision_cost and consistency of huangwl18/ReKep utils.py at 7ec6480."""
    k = np.arange(1, 7)
    turns, places = np.stack([0.1 * k, -0.05 * k, 0.2 * k], -1), np.stack([0.1 * k, 0.2 - 0.05 * k, 0.03 * k], -1)
    poses = make_pose(turn_by(turns[:4]), places[:4])
    points = np.stack([np.sin(k), np.cos(k), np.sin(2 * k)], -1) * 0.1
    hit = collision_cost(poses, points, lambda place: 0.05 - place[:, 2] - 0.2 * place[:, 0] ** 2, 0.1)
    assert hit == pytest.approx(1.8291141539177278, rel=1e-12)
    # its angle is an arc cosine, which rounds more than ours
    assert pose_consistency(poses[:2], poses[2:], 1.5) == pytest.approx(0.6891773192243857, rel=1e-9)


def test_collision_sums_the_depth_within_the_margin():
    points = np.array([[0.0, 0, 0.0], [0, 0, 0.1]])
    below = lambda places: -places[:, 2]  # noqa: E731 - the ground below z = 0
    poses = np.stack([shift(z=0.02), shift(z=0.5), shift(z=-0.03)])
    # with a margin of 5 cm: 3 cm and none, none and none, 8 cm and none
    assert collision_cost(poses, points, below, 0.05) == pytest.approx(0.11)
    assert collision_cost(poses, points, below, 0.0) == pytest.approx(0.03)


def test_consistency_is_the_mean_distance_to_the_nearest_pose():
    turned = make_pose(turn_by(np.array([0.0, 0, 0.4])), np.array([0.3, 0, 0]))
    others = np.stack([shift(0.1), shift(1.0)])
    found = pose_consistency(np.stack([shift(), turned]), others)
    assert found == pytest.approx((0.1 + (0.2 + 0.5 * 0.4)) / 2)
    assert pose_consistency(turned[None], others[:1], 1.5) == pytest.approx(0.2 + 0.6)


def test_keypoints_cost_their_distance():
    points = np.zeros((2, 3))
    assert flow_keypoint_cost(points, np.array([[0.3, 0.4, 0], [0, 0, 0.1]])) == pytest.approx(0.13)
    assert flow_keypoint_cost(points, np.array([[0.3, 0.4, 0], [0, 0, 0.1]]), p=1) == pytest.approx(0.3)
    with pytest.raises(UserError, match="p is 3"):
        flow_keypoint_cost(points, points, 3)


@pytest.fixture
def chunk():
    """A box of points that moves sideways and rotates, and its flow."""
    rng = np.random.default_rng(0)
    points = rng.uniform(-0.03, 0.03, (40, 3)) + np.array([0.5, 0.0, 0.06])
    centre = points.mean(0)
    T = []
    for share in (0.5, 1.0):
        turn = turn_by(np.array([0.0, 0.6 * share, 0.8 * share]))
        T.append(make_pose(turn, centre - turn @ centre + share * np.array([0.0, 0.1, 0.03])))
    T = np.stack(T)
    return T, points, apply_pose(T, points)


@pytest.mark.parametrize("p", [1, 2])
def test_closed_form_is_the_optimum_of_a_rigid_flow(chunk, p):
    T, points, flow = chunk
    refined, costs = refine_chunk(T, points, flow, points, GRIP, settings=ChunkSettings(p=p))
    np.testing.assert_allclose(refined, T, atol=1e-6)
    assert max(cost.total for cost in costs) < 1e-6


@pytest.mark.parametrize("solver", ["slsqp", "dual_annealing"])
def test_a_wrong_start_is_mended_by_the_keypoints(chunk, solver):
    T, points, flow = chunk
    wrong = shift(0.03, -0.02, 0.01) @ T
    settings = ChunkSettings(smoothness_weight=0.0, first_solver=solver, evaluations=150)
    refined, costs = refine_chunk(wrong, points, flow, points, GRIP, settings=settings)
    np.testing.assert_allclose(refined[:, :3, 3], T[:, :3, 3], atol=2e-3)
    assert angle_rad(refined, T).max() < 0.02
    assert max(cost.keypoints for cost in costs) < 200 * 1e-5
    again, _ = refine_chunk(wrong, points, flow, points, GRIP, settings=settings)
    np.testing.assert_array_equal(again, refined)


def test_obstacles_push_the_object_away(chunk):
    T, points, flow = chunk

    def floor(places):  # everything below 7 cm
        return 0.07 - places[:, 2]

    before = collision_cost(T, points, floor, 0.02)
    refined, costs = refine_chunk(T, points, flow, points, GRIP, inside_m=floor)
    after = collision_cost(refined, points, floor, 0.02)
    assert after < 0.5 * before
    assert (refined[:, 2, 3] > T[:, 2, 3]).all()
    free = 0.8 * collision_cost(T[:1], points, floor, 0.02)
    assert costs[0].total < free


def test_reachability_is_part_of_the_cost():
    pytest.importorskip("mink")
    from robotics.flow3d.kinematics import ArmIk
    from tests.robotics.flow3d.bench_arms import BenchArm

    ik = ArmIk(BenchArm("panda"))
    points = np.random.default_rng(1).uniform(-0.03, 0.03, (12, 3)) + np.array([0.5, 0.0, 0.06])
    settings = ChunkSettings(iterations=2)
    costs = []
    for way in (0.1, 2.0):
        T = shift(y=way)[None]
        _, found = refine_chunk(T, points, apply_pose(T, points), points, GRIP, ik=ik, settings=settings)
        costs.append(found[0].reach)
    assert 0 < costs[0] < 20
    assert costs[1] > costs[0] + 10, "metres out of reach"
