"""TGPO: what the policy sees of a plan, dense rewards, and plans chosen by the critic."""

import numpy as np
import pytest
import torch

from mmrl.errors import ConfigError, UserError
from mmrl.training.processes import Streams
from mmrl.training.recipe import Step
from robotics.contrib.stl import Plan
from robotics.contrib.tgpo import GroundedSim, StageRewardConfig, TgpoRecipe, TgpoSettings
from tests.contracts.domains import domain_of
from tests.contrib.robotics.test_stl import NEAR, specs, walk
from tests.robotics.line_sim import LineSim

FORMULA = "eventually[2:12](gap < 0.1) and always[0:6](state_0 < 0.25)"
PLAN = Plan(reaches=((4, 0),), invariants=((0, 6, 1),))


def grounded(formula=FORMULA, **weights) -> GroundedSim:
    sim = GroundedSim(LineSim(), formula, NEAR, StageRewardConfig(**weights))
    sim.chooser = lambda episodes, proposals: [PLAN] * len(episodes)
    return sim


def test_the_state_shows_the_time_that_is_left_for_each_subgoal():
    sim = grounded()
    assert sim.state_size == 2 + 1 + 2 * 4
    assert sim.state_names[:4] == ["state_0", "state_1", "elapsed", "due_0"]
    started = sim.reset(specs(1, 2)).observation.state
    np.testing.assert_allclose(started[0, 2:], [0, 4 / 12, 1, 0, 0, 0, 0, 0, 1], atol=1e-6)
    seen = [sim.step_chunk(np.zeros((2, 1, 1))).observation.state[0, 2:] for _ in range(8)]
    np.testing.assert_allclose(seen[0], [1 / 12, 3 / 12, 1, 0, 0, 0, 0, 0, 1], atol=1e-6)
    np.testing.assert_allclose(seen[3], [4 / 12, 0, 1, 0, 0, 0, 0, 0, 1], atol=1e-6)
    np.testing.assert_allclose(seen[7], [8 / 12, 0, 0, 0, 0, 0, 0, 0, 0], atol=1e-6)


def test_each_part_of_the_reward_by_hand():
    """Steps of 0.1 to a goal at least 0.3 away; the episode ends at the first step nearer than 0.1."""
    ways = {}
    for part in ("progress", "arrival", "violation", "satisfaction"):
        sim = grounded(**{name: float(name == part) for name in vars(StageRewardConfig())})
        sim.reset(specs(1))
        ways[part] = np.concatenate([result.rewards[0] for result in walk(sim)])
    gap = abs(sim._sim.goal[0])
    assert 0.3 < gap < 0.6
    steps = len(ways["progress"])
    expected = [0.1 if number < 4 else 0.0 for number in range(steps)]
    np.testing.assert_allclose(ways["progress"], expected, atol=1e-6)
    arrived = float(abs(0.4 - gap) < 0.1)
    np.testing.assert_allclose(ways["arrival"], [arrived if number == 3 else 0.0 for number in range(steps)])
    broken = [-1 / 7 if number + 1 >= 3 else 0.0 for number in range(steps)]
    np.testing.assert_allclose(ways["violation"], broken, atol=1e-6)
    assert ways["satisfaction"].tolist() == [0.0] * steps, "the invariant was broken"


def test_satisfaction_and_success_are_those_of_the_formula():
    sim = GroundedSim(LineSim(), "eventually[2:12](gap < 0.1)", NEAR, StageRewardConfig(0, 0, 0, 1))
    sim.reset(specs(1, 2, 3))
    results = walk(sim, action=1.0)
    earned = sum(result.rewards.sum() for result in results)
    assert earned == 3.0
    assert sum(result.success.sum() for result in results) == 3


@pytest.fixture
def recipe(tmp_path, closing):
    config = domain_of("tgpo").make_config("tgpo", tmp_path)
    config.tgpo.formula = "eventually[1:12](state_0 > 0.2)"
    config.validate()
    return closing(TgpoRecipe(config))


def preferring(recipe, time):
    """A critic that likes plans the more, the nearer the time of their subgoal is to one."""
    place = recipe.grounded.state_size - 4
    recipe._values = lambda policy, episodes, states: -20 * np.abs(states[:, place] * 12.0 - time).astype(float)


def times(recipe):
    return [plan.reaches[0][0] for plan in recipe.grounded.plans.values()]


def test_evaluation_takes_the_plan_that_the_critic_prefers(recipe):
    preferring(recipe, 7)
    recipe.config.tgpo.candidates = 200
    recipe.grounded.reset(specs(1, 2, 3))
    assert times(recipe) == [7, 7, 7]


def test_the_chain_moves_to_plans_that_the_critic_prefers(recipe):
    preferring(recipe, 5)
    recipe.config.tgpo.draws, recipe.config.tgpo.explore = 100, 0.0
    tasks = recipe.train_tasks[:4]
    recipe.rollout(recipe.policy, tasks, Streams(0), Step())
    assert set(times(recipe)) == {5}
    recipe.config.tgpo.explore = 1.0
    recipe.rollout(recipe.policy, recipe.train_tasks, Streams(0), Step())
    assert len(set(times(recipe))) > 2


def test_the_chain_accepts_with_the_probability_of_metropolis_and_hastings(recipe):
    """Twelve times with the value 0 but one with log 3 at temperature 1: it has 3 of 14 parts of the chain."""
    settings = recipe.config.tgpo
    settings.draws, settings.explore, settings.temperature = 40, 0.0, 1.0
    place = recipe.grounded.state_size - 4
    recipe._values = lambda policy, episodes, states: np.where(np.rint(states[:, place] * 12) == 5, np.log(3.0), 0.0)
    episodes = specs(*range(3000))
    recipe.grounded.chooser = lambda chosen, proposals: recipe._chain(recipe.policy, chosen, proposals, Step(3))
    recipe.grounded.reset(episodes)
    shares = np.bincount(times(recipe), minlength=13)[1:] / 3000
    expected = np.full(12, 1 / 14)
    expected[4] = 3 / 14
    np.testing.assert_allclose(shares, expected, atol=0.025)


def test_plans_follow_from_seed_step_and_initial_state(recipe):
    episodes, found = specs(1, 2, 1), []
    for order in ([0, 1, 2], [1, 0]):
        chosen = [episodes[number] for number in order]
        recipe.grounded.chooser = lambda asked, proposals: recipe._chain(recipe.policy, asked, proposals, Step(3))
        recipe.grounded.reset(chosen)
        found.append(times(recipe))
    assert found[0][0] == found[0][2] == found[1][1]
    assert found[0][1] == found[1][0]


def test_the_critic_reads_what_it_is_trained_on(recipe):
    rollouts = recipe.rollout(recipe.policy, recipe.train_tasks[:2], Streams(0), Step())
    inputs = recipe.critic_inputs(rollouts)[::4, 0]
    seen = {}
    recipe.policy.critic.register_forward_pre_hook(lambda module, given: seen.setdefault("inputs", given[0]))
    recipe.grounded.chooser = lambda asked, proposals: recipe._chain(recipe.policy, asked, proposals, Step())
    recipe.config.tgpo.explore = 1.0
    recipe.grounded.reset(recipe.train_tasks[:2])
    size = recipe.grounded.state_size - 5
    torch.testing.assert_close(seen["inputs"][:, :size].cpu(), inputs[:, :size].cpu())
    assert seen["inputs"].shape == inputs.shape


def test_a_formula_is_needed():
    with pytest.raises(ConfigError, match=r"tgpo\.formula is empty"):
        TgpoSettings().validate()
    with pytest.raises(UserError, match="unknown signal z"):
        grounded("eventually(z > 1)")
