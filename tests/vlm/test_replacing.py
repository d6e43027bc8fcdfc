"""Samples of questions that the policy misses are exchanged for answers of teachers (AMPO)."""

from pathlib import Path

import pytest
import torch

from mmrl.errors import UserError
from mmrl.fields import check_config
from mmrl.rewards import RewardConfig, RewardResult
from mmrl.training.objectives import ObjectiveConfig
from mmrl.training.processes import Streams, make_accelerator
from mmrl.training.recipe import Step
from mmrl.training.rollers import Unit, sampled
from mmrl.vlm.data.prompt import VlmPayload
from mmrl.vlm.methods.augmentation import augment_task
from mmrl.vlm.methods.multi_teacher import MultiTeacherConfig, MultiTeacherRecipe, TeachersSettings
from tests.contracts.domains import run
from tests.vlm.runs import add_columns, run_config, without_images

LETTERS = RewardConfig(name="tests/vlm/user_reward.py:letters", isolate=False)
TEXTS = ["3 4 <answer>7</answer>", "<think>3 4</think><answer>3</answer>", "no mark at all"]


def configure(kind, folder, model, **columns):
    config = run_config(kind, folder, model)
    config.eval_data, config.rewards, config.sampler.max_new_tokens = {}, [LETTERS], 24
    add_columns(Path(config.data.path), **columns)
    return config


@pytest.fixture
def opened(tmp_path, tiny_folders, closing):
    def make(recipe, config_class, columns, **parts):
        config = configure(config_class, tmp_path, tiny_folders["qwen2_5_vl"], **columns)
        for name, part in parts.items():
            setattr(config, name, part)
        check_config(config, "")
        return closing(recipe(config))

    return make


def multi_teacher(opened, texts=TEXTS, **settings):
    given = [{"model": "a teacher", "text": text} for text in texts]
    part = TeachersSettings(**settings)
    return opened(MultiTeacherRecipe, MultiTeacherConfig, {"teacher_responses": given}, teachers=part)


def scoring(recipe, monkeypatch, *calls):
    """Let the recipe's calls for rewards, one after the other, give what functions of the row's number say."""
    left = list(calls)

    def score_texts(tasks, texts, tokens, step):
        rule = left.pop(0)
        found = [float(rule(number)) for number in range(len(texts))]
        return RewardResult(found, {"letters": found})

    recipe.accuracy_term = "letters"
    monkeypatch.setattr(recipe, "score_texts", score_texts)


def rolled(recipe, number=0):
    unit = Unit(recipe.train_tasks[:2], Streams(0), Step(number, 10))
    return sampled(recipe, unit, make_accelerator()).rollouts


def scores(recipe, rows):
    with torch.no_grad():
        return recipe.policy(rows).logp


def test_comprehension_is_the_mean_probability_behind_the_reasoning(opened):
    recipe = multi_teacher(opened)
    (teachers,), policy = recipe.stages, recipe.policy
    rows = recipe.rollout(policy, recipe.train_tasks[:2], Streams(0), Step())
    found = teachers.comprehension(policy, rows, 1, TEXTS)
    task = recipe.train_tasks[1]
    for number, text in enumerate(TEXTS[:2]):
        begun = augment_task(task, given_start=text.rpartition("<answer>")[0] + "<answer>")
        ids = policy.processor.tokenizer.encode(str(task.columns["answer"]), add_special_tokens=False)
        alone = teachers.rows_of(rows, [1], [ids], [""], 2)
        VlmPayload.of(alone).prompts[0] = policy.encode(begun)
        assert float(found[number]) == pytest.approx(float(scores(recipe, alone).exp().mean()), rel=1e-4)
    assert float(found[2]) == -1.0


def test_the_best_comprehended_answers_take_the_places_of_failed_samples(opened, monkeypatch):
    recipe = multi_teacher(opened)
    scoring(recipe, monkeypatch, lambda row: row == 6, lambda row: 0.25)
    monkeypatch.setattr(recipe.stages[0], "comprehension", lambda *_: torch.tensor([0.2, 0.1, 0.7]))
    rows = rolled(recipe)
    payload, given = VlmPayload.of(rows), rows.extras["source"] == 2
    assert int(given[:4].sum()) == 2
    assert int(given[4:].sum()) == 0, "the second question has a right sample"
    places = torch.nonzero(given).flatten().tolist()
    assert {payload.texts[row] for row in places} == {TEXTS[2], TEXTS[0]}
    assert rows.reward[places].tolist() == [1.0, 1.0], "at least 1"
    torch.testing.assert_close(scores(recipe, rows), rows.logp_old * rows.mask, atol=1e-4, rtol=1e-3)
    rows = recipe.advantages(rows, make_accelerator(), Step())
    assert rows.advantage[:4, 0].tolist() == [0.5 if row in places else -0.5 for row in range(4)]


@pytest.mark.parametrize(("preset", "name"), [("gtpo", "tokens"), ("seed_grpo", "answer")])
def test_blocks_read_the_exchanged_text(opened, monkeypatch, preset, name):
    given = [{"model": "a teacher", "text": TEXTS[0]}]
    parts = {"teachers": TeachersSettings(count=1), "objective": ObjectiveConfig(preset=preset)}
    recipe = opened(MultiTeacherRecipe, MultiTeacherConfig, {"teacher_responses": given}, **parts)
    scoring(recipe, monkeypatch, lambda row: 0.0, lambda row: 1.0)
    rows = rolled(recipe)
    payload, place = VlmPayload.of(rows), int(torch.nonzero(rows.extras["source"] == 2)[0])
    if name == "tokens":
        length = int(rows.mask[place].sum())
        assert torch.equal(rows.extras[name][place, :length], payload.response_ids[place, :length])
    else:
        others = [row for row in range(4) if row != place and payload.texts[row] != payload.texts[place]]
        assert not torch.isin(rows.extras[name][place], rows.extras[name][others])
    rows = rows.replace(entropy=torch.full_like(rows.mask, 0.1))
    assert recipe.objective.compute_advantages(rows).advantage.isfinite().all()


def test_teachers_answers_that_cannot_be_used(opened, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr("mmrl.vlm.methods.multi_teacher.RESPONSES", "others")
        with pytest.raises(UserError, match="no question has teachers' answers in a column 'others'"):
            multi_teacher(opened)
    with pytest.raises(UserError, match=r"a teacher's answer must be \{\"model\""):
        multi_teacher(opened, texts=[3])
    recipe = multi_teacher(opened, texts=["far too long " * 30])
    assert rolled(recipe).extras["source"].sum() == 0
    assert recipe.stages[0].replaced["too_long"] == 2


@pytest.mark.slow
def test_a_run_learns_the_answers_of_a_teacher_where_nothing_is_right(tmp_path, language_model):
    text = "<think>3 4</think><answer>7</answer>"
    config = configure(MultiTeacherConfig, tmp_path, language_model, teacher_responses=[{"model": "a", "text": text}])
    without_images(Path(config.data.path))
    config.rewards = [RewardConfig(name="format")]
    config.recipe, config.trainer.learning_rate, config.sampler.max_new_tokens = "multi_teacher", 3e-3, 48
    check_config(config, "")

    def likelihood(recipe):
        rows = recipe.rollout(recipe.policy, recipe.train_tasks[:1], Streams(3), Step())
        ids, (teachers,) = [recipe.policy.encode_answer(VlmPayload.of(rows).prompts[0], text)], recipe.stages
        return float(teachers.with_logp(recipe.policy, teachers.rows_of(rows, [0], ids, [text], 2)).logp_old.sum())

    before = MultiTeacherRecipe(config)
    trainer, _ = run(config, tmp_path / "run", steps=25)
    assert likelihood(trainer.recipe) > likelihood(before) + 3
