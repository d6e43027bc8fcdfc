"""Motions estimated from flow in space and from its two image coordinates alone."""

import dataclasses

import numpy as np
import pytest

pytest.importorskip("cv2")
from scipy.spatial.transform import Rotation

from mmrl.errors import UserError
from mmrl.fields import check_config
from robotics.flow3d.clip import Observation, Z
from robotics.flow3d.flow_model import clip_of_points
from robotics.flow3d.geometry import angle_rad, apply_pose, intrinsics, make_pose
from robotics.flow3d.plan.planner_config import PlannerConfig
from robotics.flow3d.rigid_motion import ESTIMATORS, fit_flow


def moved_clip(turn_rad, way_m, frames=4):
    """A cloud in front of a camera that turns about its middle and moves, with its motions."""
    rng = np.random.default_rng(3)
    points = rng.uniform(-0.05, 0.05, (25, 3)) + np.array([0.02, -0.03, 0.8])
    centre, shares = points.mean(0), np.arange(1, frames + 1) / frames
    turns = [Rotation.from_rotvec(np.asarray(turn_rad) * share).as_matrix() for share in shares]
    ways = [share * np.asarray(way_m) for share in shares]
    T = np.stack([make_pose(turn, centre - turn @ centre + way) for turn, way in zip(turns, ways, strict=True)])
    size = (128, 128)
    K = intrinsics(size, fov_y_rad=0.9)
    seen = Observation(np.zeros((*size, 3), np.uint8), np.ones(size, np.float32), K, np.eye(4), "go")
    return clip_of_points(seen, points, apply_pose(T, points)), T


def with_depth(clip, change):
    flow = clip.flow.copy()
    flow[..., Z] = change(flow[..., Z])
    return clip.with_flow(flow)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_every_estimator_finds_a_motion_across_the_view(estimator):
    clip, T = moved_clip([0.0, 0.0, 0.9], [0.05, 0.1, 0.0])
    fit = fit_flow(clip, estimator)
    # Single precision of the pixels would be 1e-5; these are double, and the search of pnp ends at its own tolerance.
    np.testing.assert_allclose(fit.T_t_0, T, atol=1e-5)
    assert not fit.degenerate.any()
    assert fit.rmse_m.max() < 1e-5


def test_pnp_needs_no_predicted_depth_and_the_others_do():
    clip, T = moved_clip([0.3, 0.5, 0.2], [0.0, 0.05, -0.15])
    wrong = with_depth(clip, lambda z: np.full_like(z, 0.5))
    np.testing.assert_allclose(fit_flow(wrong, "pnp").T_t_0, T, atol=1e-5)
    assert np.abs(fit_flow(wrong, "irls").T_t_0[-1, :3, 3] - T[-1, :3, 3]).max() > 0.1


def test_frozen_depth_does_not_notice_that_an_object_comes_nearer():
    clip, T = moved_clip([0.0, 0.0, 0.0], [0.0, 0.0, -0.2])
    found = fit_flow(clip, "frozen_depth").T_t_0[-1]
    assert abs(found[2, 3]) < 0.02
    assert angle_rad(fit_flow(clip, "irls").T_t_0[-1], T[-1]) < 1e-6


def test_points_that_do_not_move_pull_least_squares_and_not_the_robust_fit():
    clip, T = moved_clip([0.0, 0.0, 0.0], [0.1, 0.0, 0.0])
    flow = clip.flow.copy()
    flow[:, 0, :, :3] = clip.points[0]
    still = clip.with_flow(flow)
    assert np.abs(fit_flow(still, "irls").T_t_0[-1] - T[-1]).max() < 0.005
    assert np.abs(fit_flow(still, "kabsch").T_t_0[-1] - T[-1]).max() > 0.015


def test_pnp_of_points_on_a_line_is_degenerate():
    clip, _ = moved_clip([0.0, 0.0, 0.0], [0.1, 0.0, 0.0])
    line = np.linspace([0.0, 0.0, 0.8], [0.1, 0.0, 0.8], 25)
    fit = fit_flow(clip_of_points(clip.observation, line, np.tile(line + 0.01, (2, 1, 1))), "pnp")
    assert fit.degenerate.all()


def test_hidden_points_do_not_count_for_pnp():
    clip, T = moved_clip([0.0, 0.4, 0.0], [0.05, 0.0, 0.0])
    flow = clip.flow.copy()
    flow[:, 0, 0] = [5.0, 5.0, 0.5, 0.0]
    np.testing.assert_allclose(fit_flow(clip.with_flow(flow), "pnp").T_t_0, T, atol=1e-5)


def test_the_first_predicted_frame_means_nothing_without_predicted_depth():
    check_config(PlannerConfig(estimator="kabsch", from_first_predicted=True), "planner")
    with pytest.raises(UserError, match="irls or kabsch"):
        check_config(dataclasses.replace(PlannerConfig(estimator="pnp"), from_first_predicted=True), "planner")
