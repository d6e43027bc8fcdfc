"""The recorded dataset: its columns, and that an interrupted recording goes on without loss."""

import json

import numpy as np
import pytest

from mmrl.errors import RunError, UserError
from robotics.data import EpisodeWriter, LeRobotReader, robot_features
from robotics.episodes.collect import ActingSettings
from robotics.interventions.devices import TAKE_OVER, DeviceInput
from robotics.interventions.overseers import OverseerConfig, Person, ScriptedOverseer, Verdict
from robotics.interventions.record import JOURNAL_PATH, LINES_PATH, InterventionRecord, read_attempts
from robotics.interventions.watched import WatchedEpisode, run_watched
from robotics.scenes.batch import BatchSettings, TabletopBatch
from robotics.sim.episodes import EpisodeSpec
from tests.robotics.interventions.scripted import AlwaysPolicy, ExpertLine, FakeDevice, pressed

RIGHT = EpisodeSpec("right", "go right", 0)
IDLE = DeviceInput()
INPUTS = [IDLE, IDLE, pressed(TAKE_OVER, x=0.5), pressed(x=0.9), pressed(x=0.7), pressed(TAKE_OVER), IDLE]


class PowerCutError(Exception):
    """Ends a recording in the middle of an episode."""


def _dying(record, die_at):
    """Notes control steps until the process ends."""
    noted = []

    def note(step):
        record.note(step)
        noted.append(step)
        if die_at is not None and len(noted) > die_at:
            raise PowerCutError

    return note


def session(folder, device, episodes=1, die_at=None, camera=()):
    """Record episodes as a live session does; with `die_at`, the process ends before that control step is executed."""
    sim, person = ExpertLine(), Person(device)
    with InterventionRecord(folder, sim, camera) as record:
        while len(record.attempts) < episodes:
            recalled, record.unfinished = record.unfinished, []

            note = _dying(record, None if die_at is None else die_at - len(recalled))
            (episode,) = run_watched(
                AlwaysPolicy(-0.1), sim, [RIGHT], person, ActingSettings(), [0], note=note, recalled=recalled
            )
            record.add(episode)


def content(folder):
    reader = LeRobotReader(folder)
    return [
        (
            *(episode.task, episode.success, episode.state.tolist(), episode.action.tolist()),
            *(values.tolist() for _, values in sorted(episode.extra.items())),
        )
        for episode in reader
    ]


def test_corrections_have_the_instruction_that_the_policy_acts_with_even_if_it_is_empty(tmp_path):
    sim, policy = ExpertLine(), AlwaysPolicy(-0.1)
    silent = EpisodeSpec("right", "", 0)
    with InterventionRecord(tmp_path / "data", sim, ()) as record:
        record.add(run_watched(policy, sim, [silent], Person(FakeDevice(INPUTS)), ActingSettings(), [0])[0])
    assert LeRobotReader(tmp_path / "data").episode(0).task == ""


def test_the_dataset_has_lerobots_columns_and_each_steps_owner(tmp_path):
    session(tmp_path / "data", FakeDevice(INPUTS), camera=("front",))
    reader = LeRobotReader(tmp_path / "data")
    features = reader.info["features"]
    assert features["intervention"] == {"dtype": "bool", "shape": [1], "names": None}
    assert features["complementary_info.is_intervention"]["dtype"] == "float32"
    assert reader.fps == ExpertLine.control_hz
    # the line does not report its full state
    assert "observation.environment_state" not in features
    episode = reader.episode(0)
    owner = [False, True, True, True] + [False] * (len(episode) - 4)
    assert episode.extra["intervention"].ravel().tolist() == owner
    assert episode.extra["complementary_info.is_intervention"].ravel().tolist() == [float(one) for one in owner]
    np.testing.assert_allclose(episode.action[:5, 0], [-0.1, 0.5, 0.9, 0.7, -0.1], rtol=1e-6)
    assert episode.extra["next.done"].ravel().tolist() == [False] * (len(episode) - 1) + [True]
    # the reward of the line is a potential of the gap after the step
    gaps = np.abs(np.diff(episode.state[1:], axis=1)).ravel()
    np.testing.assert_allclose(episode.extra["next.reward"].ravel()[:-1], 1 / (1 + gaps), rtol=1e-5)
    assert episode.images["front"].shape == (len(episode), 32, 32, 3)


class FullLine(ExpertLine):
    """The line, whose full state also has the number of control steps."""

    full_state_size = 3

    def full_state(self):
        parts = (self.place[self.live], self.goal[self.live], self.elapsed[self.live])
        return np.stack(parts, 1).astype(np.float32)


def test_the_full_state_before_each_action_is_recorded(tmp_path):
    specs = [EpisodeSpec("right", "go right", layout) for layout in range(4)]
    sim, overseer = FullLine(), ScriptedOverseer(OverseerConfig(flip=0.0))
    with InterventionRecord(tmp_path / "data", sim) as record:
        for episode in run_watched(AlwaysPolicy(0.9), sim, specs, overseer, ActingSettings(), range(4)):
            record.add(episode)
    lengths = set()
    for episode in LeRobotReader(tmp_path / "data"):
        full = episode.extra["observation.environment_state"]
        np.testing.assert_array_equal(full[:, :2], episode.state)
        np.testing.assert_array_equal(full[:, 2], np.arange(len(episode)))
        lengths.add(len(episode))
    # rows that end earlier do not shift the others
    assert len(lengths) > 1


def test_the_full_state_of_the_tabletop_is_the_one_in_which_the_policy_acted(tmp_path):
    spec, settings = EpisodeSpec("push", "push it", 0), BatchSettings(state="proprio", image_size=None, horizon=8)
    with TabletopBatch(["push"], settings=settings, workers=1) as sim:
        overseer, policy = ScriptedOverseer(OverseerConfig(flip=0.0)), AlwaysPolicy(-1.0, 1.0, 1.0, -1.0, -1.0)
        with InterventionRecord(tmp_path / "data", sim) as record:
            record.add(run_watched(policy, sim, [spec], overseer, ActingSettings(), [0])[0])
        episode = LeRobotReader(tmp_path / "data").episode(0)
        assert episode.state.shape == (8, 10)
        assert 0 < episode.extra["intervention"].sum() < 8
        sim.reset([spec])
        for action, full in zip(episode.action, episode.extra["observation.environment_state"], strict=True):
            np.testing.assert_array_equal(sim.full_state()[0], full)
            sim.step_chunk(action[None, None])


@pytest.mark.parametrize("die_at", [0, 1, 2, 4, 6])
def test_an_interrupted_and_continued_recording_gives_the_same_dataset(tmp_path, die_at):
    session(tmp_path / "whole", FakeDevice(INPUTS))
    device = FakeDevice(INPUTS)
    with pytest.raises(PowerCutError):
        session(tmp_path / "cut", device, die_at=die_at)
    assert (tmp_path / "cut" / JOURNAL_PATH).exists()
    # the person goes on where the session ended: with the inputs that it has not read, after those between the sessions
    device.inputs.insert(0, pressed(TAKE_OVER))
    session(tmp_path / "cut", device)
    assert content(tmp_path / "cut") == content(tmp_path / "whole")
    assert not (tmp_path / "cut" / JOURNAL_PATH).exists()


def test_a_recording_goes_on_after_its_finished_episodes(tmp_path):
    session(tmp_path / "whole", FakeDevice(INPUTS * 3), episodes=3)
    device = FakeDevice(INPUTS * 3)
    session(tmp_path / "cut", device, episodes=1)
    with pytest.raises(PowerCutError):
        session(tmp_path / "cut", device, episodes=3, die_at=3)
    device.inputs.insert(0, IDLE)
    assert [line["attempt"] for line in read_attempts(tmp_path / "cut")] == [0]
    session(tmp_path / "cut", device, episodes=3)
    assert content(tmp_path / "cut") == content(tmp_path / "whole")
    assert [line["attempt"] for line in read_attempts(tmp_path / "cut")] == [0, 1, 2]


def test_a_line_whose_episode_was_not_written_is_forgotten(tmp_path):
    session(tmp_path / "data", FakeDevice(INPUTS), episodes=2)
    path = tmp_path / "data" / LINES_PATH
    lines = path.read_text().splitlines()
    # as left by a process that was killed between the line and its episode, and while writing the next one
    path.write_text("\n".join([*lines, lines[-1].replace('"episode_index": 1', '"episode_index": 2'), '{"attem']))
    assert len(read_attempts(tmp_path / "data")) == 2
    session(tmp_path / "data", FakeDevice(INPUTS), episodes=3)
    assert len(read_attempts(tmp_path / "data")) == len(LeRobotReader(tmp_path / "data")) == 3


def test_a_journal_of_a_finished_episode_is_dropped(tmp_path):
    folder = tmp_path / "data"
    session(folder, FakeDevice(INPUTS))
    (folder / JOURNAL_PATH).write_text('{"attempt": 0}\n{"actions": [[1.0]], "acts": [false], "presses": []}\n')
    with InterventionRecord(folder, ExpertLine()) as record:
        assert record.unfinished == []
    assert not (folder / JOURNAL_PATH).exists()


def test_a_torn_line_of_the_journal_does_not_spoil_the_next_one(tmp_path):
    steps = [Verdict(np.array([[move]], np.float32), np.array([True])) for move in (0.25, 0.5)]
    with InterventionRecord(tmp_path / "data", ExpertLine()) as record:
        record.note(steps[0])
    with (tmp_path / "data" / JOURNAL_PATH).open("a") as journal:
        journal.write('{"actions": [[0.3')
    with InterventionRecord(tmp_path / "data", ExpertLine()) as record:
        record.note(steps[1])
    with InterventionRecord(tmp_path / "data", ExpertLine()) as record:
        assert [step.actions.item() for step in record.unfinished] == [0.25, 0.5]


def test_an_attempt_whose_environment_failed_is_counted_and_has_no_episode(tmp_path):
    with InterventionRecord(tmp_path / "data", ExpertLine()) as record:
        record.add(WatchedEpisode(episode=RIGHT, failed=True, reason="it broke"))
    lines = read_attempts(tmp_path / "data")
    assert [(line["episode_index"], line["reason"]) for line in lines] == [(None, "it broke")]
    assert len(LeRobotReader(tmp_path / "data")) == 0


def test_a_round_of_failed_attempts_is_forgotten_and_begins_again(tmp_path):
    broken = WatchedEpisode(episode=RIGHT, failed=True, reason="unplugged")
    with InterventionRecord(tmp_path / "data", ExpertLine(), episodes=2) as record:
        (episode,) = run_watched(AlwaysPolicy(0.1), ExpertLine(), [RIGHT], Person(FakeDevice()), ActingSettings(), [0])
        for attempt in (episode, broken, broken):
            record.add(attempt)
        with pytest.raises(RunError, match="all 2 watched episodes of a round failed: unplugged"):
            record.add(broken)
    # the first round has a result, and stays
    assert [line["episode_index"] for line in read_attempts(tmp_path / "data")] == [0, None]


def test_a_dataset_that_was_not_recorded_here_is_refused(tmp_path):
    session(tmp_path / "data", FakeDevice(INPUTS))
    (tmp_path / "data" / LINES_PATH).unlink()
    with pytest.raises(UserError, match=r"has 1 episodes, but meta/interventions.jsonl names 0"):
        InterventionRecord(tmp_path / "data", ExpertLine())
    with EpisodeWriter(tmp_path / "other", 10, robot_features(2, 1)) as writer:
        writer.add_episode(np.zeros((2, 2)), np.zeros((2, 1)), None, "go", True)
    with pytest.raises(UserError, match="different features"):
        InterventionRecord(tmp_path / "other", ExpertLine())


def test_floats_of_the_journal_are_exact(tmp_path):
    session(tmp_path / "data", FakeDevice([pressed(TAKE_OVER, x=1 / 3)] + [pressed(x=1 / 7)] * 20), episodes=0)
    with InterventionRecord(tmp_path / "data", ExpertLine()) as record:
        action = np.array([1 / 3], np.float32)
        record.note(Verdict(action[None], np.array([True])))
        written = json.loads((tmp_path / "data" / JOURNAL_PATH).read_text().splitlines()[1])
        assert np.float32(written["actions"][0][0]) == action[0]
