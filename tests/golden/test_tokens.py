"""Objectives whose decisions are tokens, against verl, TRL and the papers' own code."""

from __future__ import annotations

import pytest
import torch

from mmrl.core import PolicyOutputs, Rollouts, get
from tests.golden.numbers import assert_agrees, inputs_of, load, tensor

METHODS = (
    "grpo",
    "dr_grpo",
    "dapo",
    "rloo",
    "reinforce_pp",
    "reinforce_pp_baseline",
    "gspo",
    "cispo",
    "ppo",
    "aepo",
    "arpo",
)
CASES = [(name, i) for name in METHODS for i in range(len(load(name).peers))]


def compute(name):
    """Advantages, loss and gradients of a row of the catalogue on the inputs of its golden file."""
    b = inputs_of(name)
    rollouts = Rollouts(
        group=b.group, mask=b.mask, logp_old=b.logp_old, reward=b.reward, logp_ref=b.logp_ref, values=b.values
    )
    objective = get(name)
    rollouts = objective.compute_advantages(rollouts)
    logp, values = b.logp.requires_grad_(), b.values_new.requires_grad_()
    loss = objective.loss(PolicyOutputs(logp, values=values), rollouts, objective.denominators(rollouts)).loss
    gradient, values_gradient = torch.autograd.grad(loss, [logp, values], allow_unused=True)
    return {
        "advantage": rollouts.advantage,
        "returns": rollouts.returns,
        "loss": loss,
        "gradient": gradient,
        "gradient_values": values_gradient,
    }


@pytest.mark.parametrize(("name", "number"), CASES)
def test_a_method_is_its_peers(name, number):
    peer, found = load(name).peers[number], compute(name)
    compared = [key for key in found if key in peer]
    assert compared
    for key in compared:
        # A loss is a sum of terms that cancel; each is about as large as its gradient.
        assert_agrees(found[key], peer, key, size=float(found["gradient"].abs().sum()) if key == "loss" else 0.0)


def test_the_inputs_reach_every_branch_of_the_bounds():
    b, advantage = inputs_of("dapo"), tensor(load("dapo").peers[0]["advantage"])
    ratio = (b.logp - b.logp_old).exp()
    trained = b.mask > 0
    assert (trained & (advantage > 0) & (ratio > 1.28)).any()
    assert (trained & (advantage > 0) & (ratio < 0.8)).any()
    assert (trained & (advantage < 0) & (ratio > 1.28) & (ratio < 3)).any()
    assert (trained & (advantage < 0) & (ratio < 0.8)).any()
    assert (trained & (advantage < 0) & (ratio > 3)).any()
    assert (trained & (ratio > 5)).any()
    assert (trained & (advantage == 0)).any()
