"""Tasks in a scene of the user's own, with the class that the docs show."""

import contextlib
import json
import re
from pathlib import Path

import numpy as np
import pytest

from mmrl.cli import main
from mmrl.errors import UserError
from robotics.data import LeRobotReader
from robotics.episodes.recording import build_demonstrations
from robotics.scenes.batch import BatchSettings, TabletopBatch
from robotics.scenes.envs import TabletopEnv
from robotics.scenes.expert_check import run_expert
from robotics.scenes.mjcf_task import find_any_task, home_controls, open_scene
from robotics.scenes.presentation import PresentedScene
from robotics.scenes.vector_env import TabletopVectorEnv
from robotics.sim.episodes import EpisodeSpec
from robotics.sim.opening import SimConfig, open_sim

mujoco = pytest.importorskip("mujoco", reason="needs pip install 'mmrl-suite[sim]'")

DOCS = Path(__file__).parents[2] / "docs" / "robotics.md"
SHOWN = re.search(r"```python\n# my_task\.py\n(.*?)```", DOCS.read_text(encoding="utf-8"), re.S)[1]
BLIND = BatchSettings(image_size=None, state="full")
NAMES = (
    *("j1", "j2", "j1_velocity", "j2_velocity", "j1_control", "j2_control"),
    *("ball_x", "ball_y", "ball_z", "ball_qw", "ball_qx", "ball_qy", "ball_qz"),
)

AT_THE_TABLE = """
from robotics.scenes import Move, MjcfTask

class Lift(MjcfTask):
    instruction = "lift the box"
    arm = "ur5e"
    horizon = 30
    target = "box"
    scene = '''
<mujoco>
  <option timestep="0.004" integrator="implicitfast" cone="elliptic" impratio="10"/>
  <compiler angle="degree"/>
  <asset><material name="top" rgba=".5 .4 .3 1"/></asset>
  <worldbody>
    <geom type="box" size=".4 .4 .01" pos=".5 0 -.01" material="top" contype="1" conaffinity="3"/>
    <body name="box" pos="0.5 0 0.02"><freejoint/><site name="pad"/>
      <geom type="box" size=".02 .02 .02" mass=".05" conaffinity="3" condim="4" friction="2 .02 .001"/></body>
    <body name="door" pos=".7 0 .1"><joint name="hinge" range="0 90"/><geom type="box" size=".01 .01 .05"/></body>
  </worldbody>
  <sensor><touch name="felt" site="pad"/></sensor>
</mujoco>'''

    def place(self, start):
        start.put("box", (*start.rng.uniform([0.42, -0.1], [0.52, 0.1]), 0.02), yaw=0.1)
        start.turn("hinge", 0.5)

    def success(self, seen):
        return seen.position("box")[..., 2] > 0.08

    def progress(self, seen):
        return seen.position("box")[..., 2] / 0.08

    def expert(self, seen):
        box, grip = seen.position("box"), seen.position("grip")
        holds = seen.joint("left_finger") < 0.03 and abs(grip - box).max() < 0.03
        low = abs(grip - box)[:2].max() < 0.01
        return Move(box + [0, 0, 0.1 if holds or not low else 0], 1.0 if abs(grip - box).max() < 0.02 else -1.0)
"""


@pytest.fixture
def touch(tmp_path):
    """Name of the class that the docs show."""
    (tmp_path / "my_task.py").write_text(SHOWN, encoding="utf-8")
    return f"{tmp_path}/my_task.py:Touch"


@pytest.fixture
def lift(tmp_path):
    (tmp_path / "at_table.py").write_text(AT_THE_TABLE, encoding="utf-8")
    return f"{tmp_path}/at_table.py:Lift"


def own(tmp_path, name, **changes):
    """Name of a subclass of the docs' class with other attributes, or with replaced parts of the scene's text."""
    scene = changes.pop("scene", {})
    text = "".join(f"    {key} = {value}\n" for key, value in changes.items())
    replaced = "".join(f".replace({before!r}, {after!r})" for before, after in scene.items())
    (tmp_path / f"{name}.py").write_text(f"{SHOWN}\n\nclass Own(Touch):\n    scene = Touch.scene{replaced}\n{text}")
    return f"{tmp_path}/{name}.py:Own"


def test_what_the_scene_says_is_read(touch):
    scene = open_scene(touch)
    assert scene.state_names == NAMES
    assert scene.action_names == ("j1", "j2")
    assert (scene.proprio_size, scene.substeps, scene.camera, scene.task.name) == (6, 20, "top", "Touch")
    assert set(scene.describe()) == {"model", "code"}
    assert all(scene.describe().values())
    np.testing.assert_allclose(scene.parts.hold, [0.0, 0.0])


def test_the_expert_solves_it_in_environment_and_batch_alike(touch):
    env = TabletopEnv(touch, observation="state")
    episodes = [EpisodeSpec("Touch", "", layout) for layout in range(4)]
    with TabletopBatch([touch], settings=BLIND) as sim:
        motions = np.zeros((4, sim.horizon, 2), np.float32)
        success, failed = run_expert(sim, episodes, motions)
        assert sim.tasks() == {"Touch": "touch the ball"}
        assert sim.describe()["Touch.model"]
        sim.reset(episodes)
        chunk = sim.step_chunk(motions[:, :1])
    assert success.all()
    assert not failed.any()
    for row, episode in enumerate(episodes):
        env.reset(options={"layout": episode.layout})
        observation, *_ = env.step(motions[row, 0])
        assert np.array_equal(observation["state"], chunk.full_state[row]), "equal bits, one by one and together"


def test_layouts_differ_between_splits_and_repeat(touch):
    env = TabletopEnv(touch, observation="state")
    places = {
        (split, layout): tuple(env.reset(options={"layout": layout, "split": split})[0]["state"][6:8].tolist())
        for split in ("train", "held_out")
        for layout in (0, 1)
    }
    assert len(set(places.values())) == 4
    again = env.reset(options={"layout": 1, "split": "held_out"})[0]["state"]
    assert tuple(again[6:8].tolist()) == places["held_out", 1]


def test_a_vector_environment_runs_it(touch):
    envs = TabletopVectorEnv(touch, 3, settings=BLIND)
    observations, infos = envs.reset(seed=0)
    assert observations["state"].shape == (3, 13)
    assert envs.single_action_space.shape == (2,)
    assert list(infos["instruction"]) == 3 * ["touch the ball"]
    with pytest.raises(UserError, match=r"shape \(3, 5\); expected \(3, 2\)"):
        envs.step(np.zeros((3, 5)))
    envs.close()


def test_its_randomisation_changes_what_it_names(tmp_path):
    material = {
        'rgba=".85 .85 .8 1"/>': 'material="m"/>',
        "<worldbody>": '<asset><material name="m"/></asset><worldbody>',
    }
    task = own(tmp_path, "varied", scene=material)
    changes = {
        "servo_gain": [0.5, 0.6],
        "action_delay": [2, 2],
        "camera": {"position_m": 0.1},
        "colours": {"pieces": 0.2, "robot": 0.2},
        "textures": {"patterns": ["checker"]},
        "sensor_noise": {"pieces_m": 0.1, "yaw_rad": 0.1},
    }
    env, plain = (TabletopEnv(task, observation="state", randomization=parts) for parts in (changes, None))
    seen, info = env.reset(options={"layout": 3})
    drawn, exact = info["randomization"], plain.reset(options={"layout": 3})[0]["state"]
    assert {"servo_gain.j1", "servo_gain.j2", "colours.ball", "colours.robot", "textures.m.pattern"} <= set(drawn)
    assert (env.model.actuator_gainprm[:, 0] < 0.7 * plain.model.actuator_gainprm[:, 0]).all()
    noisy = seen["state"] != exact
    assert noisy.tolist() == [True, True, *(4 * [False]), *(3 * [True]), *(4 * [False])]
    for _ in range(2):
        env.step(np.ones(2, np.float32))
    assert np.array_equal(env.data.ctrl, np.zeros(2)), "the arm holds its pose until the first action arrives"
    env.step(np.zeros(2, np.float32))
    assert np.array_equal(env.data.ctrl, [3.0, 3.0])


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ({"mass": [0.5, 2.0]}, "randomization.mass has nothing to change: the scene of Touch has no free objects"),
        ({"textures": {"patterns": ["noise"]}}, "no geom of the world has a material without a texture"),
    ],
)
def test_a_randomisation_without_effect_is_refused(touch, part, message):
    with pytest.raises(UserError, match=message):
        TabletopEnv(touch, observation="state", randomization=part)


@pytest.mark.usefixtures("backend")
def test_it_is_played_with_its_own_rate_and_target(touch, tmp_path, capsys):
    strip = tmp_path / "strip.png"
    assert main(["sim", "play", touch, "height=48", "--strip", str(strip)]) == 0
    assert "Touch: 1 of 1 solved" in capsys.readouterr().out
    assert strip.is_file()


def test_films_have_the_poses_of_the_scene_and_mark_the_target(lift):
    scene = open_scene(lift)
    data, film = mujoco.MjData(scene.model), PresentedScene(scene)
    scene.reset(scene.model, data, np.random.default_rng(0))
    mujoco.mj_forward(scene.model, data)
    film.show(data, "success")
    assert np.array_equal(film.data.body("box").xpos, data.body("box").xpos)
    np.testing.assert_allclose(film.data.body("outcome_ring").xpos, data.body("box").xpos, atol=1e-12)
    assert film.model.camera("film").id >= 0
    assert [film.model.light(number).name for number in range(film.model.nlight)] == ["film_key", "film_fill"]


def test_a_scene_with_a_built_in_arm_is_controlled_as_the_table(lift):
    env = TabletopEnv(lift, observation="state", reward="dense")
    observation, _ = env.reset(seed=0)
    scene = env.scene
    assert scene.action_names == ("dx", "dy", "dz", "dyaw", "gripper")
    assert scene.state_names[10:] == (
        *(f"box_{part}" for part in ("x", "y", "z", "qw", "qx", "qy", "qz")),
        "hinge",
        "felt",
    )
    assert observation["state"][17] == pytest.approx(0.5)
    assert observation["state"][0:3] == pytest.approx((0.45, 0.0, 0.22), abs=1e-3)
    assert scene.model.joint("hinge").range == pytest.approx([0, np.pi / 2]), "the scene is in degrees, the arm is not"
    assert scene.model.joint("elbow").range == pytest.approx([-np.pi, np.pi], abs=1e-3)
    rewards, done = [], False
    while not done:
        _, reward, solved, cut, _ = env.step(env.expert_action())
        rewards.append(reward)
        done = solved or cut
    assert solved
    assert rewards[-1] == 1.0
    assert 0.0 < rewards[0] < 0.5


def test_its_experts_become_demonstrations_with_named_entries(touch, tmp_path):
    sim = {"kind": "tabletop", "tasks": [touch], "image_size": 0, "state": "full"}
    reader = LeRobotReader(build_demonstrations(str(tmp_path / "demos"), sim=sim, episodes=3))
    assert len(reader) == 3
    features = reader.info["features"]
    assert features["action"]["names"] == ["j1", "j2"]
    assert features["observation.state"]["names"] == list(NAMES)


def test_a_simulator_of_a_run_opens_it(touch):
    with contextlib.closing(open_sim(SimConfig(tasks=[touch], image_size=0, state="full"))) as sim:
        assert sim.state_names == NAMES
        assert json.loads(json.dumps(sim.describe()))["Touch.code"]


@pytest.mark.slow
def test_it_is_trained_from_python_with_its_class(tmp_path, monkeypatch):
    from mmrl import train

    monkeypatch.chdir(tmp_path)
    (tmp_path / "own_touch.py").write_text(SHOWN, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    from own_touch import Touch

    sim = {"image_size": 0, "state": "full", "workers": 1}
    done = train(
        "robot_clone",
        env=Touch,
        model={"kind": "gaussian", "chunk": 2},
        data={
            "path": "demos",
            "camera": "",
            "build": build_demonstrations,
            "build_options": {"sim": {**sim, "tasks": ["own_touch:Touch"]}, "episodes": 10},
        },
        eval_data=10,
        steps=150,
        tasks_per_step=32,
        learning_rate=3e-3,
        output_dir="run",
        options={"sim": sim, "evaluation": {"samples": 1, "videos": 0}},
    )
    before, after = (row["value"] for row in done.evaluation if row["metric"] == "success/sampled")
    assert after > before


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"instruction": "''"}, "the task Own has no instruction; set it in the class"),
        ({"success": "MjcfTask.success"}, r"no method success\(self, seen\)"),
        ({"control_hz": 30}, "is 6.66667 physics steps of 0.005 s; expected a whole number"),
        ({"scene": {' ctrlrange="-3 3"': ""}}, "the actuators j1, j2 have no ctrlrange"),
        ({"scene": {'name="j1"': ""}}, "cannot be (read|compiled)|has no name"),
        ({"scene": {"<mujoco>": "<mojoco>"}}, "the scene of Own cannot be read"),
        ({"scene": {' name="ball" mocap': " mocap"}}, "has no name; give it one in the MJCF"),
        ({"arm": "'elbow'"}, "unknown arm 'elbow'"),
    ],
)
def test_what_a_scene_does_not_say_is_asked_for(tmp_path, changes, message):
    with pytest.raises(UserError, match=message):
        open_scene(own(tmp_path, f"asks_{abs(hash(message))}", **changes))


@pytest.mark.parametrize(
    "actuator",
    [
        '<position joint="j" kp="10" ctrlrange="-3 3"/>',
        '<position joint="j" kp="10" gear="2" ctrlrange="-3 3"/>',
        '<general joint="j" biastype="affine" gainprm="20" biasprm="1 -10 0" ctrlrange="-3 3"/>',
    ],
)
def test_the_controls_of_the_start_hold_the_pose(actuator):
    joint = '<joint name="j" type="hinge" axis="0 1 0" ref="30"/><geom size=".1" mass="1"/>'
    model = mujoco.MjModel.from_xml_string(
        f"<mujoco><worldbody><body>{joint}</body></worldbody><actuator>{actuator}</actuator></mujoco>"
    )
    data = mujoco.MjData(model)
    data.ctrl[:] = home_controls(model)
    mujoco.mj_forward(model, data)
    assert abs(data.actuator_force[0]) < 1e-9
    assert abs(data.ctrl[0]) > 0.1


def test_mistakes_in_its_methods_are_named(tmp_path, touch):
    env = TabletopEnv(own(tmp_path, "no_expert", expert="None"), observation="state")
    env.reset(seed=0)
    with pytest.raises(UserError, match="the task Own has no expert; give its class a method expert"):
        env.expert_action()
    env = TabletopEnv(own(tmp_path, "wide", expert="lambda self, seen: [0.0]"), observation="state")
    env.reset(seed=0)
    with pytest.raises(UserError, match=r"returned \[0\.0\]; expected 2 finite numbers: j1, j2"):
        env.expert_action()
    with pytest.raises(UserError, match="no object or site 'bull'; it has ball, tip"):
        env.scene.sensors.read(env.data.sensordata).position("bull")
    with pytest.raises(UserError, match=r"arm is 'ur5e', but .* names its own arm"):
        TabletopEnv(touch, arm="ur5e", observation="state")
    with pytest.raises(UserError, match="the tasks Touch and reach differ in state_names"):
        TabletopBatch([touch, "reach"], settings=BLIND)
    with pytest.raises(UserError, match="expected a subclass of"):
        find_any_task("json:JSONDecoder")
    with pytest.raises(UserError, match=r"unknown task 'juggle'; available: reach, .*, or module:Class"):
        find_any_task("juggle")
