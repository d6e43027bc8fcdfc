"""PAPO's terms against its public code."""

from __future__ import annotations

import pytest
import torch

from mmrl.core import PolicyOutputs, Rollouts, get
from mmrl.vlm.papo import PapoSettings, perception_terms
from tests.golden.numbers import assert_agrees, inputs_of, load


def token_mean(x, mask):
    return (x * mask).sum() / mask.sum()


BOTH = pytest.mark.xfail(
    strict=True, reason="the public code picks the largest terms before it clips them, PAPO here after"
)


@pytest.mark.parametrize("number", [0, 1, 2, pytest.param(3, marks=BOTH)])
def test_papo_is_its_public_code(number):
    b, peer = inputs_of("papo"), load("papo").peers[number]
    options = peer["options"]
    logp = b.logp.requires_grad_()
    settings = PapoSettings(
        token_share=options.get("kl_prcp_token_level_mask_top_p", 1.0), term_clip=options.get("kl_prcp_clipping")
    )
    objective = get("papo")
    rollouts = Rollouts(
        b.group, b.mask, b.logp_old, torch.zeros(12, dtype=torch.float64), logp_ref=b.logp_ref, advantage=b.advantage
    )
    loss = objective.loss(PolicyOutputs(logp), rollouts, objective.denominators(rollouts)).loss
    loss = loss - options["coef"] * token_mean(
        perception_terms(logp, b.logp_masked, b.mask, b.weight, settings), b.mask
    )
    # the entropies anneal with the weight of the perception term, 0.02 at first
    annealed = options["coef"] / 0.02
    loss = loss - annealed * options.get("aug_entropy_loss_coef", 0.0) * token_mean(b.logp_masked, b.mask)
    loss = loss - annealed * options.get("ori_entropy_loss_coef", 0.0) * token_mean(logp, b.mask)
    correct = b.mask * b.correct[:, None]
    loss = loss - options.get("sft_loss_coef", 0.0) * (logp * correct).sum() / correct.sum()
    (gradient,) = torch.autograd.grad(loss, logp)
    assert_agrees(loss, peer, "loss", size=float(gradient.abs().sum()))
    assert_agrees(gradient, peer, "gradient")
