"""Weights and gates between sampler and trainer: by hand, and their edges."""

import math

import pytest
import torch

from mmrl.core import Objective, PolicyOutputs, get
from mmrl.core.blocks.clip import PolicyGradient
from mmrl.core.blocks.mismatch import GeometricGate, Masked, SequenceGate, TokenGate, Truncated
from mmrl.core.loss import TokenMean, metric_values
from tests.core.builders import random_rollouts

LOG = [[math.log(4.0), math.log(0.25), 9.0], [math.log(2.0), math.log(2.0), math.log(2.0)]]
MASK = torch.tensor([[1.0, 1.0, 0.0], [1.0, 1.0, 1.0]], dtype=torch.float64)
DIFFERENCE = torch.tensor(LOG, dtype=torch.float64) * MASK


@pytest.mark.parametrize(
    ("block", "expected"),
    [
        (Truncated(high=3.0), [[3.0, 0.25], [2.0, 2.0, 2.0]]),
        (Truncated(low=0.5, high=None), [[4.0, 0.5], [2.0, 2.0, 2.0]]),
        (Truncated(high=5.0, level="sequence"), [[1.0, 1.0], [5.0, 5.0, 5.0]]),
        (Truncated(high=5.0, level="geometric"), [[1.0, 1.0], [2.0, 2.0, 2.0]]),
        (Masked(), [[4.0, 0.0], [2.0, 2.0, 2.0]]),
        (Masked(low=None, high=3.0, level="sequence"), [[1.0, 1.0], [0.0, 0.0, 0.0]]),
        (TokenGate(), [[0.0, 0.0], [1.0, 1.0, 1.0]]),
        (SequenceGate(), [[1.0, 1.0], [0.0, 0.0, 0.0]]),
        (GeometricGate(low=None, high=2.5), [[1.0, 1.0], [1.0, 1.0, 1.0]]),
        (GeometricGate(), [[1.0, 1.0], [0.0, 0.0, 0.0]]),
    ],
)
def test_weights_by_hand(block, expected):
    found = [row[mask > 0].tolist() for row, mask in zip(block(DIFFERENCE, MASK), MASK, strict=True)]
    assert [pytest.approx(row, rel=1e-12) for row in expected] == found


def loss_of(objective, rollouts, logp=None):
    logp = (rollouts.logp_old if logp is None else logp).clone().requires_grad_()
    output = objective.loss(PolicyOutputs(logp), rollouts, objective.denominators(rollouts))
    return output, torch.autograd.grad(output.loss, logp)[0]


def test_rows_that_are_rejected_get_no_gradient_and_still_count_in_the_mean():
    rollouts = random_rollouts(advantage=None)
    shift = torch.zeros_like(rollouts.mask)
    shift[::2] = 3.0
    rollouts = rollouts.replace(logp_rollout=rollouts.logp_old - shift, advantage=rollouts.mask)
    plain = Objective("plain", clip=PolicyGradient(), aggregation=TokenMean())
    output, gradient = loss_of(plain.replace(gate=TokenGate()), rollouts)
    _, free = loss_of(plain, rollouts)
    assert torch.equal(gradient[::2], torch.zeros_like(gradient[::2]))
    assert torch.equal(gradient[1::2], free[1::2])
    share = float(rollouts.mask[::2].sum() / rollouts.mask.sum())
    assert metric_values(output.metrics)["policy/mismatch_rejected"] == pytest.approx(share, rel=1e-12)


def test_without_its_blocks_the_samplers_numbers_are_measured_and_change_nothing():
    rollouts = get("grpo").compute_advantages(random_rollouts(logp_rollout=None))
    output, gradient = loss_of(get("grpo"), rollouts)
    other, same = loss_of(get("grpo"), rollouts.replace(logp_rollout=rollouts.logp_old - 0.1))
    assert torch.equal(gradient, same)
    assert torch.equal(output.loss, other.loss)
    measured = metric_values(other.metrics)
    assert measured["policy/mismatch_kl"] == pytest.approx(math.exp(0.1) - 0.1 - 1, rel=1e-12)
    assert measured["policy/mismatch_max"] == pytest.approx(0.1, rel=1e-12)
    assert output.metrics.keys() == other.metrics.keys() - {"policy/mismatch_kl", "policy/mismatch_max"}


def test_a_gate_compares_the_updated_policy_where_old_and_sampled_are_one():
    rollouts = random_rollouts(logp_rollout=None).replace(advantage=random_rollouts().mask)
    logp = rollouts.logp_old.clone()
    logp[0] += 5.0
    gradient = loss_of(Objective("mine", gate=GeometricGate()), rollouts, logp)[1]
    assert torch.equal(gradient[0], torch.zeros_like(gradient[0]))
    assert (gradient[1:][rollouts.mask[1:] > 0] != 0).all()


def test_a_correction_needs_the_samplers_numbers():
    rollouts = get("icepop").compute_advantages(random_rollouts(logp_rollout=None))
    with pytest.raises(ValueError, match=r"rollouts\.logp_rollout is missing"):
        loss_of(get("icepop"), rollouts)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"gate": {"kind": "token", "low": None, "high": None}}, r"gate\.low and gate\.high are both null"),
        ({"correction": {"kind": "masked", "low": 3.0, "high": 2.0}}, r"correction\.low 3 must be below .* 2"),
        ({"correction": {"kind": "masked", "level": "row"}}, r"correction\.level is 'row'.*token, sequence, geometric"),
    ],
)
def test_bounds_that_make_no_sense_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        get("grpo").override(changes).validate()


def test_losses_of_whole_groups_take_no_weights():
    with pytest.raises(ValueError, match="gate weights decisions, but clip 'group_regression' compares whole rows"):
        get("reg_grpo").replace(gate=TokenGate()).validate()
