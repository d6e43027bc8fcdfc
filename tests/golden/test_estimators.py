"""Estimators of the divergence, and of returns across tool output, against verl."""

import pytest
import torch

from mmrl.core import Rollouts
from mmrl.core.blocks import divergence as regularizers
from mmrl.core.blocks.credit import WhitenedReturns
from tests.golden.numbers import assert_agrees, inputs_of, load


@pytest.mark.parametrize("name", ["k1", "k2", "k3", "k1p", "k3p"])
def test_estimators_are_those_of_verl(name):
    b, (peer,) = inputs_of("kl_estimators"), load("kl_estimators").peers
    logp = b.logp.requires_grad_()
    value = getattr(regularizers, name)(logp, b.logp_ref)
    (gradient,) = torch.autograd.grad(value.sum(), logp)
    expected = peer[name] | {"program": peer["program"], "relative": peer["relative"]}
    assert_agrees(value, expected, "value")
    assert_agrees(gradient, expected, "gradient")


def test_returns_cross_tool_output_as_in_verl():
    b, (peer,) = inputs_of("tool_output"), load("tool_output").peers
    rollouts = Rollouts(group=b.group, mask=b.mask, logp_old=b.logp_old, reward=b.reward)
    assert_agrees(WhitenedReturns(gamma=b.gamma)(rollouts), peer, "advantage")


@pytest.mark.parametrize("beta", [0.0, 0.1, 0.5, 1.0])
def test_the_divergence_of_gkd_is_that_of_trl(beta):
    b, (peer,) = inputs_of("gkd"), load("gkd").peers
    logits = b.logits.requires_grad_()
    logp, logp_teacher = ((x / b.temperature).log_softmax(-1) for x in (logits, b.logits_teacher))
    loss = regularizers.generalized_jsd(logp, logp_teacher, beta)[b.labels != -100].mean()
    (gradient,) = torch.autograd.grad(loss, logits)
    expected = peer[f"beta {beta:g}"] | {"program": peer["program"], "relative": peer["relative"]}
    assert_agrees(loss, expected, "loss")
    assert_agrees(gradient, expected, "gradient")
