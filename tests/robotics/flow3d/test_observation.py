"""Cameras and depth that cannot be right are refused."""

import dataclasses

import numpy as np
import pytest

from mmrl.errors import UserError
from robotics.flow3d.video import RejectedVideo, RgbdVideo
from tests.robotics.flow3d.drawn import drawn_sphere

SEEN = drawn_sphere(side_px=16)
MILLIMETRES = (1000 * SEEN.depth_m).astype(np.uint16)


def scaled(factors):
    return SEEN.T_world_cam @ np.diag([*factors, 1.0])


@pytest.mark.parametrize(
    ("entry", "value", "message"),
    [
        ("depth_m", MILLIMETRES, "depth_m is uint16; must be floats in metres"),
        ("mask", SEEN.mask.astype(np.uint8) * 255, "mask is uint8; must be bool, such as mask > 0"),
        ("K", SEEN.K.T, "not its transpose"),
        ("K", SEEN.K + np.eye(3, k=1), r"K is .*; must be \[\[fx, 0, cx\]"),
        ("T_world_cam", SEEN.T_world_cam.T, "T_world_cam is .* with the last row 0, 0, 0, 1"),
        ("T_world_cam", np.full((4, 4), np.nan), "T_world_cam is .*; must be finite"),
        ("T_world_cam", scaled([1000.0] * 3), "T_world_cam is .* right-handed rotation without a scale"),
        ("T_world_cam", scaled([-1.0, 1.0, 1.0]), "T_world_cam is .* right-handed"),
    ],
)
def test_what_is_not_a_camera_in_metres_is_refused(entry, value, message):
    with pytest.raises(UserError, match=message):
        dataclasses.replace(SEEN, **{entry: value})


def test_a_pose_written_with_two_digits_is_taken():
    T = SEEN.T_world_cam.copy()
    T[:3, :3] = T[:3, :3].round(2)
    assert dataclasses.replace(SEEN, T_world_cam=T).T_world_cam is T


def test_videos_are_checked_alike():
    entries = {"rgb": np.stack([SEEN.rgb] * 2), "depth_m": np.stack([SEEN.depth_m] * 2), "K": SEEN.K}
    with pytest.raises(UserError, match="depth_m is uint16"):
        RgbdVideo(**entries | {"depth_m": np.stack([MILLIMETRES] * 2)})
    with pytest.raises(UserError, match="gripper_mask is float32; must be bool"):
        RgbdVideo(**entries, gripper_mask=np.zeros((16, 16), np.float32))
    with pytest.raises(UserError, match=r"T_world_cams is .* right-handed"):
        RgbdVideo(**entries, T_world_cams=np.stack([SEEN.T_world_cam, scaled([1.0, 1.0, -1.0])]))
    with pytest.raises(UserError, match="not its transpose"):
        RgbdVideo(**entries | {"K": SEEN.K.T})
    with pytest.raises(RejectedVideo, match="no_intrinsics"):  # a recording without a calibration
        _ = RgbdVideo(**entries | {"K": np.zeros((3, 3))}).intrinsics_px
