"""Distillation: a robot policy learns from a teacher's probabilities of its decisions, in the states that it reaches.

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

from mmrl.core.loss import Denominators, mean_metric, token_mean
from mmrl.core.objectives.objective import PolicyOutputs
from mmrl.core.rollouts import Rollouts
from mmrl.errors import UserError
from mmrl.fields import SET, bounded, only_with
from mmrl.runs.run_log import stopwatch
from mmrl.training.objectives import ObjectiveConfig
from mmrl.training.recipe import LossTerm, Passes, Step, TermLoss, opening
from robotics.methods.grpo import EpisodeRewardParts, RobotGrpoRecipe
from robotics.methods.robot_recipe import RobotConfig
from robotics.policies.base.action_policy import ActionPolicy
from robotics.policies.policy_loading import ActionPolicyConfig, check_fit, load_action_policy
from robotics.sim.episodes import RobotSim

LOGP_TEACHER = "logp_teacher"
"""Extra (B, T) of rollouts: the teacher's log-probabilities."""


@dataclass
class RobotDistilSettings:
    """Weights of the teacher's part and of the rewards."""

    reward: float = bounded(1.0, at_least=0)
    """Weight of logp_teacher - logp_old in the advantage of each decision."""
    divergence: float = bounded(0.0, at_least=0)
    """Weight of the exact divergence from the teacher, for policies whose decisions are tokens or Gaussian actions."""
    beta: float = only_with(bounded(1.0, at_least=0, at_most=1), divergence=SET)
    """Kind of divergence: 0 is KL(teacher || policy), 1 is KL(policy || teacher); for tokens, values in between are the
    generalised Jensen-Shannon divergence of this mixture."""
    task: float = bounded(0.0, at_least=0)
    """Weight of the objective's own advantages, computed from the rewards; 0 = learn from the teacher alone."""

    def validate(self) -> None:
        """Check that something is learned; raises ValueError."""
        if not (self.reward or self.divergence):
            raise ValueError("distil.reward and distil.divergence are 0: the teacher teaches nothing; set one of them")


@dataclass
class RobotDistilConfig(EpisodeRewardParts, RobotConfig):
    """A distillation run of a robot policy."""

    teacher: ActionPolicyConfig = field(default_factory=ActionPolicyConfig)
    """The teacher policy: folder of a saved policy or of a run, or a kind with its options."""
    distil: RobotDistilSettings = field(default_factory=RobotDistilSettings)
    """Weights of the teacher's part and of the rewards."""
    objective: ObjectiveConfig = field(
        default_factory=lambda: ObjectiveConfig(
            clip={"kind": "unclipped"}, kl={"kind": "none"}, aggregation={"kind": "token_mean"}
        )
    )
    """Policy loss of the advantages; the default is the importance-weighted loss without clip and KL to the start."""

    @property
    def compared_samples(self) -> int | None:
        """The rewards' advantages count only with `distil.task`."""
        return super().compared_samples if self.distil.task else None

    def validate(self) -> None:
        """Check that there is a teacher; raises ValueError."""
        super().validate()
        if self.teacher == ActionPolicyConfig():
            raise ValueError("teacher names no policy; set teacher.path to the folder of a saved policy or of a run")


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
        self.terms = [*self.terms, Teaching(self)]

    def advantages(self, rollouts: Rollouts, accelerator: Accelerator, step: Step) -> Rollouts:
        """Weigh the objective's advantages, and add the teacher's reward of each decision."""
        settings, found = self.config.distil, super().advantages(rollouts, accelerator, step)
        assert found.advantage is not None
        # minus the reverse KL, sampled on the decisions of the student
        gain = rollouts.extras[LOGP_TEACHER] - rollouts.logp_old
        advantage = settings.task * found.advantage + settings.reward * gain
        # logp_teacher of a decision that was never executed is no number to learn from
        return found.replace(advantage=torch.where(rollouts.loss_mask > 0, advantage, 0.0))


class Teaching(LossTerm):
    """The teacher's log-probabilities of the decisions, for the advantages, and the exact divergence from it."""

    name = "teaching"

    def __init__(self, recipe: RobotDistilRecipe) -> None:
        self.recipe = recipe
        # without an exact divergence the term only provides the teacher's numbers
        self.gradient = "always" if recipe.config.distil.divergence else "never"

    def prepare(self, passes: Passes, rollouts: Rollouts, step: Step) -> Rollouts:
        """Score the decisions with the teacher."""
        recipe = self.recipe
        # after the policy has moved; the teacher is no part of it
        recipe.teacher.to(rollouts.mask.device)

        def score(policy: nn.Module, chunk: Rollouts, outputs: frozenset[str]) -> PolicyOutputs:
            # at the student's temperature, or the gap would measure the temperatures
            return recipe.scores(recipe.teacher, chunk, frozenset({"logp"}))

        with stopwatch("teacher_logp"):
            logp = passes.scores(rollouts, frozenset({"logp"}), score).logp
        return rollouts.replace(extras={**rollouts.extras, LOGP_TEACHER: logp})

    def __call__(
        self, policy: nn.Module, minibatch: Rollouts, scores: PolicyOutputs, counts: Denominators, step: Step
    ) -> TermLoss:
        """The weighted mean of the exact divergence over all decisions; the sampled one is a metric."""
        settings, mask = self.recipe.config.distil, minibatch.loss_mask
        # log p - log q: positive where the student is surer than the teacher
        gap = scores.logp.detach() - minibatch.extras[LOGP_TEACHER]
        metrics = {"distil/kl_sampled": mean_metric(gap, mask)}
        if not settings.divergence:
            return TermLoss({}, metrics)
        divergence = self.divergence(policy, minibatch)
        loss = settings.divergence * token_mean(divergence, mask, counts)
        return TermLoss({"loss/distillation": loss}, metrics | {"distil/divergence": mean_metric(divergence, mask)})

    def divergence(self, policy: nn.Module, rollouts: Rollouts) -> Tensor:
        """Exact divergence (B, T) from the teacher; 0 at decisions that are not trained."""
        recipe = self.recipe
        inputs, _, place = recipe.scored_chunks(rollouts)
        temperature = recipe.config.acting.temperature
        with torch.no_grad():
            # at the temperature of acting, as the policy's own distributions are
            others = recipe.teacher("distributions", inputs, temperature)
        return recipe.spread(policy("divergence_from", inputs, others, recipe.config.distil.beta, temperature), *place)

    def formula(self) -> str:
        """Formula of the advantages."""
        settings = self.recipe.config.distil
        own = f"{settings.task:g} A_it + " if settings.task else ""
        found = f"distillation, with q = the teacher:\n     A_it <- {own}{settings.reward:g} (log q_it - logp_old_it)"
        exact = f"\n          + {settings.divergence:g} * mean D(p, q; beta {settings.beta:g})"
        return found + exact if settings.divergence else found


def check_divergence(policy: ActionPolicy, beta: float) -> None:
    """Reject an exact divergence that the policy's decisions do not have; raises UserError."""
    if policy.mixes is None:
        raise UserError(
            f"distil.divergence compares whole distributions, which a {type(policy).__name__} does not have for its "
            "decisions; use a policy of tokens or Gaussian actions, or distil.reward alone"
        )
    if not policy.mixes and beta not in (0.0, 1.0):
        raise UserError(
            f"distil.beta is {beta:g}, but mixtures of two policies' actions have no exact divergence; use 0 or 1"
        )


def check_teacher(teacher: ActionPolicy, policy: ActionPolicy) -> None:
    """Reject a teacher whose decisions have another form; raises UserError."""
    if teacher.past:
        raise UserError("teacher sees a past, which rollouts do not keep; use one that acts on the present observation")
    if type(teacher) is not type(policy):
        raise UserError(
            f"teacher is a {type(teacher).__name__}, the policy a {type(policy).__name__}: their decisions have "
            "different forms; use policies of one kind"
        )
    for name in ("chunk", "action_size", "decisions", "tokenizer"):
        own, other = getattr(policy, name, None), getattr(teacher, name, None)
        if own != other:
            raise UserError(
                f"teacher.{name} is {other}, the policy's {own}: the teacher cannot score the policy's decisions; use "
                "policies of one kind and chunk"
            )
