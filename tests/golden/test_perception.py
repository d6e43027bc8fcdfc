"""PAPO's loss against its public code."""

import dataclasses

import pytest
import torch

from mmrl.core import PolicyOutputs, Rollouts, get
from mmrl.training.recipe import LossTerm, Step
from mmrl.vlm.methods.papo import CorrectLikelihood, PapoSettings, Perception, gamma_at
from tests.golden.numbers import PROGRESS, assert_agrees, inputs_of, load

STEPS = 4


def terms_of(options) -> tuple[list[LossTerm], Step]:
    """PAPO's terms, and the step at which the perception term has the weight of the peer's numbers."""
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
    step = Step(0 if options["coef"] == settings.gamma else STEPS // 2, STEPS)
    assert gamma_at(settings, step.number, step.total) == pytest.approx(options["coef"])
    likelihood = [CorrectLikelihood(settings.sft_coef, "exact")] if settings.sft_coef else []
    return [Perception(settings, get("papo").aggregation, 1.0, "exact"), *likelihood], step


@pytest.mark.parametrize("peer", load("papo").peers, ids=lambda peer: peer["case"])
def test_papo_is_its_public_code(peer):
    b, (terms, step) = inputs_of("papo", peer), terms_of(peer["options"])
    logp = b.logp.requires_grad_()
    rollouts = Rollouts(
        group=b.group,
        mask=b.mask,
        logp_old=b.logp_old,
        reward=b.reward,
        logp_ref=b.logp_ref,
        reward_terms={"exact": b.correct},
        extras={"papo_weight": b.weight, "logp_masked": b.logp_masked},
    )
    outputs, objective = PolicyOutputs(logp), get("papo").at(PROGRESS)
    rollouts = objective.compute_advantages(rollouts)
    assert_agrees(rollouts.advantage, peer, "advantage")
    counts = {name: number for term in terms for name, number in term.counts(rollouts).items()}
    denominators = dataclasses.replace(objective.denominators(rollouts), others=counts)
    loss = objective.loss(outputs, rollouts, denominators).loss
    for term in terms:
        loss = loss + sum(term(None, rollouts, outputs, denominators, step).terms.values())
    (gradient,) = torch.autograd.grad(loss, logp)
    assert_agrees(loss, peer, "loss", size=float(gradient.abs().sum()))
    assert_agrees(gradient, peer, "gradient")
