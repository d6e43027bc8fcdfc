"""Recipe robot_success: labels, the split, what is counted, and the saved classifier."""

import numpy as np
import pytest
import torch

from mmrl.errors import UserError
from mmrl.training.evaluation import Trial
from mmrl.training.processes import make_accelerator, seed_everything
from mmrl.training.recipe import Step
from mmrl.training.settings import EvaluationConfig
from mmrl.training.trainer import Trainer
from robotics.policies.base.encoder import EncoderConfig
from robotics.rewards.success_classifier import SuccessClassifier, SuccessModelConfig, first_success
from robotics.rewards.success_data import LabelledEpisode, LabelledEpisodesConfig, read_episodes
from robotics.rewards.success_recipe import SuccessRecipe, VerdictsMeasure, random_crop, split_episodes
from tests.robotics.rewards.lit import TEXT, always, lit_config, write_episodes


@pytest.fixture(scope="module")
def lit(tmp_path_factory):
    return write_episodes(tmp_path_factory.mktemp("lit") / "episodes")


def episode(labels, name="one"):
    images = np.zeros((len(labels), 32, 32, 3), np.uint8)
    return LabelledEpisode(name, images, np.array(labels, bool), "go right")


@pytest.mark.parametrize(
    ("chances", "looks", "wanted"),
    [([0.9, 0.1, 0.9], 1, 0), ([0.9, 0.1, 0.9, 0.8], 2, 3), ([0.9, 0.5, 0.9], 2, None), ([], 1, None)],
)
def test_success_needs_looks_in_a_row(chances, looks, wanted):
    assert first_success(chances, 0.5, looks) == wanted


def test_labels_are_read_or_asked_for(lit):
    by_end = read_episodes(LabelledEpisodesConfig(path=str(lit), positive_frames=2), "data")
    by_column = read_episodes(LabelledEpisodesConfig(path=str(lit), label="next.reward"), "data")
    assert [one.labels.tolist() for one in by_end] == [one.labels.tolist() for one in by_column]
    assert by_end[0].labels.tolist() == [False, False, False, True, True]
    assert not by_end[-1].labels.any()
    for given in ({}, {"label": "next.reward", "positive_frames": 2}):
        with pytest.raises(ValueError, match="set one of them, since a dataset does not say"):
            LabelledEpisodesConfig(path=str(lit), **given).validate()
    with pytest.raises(UserError, match=r"data\.label is 'solved', but .* has next\.reward"):
        read_episodes(LabelledEpisodesConfig(path=str(lit), label="solved"), "data")
    with pytest.raises(UserError, match=r"data\.camera is 'wrist', but .* has front"):
        read_episodes(LabelledEpisodesConfig(path=str(lit), camera="wrist", positive_frames=1), "data")


def test_whole_episodes_of_both_kinds_are_held_out():
    episodes = [episode([False, number < 4], str(number)) for number in range(12)]
    train, held = split_episodes(episodes, 0.25, 3)
    assert len(train) == 9
    assert {one.name for one in train}.isdisjoint(one.name for one in held)
    assert sorted(bool(one.labels.any()) for one in held) == [False, False, True]
    assert [one.name for one in split_episodes(episodes, 0.25, 3)[1]] == [one.name for one in held]


def test_crops_move_the_image_by_at_most_the_padding():
    image = np.zeros((32, 32, 3), np.uint8)
    image[16, 16] = 255
    places = {tuple(torch.nonzero(random_crop(image, seed)[..., 0])[0].tolist()) for seed in range(81)}
    assert places == {(row, column) for row in range(12, 21) for column in range(12, 21)}


def test_verdicts_are_counted_by_episode_and_wrong_frames_are_kept(tmp_path):
    judge = always(0.9, looks=2)
    early, late, failed = [False, False, True], [True, True, True], [False, False, False]
    tasks = [episode(labels, name) for labels, name in ((early, "early"), (late, "late"), (failed, "failed"))]
    measure = VerdictsMeasure(judge, "later", tmp_path / "wrong")
    rows = measure.run([Trial(number, 0, task) for number, task in enumerate(tasks)], 0)
    # always at the second frame, which shows success in one of them
    assert [row["at"] for row in rows] == [1, 1, 1]
    found = measure.metrics(rows, tasks)
    assert found["classifier/precision"] == pytest.approx(1 / 3)
    assert found["classifier/recall"] == 0.5
    assert found["classifier/false_positives"] == pytest.approx(2 / 3)
    assert found["classifier/early"] == pytest.approx(1 / 3)
    assert (found["classifier/frame_precision"], found["classifier/frame_recall"]) == (pytest.approx(4 / 9), 1.0)
    measure.finish(rows, None)
    names = sorted(path.name for path in (tmp_path / "wrong").iterdir())
    assert names == ["later-early-frame-1.png", "later-failed-frame-1.png"]
    assert [measure.record(row).finish for row in rows] == ["false positive", "", "false positive"]
    never = VerdictsMeasure(always(0.1), "later", tmp_path / "none")
    rows = never.run([Trial(0, 0, tasks[0])], 0)
    assert np.isnan(never.metrics(rows, tasks)["classifier/precision"])
    assert never.metrics(rows, tasks)["classifier/recall"] == 0


def test_it_learns_to_see_the_square_and_is_saved(tmp_path, lit):
    config = lit_config(tmp_path / "run", lit)
    config.trainer.steps, config.evaluation.at_start = 30, False
    seed_everything(0)
    recipe = SuccessRecipe(config)
    trainer = Trainer(recipe, config, tmp_path / "run", make_accelerator(), None)
    trainer.run()
    (measure,) = recipe.measures(recipe.policy, "held_out", Step(30, 30))
    tasks = recipe.eval_tasks["held_out"]
    rows = measure.run([Trial(number, 0, task) for number, task in enumerate(tasks)], 0)
    assert measure.metrics(rows, tasks)["accuracy/episodes"] == 1.0
    recipe.policy.save_pretrained(tmp_path / "saved")
    again = SuccessClassifier.from_pretrained(str(tmp_path / "saved"))
    images = torch.from_numpy(tasks[0].images)
    texts = [TEXT] * len(images)
    assert again.probabilities(images, texts) == recipe.policy.probabilities(images, texts)
    assert (again.camera, again.config) == ("front", recipe.policy.config)
    with pytest.raises(UserError, match="expects images of"):
        again.probabilities(torch.zeros(1, 64, 64, 3, dtype=torch.uint8), [TEXT])
    with pytest.raises(UserError, match="does not know 'open' of an instruction"):
        again.check_instructions(["open the square"])
    with pytest.raises(UserError, match=r"no success classifier .*recipe robot_success"):
        SuccessClassifier.from_pretrained(str(tmp_path))


def test_batches_are_balanced(tmp_path, lit):
    recipe = SuccessRecipe(lit_config(tmp_path, lit))
    from mmrl.training.processes import Streams

    rollouts = recipe.batch(recipe.policy, list(range(8)), Streams(1), Step())
    assert rollouts.payload.labels.tolist() == [1.0, 0.0] * 4
    again = recipe.batch(recipe.policy, list(range(8)), Streams(1), Step())
    assert torch.equal(rollouts.payload.images, again.payload.images)


def test_what_cannot_be_learned_from_is_refused(tmp_path, lit):
    with pytest.raises(ValueError, match="have no effect on a classifier"):
        lit_config(tmp_path, lit, evaluation=EvaluationConfig(samples=3))
    with pytest.raises(ValueError, match="are read from the data"):
        lit_config(tmp_path, lit, model=SuccessModelConfig(encoder=EncoderConfig(image_size=(96, 96))))
    with pytest.raises(ValueError, match="eval_data has the name held_out"):
        lit_config(tmp_path, lit, eval_data={"held_out": LabelledEpisodesConfig(path=str(lit), positive_frames=1)})
    failures = write_episodes(tmp_path / "failures", successes=0)
    with pytest.raises(UserError, match=r"0 frames of the training episodes .* both kinds are needed"):
        SuccessRecipe(lit_config(tmp_path / "run", failures))
