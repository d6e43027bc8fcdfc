"""Random motion of samples: rigid, growing along the flow, dependent only on its seed, and of the given size."""

import numpy as np
import torch

from robotics.flow3d.geometry import lift
from robotics.flow3d.methods.samples import ExplorationConfig, perturbed
from tests.robotics.flow3d.model.synthetic import make_clips


def moved(count=4, first=0, **options):
    """A clip, and the points (K, T, n, 3) of its flow in the camera frame, before and after."""
    clip = make_clips(1)[0]
    flow = np.repeat(clip.flow[None], count, 0)
    found = perturbed(flow, clip.observation, torch.arange(first, first + count), ExplorationConfig(**options))
    assert np.array_equal(found[..., 3], flow[..., 3])
    before, after = (lift(x[..., :3], clip.observation.K).reshape(count, len(clip.flow), -1, 3) for x in (flow, found))
    return before, after


def test_the_motion_is_rigid_and_grows_evenly():
    before, after = moved(shift_cm=3.0, turn_deg=20.0)
    for points in (before, after):
        assert points.shape == (4, 4, 9, 3)
    gaps = [np.linalg.norm(x[..., :, None, :] - x[..., None, :, :], axis=-1) for x in (before, after)]
    np.testing.assert_allclose(gaps[1], gaps[0], atol=1e-9)
    way = after.mean(2) - before.mean(2)
    np.testing.assert_allclose(way, way[:, -1:] * (np.arange(1, 5) / 4)[:, None], atol=1e-9)
    assert np.abs(way[:, -1]).min(1).max() > 1e-4


def test_its_size_is_in_centimetres_and_degrees():
    before, after = moved(count=2000, shift_cm=2.0)
    ends = (after - before)[:, -1]
    np.testing.assert_allclose(ends, ends.mean(1, keepdims=True).repeat(9, 1), atol=1e-9)
    np.testing.assert_allclose(ends[:, 0].std(0), 0.02, rtol=0.1)
    np.testing.assert_allclose(ends[:, 0].mean(0), 0.0, atol=0.003)
    before, after = moved(count=2000, turn_deg=3.0)
    np.testing.assert_allclose(after.mean(2), before.mean(2), atol=1e-9)
    arm = before[0, -1, 0] - before[0, -1].mean(0)
    turned = (after[:, -1, 0] - after[:, -1].mean(1)) - arm
    # a small turn r moves a point at a by r x a, whose mean square is 2 |a|^2 sigma^2
    np.testing.assert_allclose((turned**2).sum(1).mean(), 2 * (arm @ arm) * np.radians(3.0) ** 2, rtol=0.1)


def test_a_sample_depends_on_its_own_seed_and_stays_without_exploration():
    _, many = moved(count=4, shift_cm=2.0, turn_deg=5.0)
    _, last = moved(count=1, first=3, shift_cm=2.0, turn_deg=5.0)
    np.testing.assert_array_equal(many[3:], last)
    assert not np.array_equal(many[0], many[1])
    assert not ExplorationConfig().on


def test_what_would_leave_the_view_of_the_camera_stays():
    clip = make_clips(1)[0]
    flow = np.repeat(clip.flow[None], 2, 0)
    flow[0, 1, 0, 0, 2] = -0.5
    found = perturbed(flow, clip.observation, torch.arange(2), ExplorationConfig(shift_cm=2.0))
    np.testing.assert_array_equal(found[0], flow[0])
    assert not np.array_equal(found[1], flow[1])
    wild = perturbed(flow[1:].repeat(50, 0), clip.observation, torch.arange(50), ExplorationConfig(shift_cm=200.0))
    assert (wild[..., 2] > 0).all()
    assert any(np.array_equal(one, flow[1]) for one in wild)
