import math

import pytest
import torch

from mmrl.core import DynamicSamplingBuffer, PolicyOutputs, drop, get, zero_variance_groups
from tests.core.builders import random_rollouts


def with_rewards(*groups, accuracy=None):
    r = random_rollouts(groups=len(groups), samples=len(groups[0]))
    reward = torch.tensor([x for group in groups for x in group], dtype=torch.float64)
    terms = {} if accuracy is None else {"accuracy": torch.tensor(accuracy, dtype=torch.float64)}
    return r.replace(reward=reward, reward_terms=terms)


def test_groups_with_equal_rewards_are_not_kept():
    r = with_rewards([0.0, 0.0, 0.0], [0.1, 0.1, 0.1], [1.0, 0.0, 0.0], [math.nan, 1.0, 1.0], [math.nan, 1.0, 0.0])
    assert zero_variance_groups(r).tolist() == [False, False, True, False, True]


def test_groups_are_kept_whose_terms_differ_where_each_term_is_compared():
    """With GDPO rewards of equal sums have advantages, which a filter of the sum would drop."""
    r, first = with_rewards([1.0, 1.0], [1.0, 1.0], [2.0, 1.0]), torch.tensor([0.2, 0.7, 1.0, 1.0, 1.0, 1.0])
    r = r.replace(reward_terms={"a": first, "b": 1 - first, "logged": torch.arange(6.0)})
    for name, compared in (("drop", ("a", "b")), ("resample", ("b",))):
        assert get("grpo").override({"filter": {"kind": name}}).filter.kept(r, compared).tolist() == [
            True,
            False,
            False,
        ]
    chosen = get("grpo").override({"filter": {"kind": "drop", "key": "logged"}}).filter
    assert chosen.kept(r, ("a", "b")).tolist() == [True, True, True]  # the one that was asked for
    assert get("grpo").override({"filter": {"kind": "drop"}}).filter.kept(r).tolist() == [False, False, True]


def test_groups_without_two_scored_rows_are_not_kept():
    r = with_rewards([math.nan, math.nan], [math.nan, 1.0])
    assert zero_variance_groups(r).tolist() == [False, False]
    assert zero_variance_groups(r, low=0.5).tolist() == [False, True]


def test_bounds_on_the_mean_are_strict():
    r = with_rewards([0.0, 0.0], [1.0, 1.0], [1.0, 0.0], [0.5, 0.5])
    assert zero_variance_groups(r, low=0.0, high=1.0).tolist() == [False, False, True, True]
    assert zero_variance_groups(r, high=0.5).tolist() == [True, False, False, False]


def test_a_reward_term_can_decide():
    r = with_rewards([1.1, 1.0], [0.5, 0.4], accuracy=[1.0, 1.0, 0.0, 1.0])
    assert zero_variance_groups(r).tolist() == [True, True]
    assert zero_variance_groups(r, "accuracy").tolist() == [False, True]
    with pytest.raises(ValueError, match=r"unknown reward term 'acuracy'; did you mean 'accuracy'"):
        zero_variance_groups(r, "acuracy")


def test_rows_without_a_total_reward_do_not_decide():
    r = with_rewards([math.nan, 1.0, 1.0], accuracy=[0.0, 1.0, 1.0])
    assert zero_variance_groups(r, "accuracy").tolist() == [False]
    assert zero_variance_groups(r, "accuracy", low=0.9).tolist() == [True]


def test_drop_keeps_rows_prompts_and_counts_together():
    r = with_rewards([0.0, 0.0], [1.0, 0.0], [2.0, 2.0])
    kept, counts = drop(r, zero_variance_groups(r))
    assert kept.payload.prompts == ["prompt 1"]
    assert kept.reward.tolist() == [1.0, 0.0]
    assert (counts.seen, counts.kept) == (3, 1)


def test_refill_collects_until_the_step_is_full():
    refill = DynamicSamplingBuffer(target_groups=3, max_tries=3)
    for expected in (2, 1, 0):
        assert not refill.full
        r = with_rewards([0.0, 0.0], [1.0, 0.0])
        refill.add(r, zero_variance_groups(r))
        assert refill.missing_groups == expected
    assert refill.full
    assert not refill.exhausted
    step = refill.take()
    assert step.payload.prompts == ["prompt 1"] * 3
    assert step.num_rows == 6
    assert (refill.counts.seen, refill.counts.kept, refill.counts.tries) == (6, 3, 3)


def test_refill_returns_no_more_than_the_target():
    refill = DynamicSamplingBuffer(target_groups=1)
    r = with_rewards([0.0, 1.0], [1.0, 0.0])
    refill.add(r, zero_variance_groups(r))
    assert refill.take().payload.prompts == ["prompt 0"]


def test_refill_gives_up_with_the_numbers():
    refill = DynamicSamplingBuffer(target_groups=2, max_tries=1)
    r = with_rewards([0.0, 0.0])
    refill.add(r, zero_variance_groups(r))
    assert refill.exhausted
    with pytest.raises(ValueError, match="1 rollout batches gave 0 of 2 groups"):
        refill.add(r, zero_variance_groups(r))
    with pytest.raises(ValueError, match="No group was kept"):
        refill.take()


def test_removing_a_group_without_signal_keeps_the_sum_and_changes_the_mean():
    objective = get("dapo")
    r = objective.compute_advantages(with_rewards([0.0, 0.0, 0.0], [1.0, 0.0, 0.5]))
    kept, _ = drop(r, objective.filter.kept(r))
    whole, rest = objective.denominators(r), objective.denominators(kept)
    with_group = objective.loss(PolicyOutputs(r.logp_old - 0.1), r, whole).loss
    without = objective.loss(PolicyOutputs(kept.logp_old - 0.1), kept, rest).loss
    assert rest.tokens < whole.tokens
    torch.testing.assert_close(with_group * whole.tokens, without * rest.tokens)
