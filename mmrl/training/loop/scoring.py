"""From scored samples to rollouts with rewards, and the count of what could not be scored."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Protocol

import torch

from mmrl.core.rollouts import Rollouts
from mmrl.errors import RunError
from mmrl.training.record.metrics import metric_label

__all__ = ["Scored", "error_metrics", "note_errors", "with_rewards"]

LOGGER = logging.getLogger("mmrl")


class Scored(Protocol):
    """Rewards of B rows, as `mmrl.rewards.RewardResult` has them."""

    @property
    def total(self) -> Sequence[float]:
        """Weighted sums; NaN where a row could not be scored."""

    @property
    def terms(self) -> Mapping[str, Sequence[float]]:
        """Unweighted values by term."""

    @property
    def errors(self) -> Mapping[str, int]:
        """Failed rows by "term/kind"."""

    @property
    def examples(self) -> Mapping[str, str]:
        """The first message of each entry of `errors`."""


def with_rewards(rollouts: Rollouts, result: Scored) -> Rollouts:
    """Fill the rewards of rollouts; a row with a failed term keeps NaN and is left out of the loss.

    Args:
        rollouts: B rows.
        result: their scores.

    Returns:
        The rollouts with `reward` and `reward_terms`.

    Raises:
        RunError: no row could be scored.
    """
    device = rollouts.mask.device
    total = torch.tensor(result.total, dtype=torch.float32, device=device)
    if bool(torch.isnan(total).all()):
        reasons = "; ".join(f"{name}: {message}" for name, message in result.examples.items())
        raise RunError(f"every reward of this step failed: {reasons}")
    terms = {name: torch.tensor(values, dtype=torch.float32, device=device) for name, values in result.terms.items()}
    return rollouts.replace(reward=total, reward_terms=terms)


def note_errors(errors: Counter[str], result: Scored) -> None:
    """Add failures to a count and log the first of each kind.

    Args:
        errors: failures so far by "term/kind"; changed.
        result: scores.
    """
    for name, count in result.errors.items():
        if not errors[name]:
            LOGGER.warning("reward %s failed: %s", name, result.examples.get(name, ""))
        errors[name] += count


def error_metrics(errors: Mapping[str, int]) -> dict[str, float]:
    """Failures so far as metrics reward/errors/<term>/<kind>."""
    parts = {name: name.rpartition("/") for name in errors}
    return {f"reward/errors/{metric_label(parts[name][0])}/{parts[name][2]}": float(n) for name, n in errors.items()}
