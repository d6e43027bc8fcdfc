"""Soft actor-critic without a run: an actor, an ensemble of critics and a temperature that learn from batches.

    learner = SacLearner(policy, critics, SacSettings())
    for number in range(1000):
        metrics = learner.update(batch, torch.Generator().manual_seed(number))

Methods built on it replace the batch (half of it from prior data), the settings (ten critics, two of them in a target)
or the actor, a `robotics.policies.squashed.CriticsPolicy`.

Source: see `robotics.offpolicy.sac_losses`. Order of an update as in SAC's algorithm 1 and ikostrikov/rlpd: critics,
targets, actor, temperature; the actor thus sees the new critics. Stable-Baselines3 updates the temperature first.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from mmrl.fields import SET, bounded, choice, only_with, rare
from mmrl.training.optimizer import load_optimizer
from robotics.offpolicy.q_ensemble import QEnsemble
from robotics.offpolicy.sac_losses import (
    LOG_ALPHA,
    actor_loss,
    critic_loss,
    polyak_,
    soft_targets,
    soft_values,
    subset_min,
    temperature_loss,
)
from robotics.offpolicy.transitions import TransitionBatch
from robotics.policies.base.action_policy import PolicyInputs
from robotics.policies.base.action_statistics import StateStatistics
from robotics.policies.improved import ImprovedPolicy
from robotics.policies.squashed import SquashedActionPolicy

ACTOR_VALUES = ("min", "mean")


@dataclass
class QSettings:
    """The critics."""

    count: int = bounded(2, at_least=1)
    """E, number of critics: 2 in SAC, 10 in REDQ and RLPD."""
    subset: int = bounded(0, at_least=0)
    """M, number of critics whose minimum makes the target, drawn without replacement for each update; 0 = all. 2
    of 10 in REDQ and RLPD."""
    layer_norm: bool = False
    """Normalise hidden layers, as in RLPD, which keeps values of unseen actions near those of seen ones."""
    width: int = bounded(256, at_least=1)
    """Width of the hidden layers."""
    layers: int = bounded(2, at_least=1)
    """Number of hidden layers."""
    learning_rate: float | None = bounded(None, above=0)
    """Learning rate of the critics; null = that of the policy."""


@dataclass
class TemperatureSettings:
    """The weight of entropy, alpha, which is learned."""

    initial: float = bounded(1.0, above=0)
    """Alpha before the first update, within e^-10 to e^2."""
    target_entropy: float = -1.0
    """Target entropy in nats per entry of an action; the target of a chunk is this times its K * D entries. -1 as in
    SAC, -0.5 in RLPD; -1 and 1 as bounds of an entry allow at most log 2 = 0.69."""
    learning_rate: float | None = bounded(None, above=0)
    """Learning rate of log alpha; null = that of the policy."""

    def validate(self) -> None:
        """Check that alpha begins within its bounds; raises ValueError."""
        low, high = LOG_ALPHA
        if not low <= math.log(self.initial) <= high:
            raise ValueError(
                f"temperature.initial is {self.initial:g}; must be between {math.exp(low):.2g} and {math.exp(high):.2g}"
            )


@dataclass
class SacSettings:
    """Soft actor-critic; the defaults are those of Stable-Baselines3."""

    gamma: float = bounded(0.99, at_least=0, at_most=1)
    """Discount of a control step; a chunk of which h steps were executed is discounted by gamma^h."""
    tau: float = bounded(0.005, above=0, at_most=1)
    """Share by which the target critics move to the critics after each update."""
    actor_every: int | None = bounded(1, at_least=1)
    """Number of updates of the critics for each one of the actor and the temperature; 20 in REDQ and RLPD. null = as
    many as follow a decision: `utd` rounded, at least 1."""
    actor_after: int = bounded(0, at_least=0)
    """Number of updates of the critics alone before the first one of the actor."""
    actor_values: str = choice("min", ACTOR_VALUES)
    """Value that the actor maximises: the minimum of all critics, as in SAC, or their mean, as in REDQ and RLPD."""
    entropy_in_target: bool = True
    """Whether future entropy counts in the targets. false: the actor still has it as a bonus."""
    demo_bc: float = bounded(0.0, at_least=0)
    """Weight of behaviour cloning of the batch's demonstrations in the loss of the actor; 0 = none. Its loss is that of
    `model.options.cloning`, by default the mean squared error of the tanh of the mean."""
    demo_bc_updates: int = only_with(bounded(0, at_least=0), demo_bc=SET)
    """Updates of the critics after which this weight has fallen to 0, linearly; 0 = it stays."""
    critics: QSettings = field(default_factory=QSettings)
    """The critics."""
    temperature: TemperatureSettings = field(default_factory=TemperatureSettings)
    """The weight of entropy."""

    def validate(self) -> None:
        """Check that the options fit together; raises ValueError."""
        if self.critics.subset > self.critics.count:
            raise ValueError(
                f"critics.subset is {self.critics.subset}, but there are only {self.critics.count} critics"
            )

    def demo_bc_after(self, updates: int) -> float:
        """Weight of behaviour cloning after some updates of the critics."""
        left = max(0.0, 1 - updates / self.demo_bc_updates) if self.demo_bc_updates else 1.0
        return self.demo_bc * left


@dataclass
class Rates:
    """The optimisers: Adam without weight decay, which would pull values towards zero."""

    learning_rate: float = 3e-4
    """Of the policy."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Decay rates of the two moments."""
    eps: float = rare(1e-8)
    """Constant in the denominator."""
    max_grad_norm: float = 0.0
    """Norm above which the gradients of actor or critics are scaled down; 0 = none."""


class NonFiniteError(ArithmeticError):
    """A loss or gradient of an update is NaN or infinite; nothing was changed by that loss."""


class SacLearner:
    """Actor, critics, their targets, temperature and optimisers.

    Args:
        actor: the policy.
        critics: the ensemble; its targets are copies.
        settings: of the method.
        rates: of the optimisers.
        inputs: the actor's inputs for a batch of states (B, S) and task numbers (B,); default: the states alone.
        critic_states: what the critics read of full states (B, F) and task numbers (B,); default: the full states.
    """

    def __init__(
        self,
        actor: SquashedActionPolicy | ImprovedPolicy,
        critics: QEnsemble,
        settings: SacSettings,
        rates: Rates | None = None,
        inputs: Callable[[Tensor, Tensor], PolicyInputs] | None = None,
        critic_states: Callable[[Tensor, Tensor], Tensor] | None = None,
    ) -> None:
        self.actor = actor
        self.critics = critics
        self.settings = settings
        self.rates = rates or Rates()
        self.targets = copy.deepcopy(critics).requires_grad_(False)
        self._inputs = inputs or (lambda states, _: PolicyInputs(None, states, ("",) * len(states)))
        self._critic_states = critic_states or (lambda states, _: states)
        device = next(critics.parameters()).device
        self.log_alpha = nn.Parameter(torch.tensor(math.log(settings.temperature.initial), device=device))
        self._weights = {
            "actor": [weight for weight in actor.parameters() if weight.requires_grad],
            "critics": list(critics.parameters()),
            "temperature": [self.log_alpha],
        }
        own = {"critics": settings.critics.learning_rate, "temperature": settings.temperature.learning_rate}
        self.optimizers = {
            name: torch.optim.Adam(
                weights, own.get(name) or self.rates.learning_rate, self.rates.betas, self.rates.eps, fused=True
            )
            for name, weights in self._weights.items()
        }
        self.updates = 0
        """Number of updates of the critics."""

    @property
    def actor_updates(self) -> int:
        """Number of updates of the actor."""
        every = self.settings.actor_every or 1
        return max(0, self.updates // every - self.settings.actor_after // every)

    @property
    def alpha(self) -> float:
        """Weight of entropy."""
        return math.exp(float(self.log_alpha.detach()))

    def update(self, batch: TransitionBatch, generator: torch.Generator) -> dict[str, float]:
        """Update the critics and, every `actor_every` updates, actor and temperature.

        Args:
            batch: the transitions.
            generator: the only source of randomness.

        Returns:
            Metrics by name.

        Raises:
            NonFiniteError: a loss or gradient is not finite.
        """
        metrics = self._update_critics(batch, generator)
        self.updates += 1
        due = self.updates % (self.settings.actor_every or 1) == 0
        if due and self.updates > self.settings.actor_after:
            metrics |= self._update_actor(batch, generator)
        return metrics

    def scale_states(self, statistics: StateStatistics) -> None:
        """Standardise what the critics read by the statistics of their states, from now on."""
        for critics in (self.critics, self.targets):
            critics.scale_states(statistics)

    def state_dict(self) -> dict[str, Any]:
        """Everything but the actor's weights."""
        return {
            "critics": self.critics.state_dict(),
            "targets": self.targets.state_dict(),
            "log_alpha": self.log_alpha.detach(),
            "optimizers": {name: one.state_dict() for name, one in self.optimizers.items()},
            "updates": self.updates,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore `state_dict`."""
        self.critics.load_state_dict(state["critics"])
        self.targets.load_state_dict(state["targets"])
        with torch.no_grad():
            self.log_alpha.copy_(state["log_alpha"])
        for name, one in self.optimizers.items():
            load_optimizer(one, state["optimizers"][name])
        self.updates = int(state["updates"])

    def _update_critics(self, batch: TransitionBatch, generator: torch.Generator) -> dict[str, float]:
        settings = self.settings
        with torch.no_grad():
            actions, logp = self.actor.draw(self._inputs(batch.next_state, batch.task), generator)
            q = self.targets(self._critic_states(batch.next_full, batch.task), actions)
            value = subset_min(q, settings.critics.subset, generator)
            if settings.entropy_in_target:
                value = soft_values(value, logp.sum(1), self.alpha)
            targets = soft_targets(batch.rewards, batch.steps, batch.terminated, value, settings.gamma)
        q = self.critics(self._critic_states(batch.full, batch.task), batch.actions)
        loss = critic_loss(q, targets)
        self._step("critics", loss)
        polyak_(self.targets.parameters(), self.critics.parameters(), settings.tau)
        found = {"loss/critic": loss, "sac/q": q.mean(), "sac/target_max": targets.max()}
        found["sac/td_error"] = (q.mean(0) - targets).abs().mean()
        if bool(batch.prior.any()) and not bool(batch.prior.all()):
            found["sac/q_prior"], found["sac/q_online"] = q[:, batch.prior].mean(), q[:, ~batch.prior].mean()
        return _numbers(found)

    def _update_actor(self, batch: TransitionBatch, generator: torch.Generator) -> dict[str, float]:
        full = self._critic_states(batch.full, batch.task)

        def judge(actions: Tensor) -> Tensor:
            q = self.critics(full, actions)
            return q.mean(0) if self.settings.actor_values == "mean" else q.min(0).values

        q, logp, further = self.actor.propose(self._inputs(batch.state, batch.task), generator, judge)
        loss = actor_loss(q, logp, self.alpha) + further
        cloned: dict[str, float] = {}
        weight = self.settings.demo_bc_after(self.updates)
        if weight and bool(batch.prior.any()):
            error, cloned = self._imitate(batch)
            loss = loss + weight * error
        self._step("actor", loss)
        entries = batch.actions[0].numel()
        temperature = temperature_loss(self.log_alpha, logp, self.settings.temperature.target_entropy * entries)
        self._step("temperature", temperature)
        with torch.no_grad():
            self.log_alpha.clamp_(*LOG_ALPHA)
        found = {"loss/actor": loss, "loss/temperature": temperature, "sac/entropy": -logp.mean() / entries}
        return _numbers(found) | cloned | {"sac/alpha": self.alpha}

    def _imitate(self, batch: TransitionBatch) -> tuple[Tensor, dict[str, float]]:
        """Loss of behaviour cloning on the demonstrations of a batch, without repeated actions past their ends."""
        if batch.demonstrated is None:
            raise ValueError("demo_bc is set, but the batch has no demonstrated actions")
        rows, actions = batch.prior, batch.demonstrated[batch.prior]
        mask = torch.arange(actions.shape[1], device=actions.device) < batch.steps[rows, None]
        return self.actor.bc_loss(self._inputs(batch.state[rows], batch.task[rows]), actions, mask)

    def _step(self, name: str, loss: Tensor) -> None:
        """One step of an optimiser; the gradient goes into its own weights alone."""
        weights, optimizer = self._weights[name], self.optimizers[name]
        # not `backward`, which would leave the actor's gradient in the critics
        for weight, gradient in zip(weights, torch.autograd.grad(loss, weights, allow_unused=True), strict=True):
            weight.grad = gradient
        limit = self.rates.max_grad_norm if name != "temperature" else 0.0
        norm = float(nn.utils.clip_grad_norm_(weights, limit or math.inf))
        value = float(loss.detach())
        if not (math.isfinite(value) and math.isfinite(norm)):
            optimizer.zero_grad()
            raise NonFiniteError(f"the loss of {name} is {value:g}, and the norm of its gradient {norm:g}")
        optimizer.step()
        optimizer.zero_grad()


def over_updates(taken: Sequence[dict[str, float]]) -> dict[str, float]:
    """Means of metrics over some updates; the largest of names that end in "_max"."""
    found: dict[str, list[float]] = {}
    for metrics in taken:
        for name, value in metrics.items():
            found.setdefault(name, []).append(value)
    return {name: max(own) if name.endswith("_max") else sum(own) / len(own) for name, own in found.items()}


def _numbers(values: dict[str, Tensor]) -> dict[str, float]:
    return {name: float(value.detach()) for name, value in values.items()}
