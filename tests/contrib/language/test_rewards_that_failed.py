"""Rows that no reward could score, which stay in the step if another process has scored its own."""

import dataclasses
import math

import pytest

from mmrl.contrib.language.truncated import TRUNCATED
from mmrl.core.rollouts import Rollouts
from mmrl.recipes import find_recipe
from mmrl.training.processes import Streams
from mmrl.training.recipe import Step
from mmrl.training.scoring import EveryRewardFailedError
from tests.contracts.domains import domain_of


@pytest.mark.parametrize("name", ["contrastive", "segment", "truncated"])
def test_rows_without_a_reward_can_be_joined_with_those_of_other_processes(name, tmp_path, closing, monkeypatch):
    config = domain_of(name).make_config(name, tmp_path)
    recipe = closing(find_recipe(name).load_recipe_class()(config))
    rows = recipe.rollout(recipe.policy, recipe.train_tasks[:2], Streams(0), Step())
    scored, score_texts = recipe.score(rows, Step()), recipe.score_texts

    def failing(tasks, texts, tokens, step):
        return dataclasses.replace(score_texts(tasks, texts, tokens, step), total=[math.nan] * len(texts))

    monkeypatch.setattr(recipe, "score_texts", failing)
    with pytest.raises(EveryRewardFailedError) as failed:
        recipe.score(rows, Step())
    lost = failed.value.rollouts
    assert Rollouts.concat([scored, lost]).num_rows == 2 * rows.num_rows
    if name == "truncated":
        assert bool((lost.extras[TRUNCATED] > 0).any())
        assert bool((lost.reward[lost.extras[TRUNCATED] > 0] == 0).all())
