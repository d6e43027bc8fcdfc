"""Images of outcomes against a scene whose image after the motion is known in closed form."""

import numpy as np
import pytest

from mmrl.errors import UserError
from mmrl.fields import check_config
from robotics.flow3d.clouds import draw_points
from robotics.flow3d.geometry import apply_pose, inverse_pose, make_pose
from robotics.flow3d.plan.planner_config import PlannerConfig
from robotics.flow3d.plan.rendering import render_outcome, scene_cloud
from tests.robotics.flow3d.drawn import CENTRE, drawn_sphere

WAY = np.array([0.02, 0.12, 0.0])


def test_rendering_all_points_of_a_scene_reproduces_its_image():
    observation = drawn_sphere()
    everything = scene_cloud(observation, np.zeros_like(observation.mask))
    points = apply_pose(inverse_pose(observation.T_world_cam), everything.rest_m)
    image, depth = draw_points(points, everything.rest_rgb, observation.K, observation.size_px)
    np.testing.assert_array_equal(image, observation.rgb)
    np.testing.assert_allclose(depth, observation.depth_m, rtol=1e-6)


def test_near_points_hide_far_ones():
    observation = drawn_sphere()
    points = np.array([[0.0, 0, 0.5], [0.0, 0, 1.0], [0.0, 0, 0.7], [0, 0, -1], [9, 9, 1.0]])
    colours = np.arange(5, dtype=np.uint8)[:, None].repeat(3, 1) + 1
    image, depth = draw_points(points, colours, observation.K, observation.size_px)
    assert image.max(-1)[64, 64] == 1
    assert np.isfinite(depth).sum() == 1
    assert depth[64, 64] == pytest.approx(0.5)
    nothing, _ = draw_points(points[3:4], colours[3:4], observation.K, observation.size_px)
    assert not nothing.any(), "points behind the camera are not drawn"


def test_moved_object_is_drawn_where_it_would_be_seen():
    before, truth = drawn_sphere(), drawn_sphere(CENTRE + WAY)
    after = render_outcome(before, before.mask, make_pose(np.eye(3), WAY))
    red = (after[..., 0] > 160) & (after[..., 1] < 80)
    overlap = (red & truth.mask).sum() / (red | truth.mask).sum()
    assert overlap > 0.8
    vacated = before.mask & ~truth.mask
    assert (after[vacated][:, 1] > 90).mean() > 0.95, "the table is guessed where the ball was"
    difference = np.abs(after.astype(float) - truth.rgb).mean()
    assert difference < 4, "of 255, with the floor's pattern guessed under the ball"
    assert np.array_equal(after[0], before.rgb[0]), "what is far away stays as it is"


def test_objects_pass_behind_nearer_ones():
    before = drawn_sphere()
    far_below = render_outcome(before, before.mask, make_pose(np.eye(3), np.array([-0.1, 0.1, -0.5])))
    assert not ((far_below[..., 0] > 160) & (far_below[..., 1] < 80)).any()


def test_unknown_renderers_are_named():
    with pytest.raises(UserError, match=r"'numpy'.*open3d, replay"):
        check_config(PlannerConfig(renderer="numpy"), "planner")
