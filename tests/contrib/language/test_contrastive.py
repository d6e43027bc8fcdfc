"""Rewards from the policy's own states (GRACE)."""

from pathlib import Path

import pytest
import torch

from mmrl.contrib.language.contrastive import (
    MAIN,
    NEGATIVE,
    QUERY,
    TERM,
    ContrastiveConfig,
    ContrastiveRecipe,
    contrastive_terms,
    pooled,
)
from mmrl.errors import UserError
from mmrl.fields import check_config
from mmrl.rewards import RewardConfig
from mmrl.training.processes import Streams
from mmrl.training.recipe import Step
from mmrl.vlm.data.prompt import VlmPayload
from tests.golden.numbers import load, tensor
from tests.vlm.runs import add_columns, run_config


@pytest.fixture
def opened(tmp_path, tiny_folders, closing):
    def make(**columns):
        config = run_config(ContrastiveConfig, tmp_path, tiny_folders["qwen2_5_vl"], tasks_per_step=3)
        add_columns(Path(config.data.path), **columns)
        config.eval_data, config.trainer.samples_per_task = {}, 2
        config.rewards = [RewardConfig(name="tests/vlm/user_reward.py:letters", isolate=False)]
        check_config(config, "")
        return closing(ContrastiveRecipe(config))

    return make


@pytest.mark.parametrize("kind", ["supervised", "unsupervised"])
def test_the_reward_is_that_of_the_public_code(kind):
    inputs = load("grace").inputs
    states = {name: tensor(inputs["reward_parts"][name]) for name in ("main", "query", "negative")}
    negative = states["negative"][[0, 4, 8]] if kind == "supervised" else None
    found = contrastive_terms(states["main"], states["query"], negative, tensor(inputs["group"]))
    total = found["positive"] + found.get("negative", 0.0) + 0.2 * found["agreement"] + 0.2 * found["apart"]
    torch.testing.assert_close(total / 0.1, tensor(inputs["reward_parts"][kind]), rtol=1e-12, atol=1e-12)


def test_a_row_is_embedded_by_the_mean_of_its_states(opened):
    recipe = opened(query="What is 7?")
    rows = recipe.rollout(recipe.policy, recipe.train_tasks[:3], Streams(0), Step())
    payload = VlmPayload.of(rows)
    assert payload.embeddings.keys() == {MAIN, QUERY}
    with torch.no_grad():
        states = recipe.policy.states(rows).split(rows.mask.sum(1).int().tolist())
    for state, found in zip(states, payload.embeddings[MAIN], strict=True):
        mean = state.mean(0)
        torch.testing.assert_close(found, mean / mean.norm(), atol=1e-5, rtol=1e-4)
    assert torch.equal(
        pooled(recipe.policy, rows.select(torch.tensor([3])))[0].round(decimals=4),
        payload.embeddings[MAIN][3].round(decimals=4),
    )


def test_the_reward_joins_the_others_and_unfinished_answers_get_their_own(opened):
    recipe = opened(query="What is 7?", negative="What is 8?")
    rows = recipe.rollout(recipe.policy, recipe.train_tasks[:3], Streams(0), Step())
    VlmPayload.of(rows).finish[:] = ["eos"] * 5 + ["length"]
    scored = recipe.score(rows, Step())
    term = scored.reward_terms[TERM]
    states = VlmPayload.of(rows).embeddings
    parts = contrastive_terms(states[MAIN], states[QUERY], states[NEGATIVE][::2], rows.group)
    total = (parts["positive"] + parts["negative"] + 0.2 * parts["agreement"] + 0.2 * parts["apart"]) / 0.1
    torch.testing.assert_close(term[:5], total[:5])
    assert float(term[5]) == -1.0
    (letters,) = (value for name, value in scored.reward_terms.items() if name != TERM)
    torch.testing.assert_close(scored.reward, letters + term)
    assert recipe.extra_samples == 3 * 2 + 3


def test_data_without_queries_is_refused(opened):
    with pytest.raises(UserError, match="has no text in column 'query'"):
        opened()
