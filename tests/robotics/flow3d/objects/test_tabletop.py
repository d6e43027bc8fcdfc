"""Arms in physics: paths, grasps, and whole episodes along the ideal motion."""

import numpy as np
import pytest

from mmrl.errors import UserError

mujoco = pytest.importorskip("mujoco", reason="needs pip install 'mmrl-suite[sim]'")

from robotics.flow3d.objects import scene  # noqa: E402
from robotics.flow3d.objects.demonstrator import arm_path, scripted_grips  # noqa: E402
from robotics.flow3d.objects.scene import FLOW_ARMS  # noqa: E402
from robotics.flow3d.objects.tabletop import FlowTabletop  # noqa: E402

INTO_THE_TABLE = {"panda": (1, 2.2), "ur5e": (1, 2.2), "gen3": (1, 2.1), "free_gripper": (2, -0.45)}
"""Joint and how far it is turned."""


@pytest.fixture(params=sorted(FLOW_ARMS))
def robot(request):
    with FlowTabletop(task="place_red", actor=request.param) as made:
        yield made


def test_an_arm_starts_at_home_holds_still_and_follows_a_path(robot):
    home = np.array(robot.arm.home_rad)
    np.testing.assert_allclose(robot.joint_rad(), home, atol=1e-9)
    assert robot.move(home[None])
    np.testing.assert_allclose(robot.joint_rad(), home, atol=0.01)
    away = home + 0.2 * np.cos(np.arange(len(home)))
    assert robot.move(np.stack([home + 0.1, away]))
    np.testing.assert_allclose(robot.joint_rad(), away, atol=0.02)
    robot.reset(0)
    np.testing.assert_allclose(robot.joint_rad(), home, atol=1e-9)


def test_a_path_that_cannot_be_reached_says_so(robot):
    joints = len(robot.arm.joints)
    into_the_table = np.array(robot.arm.home_rad)
    into_the_table[INTO_THE_TABLE[robot.arm.name][0]] += INTO_THE_TABLE[robot.arm.name][1]
    assert not robot.move(into_the_table[None])
    with pytest.raises(UserError, match="finite angles"):
        robot.move(np.full((1, joints), np.nan))
    with pytest.raises(UserError, match="expected"):
        robot.move(np.zeros(joints))


def test_closing_in_the_air_holds_nothing(robot):
    assert not robot.close_gripper()
    assert robot.released()
    robot.open_gripper()
    assert robot.success().failed == ("on the pad",)


def test_all_arms_start_with_the_grip_at_the_same_position(robot):
    site = robot.data.site(robot.arm.grip_site)
    np.testing.assert_allclose(site.xpos, [0.25, 0.0, 0.4], atol=2e-3)
    np.testing.assert_allclose(site.xmat.reshape(3, 3), np.diag([1.0, -1.0, -1.0]), atol=5e-3)
    alone = robot.arm.load()
    assert [alone.joint(name).id for name in robot.arm.joints] == list(range(len(robot.arm.joints)))


def test_the_gen3_has_the_published_geometry():
    """Stretched upwards, its height is the sum of the lengths of its parts in the data sheet."""
    arm = FLOW_ARMS["gen3"]
    pose, _ = arm.kinematics(np.zeros((1, 7)))
    lengths = 0.15643 + 0.12838 + 2 * 0.21038 + 0.20843 + 2 * 0.10593 + 0.061525
    assert pose[0, 2, 3] == pytest.approx(lengths + 0.1034, abs=1e-6)
    np.testing.assert_allclose(pose[0, :3, 2], [0, 0, 1], atol=1e-6)


@pytest.mark.parametrize("actor", ["hand", "nobody"])
def test_physics_needs_an_arm_and_nothing_is_built_without_one(monkeypatch, actor):
    monkeypatch.setattr(scene, "build_model", None)
    with pytest.raises(UserError, match=f"actor is '{actor}'; physics needs an arm"):
        FlowTabletop(actor=actor)


def perform(robot, seed):
    """Whole episode along the ideal motion, with the first scripted grip that the arm can reach throughout."""
    from robotics.flow3d.kinematics import ArmIk

    robot.reset(seed)
    motion, ik = robot.ideal_motion(9), ArmIk(robot.arm)
    paths = (arm_path(ik, grip, motion, approach=12) for grip in scripted_grips(robot.state(), robot.task.family))
    path = next(path for path in paths if path is not None)
    assert robot.move(path[:13])
    held = robot.close_gripper()
    robot.move(path[13:])
    return held, motion


@pytest.mark.parametrize(
    ("task", "arm", "seed"),
    [("place_green", "ur5e", 0), ("pour", "free_gripper", 0), ("insert_blue", "gen3", 0), ("open_red", "panda", 0)],
)
def test_an_arm_does_the_task_along_the_ideal_motion(task, arm, seed):
    pytest.importorskip("mink", reason="needs pip install 'mmrl-suite[flow3d]'")
    with FlowTabletop(task=task, actor=arm) as robot:
        held, motion = perform(robot, seed)
        assert held
        assert not robot.released()
        np.testing.assert_allclose(robot.object_pose()[:3, 3], motion[-1, :3, 3], atol=0.015)
        assert set(robot.success().failed) <= {"released"}
        robot.open_gripper()
        assert robot.success().success, robot.success().failed


def test_the_camera_sees_the_arm_move():
    with FlowTabletop(task="open_red", actor="panda", width=64, height=64) as robot:
        frames = []
        robot.on_frame = lambda scene: frames.append(scene.data.time)
        before = robot.observe()
        over = np.array(robot.arm.home_rad) + np.array([0, 0.8, 0, 0, 0, 0, 0])
        robot.move(over[None])
        after = robot.observe()
        assert (np.abs(after.depth_m - before.depth_m) > 0.05).any()
        np.testing.assert_allclose(np.diff(frames), 0.02, atol=1e-9)
