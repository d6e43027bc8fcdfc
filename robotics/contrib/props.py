"""PROPS: PPO whose episodes come from a policy that is corrected for what was sampled too often.

    recipe: props
    props: {waves: 8}

A finite sample of an on-policy batch is not the policy's distribution. The episodes of a step are therefore collected
in waves. The first one is played by the policy pi itself. After each wave, a behaviour policy phi starts from pi and
makes what the step has sampled so far less likely, so that the next wave has more of what is missing:

    rho = phi(a | o) / pi(a | o),
    loss = mean max(rho, clip(rho, 1 - eps, 1 + eps)),

until all epochs are done or the divergence mean (rho - 1 - log rho) exceeds `kl`. The update is that of PPO: the old
log-probabilities of all decisions are those of pi, as if pi had sampled them. phi is thrown away after the step.

In several processes, each corrects its own episodes.

Source: Corrado and Hanna, On-Policy Policy Gradient Reinforcement Learning Without On-Policy Sampling, arXiv
2311.08290; NicholasCorrado/PROPS ppo_discrete.py (props_update) and its constants.

Differences: a wave is a number of whole episodes and not 8 control steps; batches of earlier steps are not reused
(there: `buffer_batches`); there is no regulariser, whose weight is 0 by default in the authors' code; the moments of
Adam start at 0 after each wave.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from mmrl.core.loss import Metric
from mmrl.core.rollouts import Rollouts
from mmrl.fields import bounded, rare
from mmrl.training.objectives import make_objective
from mmrl.training.processes import Streams
from mmrl.training.recipe import NoUsableTasksError, Step
from mmrl.training.settings import TrainerConfig
from robotics.methods.ppo import PolicyWithCritic, RobotPpoParts, RobotPpoRecipe
from robotics.methods.robot_recipe import RobotConfig
from robotics.policies.base.action_policy import ActionPolicy

LOGP = frozenset({"logp"})
Part = TypeVar("Part")


@dataclass
class PropsSettings:
    """Waves, and the correction of the behaviour policy between them."""

    waves: int = bounded(8, at_least=2)
    """Number of waves of a step's tasks; at most one per task."""
    learning_rate: float = bounded(1e-3, above=0)
    """Learning rate of Adam for the behaviour policy."""
    epochs: int = bounded(16, at_least=1)
    """Passes over what the step has sampled so far, after each wave."""
    minibatches: int = bounded(4, at_least=1)
    """Minibatches of a pass, of whole tasks; 4 in the paper's discrete tasks, 16 in its continuous ones."""
    clip: float = bounded(0.3, above=0, below=1)
    """eps, distance of rho from 1 beyond which a decision is no longer pushed away."""
    kl: float | None = bounded(0.1, above=0)
    """Divergence from the policy at which the correction stops; null = never."""
    max_grad_norm: float = rare(bounded(0.5, at_least=0))
    """Norm above which gradients of the behaviour policy are scaled down; 0 = none."""


@dataclass
class PropsConfig(RobotPpoParts, RobotConfig):  # type: ignore[misc]
    """A PROPS run."""

    props: PropsSettings = field(default_factory=PropsSettings)
    """Waves, and the correction between them."""
    trainer: TrainerConfig = field(
        default_factory=lambda: TrainerConfig(samples_per_task=1, tasks_per_step=64, epochs=2)
    )
    """Batch sizes, optimiser and guards; old log-probabilities are those of the policy, so they are recomputed."""

    def validate(self) -> None:
        """Check that the parts fit together; raises ValueError."""
        super().validate()
        if self.trainer.old_logp != "recompute":
            raise ValueError(
                f"trainer.old_logp is '{self.trainer.old_logp}', but the episodes of props are not sampled by the "
                "policy that is trained; set recompute"
            )
        if "logp_rollout" in make_objective(self.objective).needs:
            raise ValueError(
                "objective.correction and objective.gate compare the policy with the one that sampled, which props "
                "changes on purpose; remove them"
            )


class PropsRecipe(RobotPpoRecipe):
    """PPO with corrected sampling; see the module."""

    config: PropsConfig

    def rolls_apart(self, step: Step) -> bool:
        """False: what is sampled in a wave depends on the waves before it."""
        return False

    def rollout(self, policy: ActionPolicy, tasks: Sequence[Any], streams: Streams, step: Step) -> Rollouts:
        """Run the episodes of the tasks in waves, with a correction after each but the last."""
        assert isinstance(policy, PolicyWithCritic)
        weights = [weight for weight in policy.policy.parameters() if weight.requires_grad]
        own = [weight.detach().clone() for weight in weights]
        waves = torch.arange(len(tasks)).tensor_split(min(self.config.props.waves, len(tasks)))
        parts: list[Rollouts] = []
        failures: list[NoUsableTasksError] = []
        try:
            for number, places in enumerate(wave.tolist() for wave in waves):
                if number:
                    _restore(weights, own)
                    self._correct(policy, weights, Rollouts.concat(parts), streams.shared("props", number))
                try:
                    part = super().rollout(policy, [tasks[place] for place in places], streams.select(places), step)
                except NoUsableTasksError as error:
                    if error.rollouts is None:
                        raise
                    part = error.rollouts
                    failures.append(error)
                parts.append(part)
        finally:
            _restore(weights, own)
        found = Rollouts.concat(parts)
        if len(failures) == len(waves):
            raise NoUsableTasksError(str(failures[0]), found)
        return found

    def _correct(
        self, policy: PolicyWithCritic, weights: Sequence[Tensor], rollouts: Rollouts, generator: torch.Generator
    ) -> None:
        """Make the sampled decisions less likely under the policy's weights, in place."""
        if not bool(rollouts.host.mask.any()):
            return
        with torch.no_grad():
            logp = self.scores(policy, rollouts, LOGP).logp
        rollouts = rollouts.replace(logp_old=torch.where(rollouts.mask > 0, logp, 0.0))
        settings = self.config.props

        def batches() -> list[Rollouts]:
            parts = rollouts.minibatches(settings.minibatches, generator)
            return [part for part in parts if part.host.mask.any()]  # not those whose environments all failed

        apart = correct(weights, batches, lambda part: self._log_ratio(policy, part), settings)
        self.noted["props/kl"] = Metric(apart, 1.0)  # the mean of those of all processes

    def _log_ratio(self, policy: PolicyWithCritic, rollouts: Rollouts) -> Tensor:
        """(M,) log rho of the decisions that count."""
        return (self.scores(policy, rollouts, LOGP).logp - rollouts.logp_old)[rollouts.mask > 0]


def correct(
    weights: Sequence[Tensor],
    batches: Callable[[], Iterable[Part]],
    log_ratio: Callable[[Part], Tensor],
    settings: PropsSettings,
) -> float:
    """Move weights, in place, so that sampled decisions become less likely.

    Args:
        weights: of the behaviour policy, at the start those of the policy.
        batches: minibatches of a pass over what was sampled.
        log_ratio: log rho (M,) of the decisions of a minibatch under the present weights.
        settings: of the correction.

    Returns:
        The divergence of the last minibatch, see `moved`.

    Source: NicholasCorrado/PROPS ppo_discrete.py, props_update.
    """
    optimizer, apart = torch.optim.Adam(weights, settings.learning_rate, eps=1e-5), 0.0
    for _ in range(settings.epochs):
        for batch in batches():
            with torch.enable_grad():
                ratio = log_ratio(batch)
                # not `backward`, which would leave gradients in weights that do not take part
                gradients = torch.autograd.grad(behaviour_loss(ratio, settings.clip), weights, allow_unused=True)
            for weight, gradient in zip(weights, gradients, strict=True):
                weight.grad = gradient
            nn.utils.clip_grad_norm_(weights, settings.max_grad_norm or math.inf)
            optimizer.step()
            optimizer.zero_grad()
            # of the weights before this update, as there
            apart = float(moved(ratio.detach()))
            if settings.kl is not None and apart > settings.kl:
                return apart
    return apart


def behaviour_loss(log_ratio: Tensor, clip: float) -> Tensor:
    """Loss () of the behaviour policy for log rho (M,) of sampled decisions.

    Gradient: into log_ratio; none where rho is below 1 - clip.

    Source: PROPS, arXiv 2311.08290.
    """
    ratio = log_ratio.exp()
    return torch.maximum(ratio, ratio.clamp(1 - clip, 1 + clip)).mean()


def moved(log_ratio: Tensor) -> Tensor:
    """Estimate () of KL(pi || phi) from log rho (M,) of decisions that pi sampled: mean of rho - 1 - log rho."""
    return (log_ratio.exp() - 1 - log_ratio).mean()


def _restore(weights: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    with torch.no_grad():
        for weight, value in zip(weights, values, strict=True):
            weight.copy_(value)
