"""Clip rules with bounds of their own against the authors' code, apart from the rows of the catalogue."""

import pytest
import torch

from mmrl.contrib.language.adaptive_temperature import tempered
from mmrl.contrib.rows.adaptive import BOUNDS, HapoClip
from mmrl.contrib.rows.tracked import DcpoClip
from mmrl.core import Objective, PolicyOutputs, Rollouts, get
from tests.golden.numbers import assert_agrees, inputs_of, load, tensor


def rollouts_of(b, advantage):
    return Rollouts(b.group, b.mask, b.logp_old, b.reward, advantage=advantage * b.mask)


@pytest.mark.parametrize("peer", load("dcpo_clip").peers, ids=lambda peer: str(peer["options"]["low"]))
def test_the_clip_of_dcpo_is_its_code(peer):
    b = inputs_of("dcpo_clip")
    objective = Objective("mine", clip=DcpoClip(**peer["options"]))
    rollouts, logp = rollouts_of(b, b.advantage), b.logp.requires_grad_()
    output = objective.loss(PolicyOutputs(logp), rollouts, objective.denominators(rollouts))
    (gradient,) = torch.autograd.grad(output.loss, logp)
    assert_agrees(output.loss, peer, "loss", size=float(gradient.abs().sum()))
    assert_agrees(gradient, peer, "gradient")
    assert output.metrics["policy/bound_high"].value > 1.2


@pytest.mark.parametrize("peer", load("bapo").peers, ids=lambda peer: str(peer["bounds"]))
def test_the_bounds_of_bapo_are_those_of_its_code(peer):
    b = inputs_of("bapo")
    objective = get("bapo").override(peer["changes"])
    rollouts = rollouts_of(b, tensor(peer["advantage"]))
    parts = [rollouts.select_groups(torch.tensor(groups)) for groups in ([0, 2], [1])]
    rows = [(rollouts.group != 1), (rollouts.group == 1)]
    surveys = [objective.survey(PolicyOutputs(b.logp[r]), part) for r, part in zip(rows, parts, strict=True)]
    settled = objective.settled(surveys, rollouts)
    assert [float(settled.extras[key][0]) for key in BOUNDS] == pytest.approx(peer["bounds"], rel=1e-12)


def test_the_temperature_of_hapo_is_that_of_its_code():
    b, peer = inputs_of("hapo"), load("hapo").peers[0]
    clip = HapoClip(**peer["changes"]["clip"])
    scale, logp = clip.scale_of(b.entropy_old, b.mask), b.logits.log_softmax(-1)
    drawn = tempered(logp, clip, scale, 0.05)
    # of two words, a temperature divides the difference of the logits
    first, last = (b.logits.argmax(-1, keepdim=True), b.logits.argmin(-1, keepdim=True))
    apart = [(x.gather(1, first) - x.gather(1, last))[1:, 0] for x in (logp, drawn)]
    found, expected = apart[0] / apart[1], tensor(peer["temperature"])[1:]
    # 1e-6 is added to the deviation there, and bounds entropies below
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0.0)
    assert expected.max() > 1.049
