"""Choice of an arm's grasp and its clearance, checked with MuJoCo's own distances."""

import dataclasses

import numpy as np
import pytest

pytest.importorskip("mink")
import mujoco

from robotics.flow3d.geometry import apply_pose, make_pose
from robotics.flow3d.kinematics import JUMP_RAD, ArmIk
from robotics.flow3d.plan.grasps import Grasp, primitive_grasps
from robotics.flow3d.plan.reach import (
    ArmClearance,
    Obstacles,
    ReachChecks,
    ReachSettings,
    choose_grasps,
    different_plans,
    held_path,
)
from tests.robotics.flow3d.plan.test_grasps import box


def shift(*ways):
    return np.stack([make_pose(np.eye(3), np.array(way)) for way in ways])


LIFT_AND_CARRY = shift((0, 0, 0.05), (0, 0, 0.1), (-0.05, 0.1, 0.1), (-0.1, 0.15, 0.02))


def test_plans_reach_every_pose_and_the_shortest_comes_first(arm, monkeypatch):
    monkeypatch.setattr("robotics.flow3d.plan.reach.MAX_PLANS", 1000)
    ik, surface = ArmIk(arm), box((0.03, 0.02, 0.05))
    grasps = primitive_grasps(surface, arm.max_opening_m)
    clear = Obstacles(0.0, surface.points_m)
    plans, refused = choose_grasps(grasps, LIFT_AND_CARRY, ReachChecks(ik, ik.home_rad, ArmClearance(arm), clear))
    assert plans
    assert len(plans) + refused.total() == 2 * len(grasps)
    assert [plan.length_rad for plan in plans] == sorted(plan.length_rad for plan in plans)
    for plan in plans[:3]:
        poses = np.stack([ik.pose(row) for row in plan.motion.joint_rad[plan.frames]])
        np.testing.assert_allclose(poses[:, :3, 3], plan.T_world_grip[:, :3, 3], atol=0.004)
        np.testing.assert_allclose(plan.T_world_grip, LIFT_AND_CARRY @ plan.grasp.T_world_grip)
        np.testing.assert_allclose(plan.approach.joint_rad[0], ik.home_rad, atol=0.02)
        assert np.abs(np.diff(plan.approach.joint_rad, axis=0)).max() < JUMP_RAD
        coming = np.stack([ik.pose(row) for row in plan.approach.joint_rad[-3:]])
        ways = plan.grasp.T_world_grip[:3, 3] - coming[:, :3, 3]
        np.testing.assert_allclose(ways, np.outer([0.1, 0.05, 0.0], plan.grasp.T_world_grip[:3, 2]), atol=0.004)


def test_the_search_ends_after_so_many_plans_and_different_ones_close_elsewhere(arm, monkeypatch):
    monkeypatch.setattr("robotics.flow3d.plan.reach.MAX_PLANS", 3)
    ik, grasps = ArmIk(arm), primitive_grasps(box((0.03, 0.02, 0.05)), arm.max_opening_m)
    plans, refused = choose_grasps(grasps, LIFT_AND_CARRY, ReachChecks(ik, ik.home_rad))
    assert 3 <= len(plans) <= 4
    assert len(plans) + refused.total() < 2 * len(grasps)
    other = dataclasses.replace(plans[0], grasp=Grasp(shift((0, 0.02, 0))[0] @ plans[0].grasp.T_world_grip, 1, 0, ""))
    turned = dataclasses.replace(plans[0], grasp=plans[0].grasp.turned)
    assert different_plans([plans[0], turned, other]) == [plans[0], other]


def test_a_motion_out_of_reach_is_refused_unless_only_its_goal_counts(arm):
    ik, grasps = ArmIk(arm), primitive_grasps(box((0.03, 0.02, 0.05)), arm.max_opening_m)[:2]
    out_and_back = shift((0, 0, 0.1), (0.8, 0, 0.1), (0, 0.1, 0.1))
    plans, refused = choose_grasps(grasps, out_and_back, ReachChecks(ik, ik.home_rad))
    assert plans == []
    assert refused["the motion is out of reach"] > 0
    relaxed, _ = choose_grasps(
        grasps, out_and_back, ReachChecks(ik, ik.home_rad, settings=ReachSettings(goal_only=True))
    )
    assert relaxed
    assert not relaxed[0].motion.complete
    away = [Grasp(shift((3, 0, 0.3))[0], 1.0, 0.02, "user")]
    assert choose_grasps(away, out_and_back, ReachChecks(ik, ik.home_rad))[1] == {"the grasp is out of reach": 2}


@pytest.mark.parametrize("arm", ["panda", "ur5e"], indirect=True)
@pytest.mark.slow
def test_obstacles_refuse_grasps(arm):
    ik, clearance, surface = ArmIk(arm), ArmClearance(arm), box((0.03, 0.02, 0.05))
    grasps = primitive_grasps(surface, arm.max_opening_m)
    high = Obstacles(0.2)
    plans, refused = choose_grasps(grasps, LIFT_AND_CARRY, ReachChecks(ik, ik.home_rad, clearance, high))
    assert plans == []
    assert refused["the arm would hit the support"] > 0
    wall = Obstacles(None, scene_m=box((0.3, 0.3, 0.02), (0.5, 0.0, 0.14), 0.02).points_m)
    plans, refused = choose_grasps(grasps, LIFT_AND_CARRY, ReachChecks(ik, ik.home_rad, clearance, wall))
    assert plans == []
    assert refused["the hand would hit the scene"] > 0
    low = [grasp for grasp in grasps if grasp.T_world_grip[2, 2] < -0.99]
    deep = [Grasp(shift((0, 0, -0.06))[0] @ grasp.T_world_grip, 1.0, 0.04, "user") for grasp in low]
    thing = Obstacles(None, object_m=surface.points_m)
    plans, refused = choose_grasps(deep, LIFT_AND_CARRY, ReachChecks(ik, ik.home_rad, clearance, thing))
    assert plans == []
    assert refused["the hand would hit the object"] >= len(deep)


def test_a_held_object_continues_from_its_pose(arm):
    ik = ArmIk(arm)
    plan = held_path(LIFT_AND_CARRY, ik, ik.home_rad, ReachSettings())
    start = ik.pose(ik.home_rad)
    np.testing.assert_allclose(plan.T_world_grip, LIFT_AND_CARRY @ start)
    end = ik.pose(plan.motion.joint_rad[plan.frames[-1]])
    np.testing.assert_allclose(end[:3, 3], plan.T_world_grip[-1, :3, 3], atol=0.004)
    assert held_path(shift((3, 0, 0)), ik, ik.home_rad, ReachSettings()) is None


def test_lowest_corner_is_never_above_the_true_distance_to_a_floor(arm):
    spec = mujoco.MjSpec.from_file(str(arm.model.path))
    spec.worldbody.add_geom(name="under", type=mujoco.mjtGeom.mjGEOM_PLANE, size=[2, 2, 0.1], pos=[0, 0, -3])
    model = spec.compile()
    data, clearance, ik = mujoco.MjData(model), ArmClearance(arm), ArmIk(arm)
    joints = [int(model.joint(name).qposadr[0]) for name in arm.joints]
    beyond = int(model.joint(arm.joints[2]).bodyid[0])
    rng = np.random.default_rng(0)
    for _ in range(5):
        angles = ik.home_rad + rng.uniform(-0.4, 0.4, len(joints))
        data.qpos[:] = model.qpos0
        data.qpos[joints] = angles
        mujoco.mj_kinematics(model, data)
        floor = int(model.geom("under").id)
        geoms = [geom for geom in range(model.ngeom) if geom != floor and model.geom_bodyid[geom] >= beyond]
        true = min(mujoco.mj_geomDistance(model, data, geom, floor, 10.0, None) for geom in geoms) - 3
        found = float(clearance.lowest_m(angles[None])[0])
        assert true - 0.06 < found <= true + 1e-6


def test_points_between_the_fingers_are_outside_and_in_the_palm_inside(arm):
    clearance = ArmClearance(arm)
    T = make_pose(np.diag([1.0, -1, -1]), np.array([0.5, 0.1, 0.2]))
    between, palm = np.zeros((5, 3)), np.array([[0.0, 0, -0.07]])
    finger = np.array([[0.0, arm.max_opening_m / 2 + 0.005, -0.02]])
    for points, count in ((between, 0), (palm, 1), (finger, 1), (np.concatenate([between, palm, finger]), 2)):
        assert clearance.inside(T[None], apply_pose(T, points)).tolist() == [count]
