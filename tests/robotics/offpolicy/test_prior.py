"""Prior data of a run: its rewards, the instructions of its tasks, its units, and non-finite numbers."""

import dataclasses
import json

import numpy as np
import pyarrow.parquet
import pytest

from mmrl.errors import UserError
from robotics.data import EpisodeWriter, LeRobotReader, robot_features
from robotics.data.features import REWARD
from robotics.methods.ppo import ChunkWeights
from robotics.offpolicy.prior import PriorConfig, prior_records
from robotics.offpolicy.replay import Replay
from robotics.offpolicy.sac import RobotSacRecipe, step_rewards
from robotics.offpolicy.transitions import Experience, TransitionForm
from robotics.sim.episodes import EpisodeSpec
from tests.robotics.line_demos import demonstrate
from tests.robotics.line_sim import LineSim
from tests.robotics.offpolicy.line_sac import rlpd_config, sac_config

FORM = TransitionForm(state=2, full=0, chunk=2, action=1)
FLAT = TransitionForm(state=2, full=0, chunk=1, action=1)
SCALAR = {"dtype": "float32", "shape": [1], "names": None}


def records(folder, form=FORM, sim=None, rewarded=False, accept_other=(), **options):
    config = PriorConfig(path=str(folder), **options)
    return prior_records(config, form, sim or LineSim(), rewarded=rewarded, accept_other=accept_other)


def write(folder, features, episodes, fps=10):
    with EpisodeWriter(folder, fps, features) as writer:
        for states, actions, extra in episodes:
            writer.add_episode(states, actions, None, "go right", True, extra)
    return folder


def drop(folder, column):
    for path in folder.rglob("*.parquet"):
        table = pyarrow.parquet.read_table(path)
        if column in table.column_names:
            pyarrow.parquet.write_table(table.drop_columns([column]), path)


@pytest.mark.parametrize("weights", [(0.0, 1.0, 0.0), (0.0, 0.0, 1.0), (1.0, 0.5, 2.0)])
def test_a_demonstration_earns_what_the_same_episode_earns_in_the_run(tmp_path, weights):
    demos = demonstrate(tmp_path / "demos", episodes=1)
    one = LeRobotReader(demos).episode(0)
    length = len(one) // 2 * 2
    assert length == len(one)  # of whole chunks
    rewards = one.extra[REWARD].reshape(-1, 2)
    states = np.concatenate([one.state[::2], one.state[-1:]])
    chunks = np.full(length // 2, 2, np.int32)
    none, task = np.zeros((len(states), 0), np.float32), list(LineSim().tasks()).index("right")
    online = Experience(states, none, one.action.reshape(-1, 2, 1), rewards, chunks, task, "go right", True, True)
    wanted = step_rewards(online.records(FORM), ChunkWeights(*weights))
    found = step_rewards(records(demos, rewarded=True), ChunkWeights(*weights))
    np.testing.assert_allclose(found[::2], wanted, atol=1e-6)
    assert np.abs(wanted[:-1]).max() > 0
    # the window of the last step has executed a single one
    assert found[-1, 1] == 0 or weights[2]
    assert records(demos, rewarded=True)["rewards"][-1, 1] == 0


def test_demonstrations_without_the_rewards_that_a_run_learns_from_are_refused(tmp_path):
    states, actions = np.zeros((3, 2), np.float32), np.ones((3, 1), np.float32)
    demos = write(tmp_path / "demos", robot_features(2, 1), [(states, actions, None)])
    with pytest.raises(UserError, match=r"environment's rewards, which .* has no next\.reward.* reward=\{success: 1\}"):
        RobotSacRecipe(rlpd_config(tmp_path / "run", prior=PriorConfig(path=str(demos))))
    assert (records(demos)["rewards"] == 0).all()


def test_the_tasks_of_another_runs_replay_are_those_of_its_instructions(tmp_path):
    replay = Replay(tmp_path / "replay", FLAT, 10)
    for number, way in enumerate(("right", "left")):
        parts = np.zeros((3, 2), np.float32), np.zeros((3, 0), np.float32), np.full((2, 1, 1), 1.0 - 2 * number)
        rest = np.zeros((2, 1), np.float32), np.ones(2, np.int32), number, f"go {way}", True, True
        replay.append([Experience(*parts, *rest)])
    replay.close()

    class Turned(LineSim):
        def tasks(self):
            return {"left": "go left", "right": "go right"}

    class OneWay(LineSim):
        def tasks(self):
            return {"left": "go left"}

    found = records(tmp_path / "replay", FLAT, Turned())
    assert found["task"].tolist() == [1, 1, 0, 0]
    assert found["actions"].ravel().tolist() == [1, 1, -1, -1]
    with pytest.raises(UserError, match=r"has the instruction 'go right'; the tasks have \['go left'\]"):
        records(tmp_path / "replay", FLAT, OneWay())


@pytest.mark.parametrize("chunk", [1, 2])
def test_the_replay_of_a_robot_with_another_rate_or_other_bounds_is_refused(tmp_path, chunk):
    class Robot(LineSim):
        def __init__(self, control_hz, reach):
            super().__init__()
            self.control_hz, self.action_bounds = control_hz, (np.array([-reach]), np.array([reach]))

    config = sac_config(tmp_path)
    config.model.chunk = chunk
    recipe = RobotSacRecipe(config, sim=Robot(10.0, 0.5))
    recipe.open_replay(tmp_path / "replay")
    parts = np.zeros((3, 2), np.float32), np.zeros((3, 0), np.float32), np.ones((2, chunk, 1), np.float32)
    rest = np.zeros((2, chunk), np.float32), np.ones(2, np.int32), 0, "go right", True, True
    recipe.replay.append([Experience(*parts, *rest)])
    recipe.replay.save(tmp_path / "copy")
    form = recipe.form
    recipe.close()
    assert len(records(tmp_path / "copy", form, Robot(10.0, 0.5))) == 2
    with pytest.raises(UserError, match="has 10 control steps per second, the simulator has 50"):
        records(tmp_path / "copy", form, Robot(50.0, 0.5))
    with pytest.raises(UserError, match=r"bounds of an action are -0\.5\.\.0\.5 in the replay .* and -1\.\.1 in"):
        records(tmp_path / "copy", form, Robot(10.0, 1.0))
    assert len(records(tmp_path / "copy", form, Robot(50.0, 1.0), accept_other=["control_hz", "action_bounds"])) == 2


@pytest.mark.parametrize(("own", "given", "text"), [(False, True, "has"), (True, False, "lacks")])
def test_rewards_of_interventions_and_of_the_environment_are_not_mixed(tmp_path, own, given, text):
    form, other = (dataclasses.replace(FLAT, watched=watched) for watched in (own, given))
    parts = np.zeros((3, 2), np.float32), np.zeros((3, 0), np.float32), np.ones((2, 1, 1), np.float32)
    rest = np.zeros((2, 1), np.float32), np.ones(2, np.int32), 0, "go right", True, True
    owner = np.zeros(2, np.bool_) if given else None
    replay = Replay(tmp_path / "replay", other, 10)
    replay.append([Experience(*parts, *rest, by_overseer=owner)])
    replay.close()
    with pytest.raises(UserError, match=f"{text} the rewards of an overseer's interventions, unlike this run"):
        records(tmp_path / "replay", form, rewarded=not own)
    assert own or len(records(tmp_path / "replay", form)) == 2  # of success alone


def test_units_and_accepted_differences_are_options_of_prior(tmp_path):
    class Metres(LineSim):
        action_bounds = (np.array([-0.05]), np.array([0.05]))
        control_hz = 10.0

    episode = np.zeros((3, 2), np.float32), np.full((3, 1), 0.04, np.float32), None
    demos = write(tmp_path / "demos", robot_features(2, 1), [episode], fps=12)
    with pytest.raises(UserError, match="control_hz"):
        records(demos, sim=Metres())
    with pytest.raises(UserError, match=r"Set prior\.units=environment .* or prior\.units=normalised"):
        records(demos, sim=Metres(), accept_other=["control_hz"])
    found = records(demos, sim=Metres(), accept_other=["control_hz"], units="environment")
    np.testing.assert_allclose(found["actions"], 0.8, atol=1e-6)


def test_demonstrations_that_do_not_store_their_success_need_a_statement(tmp_path):
    episode = np.zeros((3, 2), np.float32), np.ones((3, 1), np.float32), None
    demos = write(tmp_path / "demos", robot_features(2, 1), [episode])
    drop(demos, "success")  # of the episodes, as in datasets of lerobot, which has a column of the frames
    assert records(demos)["success"].tolist() == [False, True, True]
    info = json.loads((demos / "meta/info.json").read_text())
    del info["features"]["next.success"]
    (demos / "meta/info.json").write_text(json.dumps(info))
    drop(demos, "next.success")
    with pytest.raises(UserError, match=r"set prior\.all_successful=true if they all did"):
        records(demos)
    assert records(demos, all_successful=True)["success"].tolist() == [False, True, True]


@pytest.mark.parametrize("name", ["action", "observation.state", REWARD])
def test_a_number_that_is_not_finite_is_named(tmp_path, name):
    demos = demonstrate(tmp_path / "demos", episodes=2)
    path = next((demos / "data").glob("*/*.parquet"))
    table = pyarrow.parquet.read_table(path)
    values = np.array(table[name].to_pylist(), np.float32)
    values[-1] = np.nan
    place = table.schema.get_field_index(name)
    column = pyarrow.array(values.tolist(), table.schema.field(name).type)
    pyarrow.parquet.write_table(table.set_column(place, table.schema.field(name), column), path)
    with pytest.raises(UserError, match=rf"has {name} that is not finite in frame \d+ of episode 1"):
        records(demos, rewarded=True)


def test_right_is_the_task_of_the_line_that_these_tests_record():
    assert LineSim().tasks()["right"] == EpisodeSpec("right", "go right", 0).instruction
