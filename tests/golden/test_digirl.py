"""DigiRL's returns, filters and losses against its public code."""

import pytest
import torch

from mmrl.agents.methods.digirl import (
    clamp_logp,
    code_advantages,
    instruction_advantages,
    keep_best,
)
from mmrl.agents.methods.digirl_critics import discounted_returns, instruction_loss, step_loss
from tests.golden.numbers import assert_agrees, inputs_of, load


@pytest.fixture
def peer():
    return load("digirl").peers[0]


@pytest.fixture
def b():
    return inputs_of("digirl")


def test_returns(b, peer):
    for rewards, expected in zip(b.rewards.tolist(), peer["returns"], strict=True):
        assert discounted_returns(rewards, float(b.gamma)).tolist() == pytest.approx(expected, rel=1e-12)


def test_filters(b, peer):
    value = b.instruction_logits.softmax(-1)[:, 1]
    assert keep_best(instruction_advantages(b.totals, value)).tolist() == peer["kept"]
    assert keep_best(b.totals).tolist() == peer["kept_by_reward"]
    assert keep_best(b.rare).tolist() == peer["kept_of_rare"] == [True] * 12, "the quantile is 0, which all reach"


def test_losses_of_the_critics(b, peer):
    logits, after = b.logits.requires_grad_(), b.next_logits.requires_grad_()
    succeeds = (b.mc_return > 0).long()
    step_loss(tuple(logits), tuple(after), torch.ones(8, dtype=torch.bool), succeeds).backward()
    assert_agrees(logits.grad, peer, "step_gradient")
    assert_agrees(after.grad, peer, "step_next_gradient")
    logits = b.instruction_logits.requires_grad_()
    loss = instruction_loss(logits, (b.totals > 0).long())
    loss.backward()
    assert_agrees(loss, peer, "instruction_loss")
    assert_agrees(logits.grad, peer, "instruction_gradient")


def test_loss_of_the_actor(b, peer):
    value, after = (torch.minimum(*logits.softmax(-1)[..., 1]) for logits in (b.logits, b.next_logits))
    kept = code_advantages(value, after, b.reward, b.mc_return) > 0
    logits = b.token_logits.requires_grad_()
    logp = logits.log_softmax(-1).gather(2, b.token[:, :, None])[:, :, 0]
    steps = (clamp_logp(logp) * b.mask).sum(1)
    loss = -(steps * kept).sum() / len(steps)
    loss.backward()
    assert_agrees(loss, peer, "actor_loss")
    assert_agrees(logits.grad, peer, "actor_gradient")
    assert [bool((row != 0).any()) for row in logits.grad] == peer["kept_steps"]
    assert not kept.all()
