"""Every recipe of the table with its own objective: it trains, repeats and resumes."""

from __future__ import annotations

import math

import pytest
import torch
from accelerate.state import AcceleratorState

from mmrl.recipes import RECIPES
from mmrl.training.processes import make_accelerator, seed_everything
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


@pytest.fixture
def half_precision():
    """Arithmetic of fp16 in the runs of a test."""
    AcceleratorState._reset_state()
    yield lambda: make_accelerator("fp16")
    AcceleratorState._reset_state()


@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_trains_in_fp16(name, tmp_path, monkeypatch, half_precision):
    domain = domain_of(name)
    for module in domain.needs:
        pytest.importorskip(module)
    config = domain.make_config(name, tmp_path)
    config.trainer.mixed_precision = "fp16"
    config.evaluation.at_start = config.evaluation.at_end = False
    config.validate()
    monkeypatch.setattr("tests.contracts.domains.make_accelerator", half_precision)
    monkeypatch.setattr("mmrl.training.loss_scale.START", 1.0)  # some have gradients above 1e5
    seed_everything(0)
    trainer, losses = run(config, tmp_path / "run", steps=2)
    assert all(math.isfinite(loss) for loss in losses)
    updater = trainer.updater
    assert updater.skipped == 0
    assert updater.optimiser_step > 0, f"{updater.scale.overflows} overflows"
    assert updater.moved
