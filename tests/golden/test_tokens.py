"""Objectives whose decisions are tokens, against verl, TRL and the papers' own code."""

import pytest
import torch

from mmrl.core import PolicyOutputs, Rollouts, all_objectives, get
from tests.golden.numbers import PAPERS, PROGRESS, assert_agrees, inputs_of, load, tensor

OWN_TESTS = {"papo", "apo", "srpo", "icepop"}
"""Rows whose recipes do a part of the computation, or whose files hold more than the row."""
TOKENS = {"group", "mask", "reward", "logp_old", "logp", "values_new"}
STANDARD = [name for name in PAPERS if load(name).inputs.keys() >= TOKENS]
METHODS = [name for name in all_objectives() if name in STANDARD and name not in OWN_TESTS]
CASES = [(name, i) for name in METHODS for i in range(len(load(name).peers))]
GIVEN = ("logp_ref", "logp_rollout", "values", "turn")


def compute(name, changes, inputs=None):
    """Advantages, loss and gradients of a row of the catalogue, with changes, on inputs, by default its golden file's.

    Optional inputs: further fields of rollouts in GIVEN, their "extras", "reward_terms", "entropy_old" (at sampling
    time), "entropy" and "kl_old" of the policy's outputs, and "before", the rewards of earlier steps (S, B),
    with "entropy_before" (S, B, T).
    """
    b = inputs or vars(inputs_of(name))
    named = {key: {k: tensor(v) for k, v in b.get(key, {}).items()} for key in ("extras", "reward_terms")}
    fields = {key: b[key] for key in GIVEN if key in b}
    standard = (b[key] for key in ("group", "mask", "logp_old", "reward"))
    rollouts = Rollouts(*standard, entropy=b.get("entropy_old"), **named, **fields)
    objective = get(name).override(changes).at(PROGRESS)
    state = objective.state()
    for step, reward in enumerate(b.get("before", ())):
        entropy = b["entropy_before"][step] if "entropy_before" in b else rollouts.entropy
        objective.compute_advantages(rollouts.replace(reward=reward, entropy=entropy), state)
    rollouts = objective.compute_advantages(rollouts, state)
    logp, values = b["logp"].requires_grad_(), b["values_new"].requires_grad_()
    outputs = PolicyOutputs(logp, values=values, entropy=b.get("entropy"), kl_old=b.get("kl_old"))
    loss = objective.loss(outputs, rollouts, objective.denominators(rollouts)).loss
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
    peer = load(name).peers[number]
    compare(name, peer, inputs_of(name, peer))


def compare(name, peer, inputs):
    """Compare a row with a peer on these inputs."""
    found = compute(name, peer.get("changes", {}), vars(inputs))
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
