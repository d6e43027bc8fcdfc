"""PAPO's loss against its public code."""

from __future__ import annotations

import pytest
import torch

from mmrl.core import PolicyOutputs, Rollouts, get
from mmrl.rewards import RewardConfig
from mmrl.training.loop.settings import TrainerConfig
from mmrl.vlm.papo import PapoConfig, PapoRecipe, PapoSettings
from tests.golden.numbers import assert_agrees, inputs_of, load

STEPS = 4


def recipe_of(options) -> PapoRecipe:
    """The recipe without its model, at the step where the perception term weighs what it does in the peer's numbers."""
    settings = PapoSettings(
        gamma=0.02,
        schedule="annealing",
        annealing_ratio=1.0,
        token_share=options.get("kl_prcp_token_level_mask_top_p", 1.0),
        term_clip=options.get("kl_prcp_clipping"),
        entropy_policy=options.get("ori_entropy_loss_coef", 0.0),
        entropy_masked=options.get("aug_entropy_loss_coef", 0.0),
        sft_coef=options.get("sft_loss_coef", 0.0),
    )
    recipe = object.__new__(PapoRecipe)
    recipe.config = PapoConfig(papo=settings, rewards=[RewardConfig(name="exact")], trainer=TrainerConfig(steps=STEPS))
    recipe.objective, recipe._step = get("papo"), 0 if options["coef"] == settings.gamma else STEPS // 2
    assert recipe.gamma == pytest.approx(options["coef"])
    return recipe


@pytest.mark.parametrize("peer", load("papo").peers, ids=lambda peer: peer["case"])
def test_papo_is_its_public_code(peer):
    b, recipe = inputs_of("papo"), recipe_of(peer["options"])
    logp = b.logp.requires_grad_()
    rollouts = Rollouts(
        group=b.group,
        mask=b.mask,
        logp_old=b.logp_old,
        reward=b.reward,
        logp_ref=b.logp_ref,
        advantage=b.advantage,
        reward_terms={"exact": b.correct},
        extras={"papo_weight": b.weight, "logp_masked": b.logp_masked},
    )
    outputs, denominators = PolicyOutputs(logp), recipe.denominators(rollouts)
    loss = recipe.objective.loss(outputs, rollouts, denominators).loss
    for term in recipe.loss_terms(None, rollouts, outputs, denominators).terms.values():
        loss = loss + term
    (gradient,) = torch.autograd.grad(loss, logp)
    assert_agrees(loss, peer, "loss", size=float(gradient.abs().sum()))
    assert_agrees(gradient, peer, "gradient")
