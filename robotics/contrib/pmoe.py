"""PMOE: a mixture of squashed Gaussians as the policy of soft actor-critic.

    recipe: robot_sac
    model: {kind: mixture, chunk: 1, options: {experts: 4}}

Each of E experts proposes a chunk of actions, and weights w(o) choose one of them,

    pi(a | o) = sum_e w_e(o) pi_e(a | o).

A choice has no gradient, so the critics choose in the loss of the actor: with the expert b whose proposal has the
highest value,

    loss = mean_B (alpha log pi_b(a_b | o) - Q(s, a_b)) + mean_{B, E} (w_e - [e = b])^2.

Only this expert learns from a row, and the weights learn how often each is the best. Targets and temperature use the
density of the chosen expert, at most pi / w_e, as in the authors' code. `log_probs` has the density of the mixture,

    log pi(a_1 .. a_t | o) = log sum_e w_e prod_{i <= t} pi_e(a_i | o),

whose differences over t are the log-densities of the control steps of a chunk, given the steps before them.

Shapes: B rows, E experts, K control steps, D entries of an action.

Source: Ren et al., Probabilistic Mixture-of-Experts for Efficient Deep Reinforcement Learning, arXiv 2104.09122;
quantumiracle/Popular-RL-Algorithms pmoe_sac.py, by one of the authors.

Differences: the weights are a layer on the outputs of the observation encoder, not on the observation itself; their
greedy action is that of the most likely expert and not of a drawn one; rewards are not standardised within a batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from mmrl.core.payload import to_device
from mmrl.fields import bounded, choice, rare
from robotics.policies.base.action_policy import ActionChoice, PolicyInputs, check_demonstrations
from robotics.policies.base.action_tokens import draw_rows
from robotics.policies.base.encoder import Vocabulary
from robotics.policies.gaussian import FIRST_GAIN
from robotics.policies.squashed import INSIDE, SquashedActionPolicy, SquashedPolicyConfig, score_squashed


@dataclass
class MixturePolicyConfig(SquashedPolicyConfig):
    """Sizes and settings of the policy."""

    experts: int = bounded(4, at_least=2)
    """E, number of Gaussians."""
    cloning: str = rare(choice("likelihood", ("likelihood",)))
    """likelihood: negative log-density of the demonstrated actions under the mixture."""


class Experts(NamedTuple):
    """Squashed Gaussians and their weights."""

    weights: Tensor
    """(B, E), log w."""
    mean: Tensor
    """(B, E, K, D) before the tanh."""
    log_std: Tensor
    """(B, E, K, D) before the tanh."""


class MixtureActionPolicy(SquashedActionPolicy):
    """Maps an observation to E chunks of squashed Gaussian actions, and weights that choose one of them.

    config = MixturePolicyConfig(action_size=1, chunk=1, encoder=EncoderConfig(image_size=None, state_size=3))
    policy = MixtureActionPolicy.build(config, [""])
    """

    kind = "mixture"
    config_class = MixturePolicyConfig
    config: MixturePolicyConfig
    # two mixtures have no divergence in closed form
    mixes = None

    def __init__(self, config: MixturePolicyConfig, vocabulary: Vocabulary, seed: int = 0) -> None:
        super().__init__(config, vocabulary, seed)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed + 1)
            self.weights = nn.Linear(config.encoder.width, config.experts)
            nn.init.orthogonal_(self.weights.weight, FIRST_GAIN)
        nn.init.zeros_(self.weights.bias)

    @property
    def outputs(self) -> int:
        """Means, and standard deviations, of a control step: those of all experts."""
        return self.config.experts * self.config.action_size

    def experts(self, batch: PolicyInputs, temperature: float = 1.0) -> Experts:
        """The Gaussians of a batch of observations; the temperature multiplies their standard deviations.

        Gradient: into all trainable weights.
        """
        seen = self.encoder(batch)
        parts = [
            part.unflatten(-1, (self.config.experts, self.action_size)).transpose(1, 2)
            for part in self.gaussian_of(seen, temperature)
        ]
        with torch.autocast(seen.device.type, enabled=False):
            # one expert for a chunk: experts that alternate between control steps would average their plans
            return Experts(self.weights(seen.float().mean(1)).log_softmax(-1), *parts)

    def act(
        self, batch: PolicyInputs, generator: torch.Generator, temperature: float = 1.0, greedy: bool = False
    ) -> ActionChoice:
        """Choose a chunk of actions for each row; greedy: the tanh of the mean of the most likely expert.

        Decisions are (B, K, D) float32 before the tanh.
        """
        with torch.no_grad():
            found = self.experts(batch, temperature)
            chosen, before = self._drawn_experts(found, generator)
            if greedy:
                chosen, before = found.weights.argmax(1), found.mean
            before = _pick(before, chosen)
            return ActionChoice(before.tanh(), before, mixture_log_prob(before, found))

    def draw(self, batch: PolicyInputs, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Draw actions (B, K, D), and their log-densities (B, K) under the experts that were chosen.

        Gradient: into the chosen experts, through the actions; none into the weights.
        """
        found = self.experts(batch)
        chosen, before = self._drawn_experts(found, generator)
        logp = score_squashed(before, found.mean, found.log_std)
        return _pick(before, chosen).tanh(), _pick(logp, chosen)

    def propose(
        self, batch: PolicyInputs, generator: torch.Generator, judge: Callable[[Tensor], Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `CriticsPolicy.propose`; of the proposals of all experts, the one with the highest value."""
        found = self.experts(batch)
        _, before = self._drawn_experts(found, generator)
        values = torch.stack([judge(actions) for actions in before.tanh().unbind(1)], 1)
        value, best = values.max(1)
        logp = _pick(score_squashed(before, found.mean, found.log_std), best)
        return value, logp.sum(1), frequency_loss(found.weights.exp(), best)

    def log_probs(self, batch: PolicyInputs, decisions: Tensor, temperature: float = 1.0) -> tuple[Tensor, None]:  # type: ignore[override]
        """Score decisions (B, K, D) before the tanh, as a mixture; its entropy has no closed form."""
        expected = (len(batch), self.chunk, self.action_size)
        if tuple(decisions.shape) != expected:
            raise ValueError(f"decisions have the shape {tuple(decisions.shape)}; expected {expected}")
        found = self.experts(batch, temperature)
        return mixture_log_prob(decisions.to(found.mean), found), None

    def bc_loss(
        self, batch: PolicyInputs, actions: Tensor, mask: Tensor, generator: torch.Generator | None = None
    ) -> tuple[Tensor, dict[str, float]]:
        """Behaviour cloning loss: the negative log-density of demonstrated actions, without random draws."""
        check_demonstrations(self, batch, actions, mask)
        found = self.experts(batch)
        wanted, weight = actions.to(found.mean), mask.to(found.mean)
        count = weight.sum().clamp(min=1)
        logp = mixture_log_prob(wanted.clamp(-INSIDE, INSIDE).atanh(), found)
        loss = -(logp * weight).sum() / count
        with torch.no_grad():
            likely = _pick(found.mean, found.weights.argmax(1)).tanh()
            error = ((likely - wanted).abs().mean(-1) * weight).sum() / count
        return loss, {"bc/loss": float(loss.detach()), "bc/action_error": float(error)}

    def _drawn_experts(self, found: Experts, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Numbers (B,) of experts by their weights, and the draws (B, E, K, D) of all experts before the tanh."""
        level = to_device(draw_rows(torch.rand, (len(found.mean),), generator), found.mean.device)
        # a level beyond the last sum, by rounding, is the last expert
        below = (found.weights.exp().cumsum(1)[:, :-1] <= level[:, None]).sum(1)
        noise = draw_rows(torch.randn, found.mean.shape, generator)
        return below, found.mean + found.log_std.exp() * to_device(noise, found.mean.device)


def mixture_log_prob(before: Tensor, experts: Experts) -> Tensor:
    """Log-density (B, K) of the actions tanh(before), (B, K, D), each given the control steps before it.

    Gradient: into all of them.
    """
    each = score_squashed(before[:, None], experts.mean, experts.log_std)
    total = (experts.weights[..., None] + each.cumsum(-1)).logsumexp(1)
    return torch.cat([total[:, :1], total.diff(dim=1)], 1)


def frequency_loss(weights: Tensor, best: Tensor) -> Tensor:
    """Mean squared distance () of weights (B, E) to the one-hot vectors of the best experts (B,).

    Gradient: into the weights.

    Source: PMOE, arXiv 2104.09122; quantumiracle/Popular-RL-Algorithms pmoe_sac.py.
    """
    return (weights - nn.functional.one_hot(best, weights.shape[1])).square().mean()


def _pick(values: Tensor, experts: Tensor) -> Tensor:
    """Entries (B, ...) of values (B, E, ...) at the experts (B,)."""
    return values[torch.arange(len(values), device=values.device), experts]
