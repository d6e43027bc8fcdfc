"""A squashed Gaussian action head, the policy of soft actor-critic: every action is the tanh of a Gaussian.

Shapes: B rows, K control steps, D entries of an action. Log-densities are in nats.

    u ~ N(mu, diag(sigma^2)),   a = tanh(u),
    log p(a) = sum over D of (log N(u; mu, sigma) - 2 (log 2 - u - softplus(-2 u))).

The last term is log(1 - tanh(u)^2) without cancellation. Stable-Baselines3 and CleanRL compute log(1 - a^2 + 1e-6),
which is too small by up to 14 nats per entry for large u, and whose gradient vanishes there. A decision is u, so that
its density never needs the inverse of tanh, which is infinite at -1 and 1.

sigma is a function of the observation between two bounds, as in `robotics.policies.gaussian`. Divergences between two
such policies are those of their Gaussians, because tanh is the same for both.

Without images, the observation is encoded by a perceptron of `encoder.layers` hidden layers of `encoder.width`; it
reads the state and the mean of the instruction's word vectors.

Source: SAC, arXiv 1801.01290, appendix C, and 1812.05905; exact term: tensorflow_probability Tanh bijector.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import softplus

from mmrl.core.payload import to_device
from mmrl.fields import bounded, choice, rare
from robotics.policies.base.action_policy import ActionChoice, PolicyInputs, check_demonstrations
from robotics.policies.base.action_tokens import draw_rows
from robotics.policies.base.encoder import ObservationEncoder, StateEncoder
from robotics.policies.gaussian import CLONING, STD_PER, GaussianActionPolicy, GaussianPolicyConfig, score_gaussian

INSIDE = 1 - 1e-5
"""Largest action whose density is asked for in cloning, as in ColinQiyangLi/qc agents/acrlpd.py."""


@dataclass
class SquashedPolicyConfig(GaussianPolicyConfig):
    """Sizes and settings of the policy; standard deviations are those before the tanh."""

    std: float = rare(bounded(1.0, above=0))
    """Initial standard deviation before the tanh; with 1, the first actions spread over the whole range."""
    std_per: str = rare(choice("state", STD_PER))
    """state: predicted from the observation per entry and control step; action: one per entry of an action."""
    min_std: float = rare(bounded(math.exp(-5), above=0))
    """Minimum standard deviation before the tanh."""
    max_std: float = rare(bounded(math.exp(2), above=0))
    """Maximum standard deviation before the tanh."""
    cloning: str = rare(choice("error", CLONING))
    """error: mean squared error of the tanh of the mean; likelihood: negative log-density of the demonstrated actions,
    clipped to 1e-5 inside of -1 and 1, which have no density."""


class CriticsPolicy:
    """What soft actor-critic asks of a policy."""

    @abstractmethod
    def draw(self, batch: PolicyInputs, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Draw what critics judge, (B, K, D), by reparametrisation, and its log-densities (B, K)."""

    def propose(
        self, batch: PolicyInputs, generator: torch.Generator, judge: Callable[[Tensor], Tensor]
    ) -> tuple[Tensor, Tensor, Tensor | float]:
        """Draw what the actor's loss compares.

        Args:
            batch: B rows.
            generator: of the draw.
            judge: values (B,) of drawn actions (B, K, D).

        Returns:
            Values (B,), log-densities (B,) and a further loss ().
        """
        actions, logp = self.draw(batch, generator)
        return judge(actions), logp.sum(1), 0.0


class SquashedActionPolicy(CriticsPolicy, GaussianActionPolicy):
    """Maps an observation to a chunk of K squashed Gaussian actions; a decision is a control step before its tanh.

    config = SquashedPolicyConfig(action_size=1, chunk=1, encoder=EncoderConfig(image_size=None, state_size=3))
    policy = SquashedActionPolicy.build(config, [""])
    """

    kind = "squashed"
    config_class = SquashedPolicyConfig
    noise_chosen: tuple[int, int] | None = None
    """Shape of the noise that critics judge instead of the executed actions; None if they judge actions."""

    def make_encoder(self) -> ObservationEncoder | StateEncoder:
        """A perceptron without images, else the observation encoder."""
        if self.config.encoder.image_size is not None:
            return super().make_encoder()
        return StateEncoder(self.config.encoder, self.vocabulary, self.config.chunk)

    def act(
        self, batch: PolicyInputs, generator: torch.Generator, temperature: float = 1.0, greedy: bool = False
    ) -> ActionChoice:
        """Choose a chunk of actions for each row; greedy actions are the tanh of the mean.

        The temperature multiplies the standard deviation. Decisions are (B, K, D) float32 before the tanh.
        """
        with torch.no_grad():
            mean, log_std = self.gaussian(batch, temperature)
            before = mean if greedy else _drawn(mean, log_std, generator)
            return ActionChoice(before.tanh(), before, score_squashed(before, mean, log_std))

    def look(self, batch: PolicyInputs, generator: torch.Generator) -> Tensor:
        """Input (B, V) float32 of the head for a batch of observations: the state."""
        assert batch.state is not None
        return batch.state

    def looks(self, states: Tensor, decisions: Tensor) -> Tensor:
        """Input (..., V) of the head at each decision, given the states (..., S)."""
        return states

    def chosen(self, decisions: Tensor) -> Tensor:
        """Action input (..., K, D) of the critics for decisions, in -1..1: the actions."""
        return decisions.tanh()

    def draw(self, batch: PolicyInputs, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Draw actions (B, K, D) by reparametrisation, and their log-densities (B, K).

        Gradient: into all trainable weights, through the actions.
        """
        mean, log_std = self.gaussian(batch)
        before = _drawn(mean, log_std, generator)
        return before.tanh(), score_squashed(before, mean, log_std)

    def log_probs(self, batch: PolicyInputs, decisions: Tensor, temperature: float = 1.0) -> tuple[Tensor, None]:  # type: ignore[override]
        """Score decisions (B, K, D) before the tanh; the entropy of a squashed Gaussian has no closed form."""
        expected = (len(batch), self.chunk, self.action_size)
        if tuple(decisions.shape) != expected:
            raise ValueError(f"decisions have the shape {tuple(decisions.shape)}; expected {expected}")
        mean, log_std = self.gaussian(batch, temperature)
        return score_squashed(decisions.to(mean), mean, log_std), None

    def bc_loss(
        self, batch: PolicyInputs, actions: Tensor, mask: Tensor, generator: torch.Generator | None = None
    ) -> tuple[Tensor, dict[str, float]]:
        """Behaviour cloning loss without random draws; see `SquashedPolicyConfig.cloning`."""
        check_demonstrations(self, batch, actions, mask)
        mean, log_std = self.gaussian(batch)
        wanted, weight = actions.to(mean), mask.to(mean)
        if self.config.cloning == "error":
            each = (mean.tanh() - wanted).square().mean(-1)
        else:
            each = -score_squashed(wanted.clamp(-INSIDE, INSIDE).atanh(), mean, log_std)
        count = weight.sum().clamp(min=1)
        loss = (each * weight).sum() / count
        with torch.no_grad():
            distance = (mean.tanh() - wanted).abs().mean(-1)
            metrics = {
                "bc/loss": loss,
                "bc/action_error": (distance * weight).sum() / count,
                "bc/std": (log_std.exp().mean(-1) * weight).sum() / count,
            }
        return loss, {name: float(value.detach()) for name, value in metrics.items()}


def score_squashed(before: Tensor, mean: Tensor, log_std: Tensor) -> Tensor:
    """Log-density (B, K) of the actions tanh(before), summed over the entries of an action.

    Gradient: into all three.

    Source: SAC, arXiv 1801.01290, eq. 21.
    """
    # log(1 - tanh^2 u) is symmetric in u, and exact for large u in this form
    slope = 2 * (math.log(2) - before - softplus(-2 * before))
    return score_gaussian(before, mean, log_std)[0] - slope.sum(-1)


def _drawn(mean: Tensor, log_std: Tensor, generator: torch.Generator) -> Tensor:
    noise = draw_rows(torch.randn, mean.shape, generator)
    return mean + log_std.exp() * to_device(noise, mean.device)


class UniformPolicy:
    """Uniform actions in -1..1, whatever is observed."""

    past = 0

    def __init__(self, chunk: int, action_size: int) -> None:
        self.chunk = chunk
        self.action_size = action_size

    def act(
        self, batch: PolicyInputs, generator: torch.Generator, temperature: float = 1.0, greedy: bool = False
    ) -> ActionChoice:
        """Choose a chunk of actions for each row; decisions are before a tanh, as those of a squashed policy."""
        drawn = draw_rows(torch.rand, (len(batch), self.chunk, self.action_size), generator) * 2 - 1
        logp = torch.full((len(batch), self.chunk), -self.action_size * math.log(2))
        return ActionChoice(drawn, drawn.atanh(), logp)
