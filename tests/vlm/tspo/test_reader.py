"""A vision-language model that answers from the picked frames, frozen and trained."""

import shutil
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator

from mmrl.core.loss import Denominators
from mmrl.errors import RunError, UserError
from mmrl.fields import check_config
from mmrl.hub.video_reading import VideoError
from mmrl.recipes import RECIPES
from mmrl.rewards import RewardConfig
from mmrl.training.processes import Streams
from mmrl.training.recipe import NoUsableTasksError, Step
from mmrl.training.run import train
from mmrl.training.update import count_denominators
from mmrl.vlm.engine.vlm_sampler import SamplerConfig
from mmrl.vlm.toy.needles import build_model
from mmrl.vlm.tspo.frame_policy import TspoPayload
from mmrl.vlm.tspo.needle_tasks import Candidates
from mmrl.vlm.tspo.tspo_recipe import TspoRecipe
from tests.vlm.tspo.builders import data_folder, needle_config


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return build_model(tmp_path_factory.mktemp("reader") / "model", hidden=24, layers=1, heads=2, kv_heads=1)


def reading_config(folder, model, *, train):
    config = needle_config(folder)
    config.picks.count = 3
    config.answerer.kind, config.answerer.train = "vlm", train
    config.answerer.model.path = str(model)
    config.answerer.sampler = SamplerConfig(max_new_tokens=3)
    config.answerer.reward = RewardConfig(name="tests/vlm/user_reward.py:letters", isolate=False)
    config.validate()
    return config


def drawn(recipe):
    with torch.no_grad():
        rollouts = recipe.rollout(recipe.policy, recipe.train_tasks[:2], Streams(0), Step())
    return recipe.score(rollouts, Step())


def test_a_frozen_reader_sees_the_picked_frames_and_is_no_decision(tmp_path, model, closing):
    recipe = closing(TspoRecipe(reading_config(tmp_path, model, train=False)))
    rollouts = drawn(recipe)
    assert rollouts.mask.shape == (8, 3)
    assert recipe.policy.reader is None
    assert not any(weight.requires_grad for weight in recipe.answerer.policy.parameters())
    assert torch.isfinite(rollouts.reward).all()
    task = recipe.train_tasks[0]
    answers = recipe.answerer.answer([task, task], [[0, 1, 2], [3, 4, 5]], None)
    prompt = answers.prompts[0]
    assert len(prompt.media["image_grid_thw"]) == 3
    assert not torch.equal(answers.prompts[0].media["pixel_values"], answers.prompts[1].media["pixel_values"])
    again = recipe.answerer.answer([task], [[0, 1, 2]], None)
    assert again.texts == answers.texts[:1]


def test_rewards_may_look_at_the_picked_frames(tmp_path, model, closing):
    config = reading_config(tmp_path, model, train=False)
    config.answerer.reward = RewardConfig(name="tests/vlm/user_reward.py:brightness", isolate=False)
    recipe = closing(TspoRecipe(config))
    task = recipe.train_tasks[0]
    shown = [task.video.images([pick])[pick] for pick in (0, 1, 2)]
    bright = sum(image.convert("L").getpixel((0, 0)) for image in shown)
    assert recipe.answerer.answer([task], [[0, 1, 2]], None).correct == [bright]


def test_a_video_that_is_gone_in_the_middle_of_a_run_costs_its_question_alone(tmp_path, model, caplog, closing):
    shutil.copytree(data_folder(), tmp_path / "data")
    config = reading_config(tmp_path, model, train=False)
    config.data.path = str(tmp_path / "data" / "needles.jsonl")
    recipe = closing(TspoRecipe(config))
    first, second = recipe.train_tasks[:2]
    drawn(recipe)
    Path(first.video.index.path).unlink()
    rollouts = drawn(recipe)
    assert [task.id for task in TspoPayload.of(rollouts).tasks] == [second.id]
    assert torch.isfinite(rollouts.reward).all()
    assert recipe.skipped == {"missing_video": 1}
    assert first.id in caplog.text
    Path(second.video.index.path).unlink()
    with pytest.raises(NoUsableTasksError, match="none of 2 videos could be used"):
        drawn(recipe)


def test_picked_frames_that_cannot_be_read_cost_their_question_alone(tmp_path, model, monkeypatch, closing):
    config = reading_config(tmp_path, model, train=False)
    config.eval_data = {"heldout": config.data}
    recipe = closing(TspoRecipe(config))
    first, second = recipe.train_tasks[:2]
    broken = {first.video.index.path}
    read = Candidates.images

    def pictures(video, picks):
        if video.index.path in broken:
            raise VideoError("unreadable_video", "one of its frames is damaged")
        return read(video, picks)

    monkeypatch.setattr(Candidates, "images", pictures)
    rollouts = drawn(recipe)
    assert [task.id for task in TspoPayload.of(rollouts).tasks] == [second.id]
    assert recipe.skipped == {"unreadable_video": 1}
    assert recipe.evaluate(recipe.policy, "heldout", Accelerator(cpu=True), Step()).metrics["skipped"] == 1
    broken |= {task.video.index.path for task in recipe.train_tasks}
    reason = "could be answered from picked frames; the last one: .*one of its frames is damaged"
    with pytest.raises(NoUsableTasksError, match=f"none of 2 questions {reason}"):
        drawn(recipe)
    with pytest.raises(RunError, match=reason):
        recipe.evaluate(recipe.policy, "heldout", Accelerator(cpu=True), Step())


def test_more_frames_than_the_model_can_read_are_named_as_the_cause(tmp_path, model, closing):
    config = reading_config(tmp_path, model, train=False)
    config.answerer.model.max_prompt_tokens = 8
    config.eval_data = {"heldout": config.data}
    recipe = closing(TspoRecipe(config))
    with pytest.raises(NoUsableTasksError, match=r"the prompt has .* tokens, but model\.max_prompt_tokens is 8"):
        drawn(recipe)
    with pytest.raises(RunError, match=r"the prompt has .* tokens, but model\.max_prompt_tokens is 8"):
        recipe.evaluate(recipe.policy, "heldout", Accelerator(cpu=True), Step())


def test_the_tokens_of_a_trained_reader_are_decisions_too(tmp_path, model):
    recipe = TspoRecipe(reading_config(tmp_path, model, train=True))
    rollouts = drawn(recipe)
    payload = TspoPayload.of(rollouts)
    assert rollouts.mask.shape[1] == 3 + payload.response_ids.shape[1]
    assert rollouts.turn.unique().tolist() in ([0, 1], [-1, 0, 1])
    scores = recipe.scores(recipe.policy, rollouts, frozenset({"logp"})).logp
    torch.testing.assert_close(scores * rollouts.mask, rollouts.logp_old, rtol=1e-3, atol=1e-3)
    parts = [recipe.scores(recipe.policy, part, frozenset({"logp"})).logp for part in rollouts.micro_batches(3)]
    joined = torch.cat([torch.nn.functional.pad(x, (0, rollouts.mask.shape[1] - x.shape[1])) for x in parts])
    torch.testing.assert_close(joined, scores, rtol=1e-3, atol=1e-3)


def test_picks_and_tokens_are_averaged_apart(tmp_path, model, closing):
    recipe = closing(TspoRecipe(reading_config(tmp_path, model, train=True)))
    rollouts = drawn(recipe)
    assert recipe.objective.aggregation.kind == "turn_mean"
    rollouts = rollouts.replace(advantage=torch.ones_like(rollouts.mask) * rollouts.mask)
    counts: Denominators = count_denominators(recipe, rollouts)
    assert counts.turns == 2 * rollouts.num_rows
    recipe.policy.zero_grad()
    recipe.loss(recipe.policy, rollouts, counts, Step()).loss.backward()
    assert any(weight.grad is not None and weight.grad.abs().sum() > 0 for weight in recipe.policy.reader.parameters())
    assert any(weight.grad is not None and weight.grad.abs().sum() > 0 for weight in recipe.policy.agent.parameters())
    recipe.policy.save_pretrained(tmp_path / "saved")
    before = recipe.policy.reader.network.lm_head.weight.clone()
    with torch.no_grad():
        recipe.policy.reader.network.lm_head.weight.add_(1.0)
    recipe.policy.load_weights(tmp_path / "saved")
    assert torch.equal(recipe.policy.reader.network.lm_head.weight, before)


def test_a_trained_reader_has_its_own_learning_rate(tmp_path, model):
    config = reading_config(tmp_path, model, train=True)
    config.trainer.steps, config.trainer.learning_rate, config.answerer.learning_rate = 1, 1e-2, 1e-5
    config.trainer.weight_decay = 0.0
    before = {name: weight.clone() for name, weight in TspoRecipe(config).policy.named_parameters()}
    after = TspoRecipe(config).policy
    after.load_weights(train(RECIPES["tspo"], config) / "checkpoints/step-000001/model")
    moved = {"agent": 0.0, "reader": 0.0}
    for name, weight in after.named_parameters():
        part = name.partition(".")[0]
        moved[part] = max(moved[part], float((weight - before[name]).detach().abs().max()))
    # the first step of AdamW is its rate, times a sign
    assert 0.5e-2 < moved["agent"] < 1.1e-2
    assert 0.5e-5 < moved["reader"] < 1.1e-5


def test_a_frozen_reader_has_no_learning_rate(tmp_path, model):
    config = reading_config(tmp_path, model, train=False)
    config.answerer.learning_rate = 1e-6
    with pytest.raises(UserError, match=r"learning_rate is .*, but it has no effect while .*train is False"):
        check_config(config.answerer)
