"""Every preference objective of the catalogue and of contrib in every domain that learns from pairs."""

import math
import re

import pytest
import torch

from mmrl.core import all_preferences, get_preference
from mmrl.core.blocks.preference import DecisionScore
from mmrl.training.objectives import SCORES, PreferenceConfig
from tests.contracts.domains import domain_of, run, weights

OFTEN = ("dpo", "ipo", "rpo", "refuel", "diffusion_dpo", "orpo", "kto")
"""One row of each shape: with and without reference, likelihood, scores and decisions as pairs; the rest is slow."""
LACKING = {
    "preference": {"logp_previous", "own_answers"},
    "diffusion_dpo": {"logp_previous", "own_answers", "kl_baseline"},
    "online_preference": set(),
}
CASES = [
    pytest.param(recipe, row, marks=[] if row in OFTEN and recipe != "online_preference" else pytest.mark.slow)
    for recipe in ("preference", "diffusion_dpo", "online_preference")
    for row in all_preferences()
]


@pytest.mark.parametrize(("recipe", "row"), CASES)
def test_a_row_trains_or_is_refused(recipe, row, tmp_path):
    domain = domain_of(recipe)
    for module in domain.needs:
        pytest.importorskip(module)
    config = domain.make_config(recipe, tmp_path)
    config.objective = PreferenceConfig(preset=row)
    if recipe != "diffusion_dpo" and isinstance(get_preference(row).score, DecisionScore):
        with pytest.raises(ValueError, match="noisy versions of images"):
            config.validate()
        return
    if missing := get_preference(row).needs & LACKING[recipe]:
        with pytest.raises(ValueError, match=re.escape(SCORES[min(missing)])):
            config.validate()
        return
    config.validate()
    trainer, losses = run(config, tmp_path / "whole", steps=1)
    assert len(losses) == 1
    assert math.isfinite(losses[0])
    start = type(trainer.recipe)(config)
    before = torch.cat([p.detach().flatten() for p in start.policy.parameters() if p.requires_grad])
    start.close()
    assert not torch.equal(weights(trainer), before)
