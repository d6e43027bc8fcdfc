"""One rule for old log-probs: their source, and the pass that each source needs or saves."""

import functools

import pytest
import torch

from mmrl.training.recipe import Step
from mmrl.training.update import update_constants
from tests.training.toy import ToyRecipe


class CountingRecipe(ToyRecipe):
    own_loss = ""

    def __init__(self, config):
        super().__init__(config)
        self.passes: list[bool] = []

    def rollout(self, policy, tasks, streams, step):
        rollouts = super().rollout(policy, tasks, streams, step)
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
        ({"epochs": 2}, [False, True, True], None),
        ({"old_logp": "sampler"}, [True], 0.7788),  # exp(-0.25)
        ({"old_logp": "sampler", "epochs": 2}, [True, True], None),
    ],
)
def test_passes_and_ratio_of_each_source(make_trainer, options, passes, ratio):
    trainer = make_trainer(recipe=CountingRecipe, preset="dr_grpo", skip_steps_without_gradient=False, **options)
    rollouts, _ = trainer.collect()
    rollouts = update_constants(trainer.recipe, trainer.policy, trainer.reference, rollouts, Step())
    rollouts = trainer.recipe.advantages(rollouts, trainer.accelerator, Step())
    metrics = trainer.updater.update(rollouts, Step(0))
    assert trainer.recipe.passes == passes
    if ratio is not None:
        assert metrics["policy/ratio_mean"] == pytest.approx(ratio, rel=1e-4)
    # where the update's own scores are the old ones, their distance is no measurement
    assert ("policy/kl_old" in metrics) == bool(options)
    assert not any(name.startswith("policy/mismatch") for name in metrics)


class Corrected(CountingRecipe):
    def __init__(self, config, blocks):
        super().__init__(config)
        self.objective = self.objective.override(blocks)


TIS, GATE = {"correction": {"kind": "truncated"}}, {"gate": {"kind": "geometric"}}


@pytest.mark.parametrize(
    ("blocks", "options", "passes", "weight"),
    [
        (TIS, {}, [True], 0.7788),
        (TIS, {"old_logp": "auto"}, [True], 0.7788),
        (TIS, {"epochs": 2}, [False, True, True], 0.7788),
        (GATE, {}, [True], 0.0),
        (GATE, {"old_logp": "sampler"}, [True], 0.0),
        ({"gate": {"kind": "geometric", "low": 0.7}}, {"old_logp": "sampler"}, [True], 1.0),
    ],
)
def test_a_sampler_with_other_numbers_is_corrected_for(make_trainer, blocks, options, passes, weight):
    recipe = functools.partial(Corrected, blocks=blocks)
    trainer = make_trainer(recipe=recipe, preset="dr_grpo", skip_steps_without_gradient=False, **options)
    rollouts, _ = trainer.collect()
    rollouts = update_constants(trainer.recipe, trainer.policy, trainer.reference, rollouts, Step())
    rollouts = trainer.recipe.advantages(rollouts, trainer.accelerator, Step())
    metrics = trainer.updater.update(rollouts, Step(0))
    assert trainer.recipe.passes == passes
    assert metrics["policy/mismatch_weight"] == pytest.approx(weight, rel=1e-4)
    assert metrics["policy/mismatch_rejected"] == float(weight == 0)
    assert metrics["policy/mismatch_kl"] == pytest.approx(0.7788 - 1 + 0.25, rel=1e-3)
    assert (metrics["optim/grad_norm"] == 0) == (weight == 0)


def test_entropies_before_the_update_are_scored_where_a_block_needs_them(make_trainer):
    recipe = functools.partial(Corrected, blocks={"weight": {"kind": "top_entropy", "share": 0.5}})
    trainer = make_trainer(recipe=recipe, preset="dr_grpo")
    rollouts, _ = trainer.collect()
    rollouts = update_constants(trainer.recipe, trainer.policy, trainer.reference, rollouts, Step())
    assert rollouts.entropy.shape == rollouts.mask.shape
    metrics = trainer.updater.update(trainer.recipe.advantages(rollouts, trainer.accelerator, Step()), Step(0))
    assert 0 < metrics["policy/weight_mean"] <= 1
