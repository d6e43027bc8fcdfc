"""PPO over stochastic denoising steps with a critic of the latents: AC-Flow's critic, and a policy gradient for actor.

An image is an episode of T stochastic steps (`diffusion.sampling.trajectories`) that is rewarded at its end. With
V(x_t, t, c) before each trained step and R = shape(reward) after the last,

    delta_i = V(s_{i+1}) - V(s_i),    delta_T = R - V(s_T),    A_i = sum_{l >= i} lambda^(l - i) delta_l,
    loss = mean max(-A_i rho_i, -A_i clip(rho_i, 1 +- 1e-4)) + 0.04 KL,    L_V = mean (V(s_i) - R)^2,

with A_i within +-5. lambda 1 is R - V(s_i), a learned baseline; lambda 0 is the difference of the values around a step,
as AC-Flow's `credit: difference`. AC-Flow matches the whole image of a path with it, of which later noise is a part;
here the advantage of a step multiplies the gradient of that step's own log-density.

The combination is the suite's own. Steps, clip range and KL are Flow-GRPO's (arXiv 2505.05470), the estimator is that
of arXiv 1506.02438, and the critic that of `diffusion.methods.ac_flow`, a reconstruction of AC-Flow's (arXiv
2510.18072). It has an optimiser of its own (`objective.value.kind: separate`) and is asked before it is trained on
all states of the rollout; until `critic.warmup_updates` the policy stays as it is. Unlike groups, a critic needs no
second image of a prompt.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from accelerate import Accelerator

from diffusion.config import DiffusionConfig, TrajectoryParts
from diffusion.methods.critic import (
    CriticConfig,
    RewardShaping,
    ShapingConfig,
    StateCritic,
    explained_by_time,
)
from diffusion.methods.trajectory import TrajectoryRecipe
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
    """A run of PPO with a critic of the latents."""

    compares_samples: ClassVar[bool] = False
    shaping: ShapingConfig = rare(field(default_factory=ShapingConfig))
    """Rewards to returns, of any kind but group_z: the critic is the baseline."""
    critic: CriticConfig = field(default_factory=CriticConfig)
    """The value function."""
    objective: ObjectiveConfig = field(default_factory=_objective)
    """Flow-GRPO's clip and KL; gae over the steps with lambda 0.95, and a critic that is trained apart."""

    def validate(self) -> None:
        """Check that the parts fit together; raises ValueError."""
        super().validate()
        if self.shaping.kind == "group_z":
            raise ValueError("shaping.kind is 'group_z', but here the critic is the baseline; use another kind")
        if not self.critic.enabled:
            raise ValueError("critic.enabled is false, but Flow-PPO's advantages come from the critic; leave it true")

    def check_objective(self) -> None:
        """Refuse an objective that has no place for this critic; raises ValueError."""
        objective = make_objective(self.objective)
        check_objective(objective, (*self.scored, "values", "separate_critic"), None, [r.name for r in self.rewards])
        if "truncation" in self.objective.advantage:
            raise ValueError("objective.advantage.truncation is for episodes that a time limit ends; leave it out")
        if not objective.needs_values:
            raise ValueError(f"objective.advantage is '{objective.advantage.kind}', which asks no critic; use gae")
        if "separate_critic" not in objective.needs:
            raise ValueError("objective.value must be of kind 'separate': the critic has an optimiser of its own")


class LatentCritic(LossTerm):
    """Values V (B, T) of the states before each trained step, from a critic with a separate optimiser."""

    name = "latent_critic"
    gradient = "never"

    def __init__(self, critic: StateCritic) -> None:
        self.critic = critic

    def provides(self, step: Step) -> frozenset[str]:
        """The values; the policy has no value head."""
        return frozenset({"values"})

    def prepare(self, passes: Passes, rollouts: Rollouts, step: Step) -> Rollouts:
        """Ask the critic before it is trained."""
        return rollouts.replace(values=self.critic.value(rollouts))


class FlowPpoRecipe(TrajectoryRecipe):
    """Policy gradient over denoising steps with a critic of their states; see the module."""

    config: FlowPpoConfig

    def __init__(self, config: FlowPpoConfig) -> None:
        super().__init__(config)
        self.critic = self.parts["critic"] = StateCritic(
            self.policy, self.train_tasks, config.critic, config.seed, self.process.states
        )
        self.shaping = self.parts["running"] = RewardShaping(config.shaping, self.objective)
        self.terms = [*self.terms, LatentCritic(self.critic)]

    def estimate(self, rollouts: Rollouts, accelerator: Accelerator, step: Step) -> Rollouts:
        """Advantages of the shaped reward over the steps; none of them counts while the critic warms up."""
        assert rollouts.values is not None
        returns = self.shaping(rollouts, accelerator)
        shaped = rollouts.replace(reward=torch.where(rollouts.scored, returns, rollouts.reward))
        found = super().estimate(shaped, accelerator, step).replace(reward=rollouts.reward)
        if not self.critic.warm:
            found = found.replace(mask=torch.zeros_like(found.mask))
        self.noted |= explained_by_time(rollouts, returns, rollouts.values)
        self.noted |= self.critic.learn(rollouts, returns, accelerator, step)
        return found
