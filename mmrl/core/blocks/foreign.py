"""Clip rules and weights for text that the policy did not sample: rows of teachers, and hints inside its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from mmrl.core.blocks.clip import BoundedClip, Loss, clip_indicators, clipped_loss
from mmrl.core.blocks.turns import Weight
from mmrl.core.loss import PolicyOutputs, required
from mmrl.core.rollouts import Rollouts
from mmrl.fields import bounded, rare

if TYPE_CHECKING:
    from torch import Tensor

SOURCE = "source"
"""Extra (B,) int64 of rollouts: 0 for samples of the policy, 1 for samples after a hint, 2 for answers from a teacher
or the data."""
TEACHER = 2
HINTED = "hinted"
"""Extra (B, T) of rollouts: 1 for decisions that were given as a hint, 0 for those of the policy."""


@dataclass(frozen=True)
class OffPolicyShaping(BoundedClip):
    """Clipped surrogate for samples of the policy; -A p / (p + shape), without a ratio, for answers of a teacher.

    p is the policy's own probability of the token: the gradient is largest if p is small, and fades once the token is
    learned. Rows without a source are samples.

    Source: LUFFY, arXiv 2504.14945; SII-Enigma/AMPO mix_core_alg.py, off_policy_reshape p_div_p_0.1.
    """

    kind = "off_policy_shaping"
    dual: float | None = rare(bounded(None, above=1))
    """Bound c > 1 on the loss -A c of samples with a negative advantage; null disables it."""
    shape: float = rare(bounded(0.1, above=0))
    """Probability at which the factor of a teacher's token is 1/2."""

    def __call__(self, log_ratio: Tensor, logp: Tensor, advantage: Tensor, turn: Tensor | None = None) -> Loss:
        """See `Clip`; of samples alone."""
        loss = clipped_loss(log_ratio, advantage, self.low, self.high, self.dual)
        return loss, clip_indicators(log_ratio.exp(), self.low, self.high, signed=advantage.detach())

    def of_rollouts(self, log_ratio: Tensor, outputs: PolicyOutputs, advantage: Tensor, rollouts: Rollouts) -> Loss:
        loss, indicators = self(log_ratio, outputs.logp, advantage)
        if SOURCE not in rollouts.extras:
            return loss, indicators
        given = (rollouts.extras[SOURCE] == TEACHER)[:, None].expand_as(loss)
        p = outputs.logp.exp()
        loss = torch.where(given, -advantage.detach() * p / (p + self.shape), loss)
        indicators = {name: value.masked_fill(given, 0.0) for name, value in indicators.items()}
        return loss, indicators | {"policy/given": given.to(loss.dtype)}

    def formula(self) -> str:
        own = f"max(-A_it r_it, -A_it {self.clipped()})"
        if self.dual is not None:
            own = f"[{own}, where A_it < 0 at most -{self.dual:g} A_it]"
        return f"{own}; of a teacher's answer -A_it p_it / (p_it + {self.shape:g})"


@dataclass(frozen=True)
class HintedEntropy(Weight):
    """Learns from hinted decisions only if the policy is unsure: in each row, those with the highest entropy.

    The policy's own decisions have the same weight as the hinted ones that are kept, and the loss is divided by the
    number of both.

    Source: IGPO (inpainting), arXiv 2509.10396; facebookresearch/igpo trainer_igpo.py, entropy_clipping_ratio_inpaint.
    """

    kind = "hinted_entropy"
    needs = frozenset({"entropy_old", "hints"})
    weighs_kl = True
    share: float = bounded(0.2, above=0, at_most=1)
    """Fraction of a row's hinted decisions to keep (at least one)."""

    def __call__(self, rollouts: Rollouts) -> Tensor:
        entropy = required(rollouts.entropy, "rollouts.entropy", "weight 'hinted_entropy' selects decisions by it")
        found = rollouts.extras.get(HINTED)
        hinted = required(found, f"rollouts.extras['{HINTED}']", "weight 'hinted_entropy' needs it") > 0
        own, given = rollouts.loss_mask > 0, hinted & (rollouts.loss_mask > 0)
        most = (given.sum(1, keepdim=True).double() * self.share).long().clamp(min=1)
        rank = entropy.masked_fill(~given, float("-inf")).argsort(dim=1, descending=True, stable=True).argsort(dim=1)
        kept = (own & (~given | (rank < most))).to(entropy.dtype)
        return kept * (own.sum() / kept.sum().clamp(min=1))

    def formula(self) -> str:
        return (
            f"u_it = N / N_kept for own decisions and the {100 * self.share:g}% of each row's hinted ones with the "
            "highest entropy, 0 for the other hinted ones"
        )
