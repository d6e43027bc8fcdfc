"""Every combination of TRL's GRPO options, as a composition of blocks: the same losses, gradients and advantages."""

import pytest
import torch

from mmrl.core import Objective, PolicyOutputs, Rollouts
from mmrl.core.blocks.advantage import GroupMean, GroupMeanGlobalStd, GroupMeanStd
from mmrl.core.blocks.clip import PpoClip, SequenceFullRatio, TokenRatio
from mmrl.core.blocks.divergence import K3
from mmrl.core.loss import FixedLength, SequenceMean, TokenMean
from tests.golden.numbers import assert_agrees, inputs_of, load

AGGREGATIONS = {
    "grpo": SequenceMean(),
    "bnpo": TokenMean(),
    "dapo": TokenMean(),
    "dr_grpo": FixedLength(load("trl_grpo").inputs["length"]),
}
RATIOS = {"token": TokenRatio(), "sequence": SequenceFullRatio()}
SCALES = {"group": GroupMeanStd(eps=1e-4), "batch": GroupMeanGlobalStd(eps=1e-4, ddof=1), "none": GroupMean()}
PEERS = load("trl_grpo").peers
LOSSES = [peer for peer in PEERS if "loss_type" in peer["options"]]
ADVANTAGES = [peer for peer in PEERS if "scale_rewards" in peer["options"]]


def name_of(peer):
    return "-".join(str(value) for value in peer["options"].values())


def test_all_combinations_are_there():
    assert len(LOSSES) == 4 * 2 * (2 * 2 + 1)
    assert {peer["options"]["scale_rewards"] for peer in ADVANTAGES} == set(SCALES)


@pytest.mark.parametrize("peer", LOSSES, ids=name_of)
def test_a_loss_is_trls(peer):
    b, options = inputs_of("trl_grpo"), peer["options"]
    objective = Objective(
        "mine",
        clip=PpoClip(high=options["high"]),
        aggregation=AGGREGATIONS[options["loss_type"]],
        ratio=RATIOS[options["level"]],
        kl=K3(options["beta"], clamp=False, importance=options["corrected"]) if options["beta"] else None,
    )
    objective.validate()
    rollouts = Rollouts(
        group=b.group,
        mask=b.mask,
        logp_old=b.logp_old,
        reward=b.reward,
        logp_ref=b.logp_ref,
        advantage=b.advantage[:, None] * b.mask,
    )
    logp = b.logp.requires_grad_()
    loss = objective.loss(PolicyOutputs(logp), rollouts, objective.denominators(rollouts)).loss
    (gradient,) = torch.autograd.grad(loss, logp)
    assert_agrees(loss, peer, "loss", size=float(gradient.abs().sum()))
    assert_agrees(gradient, peer, "gradient")


@pytest.mark.parametrize("peer", ADVANTAGES, ids=name_of)
def test_advantages_are_trls(peer):
    b = inputs_of("trl_grpo")
    rollouts = Rollouts(group=b.group, mask=b.mask, logp_old=b.logp_old, reward=b.reward)
    found = SCALES[peer["options"]["scale_rewards"]](rollouts)
    expected = torch.tensor(peer["advantage"], dtype=torch.float64)[:, None] * b.mask
    assert_agrees(found, peer | {"advantage": expected.tolist()}, "advantage")


def test_the_correction_changes_the_gradient_where_the_ratio_is_one():
    """As in TRL's documentation, the ratio is differentiated, so the term differs on policy too."""
    b = inputs_of("trl_grpo")
    rollouts = Rollouts(
        group=b.group, mask=b.mask, logp_old=b.logp, reward=b.reward, logp_ref=b.logp_ref, advantage=0 * b.mask
    )
    found = []
    for importance in (False, True):
        logp = b.logp.clone().requires_grad_()
        objective = Objective("mine", kl=K3(1.0, clamp=False, importance=importance))
        loss = objective.loss(PolicyOutputs(logp), rollouts, objective.denominators(rollouts)).loss
        found.append((float(loss.detach()), torch.autograd.grad(loss, logp)[0]))
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-12)
    # d/dlogp of r k3 at r = 1 is k3 + dk3 = logp - logp_ref, the score-function gradient of the reverse KL
    torch.testing.assert_close(found[1][1], (b.logp - b.logp_ref) * b.mask / b.mask.sum())
    assert not torch.allclose(found[0][1], found[1][1])
