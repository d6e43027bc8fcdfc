"""PPO over stochastic denoising steps: AC-Flow's latent critic with a policy-gradient actor.

An image is an episode of T stochastic steps (`diffusion.sampling.trajectories`) with a reward at the end. With
V(x_t, t, c) before each trained step and R = shape(reward) after the last,

    delta_i = V(s_{i+1}) - V(s_i),    delta_T = R - V(s_T),    A_i = sum_{l >= i} lambda^(l - i) delta_l,
    loss = mean max(-A_i rho_i, -A_i clip(rho_i, 1 +- 1e-4)) + 0.04 KL,    L_V = mean (V(s_i) - R)^2,

with A_i clipped to +-5. With lambda 1, A_i is R - V(s_i), a learned baseline; with lambda 0, it is the difference
between the values around a step, like AC-Flow's `credit: difference`. AC-Flow uses it to match the whole image of a
path, which also contains later noise; here, the advantage of a step multiplies the gradient of its log-density.

This combination is new. Steps, clip range and KL come from Flow-GRPO (arXiv 2505.05470), the advantage estimator from
arXiv 1506.02438, and the critic from `diffusion.methods.ac_flow`, a reconstruction of AC-Flow (arXiv 2510.18072). The
critic has a separate optimiser (`objective.value.kind: separate`) and is evaluated before it is trained on all states
of the rollout; the policy does not change until `critic.warmup_updates`. Unlike group advantages, a critic works with a
single image per prompt.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from accelerate import Accelerator

from diffusion.diffusion_config import DiffusionConfig, TrajectoryParts
from diffusion.diffusion_recipe import TrajectoryRecipe
from diffusion.methods.latent_critic import (
    LatentCriticConfig,
    LatentStateCritic,
    RewardShaping,
    ShapingConfig,
    explained_by_time,
)
from mmrl.core.rollouts import Rollouts
from mmrl.fields import rare
from mmrl.training.objectives import ObjectiveConfig, check_objective, make_objective
from mmrl.training.recipe import LossTerm, Passes, Step


def _objective() -> ObjectiveConfig:
    return ObjectiveConfig(
        preset="flow_grpo", advantage={"kind": "gae", "gamma": 1.0, "lam": 0.95}, value={"kind": "separate"}
    )


@dataclass
class FlowPpoConfig(TrajectoryParts, DiffusionConfig):
    """A PPO run with a critic of the latents."""

    compares_samples: ClassVar[bool] = False
    shaping: ShapingConfig = rare(field(default_factory=ShapingConfig))
    """Conversion of rewards to returns; any kind except group_z, because the critic is the baseline."""
    critic: LatentCriticConfig = field(default_factory=LatentCriticConfig)
    """The value function."""
    objective: ObjectiveConfig = field(default_factory=_objective)
    """Flow-GRPO's clip and KL; gae over the steps with lambda 0.95, and a separately trained critic."""

    def validate(self) -> None:
        """Check that the parts fit together; raises ValueError."""
        super().validate()
        if self.shaping.kind == "group_z":
            raise ValueError(
                "shaping.kind is 'group_z', but the critic already provides the baseline; use another kind"
            )
        if not self.critic.enabled:
            raise ValueError("critic.enabled is false, but Flow-PPO's advantages come from the critic; set it to true")

    def check_objective(self) -> None:
        """Reject an objective that cannot use this critic; raises ValueError."""
        objective = make_objective(self.objective)
        check_objective(objective, (*self.scored, "values", "separate_critic"), None, [r.name for r in self.rewards])
        if "truncation" in self.objective.advantage:
            raise ValueError(
                "objective.advantage.truncation only applies to episodes cut off by a time limit; leave it out"
            )
        if not objective.needs_values:
            raise ValueError(
                f"objective.advantage is '{objective.advantage.kind}', which does not use the critic; use gae"
            )
        if "separate_critic" not in objective.needs:
            raise ValueError("objective.value must be of kind 'separate': the critic has a separate optimiser")


class LatentCritic(LossTerm):
    """Values V (B, T) of the states before each trained step, from a critic with a separate optimiser."""

    name = "latent_critic"
    gradient = "never"

    def __init__(self, critic: LatentStateCritic) -> None:
        self.critic = critic

    def provides(self, step: Step) -> frozenset[str]:
        """Values from this critic; the policy has no value head."""
        return frozenset({"values"})

    def prepare(self, passes: Passes, rollouts: Rollouts, step: Step) -> Rollouts:
        """Evaluate the critic before it is trained."""
        return rollouts.replace(values=self.critic.value(rollouts))


class FlowPpoRecipe(TrajectoryRecipe):
    """Policy gradient over denoising steps with a critic of their states; see the module docstring."""

    config: FlowPpoConfig

    def __init__(self, config: FlowPpoConfig) -> None:
        super().__init__(config)
        self.critic = self.parts["critic"] = LatentStateCritic(
            self.policy, self.train_tasks, config.critic, config.seed, self.process.states
        )
        self.shaping = self.parts["running"] = RewardShaping(config.shaping, self.objective)
        self.terms = [*self.terms, LatentCritic(self.critic)]

    def estimate(self, rollouts: Rollouts, accelerator: Accelerator, step: Step) -> Rollouts:
        """Advantages of the shaped reward over the steps, all masked out while the critic warms up."""
        assert rollouts.values is not None
        returns = self.shaping(rollouts, accelerator)
        # NaN stays NaN, so that the estimator still skips rows without a score; records show the plain reward
        shaped = rollouts.replace(reward=torch.where(rollouts.scored, returns, rollouts.reward))
        found = super().estimate(shaped, accelerator, step).replace(reward=rollouts.reward)
        if not self.critic.warm:
            found = found.replace(mask=torch.zeros_like(found.mask))
        self.noted |= explained_by_time(rollouts, returns, rollouts.values)
        self.noted |= self.critic.learn(rollouts, returns, accelerator, step)
        return found
