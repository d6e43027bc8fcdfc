"""APO, Asymmetric Policy Optimization (View-R1, arXiv 2506.21655; public code Indolent-Kawhi/View-R1).

Positive and negative samples are treated differently inside GRPO:

- DADS, difficulty-adaptive divergence shaping: the KL penalty of positive samples is weighted by
  w = 1 - exp(-e (1 - d)), d the fraction of wrong answers in the group; 1 for negatives and for d in {0, 1}.
- STCR, suboptimal complexity regularisation: the advantage of a wrong sample longer than the mean correct
  one by delta tokens is multiplied by 1 + (1 - base^-delta).

The policy term is a token mean, the KL (k3, unclamped) a mean of per-sample means, as in the code. Difference from
the code: correctness is the reward term named by `accuracy_reward`, not the truncated total reward. With the published
base 1.00001 STCR is almost inert (1000 tokens too long multiply by 1.00995); `apo/length_multiplier_mean` shows it.
Defaults follow examples/scripts/train_grpo.sh: clip 0.2, KL 1e-3, std epsilon 1e-9.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from accelerate import Accelerator
from torch import Tensor

from mmrl.core.blocks.advantage import GroupMeanStd, group_sum
from mmrl.core.loss import row_metric
from mmrl.core.rollouts import Rollouts
from mmrl.fields import bounded, choice
from mmrl.rewards.reward_loading import load_function
from mmrl.training.objectives import ObjectiveConfig, make_objective
from mmrl.training.recipe import Step
from mmrl.vlm.vlm_config import VlmConfig
from mmrl.vlm.vlm_recipe import VlmRecipe


@dataclass
class ApoSettings:
    """Options of the two asymmetric parts."""

    dads: str = choice("one_minus_exp", lambda: ("off", *DADS_SHAPES), or_function=True)
    """Shape of the KL weight of positives: one_minus_exp (active in the code), exp, off, or a module:function of d."""
    stcr_base: float = bounded(1.00001, at_least=1)
    """Base of the length penalty of incorrect samples; 1 disables it. Small models need about 1.01 to 1.05."""


@dataclass
class ApoConfig(VlmConfig):
    """An APO run."""

    apo: ApoSettings = field(default_factory=ApoSettings)
    """DADS and STCR."""
    objective: ObjectiveConfig = field(default_factory=lambda: ObjectiveConfig(preset="apo"))
    """Base objective; APO needs group standardisation and a KL term in the loss."""

    def validate(self) -> None:
        """Check that the parts fit together; raises ValueError."""
        super().validate()
        objective = make_objective(self.objective)
        if not isinstance(objective.advantage, GroupMeanStd):
            raise ValueError(f"APO needs objective.advantage.kind=group_mean_std, not {objective.advantage.kind}")
        if self.apo.dads != "off" and (objective.kl_in_reward or not objective.needs_reference):
            raise ValueError(
                "apo.dads weights the KL term of the loss, but the objective has none; set objective.kl.coef > 0 and "
                "objective.kl.in_reward=false, or apo.dads=off"
            )


def difficulty(correct: Tensor, group: Tensor) -> Tensor:
    """Fraction d (B,) of incorrect samples in each row's group; 1 if no sample of the group was scored.

    `correct` (B,) is 1 for right, 0 for wrong and NaN for samples without a score, which do not count.

    Source: View-R1, openrlhf/trainer/ppo_utils/experience_maker.py.
    """
    scored = torch.isfinite(correct).to(correct.dtype)
    size = len(group)  # there are no more groups than rows
    solved, count = group_sum(correct.nan_to_num(), group, size), group_sum(scored, group, size)
    return (1.0 - solved / count.clamp(min=1))[group]


def length_multipliers(lengths: Tensor, correct: Tensor, group: Tensor, base: float) -> Tensor:
    """STCR: factor 1 + s (B,), s in [0, 1), on the advantage of incorrect samples longer than the mean correct one.

    `lengths` (B,) are response tokens with the end token, `correct` is that of `difficulty`, and `base` is b of
    1 - b^-delta. The factor is 1 in groups without a correct sample.

    Source: View-R1, openrlhf/trainer/ppo_utils/experience_maker.py.
    """
    lengths = lengths.to(torch.float32)
    right, wrong = (correct == 1.0).to(lengths.dtype), (correct == 0.0).to(lengths.dtype)
    solved = group_sum(right, group, len(group))[group]
    mean_correct = group_sum(lengths * right, group, len(group))[group] / (solved + 1e-9)
    excess = ((lengths - mean_correct) * wrong).clamp(min=0.0)
    extra = -torch.expm1(-excess * math.log(base))
    return 1.0 + torch.where(solved > 0, extra, torch.zeros_like(extra))


def kl_weights(advantage: Tensor, hardness: Tensor, shape: Callable[[Tensor], Tensor]) -> Tensor:
    """DADS: weight (B,) of each sample's KL penalty, `shape` of the difficulty d (B,); 1 if A <= 0 or d is 0 or 1.

    Source: View-R1, openrlhf/trainer/ppo_utils/experience_maker.py.
    """
    plain = (advantage <= 0) | (hardness <= 0) | (hardness >= 1)
    return torch.where(plain, torch.ones_like(hardness), shape(hardness))


class ApoRecipe(VlmRecipe):
    """GRPO with difficulty-weighted KL for positives and a length penalty for negatives."""

    config: ApoConfig

    def advantages(self, rollouts: Rollouts, accelerator: Accelerator, step: Step) -> Rollouts:
        """Group advantages times the STCR factor, together with the DADS weights."""
        lengths = rollouts.mask.sum(1)  # of truncated responses too, which may leave the update
        rollouts = super().advantages(rollouts, accelerator, step)
        scored = rollouts.scored & torch.isfinite(rollouts.reward_terms[self.accuracy_term])
        correct = torch.where(scored, self.correct(rollouts).to(torch.float32), float("nan"))
        factor = length_multipliers(lengths, correct, rollouts.group, self.config.apo.stcr_base)
        assert rollouts.advantage is not None
        advantage = rollouts.advantage * factor[:, None]
        hardness = difficulty(correct, rollouts.group)
        self.noted["apo/length_multiplier_mean"] = row_metric(factor)
        self.noted["apo/difficulty_mean"] = row_metric(hardness)
        if self.config.apo.dads == "off":
            return rollouts.replace(advantage=advantage)
        weight = kl_weights(advantage[:, 0], hardness, self._shape())
        self.noted["apo/kl_weight_mean"] = row_metric(weight)
        return rollouts.replace(advantage=advantage, extras={**rollouts.extras, "kl_weight": weight})

    def describe(self) -> str:
        """The objective's formula and the two asymmetric parts."""
        return "\n".join(
            [
                super().describe(),
                f"APO: KL of positive samples times {self.config.apo.dads}(fraction of wrong samples in the group);",
                f"     A of wrong ones times 2 - {self.config.apo.stcr_base:g}^-(tokens beyond the mean correct one)",
            ]
        )

    def _shape(self) -> Callable[[Tensor], Tensor]:
        name = self.config.apo.dads
        return DADS_SHAPES[name] if name in DADS_SHAPES else load_function(name, what="apo.dads")


DADS_SHAPES: dict[str, Callable[[Tensor], Tensor]] = {
    "one_minus_exp": lambda d: 1.0 - torch.exp(-math.e * (1.0 - d)),
    "exp": lambda d: torch.exp(-math.e * d),
}
