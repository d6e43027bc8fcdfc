"""Every recipe of the table with its own objective: it trains, repeats and resumes."""

from __future__ import annotations

import math

import pytest
import torch

from mmrl.recipes import RECIPES
from tests.contracts.domains import domain_of, run, weights


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_trains_repeats_and_resumes(name, tmp_path):
    domain = domain_of(name)
    for module in domain.needs:
        pytest.importorskip(module)
    config = domain.make_config(name, tmp_path)
    config.validate()
    whole, losses = run(config, tmp_path / "whole", steps=2)
    assert whole.recipe.describe() not in ("", name, whole.recipe.own_loss)
    assert losses
    assert all(math.isfinite(loss) for loss in losses)
    first, losses_again = run(config, tmp_path / "parts", steps=1)
    start = weights(first)
    second, losses_later = run(config, tmp_path / "parts", steps=2, resume=True)
    assert losses_again + losses_later == losses
    assert torch.equal(weights(whole), weights(second))
    assert not torch.equal(weights(second), start)
