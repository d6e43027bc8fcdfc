"""Estimators of the divergence against verl."""

from __future__ import annotations

import pytest
import torch

from mmrl.core import regularizers
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
