"""The AEPO recipe and its baselines on a tiny model: prompts, rewards, logs and evaluation."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from mmrl.config import load_run
from mmrl.core import get
from mmrl.core.loss import metric_values
from mmrl.core.rollouts import Rollouts
from mmrl.gui.grounding.aepo import AepoConfig, AepoRecipe, no_signal
from mmrl.gui.grounding.answers import answer_text, parse_answer
from mmrl.gui.grounding.coords import CoordinateSpace
from mmrl.gui.grounding.grounding_sft import GroundingSftConfig, GroundingSftRecipe
from mmrl.gui.grounding.rewards import PARTS
from mmrl.gui.grounding.samples import HIT_COLOUR, MISS_COLOUR, SHORTEST_SIDE
from mmrl.gui.toy.icons import build_icons
from mmrl.runs.records import read_samples
from mmrl.training.processes import Streams
from mmrl.training.recipe import Step
from mmrl.training.run import train
from mmrl.vlm.data.prompt import VlmPayload
from tests.fitting import fitting, group_size, recipe_of
from tests.gui.screens import run_config, small_model

CONFIGS = Path(__file__).parents[2] / "configs"
MINE = [path for path in sorted(CONFIGS.glob("gui/*.yaml")) if recipe_of(path) in ("aepo", "grounding_sft")]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return {family: small_model(tmp_path_factory.mktemp("m") / family, family) for family in ("qwen2_5_vl", "qwen3_vl")}


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_a_run_logs_every_part_and_evaluates_by_kind(family, tmp_path, model):
    config = run_config(AepoConfig, tmp_path, model[family], family=family)
    run_dir = train(load_run_entry(), config)
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").open()]
    assert [row["step"] for row in rows] == [1, 2]
    terms = {f"reward/{part}" for part in PARTS if part != "score"} | {"reward/point"}
    assert terms <= {*rows[0]}
    assert any(name.startswith("aepo/no_signal/") for name in rows[0])
    lines = [json.loads(line) for line in (run_dir / "evaluations.jsonl").open()]
    found = {*lines[-1]}
    for part in ("has_correct", "num_pred", "wrong_format"):
        assert f"terms/{part}/greedy" in found
        assert f"terms/{part}/greedy/kind=function" in found
    drawn = read_samples(run_dir, 2, "eval")
    assert len(drawn) == 2
    assert all(len(record.outputs) == 1 and max(record.outputs[0].size) >= SHORTEST_SIDE for record in drawn)


def test_an_answer_is_drawn_where_it_points(tmp_path, model, closing):
    """Blue for a hit and red for a miss, at the position in the original image, in both families' spaces."""
    recipe = closing(recipe_of(tmp_path, model))
    task = recipe.train_tasks[0]
    x1, y1, x2, y2 = task.columns["bbox"]
    (width, height), (model_width, model_height) = task.columns["original_wh"], task.image_wh[0]
    middle = ((x1 + x2) / 2, (y1 + y2) / 2)
    inside = (middle[0] * model_width / width, middle[1] * model_height / height)
    text = answer_text([inside], CoordinateSpace.ABS_RESIZED)
    unmarked = np.asarray(recipe.questions.draw(task, "no points", False))
    for right, colour in ((True, HIT_COLOUR), (False, MISS_COLOUR)):
        image = np.asarray(recipe.questions.draw(task, text, right))
        scale = image.shape[1] / width
        rows, columns = np.nonzero((image != unmarked).any(-1))
        assert (image[rows, columns] == colour).all(-1).any()
        assert columns.mean() == pytest.approx(middle[0] * scale, abs=3 * scale)
        assert rows.mean() == pytest.approx(middle[1] * scale, abs=3 * scale)


def test_worked_answers_have_the_labels_and_points_of_their_row(tmp_path, model, closing):
    screens = build_icons(tmp_path / "listed.jsonl", count=6, worked=True, listings=0.5)
    config = run_config(GroundingSftConfig, tmp_path, model["qwen3_vl"], family="qwen3_vl", samples_per_task=1)
    config.recipe, config.data.path = "grounding_sft", str(screens)
    config.validate()
    recipe = closing(GroundingSftRecipe(config))
    for task in recipe.train_tasks:
        listed = json.loads(task.columns["completion"])
        assert [item["label"] for item in listed] == task.columns["labels"]
        width, height = task.columns["original_wh"]
        places = [[round(x / width * 1000), round(y / height * 1000)] for x, y in task.columns["answers"]]
        assert [item["point_2d"] for item in listed] == places
        assert len(parse_answer(task.columns["completion"], "reference", no_think=True).points) == len(places)


def load_run_entry():
    return load_run(CONFIGS / "gui/icons_aepo.yaml")[0]


def recipe_of(tmp_path, model, **answer):
    config = run_config(AepoConfig, tmp_path, model["qwen2_5_vl"])
    for name, value in answer.items():
        setattr(config.answer, name, value)
    config.validate()
    return AepoRecipe(config)


def test_rewards_of_sampled_texts_are_those_of_the_target(tmp_path, model, closing):
    """The whole path: boxes in a file, prompt, answers in the model's pixels, score."""
    recipe = closing(recipe_of(tmp_path, model))
    recipe.policy.eval()
    rollouts = recipe.rollout(recipe.policy, recipe.train_tasks[:1], Streams(0), Step())
    task = VlmPayload.of(rollouts).tasks[0]
    x1, y1, x2, y2 = task.columns["bbox"]
    (width, height), (model_width, model_height) = task.columns["original_wh"], task.image_wh[0]
    assert (model_width, model_height) != (width, height), "the resize changes the numbers"
    hit = ((x1 + x2) / 2 * model_width / width, (y1 + y2) / 2 * model_height / height)
    outside = (model_width - 1, model_height - 1) if hit[0] < model_width / 2 else (1, 1)
    texts = [answer_text(points, CoordinateSpace.ABS_RESIZED) for points in ([hit], [outside, hit], [outside])]
    found = recipe.score_texts([task] * 4, [*texts, "none"], [[]] * 4, Step())
    assert found.total == pytest.approx([2, 1.5, 0, -1])
    assert found.terms["first_correct"] == [1, 0, 0, 0]


def test_the_baselines_are_options(tmp_path, model, closing):
    naive = closing(recipe_of(tmp_path / "a", model, accuracy="first", max_answers=1))
    options = next(term.options for term in naive.config.rewards if term.name == "point")
    assert (options["accuracy"], options["max_answers"]) == ("first", 1)


def test_options_that_cannot_be_are_refused(tmp_path, model):
    config = run_config(AepoConfig, tmp_path, model["qwen2_5_vl"])
    config.accuracy_reward = "luck"
    with pytest.raises(ValueError, match="first_correct"):
        config.validate()
    config = run_config(AepoConfig, tmp_path, model["qwen2_5_vl"], samples_per_task=1)
    with pytest.raises(ValueError, match="samples_per_task"):
        config.validate()
    for schema in (AepoConfig, GroundingSftConfig):
        config = run_config(schema, tmp_path, model["qwen2_5_vl"])
        config.data.video.fps = 1.0
        with pytest.raises(ValueError, match=r"data\.video is set"):
            config.validate()


def test_groups_without_signal_are_counted_by_kind():
    reward = torch.tensor([0.0, 0.0, 0.5, 0.5, 2.0, 2.0, 2.0, 0.0, float("nan"), 1.0])
    rollouts = Rollouts(group=torch.arange(10) // 2, mask=torch.ones(10, 1), logp_old=torch.zeros(10, 1), reward=reward)
    kinds = ["name", "function", "name", "name", "function"]
    assert metric_values(no_signal(rollouts, kinds)) == {
        "aepo/no_signal/function": 1.0,
        "aepo/no_signal/name": pytest.approx(2 / 3),
    }


def test_the_objective_has_no_deviation_and_weighs_every_answer_alike():
    objective = get("aepo")
    assert not objective.needs_reference
    rollouts = Rollouts(
        group=torch.zeros(4, dtype=torch.long),
        mask=torch.tensor([[1.0, 1.0], [1.0, 0.0], [1.0, 1.0], [1.0, 1.0]]),
        logp_old=torch.zeros(4, 2),
        reward=torch.tensor([-0.5, -1.0, -1 / 3, 1 / 6**0.5]),
    )
    advantage = objective.compute_advantages(rollouts).advantage
    assert advantage[:, 0].tolist() == pytest.approx([-0.19, -0.86, 0.03, 1.02], abs=5e-3)  # the figure's group


def test_supervised_answers_are_learnt(tmp_path, model, closing):
    config = run_config(GroundingSftConfig, tmp_path, model["qwen2_5_vl"], samples_per_task=1, tasks_per_step=6)
    config.recipe = "grounding_sft"
    config.validate()
    recipe = closing(GroundingSftRecipe(config))
    rollouts = recipe.rollout(recipe.policy, recipe.train_tasks, Streams(0), Step())
    texts = VlmPayload.of(rollouts).texts
    points = [task.columns["answers"] for task in recipe.train_tasks]
    assert [text.count("point_2d") for text in texts] == [len(point) for point in points]


@pytest.mark.parametrize("path", MINE, ids=lambda path: path.stem)
def test_a_configuration_builds_and_takes_two_steps(path, tmp_path, model):
    entry, whole = load_run(path)
    small = run_config(AepoConfig, tmp_path, model[whole.grounding.family])
    if "{history}" in whole.grounding.template:  # single steps of an agent
        file = Path(small.data.path)
        rows = [json.loads(line) | {"action": "click", "history": "None"} for line in file.read_text().splitlines()]
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    overrides = [f"output_dir={tmp_path / 'run'}", f"model.path={small.model.path}", f"data.path={small.data.path}"]
    overrides += [f"eval_data.{name}.path={small.data.path}" for name in whole.eval_data]
    overrides += [f"grounding.seen=[{','.join(whole.eval_data)}]"]
    overrides += ["trainer.steps=2", "trainer.tasks_per_step=2", "trainer.warmup_steps=0", "trainer.learning_rate=1e-3"]
    overrides += [group_size(whole, 2), "model.dtype=float32", "trainer.minibatches_per_step=1"]
    overrides += ["trainer.mixed_precision=none", "sampler.max_new_tokens=20", "evaluation.max_tasks=2"]
    overrides += ["tracking.quiet=true", "tracking.tensorboard=false", "tracking.strict=true", "trainer.micro_batch=0"]
    entry, config = load_run(path, fitting(whole, overrides))
    run_dir = train(entry, config)
    assert [json.loads(line)["step"] for line in (run_dir / "metrics.jsonl").open()] == [1, 2]
