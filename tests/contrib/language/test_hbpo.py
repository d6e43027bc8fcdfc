"""HBPO: several budgets in one group, stated at the beginning of the answers and known to reward and advantage."""

import pytest
import torch

from mmrl.contrib.language.hbpo import HbpoConfig, HbpoRecipe, HierarchySettings
from mmrl.errors import ConfigError
from mmrl.rewards.budget import budget_reward
from mmrl.training.processes import Streams
from mmrl.training.recipe import Step
from mmrl.vlm.data.prompt import VlmPayload
from tests.golden.numbers import assert_agrees, load
from tests.rounding import assert_equal_up_to_rounding
from tests.vlm.runs import run_config


def stated(prompts, completions, *, budget=None, **columns):
    """The budget that the column holds, if the answer begins with it; evaluations have none."""
    return [
        float(given) * (f"within {given} tokens" in text)
        for text, given in zip(completions, budget or [0] * len(completions), strict=True)
    ]


def hbpo_config(folder, model, budgets=(3, 1), samples=4) -> HbpoConfig:
    config = run_config(HbpoConfig, folder, model, tasks_per_step=2, samples_per_task=samples)
    config.hierarchy = HierarchySettings(budgets=list(budgets))
    config.sampler.max_new_tokens = 4
    config.rewards[:] = [type(config.rewards[0])(name=f"{__file__}:stated", isolate=False)]
    return config


def test_a_group_holds_answers_of_every_budget(tmp_path, folder, closing):
    recipe = closing(HbpoRecipe(hbpo_config(tmp_path, folder)))
    rollouts = recipe.rollout(recipe.policy, recipe.train_tasks[:2], Streams(0), Step())
    with torch.no_grad():
        logp = recipe.scores(recipe.policy, rollouts, frozenset({"logp"})).logp
    assert_equal_up_to_rounding(logp, rollouts.logp_old)
    assert rollouts.group.tolist() == [0, 0, 0, 0, 1, 1, 1, 1]
    assert rollouts.places == [0, 1]
    assert rollouts.extras["budget"].tolist() == [3, 3, 1, 1] * 2
    scored = recipe.score(rollouts, Step())
    assert scored.reward.tolist() == [3.0, 3.0, 1.0, 1.0] * 2, "the reward sees the sentence and the column"
    first, *_, last = (recipe.describe_row(scored, row)["prompt"] for row in range(4))
    assert first.endswith("I will answer the question within 3 tokens. ")
    assert last.endswith("I will answer the question within 1 tokens. ")
    advantage = recipe.objective.compute_advantages(scored).advantage[:, 0]
    assert len({round(float(value), 4) for value in advantage[:4]}) == 2, "one advantage for each budget"


def test_answers_do_not_depend_on_the_other_questions(tmp_path, folder, closing):
    recipe = closing(HbpoRecipe(hbpo_config(tmp_path, folder)))
    both = VlmPayload.of(recipe.rollout(recipe.policy, recipe.train_tasks[:2], Streams(0), Step())).texts
    alone = recipe.rollout(recipe.policy, recipe.train_tasks[1:2], Streams(0, [1]), Step())
    assert VlmPayload.of(alone).texts == both[4:]
    assert alone.places == [1]


def test_budgets_share_the_samples(tmp_path, folder):
    config = hbpo_config(tmp_path, folder, budgets=(1, 2, 3))
    with pytest.raises(
        ValueError, match=r"samples_per_task is 4, which is not divisible by the 3 budgets .* use a multiple of 3"
    ):
        config.validate()
    for budgets in ([], [0], [2, 2]):
        with pytest.raises(ConfigError, match="give different numbers of tokens"):
            HierarchySettings(budgets=budgets).validate()
    with pytest.raises(ConfigError, match=r"hierarchy\.start is 'Shortly\.'; it must contain \{budget\}"):
        HierarchySettings(start="Shortly.").validate()


def earned(lengths, budget, **options):
    rows = len(lengths)
    given = {"answer": ["2"] * rows, "completion_lengths": lengths, "budget": [budget] * rows, "require_block": False}
    return budget_reward(["1 + 1?"] * rows, ["2"] * rows, **given | options)


def test_the_reward_is_that_of_the_public_code():
    file = load("hbpo")
    found = [earned(file.inputs["lengths"], budget) for budget in file.inputs["budgets"]]
    assert_agrees(torch.tensor(found), file.peers[0], "rewards")


def test_the_papers_reward_does_not_fall_below_a_budget():
    lengths = [1, 100, 512, 513, 2000]
    paper, released = earned(lengths, 512, piecewise=True), earned(lengths, 512)
    assert paper[:3] == [paper[2]] * 3
    assert paper[2:] == released[2:]
    assert released[0] < released[1] < released[2], "the released reward pays short answers less"
