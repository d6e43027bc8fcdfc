"""Every recipe, those of contrib too, with its own objective: it trains, repeats and resumes."""

import math

import pytest
import torch
from accelerate.state import AcceleratorState

from mmrl.recipes import RECIPES, all_recipes
from mmrl.training.processes import Streams
from mmrl.training.recipe import Step
from tests.contracts.domains import domain_of, make_low, run, weights
from tests.contracts.unordered import UnorderedSums


@pytest.mark.parametrize("name", all_recipes())
def test_a_recipe_trains_repeats_and_resumes(name, tmp_path):
    domain = domain_of(name)
    for module in domain.needs:
        pytest.importorskip(module)
    config = domain.make_config(name, tmp_path)
    config.validate()
    with torch.autograd.set_detect_anomaly(True, check_nan=False), UnorderedSums() as sums:
        whole, losses = run(config, tmp_path / "whole", steps=2)
    assert not sums.found
    assert whole.recipe.describe() not in ("", name, whole.recipe.own_loss)
    assert losses
    assert all(math.isfinite(loss) for loss in losses)
    first, losses_again = run(config, tmp_path / "parts", steps=1)
    start = weights(first)
    second, losses_later = run(config, tmp_path / "parts", steps=2, resume=True)
    assert losses_again + losses_later == losses
    assert torch.equal(weights(whole), weights(second))
    assert not torch.equal(weights(second), start)


@pytest.fixture
def own_precision():
    """Runs of a test choose their arithmetic."""
    AcceleratorState._reset_state()
    yield
    AcceleratorState._reset_state()


@pytest.mark.slow
@pytest.mark.usefixtures("own_precision")
@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_trains_in_fp16(name, tmp_path, monkeypatch):
    config = make_low(name, "fp16", tmp_path, monkeypatch)
    trainer, losses = run(config, tmp_path / "run", steps=2)
    assert all(math.isfinite(loss) for loss in losses)
    updater = trainer.updater
    assert updater.skipped == 0
    assert updater.optimiser_step > 0, f"{updater.scale.overflows} overflows"
    assert updater.moved


@pytest.mark.parametrize("name", ["sft", "preference", pytest.param("masked_sft", marks=pytest.mark.slow)])
def test_a_batch_without_a_row_that_cannot_be_used_has_the_places_of_the_others(name, tmp_path):
    """Several processes deal minibatches by them."""
    recipe = RECIPES[name].load_recipe_class()(domain_of(name).make_config(name, tmp_path))
    tasks, encode = recipe.train_tasks[:3], recipe.encode
    recipe.encode = lambda policy, asked, **options: encode(policy, [asked[0], asked[2]], **options)
    assert recipe.batch(recipe.policy, tasks, Streams(0), Step()).places == [0, 2]
    recipe.close()
