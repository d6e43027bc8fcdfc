"""DigiRL's formulas against values computed by hand."""

import math

import pytest
import torch

from mmrl.agents.methods.digirl import (
    clamp_logp,
    code_advantages,
    instruction_advantages,
    keep_best,
    paper_advantages,
    step_threshold,
)
from mmrl.agents.methods.digirl_critics import DigirlCriticConfig, Fitter, StepCritic, discounted_returns, step_loss


def doubles(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_returns_fall_with_the_distance_from_the_reward():
    assert discounted_returns([0, 0, 1], 0.5).tolist() == [0.25, 0.5, 1.0]


def test_the_paper_form_weighs_the_end_against_the_critic():
    """H = 3, lambda = 1/2, success: weights 1/4, 1/2, 1."""
    found = paper_advantages(doubles(0.2, 0.6, 0.5), doubles(0, 0, 1), 0.5)
    assert found.tolist() == pytest.approx([0.25 + 0.75 * 0.4, 0.5 + 0.5 * -0.1, 1.0])
    failed = paper_advantages(doubles(0.2, 0.6, 0.5), doubles(0, 0, 0), 0.5)
    assert failed.tolist() == pytest.approx([0.75 * 0.4, 0.5 * -0.1, 0.0])


def test_a_larger_lambda_listens_to_the_end_only():
    assert paper_advantages(doubles(0.9, 0.1), doubles(0, 1), 1.0).tolist() == [1.0, 1.0]


def test_the_code_form_counts_the_last_reward_twice():
    found = code_advantages(doubles(0.5, 0.5), doubles(0.5, 0.0), doubles(0, 1), discounted_returns([0, 1], 0.5))
    assert found.tolist() == pytest.approx([-0.05 + 0.5, -0.5 - 0.05 + 1 + 1])


def test_thresholds():
    assert step_threshold("1/H", 8) == 0.125
    assert step_threshold("0.05", 8) == 0.05
    for wrong in ("1/2", "nan", "half"):
        with pytest.raises(ValueError, match="expected 1/H, or a number"):
            step_threshold(wrong, 8)


def test_surprising_successes_come_first():
    value = doubles(0.9, 0.1, 0.5, 0.0, 1.0)
    found = instruction_advantages(doubles(1, 1, 0, 0, 1), value)
    assert found.tolist() == pytest.approx([0.1, 0.9, -0.5, -1e-4, 1e-4])
    assert keep_best(found, 0.75).tolist() == [True, True, False, False, False]


def test_ties_with_the_quantile_are_kept():
    assert keep_best(doubles(0, 1, 1, 1, 1, 0, 0, 0, 0, 0), 0.9).tolist() == [False, *[True] * 4, *[False] * 5]


def test_rare_successes_need_a_bound():
    """One success in 20: the 0.9 quantile of the rewards is 0, and without a bound the policy learns from failures."""
    rewards = torch.cat([torch.zeros(19), torch.ones(1)])
    assert keep_best(rewards).all()
    assert keep_best(rewards, min_score=0.5).nonzero().tolist() == [[19]]
    assert keep_best(torch.zeros(0)).tolist() == []


def test_tokens_out_of_bounds_have_no_gradient():
    logp = doubles(0.0005, 0.5, 0.995).log().requires_grad_()
    found = clamp_logp(logp)
    found.sum().backward()
    assert found.exp().tolist() == pytest.approx([0.001, 0.5, 0.99])
    assert logp.grad.tolist() == [0.0, 1.0, 0.0]


def test_the_last_step_has_no_state_behind_it():
    logits, wild = torch.zeros(2, 3, 2), torch.full((2, 3, 2), math.inf)
    wild[:, :2] = 0.0
    has_next = torch.tensor([True, True, False])
    loss = step_loss(tuple(logits), tuple(wild), has_next, torch.tensor([0, 1, 1]))
    assert float(loss) == pytest.approx(4 * math.log(2))


def test_the_step_critic_learns_which_steps_lead_to_success():
    torch.manual_seed(0)
    critic = StepCritic(4, 16)
    fitter = Fitter(critic, DigirlCriticConfig(learning_rate=1e-2))
    states = torch.randn(64, 4)
    succeeds = (states[:, 0] > 0).long()
    everywhere = torch.ones(64, dtype=torch.bool)
    for _ in range(100):
        fitter.step(step_loss(critic(states), critic(states), everywhere, succeeds))
    assert ((critic.value(states) > 0.5).long() == succeeds).float().mean() > 0.95
