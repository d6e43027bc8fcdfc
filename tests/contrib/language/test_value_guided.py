"""Value-Augmented Sampling: decoding with values of the next tokens, and a critic whose policy stays as it is."""

import pytest
import torch

from mmrl.contrib.language.value_guided import (
    GuidanceConfig,
    ValueGuidedConfig,
    ValueGuidedRecipe,
    augment,
    sample_guided,
)
from mmrl.errors import UserError
from mmrl.recipes import find_recipe
from mmrl.rewards import RewardConfig
from mmrl.runs.records import read_warnings
from mmrl.training.processes import Streams, make_accelerator
from mmrl.training.recipe import Step
from mmrl.training.run import train
from mmrl.training.update import count_denominators
from mmrl.vlm.data.prompt import join_prompts
from mmrl.vlm.engine.rows import text_prompt
from mmrl.vlm.engine.vlm_sampler import SamplerConfig, sample
from mmrl.vlm.model.model_config import CriticSettings
from tests.golden.numbers import assert_agrees, inputs_of, load
from tests.vlm.runs import run_config


@pytest.fixture
def recipe(tmp_path, folder):
    config = run_config(ValueGuidedConfig, tmp_path, folder)
    config.model.critic = CriticSettings(hidden=[8], stop_gradient=True)
    config.validate()
    made = ValueGuidedRecipe(config)
    torch.nn.init.normal_(made.policy.value_head[-1].weight, std=0.3)
    yield made
    made.close()


def test_scores_are_those_of_the_public_code():
    b, peer = inputs_of("value_guided"), load("value_guided").peers[0]
    top = b.scores.topk(int(b.top_k), -1).indices
    assert_agrees(augment(b.scores, top, b.values[top], float(b.beta)), peer, "augmented")


def test_decoding_looks_one_token_ahead(recipe):
    """Against every candidate read behind its prompt and answer, without a cache."""
    policy = recipe.policy
    _, prompts = recipe.encode(policy, recipe.train_tasks[:3])
    config, guidance = SamplerConfig(max_new_tokens=4), GuidanceConfig(beta=5.0, top_k=3)
    uniforms = torch.rand(3, 4, generator=torch.Generator().manual_seed(0))
    drawn = sample_guided(policy, guidance, prompts, config, uniforms)
    plain = sample(policy, prompts, 1, config, uniforms)
    assert not torch.equal(drawn.response_ids, plain.response_ids)
    for row, prompt in enumerate(prompts):
        for place in range(int(drawn.mask[row].sum())):
            said = drawn.response_ids[row, :place]
            read = join_prompts([prompt, text_prompt(said)]) if place else prompt
            with torch.no_grad():
                state = policy.last_states([read])
                logp = policy.next_logp(state, 1.0)[0]
                top = logp.topk(3).indices.tolist()
                ahead = [join_prompts([read, text_prompt(torch.tensor([token]))]) for token in top]
                states = torch.cat([policy.last_states([one]) for one in ahead])
                values = policy.value_head(states)[:, 0].tolist()
                now = float(policy.value_head(state))
            values = torch.tensor([now if token in policy.eos_ids else v for token, v in zip(top, values, strict=True)])
            logp[top] += 5.0 * (values - values.mean())
            expected = logp.log_softmax(-1)[drawn.response_ids[row, place]]
            assert float(drawn.logp[row, place]) == pytest.approx(float(expected), abs=2e-4)


def test_without_weight_it_is_ordinary_sampling(recipe):
    _, prompts = recipe.encode(recipe.policy, recipe.train_tasks[:3])
    uniforms = torch.rand(3, 5, generator=torch.Generator().manual_seed(1))
    config = SamplerConfig(max_new_tokens=5)
    drawn = sample_guided(recipe.policy, GuidanceConfig(beta=0.0), prompts, config, uniforms)
    plain = sample(recipe.policy, prompts, 1, config, uniforms)
    assert torch.equal(drawn.response_ids, plain.response_ids)


def test_only_the_critic_learns(recipe):
    with torch.no_grad():
        rollouts = recipe.rollout(recipe.policy, recipe.train_tasks[:2], Streams(0), Step())
    rollouts = recipe.score(rollouts, Step())
    values = recipe.scores_in_chunks(recipe.policy, rollouts, frozenset({"values"})).values
    rollouts = recipe.advantages(rollouts.replace(values=values), make_accelerator(), Step())
    recipe.loss(recipe.policy, rollouts, count_denominators(recipe, rollouts), Step()).loss.backward()
    moved = {name for name, weight in recipe.policy.named_parameters() if weight.grad is not None}
    assert moved
    assert all(name.startswith("value_head") for name in moved)


def reward_of(completions, **_):
    """The same for every answer."""
    return [1.0] * len(completions)


def test_a_run_whose_critic_has_learned_ends_without_a_warning_that_nothing_changed(recipe):
    """Its policy never changes."""
    config = recipe.config
    config.evaluation.at_start = config.evaluation.at_end = False
    config.rewards = [RewardConfig(name="one", function=f"{__name__}:reward_of", isolate=False)]
    assert not any("changed in 2 steps" in line for line in read_warnings(train(find_recipe("value_guided"), config)))


def test_a_critic_whose_gradient_reaches_the_policy_is_refused(recipe):
    recipe.config.model.critic.stop_gradient = False
    with pytest.raises(UserError, match="value_guided does not train the policy"):
        recipe.config.validate()
