"""Extraction from noisy depth, and detection near hands and arms, on synthetic depth and rendered scenes."""

import dataclasses

import numpy as np
import pytest
from scipy.spatial.transform import Rotation

from benchmarks.robotics.flow3d_extractors import score_detector, score_tracker
from mmrl.errors import UserError
from robotics.flow3d.clip import FlowEncoding
from robotics.flow3d.extract import DenoisedDepth, FlowExtractor, RevealedDepth, RgbdVideo, RigidChain, SensorDepth
from robotics.flow3d.extract.depth import depth_noise_m, resting_depth, smoothed
from robotics.flow3d.extract.extractor import revealed_mask
from robotics.flow3d.extract.rigid_chain import fit_reprojection
from robotics.flow3d.geometry import angle_rad, apply_pose, intrinsics, make_pose, project
from tests.robotics.flow3d.rgbd_scene import rgbd_video

NOISE = 0.01


@pytest.fixture(scope="module")
def noisy(backend):
    return rgbd_video("place", "box", seed=2, size=128, noise=NOISE)


def step(side=40):
    """(side, side) metres with an edge in the middle, deeper than any noise here."""
    return np.where(np.arange(side) < side // 2, 1.0, 1.3) * np.ones((side, 1))


def with_noise(depth, frames, seed=0):
    errors = np.random.default_rng(seed).normal(size=(frames, *depth.shape))
    return (depth * (1 + NOISE * errors)).astype(np.float32)


def test_smoothing_averages_noise_but_keeps_edges_and_holes():
    depth = with_noise(step(), 1)[0]
    depth[5:8, 5:8] = np.nan
    smooth = smoothed(depth, 0.011, 7)
    assert np.isnan(smooth[5:8, 5:8]).all()
    assert np.isnan(smooth).sum() == 9
    error = smooth - step()
    # 49 pixels, weighed by distance and by depth, come to an effective dozen or more: a third of the deviation at most.
    assert np.nanstd(error) < 0.4 * NOISE
    assert np.abs(np.nanmean(error[:, 19])) < 0.4 * NOISE  # beside the edge, where a plain mean would be 15 cm off
    assert np.abs(np.nanmean(error[:, 20])) < 0.4 * NOISE


def test_clean_depth_stays_as_it_is():
    depth = np.repeat(step()[None].astype(np.float32), 3, 0)
    video = RgbdVideo(np.zeros((3, 40, 40, 3), np.uint8), depth, np.eye(3))
    np.testing.assert_array_equal(DenoisedDepth().depth_m(video), depth)
    spoilt = dataclasses.replace(video, depth_m=with_noise(step(), 3))
    assert depth_noise_m(DenoisedDepth().depth_m(spoilt)) < 0.5 * depth_noise_m(spoilt.depth_m)
    np.testing.assert_array_equal(DenoisedDepth(least_noise_m=0.1).depth_m(spoilt), spoilt.depth_m)


def test_resting_depth_is_the_mean_until_a_pixel_changes():
    depth = np.full((4, 1, 3), 1.0, np.float32)
    depth[1:, 0, 0] = [1.02, 0.98, 1.04]  # rests: mean of four
    depth[1:, 0, 1] = [1.02, 0.5, 1.0]  # changes after two
    depth[0, 0, 2] = np.nan
    found = resting_depth(depth, 0.05)
    np.testing.assert_allclose(found[0, :2], [1.01, 1.01], atol=1e-6)
    assert np.isnan(found[0, 2])


def test_reprojection_finds_the_pose_and_trusts_pixels_more_than_depth():
    rng = np.random.default_rng(0)
    K = intrinsics((128, 128), fov_y_rad=0.6)
    points = rng.normal(size=(60, 3)) * 0.03 + [0, 0, 1]
    turn = Rotation.from_rotvec([0.1, -0.2, 0.1]).as_matrix()
    T = make_pose(turn, np.array([0.02, 0, 1.0]) - turn @ [0, 0, 1])
    uvz = project(apply_pose(T, points), K)
    np.testing.assert_allclose(fit_reprojection(np.eye(4), points, uvz, K, 0.5, 0.01, iterations=20), T, atol=1e-9)
    uvz[:, 2] += 0.01 * rng.normal(size=60)
    uvz[:6, :2] += 30.0  # followed something else
    found = fit_reprojection(np.eye(4), points, uvz, K, 0.5, 0.01, iterations=20)
    assert angle_rad(found, T) < 0.1
    moved, true = (apply_pose(pose, points).mean(0) for pose in (found, T))
    # The mean of 54 depths is sure to 1.4 mm; five deviations.
    assert np.linalg.norm(moved - true) < 0.007


def scene_of_boxes(frames=12):
    """(L, 40, 40): an object that leaves at frame 8, on a background at 1 m."""
    depth = np.ones((frames, 40, 40), np.float32)
    depth[:8, 20:30, 20:30] = 0.9
    return depth


OBJECT = np.zeros((40, 40), bool)
OBJECT[20:30, 20:30] = True


def test_a_hand_in_front_of_the_object_early_on_does_not_cut_into_its_mask():
    depth = scene_of_boxes()
    depth[4:8, 20:26, 20:24] = 0.7
    np.testing.assert_array_equal(revealed_mask(depth, 0.01), OBJECT)


def test_an_actor_that_stays_where_the_object_was_does_not_hide_it():
    depth = scene_of_boxes(16)
    depth[11:, 18:32, 18:32] = 0.7
    np.testing.assert_array_equal(revealed_mask(depth, 0.01), OBJECT)
    assert not revealed_mask(depth, 0.01, least_frames=4).any()


def test_a_hand_that_covers_its_first_position_for_a_while_is_not_the_object():
    depth = scene_of_boxes()
    depth[:2, 2:14, 2:17] = 0.8  # larger than the object
    depth[2:9, 2:14, 6:20] = 0.75  # most of it stays covered until frame 9
    depth[9:, 30:38, 2:17] = 0.75
    np.testing.assert_array_equal(revealed_mask(depth, 0.01), OBJECT)


def test_the_object_is_found_in_noise(noisy):
    # Without noise it is 0.97. A threshold above the noise costs the pixels at its foot, where it touches the table.
    score = score_detector(RevealedDepth(), noisy)
    assert score.iou > 0.7
    assert score.precision > 0.9


@pytest.mark.slow
def test_denoised_depth_and_reprojection_follow_the_object_in_noise(noisy):
    score, raw = (score_tracker(RigidChain(), noisy, depth=depth) for depth in (None, SensorDepth()))
    assert score.median_cm < 1.2  # 1 cm is the noise of a single depth
    assert score.median_cm < raw.median_cm
    clip = FlowExtractor(FlowEncoding(num_frames=8, grid=4)).extract(noisy)
    assert clip.quality["depth_noise_m"] < 0.5 * depth_noise_m(noisy.depth_m)
    rows, columns = (clip.points[..., axis].astype(int) for axis in (1, 0))
    true = noisy.truth.depth_m[rows, columns]
    assert np.median(np.abs(clip.points[..., 2] - true)) < np.median(np.abs(noisy.depth_m[0, rows, columns] - true))


def test_frames_can_begin_with_the_motion(noisy):
    encoding = FlowEncoding(num_frames=8, grid=4)
    first, moving = (FlowExtractor(encoding, begin=begin).extract(noisy) for begin in ("video", "motion"))

    def way_cm(clip):
        return 100 * np.median(np.linalg.norm(clip.flow_cam_m - clip.points_cam_m, axis=-1), axis=1)

    with pytest.raises(UserError, match="begin is 'end'; must be video or motion"):
        FlowExtractor(encoding, begin="end")
    # 10 of 41 frames show the hand coming; every fifth is taken.
    assert (way_cm(first)[:2] < 1).all()
    assert way_cm(moving)[1] > 2
    np.testing.assert_allclose(first.flow[-1], moving.flow[-1])
