import math

import pytest
import torch

from mmrl.core import (
    AdaptiveKL,
    Objective,
    PolicyOutputs,
    Rollouts,
    entropy_from_logits,
    entropy_sampled,
    get,
    kl_full,
    value_loss,
)
from mmrl.core.blocks import BLOCKS
from mmrl.core.blocks.advantage import GroupMean
from mmrl.core.blocks.clip import Unclipped
from mmrl.core.blocks.divergence import K3
from mmrl.core.loss import TokenMean

ESTIMATORS = [kind for kind, block in BLOCKS["kl"].items() if "logp_ref" in block.needs]


def kl(logp, logp_ref, kind, clamp=True):
    options = {"clamp": clamp} if "clamp" in BLOCKS["kl"][kind].options() else {}
    return BLOCKS["kl"][kind](**options).estimate(logp, logp_ref)


def at(kind, d, clamp=True):
    """Value and derivative with respect to logp at logp - logp_ref = d."""
    logp = torch.tensor(-1.0 + d, dtype=torch.float64, requires_grad=True)
    value = kl(logp, torch.tensor(-1.0, dtype=torch.float64), kind, clamp)
    return value.item(), torch.autograd.grad(value, logp)[0].item()


@pytest.mark.parametrize(
    ("kind", "value", "slope"),
    [
        ("k1", 0.5, 1.0),
        ("k2", 0.125, 0.5),
        ("k3", math.exp(-0.5) - 0.5, 1 - math.exp(-0.5)),
        ("k1p", 0.5, 0.5),
        ("k3p", math.exp(-0.5) - 0.5, 0.5),
    ],
)
def test_estimators_by_hand(kind, value, slope):
    assert at(kind, 0.5) == pytest.approx((value, slope))


def test_every_estimator_but_k1_is_flat_where_the_policies_agree():
    for kind in ESTIMATORS:
        assert at(kind, 0.0) == (0.0, 1.0 if kind == "k1" else 0.0)


def test_k3_limits():
    assert at("k3", -3.0) == (10.0, 0.0)  # e^3 - 3 - 1 = 16.1
    assert at("k3", -3.0, clamp=False)[0] == pytest.approx(math.exp(3) - 4)
    assert at("k3", -30.0) == (10.0, 0.0)
    assert at("k3", -30.0, clamp=False)[0] == pytest.approx(math.exp(30) - 31)
    assert at("k3", 8.0)[0] == at("k3", 8.0, clamp=False)[0] == pytest.approx(math.exp(-8) + 7)


def test_k3_far_away_has_a_finite_gradient():
    logp = torch.tensor([-200.0], requires_grad=True)
    value = kl(logp, torch.zeros(1), "k3")
    value.backward()
    assert value.item() == 10.0
    assert logp.grad.item() == 0.0


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_estimators_are_unbiased(kind):
    g = torch.Generator().manual_seed(0)
    logits, logits_ref = torch.randn(2, 5, generator=g, dtype=torch.float64)
    logp, logp_ref = logits.log_softmax(0), logits_ref.log_softmax(0)
    expected = (logp.exp() * kl(logp, logp_ref, kind, clamp=False)).sum()
    torch.testing.assert_close(expected, kl_full(logits, logits_ref))


def test_gradient_of_k2_is_the_gradient_of_the_divergence():
    g = torch.Generator().manual_seed(1)
    logits = torch.randn(5, generator=g, dtype=torch.float64, requires_grad=True)
    logits_ref = torch.randn(5, generator=g, dtype=torch.float64)
    logp, logp_ref = logits.log_softmax(0), logits_ref.log_softmax(0)
    (exact,) = torch.autograd.grad(kl_full(logits, logits_ref), logits, retain_graph=True)
    # Samples come from the policy but carry no gradient, as in training.
    for kind in ("k2", "k1p", "k3p"):
        loss = (logp.detach().exp() * kl(logp, logp_ref, kind)).sum()
        (sampled,) = torch.autograd.grad(loss, logits, retain_graph=True)
        torch.testing.assert_close(sampled, exact)
    loss = (logp.detach().exp() * kl(logp, logp_ref, "k1")).sum()
    (score,) = torch.autograd.grad(loss, logits)
    torch.testing.assert_close(score, torch.zeros_like(score))


def test_full_divergence_and_entropy_with_banned_entries():
    logits = torch.tensor([[0.0, math.log(3.0), -math.inf]], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([[0.0, 0.0, -math.inf]], dtype=torch.float64)
    expected = 0.25 * math.log(0.5) + 0.75 * math.log(1.5)
    divergence = kl_full(logits, reference)
    assert divergence.item() == pytest.approx(expected, rel=1e-12)
    entropy = entropy_from_logits(logits)
    assert entropy.item() == pytest.approx(-0.25 * math.log(0.25) - 0.75 * math.log(0.75), rel=1e-12)
    (gradient,) = torch.autograd.grad((divergence + entropy).sum(), logits)
    assert torch.isfinite(gradient).all()


def test_temperature_and_upcast():
    logits = torch.randn(3, 7, generator=torch.Generator().manual_seed(2)).bfloat16()
    assert entropy_from_logits(logits, 2.0).dtype == torch.float32
    torch.testing.assert_close(entropy_from_logits(logits, 2.0), entropy_from_logits(logits.float() / 2.0))
    torch.testing.assert_close(
        kl_full(logits, logits.flip(1), 2.0), kl_full(logits.float() / 2, logits.float().flip(1) / 2)
    )


def test_sampled_entropy_has_the_entropy_as_its_mean():
    logp = torch.randn(6, generator=torch.Generator().manual_seed(3), dtype=torch.float64).log_softmax(0)
    torch.testing.assert_close((logp.exp() * entropy_sampled(logp)).sum(), entropy_from_logits(logp))


def test_adaptive_coefficient_by_hand():
    controller = AdaptiveKL(coefficient=0.1, target=0.05, horizon=100)
    # Relative error 1 is limited to 0.2; 50 of 100 samples make half of it.
    assert controller.update(0.1, 50) == pytest.approx(0.11)
    assert controller.update(0.0, 100) == pytest.approx(0.11 * 0.8)
    assert controller.update(0.05, 100) == pytest.approx(0.088)
    other = AdaptiveKL(coefficient=1.0, target=0.05, horizon=100)
    other.load_state_dict(controller.state_dict())
    assert other.update(0.1, 10) == controller.update(0.1, 10)
    with pytest.raises(ValueError, match="positive"):
        AdaptiveKL(0.0, 0.1, 100)


@pytest.mark.parametrize(
    ("value", "clip", "loss", "slope"),
    [
        (1.0, None, 0.5 * 4, -2.0),  # target 3
        (1.0, 0.2, 0.5 * 2.8**2, 0.0),  # moved from 0 to 1, only 0.2 of it counts
        (0.1, 0.2, 0.5 * 2.9**2, -2.9),
        (-1.0, 0.2, 0.5 * 16, -4.0),  # moved the wrong way: the larger error counts
    ],
)
def test_value_loss_by_hand(value, clip, loss, slope):
    v = torch.tensor(value, dtype=torch.float64, requires_grad=True)
    result = value_loss(v, torch.tensor(0.0, dtype=torch.float64), torch.tensor(3.0, dtype=torch.float64), clip)
    assert result.item() == pytest.approx(loss)
    assert torch.autograd.grad(result, v)[0].item() == pytest.approx(slope)


def test_the_estimate_of_the_divergence_from_the_old_policy_has_the_mean_and_gradient_of_the_exact_one():
    """Over all decisions of an old policy, weighed by its probabilities."""
    kl = K3(1.0, to="old", importance=True, clamp=False)
    objective = Objective("mine", GroupMean(), Unclipped(), TokenMean(), kl=kl)
    logits = torch.tensor([0.3, -1.0, 0.8, 0.1], dtype=torch.float64, requires_grad=True)
    old = torch.log_softmax(torch.tensor([0.0, 0.5, -0.3, 0.2], dtype=torch.float64), 0)
    logp = torch.log_softmax(logits, 0)
    parts = []
    for decision in range(4):
        one = torch.ones(1, 1, dtype=torch.float64)
        rollouts = Rollouts(torch.tensor([0]), one, one * old[decision], one[0], advantage=0 * one)
        parts.append(objective.loss(PolicyOutputs(logp[decision] * one), rollouts, objective.denominators(rollouts)))
    mean = sum(old[decision].exp() * part.loss for decision, part in enumerate(parts))
    exact = (logp.exp() * (logp - old)).sum()
    torch.testing.assert_close(mean, exact, rtol=1e-12, atol=1e-14)
    found, expected = (torch.autograd.grad(x, logits, retain_graph=True)[0] for x in (mean, exact))
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)
    assert "policy/kl_ref" not in parts[0].metrics


def test_a_divergence_from_the_old_policy_needs_no_reference():
    objective = get("grpo").override({"kl": {"kind": "k3", "coef": 0.5, "to": "old"}})
    assert objective.needs == {"samples"}
    assert objective.regularised
    assert not objective.needs_reference
    assert "0.5 * mean (exp(logp_old_it - logp_it)" in objective.describe()
    exact = objective.override({"kl": {"kind": "full"}})
    assert exact.needs == {"samples", "kl_old"}
    assert "KL(policy || old policy)" in exact.describe()
    with pytest.raises(ValueError, match=r"kl\.to 'old' only applies to a term of the loss"):
        objective.override({"kl": {"in_reward": True}}).validate()
    with pytest.raises(ValueError, match=r"kl\.anneal only applies to a term of the loss"):
        get("rloo").override({"kl": {"anneal": True}}).validate()


@pytest.mark.parametrize(("progress", "expected"), [(0.0, 2.0), (0.5, 4.0), (0.98, 40.0)])
def test_the_weight_of_mirror_descent_grows_over_the_run(progress, expected):
    objective = get("mirror_descent").override({"kl": {"coef": 2.0}})
    assert objective.at(progress).kl_coef == pytest.approx(expected)
    assert get("grpo").at(progress) is get("grpo")
