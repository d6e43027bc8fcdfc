"""A Gaussian action head: every control step of a chunk is sampled from a diagonal Gaussian around a predicted action.

Shapes: B rows, K control steps, D entries of an action, ... any leading dimensions. Actions, means and standard
deviations are on the scale -1..1 of the actions; log-densities and entropies are in nats.

A decision is one control step, a_k ~ N(mu_k, diag(sigma^2)), with the joint density of its D entries:

    log p(a_k) = - sum over D of ((a - mu)^2 / (2 sigma^2) + log sigma + log(2 pi) / 2).

This is the density of the sampled action. The executed action is clipped to -1..1 afterwards, and
`ActionChoice.decisions` keeps the unclipped one, as in CleanRL, because a clipped action has no density at -1 and 1.
The mean is unbounded. The gripper's entry is a Gaussian like the others, although the tabletop tasks only use its sign:
it closes with probability Phi(mu / sigma).

sigma is learned between two bounds, which it approaches but never reaches, so that the gradient does not vanish:

    log sigma = log min + (log max - log min) sigmoid(4 x / (log max - log min)),

where x is one number per entry of an action (`std_per: action`), or a linear function of the encoder's output for the
control step (`std_per: state`). In the middle of the range, a change of x equals the change of log sigma.

Source: PPO, arXiv 1707.06347; vwxyzjn/cleanrl cleanrl/ppo_continuous_action.py and DLR-RM/stable-baselines3
    stable_baselines3/common/distributions.py (one number per entry, sum over entries; CleanRL initialises the last
    layer with gain 0.01); vwxyzjn/cleanrl cleanrl/sac_continuous_action.py (log sigma squashed into a range).

Differences: `ppo_continuous_action.py` and Stable-Baselines3's PPO do not bound sigma and start at 1, where a third of
the samples of an entry would be clipped here; Stable-Baselines3's SAC clamps log sigma, which has no gradient outside
the range. There is no tanh on the action, because demonstrations of -1 or 1 would have no density; `squashed` has one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from mmrl.core.payload import to_device
from mmrl.errors import ConfigError
from mmrl.fields import bounded, check_config, choice, rare
from robotics.policies.base.action_policy import (
    ActionChoice,
    ActionPolicy,
    PolicyInputs,
    check_demonstrations,
    check_temperature,
)
from robotics.policies.base.action_tokens import draw_rows
from robotics.policies.base.encoder import EncodedPolicy, EncoderConfig, ObservationEncoder, StateEncoder, Vocabulary

STD_PER = ("action", "state")
CLONING = ("likelihood", "error")
FIRST_GAIN = 0.01
"""Gain of the mean's layer: the first actions are near 0 for every observation."""


@dataclass
class GaussianPolicyConfig:
    """Sizes and settings of the policy."""

    action_size: int = rare(bounded(at_least=1))
    """D, number of entries of an action."""
    chunk: int = rare(bounded(8, at_least=1))
    """K, control steps predicted at once."""
    std: float = rare(bounded(0.2, above=0))
    """Initial standard deviation of every entry of an action, on the scale -1..1."""
    std_per: str = rare(choice("action", STD_PER))
    """action: one per entry of an action, independent of the observation; AdamW changes its logarithm by about the
    learning rate per step. state: predicted from the observation per entry and control step; learns much faster."""
    min_std: float = rare(bounded(0.05, above=0))
    """Minimum standard deviation. With smaller values, small changes of the mean change log-probabilities a lot, and a
    policy that was cloned for a long time hardly explores."""
    max_std: float = rare(bounded(1.0, above=0))
    """Maximum standard deviation."""
    cloning: str = rare(choice("likelihood", CLONING))
    """likelihood: negative log-density of the demonstrated actions, which trains mean and standard deviation; error:
    mean squared error of the mean, which leaves `std` unchanged for exploration in reinforcement learning."""
    encoder: EncoderConfig = rare(field(default_factory=EncoderConfig))
    """Sizes of the observation encoder."""

    def validate(self) -> None:
        """Check that the standard deviations fit together; raises ConfigError."""
        if not self.min_std < self.std < self.max_std:
            limits = f"above min_std={self.min_std:g} and below max_std={self.max_std:g}"
            raise ConfigError(f"std is {self.std:g}; must be {limits}")


class GaussianActionPolicy(EncodedPolicy, ActionPolicy):
    """Maps image, instruction and state to a Gaussian over a chunk of K * D actions; a decision is a control step.

    config = GaussianPolicyConfig(action_size=5, chunk=4, encoder=EncoderConfig(state_size=10))
    policy = GaussianActionPolicy.build(config, ["push the red cube"])
    """

    kind = "gaussian"
    config_class = GaussianPolicyConfig
    mixes: bool | None = False

    def __init__(self, config: GaussianPolicyConfig, vocabulary: Vocabulary, seed: int = 0) -> None:
        super().__init__()
        check_config(config)
        self.config = config
        self.vocabulary = vocabulary
        self.chunk = config.chunk
        self.action_size = config.action_size
        self.decisions = config.chunk
        self._low = math.log(config.min_std)
        self._span = math.log(config.max_std / config.min_std)
        # the inverse of the sigmoid in `gaussian`: the x at which sigma is `config.std`
        share = (math.log(config.std) - self._low) / self._span
        begin = self._span / 4 * math.log(share / (1 - share))
        width, size = config.encoder.width, self.outputs
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.encoder: ObservationEncoder | StateEncoder = self.make_encoder()
            self.mean, state_spread = nn.Linear(width, size), nn.Linear(width, size)
            nn.init.orthogonal_(self.mean.weight, FIRST_GAIN)
            nn.init.zeros_(self.mean.bias)
        # the spread starts equal for all states
        nn.init.zeros_(state_spread.weight)
        nn.init.constant_(state_spread.bias, begin)
        by_state = config.std_per == "state"
        self.spread = state_spread if by_state else nn.Parameter(torch.full((size,), begin))

    @property
    def outputs(self) -> int:
        """Means, and standard deviations, of a control step."""
        return self.action_size

    def make_encoder(self) -> ObservationEncoder | StateEncoder:
        """The encoder of observations, (B, K, W); called once, when config and vocabulary are set."""
        return ObservationEncoder(self.config.encoder, self.vocabulary, self.config.chunk)

    def act(
        self, batch: PolicyInputs, generator: torch.Generator, temperature: float = 1.0, greedy: bool = False
    ) -> ActionChoice:
        """Choose a chunk of actions for each row.

        The temperature multiplies the standard deviation. Greedy actions are the means; their log-probabilities use the
        temperature too. Decisions are the actions (B, K, D) float32 before clipping to -1..1.
        """
        with torch.no_grad():
            mean, log_std = self.gaussian(batch, temperature)
            drawn = mean
            if not greedy:
                noise = draw_rows(torch.randn, mean.shape, generator)
                drawn = mean + log_std.exp() * to_device(noise, mean.device)
            logp, _ = score_gaussian(drawn, mean, log_std)
        # the unclamped action is the decision: clipping has no density
        return ActionChoice(drawn.clamp(-1, 1), drawn, logp)

    def log_probs(self, batch: PolicyInputs, decisions: Tensor, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
        """Score decisions, which are the actions (B, K, D) as sampled; entropies may be negative.

        Raises:
            ValueError: wrong shape of decisions, or a temperature that is not above 0.
        """
        expected = (len(batch), self.chunk, self.action_size)
        if tuple(decisions.shape) != expected:
            raise ValueError(f"decisions have the shape {tuple(decisions.shape)}; expected {expected}")
        mean, log_std = self.gaussian(batch, temperature)
        return score_gaussian(decisions.to(mean), mean, log_std)

    def distributions(self, batch: PolicyInputs, temperature: float = 1.0) -> Tensor:
        """Means and log standard deviations (2, B, K, D) float32."""
        return torch.stack(self.gaussian(batch, temperature))

    def divergence_from(self, batch: PolicyInputs, others: Tensor, beta: float, temperature: float = 1.0) -> Tensor:
        """KL (B, K) between the Gaussians of the control steps and others (2, B, K, D); see `mixes`.

        Gradient: into all trainable weights.
        """
        own = self.distributions(batch, temperature)
        (mean, log_std), (other, other_log_std) = (own, others) if beta == 1 else (others, own)
        # from the first Gaussian to the second, by log standard deviations: no division by a small variance
        variance = (2 * (log_std - other_log_std)).exp()
        apart = (mean - other).square() * (-2 * other_log_std).exp()
        return (0.5 * (variance + apart - 1) + other_log_std - log_std).sum(-1)

    def bc_loss(
        self, batch: PolicyInputs, actions: Tensor, mask: Tensor, generator: torch.Generator | None = None
    ) -> tuple[Tensor, dict[str, float]]:
        """Behaviour cloning loss, without random draws.

        With `cloning: likelihood`, the loss is the negative log-density of a demonstrated action in nats, which may be
        negative; with `cloning: error`, the mean squared error of an entry. Both are means over control steps.
        """
        check_demonstrations(self, batch, actions, mask)
        mean, log_std = self.gaussian(batch)
        wanted, weight = actions.to(mean), mask.to(mean)
        if self.config.cloning == "error":
            each = (mean - wanted).square().mean(-1)
        else:
            each = -score_gaussian(wanted, mean, log_std)[0]
        count = weight.sum().clamp(min=1)
        loss = (each * weight).sum() / count
        with torch.no_grad():
            distance = (mean.clamp(-1, 1) - wanted).abs().mean(-1)
            metrics = {
                "bc/loss": loss,
                "bc/action_error": (distance * weight).sum() / count,
                "bc/std": (log_std.exp().mean(-1) * weight).sum() / count,
            }
        return loss, {name: float(value.detach()) for name, value in metrics.items()}

    def gaussian(self, batch: PolicyInputs, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
        """Mean and log standard deviation (B, K, D) float32 of the actions before clipping.

        The temperature multiplies the standard deviation; raises ValueError if it is not above 0.

        Gradient: into all trainable weights.
        """
        return self.gaussian_of(self.encoder(batch), temperature)

    def gaussian_of(self, seen: Tensor, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
        """The same for outputs (B, K, W) of the encoder."""
        check_temperature(temperature)
        with torch.autocast(seen.device.type, enabled=False):  # bfloat16 would round actions to steps of 1/256
            seen = seen.float()
            mean = self.mean(seen)
            raw = self.spread(seen) if isinstance(self.spread, nn.Linear) else self.spread.expand_as(mean)
            # a sigmoid between the bounds with slope 1 in the middle: clamping would stop the gradient
            log_std = self._low + self._span * torch.sigmoid(4 / self._span * raw)
        return mean, log_std + math.log(temperature)


def score_gaussian(actions: Tensor, mean: Tensor, log_std: Tensor) -> tuple[Tensor, Tensor]:
    """Log-density and entropy of diagonal Gaussians.

    Gradient: into all three.
    """
    # multiplied by exp(-log_std): no division by a tiny standard deviation
    scaled = (actions - mean) * (-log_std).exp()
    logp = -0.5 * scaled.square() - log_std - 0.5 * math.log(2 * math.pi)
    entropy = log_std + 0.5 * math.log(2 * math.pi * math.e)
    return logp.sum(-1), entropy.sum(-1)
