"""The live session: its rate, its recording, and the learner beside it."""

import contextlib
import time

import numpy as np
import pytest

from mmrl.cli import main
from mmrl.errors import RunError, UserError
from mmrl.fields import check_config
from robotics.data import LeRobotReader
from robotics.episodes.pacing import Pacer
from robotics.interventions import session
from robotics.interventions.devices import QUIT, REDO, TAKE_OVER, DeviceInput
from robotics.interventions.overseers import OverseerConfig, Person
from robotics.interventions.record import JOURNAL_PATH, read_attempts
from robotics.policies.base.encoder import EncoderConfig
from robotics.policies.small import SmallVlaConfig, SmallVlaPolicy
from robotics.scenes.batch import BatchSettings, TabletopBatch
from robotics.sim.episodes import EpisodeSpec
from tests.robotics.interventions.scripted import LINE, ExpertLine, FakeDevice, pressed
from tests.robotics.line_demos import BLIND, demonstrate

pytest.importorskip("pyarrow", reason="needs pip install 'mmrl-suite[vla]'")
IDLE = DeviceInput()
CONFIG = """
recipe: robot_hg_dagger
output_dir: {folder}/run
sim: {{kind: "{line}", options: {{hz: {hz}}}}}
model: {model}
demonstrations: {{path: {folder}/demos, camera: ""}}
data: {{layouts: 5}}
eval_data: {{held_out: {{split: held_out, layouts: 4}}}}
evaluation: {{videos: 0}}
interventions: {{live: true, episodes: 2, every: 5, overseer: {overseer}}}
trainer: {{steps: 15, tasks_per_step: 8, learning_rate: 3e-3}}
tracking: {{quiet: true, tensorboard: false}}
"""
SCRIPT = "{kind: random, rate: 0.5, flip: 0.0, duration: 2}"
BLIND_CONFIG = EncoderConfig(image_size=None, state_size=2, width=32, heads=2, layers=1, channels=8, keypoints=4)


# ---- the rate ----


class Clock:
    """Time that passes only where something waits or works."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


def paced(works, hz=10.0):
    clock = Clock()
    pacer, starts = Pacer(hz, clock, clock.sleep), []
    for work in works:
        pacer.wait()
        starts.append(clock.now)
        clock.sleep(work)
    return pacer, starts


def test_steps_begin_a_period_apart_however_long_they_work():
    pacer, starts = paced([0.01, 0.09, 0.03, 0.05])
    np.testing.assert_allclose(starts, [0.0, 0.1, 0.2, 0.3], atol=1e-12)
    rate = pacer.rate()
    assert (rate.hz, rate.late) == (pytest.approx(10.0), 0)
    assert rate.jitter_ms == pytest.approx(0.0, abs=1e-9)


def test_a_late_step_does_not_shift_those_after_it():
    pacer, starts = paced([0.01, 0.13, 0.01, 0.01])
    np.testing.assert_allclose(starts, [0.0, 0.1, 0.23, 0.3], atol=1e-12)
    rate = pacer.rate()
    assert (rate.late, rate.longest_ms) == (1, pytest.approx(130.0))
    assert rate.hz == pytest.approx(10.0)
    assert rate.jitter_ms == pytest.approx(1000 * np.std([0.1, 0.13, 0.07]))


def test_a_long_pause_is_not_made_up_for_by_a_burst():
    _, starts = paced([0.01, 1.0, 0.01, 0.01, 0.01])
    np.testing.assert_allclose(starts, [0.0, 0.1, 1.1, 1.2, 1.3], atol=1e-12)


def test_one_step_has_no_rate():
    assert paced([0.1])[0].rate() is None


# ---- the session ----


@pytest.fixture
def config(tmp_path):
    """Writes a configuration whose policy has random weights."""
    demonstrate(tmp_path / "demos")
    policy = SmallVlaPolicy.build(SmallVlaConfig(1, 2, bins=16, encoder=BLIND_CONFIG), ["go right", "go left"])
    policy.save_pretrained(tmp_path / "policy")

    def write(hz=200.0, overseer=SCRIPT, path=tmp_path / "policy"):
        file = tmp_path / "dagger.yaml"
        options = {"chunk": 2, "options": {"bins": 16, "encoder": BLIND}}
        model = {"path": str(path)} if path else options
        about = {"folder": tmp_path, "line": LINE, "hz": hz, "overseer": overseer, "model": model}
        file.write_text(CONFIG.format(**about).replace("None", "null"))
        return file

    return write


def record(file, said=None, **options):
    return session.intervene(file, [], (lambda line: None) if said is None else said.append, learn=False, **options)


def test_episodes_are_recorded_at_the_rate_of_the_simulator(config, tmp_path):
    said = []
    began = time.perf_counter()
    assert record(config(hz=100.0), said) == 6
    attempts = read_attempts(tmp_path / "run" / "interventions")
    steps = sum(line["steps"] for line in attempts)
    assert time.perf_counter() - began > (steps - 6) / 100.0
    # no upper bound on this machine's load, but it never runs faster
    assert all(line["hz"] < 101.0 for line in attempts)
    assert len(said) == 6
    assert "Hz (jitter" in said[0]
    # a second call finds everything recorded
    assert record(config(hz=100.0)) == 6


def test_a_person_quits_and_goes_on_and_may_begin_again(config, tmp_path, monkeypatch):
    device = FakeDevice([IDLE, IDLE, pressed(TAKE_OVER, x=0.5), pressed(QUIT)])
    monkeypatch.setattr(session, "open_overseer", lambda given: Person(device, given))
    file, folder, said = config(overseer="{kind: keyboard}"), tmp_path / "run" / "interventions", []
    assert record(file, said) == 0
    assert said == ["stopped after 0 episodes; run the command again to continue"]
    assert len((folder / JOURNAL_PATH).read_text().splitlines()) == 1 + 2
    # goes on in control, where it stopped; the second episode is begun again once
    device.inputs = [IDLE, pressed(x=0.4)] + [IDLE] * 20 + [pressed(TAKE_OVER, REDO)]
    assert record(file, said) == 6
    first = LeRobotReader(folder).episode(0)
    np.testing.assert_allclose(first.action[1:3, 0], [0.5, 0.4], rtol=1e-6)
    assert first.extra["intervention"].ravel()[:3].tolist() == [False, True, True]
    assert "the episode was discarded and begins again" in said
    assert device.closed
    assert any("YOU" in text for text in device.shown)


def test_a_person_sees_the_table_in_more_pixels_than_the_policy(backend):
    settings, device = BatchSettings(image_size=(16, 16), horizon=3), FakeDevice()
    with TabletopBatch(["push", "drawer"], settings=settings, workers=1, backend=backend) as sim:
        show = session._shown_on(device, sim)
        for task in ("push", "drawer"):
            show(sim.reset([EpisodeSpec(task, task, 0)]).observation, "look")
    push, drawer = device.pictures
    assert push.shape == drawer.shape == (session.PICTURE, session.PICTURE, 3)
    assert (push != drawer).any()


def test_the_policys_image_is_shown_if_there_is_no_table():
    sim, device = ExpertLine(), FakeDevice()
    observation = sim.reset([EpisodeSpec("right", "go right", 0)]).observation
    session._shown_on(device, sim)(observation, "look")
    np.testing.assert_array_equal(device.pictures[0], observation.images[0])


def test_wrong_configurations_are_refused_before_anything_starts(config, tmp_path):
    file = config()
    with pytest.raises(UserError, match=r"interventions.live is false"):
        session.intervene(file, ["interventions.live=false"], print)
    with pytest.raises(UserError, match=r"records with the policy of model.path, which is empty"):
        session.intervene(config(path=""), [], print, learn=False)
    other = tmp_path / "clone.yaml"
    other.write_text("recipe: robot_clone\ndemonstrations: {path: x}\n")
    with pytest.raises(UserError, match="recipe robot_clone; `mmrl robot intervene` needs robot_hg_dagger"):
        session.intervene(other, [], print)
    assert not (tmp_path / "run").exists()


def test_a_simulator_without_a_rate_is_refused(config):
    with pytest.raises(UserError, match="does not report its control rate"):
        session.intervene(config(hz="null"), [], print, learn=False)


def test_the_environment_is_opened_when_the_learner_has_let_go_of_it(config, monkeypatch):
    found, opened = iter([[], [(0, None)]]), []

    class Learner:
        def poll(self):
            assert not opened
            return None

    def open_robot(*_):
        opened.append(next(found, "after the first weights"))
        raise UserError("no robot")

    monkeypatch.setattr(session, "_learner", lambda *_: contextlib.nullcontext(Learner()))
    monkeypatch.setattr(session, "published", lambda _: next(found))
    monkeypatch.setattr(session, "open_run_sim", open_robot)
    with pytest.raises(UserError, match="no robot"):
        session.intervene(config(), [], print)
    assert opened == ["after the first weights"]


@pytest.mark.slow
def test_a_learner_that_fails_ends_the_session_with_its_last_words(config):
    # demonstrations that are not there
    with pytest.raises(RunError, match=r"the learner ended with code 2: .*nowhere.*recorded episodes are kept"):
        session.intervene(config(), ["demonstrations.path=/nowhere"], print)


@pytest.mark.slow
def test_the_learner_learns_meanwhile_and_both_go_on_after_a_stop(config, tmp_path, capsys, monkeypatch):
    file, run = config(hz=50.0, path=""), tmp_path / "run"
    command = ["robot", "intervene", str(file), "model.accept_other=[control_hz]"]
    whole, done = session._Session._episode, []

    def interrupted(self, pacer):
        episode = whole(self, pacer)
        done.append(self._weights)
        if len(done) == 3:
            raise KeyboardInterrupt
        return episode

    with monkeypatch.context() as patch:
        patch.setattr(session._Session, "_episode", interrupted)
        assert main(command) == 0
    # the third episode was not recorded
    assert len(read_attempts(run / "interventions")) == 2
    assert main(command) == 0
    assert "recorded: 6 episodes" in capsys.readouterr().out
    attempts = read_attempts(run / "interventions")
    assert len(attempts) == len(LeRobotReader(run / "interventions")) == 6
    assert (run / "checkpoints" / "step-000015").is_dir()
    # later episodes had later weights
    assert attempts[0]["weights"] == 0
    assert attempts[-1]["weights"] is not None


def test_an_option_of_another_overseer_is_refused():
    with pytest.raises((UserError, ValueError), match="threshold"):
        check_config(OverseerConfig(kind="random", threshold=0.3))
