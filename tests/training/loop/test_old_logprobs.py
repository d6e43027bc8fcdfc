"""One rule for old log-probs: where they come from, and the pass that each source needs or saves."""

from __future__ import annotations

import pytest
import torch

from mmrl.training.loop.old_logprobs import OldLogProbs
from mmrl.training.loop.settings import TrainerConfig
from tests.training.toy import ToyRecipe


@pytest.mark.parametrize(
    ("options", "source"),
    [
        ({}, OldLogProbs.UPDATE),
        ({"minibatches_per_step": 2}, OldLogProbs.PASS_BEFORE_UPDATE),
        ({"epochs": 2}, OldLogProbs.PASS_BEFORE_UPDATE),
        ({"old_logp": "sampler"}, OldLogProbs.SAMPLER),
        ({"old_logp": "sampler", "epochs": 2}, OldLogProbs.SAMPLER),
    ],
)
def test_source_of_a_configuration(options, source):
    assert OldLogProbs.of(TrainerConfig(**options)) is source


class CountingRecipe(ToyRecipe):
    has_loss_terms = False

    def __init__(self, config):
        super().__init__(config)
        self.passes: list[bool] = []

    def rollout(self, policy, tasks, generator):
        rollouts = super().rollout(policy, tasks, generator)
        return rollouts.replace(logp_old=rollouts.logp_old + 0.25)  # a sampler with other numbers than the policy

    def scores(self, policy, rollouts, outputs):
        if policy is not self.policy:
            return super().scores(policy, rollouts, outputs)
        self.passes.append(torch.is_grad_enabled())
        return super().scores(policy, rollouts, outputs)


@pytest.mark.parametrize(
    ("options", "passes", "ratio"),
    [
        ({}, [True], 1.0),
        ({"minibatches_per_step": 3}, [False, True, True, True], None),
        ({"old_logp": "sampler"}, [True], 0.7788),  # exp(-0.25)
    ],
)
def test_passes_and_ratio_of_each_source(make_trainer, options, passes, ratio):
    trainer = make_trainer(recipe=CountingRecipe, preset="dr_grpo", skip_steps_without_gradient=False, **options)
    rollouts, _ = trainer.collect()
    rollouts = trainer.recipe.compute_logprobs(trainer.policy, trainer.reference, rollouts)
    rollouts = trainer.recipe.advantages(rollouts, trainer.accelerator)
    metrics = trainer.updater.update(rollouts, 0)
    assert trainer.recipe.passes == passes
    if ratio is not None:
        assert metrics["policy/ratio_mean"] == pytest.approx(ratio, rel=1e-4)
