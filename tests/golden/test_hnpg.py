"""HNPG's natural-gradient step: its public code, closed forms, and a matrix that is written out."""

import math

import pytest
import torch
from torch import Tensor, nn

from mmrl.training.optimizer import Rows, conjugate_gradients, natural_step
from mmrl.training.settings import TrustRegionConfig
from tests.golden.numbers import assert_agrees, inputs_of, load

PEER = load("hnpg").peers[0]
B = inputs_of("hnpg")


class Gaussian:
    """The golden file's policy, and its actions at the points of a quadrature, whose Fisher matrix is the exact one."""

    def __init__(self) -> None:
        self.weights = [nn.Parameter(getattr(B, name).clone()) for name in ("first", "bias", "second", "log_std")]
        self.states = B.states.repeat_interleave(len(B.points), 0)
        mean = self.mean(slice(None)).detach()
        self.actions = mean + B.log_std.exp() * B.points.repeat(len(B.states))[:, None]

    def mean(self, rows: slice) -> Tensor:
        first, bias, second, _ = self.weights
        return torch.tanh(self.states[rows] @ first + bias) @ second

    def logp(self, rows: slice = slice(None)) -> Tensor:
        log_std = self.weights[3]
        apart = (self.actions[rows] - self.mean(rows)) * (-log_std).exp()
        return (-0.5 * apart.square() - log_std - 0.5 * math.log(2 * math.pi))[:, 0]

    def gradient(self, advantage: Tensor) -> Tensor:
        found = torch.autograd.grad(-(advantage * self.logp()).mean(), self.weights)
        return torch.cat([part.flatten() for part in found])

    def rows(self, cuts: list[int]) -> Rows:
        ends = [*cuts, len(self.states)]
        parts = [lambda own=slice(a, b): self.logp(own) for a, b in zip([0, *cuts], ends, strict=True)]
        return Rows(self.weights, parts, lambda part: part)


def test_conjugate_gradients():
    assert_agrees(conjugate_gradients(lambda v: B.matrix @ v, B.target, 3), PEER, "solved")
    whole = conjugate_gradients(lambda v: B.matrix @ v, B.target, 9)
    torch.testing.assert_close(B.matrix @ whole, B.target)


@pytest.mark.parametrize("cuts", [[], [5, 20]])
def test_steps(cuts):
    steps, shares = [], []
    for max_kl in B.max_kl.tolist():
        policy = Gaussian()
        rows = policy.rows(cuts)
        place = rows.place
        step, share = natural_step(rows, policy.gradient(B.advantage), B.advantage, TrustRegionConfig(max_kl=max_kl))
        assert torch.equal(rows.place, place)
        steps.append(step)
        shares.append(share)
    assert_agrees(torch.stack(steps), PEER, "step")
    assert shares[0] == 1
    assert 0 < shares[1] < 1, "the line search of the second case goes back"


def test_products_with_the_fisher_matrix():
    policy = Gaussian()
    each = []
    for logp in policy.logp():
        found = torch.autograd.grad(logp, policy.weights, retain_graph=True)
        each.append(torch.cat([part.flatten() for part in found]))
    scores = torch.stack(each)
    direction = torch.linspace(-1, 1, scores.shape[1], dtype=torch.float64)
    expected = scores.T @ scores @ direction / len(scores)
    torch.testing.assert_close(policy.rows([4]).fisher(direction), expected, rtol=1e-8, atol=1e-8)


def test_a_softmax_bandit_has_the_advantages_as_its_natural_gradient():
    logits = nn.Parameter(torch.log(torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)))
    arms = torch.tensor([0] * 5 + [1] * 3 + [2] * 2)  # as often as they are probable
    value = torch.tensor([1.0, 3.0, -2.0], dtype=torch.float64)
    advantage = (value - value @ logits.softmax(0).detach())[arms]
    gradient = torch.autograd.grad(-(advantage * logits.log_softmax(0)[arms]).mean(), logits)[0]
    rows = Rows([logits], [lambda: logits.log_softmax(0)[arms]], lambda part: part)
    step, share = natural_step(rows, gradient, advantage, TrustRegionConfig(max_kl=0.001, damping=0.0))
    centred = value - value.mean()
    spread = advantage.square().mean()
    torch.testing.assert_close(step, centred * (0.002 / spread).sqrt(), rtol=1e-6, atol=0)
    assert share == 1


def test_no_step_where_nothing_is_gained():
    policy = Gaussian()
    rows, gradient = policy.rows([]), policy.gradient(B.advantage)
    step, share = natural_step(rows, -gradient, B.advantage, TrustRegionConfig())
    assert share == 0
    assert not step.any()
    assert natural_step(rows, 0 * gradient, 0 * B.advantage, TrustRegionConfig())[1] == 0
