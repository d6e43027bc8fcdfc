"""GRPO on episodes: the baseline whose reward is success, or a hand-written dense reward, alone.

    A_i = (R_i - mean_group R) / (std_group R + eps),
    loss = mean over episodes of the mean over their decisions of max(-A r, -A clip(r, 1 - 0.2, 1 + 0.28)),

with the dual clip 3 for negative advantages, no KL and no critic; groups whose episodes all have the same reward are
left out. `reward: sparse` is 1 for success and else 0. `reward: dense` is the simulator's own reward at the end of the
episode (in the tabletop tasks a number from 0 to 1 that grows with progress, 1 at success), on its own scale.

Source: SimpleVLA-RL (arXiv 2509.09674, PRIME-RL/SimpleVLA-RL) and the GRPO arm of SRPO (arXiv 2511.15605,
sii-research/siiRL examples/embodied_srpo_trainer) for clip range, aggregation and filter.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from mmrl.core.rollouts import Rollouts
from mmrl.fields import choice
from mmrl.training.loop.objectives import ObjectiveConfig
from robotics.vla.payload import EpisodePayload
from robotics.vla.recipe import RobotConfig, RobotRecipe

__all__ = ["RobotGrpoConfig", "RobotGrpoRecipe"]

REWARDS = ("sparse", "dense")


@dataclass
class RobotGrpoConfig(RobotConfig):
    """A GRPO run of a robot policy."""

    reward: str = choice("sparse", REWARDS)
    """sparse: 1 for success, else 0; dense: the simulator's reward at the end of the episode."""
    objective: ObjectiveConfig = field(default_factory=lambda: ObjectiveConfig(preset="srpo"))
    """Advantage, clip range and aggregation; those of SRPO, so that only the reward differs."""


class RobotGrpoRecipe(RobotRecipe):
    """Success or a dense reward; see the module."""

    config: RobotGrpoConfig

    def rewards(self, rollouts: Rollouts) -> tuple[Tensor, dict[str, Tensor]]:
        """The chosen reward; success and the dense reward are both reported."""
        payload = EpisodePayload.of(rollouts)
        sparse = self.config.reward == "sparse"
        return payload.success.float() if sparse else payload.progress, {"dense": payload.progress}
