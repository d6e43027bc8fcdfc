"""Units, order and rate: what a dataset, a policy and a simulator say of themselves is compared where they meet."""

import dataclasses
import json
import logging
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from mmrl.errors import UserError
from mmrl.recipes import find_recipe
from mmrl.training.settings import BaseTrainerConfig
from robotics.episodes.dataset_fit import check_state
from robotics.episodes.demonstrations import DemonstrationConfig
from robotics.episodes.episode_evaluation import RobotEvaluationConfig
from robotics.episodes.payload import EpisodeSetConfig
from robotics.episodes.recording import build_demonstrations
from robotics.methods.clone import CloneConfig, CloneRecipe
from robotics.methods.robot_recipe import RobotConfig
from robotics.policies.base.action_policy import open_policy
from robotics.policies.base.action_statistics import ActionRange
from robotics.policies.lerobot.lerobot_server import check_data
from robotics.policies.lerobot.service import data_statistics
from robotics.policies.policy_loading import ActionPolicyConfig, check_fit, load_action_policy
from robotics.serving import ServeConfig, open_served_policy
from robotics.serving.messages import BadMessageError
from robotics.sim.gym_adapter import EnvError, GymRow
from robotics.sim.interface import RobotInterface, interface_of
from robotics.sim.opening import SimConfig, open_sim
from tests.robotics.line_sim import LineSim
from tests.robotics.seam_envs import DictCart, Locked, Whole, locked_expert

pytest.importorskip("gymnasium", reason="needs pip install 'mmrl-suite[sim]'")
pytest.importorskip("pyarrow", reason="needs pip install 'mmrl-suite[vlm]'")

from robotics.data import EpisodeWriter, LeRobotReader, robot_features

ENVS = Path(__file__).with_name("seam_envs.py")


def sim_config(env="Cart", **adapter):
    options = {"adapter": adapter} if adapter else {}
    return SimConfig(kind="gymnasium", env=f"{ENVS}:{env}", horizon=30, image_size=0, workers=1, options=options)


class PlainSim(LineSim):
    """A line that says everything of itself, in the units of Cart."""

    image_size = None
    state_names, action_names, control_hz = ("x", "one"), ("push",), 12.5
    action_bounds: Sequence[Sequence[float]] | None = ((-0.06,), (0.03,))


def write(path, actions=(-0.06, 0.0, 0.03), fps=12.5, state=("x", "one"), action=1, **about):
    features = robot_features(list(state) if state else 2, action)
    features["action"] |= {"info": about} if about else {}
    with EpisodeWriter(path, fps, features) as writer:
        for sign in (1, -1):
            moved = np.array(actions, np.float32).reshape(len(actions), -1)
            writer.add_episode(np.full((len(actions), 2), 0.1 * sign), moved, None, "go right", True)
    return path


def recipe(tmp_path, data, units="", sim=None, accept=(), **model):
    config = CloneConfig(
        output_dir=str(tmp_path / "run"),
        sim=sim_config(),
        model=ActionPolicyConfig(kind="gaussian", chunk=2, accept_other=list(accept), **model),
        demonstrations=DemonstrationConfig(path=str(data), camera="", units=units),
    )
    return CloneRecipe(config, sim=PlainSim() if sim is None else sim)


# units


def test_metres_and_normalised_actions_become_the_same_targets(tmp_path):
    metres = np.array([-0.06, -0.03, 0.0, 0.03], np.float32)
    scaled = (metres.astype(np.float64) + 0.06) / 0.09 * 2 - 1
    found = recipe(tmp_path, write(tmp_path / "metres", metres), "environment").demonstrations
    same = recipe(tmp_path, write(tmp_path / "scaled", scaled), "normalised").demonstrations
    for one, two in zip(found.actions, same.actions, strict=True):
        np.testing.assert_allclose(one, two, atol=1e-6)
        np.testing.assert_allclose(one[:, 0], scaled, atol=1e-6)


@pytest.mark.parametrize(
    ("actions", "units", "message"),
    [
        (
            (-1.0, 1.0),
            "environment",
            r"declared as environment, but they range from -1 to 1.*set demonstrations.units=normalis",
        ),
        (
            (-60.0, 30.0),
            "environment",
            r"range from -60 to 30, far outside -0\.06\.\.0\.03: they are in different units",
        ),
        ((-60.0, 30.0), "normalised", r"far outside -1\.\.1.*or set demonstrations.units=environment"),
        (
            (-0.06, 0.03),
            "",
            r"-0\.06\.\.0\.03: the numbers fit the environment's own units and -1\.\.1, and the units are not declared",
        ),
        ((-1.0, 1.0), "", r"own are in -0\.06\.\.0\.03: the numbers fit -1\.\.1, and the units are not declared"),
        ((-0.06, 7.0), "", r"own are in -0\.06\.\.0\.03: the numbers fit neither, and the units are not declared"),
    ],
)
def test_units_that_are_undeclared_or_contradicted_by_the_numbers_are_asked_for(tmp_path, actions, units, message):
    with pytest.raises(UserError, match=message):
        recipe(tmp_path, write(tmp_path / "data", actions), units)


def test_a_box_larger_than_one_contradicts_normalised(tmp_path):
    sim = PlainSim()
    sim.action_bounds = [[-2.5], [2.5]]
    data = write(tmp_path / "data", (-2.5, 2.4))
    with pytest.raises(
        UserError, match=r"declared as normalised, but they range from -2\.5 to 2\.4, which fits the bounds"
    ):
        recipe(tmp_path, data, "normalised", sim)
    np.testing.assert_allclose(recipe(tmp_path, data, "environment", sim).demonstrations.actions[0][0], -1)


def test_what_the_dataset_says_of_its_units_counts(tmp_path):
    scaled = write(tmp_path / "scaled", (-1, 1), units="normalised", low=[-0.06], high=[0.03])
    assert recipe(tmp_path, scaled).demonstrations.actions[0][:, 0].tolist() == [-1, 1]
    with pytest.raises(UserError, match=r"units is environment, but .* declares its actions normalised"):
        recipe(tmp_path, scaled, "environment")
    own = recipe(tmp_path, write(tmp_path / "own", units="environment")).demonstrations.actions[0]
    np.testing.assert_allclose(own[:, 0], [-1, 1 / 3, 1], atol=1e-6)
    with pytest.raises(UserError, match=r"units is normalised, but .* declares its actions in m"):
        recipe(tmp_path, write(tmp_path / "si", units=["m"]), "normalised")
    with pytest.raises(UserError, match=r"actions of .* in m range from -0\.06 to 0\.03"):
        recipe(tmp_path, tmp_path / "si")
    other = write(tmp_path / "other", (-1, 1), units="normalised", low=[-0.5], high=[0.5])
    with pytest.raises(UserError, match=r"for the bounds -0\.5\.\.0\.5, but the simulator has -0\.06\.\.0\.03"):
        recipe(tmp_path, other)


def test_actions_that_hardly_use_their_range_are_named(tmp_path, caplog):
    with caplog.at_level(logging.WARNING, "mmrl"):
        recipe(tmp_path, write(tmp_path / "data"), "normalised")
    assert "range from -0.06 to 0.03, less than 10% of -1..1" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.WARNING, "mmrl"):
        recipe(tmp_path, write(tmp_path / "wide", (-1.0, 0.25, 1.0)), "normalised")
    assert not caplog.text


def test_where_the_units_are_minus_one_to_one_nothing_has_to_be_said(tmp_path):
    sim = PlainSim()
    sim.action_bounds = None
    actions = (-1.0, 0.123456789, 1.0)
    for units in ("", "environment", "normalised"):
        found = recipe(tmp_path, write(tmp_path / f"data{units}", actions), units, sim).demonstrations.actions[0]
        assert found[:, 0].tolist() == np.float32(actions).tolist()


def test_datasets_made_here_say_their_units_names_and_rate(tmp_path):
    about = dataclasses.asdict(sim_config())
    folder = build_demonstrations(str(tmp_path / "demos"), sim=about, expert=f"{ENVS}:cart_expert", episodes=2)
    reader = LeRobotReader(folder)
    assert reader.fps == 12.5
    assert reader.info["features"]["observation.state"]["names"] == ["x", "one"]
    said = reader.info["features"]["action"]["info"]
    assert said["units"] == "normalised"
    np.testing.assert_allclose([said["low"], said["high"]], [[-0.06], [0.03]], rtol=1e-6)
    assert len(recipe(tmp_path, folder).demonstrations.actions) == 2


# whole numbers and locked joints


@pytest.mark.parametrize(
    ("low", "high", "dtype"), [(0, 10, "int64"), (-128, 127, "int8"), (0, 255, "uint8"), (-32768, 32767, "int16")]
)
def test_whole_numbers_are_executed_as_asked_for(low, high, dtype):
    row = GymRow(Whole(low, high, dtype), horizon=9, expert=lambda seen: [asked])
    row.reset("Whole", 0, "train", 0)
    bounds = ActionRange(*(tuple(side) for side in row.action_bounds), integer=row.action_integer)
    for asked in range(low, high + 1, max(1, (high - low) // 300)):
        action = row.expert().astype(np.float32)  # as they are recorded, and as policies act
        row.step(action)
        assert row.state().tolist() == [asked]
        assert bounds.to_data(torch.from_numpy(action)).tolist() == [asked]


def test_whole_numbers_between_two_are_rounded():
    row = GymRow(Whole(), horizon=9)
    row.reset("Whole", 0, "train", 0)
    for action, command in ((-0.95, 0), (-0.85, 1), (0.97, 10), (0.49, 7)):
        row.step(np.array([action]))
        assert row.state().tolist() == [command]


@pytest.mark.parametrize(
    ("env", "message"),
    [
        (lambda: Whole(-np.inf, np.inf), "every entry needs finite bounds .*entry 0"),
        (lambda: Whole(0, 2**25), "integers beyond 16777216"),
        (lambda: Whole(-3e38, 3e38, "float32"), r"needs finite bounds .*entry 0 has -3e\+38 to 3e\+38"),
    ],
)
def test_boxes_that_cannot_be_scaled_are_named(env, message):
    with pytest.raises(EnvError, match=message):
        GymRow(env(), horizon=9)


def test_a_locked_joint_is_passed_through_everywhere(tmp_path):
    row = GymRow(Locked(), horizon=20, expert=locked_expert)
    row.reset("Locked", 0, "train", 3)
    assert row.expert()[1] == 0
    for entry in (-1.0, 0.0, 1.0):
        row.step(np.array([0.0, entry]))
    about = dataclasses.asdict(sim_config("Locked"))
    folder = build_demonstrations(str(tmp_path / "demos"), sim=about, expert=f"{ENVS}:locked_expert", episodes=2)
    actions = np.concatenate([episode.action for episode in LeRobotReader(folder)])
    assert np.isfinite(actions).all()
    assert not actions[:, 1].any()
    sim = PlainSim()
    sim.action_size, sim.action_names, sim.control_hz = 2, None, 10
    sim.action_bounds = [[-2, 0.5], [2, 0.5]]
    data = write(tmp_path / "own", [(-2, 0.5), (1, 0.5)], fps=10, action=2)
    made = recipe(tmp_path, data, "environment", sim)
    assert made.demonstrations.actions[0].tolist() == [[-1, 0], [0.5, 0]]
    assert np.isfinite(made.demonstrations.statistics().normalise(made.demonstrations.actions[0])).all()
    with pytest.raises(UserError, match=r"fits -1\.\.1"):  # the locked joint never was at 0.1
        recipe(tmp_path, write(tmp_path / "wrong", [(-1, 0.1), (1, 0.1)], fps=10, action=2), "environment", sim)


@pytest.mark.parametrize("kind", ["lerobot", "lerobot_flow", "openvla"])
def test_policies_from_elsewhere_declare_their_units_where_these_are_not_minus_one_to_one(kind):
    config = ActionPolicyConfig(kind=kind, options={"folder": "anything"})
    with pytest.raises(
        UserError, match=r"in the units of its data.* environment's own are in -0\.06\.\.0\.03; (set|wrap)"
    ):
        load_action_policy(config, PlainSim(), 0)


def test_a_lerobot_policys_own_statistics_are_read(caplog):
    data = {"action": {"min": [0.0], "max": [512.0]}, "observation.state": {"min": [0, 1], "max": [1, 1]}}
    with pytest.raises(UserError, match=r"my_pusht was trained on actions from 0 to 512, far outside -1\.\.1"):
        check_data("my_pusht", data, None)
    with pytest.raises(UserError, match=r"far outside 0\.\.5"):
        check_data("my_pusht", data, ActionRange((0.0,), (5.0,)))
    with caplog.at_level(logging.WARNING, "mmrl"):
        check_data("my_pusht", data, ActionRange((0.0,), (512.0,)))
    assert "state entries [1] never changed in the data of my_pusht" in caplog.text
    check_data("my_pusht", {}, None)
    radians = {"action": {"min": [-2.9, -1.0], "max": [2.9, 0.5]}}
    with pytest.raises(
        UserError, match=r"-2\.9 to 2\.9, outside -1\.\.1, .*the data have \[-2\.9, -1\.0\] and \[2\.9, 0"
    ):
        check_data("my_franka", radians, None)
    check_data("my_franka", radians, ActionRange((-2.9, -1.8), (2.9, 1.8)))
    assert "my_franka" not in caplog.text
    with caplog.at_level(logging.WARNING, "mmrl"):
        check_data("my_franka", radians, ActionRange((-1.0, -1.0), (1.0, 1.0)))  # stated: clipping is meant
    assert "from -2.9 to 2.9, outside -1..1; its actions are clipped to that" in caplog.text
    check_data("my_cart", {"action": {"min": [-1.0], "max": [1.005]}}, None)
    stats = {"action": {"min": torch.zeros(1), "max": np.ones(1), "mean": [0.5]}, "other": {"min": [0], "max": [1]}}
    steps = [SimpleNamespace(), SimpleNamespace(stats=stats), SimpleNamespace(stats=None)]
    assert data_statistics([SimpleNamespace(steps=steps)]) == {"action": {"min": [0.0], "max": [1.0]}}


# order, cameras and rate


@pytest.mark.parametrize(
    ("about", "message"),
    [
        (
            {"fps": 30},
            r"data has 30 control steps per second, the simulator has 12\.5.*model\.accept_other=\[control_hz\]",
        ),
        ({"fps": 12}, "data has 12 control steps per second"),
        (
            {"state": ("one", "x")},
            "entry 0 of the state is 'one' in .*data and 'x' in the simulator, with the same names in",
        ),
        ({"state": ("z", "x")}, "entry 0 of the state is 'z' in"),
        ({"action": ["pull"], "state": ("x", "one")}, ""),
    ],
)
def test_a_dataset_of_another_rate_or_order_is_refused(tmp_path, about, message):
    data = write(tmp_path / "data", **about)
    if not message:  # names that nobody shares may be other words for the same
        recipe(tmp_path, data, "environment")
        return
    with pytest.raises(UserError, match=message):
        recipe(tmp_path, data, "environment")
    recipe(tmp_path, data, "environment", accept=["control_hz", "state"])


@pytest.mark.parametrize("names", [{"motors": ["one", "x"]}, {"one": 0, "x": 1}])
def test_names_are_read_as_other_people_write_them(tmp_path, names):
    data = write(tmp_path / "data")
    file = data / "meta/info.json"
    info = json.loads(file.read_text())
    info["features"]["observation.state"]["names"] = names
    file.write_text(json.dumps(info))
    with pytest.raises(UserError, match="entry 0 of the state is 'one'"):
        recipe(tmp_path, data, "environment")


def test_swapped_cameras_of_a_dataset_are_refused(tmp_path):
    features = robot_features(2, 1, {"front": (32, 32), "hand": (32, 32)}, video=False)
    with EpisodeWriter(tmp_path / "data", 10, features) as writer:
        black = np.zeros((2, 32, 32, 3), np.uint8)
        writer.add_episode(np.zeros((2, 2)), np.zeros((2, 1)), {"front": black, "hand": black}, "go right", True)
    sim = LineSim(views=["hand"])
    sim.camera = "front"
    for camera, view, fits in (("front", "hand", True), ("hand", "front", False)):
        about = DemonstrationConfig(path=str(tmp_path / "data"), camera=camera, views=[view])
        from robotics.episodes.demonstrations import load_demonstrations

        found = load_demonstrations(about)
        if fits:
            found.fitted(about, sim)
        else:
            with pytest.raises(UserError, match="has the camera 'hand' in a position where the simulator has 'front'"):
                found.fitted(about, sim)


def test_a_latent_of_states_in_another_order_is_refused(tmp_path):
    check_state(str(write(tmp_path / "data")), PlainSim())
    with pytest.raises(UserError, match="entry 0 of the state is 'one'"):
        check_state(str(write(tmp_path / "other", state=("one", "x"))), PlainSim())


def test_an_unknown_rate_is_said(tmp_path, caplog):
    sim = PlainSim()
    sim.control_hz = None
    with caplog.at_level(logging.WARNING, "mmrl"):
        recipe(tmp_path, write(tmp_path / "data"), "environment", sim)
    assert "does not report its control rate, so the 12.5 frames per second" in caplog.text


@pytest.fixture
def saved(tmp_path):
    made = recipe(tmp_path, write(tmp_path / "data"), "environment")
    made.policy.save_pretrained(tmp_path / "saved")
    return tmp_path / "saved"


def test_a_policys_folder_says_what_it_was_trained_with(saved):
    known = open_policy(saved).interface
    assert known == RobotInterface(("x", "one"), ("push",), None, 12.5) == interface_of(PlainSim())
    assert json.loads((saved / "interface.json").read_text())["control_hz"] == 12.5


@pytest.mark.parametrize(
    ("fact", "change", "message"),
    [
        ("state", {"state_names": ("one", "x")}, "entry 0 of the state is 'x' in .* and 'one' in the simulator"),
        ("actions", {"action_names": ("pull",)}, "entry 0 of an action is 'push' in"),
        ("control_hz", {"control_hz": 50}, r"has 12\.5 control steps per second, the simulator has 50"),
        ("action_bounds", {"action_bounds": [[-0.6], [0.3]]}, r"are -0\.06\.\.0\.03 in .* and -0\.6\.\.0\.3 in"),
    ],
)
def test_a_simulator_of_another_order_rate_or_unit_is_refused(saved, fact, change, message):
    sim = PlainSim()
    for name, value in change.items():
        setattr(sim, name, value)
    policy = open_policy(saved)
    with pytest.raises(UserError, match=message):
        check_fit(policy, sim)
    check_fit(policy, sim, [fact])
    with pytest.raises(UserError, match=message):
        check_fit(policy, sim, [other for other in ("state", "actions") if other != fact])
    check_fit(policy, PlainSim())


def test_cameras_are_compared_by_place():
    trained = RobotInterface(cameras=("front", "hand"))
    assert set(trained.differences(RobotInterface(cameras=("hand", "front")))) == {"cameras"}
    assert not trained.differences(RobotInterface(cameras=("", "hand")))
    assert not trained.differences(RobotInterface())


def test_an_old_folder_is_loaded_with_a_warning_that_says_what_to_add(saved, caplog):
    (saved / "interface.json").unlink()
    with caplog.at_level(logging.WARNING, "mmrl"):
        policy = open_policy(saved)
    assert "saved has no interface.json" in caplog.text
    assert '"control_hz": 10}' in caplog.text
    assert policy.interface is None
    check_fit(policy, PlainSim())


@pytest.mark.parametrize(
    "entries", [{"state": "x"}, {"control_hz": 0}, {"control_hz": True}, {"rate": 3}, {"cameras": [1]}]
)
def test_a_damaged_interface_is_named(saved, entries):
    (saved / "interface.json").write_text(json.dumps(entries))
    with pytest.raises(UserError, match=r"interface\.json"):
        open_policy(saved)


def test_a_served_policy_says_and_compares_it(saved):
    served = open_served_policy(saved, ServeConfig())
    described = served.format.describe()
    assert described["observation/state"]["names"] == ["x", "one"]
    message = {"observation/state": np.zeros(2, np.float32), "prompt": "go right"}
    served.format.read(message)
    served.format.read({**message, "observation/state_names": ["x", "one"], "control_hz": 12.5})
    assert served.format.unused({**message, "control_hz": 12.5}) == []
    for said, complaint in (
        ({"observation/state_names": ["one", "x"]}, "entry 0 of the state is 'x' in .* and 'one' in the robot"),
        ({"control_hz": 30}, r"has 12\.5 control steps per second, the robot has 30"),
        ({"control_hz": "fast"}, "expected control steps per second, above 0"),
    ):
        with pytest.raises(BadMessageError, match=complaint):
            served.format.read({**message, **said})


def test_answers_of_whole_numbers_are_whole(saved):
    (saved / "action_bounds.json").write_text(json.dumps({"low": [0], "high": [10], "integer": True}))
    bounds = open_served_policy(saved, ServeConfig()).bounds
    assert bounds is not None
    assert bounds.to_data(torch.tensor([[0.33]])).tolist() == [[7.0]]


def test_keys_of_an_observation_name_the_state_in_the_order_of_the_run():
    assert GymRow(DictCart(), horizon=9).state_names == ["speed", "x"]
    assert GymRow(DictCart(), horizon=9, state_keys=["x", "speed"]).state_names == ["x", "speed"]
    assert GymRow(DictCart(), horizon=9, control_hz=50).control_hz == 50


def test_the_tabletop_says_the_same_of_itself_as_a_simulator_and_as_an_environment():
    from robotics.scenes.batch import BatchSettings, TabletopBatch
    from robotics.scenes.envs import TabletopEnv

    row = GymRow(TabletopEnv("reach", observation="proprio"), horizon=9)
    with TabletopBatch(["reach"], settings=BatchSettings(image_size=None, state="proprio")) as batch:
        known = interface_of(batch)
    assert known.control_hz == row.control_hz == 10
    assert known.state == tuple(row.state_names)
    assert known.actions == tuple(row.action_names)
    assert len(known.state) == batch.state_size


@pytest.mark.slow
def test_a_run_is_not_evaluated_with_its_state_in_another_order(tmp_path, closing):
    entry = find_recipe("robot_grpo")
    config = entry.load_config_class()(
        output_dir=str(tmp_path / "run"),
        sim=sim_config("DictCart"),
        model=ActionPolicyConfig(kind="gaussian", chunk=2),
        data=EpisodeSetConfig(layouts=4),
        eval_data={"held_out": EpisodeSetConfig(layouts=2, split="held_out")},
        evaluation=RobotEvaluationConfig(samples=0, videos=0),
    )
    assert isinstance(config, RobotConfig)
    assert isinstance(config.trainer, BaseTrainerConfig)
    first = entry.load_recipe_class()(config)
    first.policy.save_pretrained(tmp_path / "saved")
    first.close()
    second = closing(
        entry.load_recipe_class()(dataclasses.replace(config, sim=sim_config("DictCart", state_keys=["x", "speed"])))
    )
    second.policy.load_weights(tmp_path / "saved")  # as an evaluation of a checkpoint does
    with pytest.raises(UserError, match=r"entry 0 of the state is 'speed' in .* and 'x' in the simulator"):
        second.measures(second.policy, "held_out", None)
    sim = closing(open_sim(sim_config("DictCart")))
    assert (sim.control_hz, list(sim.state_names)) == (12.5, ["speed", "x"])
