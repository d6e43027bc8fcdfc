import math

import pytest
import torch

from mmrl.core import policy_loss
from mmrl.core.blocks import BLOCKS, all_kinds
from mmrl.core.blocks.clip import Clip
from tests.core.builders import random_rollouts

OF_DECISIONS = [
    name for name, kind in all_kinds("clip").items() if kind.__call__ is not Clip.__call__ and not kind.needs
]
OF_DECISIONS.remove("vespo")  # the weight of a row has no gradient
"""Rules that read nothing but ratios, log-probabilities and advantages, and that differences can check."""


def log_ratio(logp, logp_old, mask, level):
    return BLOCKS["ratio"][level]()(logp, logp_old, mask)


def one(ratio, advantage, name="ppo_clip", **bounds):
    """Loss of a single decision with a given ratio, and its derivative with respect to logp."""
    logp = torch.tensor([[-1.0]], dtype=torch.float64, requires_grad=True)
    logp_old = torch.tensor([[-1.0 - math.log(ratio)]], dtype=torch.float64)
    advantages = torch.tensor([[advantage]], dtype=torch.float64)
    loss, indicators = policy_loss(logp, logp_old, advantages, torch.ones_like(logp), all_kinds("clip")[name](**bounds))
    (slope,) = torch.autograd.grad(loss.sum(), logp)
    clipped = tuple(int(value.item()) for value in indicators.values())
    return loss.item(), slope.item(), clipped


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "slope", "clipped"),
    [
        (1.1, 2.0, -2.2, -2.2, (0, 0)),
        (1.5, 2.0, -2.56, 0.0, (0, 1)),  # bounded at 1.28
        (0.5, 2.0, -1.0, -1.0, (0, 0)),  # a good decision that became unlikely is still pulled back
        (0.5, -2.0, 1.6, 0.0, (1, 0)),  # bounded at 0.8
        (1.5, -2.0, 3.0, 3.0, (0, 0)),
        (4.0, -2.0, 6.0, 0.0, (0, 0)),  # dual clip at 3
    ],
)
def test_ppo_clip_by_hand(ratio, advantage, loss, slope, clipped):
    result = one(ratio, advantage, low=0.2, high=0.28, dual=3.0)
    assert result[:2] == pytest.approx((loss, slope), rel=1e-9, abs=1e-12)
    assert result[2] == clipped


def test_without_dual_clip_negative_advantages_are_unbounded():
    assert one(4.0, -2.0)[:2] == pytest.approx((8.0, 8.0))


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "slope", "clipped"),
    [
        (1.5, 2.0, 2.56, -2.56, (0, 1)),  # weight 1.28, logp -1; the gradient survives the bound
        (0.5, -2.0, -1.6, 1.6, (1, 0)),
        (1.1, -2.0, -2.2, 2.2, (0, 0)),
    ],
)
def test_cispo_by_hand(ratio, advantage, loss, slope, clipped):
    result = one(ratio, advantage, "cispo", low=0.2, high=0.28)
    assert result[:2] == pytest.approx((loss, slope), rel=1e-9)
    assert result[2] == clipped


def test_cispo_with_the_absolute_bound_of_trl():
    # An absolute bound of 5 without a lower one is high = 4 with low = 1.
    assert one(9.0, 1.0, "cispo", low=1.0, high=4.0)[1] == pytest.approx(-5.0)
    assert one(0.01, 1.0, "cispo", low=1.0, high=4.0)[1] == pytest.approx(-0.01)


def test_unbounded_surrogates_by_hand():
    assert one(3.0, 2.0, "unclipped")[:2] == pytest.approx((-6.0, -6.0))
    assert one(3.0, 2.0, "policy_gradient")[:2] == pytest.approx((2.0, -2.0))


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "slope"),
    [
        (math.e, 2.0, -4.0, -2.0),  # -2 (1 + 1), a straight line
        (math.exp(-3), 2.0, 4.0, -2.0),
        (math.e, -2.0, 2 * math.e, 2 * math.e),
        (math.exp(-1), -2.0, 2 / math.e, 2 / math.e),
        (1.0, 0.0, 0.0, 0.0),
    ],
)
def test_bgpo_by_hand(ratio, advantage, loss, slope):
    assert one(ratio, advantage, "bgpo") == (pytest.approx(loss), pytest.approx(slope), ())


@pytest.mark.parametrize("advantage", [1.5, -1.5])
def test_bgpo_bounds_the_ratio_of_the_mean_log_likelihood_and_touches_it(advantage):
    # Samples of one bound on a log-likelihood, all with the same advantage.
    difference = torch.randn(50, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    constant = torch.full_like(difference, advantage)
    bgpo = all_kinds("clip")["bgpo"]()
    bound = bgpo(difference, difference, constant)[0].mean(1)
    assert (bound > -advantage * difference.mean(1).exp()).all()
    here = torch.zeros_like(difference, requires_grad=True)
    on_policy = bgpo(here, here, constant)[0].mean(1)
    original = -advantage * here.mean(1).exp()
    assert torch.equal(on_policy, original)
    gradients = [torch.autograd.grad(value.sum(), here)[0] for value in (on_policy, original)]
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("name", ["ppo_clip", "gspo"])
@pytest.mark.parametrize("ratio", [0.3, 0.75, 0.9, 1.0, 1.15, 1.25, 1.7])
def test_negating_the_advantage_swaps_the_bounds(name, ratio):
    # Reflecting the ratio at 1 and exchanging the bounds turns the loss for A into that for -A, up to 2 A.
    here = one(ratio, 1.5, name, low=0.1, high=0.2)
    mirrored = one(2 - ratio, -1.5, name, low=0.2, high=0.1)
    assert mirrored[0] - 2 * 1.5 == pytest.approx(here[0])
    assert here[2] == mirrored[2][::-1]
    assert (here[1] == 0) == (mirrored[1] == 0)


@pytest.mark.parametrize("name", OF_DECISIONS)
@pytest.mark.parametrize("level", BLOCKS["ratio"])
def test_gradients_match_finite_differences(name, level):
    r = random_rollouts(seed=2, groups=2, samples=2, width=4)
    advantage = torch.randn(4, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    move = 0.1 * torch.randn(4, 4, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    logp = (r.logp_old + move).requires_grad_()
    fixed = logp.detach().clone()
    clip = all_kinds("clip")[name](
        **({"low": 0.05, "high": 0.05} if "low" in all_kinds("clip")[name].options() else {})
    )

    def loss(x):
        log_rho = log_ratio(x, r.logp_old, r.mask, level)
        # Stop-gradients are invisible to differences, so the detached factor is held at the base point.
        held = log_ratio(fixed, r.logp_old, r.mask, level)
        if name == "cispo":
            log_rho = held
        elif level == "sequence":
            log_rho = held + torch.where(r.mask > 0, x - fixed, 0.0)
        return (clip(log_rho, x, advantage)[0] * r.mask).sum()

    analytic = (clip(log_ratio(logp, r.logp_old, r.mask, level), logp, advantage)[0] * r.mask).sum()
    (gradient,) = torch.autograd.grad(analytic, logp)
    for i in range(4):
        for t in range(4):
            step = torch.zeros_like(fixed)
            step[i, t] = 1e-6
            slope = (loss(fixed + step) - loss(fixed - step)) / 2e-6
            assert gradient[i, t].item() == pytest.approx(slope.item(), rel=1e-5, abs=1e-7)


def test_levels_by_hand():
    mask = torch.tensor([[1.0, 1.0, 0.0]], dtype=torch.float64)
    old = torch.tensor([[-1.0, -2.0, -3.0]], dtype=torch.float64)
    new = torch.tensor([[-0.5, -1.8, 40.0]], dtype=torch.float64)
    assert log_ratio(new, old, mask, "token").tolist() == [pytest.approx([0.5, 0.2, 0.0])]
    assert log_ratio(new, old, mask, "sequence")[0, :2].tolist() == pytest.approx([0.35, 0.35])
    assert log_ratio(new, old, mask, "sequence_full")[0, :2].tolist() == pytest.approx([0.35, 0.35])
    assert log_ratio(new, old, mask, "sequence_product")[0, :2].tolist() == pytest.approx([0.7, 0.7])


def test_the_two_sequence_forms_have_equal_gradients_for_row_means():
    r = random_rollouts(seed=3)
    row_advantage = torch.randn(12, 1, generator=torch.Generator().manual_seed(4), dtype=torch.float64)

    def gradient(level):
        logp = (r.logp_old + 0.3).requires_grad_()
        ratio, unclipped = BLOCKS["ratio"][level](), all_kinds("clip")["unclipped"]()
        loss = policy_loss(logp, r.logp_old, row_advantage, r.mask, unclipped, ratio)[0]
        row_means = (loss * r.mask).sum(1) / r.lengths
        return torch.autograd.grad(row_means.mean(), logp)[0]

    torch.testing.assert_close(gradient("sequence"), gradient("sequence_full"))


def test_log_ratios_are_limited():
    mask = torch.ones(1, 2, dtype=torch.float64)
    far = torch.tensor([[100.0, 100.0]], dtype=torch.float64)
    old = torch.zeros_like(far)
    assert log_ratio(far, old, mask, "token").max() == 20
    assert log_ratio(-far, old, mask, "token").min() == -20
    assert log_ratio(far, old, mask, "sequence").max() == 10
    assert log_ratio(far, old, mask, "sequence_product").max() == 20


@pytest.mark.parametrize("level", BLOCKS["ratio"])
def test_the_old_policy_is_constant(level):
    r = random_rollouts()
    old = r.logp_old.clone().requires_grad_()
    assert not log_ratio(r.logp_old, old, r.mask, level).requires_grad


@pytest.mark.parametrize("level", BLOCKS["ratio"])
def test_what_stands_on_untrained_decisions_does_not_matter(level):
    r = random_rollouts()
    logp = (r.logp_old + 0.1).masked_fill(r.mask == 0, float("nan")).requires_grad_()
    log_rho = log_ratio(logp, r.logp_old, r.mask, level)
    assert torch.isfinite(log_rho).all()
    (gradient,) = torch.autograd.grad((log_rho * r.mask).sum(), logp)
    assert torch.isfinite(gradient).all()
