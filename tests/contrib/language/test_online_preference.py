"""Online preference optimisation: the pair of a question, opponents, the previous policy, refusals."""

import contextlib

import pytest
import torch

from mmrl.contrib.language.online_preference import (
    OnlinePreferenceConfig,
    OnlinePreferenceRecipe,
    ranked_pairs,
    sample_mixture,
)
from mmrl.core import Rollouts
from mmrl.training.processes import Streams
from mmrl.training.recipe import Reference, Step
from mmrl.vlm.engine.vlm_sampler import SamplerConfig, sample
from tests.contracts.domains import tiny_vlm
from tests.vlm.runs import run_config


def online(folder, **objective) -> OnlinePreferenceConfig:
    config = run_config(OnlinePreferenceConfig, folder, tiny_vlm(), tasks_per_step=2, samples_per_task=2)
    config.eval_data, config.sampler.max_new_tokens = {}, 5
    for name, value in objective.items():
        setattr(config.objective, name, value)
    return config


def moved(recipe: OnlinePreferenceRecipe) -> None:
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for weight in recipe.policy.parameters():
            weight.add_(0.05 * torch.randn(weight.shape, generator=generator))


def test_the_pair_of_a_question_is_its_best_and_its_worst_answer():
    reward = torch.tensor([0.0, 1.0, 0.5, 1.0, 2.0, 2.0, 2.0, float("nan"), 1.0, float("nan"), 0.0, 0.0])
    group, ones = torch.arange(4).repeat_interleave(3), torch.ones(12, 1)
    rollouts = Rollouts(group, ones, ones, reward)
    assert ranked_pairs(rollouts, keep_ties=False) == ([1, 0, 4, 3, 6, 8, 10, 11], [1.0, 1.0, 1.0, 0.0])
    tied = rollouts.replace(reward=torch.ones(12))
    assert ranked_pairs(tied, keep_ties=False) == ([0, 2, 3, 5, 6, 8, 9, 11], [0.0] * 4)
    assert ranked_pairs(tied, keep_ties=True)[1] == [1.0] * 4


def test_a_mixture_is_sampled_from_the_product_of_both_policies(tmp_path):
    recipe = OnlinePreferenceRecipe(online(tmp_path))
    start, config = Reference("frozen", recipe.policy), SamplerConfig(max_new_tokens=5)
    _, prompts = recipe.encode(recipe.policy, recipe.train_tasks[:4])
    draws = torch.rand(len(prompts), 5, generator=torch.Generator().manual_seed(0))
    alone = sample(recipe.policy, prompts, 1, config, draws)
    same = sample_mixture(recipe.policy, start.score, 0.4, prompts, config, draws)
    torch.testing.assert_close(same.logp, alone.logp, atol=1e-4, rtol=0)
    assert same.texts == alone.texts
    moved(recipe)
    found = sample_mixture(recipe.policy, start.score, 0.25, prompts, config, draws)
    policy, reference = (next_logp(x, prompts) for x in (recipe.policy, start.copy))
    wanted = (0.75 * policy + 0.25 * reference).log_softmax(-1)
    first = found.response_ids[:, :1]
    torch.testing.assert_close(found.logp[:, 0], wanted.gather(1, first)[:, 0], atol=1e-4, rtol=0)
    assert not torch.allclose(found.logp[:, 0], policy.gather(1, first)[:, 0], atol=1e-3)


def next_logp(policy, prompts) -> torch.Tensor:
    with torch.no_grad():
        return policy.next_logp(policy.last_states(prompts), 1.0)


def test_answers_of_an_opponent_come_second_and_are_the_references(tmp_path):
    recipe = OnlinePreferenceRecipe(online(tmp_path, preset="xpo"))
    moved(recipe)
    recipe.sampler.load(recipe.policy, 0)
    rollouts = recipe.rollout(recipe.policy, recipe.train_tasks[:2], Streams(0), Step())
    assert rollouts.extras["own_answer"].tolist() == [1.0, 0.0, 1.0, 0.0]
    with torch.no_grad():
        policies, wanted = (recipe.policy, recipe.start.copy), frozenset({"logp"})
        own, other = (recipe.scores_in_chunks(policy, rollouts, wanted).logp for policy in policies)
    rows = torch.arange(4)
    expected = torch.where(rows[:, None] % 2 == 0, own, other)
    torch.testing.assert_close(rollouts.logp_old, expected * rollouts.mask, atol=1e-4, rtol=0)
    assert not torch.allclose(own, other, atol=1e-3)
    scored = rollouts.replace(reward=torch.tensor([0.0, 1.0, 1.0, 1.0]))
    pairs = recipe.estimate(scored, None, Step())
    assert pairs.extras["own_answer"].tolist() == [0.0, 1.0, 1.0, 0.0]
    assert (pairs.extras["chosen"].tolist(), pairs.reward.tolist()) == ([1.0, 0.0] * 2, [1.0, 0.0, 1.0, 1.0])
    assert pairs.mask.sum(1).tolist()[2:] == [0.0, 0.0], "a tie teaches nothing"
    assert recipe.noted == {"pairs/learnt": 0.5, "pairs/won": 0.0}


def test_the_sharded_weights_of_an_opponent_are_gathered_while_it_samples(tmp_path, monkeypatch):
    recipe = OnlinePreferenceRecipe(online(tmp_path, preset="xpo"))
    gathered, sampled, score = [], [], recipe.start.score

    @contextlib.contextmanager
    def whole():
        gathered.append(True)
        yield
        gathered.clear()

    monkeypatch.setattr(recipe.start, "whole", whole)
    monkeypatch.setattr(recipe.start, "score", lambda scorer: sampled.append(bool(gathered)) or score(scorer))
    recipe.rollout(recipe.policy, recipe.train_tasks[:1], Streams(0), Step())
    assert sampled == [True]


def test_iterations_refresh_the_previous_policy_and_extrapolate_the_weights(tmp_path):
    config = online(tmp_path, preset="inpo")
    config.online.iteration, config.online.extrapolation = 2, 0.5
    config.validate()
    recipe = OnlinePreferenceRecipe(config)
    name, weight = next(found for found in recipe.policy.named_parameters() if found[1].requires_grad)
    copy = dict(recipe.previous.policy.copy.named_parameters())[name]
    start = weight.detach().clone()

    def steps(first: int, by: float) -> None:
        for number in (first, first + 1):
            with torch.no_grad():
                weight.add_(by / 2)
            recipe.previous.on_step_end(Step(number, 4))
            if number == first:
                assert not torch.equal(copy, weight)

    steps(0, 1.0)  # ends at 1, goes on to 1.5
    torch.testing.assert_close(weight.detach(), start + 1.5)
    assert torch.equal(copy, weight)
    kept = recipe.previous.state_dict()
    steps(2, 0.5)  # ends at 2, 1 beyond the end before
    torch.testing.assert_close(weight.detach(), start + 2.5)
    recipe.previous.load_state_dict(kept)
    torch.testing.assert_close(copy.detach(), start + 1.5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: setattr(c.trainer, "samples_per_task", 1), "samples_per_task is 1; use at least 2"),
        (
            lambda c: (setattr(c.objective, "preset", "nash_md"), setattr(c.trainer, "samples_per_task", 4)),
            "use 2, because",
        ),
        (lambda c: (setattr(c.objective, "preset", "xpo"), setattr(c.online, "opponent", "policy")), "of an opponent"),
        (lambda c: (setattr(c.objective, "preset", "xpo"), setattr(c.reference, "kind", "ema")), "kind is 'ema'"),
        (
            lambda c: (setattr(c.objective, "preset", "kto"), setattr(c.online, "reference", "previous")),
            "other questions",
        ),
        (lambda c: setattr(c.adaptive_kl, "target", 0.1), "adaptive_kl"),
        (lambda c: setattr(c.objective, "preset", "diffusion_dpo"), "noisy versions"),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path, change, message):
    config = online(tmp_path)
    config.validate()
    change(config)
    with pytest.raises(ValueError, match=message):
        config.validate()
