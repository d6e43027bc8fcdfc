"""ArCHer's critics, averages and actor against its public code."""

import torch

from mmrl.contrib.agents.archer import critic_loss, default_objective, move_average, targets, utterance_advantages
from mmrl.core.loss import Denominators
from mmrl.core.objectives.objective import PolicyOutputs
from mmrl.core.rollouts import Rollouts
from mmrl.training.objectives import make_objective
from tests.golden.numbers import assert_agrees, inputs_of, load

PEER = load("archer").peers[0]


def test_critics():
    b = inputs_of("archer")
    q, v = b.q.requires_grad_(), b.v.requires_grad_()
    loss = critic_loss(q, v, *targets(b.own_q, b.next_v, b.reward, b.done, float(b.gamma)))
    loss.backward()
    assert_agrees(loss, PEER, "critic_loss")
    assert_agrees(q.grad, PEER, "q_gradient")
    assert_agrees(v.grad, PEER, "v_gradient")


def test_average():
    b = inputs_of("archer")
    average, critic = (torch.nn.ParameterList([torch.nn.Parameter(x)]) for x in (b.averages, b.weights))
    move_average(average, critic, float(b.tau))
    assert_agrees(average[0].detach(), PEER, "average")


def test_actor():
    b = inputs_of("archer")
    logp, mask = b.token_logp.requires_grad_(), torch.ones(6, 3, dtype=torch.float64)
    advantage = utterance_advantages(b.own_q, b.v)
    rows = Rollouts(torch.arange(6), mask, torch.zeros(6, 3), b.reward, advantage=advantage[:, None] * mask)
    loss = make_objective(default_objective()).loss(PolicyOutputs(logp), rows, Denominators(18.0, 6.0, 3.0, 6.0)).loss
    loss.backward()
    assert_agrees(loss, PEER, "actor_loss")
    assert_agrees(logp.grad, PEER, "actor_gradient")
