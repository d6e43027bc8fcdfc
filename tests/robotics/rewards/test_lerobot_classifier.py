"""Reward classifiers of LeRobot as judges: with a service that stands in for lerobot, and lerobot's own.

The slow test needs an environment with lerobot, see `tests/robotics/test_lerobot_peer.py`.
"""

import sys
from pathlib import Path

import numpy as np
import pytest

from mmrl.errors import RunError, UserError
from mmrl.fields import check_config
from robotics.rewards.judged_sim import JudgedSim, SuccessConfig, open_run_sim
from robotics.rewards.lerobot_classifier import LeRobotClassifier
from robotics.sim.episodes import EpisodeSpec
from robotics.sim.opening import SimConfig
from tests.robotics.lerobot_process import run_peer
from tests.robotics.line_sim import LineSim
from tests.robotics.rewards import lerobot_classifiers

RIGHT = [EpisodeSpec("right", "go right", layout) for layout in range(2)]


@pytest.fixture
def bright(monkeypatch):
    """Classifiers of LeRobot are answered by `fake_classifier`."""
    service = Path(__file__).with_name("fake_classifier.py")
    monkeypatch.setattr("robotics.policies.lerobot.lerobot_server.SERVICE", service)


def judged(**options):
    sim = LineSim(views=["wrist"])
    sim.camera = "front"
    found = JudgedSim(sim, LeRobotClassifier("anything", sys.executable), **options)
    found.reset(RIGHT)
    return found


@pytest.mark.parametrize(("options", "solved"), [({}, False), ({"cameras": ["front", "wrist"]}, True)])
def test_images_reach_the_classifier_in_the_order_of_its_cameras(bright, options, solved):
    sim = judged(threshold=0.01, **options)
    # the view is darker than the image, and only a bright first image counts
    assert sim.step_chunk(np.zeros((2, 1, 1))).success.tolist() == [solved] * 2
    sim.close()
    assert sim._sim.closed


def test_a_classifier_uses_lerobots_threshold_and_its_first_look(bright):
    sim = judged(cameras=["front", "wrist"])
    own = sim.describe()["success"]
    assert (own["threshold"], own["looks"]) == (0.5, 1)
    assert not sim.step_chunk(np.zeros((2, 1, 1))).success.any()
    sim.close()


def test_a_run_without_images_gets_the_cameras_of_the_classifier(bright):
    success = SuccessConfig("anything", threshold=1e-6, python=sys.executable)
    with pytest.raises(
        UserError, match=r"looks at images of \(32, 32\) pixels, but those of the simulator are \(64, 64\)"
    ):
        open_run_sim(SimConfig(tasks=["reach"], workers=1, views=["wrist"]), success)
    sim = open_run_sim(SimConfig(tasks=["reach"], image_size=0, workers=1), success)
    assert (sim.describe()["camera"], sim.image_size) == ("wrist", None)
    sim.reset([EpisodeSpec("reach", "", 0)])
    assert sim.step_chunk(np.zeros((1, 1, sim.action_size))).observation.images is None
    sim.close()


def test_a_camera_that_the_simulator_lacks_is_named(bright):
    sim = LineSim(views=["side"])
    sim.camera = "front"
    judge = LeRobotClassifier("anything", sys.executable)
    with pytest.raises(UserError, match=r"camera 'wrist', but the simulator has front, side; .*success\.cameras"):
        JudgedSim(sim, judge)
    judge.close()
    with pytest.raises(ValueError, match="python"):
        check_config(SuccessConfig(python="x"))


def test_an_interpreter_without_lerobot_is_named(tmp_path):
    with pytest.raises(RunError, match=r"lerobot.*success\.python"):
        LeRobotClassifier(str(tmp_path), sys.executable)


@pytest.mark.slow
def test_classifiers_of_lerobot(lerobot, tmp_path):
    run_peer(lerobot, lerobot_classifiers, tmp_path)
    expected = np.load(tmp_path / "expected.npz")
    judge = LeRobotClassifier(str(tmp_path / "two"), lerobot)
    assert (judge.cameras, judge.image_size) == (("wrist", "front"), (128, 128))
    found = judge.look(lerobot_classifiers.pictures(), [""] * 4)
    np.testing.assert_allclose(found, expected["found"], rtol=1e-5)
    # without the normalisation of its training, as in lerobot's loop, it sees something else
    assert np.abs(expected["found"] - expected["bare"]).max() > 1e-3
    judge.close()
    for name, text in (
        ("short", r"the weights of .*short lack .*classifier_head"),
        ("robometer", r"reward model of type robometer; only reward_classifier is supported"),
        ("code", r"encoder .*coded of .* runs code that comes with it.*success\.trust_remote_code=true"),
        ("encoder", r"is not a LeRobot reward classifier: it has no classifier_preprocessor\.json"),
    ):
        with pytest.raises(UserError, match=text):
            LeRobotClassifier(str(tmp_path / name), lerobot)
