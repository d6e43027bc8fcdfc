"""Bounds that depend on more than a decision: the search of BAPO by hand, the entropy levels of HAPO."""

import pytest
import torch

from mmrl.contrib.rows.adaptive import BOUNDS, ENTROPY_LEVEL, Bapo, HapoClip, TokenGroupMeanStd
from mmrl.core import Objective, PolicyOutputs, get
from mmrl.core.loss import metric_values
from tests.core.builders import random_rollouts


def bounds_of(clip, ratio, advantage):
    """Bounds that are found for decisions with these ratios and advantages."""
    values = [torch.tensor([row], dtype=torch.float64) for row in (ratio, advantage)]
    rollouts = random_rollouts(groups=1, samples=2)
    found = clip.settle([clip.survey(values[0].log(), values[1], torch.ones_like(values[0]))], rollouts)
    return [float(found.extras[key][0]) for key in BOUNDS]


SMALL = {"lower": 0.5, "lower_max": 0.7, "upper": 1.0, "upper_max": 3.0, "upper_step": 0.5}


@pytest.mark.parametrize(
    ("order", "ratio", "advantage", "expected"),
    [
        ("high_first", [1.0, 1.0], [2.0, -1.0], [0.5, 1.0]),  # P / N = 2 at first
        ("high_first", [4.0, 1.9], [1.0, -1.0], [0.5, 2.0]),  # P = high, N = 1.9
        ("low_first", [4.0, 1.9], [1.0, -1.0], [0.7, 2.0]),
        ("high_first", [1.0, 5.0], [1.0, -1.0], [0.7, 3.0]),  # out of reach
        ("low_first", [1.0], [1.0], [0.5, 1.0]),  # nothing negative
        ("high_first", [1.0], [-1.0], [0.7, 3.0]),  # nothing positive
    ],
)
def test_the_bounds_are_searched_in_order(order, ratio, advantage, expected):
    assert bounds_of(Bapo(**SMALL, order=order), ratio, advantage) == pytest.approx(expected)


def test_a_batch_by_itself_is_its_own_step():
    rollouts = get("bapo").compute_advantages(random_rollouts(seed=2))
    logp = rollouts.logp_old + 0.5
    objective, counts = get("bapo"), get("bapo").denominators(rollouts)
    settled = objective.settled([objective.survey(PolicyOutputs(logp), rollouts)], rollouts)
    own, whole = (objective.loss(PolicyOutputs(logp), one, counts) for one in (rollouts, settled))
    assert metric_values(own.metrics) == metric_values(whole.metrics)


def test_bounds_must_rise():
    with pytest.raises(ValueError, match=r"clip\.upper_max 1\.1 must not lie below clip\.upper 1\.2"):
        get("bapo").override({"clip": {"upper_max": 1.1}}).validate()


@pytest.mark.parametrize(("sign", "expected"), [("signed", [-1.0, -0.5, 0.0, 1.0]), ("repo", [1.0, 0.5, 0.0, 1.0])])
def test_entropy_levels_by_hand(sign, expected):
    entropy = torch.tensor([[0.0, 1.0, 2.0, 3.0, 9.0]], dtype=torch.float64).exp()
    mask = torch.tensor([[1.0, 1.0, 1.0, 1.0, 0.0]], dtype=torch.float64)
    level = HapoClip(pivot=2 / 3, sign=sign).level_of(entropy, mask)
    assert level[0].tolist() == pytest.approx([*expected, 0.0])


def test_high_entropy_widens_the_upper_bound_and_low_entropy_the_lower_one():
    r = random_rollouts(seed=4)
    objective = Objective("mine", clip=HapoClip())
    rollouts = objective.compute_advantages(r)
    level = rollouts.extras[ENTROPY_LEVEL]
    outputs = PolicyOutputs(r.logp_old)
    shown = objective.clip.of_rollouts(torch.zeros_like(r.mask), outputs, r.mask, rollouts)[1]
    high = level > 0
    assert torch.allclose(shown["policy/bound_high"], torch.where(high, 1.2 + 0.2 * level, 1.2))
    assert torch.allclose(shown["policy/bound_low"], torch.where(high, 0.8, 0.8 + 0.2 * level))
    with pytest.raises(ValueError, match=r"extras\['entropy_level'\] is missing"):
        objective.clip.of_rollouts(torch.zeros_like(r.mask), outputs, r.mask, r)


def test_decisions_of_a_group_are_compared_as_often_as_they_occur():
    r = random_rollouts(groups=1, samples=3)
    mask = torch.tensor([[1.0, 1.0, 1.0, 0.0, 0.0, 0.0], [1.0, *[0.0] * 5], [0.0] * 6], dtype=torch.float64)
    r = r.replace(mask=mask, turn=None, reward=torch.tensor([0.0, 1.0, 5.0], dtype=torch.float64))
    deviation = (0.25 * 0.75) ** 0.5
    found = TokenGroupMeanStd(eps=1e-12)(r)
    assert found[:2, 0].tolist() == pytest.approx([-0.25 / deviation, 0.75 / deviation])
    rows = TokenGroupMeanStd(eps=1e-12, limit=1.5)(r)
    assert rows[:, 0].tolist() == pytest.approx([*get("grpo").advantage(r)[:2, 0].tolist(), 0.0], rel=1e-5)
