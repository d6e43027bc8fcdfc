import math

import pytest
import torch

from mmrl.core import Denominators, Metric, count, masked_mean, max_metric, mean_metric, merge_metrics
from mmrl.core.blocks import BLOCKS
from mmrl.core.loss import FixedLength, metric_values
from mmrl.training.objectives import ObjectiveConfig, make_objective
from tests.core.builders import random_rollouts

X = torch.tensor([[1.0, 2.0, 9.0], [3.0, 9.0, 9.0], [9.0, 9.0, 9.0]])
MASK = torch.tensor([[1.0, 1.0, 0.0], [1.0, 0.0, 0.0], [0.0, 0.0, 0.0]])


TURN = torch.tensor([[3, 3, -1], [0, 1, 1], [0, 0, 0]])


def aggregate(x, mask, mode, denominators, turn=TURN):
    return BLOCKS["aggregation"][mode]()(x, mask, denominators, turn)


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token_mean", 6 / 3),
        ("sequence_mean", (1.5 + 3) / 2),
        ("sequence_sum", 6 / 2),
        ("turn_mean", (1.5 + 3) / 2),
        ("fixed_length", 6 / (2 * 4)),
    ],
)
def test_modes_by_hand(mode, expected):
    # The last row is empty and counts in no mean.
    assert aggregate(X, MASK, mode, count(MASK, length=4, turns=2)).item() == pytest.approx(expected)


def test_turn_mean_counts_each_turn_once():
    # Turn 4 of the first row says 1 and 3, with a tool's output between; turn 7 says 5; the second row's turn says 8.
    x = torch.tensor([[1.0, 99.0, 3.0, 5.0], [8.0, 99.0, 99.0, 99.0]])
    mask = torch.tensor([[1.0, 0.0, 1.0, 1.0], [1.0, 0.0, 0.0, 0.0]])
    for given in (4, -1):
        turn = torch.tensor([[4, given, 4, 7], [0, -1, -1, -1]])
        assert aggregate(x, mask, "turn_mean", count(mask, turns=3), turn).item() == pytest.approx((2 + 5 + 8) / 3)
    with pytest.raises(ValueError, match=r"rollouts\.turn"):
        aggregate(x, mask, "turn_mean", count(mask, turns=3), None)


def test_counts():
    assert count(MASK, length=4, turns=2) == Denominators(tokens=3, rows=2, length=4, turns=2)
    halves = [count(MASK[:1], length=4), count(MASK[1:], length=4)]
    assert Denominators.total(halves) == count(MASK, length=4)


def test_global_token_mean_of_uneven_micro_batches():
    # 100 decisions with loss 2.0 and 900 with 0.5 have the mean 0.65; the mean of the two means would be 1.25.
    first, second = torch.full((1, 100), 2.0), torch.full((1, 900), 0.5)
    denominators = Denominators.total([count(torch.ones_like(first)), count(torch.ones_like(second))])
    shares = [aggregate(x, torch.ones_like(x), "token_mean", denominators) for x in (first, second)]
    assert sum(shares).item() == pytest.approx(0.65)


@pytest.mark.parametrize("mode", BLOCKS["aggregation"])
def test_poison_on_untrained_decisions_reaches_neither_value_nor_gradient(mode):
    x = torch.where(MASK > 0, X, torch.nan).requires_grad_()
    value = aggregate(x, MASK, mode, count(MASK, length=4))
    value.backward()
    assert torch.isfinite(value)
    assert (x.grad[MASK == 0] == 0).all()


@pytest.mark.parametrize("mode", BLOCKS["aggregation"])
def test_padding_changes_nothing(mode):
    r = random_rollouts()
    wide = [torch.nn.functional.pad(x, (0, 3), value=v) for x, v in ((r.values, 5.0), (r.mask, 0.0))]
    expected = aggregate(r.values, r.mask, mode, count(r.mask, length=7, turns=9), r.turn)
    wide_turn = torch.nn.functional.pad(r.turn, (0, 3), value=-1)
    assert expected.item() != 0
    torch.testing.assert_close(aggregate(*wide, mode, count(wide[1], length=7, turns=9), wide_turn), expected)


@pytest.mark.parametrize("mode", BLOCKS["aggregation"])
def test_nothing_trained_gives_zero(mode):
    assert aggregate(X, torch.zeros_like(MASK), mode, count(torch.zeros_like(MASK), length=4)).item() == 0.0


def test_fixed_length_needs_a_length():
    with pytest.raises(ValueError, match="Set it to the maximum response length"):
        aggregate(X, MASK, "fixed_length", count(MASK))


def test_each_average_over_a_fixed_length_has_its_own():
    found = [FixedLength(length)(X, MASK, count(MASK, length=4)) for length in (8, 0)]
    assert [float(x) for x in found] == [6 / (2 * 8), 6 / (2 * 4)]
    own = ObjectiveConfig(
        "dr_grpo", kl={"kind": "k3", "coef": 1.0, "aggregation": {"kind": "fixed_length", "length": 9}}
    )
    objective = make_objective(own, 77)
    assert (objective.aggregation.length, objective.kl.aggregation.length) == (77, 9)


def test_masked_mean_by_hand():
    assert masked_mean(X, MASK).tolist() == [1.5, 3.0, 0.0]


def test_metrics_merge_by_their_kind():
    parts = [
        {"mean": mean_metric(X[:1], MASK[:1]), "max_": max_metric(X[:1], MASK[:1]), "loss": Metric.summed(1.5)},
        {"mean": mean_metric(X[1:], MASK[1:]), "max_": max_metric(X[1:], MASK[1:]), "loss": Metric.summed(0.25)},
        {"only_here": Metric(3.0, 2.0)},
    ]
    merged = merge_metrics(parts)
    assert list(merged) == ["mean", "max_", "loss", "only_here"]
    assert metric_values(merged) == {"mean": 2.0, "max_": 3.0, "loss": 1.75, "only_here": 1.5}


def test_mean_of_nothing_is_not_a_number():
    nothing = torch.zeros_like(MASK)
    assert math.isnan(mean_metric(X, nothing).value)
    assert max_metric(X, nothing).value == -math.inf
    with pytest.raises(ValueError, match="kind"):
        merge_metrics([{"a": Metric(1.0)}, {"a": Metric.summed(1.0)}])


def test_metrics_hold_no_graph():
    x = X.clone().requires_grad_()
    assert not mean_metric(x, MASK).total.requires_grad
    assert not max_metric(x, MASK).total.requires_grad
