"""Soft tokens of SofT-GRPO: their sampling, their replay, and the code of the paper."""

import dataclasses
import math

import pytest
import torch

from mmrl.contrib.language.soft_tokens import EPS, NOISE, SoftConfig, SoftRecipe, mixture_logp
from mmrl.errors import UserError
from mmrl.fields import check_config
from mmrl.rewards import RewardConfig
from mmrl.training.processes import Streams
from mmrl.training.recipe import Step
from mmrl.vlm.data.prompt import VlmPayload
from tests.golden.numbers import assert_agrees, inputs_of, load
from tests.rounding import assert_equal_up_to_rounding
from tests.vlm.runs import run_config

LETTERS = RewardConfig(name="tests/vlm/user_reward.py:letters", isolate=False)


@pytest.fixture
def recipe(tmp_path, tiny_folders, closing):
    config = run_config(SoftConfig, tmp_path, tiny_folders["qwen2_5_vl"], tasks_per_step=3)
    config.eval_data, config.rewards = {}, [LETTERS]
    config.sampler = dataclasses.replace(config.sampler, top_k=4, top_p=0.95, max_new_tokens=6)
    check_config(config, "")
    return closing(SoftRecipe(config))


def test_log_probabilities_are_those_of_the_authors():
    b, (peer,) = inputs_of("soft_tokens"), load("soft_tokens").peers
    logp = b.logits.requires_grad_().log_softmax(-1)
    ordinary = logp.gather(1, b.ids[:, :1])[:, 0]
    soft = torch.zeros(6, dtype=torch.bool).index_fill(0, torch.tensor(peer["soft"]), True)
    found = torch.where(soft, mixture_logp(logp.gather(1, b.ids), b.scores), ordinary)
    assert_agrees(found, peer, "logp")
    (gradient,) = torch.autograd.grad((found * torch.arange(1.0, 7.0)).sum(), b.logits)
    assert_agrees(gradient, peer, "gradient")


@pytest.mark.parametrize("bound", NOISE)
def test_rounding_does_not_decide_whether_clipped_noise_has_a_gradient(bound):
    logp = torch.tensor([[-1.0, -0.5, -2.0]]).log_softmax(-1)
    scores = (logp.softmax(-1) + EPS).log() + torch.tensor([bound, 0.5, 0.0])

    def gradient(shift):
        own = logp.clone().requires_grad_()
        return torch.autograd.grad(mixture_logp(own, scores + torch.tensor([shift, 0.0, 0.0])).sum(), own)[0]

    torch.testing.assert_close(gradient(2e-6), gradient(-2e-6), rtol=0, atol=1e-4)
    outside = gradient(1.0 if bound > 0 else -1.0)
    assert (outside - gradient(0.0)).abs().max() > 0.1


def test_many_equally_likely_tokens_have_a_log_probability():
    logp = torch.full((1, 32), -8.0, requires_grad=True)
    found = mixture_logp(logp, logp.detach().log_softmax(-1) + 0.3)
    (gradient,) = torch.autograd.grad(found.sum(), logp)
    assert found.item() == pytest.approx(-0.3 - math.exp(-0.3), abs=1e-4)
    assert gradient.isfinite().all()


def test_the_update_scores_what_was_sampled(recipe):
    rollouts = recipe.rollout(recipe.policy, recipe.train_tasks[:3], Streams(0), Step())
    mixed = VlmPayload.of(rollouts).mixed
    soft = mixed["soft"] > 0
    assert soft.any()
    assert (mixed["weights"][soft].max(-1).values < 0.999).any()
    torch.testing.assert_close(mixed["weights"][soft].sum(-1), torch.ones(int(soft.sum())))
    assert torch.equal(mixed["ids"][soft][:, 0], VlmPayload.of(rollouts).response_ids[soft])
    with torch.no_grad():
        found = recipe.scores(recipe.policy, rollouts, frozenset({"logp"})).logp
    assert_equal_up_to_rounding(found, rollouts.logp_old)
    ordinary = rollouts.replace(payload=dataclasses.replace(VlmPayload.of(rollouts), mixed={}))
    with torch.no_grad():
        read = recipe.policy(ordinary).logp
    assert not torch.allclose(read[:, 1:], found[:, 1:], atol=1e-3), "the model reads the mixtures"


def test_behind_the_end_of_thinking_tokens_are_ordinary(recipe, monkeypatch):
    first = recipe.rollout(recipe.policy, recipe.train_tasks[:3], Streams(0), Step())
    ends = int(VlmPayload.of(first).response_ids[0, 1])
    monkeypatch.setattr("mmrl.contrib.language.soft_tokens.thinking_end", lambda *_: ends)
    rollouts = recipe.rollout(recipe.policy, recipe.train_tasks[:3], Streams(0), Step())
    payload = VlmPayload.of(rollouts)
    assert payload.mixed["soft"][0].tolist() == [1.0] + [0.0] * (rollouts.num_decisions - 1)
    with torch.no_grad():
        found = recipe.scores(recipe.policy, rollouts, frozenset({"logp"})).logp
        plain = recipe.policy(rollouts).logp
    assert_equal_up_to_rounding(found, rollouts.logp_old)
    assert torch.equal(found[0, 1:], plain[0, 1:])


def test_what_soft_tokens_cannot_do_is_refused(recipe):
    config = dataclasses.replace(recipe.config)
    config.soft = dataclasses.replace(config.soft, thinking_end="so it is")
    with pytest.raises(UserError, match=r"soft\.thinking_end is 'so it is', which is \d+ tokens"):
        SoftRecipe(config)
    config = dataclasses.replace(recipe.config, sampler=dataclasses.replace(recipe.config.sampler, top_k=1))
    with pytest.raises(ValueError, match=r"sampler\.top_k is 1"):
        config.validate()
