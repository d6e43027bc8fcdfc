"""APO's factors and loss against View-R1."""

import pytest
import torch

from mmrl.core import PolicyOutputs, Rollouts, get
from mmrl.vlm.methods.apo import DADS_SHAPES, difficulty, kl_weights, length_multipliers
from tests.golden.numbers import FLOAT32, PROGRESS, assert_agrees, inputs_of, load, tensor

STCR_BASE = 1.00001
"""Value in the public code."""


def test_factors_are_those_of_the_public_code():
    b, peer = inputs_of("apo"), load("apo").peers[0]
    hardness = difficulty(b.reward, b.group)
    assert_agrees(hardness, peer, "difficulty")
    assert_agrees(length_multipliers(b.lengths, b.reward, b.group, STCR_BASE), peer, "length_factor", relative=FLOAT32)
    advantage = tensor(peer["advantage"])[:, 0]
    assert_agrees(kl_weights(advantage, hardness, DADS_SHAPES["one_minus_exp"]), peer, "kl_weight")


@pytest.mark.parametrize("peer", load("apo").peers, ids=["near", "far"])
def test_the_loss_is_that_of_the_public_code(peer):
    b, objective = inputs_of("apo", peer), get("apo").at(PROGRESS)
    rollouts = Rollouts(
        b.group, b.mask, b.logp_old, b.reward, logp_ref=b.logp_ref, extras={"kl_weight": tensor(peer["kl_weight"])}
    )
    rollouts = objective.compute_advantages(rollouts)
    factor = tensor(peer["length_factor"])[:, None]
    assert_agrees(rollouts.advantage * factor, peer, "advantage")
    rollouts = rollouts.replace(advantage=rollouts.advantage * factor)
    logp = b.logp.requires_grad_()
    loss = objective.loss(PolicyOutputs(logp), rollouts, objective.denominators(rollouts)).loss
    (gradient,) = torch.autograd.grad(loss, logp)
    assert_agrees(loss, peer, "loss", size=float(gradient.abs().sum()))
    assert_agrees(gradient, peer, "gradient")
