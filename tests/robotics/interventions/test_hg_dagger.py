"""HG-DAgger on the line: rounds that grow the dataset, what is imitated, and resuming."""

import json
import re

import numpy as np
import pytest
import torch

from mmrl.errors import RunError, UserError
from mmrl.recipes import find_recipe
from mmrl.training import machines, trainer
from mmrl.training.processes import Streams
from mmrl.training.recipe import Step
from mmrl.training.run import train
from robotics.data import LeRobotReader
from robotics.episodes.demonstrations import DemonstrationConfig, Transition, load_demonstrations
from robotics.episodes.payload import EpisodeSetConfig
from robotics.interventions.hg_dagger import (
    AggregatedDemonstrations,
    HgDaggerRecipe,
    publish,
    published,
    round_metrics,
)
from robotics.interventions.overseers import OverseerConfig
from robotics.interventions.record import LINES_PATH, read_attempts
from robotics.policies.base.action_policy import open_policy
from tests.robotics.interventions.scripted import ExpertLine, dagger
from tests.robotics.line_demos import demonstrate

pytest.importorskip("pyarrow", reason="needs pip install 'mmrl-suite[vla]'")
ENTRY = find_recipe("robot_hg_dagger")


@pytest.fixture(scope="module")
def demos(tmp_path_factory):
    return demonstrate(tmp_path_factory.mktemp("line") / "demos")


@pytest.fixture(scope="module")
def finished(tmp_path_factory, demos):
    """A run of two rounds."""
    config = dagger(tmp_path_factory.mktemp("dagger") / "run", demos)
    return train(ENTRY, config)


def weights(run, step=4):
    policy = open_policy(run / "checkpoints" / f"step-{step:06d}" / "model")
    return torch.cat([part.flatten() for part in policy.state_dict().values() if part.is_floating_point()])


def metrics(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_two_rounds_add_the_overseers_steps_and_only_those(finished):
    reader, rows = LeRobotReader(finished / "interventions"), metrics(finished)
    attempts = read_attempts(finished / "interventions")
    assert len(attempts) == len(reader) == 6
    owners = [episode.extra["intervention"].ravel() for episode in reader]
    by_round = [sum(int(owner.sum()) for owner in owners[:count]) for count in (3, 6)]
    assert 0 < by_round[0] < by_round[1] < sum(map(len, owners))
    assert [row["data/person_steps"] for row in rows] == [by_round[0]] * 2 + [by_round[1]] * 2
    base = rows[0]["data/transitions"] - by_round[0]
    assert [row["data/transitions"] for row in rows] == [base + by_round[0]] * 2 + [base + by_round[1]] * 2
    assert rows[2]["intervention/rate"] == pytest.approx(
        sum(owner.sum() for owner in owners[3:]) / sum(map(len, owners[3:]))
    )
    # an epoch is a pass over the dataset as it is
    assert rows[3]["data/epoch"] == pytest.approx(4 * 8 / rows[3]["data/transitions"])


def test_the_same_run_again_gives_the_same_data_and_weights(finished, tmp_path, demos):
    again = train(ENTRY, dagger(tmp_path / "run", demos))
    assert torch.equal(weights(again), weights(finished))
    for one, other in zip(
        LeRobotReader(again / "interventions"), LeRobotReader(finished / "interventions"), strict=True
    ):
        np.testing.assert_array_equal(one.action, other.action)
        np.testing.assert_array_equal(one.extra["intervention"], other.extra["intervention"])


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_a_resumed_run_equals_an_uninterrupted_one(finished, tmp_path, demos, cut, monkeypatch):
    config = dagger(tmp_path / "run", demos)
    whole = HgDaggerRecipe.rollout

    def rollout(self, policy, tasks, streams, step):
        if step.number == cut:
            # the episodes of a round that begins are recorded, and then the process ends
            whole(self, policy, tasks, streams, step)
            raise RunError("the power is gone")
        return whole(self, policy, tasks, streams, step)

    with monkeypatch.context() as patch:
        patch.setattr(HgDaggerRecipe, "rollout", rollout)
        with pytest.raises(RunError, match="the power is gone"):
            train(ENTRY, config)
    run = train(ENTRY, dagger(tmp_path / "run", demos), resume=True)
    assert torch.equal(weights(run), weights(finished))
    assert len(read_attempts(run / "interventions")) == 6
    shown = ("bc/loss", "data/transitions", "data/person_steps", "intervention/rate", "intervention/per_episode")
    assert [[row[name] for name in shown] for row in metrics(run)] == [
        [row[name] for name in shown] for row in metrics(finished)
    ]


def test_lost_episodes_are_noticed_when_resuming(finished, tmp_path, demos):
    config = dagger(tmp_path / "run", demos)
    run = train(ENTRY, config)
    lines = (run / "interventions" / LINES_PATH).read_text().splitlines()
    (run / "interventions" / LINES_PATH).write_text("\n".join(lines[:-1]))
    with pytest.raises(UserError, match=r"has 6 episodes, but meta/interventions.jsonl names 5"):
        train(ENTRY, dagger(tmp_path / "run", demos, trainer={"steps": 5}), resume=True)


def test_a_chunk_ends_with_its_intervention(demos):
    given = load_demonstrations(DemonstrationConfig(path=str(demos), camera=""))
    data, before, number = AggregatedDemonstrations(**vars(given)), given.num_transitions, len(given.actions)
    reader = LeRobotReader(demos)
    episode = reader.episode(0)
    owner = np.zeros(len(episode), bool)
    owner[[1, 2, 4]] = True
    data.add(type(episode)(**{**vars(episode), "extra": {"intervention": owner[:, None]}}))
    assert (data.person_steps, data.num_transitions) == (3, before + 3)
    assert data.transitions[before:] == [Transition(number, 1), Transition(number, 2), Transition(number, 4)]
    _, mask = data.chunks(data.transitions[before:], 3)
    assert mask.tolist() == [[1, 1, 0], [1, 0, 0], [1, 0, 0]]
    _, whole = data.chunks([Transition(0, 0)], 3)
    assert whole.tolist() == [[1, 1, 1]]


def test_an_episode_without_interventions_adds_nothing(demos):
    data = AggregatedDemonstrations(**vars(load_demonstrations(DemonstrationConfig(path=str(demos), camera=""))))
    episode = LeRobotReader(demos).episode(0)
    silent = type(episode)(**{**vars(episode), "extra": {"intervention": np.zeros((len(episode), 1), bool)}})
    before = data.num_transitions, len(data.actions)
    data.add(silent)
    assert (data.num_transitions, len(data.actions), data.person_steps) == (*before, 0)


def test_episodes_that_move_while_they_are_read_are_added_once(finished, demos, monkeypatch):
    given = load_demonstrations(DemonstrationConfig(path=str(demos), camera=""))
    data, read, asked = (
        AggregatedDemonstrations(**vars(given), folder=finished / "interventions"),
        LeRobotReader.episode,
        [],
    )

    def episode(self, number):
        asked.append(number)
        if len(asked) == 3:
            raise UserError("joined meanwhile")
        return read(self, number)

    monkeypatch.setattr(LeRobotReader, "episode", episode)
    assert len(data.take(6)) == 6
    assert asked == [0, 1, 2, 0, 1, 2, 3, 4, 5]
    assert data.person_steps == metrics(finished)[-1]["data/person_steps"]


def test_rounds_begin_after_the_first_steps(tmp_path, demos):
    config = dagger(
        tmp_path / "run", demos, interventions={"first": 2, "every": 3, "episodes": 5}, trainer={"steps": 9}
    )
    assert [config.attempts_before(step) for step in range(9)] == [0, 0, 5, 5, 5, 10, 10, 10, 15]
    assert config.attempts == 15
    with pytest.raises(ValueError, match=r"the first round only comes after interventions.first = 4 steps"):
        dagger(tmp_path / "run", demos, interventions={"first": 4})


def test_a_person_needs_a_live_session(tmp_path, demos):
    person = OverseerConfig(kind="keyboard")
    with pytest.raises(ValueError, match=r"kind is keyboard, but interventions.live is false.*mmrl robot intervene"):
        dagger(tmp_path / "run", demos, interventions={"overseer": person})
    dagger(tmp_path / "run", demos, interventions={"overseer": person, "live": True})


def test_a_live_run_waits_for_its_episodes_and_gives_out_weights(tmp_path, demos, finished):
    config = dagger(tmp_path / "run", demos, interventions={"live": True})
    recipe = HgDaggerRecipe(config)
    assert "has 0 of 3 episodes" in recipe.waits_for(Step(0, 4))
    ((step, folder),) = published(tmp_path / "run")
    assert step == 0
    copied = open_policy(folder).state_dict()
    assert all(torch.equal(copied[name], part) for name, part in recipe.policy.state_dict().items())
    # the episodes of another run stand for those of a session
    recipe.demonstrations.folder = finished / "interventions"
    assert not recipe.waits_for(Step(0, 4))
    recipe.rollout(recipe.policy, recipe.train_tasks, Streams(0), Step(0, 4))
    assert len(recipe.demonstrations.attempts) == 3
    assert not recipe.waits_for(Step(2, 4))
    # a round that begins publishes, even though its episodes are there already
    assert [step for step, _ in published(tmp_path / "run")] == [0, 2]
    recipe.close()


def test_a_live_run_without_a_session_says_what_it_lacks_and_ends(tmp_path, demos, monkeypatch, caplog):
    monkeypatch.setattr(trainer, "PATIENCE_S", 0.3)
    config = dagger(tmp_path / "run", demos, interventions={"live": True})
    lacks = r"on \S+, \S+run/interventions has 0 of 3 episodes; `mmrl robot intervene` records them, in the same"
    with (
        caplog.at_level("INFO", "mmrl"),
        pytest.raises(RunError, match=f"step 1 waited .* without a change: .*{lacks}"),
    ):
        train(ENTRY, config)
    assert re.search(f"step 1 waits: .*{lacks}", caplog.text)


def test_the_newest_two_weights_are_kept(tmp_path, demos):
    recipe = HgDaggerRecipe(dagger(tmp_path / "run", demos))
    for step in (0, 5, 999_999, 1_000_000):
        publish(recipe.policy, tmp_path / "out", step)
    folder = tmp_path / "out" / "actor"
    assert published(tmp_path / "out") == [(999_999, folder / "step-999999"), (1_000_000, folder / "step-1000000")]
    assert len(list(folder.iterdir())) == 2
    recipe.close()


def test_failed_environments_are_counted_and_a_round_of_them_ends_the_run(tmp_path, demos):
    config = dagger(tmp_path / "run", demos)
    # layouts 0 and 1 break: the first two episodes of the first round have one task each of layout 0
    config.sim.options = {"breaks": [0]}
    run = train(ENTRY, config)
    rows = metrics(run)
    assert rows[0]["intervention/failed"] >= 1
    assert len(LeRobotReader(run / "interventions")) == 6 - sum(
        line["episode_index"] is None for line in read_attempts(run / "interventions")
    )
    config = dagger(tmp_path / "all", demos)
    config.sim.options = {"never_starts": [0, 1]}
    with pytest.raises(RunError, match="all 3 watched episodes of a round failed: would not start; they are not"):
        train(ENTRY, config)
    # an arm that was unplugged has not used up the run
    assert not (tmp_path / "all" / "interventions" / LINES_PATH).read_text()


@pytest.mark.parametrize("evaluated", [False, True])
def test_a_live_run_leaves_the_robot_to_the_session_unless_it_evaluates(tmp_path, demos, evaluated, monkeypatch):
    closed = []
    monkeypatch.setattr(ExpertLine, "close", lambda sim: closed.append(sim))
    config = dagger(tmp_path / "run", demos, interventions={"live": True})
    config.eval_data = {"held_out": EpisodeSetConfig(split="held_out", layouts=2)} if evaluated else {}
    recipe = HgDaggerRecipe(config)
    assert bool(closed) is not evaluated
    recipe.close()


def test_metrics_of_a_round():
    whole = {"episode_index": 0, "steps": 10, "person_steps": 4, "starts": 2, "success": True}
    alone = {"episode_index": 1, "steps": 10, "person_steps": 0, "starts": 0, "success": True}
    failed = {"episode_index": None, "steps": 3, "person_steps": 3, "starts": 1, "success": False}
    paced = {"hz": 10.0, "jitter_ms": 1.0, "longest_ms": 104.0, "late": 1}
    found = round_metrics([whole | paced, alone | paced | {"hz": 9.0, "longest_ms": 130.0}, failed])
    assert found == {
        "intervention/rate": 0.2,
        "intervention/per_episode": 1.0,
        "intervention/success": 1.0,
        "intervention/success_alone": 0.5,
        "intervention/failed": 1.0,
        "control/hz": 9.5,
        "control/jitter_ms": 1.0,
        "control/longest_ms": 130.0,
        "control/late": 2.0,
    }


def test_a_machine_that_does_not_see_the_watched_episodes_is_named(tmp_path, demos, closing, monkeypatch):
    """It would train on other data, and in the next step wait for processes that do not wait for it."""
    recipe = closing(HgDaggerRecipe(dagger(tmp_path / "run", demos)))
    monkeypatch.setattr(machines, "from_all", lambda mine: [mine, ("elsewhere", 0)])
    with pytest.raises(UserError, match=r"interventions has 3 episodes on .*, but 0 on elsewhere.*a shared disk"):
        recipe.rollout(recipe.policy, range(8), Streams(0), Step())
