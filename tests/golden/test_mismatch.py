"""Weights and gates between sampler and trainer, against verl and TRL."""

import pytest
import torch

from mmrl.core import Objective, PolicyOutputs, Rollouts, get
from mmrl.core.blocks import BLOCKS
from mmrl.core.blocks.clip import PpoClip
from mmrl.core.loss import SequenceMean, metric_values
from tests.golden.numbers import assert_agrees, inputs_of, load, tensor

PEERS = load("icepop").peers


def rollouts_of(b, **changes):
    fields = {"group": b.group, "mask": b.mask, "logp_old": b.logp_old, "reward": b.reward}
    return Rollouts(**fields, logp_rollout=b.logp_rollout, **changes)


def evaluated(objective, rollouts, logp):
    """Loss, its gradient and the metrics."""
    logp = logp.clone().requires_grad_()
    output = objective.loss(PolicyOutputs(logp), rollouts, objective.denominators(rollouts))
    return output.loss, torch.autograd.grad(output.loss, logp)[0], metric_values(output.metrics)


def name_of(peer):
    options = peer.get("options") or peer.get("gate") or {"row": peer.get("row")}
    return "-".join([peer["program"].split()[0], *map(str, options.values())])


@pytest.mark.parametrize("peer", [peer for peer in PEERS if "row" in peer], ids=["out of bounds", "near bounds"])
def test_icepop_is_verls(peer):
    b = inputs_of("icepop", peer)
    rollouts = get("icepop").compute_advantages(rollouts_of(b))
    loss, gradient, metrics = evaluated(get("icepop"), rollouts, b.logp)
    assert_agrees(rollouts.advantage, peer, "advantage")
    assert_agrees(loss, peer, "loss", size=float(gradient.abs().sum()))
    assert_agrees(gradient, peer, "gradient")
    assert 0 < metrics["policy/mismatch_rejected"] < 0.2


@pytest.mark.parametrize("peer", [peer for peer in PEERS if "options" in peer], ids=name_of)
def test_a_weight_is_its_peers(peer):
    b, options = inputs_of("icepop"), dict(peer["options"])
    block = BLOCKS["correction"][options.pop("kind")](**options)
    difference = torch.where(b.mask > 0, b.logp_old - b.logp_rollout, 0.0)
    assert_agrees(block(difference, b.mask) * b.mask, peer, "weight")
    if "loss" not in peer:
        return
    objective = Objective("mine", clip=PpoClip(), aggregation=SequenceMean(), correction=block)
    objective.validate()
    advantage = tensor(PEERS[0]["advantage"])
    loss, gradient, metrics = evaluated(objective, rollouts_of(b, advantage=advantage), b.logp)
    assert_agrees(loss, peer, "loss", size=float(gradient.abs().sum()))
    assert_agrees(gradient, peer, "gradient")
    weight = tensor(peer["weight"])
    assert metrics["policy/mismatch_weight"] == pytest.approx(float(weight.sum() / b.mask.sum()), rel=1e-12)


@pytest.mark.parametrize("peer", [peer for peer in PEERS if "gate" in peer], ids=name_of)
def test_a_gate_and_the_divergence_are_verls(peer):
    b, options = inputs_of("icepop"), dict(peer["gate"])
    gate = BLOCKS["gate"][options.pop("kind")](**options)
    difference = torch.where(b.mask > 0, b.logp_old - b.logp_rollout, 0.0)
    assert (gate(difference, b.mask) * b.mask).tolist() == peer["kept"]
    objective = Objective("mine", gate=gate)
    metrics = evaluated(objective, rollouts_of(b, advantage=b.mask), b.logp)[2]
    assert_agrees(metrics["policy/mismatch_rejected"], peer, "rejected")
    assert_agrees(metrics["policy/mismatch_kl"], peer, "kl")
    assert 0 < peer["rejected"] < 1


def test_the_inputs_reach_both_bounds_at_each_level():
    found = {(*peer["options"].values(),): tensor(peer["weight"]) for peer in PEERS if "options" in peer}
    mask = inputs_of("icepop").mask > 0
    for level in ("token", "sequence"):
        assert (found["truncated", level, 0.5, 2.0][mask] == 0.5).any()
        assert (found["truncated", level, 0.5, 2.0][mask] == 2.0).any()
        assert (found["masked", level, None, 3.0][mask] == 0).any()
