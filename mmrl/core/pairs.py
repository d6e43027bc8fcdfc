"""Preferred and rejected answers to the same prompts, as pairs of rows of `Rollouts`.

Shapes: N pairs, B = 2 N rows of T decisions; K = 1 where a row has one score, K = T where each decision has its own.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mmrl.core.rollouts import Rollouts

CHOSEN = "chosen"
"""Key of `Rollouts.extras` (B,): 1 on the preferred row of a group, 0 on the rejected one."""
SCORE = "pair_score"
"""Key of `Rollouts.extras` (B,): the score that a judge or reward model gave the row, where a loss reads it."""


@dataclass(frozen=True)
class Pairs:
    """Inputs of a preference loss on M pairs; w is the preferred (winning) side, l the rejected (losing) one."""

    logp_w: Tensor
    """(M,) nats under the policy, summed or averaged over the side's decisions; carries the gradient."""
    logp_l: Tensor
    """(M,)."""
    ref_w: Tensor | None = None
    """(M,) the same under the reference; None for losses without one."""
    ref_l: Tensor | None = None
    """(M,)."""
    score_w: Tensor | None = None
    """(M,) score of the side in the data; None where the data has none."""
    score_l: Tensor | None = None
    """(M,)."""

    @property
    def log_ratio_w(self) -> Tensor:
        """(M,) log-ratio of policy to reference of the preferred side; the reference is a constant."""
        return self.logp_w if self.ref_w is None else self.logp_w - self.ref_w.detach()

    @property
    def log_ratio_l(self) -> Tensor:
        """(M,) log-ratio of policy to reference of the rejected side."""
        return self.logp_l if self.ref_l is None else self.logp_l - self.ref_l.detach()

    @property
    def margin(self) -> Tensor:
        """(M,) how much more the policy than the reference prefers w to l, in nats."""
        return self.log_ratio_w - self.log_ratio_l


def pair_rows(rollouts: Rollouts) -> tuple[Tensor, Tensor]:
    """Find the two rows of each group.

    Args:
        rollouts: N groups of two rows, marked in `extras[CHOSEN]`.

    Returns:
        Rows of the preferred and of the rejected sides, each (N,) int64, group by group.

    Raises:
        ValueError: The rows are not marked, or a group is not one preferred and one rejected row.
    """
    mark = rollouts.extras.get(CHOSEN)
    if mark is None:
        raise ValueError(f"these rollouts hold no pairs: extras['{CHOSEN}'] (1 preferred, 0 rejected) is missing.")
    wanted = torch.arange(rollouts.num_groups, device=rollouts.group.device)
    sides = []
    for name, rows in (("preferred", mark > 0.5), ("rejected", mark <= 0.5)):
        places = torch.nonzero(rows).flatten()
        places = places[torch.argsort(rollouts.group[places], stable=True)]
        if len(places) != len(wanted) or not torch.equal(rollouts.group[places], wanted):
            raise ValueError(
                f"a pair is one preferred and one rejected row; {len(wanted)} groups have {len(places)} {name} rows. "
                "Micro-batches of at least 2 rows keep pairs whole."
            )
        sides.append(places)
    return sides[0], sides[1]
