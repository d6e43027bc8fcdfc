"""A moving camera: detected, refused, or compensated by its poses."""

import dataclasses

import numpy as np
import pytest

from benchmarks.robotics.flow3d_extractors import score_detector
from robotics.flow3d.clip import FlowEncoding
from robotics.flow3d.extract import FlowExtractor, RejectedVideo, RevealedDepth, RgbdVideo
from robotics.flow3d.extract.camera import camera_motion_px, seen_from_first
from robotics.flow3d.geometry import inverse_pose, make_pose
from tests.robotics.flow3d.rgbd_scene import rgbd_video

EIGHT = FlowEncoding(num_frames=8, grid=4)


def wall_video(shifts_px, side=96, focal_px=120.0):
    """A textured wall 1.2 m away, seen by a camera that moves sideways by whole pixels."""
    rng = np.random.default_rng(0)
    wide = np.kron(rng.integers(0, 256, (24, 40)), np.ones((4, 4))).astype(np.uint8)
    rgb = np.stack([np.repeat(wide[:, 20 + shift : 20 + shift + side, None], 3, -1) for shift in shifts_px])
    depth = np.full((len(shifts_px), side, side), 1.2, np.float32)
    poses = [make_pose(np.eye(3), np.array([shift * 1.2 / focal_px, 0, 0])) for shift in shifts_px]
    K = np.array([[focal_px, 0, side / 2], [0, focal_px, side / 2], [0, 0, 1.0]])
    return RgbdVideo(rgb, depth, K, T_world_cam=poses[0], T_world_cams=np.stack(poses))


def test_the_motion_of_the_background_is_measured():
    assert camera_motion_px(wall_video([0, 0, 0, 0])) == pytest.approx(0.0, abs=0.01)
    moving = wall_video([0, 2, 4, 6])
    assert camera_motion_px(moving) == pytest.approx(6.0, abs=0.3)
    assert camera_motion_px(dataclasses.replace(moving, depth_m=None)) == pytest.approx(6.0, abs=0.3)
    blank = dataclasses.replace(moving, rgb=np.zeros_like(moving.rgb))
    assert camera_motion_px(blank) is None
    towards = dataclasses.replace(
        blank, depth_m=blank.depth_m * np.linspace(1, 0.8, 4, dtype=np.float32)[:, None, None]
    )
    assert camera_motion_px(towards) == np.inf


def test_poses_turn_it_into_the_video_of_a_still_camera():
    moving = wall_video([0, 2, 4, 6])
    still = seen_from_first(moving)
    np.testing.assert_array_equal(still.rgb[3][:, 6:], moving.rgb[0][:, 6:])
    np.testing.assert_allclose(still.depth_m[3][:, 6:], 1.2, atol=1e-6)
    assert np.isnan(still.depth_m[3][:, :5]).all()  # what only the first frame saw
    assert still.T_world_cams is None
    np.testing.assert_array_equal(still.T_world_cam, moving.T_world_cam)


def test_nearer_pixels_hide_farther_ones():
    moving = wall_video([0, 0])
    depth = moving.depth_m.copy()
    depth[1, 40:60, 40:60] = 0.6
    # From 12 cm farther left, what is at 0.6 m is seen 24 px to the right of where it was, the wall 12 px.
    poses = np.stack([make_pose(np.eye(3), np.array([-0.12, 0, 0])), np.eye(4)])
    still = seen_from_first(dataclasses.replace(moving, depth_m=depth, T_world_cam=poses[0], T_world_cams=poses))
    np.testing.assert_allclose(still.depth_m[1, 42:58, 66:82], 0.6, atol=1e-6)
    np.testing.assert_array_equal(still.rgb[1, 42:58, 66:82], moving.rgb[1, 42:58, 42:58])
    np.testing.assert_allclose(still.depth_m[1, 42:58, 14:50], 1.2, atol=1e-6)


@pytest.fixture(scope="module")
def shaken(backend):
    """A video whose camera moves 4 cm sideways and rotates by 2 degrees, and the static one that it was made from."""
    video = rgbd_video("place", "box", seed=2, size=128)
    angle = np.linspace(0, np.radians(2), len(video))
    turns = np.stack([[[np.cos(a), 0, np.sin(a)], [0, 1, 0], [-np.sin(a), 0, np.cos(a)]] for a in angle])
    moves = np.linspace(0, 0.04, len(video))[:, None] * np.array([1.0, 0, 0])
    relative = make_pose(turns, moves)
    drawn = [
        seen_from_first(
            RgbdVideo(
                video.rgb[[0, frame]],
                video.depth_m[[0, frame]],
                video.K,
                T_world_cams=np.stack([relative[frame], np.eye(4)]),
            )
        )
        for frame in range(len(video))
    ]
    rgb, depth = np.stack([one.rgb[1] for one in drawn]), np.stack([one.depth_m[1] for one in drawn])
    return dataclasses.replace(video, rgb=rgb, depth_m=depth, truth=None), video.T_world_cam @ relative, video


@pytest.mark.slow
def test_a_moving_camera_is_refused_or_compensated(shaken):
    video, poses, still = shaken
    with pytest.raises(RejectedVideo) as refused:
        FlowExtractor(EIGHT).extract(video)
    assert refused.value.reason == "moving_camera"
    known = dataclasses.replace(video, T_world_cams=poses, T_world_cam=poses[0])
    np.testing.assert_allclose(inverse_pose(poses[0]) @ still.T_world_cam, np.eye(4), atol=1e-12)
    compensated = dataclasses.replace(seen_from_first(known), truth=still.truth)
    assert score_detector(RevealedDepth(), compensated).precision > 0.7
    clip = FlowExtractor(EIGHT).extract(known)
    true = FlowExtractor(EIGHT).extract(still)
    ends = [one.flow_world_m[-1].mean(0) - one.points_world_m.mean(0) for one in (clip, true)]
    assert np.linalg.norm(ends[0] - ends[1]) < 0.03
