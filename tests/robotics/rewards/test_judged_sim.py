"""A simulator judged by a classifier: its looks, what of the simulator's own success remains, and runs on it."""

import numpy as np
import pytest

from mmrl.errors import UserError
from robotics.data import LeRobotReader
from robotics.episodes.collect import ActingSettings, run_episodes
from robotics.episodes.episode_evaluation import RobotEvaluationConfig, judged_counts
from robotics.offpolicy.sac_learner import SacSettings
from robotics.rewards.judged_sim import JudgedSim, SuccessConfig, open_run_sim, past_success
from robotics.scenes.batch import BatchSettings, TabletopBatch
from robotics.sim.episodes import ChunkResult, EpisodeSpec
from robotics.sim.opening import SimConfig
from tests.robotics.line_sim import LineSim
from tests.robotics.offpolicy.line_sac import QSettings, sac_config, trainer_of
from tests.robotics.rewards.lit import always

RIGHT = [EpisodeSpec("right", "go right", layout) for layout in range(2)]


class LastingLine(LineSim):
    """The line, whose episodes go on after its own success; it reports a full state."""

    full_state_size = 2

    def step_chunk(self, actions, record=()):
        result = super().step_chunk(actions, record)
        late = self.elapsed[result.rows] >= self.horizon
        self.live = result.rows[~(late | result.failed)]
        return ChunkResult(**{**vars(result), "terminated": np.zeros_like(late), "truncated": late})

    def full_state(self):
        return np.stack([self.live, self.goal[self.live]], 1).astype(np.float32)


class Eye:
    """Chances of success that a test prescribes, one list for each look."""

    def __init__(self, judge, chances):
        self.judge, self.chances = judge, list(chances)

    def __getattr__(self, name):
        return getattr(self.judge, name)

    def look(self, images, texts):
        return self.chances.pop(0)[: len(images)]


def judged(chances, sim=None, looks=2, **options):
    judge = always(0.5, looks=looks)
    found = JudgedSim(sim or LastingLine(), judge, **options)
    found._judge = Eye(judge, chances)
    return found


def test_an_episode_succeeds_after_enough_looks_in_a_row():
    sim = judged([[0.9, 0.9], [0.9, 0.1], [0.9, 0.9]])
    sim.reset(RIGHT)
    moves = np.zeros((2, 1, 1))
    first = sim.step_chunk(moves)
    assert not first.success.any()
    second = sim.step_chunk(moves)
    assert second.success.tolist() == second.terminated.tolist() == [True, False]
    assert sim.live.tolist() == [1]
    # the row that ended rests, and no longer counts
    assert sim.full_state()[:, 0].tolist() == [1]
    third = sim.step_chunk(np.ones((1, 1, 1)))
    assert third.rows.tolist() == third.observation.rows.tolist() == [1]
    assert third.rewards.shape == (1, 1)
    assert sim._sim.place.tolist() == [0.0, pytest.approx(0.1)]
    assert not third.success.any()


def test_its_own_success_is_only_reported():
    sim = judged([[0.1, 0.1]] * 12)
    started = sim.reset(RIGHT)
    assert started.true_success.tolist() == [False, False]
    seen = []
    while len(sim.live):
        seen.append(sim.step_chunk(np.full((len(sim.live), 1, 1), 0.5)))
    # to the horizon, although both were solved on the way
    assert len(seen) == 12
    assert seen[-1].truncated.all()
    assert not any(result.success.any() or result.terminated.any() for result in seen)
    assert np.any([result.true_success for result in seen], axis=0).all()
    assert judged([], compares=False).reset(RIGHT).true_success is None


def test_an_end_by_its_own_success_counts_as_cut_off():
    # LineSim ends there
    sim = judged([[0.1, 0.1]] * 12, LineSim())
    sim.reset(RIGHT)
    ends = []
    while len(sim.live):
        result = sim.step_chunk(np.ones((len(sim.live), 1, 1)))
        ends += [
            (bool(cut), bool(end)) for cut, end in zip(result.truncated, result.terminated, strict=True) if cut or end
        ]
    assert ends == [(True, False), (True, False)]


def test_images_are_hidden_from_a_policy_that_reads_states():
    sim = judged([[0.1, 0.1]], hidden=True)
    assert sim.image_size is None
    assert sim.reset(RIGHT).observation.images is None
    assert sim.step_chunk(np.zeros((2, 1, 1))).observation.images is None
    assert judged([]).reset(RIGHT).observation.images.shape == (2, 32, 32, 3)


def test_what_the_classifier_cannot_see_is_named():
    sim = LastingLine(views=["side"])
    sim.camera = "front"
    with pytest.raises(UserError, match=r"camera 'wrist', but the simulator has front, side; set sim\.camera, add"):
        JudgedSim(sim, always(0.5, camera="wrist"))
    assert JudgedSim(sim, always(0.5, camera="wrist"), cameras=["side"])._pictures == [1]
    with pytest.raises(
        UserError, match=r"success\.cameras is \[front, side\], but the classifier has 1 cameras: wrist"
    ):
        JudgedSim(sim, always(0.5, camera="wrist"), cameras=["front", "side"])
    sim = LastingLine(views=["wrist"])
    sim.camera = "front"
    found = JudgedSim(sim, always(0.5, camera="wrist"))
    found.reset(RIGHT)
    assert found.step_chunk(np.zeros((2, 1, 1))).success.shape == (2,)
    dark = LastingLine()
    dark.image_size = None
    with pytest.raises(UserError, match=r"images of \(32, 32\) pixels, but those of the simulator are None; set sim"):
        JudgedSim(dark, always(0.5))
    wide = Eye(always(0.5), [])
    wide.image_size = (24, 32)
    with pytest.raises(UserError, match=r"images of \(24, 32\).* are \(32, 32\); images that are not square.*null}"):
        JudgedSim(LastingLine(), wide)
    with pytest.raises(UserError, match="does not know 'left'"):
        JudgedSim(LastingLine(), always(0.5, texts=["go right"]))


def test_the_views_of_an_environment_with_a_camera_of_its_own_stay(tmp_path, monkeypatch):
    opened = []

    def opening(config):
        opened.append(config)
        sim = LastingLine(views=config.views)
        sim.camera = "front"
        return sim

    monkeypatch.setattr("robotics.rewards.judged_sim.open_sim", opening)
    always(0.5, camera="wrist").save_pretrained(tmp_path / "judge")
    success = SuccessConfig(str(tmp_path / "judge"))
    sim = open_run_sim(SimConfig("gymnasium", env="a:b", image_size=0, views=["wrist"]), success)
    assert (opened[0].views, opened[0].image_size) == (["wrist"], 32)
    assert sim._pictures == [1]


def test_the_options_of_simulators_that_end_at_success():
    assert past_success(SimConfig()).options == {"end_at_success": False}
    gym = SimConfig(kind="gymnasium", env="a:b", options={"settings": {"renderer": "egl"}, "x": 1})
    assert past_success(gym).options == {"settings": {"renderer": "egl", "end_at_success": False}, "x": 1}


def test_a_tabletop_episode_may_go_on_after_success():
    def run(ends):
        found = []
        with TabletopBatch(settings=BatchSettings(image_size=None, horizon=12, end_at_success=ends), workers=1) as sim:
            sim.reset([EpisodeSpec("reach", "", 0)])
            from robotics.scenes.experts import Expert

            expert = Expert("reach")
            while len(sim.live):
                found.append(sim.step_chunk(np.stack([expert.act(sim.full_state()[0])])[:, None]))
            assert sim.describe().get("end_at_success", True) == ends
        return found

    short, whole = run(True), run(False)
    assert len(short) < len(whole) == 12
    assert short[-1].success.all()
    assert short[-1].terminated.all()
    assert whole[len(short) - 1].success.all()
    assert not any(result.terminated.any() for result in whole)
    assert whole[-1].truncated.all()


def test_a_run_is_rewarded_by_the_classifier(tmp_path):
    always(0.9, looks=3).save_pretrained(tmp_path / "judge")
    config = sac_config(
        tmp_path / "run",
        success=SuccessConfig(classifier=str(tmp_path / "judge")),
        sac=SacSettings(critics=QSettings(width=16)),
        potential=None,
    )
    config.evaluation = RobotEvaluationConfig(videos=0)
    trainer = trainer_of(config, tmp_path / "run", 2)
    seen, log = [], trainer.log.step
    trainer.log.step = lambda step, metrics, tokens: seen.append(dict(metrics)) or log(step, metrics, tokens)
    trainer.run()
    trainer.recipe.close()
    # every episode is called a success at the third control step
    assert [len(episode) for episode in LeRobotReader(tmp_path / "run/replay/dataset")] == [3] * 4
    assert seen[-1]["episode/success"] == 1
    assert seen[-1]["reward/mean"] == 1
    assert seen[-1]["judged/false_positives"] == 1 - seen[-1]["judged/true_success"] > 0
    given = open_run_sim(config.sim, SuccessConfig(str(tmp_path / "judge"), threshold=0.95))
    episodes = run_episodes(trainer.policy, given, RIGHT, ActingSettings(), [0, 1])
    assert not episodes.payload.success.any()
    assert given.describe()["success"]["threshold"] == 0.95


def test_verdicts_are_compared_with_the_truth():
    found = judged_counts([True, True, False, False, False], [True, False, True, False, False])
    assert found == {"agreement": 3, "false_positives": 1, "false_negatives": 1, "true_success": 2, "compared": 5}
