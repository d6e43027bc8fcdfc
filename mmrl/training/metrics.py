"""Numbers about a step's rollouts that every domain reports."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mmrl.core.filters import zero_variance_groups
from mmrl.core.rollouts import Rollouts

__all__ = ["batch_metrics", "metric_label"]


def metric_label(name: str) -> str:
    """A reward's name as one part of a metric's name: users' functions may be named by path."""
    return name.replace("/", ".")


def batch_metrics(batches: Sequence[Rollouts], rewards: bool) -> dict[str, float]:
    """Rewards, lengths and zero-variance groups of all that was sampled in a step, before filtering.

    Args:
        batches: rollouts of the sampling rounds.
        rewards: whether rewards mean anything here.

    Returns:
        Metrics by name; means are over scored rows, unscored rows are counted in reward/errors.
    """
    lengths = torch.cat([batch.mask.sum(1) for batch in batches])
    metrics = {
        "response/length_mean": float(lengths.mean()),
        "response/length_max": float(lengths.max()),
    }
    if not rewards:
        return metrics
    reward = torch.cat([batch.reward for batch in batches])
    scored = torch.isfinite(reward)
    flat = torch.cat([~zero_variance_groups(batch) for batch in batches]).float()
    metrics |= {
        "reward/mean": float(reward[scored].mean()) if bool(scored.any()) else float("nan"),
        "reward/std": float(reward[scored].std()) if int(scored.sum()) > 1 else 0.0,
        "reward/errors": float((~scored).sum()),
        "reward/zero_variance_groups": float(flat.mean()),
    }
    for name in batches[0].reward_terms:
        values = torch.cat([batch.reward_terms[name] for batch in batches])
        finite = values[torch.isfinite(values)]
        if len(finite):
            metrics[f"reward/{metric_label(name)}"] = float(finite.mean())
    return metrics
