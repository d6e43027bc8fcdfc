"""Fitted motions against scipy, and with outliers."""

import numpy as np
import pytest
from scipy.spatial.transform import Rotation

from robotics.flow3d.geometry import angle_rad, apply_pose, make_pose
from robotics.flow3d.rigid_motion import fit_motions, kabsch, ransac_kabsch, robust_kabsch


def motion(rng):
    return make_pose(Rotation.random(random_state=rng).as_matrix(), rng.normal(size=3) * 0.2)


@pytest.mark.parametrize("seed", range(5))
def test_weighted_least_squares_are_those_of_scipy(seed):
    rng = np.random.default_rng(seed)
    source, w = rng.normal(size=(20, 3)), rng.uniform(0.1, 1, 20)
    target = apply_pose(motion(rng), source) + rng.normal(size=(20, 3)) * 0.05
    T = kabsch(source, target, w)
    mean_source, mean_target = w @ source / w.sum(), w @ target / w.sum()
    expected, _ = Rotation.align_vectors(target - mean_target, source - mean_source, weights=w)
    np.testing.assert_allclose(T[:3, :3], expected.as_matrix(), atol=1e-10)
    np.testing.assert_allclose(T[:3, 3], mean_target - expected.as_matrix() @ mean_source, atol=1e-10)


def test_a_reflection_is_never_fitted():
    rng = np.random.default_rng(0)
    source = rng.normal(size=(10, 3))
    T = kabsch(source, source * [1, 1, -1])
    assert np.linalg.det(T[:3, :3]) == pytest.approx(1)


@pytest.mark.parametrize("source", [np.zeros((5, 3)), np.linspace(0, 1, 6)[:, None] * [1.0, 2, 3], np.eye(3)[:2]])
def test_points_on_a_line_give_a_translation(source):
    shift = np.array([0.1, 0.2, 0.3])
    T = kabsch(source, source + shift)
    np.testing.assert_allclose(T, make_pose(np.eye(3), shift), atol=1e-12)


def test_zero_weights_give_no_motion():
    np.testing.assert_array_equal(kabsch(np.eye(3), np.eye(3) + 1, np.zeros(3)), np.eye(4))


@pytest.mark.parametrize("still", [0.2, 0.4])
def test_points_that_do_not_move_do_not_pull_a_robust_fit(still):
    rng = np.random.default_rng(3)
    source = rng.uniform(-0.05, 0.05, (40, 3))
    T = make_pose(Rotation.from_rotvec([0.3, -0.2, 0.5]).as_matrix(), np.array([0.15, 0.05, 0.1]))
    target = apply_pose(T, source)
    wrong = rng.permutation(40)[: round(40 * still)]
    target[wrong] = source[wrong]
    found, weights = robust_kabsch(source, target)
    assert np.linalg.norm(found[:3, 3] - T[:3, 3]) < 0.005
    assert angle_rad(found, T) < 0.05
    assert weights[wrong].max() < 0.1
    assert np.linalg.norm(kabsch(source, target)[:3, 3] - T[:3, 3]) > 0.01
    np.testing.assert_allclose(ransac_kabsch(source, target)[:3, 3], found[:3, 3], atol=0.01 + still)


def test_motions_of_a_flow_with_their_quality():
    rng = np.random.default_rng(4)
    source = rng.uniform(-0.05, 0.05, (16, 3))
    true = np.stack([motion(rng) for _ in range(3)])
    flow, visible = apply_pose(true, source), np.ones((3, 16))
    flow[:, 0] += 5
    visible[:, 0] = 0
    visible[2] = 0  # nothing seen: all points are taken, and the one that is far off does not pull
    fit = fit_motions(source, flow, visible)
    np.testing.assert_allclose(fit.T_t_0, true, atol=1e-3)
    assert fit.weights.shape == (3, 16)
    assert fit.rmse_m.max() < 0.02
    assert not fit.degenerate.any()
    assert fit_motions(source[:2], flow[:, :2]).degenerate.all()
    plain = fit_motions(source, flow, robust=False)
    assert np.linalg.norm(plain.T_t_0[0, :3, 3] - true[0, :3, 3]) > 0.1
