"""Errors of flow against values computed by hand, and the drawing."""

import math

import numpy as np
import pytest

from robotics.flow3d.geometry import apply_pose, lift, make_pose, project
from robotics.flow3d.metrics import draw_flow, flow_errors, goal_reached
from tests.robotics.flow3d.model.synthetic import K, make_clips


def shifted(clip, way_m):
    """The clip's flow with all points moved by so many metres in the camera frame, frame by frame."""
    flow = clip.flow.copy()
    moved = lift(flow[..., :3], K) + np.asarray(way_m)[:, None, None]
    flow[..., :3] = project(moved, K)
    return flow


def test_errors_of_known_shifts():
    clip = make_clips(1, frames=4)[0]
    none, some = np.zeros((4, 3)), np.zeros((4, 3))
    some[1, 0], some[3] = 0.02, [0.06, 0.08, 0.0]  # 2 cm in the second frame, 10 cm in the last
    found = flow_errors(np.stack([shifted(clip, none), shifted(clip, some)]), clip)
    assert found.ade_cm == pytest.approx((0 + 3.0) / 2)
    assert found.fde_cm == pytest.approx((0 + 10.0) / 2)
    assert found.best_ade_cm == pytest.approx(0, abs=1e-9)
    assert found.within_5cm == pytest.approx(7 / 8)
    assert found.rotation_deg == pytest.approx(0, abs=1e-3)
    way = 100 * np.linalg.norm(clip.flow_cam_m - clip.points_cam_m, axis=-1)
    assert found.zero_motion_ade_cm == pytest.approx(way.mean())
    assert found.zero_motion_fde_cm == pytest.approx(way[-1].mean())


def test_hidden_points_are_left_out_of_the_visible_errors():
    clip = make_clips(1, frames=2)[0]
    clip.flow[0, 0, :, 3] = 0  # three of nine points hidden in the first frame, all in the second
    clip.flow[1, ..., 3] = 0
    wrong = clip.flow.copy()
    points = lift(wrong[0, 0, :, :3], K) + np.array([0.0, 0.0, 0.3])
    wrong[0, 0, :, :3] = project(points, K)
    found = flow_errors(wrong[None], clip)
    assert found.ade_visible_cm == pytest.approx(0, abs=1e-9)
    assert found.ade_cm == pytest.approx(30 * 3 / 18)
    assert math.isnan(found.fde_visible_cm)


def test_rotation_error_is_the_angle_of_the_fitted_motion():
    clip = make_clips(1, frames=2)[0]
    angle = 0.5
    turn = np.array([[math.cos(angle), -math.sin(angle), 0], [math.sin(angle), math.cos(angle), 0], [0, 0, 1.0]])
    end = lift(clip.flow[-1, ..., :3], K).reshape(-1, 3)
    about = make_pose(turn, end.mean(0) - turn @ end.mean(0))
    flow = clip.flow.copy()
    flow[-1, ..., :3] = project(apply_pose(about, end), K).reshape(3, 3, 3)
    assert flow_errors(flow[None], clip).rotation_deg == pytest.approx(math.degrees(angle), abs=0.5)


def test_the_nearest_goal_is_the_one_that_was_reached():
    goals = {"left": [0.0, 0.0, 0.0], "right": [1.0, 0.0, 0.0]}
    end = np.array([[0.8, 0.3, 0.0], [0.5, -0.3, 0.0]])
    assert goal_reached(end, goals, "right")
    assert not goal_reached(end, goals, "left")


def test_the_true_flow_of_a_clip_ends_at_the_goal_that_is_named():
    for clip in make_clips(6):
        goals, text = clip.meta["goals_world_m"], clip.observation.instruction.lower()
        end = clip.flow_world_m[-1]
        np.testing.assert_allclose(end.mean(0), goals[text], atol=1e-6)
        assert goal_reached(end, goals, text)


def test_flow_is_drawn_where_it_goes():
    clip = make_clips(1, frames=4)[0]
    image = np.asarray(draw_flow(clip.observation.rgb, clip.points, clip.flow, width_px=320)).astype(int)
    assert image.shape == (320, 320, 3)
    u, v = (clip.flow[-1, 1, 1, :2] * 10).astype(int)
    assert image[v, u].tolist() == [255, 70, 40]
    plain = np.asarray(draw_flow(clip.observation.rgb, clip.points, clip.flow[:1] * 0 + clip.flow[:1], width_px=320))
    assert (plain.astype(int) != image).any()
