"""AEPO: screen grounding with several points, an adaptive exploration reward and leave-one-out advantages.

A policy that is sure of a wrong element fails in all samples of a group and learns nothing. AEPO lets one response
give N points, ordered by preference, and pays 1/sqrt(N k) where the k-th is the first inside the target and -1/N if
none is (plus 1 for the format; -1 for a wrong format or three points on a line), so a group explores more elements
than it has samples, and a right element moves from a later rank to the first.

The defaults are those of the public scripts (run_3b.sh): RLOO, clip 0.2/0.4, dual clip 3, no KL, means of response
means, 128 questions x 8 samples, learning rate 1e-6. With one optimiser step a batch the ratio is 1 and the clip does
nothing, there as here. Targets are in pixels of the original image and the resize is done here, where the public data
are resized beforehand. The figure's advantages are GRPO's: `objective: {preset: grpo}`.

The baselines are options: naive RLVR is `accuracy: first, max_answers: 1` with a prompt that asks for one point, the
ablation of the reward is `accuracy: any`.

Source: InfiXAI/InfiGUI-G1 recipe/infigui-g1; arXiv 2508.05731.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from accelerate import Accelerator

from mmrl.core.blocks.advantage import group_sum
from mmrl.core.loss import Metric
from mmrl.core.rollouts import Rollouts
from mmrl.gui.grounding.grounding_tasks import FIRST_CORRECT, GroundingParts, Screens
from mmrl.gui.grounding.rewards import point_rewards
from mmrl.rewards import RewardConfig
from mmrl.training.objectives import ObjectiveConfig
from mmrl.training.recipe import Step
from mmrl.vlm.data.prompt import VlmPayload
from mmrl.vlm.vlm_config import VlmConfig
from mmrl.vlm.vlm_recipe import VlmRecipe

KIND = "kind"
"""Column with the kind of instruction."""


@dataclass
class AepoConfig(GroundingParts, VlmConfig):
    """An AEPO run."""

    rewards: list[RewardConfig] = field(default_factory=list)
    """Reward terms in addition to `point`, or all of them with `answer: null`."""
    accuracy_reward: str = FIRST_CORRECT
    """Reward term used to score correctness in evaluations (1 = correct): the first point is inside the target. With
    `answer: null`, name one of `rewards`."""
    objective: ObjectiveConfig = field(default_factory=lambda: ObjectiveConfig(preset="aepo"))
    """Objective to optimise. Default: RLOO with clip 0.2/0.4, dual clip 3, no KL, mean of response means."""

    def validate(self) -> None:
        """Check that the parts fit together; raises ValueError."""
        self.check_screens()
        # with the point rewards, as the run will have them
        VlmConfig.validate(self.scored())

    def scored(self) -> AepoConfig:
        """The same configuration with `point` and its parts among the rewards."""
        return replace(self, rewards=[*(point_rewards(self.answer) if self.answer else ()), *self.rewards])


class AepoRecipe(VlmRecipe):
    """Asks about screens, rewards exploration, and logs by kind of instruction which groups have no signal."""

    config: AepoConfig

    def __init__(self, config: AepoConfig) -> None:
        super().__init__(config.scored(), Screens(config))

    def advantages(self, rollouts: Rollouts, accelerator: Accelerator, step: Step) -> Rollouts:
        """Compute advantages; also log the fraction of groups with equal rewards, by kind of instruction."""
        kinds = [str(task.columns.get(KIND, "")) for task in VlmPayload.of(rollouts).tasks]
        self.noted |= no_signal(rollouts, kinds)
        return super().advantages(rollouts, accelerator, step)


def no_signal(rollouts: Rollouts, kinds: list[str]) -> dict[str, Metric]:
    """Fraction of groups without signal, by kind of instruction."""
    scored = rollouts.reward.isfinite()
    reward = torch.where(scored, rollouts.reward, torch.zeros_like(rollouts.reward))
    groups = rollouts.num_groups
    counts = group_sum(scored.to(reward.dtype), rollouts.group, groups)
    mean = group_sum(reward, rollouts.group, groups) / counts.clamp(min=1)
    away = ((reward - mean[rollouts.group]).abs() > SAME) & scored
    # a group without any scored row has no signal either
    flat = (group_sum(away.long(), rollouts.group, groups) == 0).tolist()
    shares = {kind: [flat[i] for i, other in enumerate(kinds) if other == kind] for kind in sorted(set(kinds)) if kind}
    return {f"aepo/no_signal/{kind}": Metric(float(sum(own)), len(own)) for kind, own in shares.items()}


SAME = 1e-6
"""Rewards closer than this to their mean count as equal; the smallest step of the reward is far larger."""
