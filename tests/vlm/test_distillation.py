import math

import pytest
import torch

from mmrl.errors import UserError
from mmrl.fields import check_config
from mmrl.rewards import RewardConfig
from mmrl.training.processes import Streams, make_accelerator
from mmrl.training.recipe import Step, make_reference
from mmrl.training.update import count_denominators, update_constants
from mmrl.vlm.data.prompt import VlmPayload
from mmrl.vlm.data.task import TaskError
from mmrl.vlm.methods.distillation import DistilConfig, DistilRecipe, DistilSettings
from mmrl.vlm.methods.teacher import TEACHER, TeacherConfig
from mmrl.vlm.toy.countdown import build_model
from mmrl.vlm.toy.tiny import build_tiny_vlm
from mmrl.vlm.vlm_plan import footprint
from tests.contracts.domains import run
from tests.vlm.builders import CORPUS
from tests.vlm.runs import run_config, without_images

LETTERS = RewardConfig(name="tests/vlm/user_reward.py:letters", isolate=False)
KNOWS = "{question} The answer is {answer}."


def make_config(folder, model, teacher, **settings):
    config = run_config(DistilConfig, folder, model)
    config.recipe, config.eval_data, config.rewards = "distil", {}, [LETTERS]
    config.teacher, config.distil = teacher, DistilSettings(**settings)
    check_config(config, "")
    return config


@pytest.fixture
def make_recipe(tmp_path, tiny_folders, closing):
    def make(teacher, **settings):
        return closing(DistilRecipe(make_config(tmp_path, tiny_folders["qwen2_5_vl"], teacher, **settings)))

    return make


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    """A wider model with the same tokenizer and other weights."""
    folder = tmp_path_factory.mktemp("teacher") / "model"
    options = {"vision_depth": 2, "initializer_range": 0.15, "max_positions": 512}
    return build_tiny_vlm(folder, family="qwen2_5_vl", corpus=CORPUS, hidden=48, seed=5, **options)


def prepared(recipe, step=None):
    step = step or Step()
    rollouts = recipe.score(recipe.rollout(recipe.policy, recipe.train_tasks[:4], Streams(0), step), step)
    reference = make_reference(recipe.config.reference, recipe.policy, needed=False)
    rollouts = update_constants(recipe, recipe.policy, reference, rollouts, step)
    return recipe.advantages(rollouts, make_accelerator(), step)


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_the_divergence_is_that_of_both_distributions(make_recipe, other, beta):
    recipe = make_recipe(TeacherConfig(path=str(other)), divergence=1.0, beta=beta)
    rows = prepared(recipe)
    with torch.no_grad():
        p, q = (
            model.next_logp(model.states(rows), 1.0).double().exp() for model in (recipe.policy, recipe.teacher.model)
        )
    m = (1 - beta) * p + beta * q

    def kl(first, second):
        return torch.where(first > 0, first * (first / second).log(), 0.0).sum(-1)

    expected = {0.0: kl(q, p), 1.0: kl(p, q)}.get(beta, beta * kl(q, m) + (1 - beta) * kl(p, m))
    states = recipe.policy.states(rows)
    found = recipe.teacher.divergence(states, rows, beta)
    torch.testing.assert_close(found[rows.mask > 0].double(), expected, atol=2e-6, rtol=1e-4)
    assert float(found.detach()[rows.mask == 0].abs().sum()) == 0
    assert float(found.detach().sum()) > 0.1, "the two models differ"
    found.sum().backward()
    assert all(weight.grad is None for weight in recipe.teacher.model.parameters())
    assert float(recipe.policy.head._layer.weight.grad.abs().sum()) > 0


def test_advantages_are_the_gap_to_the_teacher_and_a_share_of_the_rewards(make_recipe, other):
    alone = prepared(make_recipe(TeacherConfig(path=str(other)), reward=2.0))
    gap = alone.extras["logp_teacher"] - alone.logp_old
    torch.testing.assert_close(alone.advantage, torch.where(alone.mask > 0, 2.0 * gap, 0.0))
    assert float(gap.abs().max()) > 0.1
    both = prepared(make_recipe(TeacherConfig(path=str(other)), reward=2.0, task=0.5))
    own = both.advantage - alone.advantage
    spread = torch.stack([row[mask > 0].std(correction=0) for row, mask in zip(own, both.mask, strict=True)])
    assert float(spread.max()) < 1e-5, "the objective's advantage is one number a row"
    assert float(own.abs().max()) > 0.1


def test_the_policy_itself_teaches_nothing_under_its_own_prompt(make_recipe, tiny_folders):
    recipe = make_recipe(TeacherConfig(path=str(tiny_folders["qwen2_5_vl"])), divergence=1.0)
    rows = prepared(recipe)
    assert float(rows.advantage.abs().max()) < 1e-5
    output = recipe.loss(recipe.policy, rows, count_denominators(recipe, rows), Step())
    assert abs(float(output.metrics["distil/divergence"].value)) < 1e-6


def test_the_teacher_reads_the_answer(make_recipe):
    recipe = make_recipe(TeacherConfig(prompt=KNOWS))
    rows = prepared(recipe)
    payload = VlmPayload.of(rows)
    for task, prompt, seen in zip(payload.tasks, payload.prompts, payload.views[TEACHER], strict=True):
        assert f"The answer is {task.columns['answer']}." in seen.text
        assert "The answer is" not in prompt.text
    assert float(rows.advantage.abs().max()) > 1e-3
    assert "under its own prompt" in recipe.describe()


def test_given_answers_are_rows_of_their_own(make_recipe, other):
    recipe = make_recipe(TeacherConfig(path=str(other)), on_policy=0.5, divergence=1.0)
    rows = prepared(recipe)
    given = rows.extras["source"] == 2
    payload = VlmPayload.of(rows)
    assert [task.id for task in payload.tasks] == [task.id for task in recipe.train_tasks[:4]]
    assert 0 < int(given.sum()) < 4, "some of four questions"
    for row in torch.nonzero(given).flatten().tolist():
        group = int(rows.group[row])
        assert int((rows.group == group).sum()) == 1
        assert payload.texts[row] == payload.tasks[group].columns["completion"]
        assert float(rows.advantage[row].abs().max()) == 0
    own = rows.mask * ~given[:, None]
    output = recipe.loss(recipe.policy, rows, count_denominators(recipe, rows), Step())
    gap = rows.logp_old - rows.extras["logp_teacher"]
    assert output.metrics["distil/kl_sampled"].value == pytest.approx(float((gap * own).sum() / own.sum()), abs=1e-4)


def test_one_kind_of_question_that_can_be_used_is_enough(make_recipe, other, monkeypatch):
    """The sampled questions are too long; a run in one process goes on with the given answers, so each process does."""
    recipe = make_recipe(TeacherConfig(path=str(other)), on_policy=0.5, divergence=1.0)
    tasks, encode = recipe.train_tasks[:4], recipe.policy.encode
    rows = recipe.rollout(recipe.policy, tasks, Streams(0), Step())
    sampled = {VlmPayload.of(rows).tasks[group].id for group in rows.group[rows.extras["source"] == 0].tolist()}

    def fitting(task):
        if task.id in sampled:
            raise TaskError("too_long", task.id, "it is too long")
        return encode(task)

    monkeypatch.setattr(recipe.policy, "encode", fitting)
    rows = recipe.rollout(recipe.policy, tasks, Streams(0), Step())
    assert set(rows.extras["source"].tolist()) == {2}
    assert rows.num_groups == len(tasks) - len(sampled)


def test_what_cannot_teach_is_refused(make_recipe, tmp_path, tiny_folders):
    with pytest.raises(ValueError, match="neither path nor prompt"):
        make_recipe(TeacherConfig())
    with pytest.raises(UserError, match=r"teacher.prompt contains \{solution\}, but question q0 has no column"):
        make_recipe(TeacherConfig(prompt="{question} {solution}"))
    alien = build_tiny_vlm(tmp_path / "alien", family="qwen2_5_vl", corpus=["other words"] * 50)
    with pytest.raises(UserError, match="the same tokenizer"):
        make_recipe(TeacherConfig(path=str(alien)))
    with pytest.raises(UserError, match="has no text in column 'worked'"):
        make_recipe(TeacherConfig(prompt=KNOWS), on_policy=0.5, divergence=1.0, target_key="worked")
    with pytest.raises(ValueError, match="nothing is learned from the teacher"):
        make_recipe(TeacherConfig(prompt=KNOWS), reward=0.0)


def test_the_plan_of_memory_holds_the_teacher(tmp_path, tiny_folders):
    teacher = TeacherConfig(path="Qwen/Qwen2.5-VL-7B-Instruct", dtype="bfloat16")
    config = make_config(tmp_path, tiny_folders["qwen2_5_vl"], teacher)
    (part,) = [part for part in footprint(config, passes=False).parts if "teacher" in part.name]
    assert part.during == "always"
    assert part.bytes == pytest.approx(2 * 8.29e9, rel=0.01)


def distance(recipe):
    """Mean KL(policy || teacher) on fresh samples of the policy."""
    with torch.no_grad():
        rows = recipe.rollout(recipe.policy, recipe.train_tasks, Streams(1), Step())
        return float(recipe.teacher.divergence(recipe.policy.states(rows), rows, 1.0).sum() / rows.mask.sum())


@pytest.mark.slow
@pytest.mark.parametrize(("reward", "divergence"), [(1.0, 0.0), (0.0, 1.0)])
def test_a_language_model_comes_closer_to_a_wider_teacher(tmp_path, language_model, reward, divergence):
    teacher = TeacherConfig(path=str(build_model(tmp_path / "teacher", hidden=64, seed=7)))
    config = make_config(tmp_path, language_model, teacher, reward=reward, divergence=divergence, beta=1.0)
    without_images(tmp_path / "data" / "questions.jsonl")
    config.trainer.samples_per_task, config.trainer.tasks_per_step = 16, 6
    before = DistilRecipe(config)
    trainer, losses = run(config, tmp_path / "run", steps=25)
    assert all(map(math.isfinite, losses))
    assert distance(trainer.recipe) < 0.6 * distance(before)
