"""Clip rules and baselines of other trainers: on policy, at their edges, and by finite differences."""

import pytest
import torch

from mmrl.core import Objective, PolicyOutputs, Rollouts, get
from mmrl.core.blocks.baselines import BestOfGroup, GroupMeanLive, LengthWeightedMean, MeanNormalised
from mmrl.core.blocks.clip import PolicyGradient
from mmrl.core.blocks.mismatch import OffPolicyGate
from mmrl.core.blocks.smooth_clip import ClipCov, hashed
from mmrl.core.loss import SequenceMean, metric_values
from tests.core.builders import random_rollouts

ON_POLICY = ("sapo", "dppo_tv", "dppo_kl", "gmpo", "luspo", "vespo", "kl_cov", "off_policy_mask", "dro", "maxrl")


def evaluated(objective, rollouts, logp):
    logp = logp.clone().requires_grad_()
    output = objective.loss(PolicyOutputs(logp), rollouts, objective.denominators(rollouts))
    return torch.autograd.grad(output.loss, logp)[0], metric_values(output.metrics)


@pytest.mark.parametrize("name", ON_POLICY)
def test_on_policy_every_rule_is_the_policy_gradient(name):
    rollouts = get(name).compute_advantages(random_rollouts(logp_rollout=None))
    plain = Objective("plain", clip=PolicyGradient(), aggregation=get(name).aggregation)
    expected, _ = evaluated(plain, rollouts, rollouts.logp_old)
    found, _ = evaluated(get(name), rollouts, rollouts.logp_old)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", ["sapo", "gmpo", "dro", "kl_cov"])
def test_gradients_are_those_of_the_loss(name):
    rollouts = get(name).compute_advantages(random_rollouts(logp_rollout=None))
    objective, counts = get(name), get(name).denominators(rollouts)
    moved = rollouts.logp_old + 0.3 * torch.sin(torch.arange(rollouts.mask.numel()).view_as(rollouts.mask).double())
    torch.autograd.gradcheck(
        lambda logp: objective.loss(PolicyOutputs(logp), rollouts, counts).loss, moved.requires_grad_()
    )


def test_clip_cov_leaves_out_as_many_as_asked_and_repeats():
    rule = ClipCov(low=1.0, high=1.0, share=0.05, cov_low=0.0, cov_high=99.0)
    logp = torch.linspace(-3, 0, 200, dtype=torch.float64).view(10, 20)
    advantage = torch.ones_like(logp)
    advantage[:5] = -1.0

    def dropped(logp):
        return rule(torch.zeros_like(logp), logp, advantage)[1]["policy/cov_dropped"]

    first = dropped(logp)
    assert first.sum() == 10
    assert torch.equal(first, dropped(logp))
    assert not torch.equal(first, dropped(logp + 1e-4))
    assert hashed(logp).unique().numel() == 200


def test_the_off_policy_gate_keeps_rows_to_imitate():
    rollouts = random_rollouts(logp_rollout=None)
    sign = torch.where(torch.arange(len(rollouts.group)) % 2 == 0, 1.0, -1.0).double()[:, None]
    rollouts = rollouts.replace(advantage=sign * rollouts.mask)
    objective = Objective("mine", clip=PolicyGradient(), aggregation=SequenceMean(), gate=OffPolicyGate(limit=0.1))
    near, _ = evaluated(objective, rollouts, rollouts.logp_old - 0.09)
    far, metrics = evaluated(objective, rollouts, rollouts.logp_old - 0.11)
    assert (near[rollouts.mask > 0] != 0).all()
    assert torch.equal(far[::2], near[::2])
    assert not far[1::2].any()
    assert 0 < metrics["policy/mismatch_rejected"] < 1


def rows(block, reward, group, lengths=None):
    reward, group = torch.tensor(reward, dtype=torch.float64), torch.tensor(group)
    lengths = torch.tensor(lengths or [1] * len(reward))
    mask = (torch.arange(int(lengths.max())) < lengths[:, None]).double()
    return block(Rollouts(group=group, mask=mask, logp_old=torch.zeros_like(mask), reward=reward))[:, 0].tolist()


def test_baselines_by_hand():
    pairs = [0, 0, 1, 1]
    # sum of length * reward over lengths: (1 * 3 + 0 * 1) / 4
    assert rows(LengthWeightedMean(), [1, 0, 0.5, 0.5], pairs, [3, 1, 2, 5]) == [0.25, -0.75, 0, 0]
    assert rows(MeanNormalised(eps=0.0), [1, 0, -1, 0.5], pairs) == [1, -1, 0, 0]
    assert rows(BestOfGroup(eps=0.0), [2, 2, 0, 1], pairs)[:2] == [0, 0]
    assert rows(BestOfGroup(eps=0.0), [2, 2, 0, 1], pairs)[3] == pytest.approx(2**0.5)
    assert rows(GroupMeanLive(), [1, 1, 0, 1], pairs) == [0, 0, -1, 1]
    assert rows(GroupMeanLive(), [1, 1, 1, 1], pairs) == [0, 0, 0, 0]


@pytest.mark.parametrize("block", [LengthWeightedMean, MeanNormalised, BestOfGroup, GroupMeanLive])
def test_a_failed_reward_and_a_row_alone_get_nothing(block):
    assert rows(block(), [1, float("nan"), 0, 1, 3], [0, 0, 1, 1, 2])[:2] == [0, 0]
    assert rows(block(), [1, 0, 3], [0, 0, 1])[2] == 0
