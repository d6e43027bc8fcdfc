"""Changes to estimated advantages: whitening, a bound, a factor."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from mmrl.core.blocks.block import Block
from mmrl.core.groups import masked_whiten, whitening_factor
from mmrl.core.loss import masked_mean
from mmrl.core.returns import turn_means
from mmrl.core.rollouts import Rollouts
from mmrl.fields import bounded, choice, rare


@dataclass(frozen=True)
class AdvantageScaling(Block):
    """Whitens, bounds and scales advantages, in this order."""

    kind = "scaling"
    whiten: str = rare(choice("none", ("none", "decisions", "rows", "turns")))
    """Bring the advantages of the rollout step to mean 0 and variance 1, where these count as one sample each: all
    trained "decisions" (PPO in verl), "rows" or "turns" with the mean of their decisions; "none" leaves them."""
    clip: float | None = rare(bounded(None, above=0))
    """Largest size of an advantage; larger ones are set to +-clip. None does not clip."""
    eps_to: str = rare(choice("variance", ("variance", "deviation")))
    """Whitening adds 1e-8 to the "variance", inside the root (verl), or to the standard "deviation" (VL-DAC)."""
    scale: float = rare(bounded(1.0, above=0, below=math.inf))
    """Factor, after clipping (AWM: 0.2 after a clip of 5, so that advantages stay within +-1)."""

    def __call__(self, advantage: Tensor, rollouts: Rollouts) -> Tensor:
        """Scaled advantages (B, T), 0 where nothing is trained."""
        advantage = WHITENINGS[self.whiten](advantage, rollouts, self.eps_to)
        if self.clip is not None:
            advantage = advantage.clamp(-self.clip, self.clip)
        return advantage * self.scale

    def needed_turns(self) -> frozenset[str]:
        """Inputs that whitening requires."""
        return frozenset({"turns"}) if self.whiten == "turns" else frozenset()

    def formula(self) -> str:
        return "".join(self._steps())

    def _steps(self) -> Iterator[str]:
        if self.whiten != "none":
            yield f"; then whitened over all trained {self.whiten}"
        if self.clip is not None:
            yield f"; then limited to +-{self.clip:g}"
        if self.scale != 1:
            yield f"; then times {self.scale:g}"


def _not(advantage: Tensor, rollouts: Rollouts, eps_to: str) -> Tensor:
    return advantage


def _over_decisions(advantage: Tensor, rollouts: Rollouts, eps_to: str) -> Tensor:
    return masked_whiten(advantage, rollouts.loss_mask, eps_to)


def _over_rows(advantage: Tensor, rollouts: Rollouts, eps_to: str) -> Tensor:
    mask = rollouts.loss_mask
    return _by_samples(advantage, masked_mean(advantage, mask)[mask.sum(1) > 0], mask, eps_to)


def _over_turns(advantage: Tensor, rollouts: Rollouts, eps_to: str) -> Tensor:
    means, trained = turn_means(rollouts, advantage)
    return _by_samples(advantage, means[trained], rollouts.loss_mask, eps_to)


def _by_samples(advantage: Tensor, samples: Tensor, mask: Tensor, eps_to: str) -> Tensor:
    """Shift and scale advantages by the mean and the deviation of samples (n,)."""
    mean = samples.mean() if len(samples) else samples.new_zeros(())
    variance = ((samples - mean) ** 2).sum() / max(len(samples) - 1, 1)
    return torch.where(mask > 0, (advantage - mean) * whitening_factor(variance, eps_to), 0.0)


WHITENINGS = {"none": _not, "decisions": _over_decisions, "rows": _over_rows, "turns": _over_turns}
SCALINGS: dict[str, type[AdvantageScaling]] = {AdvantageScaling.kind: AdvantageScaling}
