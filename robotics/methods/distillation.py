"""Distillation: a robot policy learns from a teacher's probabilities of its decisions in states that it reaches.

The advantage of each decision is

    A_it <- task A_it + reward (log q_it - logp_old_it),

with q the teacher, a frozen policy: a larger one, or an earlier one of the same task. With `task` 0, the default, this
is the reverse KL of the policy to the teacher on the policy's own samples, and the rewards only measure. The teacher
must take decisions of the same form: action tokens, control steps of a Gaussian, or denoising steps of a flow, where
both chains go through the same points. Its temperature is that of acting.

With `divergence` the loss gets divergence * mean D(policy, teacher), the exact divergence over all tokens or between
Gaussians, if the policy's decisions have such a distribution given the observation.

Names and options are those of recipe `distil`, which does the same for text and images.

Source: Thinking Machines, on-policy distillation (2025); RLinf/RLinf rlinf/algorithms, advantages and loss "opd".
    RLinf's loss is `clip: {kind: policy_gradient}`; the default here is the importance-weighted loss, as for text, and
    both are the same with one update a step.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from mmrl.core.objectives.objective import PolicyOutputs
from mmrl.core.rollouts import Rollouts
from mmrl.errors import UserError
from mmrl.fields import SET, bounded, only_with
from mmrl.training.distillation import DistilWeights, TeacherTerm, importance_weighted
from mmrl.training.objectives import ObjectiveConfig
from mmrl.training.recipe import Step, opening
from robotics.methods.grpo import EpisodeRewardParts, RobotGrpoRecipe
from robotics.methods.robot_recipe import RobotConfig
from robotics.policies.base.action_policy import ActionPolicy
from robotics.policies.policy_loading import ActionPolicyConfig, check_fit, load_action_policy
from robotics.sim.episodes import RobotSim


@dataclass
class RobotDistilSettings(DistilWeights):
    """Weights of the teacher term and of the rewards."""

    beta: float = only_with(bounded(1.0, at_least=0, at_most=1), divergence=SET)
    """Kind of divergence: 0 is KL(teacher || policy), 1 is KL(policy || teacher); for tokens, values in between are the
    generalised Jensen-Shannon divergence of this mixture."""


@dataclass
class RobotDistilConfig(EpisodeRewardParts, RobotConfig):
    """A distillation run of a robot policy."""

    teacher: ActionPolicyConfig = field(default_factory=ActionPolicyConfig)
    """The teacher policy: the folder of a saved policy or run, or a kind with its options."""
    distil: RobotDistilSettings = field(default_factory=RobotDistilSettings)
    """Weights of the teacher term and of the rewards."""
    objective: ObjectiveConfig = field(default_factory=importance_weighted)
    """Policy loss on the advantages; the default is the importance-weighted loss without clipping or KL to the
    start."""

    @property
    def compared_samples(self) -> int | None:
        """Advantages of the rewards only count if `distil.task` is set."""
        return super().compared_samples if self.distil.task else None

    def validate(self) -> None:
        """Check that there is a teacher; raises ValueError."""
        super().validate()
        if self.teacher == ActionPolicyConfig():
            raise ValueError("teacher is not set; set teacher.path to the folder of a saved policy or run")


class RobotDistilRecipe(RobotGrpoRecipe):
    """Distillation of a robot policy; see the module."""

    config: RobotDistilConfig

    def __init__(
        self, config: RobotDistilConfig, policy: ActionPolicy | None = None, sim: RobotSim | None = None
    ) -> None:
        super().__init__(config, policy, sim)
        with opening(self.opened):
            self.teacher = load_action_policy(config.teacher, self.sim, config.seed).requires_grad_(False).eval()
            check_fit(self.teacher, self.sim, config.teacher.accept_other)
            check_teacher(self.teacher, self.policy)
            if config.distil.divergence:
                check_divergence(self.policy, config.distil.beta)
        self.distillation = TeacherTerm(config.distil, self._score, self._divergence)
        self.terms = [*self.terms, self.distillation]

    def advantages(self, rollouts: Rollouts, accelerator: Accelerator, step: Step) -> Rollouts:
        """Weigh the objective's advantages, and add the teacher's reward of each decision."""
        return self.distillation.teach(super().advantages(rollouts, accelerator, step))

    def _score(self, policy: nn.Module, rollouts: Rollouts, outputs: frozenset[str]) -> PolicyOutputs:
        """The teacher's log-probabilities of the decisions."""
        return self.scores(self.teacher.to(rollouts.mask.device), rollouts, frozenset({"logp"}))

    def _divergence(self, policy: nn.Module, minibatch: Rollouts, scores: PolicyOutputs) -> Tensor:
        """Exact divergence (B, T) from the teacher; 0 at decisions that are not trained."""
        inputs, _, place = self.scored_chunks(minibatch)
        temperature = self.config.acting.temperature
        with torch.no_grad():
            # at the temperature of acting, as the policy's own distributions are
            others = self.teacher("distributions", inputs, temperature)
        return self.spread(policy("divergence_from", inputs, others, self.config.distil.beta, temperature), *place)


def check_divergence(policy: ActionPolicy, beta: float) -> None:
    """Reject an exact divergence that the policy's decisions do not have; raises UserError."""
    if policy.mixes is None:
        raise UserError(
            "distil.divergence compares whole distributions, which are not available for the decisions of a "
            f"{type(policy).__name__}; use a policy with tokens or Gaussian actions, or only distil.reward"
        )
    if not policy.mixes and beta not in (0.0, 1.0):
        raise UserError(
            f"distil.beta is {beta:g}, but the divergence from a mixture of two policies' actions has no exact form; "
            "use 0 or 1"
        )


def check_teacher(teacher: ActionPolicy, policy: ActionPolicy) -> None:
    """Reject a teacher whose decisions have a different form; raises UserError."""
    if teacher.past:
        raise UserError(
            "teacher uses past observations, which rollouts do not store; use a teacher that acts on the current "
            "observation only"
        )
    if type(teacher) is not type(policy):
        raise UserError(
            f"teacher is a {type(teacher).__name__}, but the policy is a {type(policy).__name__}: their decisions "
            "have different forms; use policies of the same kind"
        )
    for name in ("chunk", "action_size", "decisions", "tokenizer"):
        own, other = getattr(policy, name, None), getattr(teacher, name, None)
        if own != other:
            raise UserError(
                f"teacher.{name} is {other}, but the policy's is {own}: the teacher cannot score the policy's "
                "decisions; use policies of the same kind and chunk size"
            )
