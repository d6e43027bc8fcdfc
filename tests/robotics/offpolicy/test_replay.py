"""The replay: a dataset on disk with final observations, ends and executed actions, and an index that follows it."""

import json

import numpy as np
import pytest
import torch

from mmrl.errors import UserError
from mmrl.runs.folder import set_aside
from robotics.data import LeRobotReader
from robotics.offpolicy.replay import DATASET, INDEX_FILE, NEXT, Replay, read_records
from robotics.offpolicy.transitions import TransitionForm
from tests.robotics.offpolicy.line_sac import FORM, episode


def replay_of(folder, *episodes, form=FORM):
    replay = Replay(folder, form, fps=5)
    replay.append(episodes)
    return replay


def test_the_dataset_has_everything_that_the_index_has(tmp_path):
    given = [episode(4), episode(3, seed=1, terminated=True, last=1)]
    replay = replay_of(tmp_path / "replay", *given)
    records = replay.index.records
    assert len(replay) == 7
    assert replay.control_steps == 8 + 5
    # an episode is in the dataset when `append` returns
    assert np.array_equal(read_records(replay.dataset, FORM), records)
    reader = LeRobotReader(replay.dataset)
    first, second = (reader.episode(number) for number in (0, 1))
    np.testing.assert_array_equal(second.action, given[1].actions.reshape(3, -1))
    # the observation after the last action, which a dataset of frames alone would lack
    np.testing.assert_array_equal(first.extra[NEXT + "observation.state"][-1], given[0].states[-1])
    assert (first.task, second.task) == ("go right", "go left")
    assert (first.success, second.success) == (False, True)


def test_a_time_limit_is_stored_as_none_of_the_ends(tmp_path):
    replay = replay_of(tmp_path / "replay", episode(3), episode(2, terminated=True))
    assert replay.index.records["terminated"].tolist() == [False, False, False, False, True]
    # next states never reach into the next episode
    records = replay.index.records
    np.testing.assert_array_equal(records["next_state"][0], records["state"][1])
    assert not np.array_equal(records["next_state"][2], records["state"][3])
    np.testing.assert_array_equal(records["next_state"][2], episode(3).states[-1])


def test_the_reward_before_a_chunk_is_that_of_the_last_executed_step(tmp_path):
    records = replay_of(tmp_path / "replay", episode(3), episode(2, seed=1)).index.records
    rewards = records["rewards"]
    # nobody knows the reward before an episode: as if it were that of the first step
    assert records["before"].tolist() == [rewards[0, 0], *rewards[:2, 1], rewards[3, 0], rewards[3, 1]]


def test_a_copy_continues_as_if_nothing_had_been_added_since(tmp_path):
    replay = replay_of(tmp_path / "a", episode(4))
    replay.save(tmp_path / "copy")
    before = np.array(replay.index.records)
    replay.append([episode(5, seed=1)])
    # the copy shares files with the replay, which must not have changed them
    other = Replay(tmp_path / "b", FORM, fps=5)
    other.restore(tmp_path / "copy")
    assert np.array_equal(other.index.records, before)
    assert (other.control_steps, other.episodes) == (8, 1)
    other.append([episode(5, seed=1)])
    assert np.array_equal(other.index.records, replay.index.records)
    assert other.features == replay.features
    replay.restore(tmp_path / "copy")
    assert np.array_equal(replay.index.records, before)


def test_an_empty_replay_is_saved_and_restored(tmp_path):
    Replay(tmp_path / "a", FORM, fps=5).save(tmp_path / "copy")
    other = Replay(tmp_path / "b", FORM, fps=5)
    other.restore(tmp_path / "copy")
    assert len(other) == 0


def test_batches_depend_on_the_generator_and_the_newest_transitions_alone(tmp_path):
    index = replay_of(tmp_path / "replay", episode(30)).index
    first, again = (index.draw(50, torch.Generator().manual_seed(3)) for _ in range(2))
    assert np.array_equal(first, again)
    newest = {record.tobytes() for record in index.records[-4:]}
    assert {record.tobytes() for record in index.draw(50, torch.Generator(), newest=4)} == newest


def test_the_replay_of_another_run_is_not_continued_silently(tmp_path):
    replay_of(tmp_path / "replay", episode(2)).close()
    with pytest.raises(UserError, match="replay of an earlier run that was not resumed"):
        replay_of(tmp_path / "replay", episode(2))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda data: (data / "meta/info.json").unlink(), "info.json"),
        (lambda data: next(data.glob("data/*/*.parquet")).write_bytes(b"PAR1"), "file-000.parquet"),
        (lambda data: next(data.glob("data/*/*.parquet")).unlink(), "file-000.parquet"),
        (lambda data: next(data.glob("meta/episodes/*/*.parquet")).unlink(), "meta/episodes lacks 2 of them"),
    ],
)
def test_a_damaged_replay_is_refused(tmp_path, damage, message):
    replay = replay_of(tmp_path / "replay", episode(2), episode(3))
    replay.save(tmp_path / "copy")
    damage(tmp_path / "copy/dataset")
    with pytest.raises(UserError, match=message):
        Replay(tmp_path / "other", FORM, fps=5).restore(tmp_path / "copy")


def test_frames_that_the_metadata_does_not_count_are_damage(tmp_path):
    replay = replay_of(tmp_path / "replay", episode(2), episode(3))
    replay.save(tmp_path / "copy")
    info = tmp_path / "copy/dataset/meta/info.json"
    content = json.loads(info.read_text())
    info.unlink()  # a link to the original
    info.write_text(json.dumps(content | {"total_episodes": 1}))
    with pytest.raises(UserError, match="do not have the 2 transitions of 1 episodes that its metadata counts"):
        read_records(tmp_path / "copy/dataset", FORM)


def test_a_replay_of_other_sizes_is_refused(tmp_path):
    replay = replay_of(tmp_path / "replay", episode(2))
    with pytest.raises(UserError, match=r"observation.state of shape \[3\]; this run needs \[5\]"):
        read_records(replay.dataset, TransitionForm(state=5, full=4, chunk=2, action=2))


def test_numbers_that_are_not_finite_are_refused_before_they_are_learned_from(tmp_path):
    wrong = episode(2)
    wrong.states[1, 0] = np.nan
    with pytest.raises(ValueError, match="not finite"):
        replay_of(tmp_path / "replay", wrong)


def test_a_run_that_starts_again_moves_its_replay_aside_but_not_the_prior_data(tmp_path):
    for name in ("replay/dataset/meta", "replay"):
        (tmp_path / name).mkdir(parents=True, exist_ok=True)
    for name in ("replay/dataset/meta/info.json", "replay/index.bin", "replay/prior.bin"):
        (tmp_path / name).touch()
    moved = set_aside(tmp_path)
    assert {str(path.relative_to(moved)) for path in moved.rglob("*.*")} == {
        "replay/dataset/meta/info.json",
        "replay/index.bin",
    }
    assert [path.name for path in (tmp_path / "replay").iterdir()] == ["prior.bin"]
    assert (DATASET, INDEX_FILE) == ("dataset", "index.bin")
