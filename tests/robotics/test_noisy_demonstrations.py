"""Demonstrations with noise on the executed actions, and with the simulator's full state."""

import numpy as np
import pytest

from mmrl.errors import UserError
from robotics.data import LeRobotReader
from robotics.data.features import ACTION, EXECUTED, FULL_STATE
from robotics.episodes.demonstrations import DemonstrationConfig, load_demonstrations
from robotics.episodes.recording import build_demonstrations
from tests.robotics.noisy_line import NoisyLine

SIM = {"kind": "tests.robotics.noisy_line:open_noisy", "image_size": 0}
NOISY = {"sim": SIM, "episodes": 4, "noise": 0.4, "seed": 3, "full": True}


def built(folder, **changes):
    return LeRobotReader(build_demonstrations(str(folder), **(NOISY | changes)))


def test_the_expert_is_recorded_and_the_noise_executed(tmp_path):
    reader = built(tmp_path / "demos")
    assert reader.info["features"][ACTION]["info"]["noise"] == 0.4
    shifts = []
    for episode in reader:
        states, executed = episode.state, episode.extra[EXECUTED]
        wanted = np.clip((states[:, 1] - states[:, 0]) / 0.1, -0.5, 0.5)
        np.testing.assert_allclose(episode.action[:, 0], wanted, atol=1e-6)
        # the executed action, and not the recorded one, led to the next state
        np.testing.assert_allclose(np.diff(states[:, 0]), 0.1 * executed[:-1, 0], atol=1e-6)
        assert np.abs(executed).max() <= 1
        assert np.array_equal(executed[:, 1], episode.action[:, 1])  # nobody shakes the gripper
        shifts.append(executed[:, 0] - episode.action[:, 0])
        np.testing.assert_array_equal(episode.extra[FULL_STATE][:, :2], states)
        assert episode.extra[FULL_STATE][:, 2].tolist() == list(range(len(episode)))
    spread = np.concatenate(shifts)
    # the standard error of the deviation is 1 / sqrt(2 n) of it
    assert abs(spread.std() - 0.4) < 4 * 0.4 / np.sqrt(2 * len(spread))


def test_what_is_cloned_has_no_noise(tmp_path):
    reader = built(tmp_path / "demos")
    found = load_demonstrations(DemonstrationConfig(path=str(tmp_path / "demos"), camera=""))
    for episode, actions in zip(reader, found.actions, strict=True):
        assert np.array_equal(actions, episode.action)


def test_the_noise_of_an_episode_depends_on_seed_task_and_layout_alone(tmp_path):
    whole = built(tmp_path / "whole")
    alone = built(tmp_path / "alone", sim={**SIM, "options": {"capacity": 1}})
    later = built(tmp_path / "later", first_layout=2, episodes=2)
    for number, episode in enumerate(whole):
        assert np.array_equal(episode.extra[EXECUTED], alone.episode(number).extra[EXECUTED])
    # layouts 2 and 3 of the first task
    for number in range(2):
        assert np.array_equal(later.episode(number).extra[EXECUTED], whole.episode(number + 2).extra[EXECUTED])
    other = built(tmp_path / "other", seed=4)
    assert not np.array_equal(other.episode(0).extra[EXECUTED][0], whole.episode(0).extra[EXECUTED][0])


def test_noise_may_come_in_a_share_of_the_steps_only(tmp_path):
    shaken = [
        (episode.extra[EXECUTED][:, 0] != episode.action[:, 0])
        for episode in built(tmp_path / "demos", noise_share=0.25, episodes=8)
    ]
    joined = np.concatenate(shaken)
    assert abs(joined.mean() - 0.25) < 4 * np.sqrt(0.25 * 0.75 / len(joined))


def test_without_noise_nothing_is_added(tmp_path):
    reader = built(tmp_path / "demos", noise=0.0, full=False)
    assert not {EXECUTED, FULL_STATE} & set(reader.info["features"])
    assert "noise" not in reader.info["features"][ACTION]["info"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"noise": -0.1}, r"noise is -0\.1; must be at least 0"),
        ({"noise_share": 1.5}, r"noise_share is 1\.5; must be 0 to 1"),
        ({"sim": {**SIM, "kind": "tests.robotics.line_sim:open_line"}}, "does not report its full state"),
    ],
)
def test_wrong_options_are_named(tmp_path, changes, message):
    with pytest.raises(UserError, match=message):
        built(tmp_path / "demos", **changes)
    assert not (tmp_path / "demos").exists()


class UnnamedLine(NoisyLine):
    action_names = None


def open_unnamed(config):
    return UnnamedLine(**config.options)


def test_noise_without_names_of_the_action_entries_is_refused_because_it_would_shake_a_gripper(tmp_path):
    unnamed = {"sim": {**SIM, "kind": f"{__name__}:open_unnamed"}}
    with pytest.raises(UserError, match="does not name its action entries, so a gripper would get noise too"):
        built(tmp_path / "demos", **unnamed)
    assert not (tmp_path / "demos").exists()
    assert len(built(tmp_path / "demos", **unnamed, noise=0.0)) == 4 * 2
