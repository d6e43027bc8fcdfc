"""Strategies that an actor follows and a judge rewards."""

import pytest

from mmrl.agents.environments.environment import Action, as_outcome, as_start
from mmrl.agents.environments.experts import run_expert
from mmrl.agents.environments.strategy import StrategyEnvironment
from mmrl.agents.toy.haggle import Haggle, Seller
from mmrl.errors import UserError


def say(env, strategy):
    return as_outcome(env.step(Action("say", {"text": strategy})))


def test_the_actor_speaks_and_the_judge_rewards_the_turn():
    env = Haggle()
    observation, _ = as_start(env.reset({}, seed=1))
    assert observation.text == "It was a long day. 80?"
    first, second = say(env, "firm"), say(env, "warm")
    assert (first.observation.text, first.reward) == ("It was a long day. 60?", 1.0)
    assert (second.observation.text, second.reward) == ("It was a long day. 60?", 0.0)
    end = say(env, "quick")
    assert (end.observation.text, end.reward, end.terminated) == ("Sold.", 0.25, True)


def test_a_proud_seller_leaves():
    env = Haggle()
    as_start(env.reset({}, seed=0))
    assert say(env, "firm").reward == 0.0
    assert say(env, "What?").observation.text == "My work is the best. 80?", "words that are no strategy say nothing"
    end = say(env, "firm")
    assert (end.observation.text, end.reward, end.terminated) == ("Then go.", 0.0, True)


@pytest.mark.parametrize("seed", [0, 1])
def test_the_expert_saves_most(seed):
    assert run_expert(Haggle(), {}, seed, "tag").reward == 3 + 0.75


def test_without_a_judge_the_reward_is_the_environments():
    module = "mmrl.agents.toy.haggle"
    env = StrategyEnvironment(f"{module}:Seller", f"{module}:reply")
    env.reset({}, seed=1)
    assert say(env, "firm").reward == 0.0
    assert isinstance(env._env, Seller)
    with pytest.raises(UserError, match="actor"):
        StrategyEnvironment(f"{module}:Seller", f"{module}:nobody")
