"""Samples of questions that the policy misses are exchanged for answers behind hints (Scaf-GRPO)."""

import pytest
import torch

from mmrl.contrib.language.scaffolded import ScaffoldedConfig, ScaffoldedRecipe, ScaffoldSettings, hint_levels
from mmrl.errors import UserError
from mmrl.fields import check_config
from mmrl.training.processes import make_accelerator
from mmrl.training.recipe import Step
from mmrl.vlm.data.prompt import VlmPayload
from tests.vlm.test_replacing import configure, rolled, scores, scoring

HINTS = ["Add them.", "3 + 4 is 7."]


@pytest.fixture
def opened(tmp_path, tiny_folders, closing):
    def make(top_p=1.0, **settings):
        config = configure(ScaffoldedConfig, tmp_path, tiny_folders["qwen2_5_vl"], hints=HINTS)
        config.sampler.top_p = top_p
        config.scaffold = ScaffoldSettings(**{"warmup_steps": 0} | settings)
        check_config(config, "")
        return closing(ScaffoldedRecipe(config))

    return make


def test_levels_of_hints_by_hand():
    assert hint_levels(["a", "b", "c"]) == [["a"], ["a", "b"], ["a", "b", "c"]]
    assert hint_levels([["a", "b"], ["c"]]) == [["a"], ["a", "b"], ["c"]]
    assert hint_levels([]) == []


@pytest.mark.parametrize("prompt", ["hinted", "bare"])
def test_the_right_answer_with_the_fewest_hints_takes_the_place_of_a_sample(opened, monkeypatch, prompt):
    recipe = opened(prompt=prompt)
    # the first of two questions has a right sample; of the other, only the answer behind both hints is right
    scoring(recipe, monkeypatch, lambda row: row == 1, lambda row: row == 1)
    rows = rolled(recipe)
    payload = VlmPayload.of(rows)
    assert rows.extras["source"].tolist() == [0, 0, 0, 0, 1, 0, 0, 0]
    assert rows.reward.tolist() == [0, 1, 0, 0, 1, 0, 0, 0]
    assert rows.group.tolist() == [0] * 4 + [1] * 4
    assert len(payload.prompts) == 2
    if prompt == "hinted":
        (context,) = payload.contexts[4]
        assert "Hints: Add them. 3 + 4 is 7." in context.prompt.text
    else:
        assert not any(payload.contexts)
    torch.testing.assert_close(scores(recipe, rows), rows.logp_old * rows.mask, atol=1e-4, rtol=1e-3)
    assert recipe.extra_samples == 2
    rows = recipe.advantages(rows, make_accelerator(), Step())
    metrics = recipe.stages[0].metrics(rows, Step())
    assert (metrics["scaffold/level_mean"], metrics["replaced/failed"]) == (2.0, 0.5)
    assert float(rows.advantage[4, 0]) > 0


def test_the_prompt_of_an_exchanged_answer_changes_its_log_probabilities(opened, monkeypatch):
    found = []
    for prompt in ("hinted", "bare"):
        recipe = opened(prompt=prompt)
        scoring(recipe, monkeypatch, lambda row: 0, lambda row: 1)
        found.append(rolled(recipe))
    assert VlmPayload.of(found[0]).texts == VlmPayload.of(found[1]).texts
    assert float((found[0].logp_old - found[1].logp_old)[[0, 4]].abs().max()) > 1e-3
    assert torch.equal(found[0].logp_old[1:4], found[1].logp_old[1:4])


def test_an_answer_behind_hints_was_sampled_from_the_nucleus_too(opened, monkeypatch):
    recipe = opened(top_p=0.5)
    scoring(recipe, monkeypatch, lambda row: 0, lambda row: 1)
    rows = rolled(recipe)
    hinted = rows.extras["source"] == 1
    assert bool((rows.extras["nucleus_mass"][hinted][rows.mask[hinted] > 0] < 1).all())


def test_no_hints_before_the_warm_up_ends(opened, monkeypatch):
    recipe = opened(warmup_steps=3)
    scoring(recipe, monkeypatch, lambda row: 0, lambda row: 0, lambda row: 1)
    assert rolled(recipe, number=2).extras["source"].sum() == 0
    assert rolled(recipe, number=3).extras["source"].sum() == 2


def test_hints_that_are_not_there(opened, monkeypatch):
    monkeypatch.setattr("mmrl.contrib.language.scaffolded.HINTS", "ladder")
    with pytest.raises(UserError, match=r"no question has hints in a column 'ladder'"):
        opened()
