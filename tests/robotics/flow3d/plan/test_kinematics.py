"""Inverse kinematics of arms against the suite's own forward kinematics."""

from types import SimpleNamespace

import numpy as np
import pytest

from mmrl.errors import UserError
from robotics.flow3d.geometry import angle_rad, make_pose

pytest.importorskip("mink")
from robotics.flow3d.kinematics import JUMP_RAD, POSITION_TOLERANCE_M, ArmIk
from robotics.flow3d.rigid_motion import interpolate_poses, turn_by


def test_poses_are_those_of_the_other_kinematics(arm):
    ik, kinematics = ArmIk(arm), arm.model.kinematics
    angles = np.random.default_rng(0).uniform(ik.low_rad, ik.high_rad, (5, len(arm.joints)))
    expected, _ = kinematics(angles)
    np.testing.assert_allclose([ik.pose(row) for row in angles], expected, atol=1e-9)
    np.testing.assert_allclose([ik.low_rad, ik.high_rad], [kinematics.low_rad, kinematics.high_rad])


def test_poses_of_an_arm_are_found_again_within_its_limits(arm):
    ik, rng = ArmIk(arm), np.random.default_rng(1)
    home = np.array(arm.home_rad)
    for _ in range(10):
        goal = ik.pose(home + rng.uniform(-0.5, 0.5, len(home)))
        found = ik.solve(goal, home, restarts=4)
        assert found.reached
        reached = ik.pose(found.joint_rad)
        assert np.linalg.norm(reached[:3, 3] - goal[:3, 3]) == pytest.approx(found.position_error_m, abs=1e-9)
        assert float(angle_rad(reached, goal)) == pytest.approx(found.angle_error_rad, abs=1e-7)
        assert found.position_error_m <= POSITION_TOLERANCE_M
        assert np.all((found.joint_rad >= ik.low_rad) & (found.joint_rad <= ik.high_rad))


def test_a_pose_out_of_reach_is_not_reached_and_the_nearest_one_is_given(arm):
    ik = ArmIk(arm)
    far = ik.pose(ik.home_rad)
    far[:3, 3] = [3.0, 0.0, 0.3]
    found = ik.solve(far, ik.home_rad, restarts=1)
    assert not found.reached
    assert 1.5 < found.position_error_m < 2.9
    assert np.all((found.joint_rad >= ik.low_rad) & (found.joint_rad <= ik.high_rad))


def test_a_path_is_followed_with_small_steps(arm):
    ik = ArmIk(arm)
    start = ik.pose(ik.home_rad)
    turned = make_pose(start[:3, :3] @ turn_by(np.array([0.0, 0.4, 0.3])), start[:3, 3] + [0.05, 0.15, -0.08])
    poses, _ = interpolate_poses(np.stack([start, turned]))
    path = ik.follow(poses, ik.home_rad)
    assert path.complete
    assert np.abs(np.diff(path.joint_rad, axis=0)).max() < JUMP_RAD
    np.testing.assert_allclose(ik.pose(path.joint_rad[-1])[:3, 3], turned[:3, 3], atol=0.003)
    assert path.length_rad == pytest.approx(np.linalg.norm(np.diff(path.joint_rad, axis=0), axis=1).sum())


def test_a_jump_and_a_pose_out_of_reach_end_a_path(arm, monkeypatch):
    start = ArmIk(arm).pose(np.array(arm.home_rad))
    away, back = start.copy(), start.copy()
    away[:3, 3] += [0, 0, 5.0]
    ik = ArmIk(arm)
    path = ik.follow(np.stack([start, away, back]), ik.home_rad)
    assert path.reached.tolist() == [True, False, False]
    np.testing.assert_array_equal(path.joint_rad[1:], path.joint_rad[:1].repeat(2, 0))
    assert ik.follow(np.stack([start, away, back]), ik.home_rad, stop_early=False).reached.tolist() == [
        True,
        False,
        True,
    ]
    aside = start.copy()
    aside[1, 3] += 0.25
    assert ik.follow(np.stack([start, aside]), ik.home_rad).complete
    monkeypatch.setattr("robotics.flow3d.kinematics.JUMP_RAD", 0.05)
    assert ik.follow(np.stack([start, aside]), ik.home_rad).reached.tolist() == [True, False]


def test_what_does_not_fit_is_named(arm):
    wrong = SimpleNamespace(**{**vars(arm), "grip_site": "hook", "load": arm.load})
    with pytest.raises(UserError, match="hook"):
        ArmIk(wrong)
    short = SimpleNamespace(**{**vars(arm), "home_rad": (0.0,), "load": arm.load})
    with pytest.raises(UserError, match="1 angles of home_rad"):
        ArmIk(short)
