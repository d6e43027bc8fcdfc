"""Metrics of the samples of a step."""

import torch

from mmrl.runs.run_log import batch_metrics
from tests.core.builders import random_rollouts

OF_GROUPS = {"reward/zero_variance_groups", "reward/std_within_groups"}


def test_groups_of_one_have_no_spread_to_report():
    alone = random_rollouts(groups=3, samples=1).replace(reward=torch.tensor([0.0, 1.0, 0.5]))
    assert not OF_GROUPS & set(batch_metrics([alone], ("reward",)))
    reward = torch.tensor([1.0, 1.0, 1.0, 0.0])
    grouped = random_rollouts(groups=2, samples=2).replace(reward=reward)
    metrics = batch_metrics([grouped], ("reward",))
    assert metrics["reward/zero_variance_groups"] == 0.5
    assert metrics["reward/std_within_groups"] == 0.25


def test_a_single_reward_has_no_deviation():
    one = random_rollouts(groups=1, samples=1)
    assert "reward/std" not in batch_metrics([one], ("reward",))
    two = random_rollouts(groups=1, samples=2).replace(reward=torch.tensor([0.0, 1.0]))
    assert "reward/std" in batch_metrics([two], ("reward",))
