import numpy as np
import pytest

from mmrl.errors import UserError
from robotics.scenes.arms import ARMS, ForwardKinematics, find_arm

mujoco = pytest.importorskip("mujoco", reason="needs pip install 'mmrl-suite[sim]'")
HALF_PI = np.pi / 2
# Denavit-Hartenberg parameters as the makers publish them: Franka's in Craig's convention, Universal Robots' in the
# standard one.
PANDA_A = (0.0, 0.0, 0.0, 0.0825, -0.0825, 0.0, 0.088)
PANDA_D = (0.333, 0.0, 0.316, 0.0, 0.384, 0.0, 0.0)
PANDA_ALPHA = (0.0, -HALF_PI, HALF_PI, HALF_PI, -HALF_PI, HALF_PI, HALF_PI)
PANDA_FLANGE, PANDA_TOOL = 0.107, 0.1034
UR5E_A = (0.0, -0.425, -0.3922, 0.0, 0.0, 0.0)
UR5E_D = (0.1625, 0.0, 0.0, 0.1333, 0.0997, 0.0996)
UR5E_ALPHA = (HALF_PI, 0.0, 0.0, HALF_PI, -HALF_PI, 0.0)
LIMITS = {
    "panda": [2.8973, 1.7628, 2.8973, (-3.0718, -0.0698), 2.8973, (-0.0175, 3.7525), 2.8973],
    "ur5e": [2 * np.pi, 2 * np.pi, np.pi, 2 * np.pi, 2 * np.pi, 2 * np.pi],
}
TORQUES = {"panda": [87, 87, 87, 87, 12, 12, 12], "ur5e": [150, 150, 150, 28, 28, 28]}


def turn(axis: str, angle: float) -> np.ndarray:
    sine, cosine = np.sin(angle), np.cos(angle)
    pose = np.eye(4)
    first, second = {"x": (1, 2), "z": (0, 1)}[axis]
    pose[[first, second], [first, second]] = cosine
    pose[first, second], pose[second, first] = -sine, sine
    return pose


def shift(x: float, z: float) -> np.ndarray:
    pose = np.eye(4)
    pose[0, 3], pose[2, 3] = x, z
    return pose


def panda_dh(joint_rad) -> np.ndarray:
    pose = np.eye(4)
    for angle, a, d, alpha in zip(joint_rad, PANDA_A, PANDA_D, PANDA_ALPHA, strict=True):
        pose = pose @ turn("x", alpha) @ shift(a, 0.0) @ turn("z", angle) @ shift(0.0, d)
    return pose @ turn("z", -np.pi / 4) @ shift(0.0, PANDA_FLANGE + PANDA_TOOL)


def ur5e_dh(joint_rad) -> np.ndarray:
    pose = turn("z", np.pi)
    for angle, a, d, alpha in zip(joint_rad, UR5E_A, UR5E_D, UR5E_ALPHA, strict=True):
        pose = pose @ turn("z", angle) @ shift(0.0, d) @ shift(a, 0.0) @ turn("x", alpha)
    return pose


def random_angles(arm, count: int) -> np.ndarray:
    kinematics = arm.kinematics
    rng = np.random.default_rng(0)
    return rng.uniform(
        np.maximum(kinematics.low_rad, -3.0), np.minimum(kinematics.high_rad, 3.0), (count, len(arm.joints))
    )


@pytest.fixture(params=sorted(ARMS))
def arm(request):
    return ARMS[request.param]


def test_the_panda_has_the_published_geometry():
    angles = random_angles(ARMS["panda"], 20)
    found, _ = ARMS["panda"].kinematics(angles)
    assert np.allclose(found, [panda_dh(row) for row in angles], atol=1e-6)


def test_the_ur5e_has_the_published_geometry():
    """Within the 2 mm by which the model's lengths are rounded; the gripper continues the flange along its axis."""
    angles = random_angles(ARMS["ur5e"], 20)
    found, _ = ARMS["ur5e"].kinematics(angles)
    flange = found @ np.linalg.inv(shift(0.0, PANDA_TOOL))
    published = np.array([ur5e_dh(row) for row in angles])
    # The base of the model is turned by a quarter of a circle multiple; heights and axes do not depend on it.
    turned = [turn("z", quarter * HALF_PI) @ published for quarter in range(4)]
    errors = [np.abs(candidate[:, :3, 3] - flange[:, :3, 3]).max() for candidate in turned]
    best = int(np.argmin(errors))
    assert errors[best] < 0.002
    assert np.allclose(turned[best][:, :3, 2], flange[:, :3, 2], atol=1e-6)


def test_joint_and_torque_limits_are_the_published_ones(arm):
    model = arm.load()
    for number, limit in enumerate(LIMITS[arm.name]):
        expected = limit if isinstance(limit, tuple) else (-limit, limit)
        assert model.joint(arm.joints[number]).range == pytest.approx(expected, abs=1e-3)
        actuator = model.actuator(arm.joints[number])
        assert actuator.forcerange == pytest.approx((-TORQUES[arm.name][number], TORQUES[arm.name][number]))
        assert actuator.ctrlrange == pytest.approx(expected, abs=1e-3)


def test_kinematics_are_those_of_mujoco(arm):
    model = arm.load()
    data = mujoco.MjData(model)
    angles = random_angles(arm, 10)
    poses, jacobians = ForwardKinematics(model, arm)(angles)
    site = model.site(arm.grip_site).id
    for row, joint_rad in enumerate(angles):
        data.qpos[: len(joint_rad)] = joint_rad
        mujoco.mj_kinematics(model, data)
        mujoco.mj_comPos(model, data)
        expected = np.zeros((6, model.nv))
        mujoco.mj_jacSite(model, data, expected[:3], expected[3:], site)
        assert np.allclose(poses[row, :3, 3], data.site_xpos[site], atol=1e-9)
        assert np.allclose(poses[row, :3, :3].ravel(), data.site_xmat[site], atol=1e-9)
        assert np.allclose(jacobians[row], expected[:, : len(joint_rad)], atol=1e-9)


def test_the_jacobian_is_the_derivative_of_the_position(arm):
    angles, small = random_angles(arm, 5), 1e-6
    _, jacobian = arm.kinematics(angles)
    for joint in range(angles.shape[1]):
        moved = [arm.kinematics(angles + sign * small * np.eye(angles.shape[1])[joint])[0] for sign in (1, -1)]
        slope = (moved[0] - moved[1])[:, :3, 3] / (2 * small)
        assert np.allclose(jacobian[:, :3, joint], slope, atol=1e-7)


def test_at_home_the_grip_points_down_over_the_table(arm):
    pose, _ = arm.kinematics(np.array(arm.home_rad)[None])
    assert pose[0, :3, 3] == pytest.approx((0.45, 0.0, 0.22), abs=1e-3)
    assert pose[0, :3, 2] == pytest.approx((0.0, 0.0, -1.0), abs=1e-3)
    assert pose[0, :3, 0] == pytest.approx((1.0, 0.0, 0.0), abs=1e-3)


def test_the_grip_lies_between_the_fingertips(arm):
    model = arm.load()
    data = mujoco.MjData(model)
    for finger in arm.fingers:
        data.joint(finger).qpos[0] = arm.opening_m
    mujoco.mj_kinematics(model, data)
    rotation = data.site(arm.grip_site).xmat.reshape(3, 3)
    places = []
    for finger in arm.fingers:
        geom = int(model.body(model.joint(finger).bodyid[0]).geomadr[0])
        places.append(rotation.T @ (data.geom_xpos[geom] - data.site(arm.grip_site).xpos))
        assert places[-1][2] + model.geom_size[geom, 2] == pytest.approx(0.0085, abs=2e-3)
    assert places[0] == pytest.approx(places[1] * [1, -1, 1], abs=1e-9)
    assert places[0][1] > arm.opening_m


def test_nothing_sags_and_no_link_touches_another(arm):
    model = arm.load()
    data = mujoco.MjData(model)
    count = len(arm.home_rad)
    data.qpos[:count] = arm.home_rad
    data.ctrl[:count] = arm.home_rad
    data.act[:] = arm.home_rad
    start = None
    for _ in range(300):
        mujoco.mj_step(model, data)
        start = data.qpos[:count].copy() if start is None else start
        assert data.ncon == 0
    assert np.allclose(data.qpos[:count], start, atol=1e-4)


def test_an_unknown_arm_is_named():
    with pytest.raises(UserError, match="unknown arm 'pandora'; available: panda, ur5e"):
        find_arm("pandora")
