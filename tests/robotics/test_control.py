import numpy as np
import pytest

from mmrl.errors import UserError
from robotics.scenes.arms import ARMS
from robotics.scenes.control import CartesianController, ControlSettings

mujoco = pytest.importorskip("mujoco", reason="needs pip install 'mmrl-suite[sim]'")


@pytest.fixture(params=sorted(ARMS))
def arm(request):
    return ARMS[request.param]


def walk(rows: int, steps: int, seed: int = 0) -> np.ndarray:
    """Random actions that keep their direction for some steps, so that they reach the edges of the workspace."""
    turns = np.random.default_rng(seed).uniform(-1.5, 1.5, (rows, steps // 6, 5))
    return np.repeat(turns, 6, axis=1)


def begin(arm, rows: int, **settings) -> CartesianController:
    controller = CartesianController(arm, ControlSettings(**settings))
    controller.reset(rows)
    return controller


def test_actions_move_the_command_by_hand_computed_steps(arm):
    controller = begin(arm, 1, step_m=0.02, turn_rad=0.1)
    start = controller.home_command.copy()
    plan = controller.plan([0], [[[1, -0.5, 0, 0, 1], [0.5, 0, -3, 2, -1], [0, 0, 0, -0.5, 0]]])
    moved = plan.commands[0] - start
    assert moved[:, :4] == pytest.approx(
        np.array([[0.02, -0.01, 0, 0], [0.03, -0.01, -0.02, 0.1], [0.03, -0.01, -0.02, 0.05]])
    )
    assert plan.commands[0, :, 4].tolist() == [1.0, -1.0, -1.0]
    assert plan.controls[0, :, -1].tolist() == [0.0, arm.opening_m, arm.opening_m]
    assert controller.commands([0])[0] == pytest.approx(plan.commands[0, -1])


def test_the_command_stays_in_the_workspace(arm):
    controller = begin(arm, 2)
    settings = controller.settings
    plan = controller.plan([0, 1], np.stack([np.full((60, 5), 1.0), np.full((60, 5), -1.0)]))
    assert plan.commands[0, -1, :4] == pytest.approx([*settings.high_m, settings.yaw_rad])
    assert plan.commands[1, -1, :4] == pytest.approx([*settings.low_m, -settings.yaw_rad])


def test_the_angles_put_the_grip_where_the_command_says(arm):
    controller = begin(arm, 40)
    plan = controller.plan(range(40), walk(40, 60))
    joint_rad = plan.controls[..., :-1].reshape(-1, len(arm.joints))
    assert (joint_rad >= arm.kinematics.low_rad).all()
    assert (joint_rad <= arm.kinematics.high_rad).all()
    pose, _ = arm.kinematics(joint_rad)
    commands = plan.commands.reshape(-1, 5)
    assert np.abs(pose[:, :3, 3] - commands[:, :3]).max() < 0.003
    assert pose[:, 2, 2].max() < -0.9999
    yaw_error = np.arctan2(pose[:, 1, 0], pose[:, 0, 0]) - commands[:, 3]
    assert np.abs(yaw_error).max() < 0.01


def test_there_is_no_drift_within_the_redundancy():
    """The Panda has a redundant joint; after a long path out and back it returns to the same posture."""
    controller = begin(ARMS["panda"], 1)
    out = np.tile([0.5, 0.5, -0.3, 0.2, -1.0], (8, 1))
    still = np.zeros((40, 5))
    plan = controller.plan([0], np.concatenate([out, still, -out, still])[None])
    assert plan.controls[0, -1] == pytest.approx(controller.home_control, abs=0.01)


def test_rows_and_chunks_change_no_bit(arm):
    actions = walk(5, 12)
    together = begin(arm, 5).plan(range(5), actions)
    alone, pieces = begin(arm, 5), begin(arm, 5)
    for row in (0, 3):
        assert np.array_equal(alone.plan([row], actions[row : row + 1]).controls[0], together.controls[row])
    split = [pieces.plan(range(5), actions[:, part]) for part in (slice(0, 1), slice(1, 8), slice(8, 12))]
    assert np.array_equal(np.concatenate([plan.controls for plan in split], axis=1), together.controls)
    assert np.array_equal(np.concatenate([plan.commands for plan in split], axis=1), together.commands)


def test_a_row_that_is_not_planned_stays(arm):
    controller = begin(arm, 3)
    controller.plan([1], walk(1, 6))
    assert np.array_equal(controller.commands([0, 2]), np.tile(controller.home_command, (2, 1)))
    controller.reset(3)
    assert np.array_equal(controller.commands([1])[0], controller.home_command)


def test_the_arm_follows_in_the_physics(arm):
    """A second after the last motion, the gripper is at its target."""
    model = arm.load()
    data = mujoco.MjData(model)
    controller = begin(arm, 1)
    model.opt.timestep, model.opt.integrator = 0.004, mujoco.mjtIntegrator.mjINT_IMPLICITFAST
    data.qpos[: len(arm.joints)] = arm.home_rad
    data.act[:] = arm.home_rad
    actions = np.concatenate([np.tile([0.7, -0.8, -0.5, 0.5, 1.0], (5, 1)), np.tile([0.0, 0, 0, 0, 1.0], (10, 1))])
    plan = controller.plan([0], actions[None])
    for control in plan.controls[0]:
        data.ctrl[:] = control
        mujoco.mj_step(model, data, 25)
    assert data.site("grip").xpos == pytest.approx(plan.commands[0, -1, :3], abs=0.002)
    assert sum(data.joint(finger).qpos[0] for finger in arm.fingers) < 0.001


@pytest.mark.parametrize(
    ("actions", "message"),
    [
        (np.zeros((2, 3, 4)), r"shape \(2, 3, 4\); expected \(2 live rows, K >= 1, 5"),
        (np.zeros((1, 3, 5)), r"shape \(1, 3, 5\)"),
        (np.zeros((2, 0, 5)), "K >= 1"),
        (np.where(np.arange(30).reshape(2, 3, 5) == 21, np.nan, 0.0), "action 1 of control step 1 in row 1 is nan"),
        (np.full((2, 1, 5), np.inf), "is inf"),
    ],
)
def test_bad_actions_are_named_and_move_nothing(actions, message):
    controller = begin(ARMS["panda"], 2)
    with pytest.raises(UserError, match=message):
        controller.plan([0, 1], actions)
    assert np.array_equal(controller.commands([0, 1]), np.tile(controller.home_command, (2, 1)))


def test_bad_settings_are_named():
    with pytest.raises(UserError, match=r"control\.step_m is 0"):
        CartesianController(ARMS["panda"], ControlSettings(step_m=0))
    with pytest.raises(UserError, match="is empty"):
        CartesianController(ARMS["panda"], ControlSettings(low_m=(0.9, 0.0, 0.0)))
