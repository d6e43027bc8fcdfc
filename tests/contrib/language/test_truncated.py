"""Answers that several steps sample (T-PPO)."""

import pytest
import torch

from mmrl.contrib.language.truncated import NEW, TRUNCATED, TruncatedConfig, TruncatedRecipe, places_of
from mmrl.fields import check_config
from mmrl.rewards import RewardConfig
from mmrl.training.objectives import ObjectiveConfig, make_objective
from mmrl.training.processes import Streams, make_accelerator
from mmrl.training.recipe import Step
from mmrl.vlm.data.prompt import VlmPayload, token_lists
from tests.vlm.runs import run_config


@pytest.fixture
def recipe(tmp_path, tiny_folders, closing):
    config = run_config(TruncatedConfig, tmp_path, tiny_folders["qwen2_5_vl"], tasks_per_step=2)
    config.eval_data, config.trainer.samples_per_task, config.window = {}, 2, 2
    config.sampler.max_new_tokens = 5
    config.rewards = [RewardConfig(name="tests/vlm/user_reward.py:letters", isolate=False)]
    check_config(config, "")
    return closing(TruncatedRecipe(config))


def stepped(recipe, number, tasks, draw=0):
    """Rows of a step as scored, and with advantages."""
    streams = Streams(number, draw=draw)
    rows = recipe.score(recipe.rollout(recipe.policy, tasks, streams, Step(number)), Step(number))
    with torch.no_grad():
        values = recipe.policy(rows, outputs=frozenset({"logp", "values"})).values
    rows = rows.replace(values=values)
    return rows, recipe.advantages(rows, make_accelerator(), Step(number))


def test_unfinished_answers_go_on_in_the_next_step_until_the_longest_one(recipe):
    first, second, third = recipe.train_tasks[:2], recipe.train_tasks[2:4], recipe.train_tasks[4:6]
    begun, _ = stepped(recipe, 0, first)
    cut = (begun.extras[TRUNCATED] > 0).tolist()
    assert any(cut), "the tiny model hardly ends an answer within two tokens"
    starts = [
        ids
        for ids, open_end in zip(token_lists(VlmPayload.of(begun).response_ids, begun.mask), cut, strict=True)
        if open_end
    ]
    kept = {int(group) for group, open_end in zip(begun.group, cut, strict=True) if open_end}
    assert recipe.carried.slots.keys() == kept
    further, _ = stepped(recipe, 1, second)
    payload = VlmPayload.of(further)
    assert [payload.tasks[group] is first[group] for group in range(2)] == [group in kept for group in range(2)]
    ids = token_lists(payload.response_ids, further.mask)
    went_on = [
        own for own, new, mask in zip(ids, further.extras[NEW], further.mask, strict=True) if new.sum() < mask.sum()
    ]
    assert [own[:2] for own in went_on] == starts
    with torch.no_grad():
        logp = recipe.policy(further).logp
    torch.testing.assert_close(logp, further.logp_old, atol=1e-4, rtol=1e-3)
    last, _ = stepped(recipe, 2, third)
    lengths = last.mask.sum(1)
    assert int(lengths.max()) == 5
    assert not bool(last.extras[TRUNCATED][lengths == 5].any()), "the longest answers have ended"


def test_a_draw_that_is_repeated_leaves_no_answers(recipe):
    """Another process had no usable question in the first draw."""
    recipe.rollout(recipe.policy, recipe.train_tasks[:2], Streams(0), Step())
    assert any(answers for _, (_, (_, answers)) in recipe.left)
    recipe.config.window = 5
    stepped(recipe, 0, recipe.train_tasks[2:4], draw=1)
    assert recipe.carried.slots == {}


def test_the_policy_learns_new_tokens_and_the_critic_whole_answers(recipe):
    stepped(recipe, 0, recipe.train_tasks[:2])
    stepped(recipe, 1, recipe.train_tasks[2:4])
    rows, found = stepped(recipe, 2, recipe.train_tasks[4:6])
    cut, new, whole = rows.extras[TRUNCATED] > 0, rows.extras[NEW], rows.mask
    assert bool((~cut).any())
    assert torch.equal(found.mask, torch.where(cut[:, None], new, whole))
    assert bool((found.advantage[new == 0] == 0).all())
    torch.testing.assert_close(found.returns[~cut], rows.reward[~cut][:, None] * whole[~cut])
    torch.testing.assert_close(found.returns[cut], (rows.values * new)[cut])
    assert bool((rows.reward[cut] == 0).all())
    last = whole.sum(1).long() - 1
    at_end = found.advantage[torch.arange(len(last)), last]
    values = rows.values[torch.arange(len(last)), last]
    torch.testing.assert_close(at_end, torch.where(cut, 0.0, rows.reward - values))


def test_settings_that_lose_answers_are_refused(recipe):
    recipe.config.objective = ObjectiveConfig(preset="grpo")
    with pytest.raises(ValueError, match="need a critic"):
        recipe.config.validate()
    recipe.config.objective = ObjectiveConfig(preset="tppo", filter={"kind": "resample"})
    with pytest.raises(ValueError, match="continues each response once"):
        recipe.config.validate()
    recipe.config.objective, recipe.config.mask_truncated_completions = ObjectiveConfig(preset="tppo"), True
    with pytest.raises(ValueError, match="mask_truncated_completions is set"):
        recipe.config.validate()


def test_the_critic_learns_returns_with_the_divergence(recipe):
    kl = {"kind": "k1", "coef": 0.5, "in_reward": True}
    recipe.objective = make_objective(ObjectiveConfig(preset="tppo", kl=kl))
    rows = recipe.score(recipe.rollout(recipe.policy, recipe.train_tasks[:2], Streams(0), Step()), Step())
    rows = rows.replace(values=torch.zeros_like(rows.mask), logp_ref=rows.logp_old - 1.0)
    rows = rows.replace(extras=rows.extras | {TRUNCATED: torch.zeros_like(rows.reward)})
    found = recipe.advantages(rows, make_accelerator(), Step())
    left = rows.mask.flip(1).cumsum(1).flip(1) * rows.mask
    torch.testing.assert_close(found.returns, (rows.reward[:, None] - 0.5 * left) * rows.mask)


def test_a_question_may_be_drawn_for_two_slots():
    one, other = object(), object()
    assert places_of([one, other, one], [one, one]) == [0, 2]
