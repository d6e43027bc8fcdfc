"""The regression of Reg-GRPO: by hand, at the start of a step, with its other scaling, and with groups kept whole."""

import pytest
import torch

from mmrl.core import Objective, get
from mmrl.core.blocks.clip import GroupRegression, PpoClip, SequenceProductRatio, SequenceRatio, TokenRatio
from mmrl.core.loss import PolicyOutputs
from tests.core.builders import random_rollouts

RHO = torch.tensor([[0.5], [-0.5], [2.0]], dtype=torch.float64)
ADVANTAGE = torch.tensor([[1.0], [-1.0], [0.0]], dtype=torch.float64)


def loss_of(block, rho=RHO):
    rho = rho.clone().requires_grad_()
    loss, _ = block(rho, rho, ADVANTAGE)
    return loss.detach().flatten().tolist(), torch.autograd.grad(loss.sum(), rho)[0].flatten().tolist()


def test_standardised_log_ratios_by_hand():
    # mean 2/3, deviations -1/6, -7/6, 4/3, variance (1/36 + 49/36 + 64/36) / 2 = 19/12
    std = (19 / 12) ** 0.5
    losses, _ = loss_of(GroupRegression(eps=1e-12))
    expected = [(1 + 1 / 6 / std) ** 2, (-1 + 7 / 6 / std) ** 2, (4 / 3 / std) ** 2]
    assert losses == pytest.approx(expected, rel=1e-7)
    population, _ = loss_of(GroupRegression(eps=1e-12, ddof=0))
    assert population[2] == pytest.approx((4 / 3) ** 2 / (38 / 36), rel=1e-7)


def test_lambda_scaling_by_hand():
    losses, gradient = loss_of(GroupRegression(scale=0.5))
    assert losses == pytest.approx([(1 + 1 / 12) ** 2, (-1 + 7 / 12) ** 2, (2 / 3) ** 2])
    # 2 scale (prediction - A) less its mean over the group, which is 0 here
    assert gradient == pytest.approx([-1 - 1 / 12, 1 - 7 / 12, 2 / 3])


def test_the_standardised_loss_does_not_depend_on_the_size_of_the_log_ratios():
    block = GroupRegression(eps=1e-12)
    assert loss_of(block, 10 * RHO)[0] == pytest.approx(loss_of(block)[0])
    assert loss_of(GroupRegression(scale=1.0), 10 * RHO)[0] != pytest.approx(loss_of(GroupRegression(scale=1.0))[0])


@pytest.mark.parametrize("eps", [1e-4, 0.1])
def test_on_policy_the_gradient_is_finite_and_that_of_the_policy_gradient(eps):
    losses, gradient = loss_of(GroupRegression(eps=eps), torch.full_like(RHO, 0.7))
    assert losses == pytest.approx([1.0, 1.0, 0.0])  # A^2
    assert gradient == pytest.approx([-2 / eps, 2 / eps, 0.0])


def test_a_log_ratio_far_from_the_old_policy_keeps_its_gradient():
    old = torch.zeros(2, 4, dtype=torch.float64)
    logp = torch.tensor([[-9.0] * 4, [0.0] * 4], dtype=torch.float64, requires_grad=True)  # sums -36 and 0
    for limit, alive in ((20.0, False), (None, True)):
        rho = SequenceProductRatio(limit=limit)(logp, old, torch.ones_like(old))
        (gradient,) = torch.autograd.grad(rho[:, 0].sum(), logp)
        assert bool((gradient[0] != 0).all()) is alive


def test_groups_without_advantages_are_not_left_out():
    assert get("reg_grpo").with_kl_coef(0.0).regularised
    assert not get("grpo").with_kl_coef(0.0).regularised
    pulled = {"dro": True, "prime_rl": True, "kl_cov": True, "dppo_tv": False}
    assert {name: get(name).with_kl_coef(0.0).regularised for name in pulled} == pulled


@pytest.mark.parametrize("size", [1, 2, 4, 7])
def test_whole_groups_stay_together(size):
    rollouts = random_rollouts(groups=4, samples=3)
    parts = list(rollouts.micro_batches(size, whole_groups=True))
    assert [part.num_rows for part in parts] == ([6, 6] if size == 7 else [3, 3, 3, 3])


def test_a_cut_group_would_change_the_loss():
    objective = get("reg_grpo")
    rollouts = objective.compute_advantages(random_rollouts(groups=2, samples=4))
    counts, move = objective.denominators(rollouts), torch.linspace(-1, 1, rollouts.logp_old.numel()).double()
    logp = rollouts.logp_old + move.reshape_as(rollouts.logp_old)

    def total(whole):
        start, losses = 0, []
        for part in rollouts.micro_batches(2, whole_groups=whole):
            scores = PolicyOutputs(logp[start : start + part.num_rows, : part.num_decisions])
            losses.append(objective.loss(scores, part, counts).loss.item())
            start += part.num_rows
        return sum(losses)

    everything = objective.loss(PolicyOutputs(logp), rollouts, counts).loss.item()
    assert total(True) == pytest.approx(everything, rel=1e-12)
    assert abs(total(False) - everything) > 1e-3


@pytest.mark.parametrize(
    ("blocks", "message"),
    [
        ({"clip": GroupRegression(), "ratio": TokenRatio()}, "compares whole rows, but ratio is 'token'"),
        ({"clip": GroupRegression(), "ratio": SequenceRatio()}, "Use ratio 'sequence_product'"),
        ({"clip": PpoClip(), "ratio": SequenceProductRatio(limit=None)}, r"ratio\.limit is null"),
        ({"clip": GroupRegression(eps=0.0), "ratio": SequenceProductRatio()}, r"clip\.eps is 0\.0; must be positive"),
    ],
)
def test_blocks_that_do_not_fit_are_refused(blocks, message):
    with pytest.raises(ValueError, match=message):
        Objective("mine", **blocks).validate()
