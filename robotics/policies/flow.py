"""A flow-matching action head that denoises a chunk of actions in S stochastic steps, each with a log-probability.

Shapes: B rows, K control steps, D entries of an action, S denoising steps, E = K D numbers of a chunk. sigma runs from
1 (noise) to 0 (actions), x_sigma = (1 - sigma) actions + sigma noise and the velocity is noise - actions, as in the
`diffusion` package, whose steps are used.

A decision is one denoising step: a Gaussian around the next point of the flow. Its log-probability is exact, whereas
that of the actions themselves would require an integral. `ActionChoice.decisions` is the whole chain (B, S + 1, E),
starting with the noise.

Source: pi_0, arXiv 2410.24164 (flow matching over action chunks); Flow-GRPO, arXiv 2505.05470, ReinFlow, arXiv
    2505.22094, and pi_RL, arXiv 2510.25889 (denoising steps as decisions of reinforcement learning).

Differences: the velocity is a small residual network on the outputs of the observation encoder instead of an action
expert inside a transformer, so denoising steps are cheap compared with encoding the observation; the times of the
cloning loss are uniform.

The noise of a step has a fixed scale as in Flow-GRPO (pi_RL's Flow-SDE), or is learned (`noise: learned`, pi_RL's
Flow-Noise). In the latter case, a network next to the velocity's last layer predicts the standard deviation of each
number between two bounds,

    log std = log min + (log max - log min) (tanh h + 1) / 2,

and the mean of a step is that of the ODE. Cloning does not train this network.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from diffusion.matching.losses import mix
from diffusion.sampling.steps import LOG_SQRT_2PI, FlowSdeStep, OdeStep, gaussian_kl
from mmrl.core.payload import to_device
from mmrl.errors import ConfigError
from mmrl.fields import bounded, check_config, choice, only_with, rare
from robotics.policies.base.action_policy import (
    ActionChoice,
    ActionPolicy,
    PolicyInputs,
    check_demonstrations,
    check_temperature,
)
from robotics.policies.base.action_tokens import draw_rows
from robotics.policies.base.encoder import EncodedPolicy, EncoderConfig, ObservationEncoder, Vocabulary
from robotics.policies.base.inpainting import RunningChunk, guided_velocity

NOISES = ("fixed", "learned")
REDUCTIONS = ("sum", "mean")
PARAMETERISATIONS = ("velocity", "x0")
FREQUENCIES = 16
"""Number of frequencies that encode the time."""


@dataclass
class FlowPolicyConfig:
    """Sizes and settings of the policy."""

    action_size: int = rare(bounded(at_least=1))
    """D, number of entries of an action."""
    chunk: int = rare(bounded(8, at_least=1))
    """K, control steps predicted at once."""
    steps: int = rare(bounded(5, at_least=2))
    """S, denoising steps."""
    parameterisation: str = choice("velocity", PARAMETERISATIONS)
    """velocity: the network predicts the velocity; x0: it predicts the actions, which small networks learn much
    faster."""
    noise: str = choice("fixed", NOISES)
    """fixed: `noise_level` sets the noise of a step; learned: a network predicts it for each number (Flow-Noise)."""
    noise_level: float = rare(only_with(bounded(0.5, above=0), noise="fixed"))
    """Scale of the fixed noise, a in g = a sqrt(sigma / (1 - sigma))."""
    min_std: float = rare(only_with(bounded(0.08, above=0), noise="learned"))
    """Minimum standard deviation of a step with learned noise, on the scale -1..1 of the actions."""
    max_std: float = rare(only_with(bounded(0.16, above=0), noise="learned"))
    """Maximum standard deviation of a step with learned noise."""
    logp_reduction: str = rare(choice("sum", REDUCTIONS))
    """sum: log-density of a step, as clip ranges for other policies assume; mean: divided by K D, as for images."""
    hidden: int = rare(bounded(256, at_least=1))
    """Width of the velocity network."""
    blocks: int = rare(bounded(3, at_least=1))
    """Residual blocks of the velocity network."""
    encoder: EncoderConfig = rare(field(default_factory=EncoderConfig))
    """Sizes of the observation encoder."""

    def validate(self) -> None:
        """Check that the options of the noise fit together; raises ConfigError."""
        if self.min_std >= self.max_std:
            raise ConfigError(f"min_std is {self.min_std}; must be below max_std={self.max_std}")


class FlowActionPolicy(EncodedPolicy, ActionPolicy):
    """Maps image, instruction and state to a chunk of actions by denoising."""

    kind = "flow"
    config_class = FlowPolicyConfig
    by_step = False
    inpaints = True
    sigmas: Tensor

    def __init__(self, config: FlowPolicyConfig, vocabulary: Vocabulary, seed: int = 0) -> None:
        super().__init__()
        check_config(config)
        self.config = config
        self.vocabulary = vocabulary
        self.chunk = config.chunk
        self.action_size = config.action_size
        self.decisions = config.steps
        self.noise_shape = (config.chunk, config.action_size)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.encoder = ObservationEncoder(config.encoder, vocabulary, config.chunk)
            self.velocity = ChunkNetwork(config)
            self.noise = _Noise(config) if config.noise == "learned" else None
        # `divergence` assumes the same noise on both sides, and learned noise changes with the weights
        self.has_means = self.noise is None
        # not persistent: it follows from the number of steps
        self.register_buffer("sigmas", torch.linspace(1, 0, config.steps + 1), persistent=False)
        # sigma_max is the second time of this even grid
        self._kernel = FlowSdeStep(sigma_max=1 - 1 / config.steps, noise_level=config.noise_level)
        # the kernel averages over the numbers of a chunk; multiplying by their count gives the sum
        self._count = config.chunk * config.action_size if config.logp_reduction == "sum" else 1

    def act(
        self,
        batch: PolicyInputs,
        generator: torch.Generator,
        temperature: float = 1.0,
        greedy: bool = False,
        start: Tensor | None = None,
        previous: RunningChunk | None = None,
    ) -> ActionChoice:
        """Choose a chunk of actions for each row.

        The temperature multiplies the noise of the steps. Greedy follows the flow without noise from a random start,
        the usual way to evaluate flow policies; its steps have no density, so the log-probabilities are NaN. `start`
        (B, K, D) replaces the random start. Chunks that continue `previous` have no log-probabilities either.
        """
        check_temperature(temperature)
        running = None if previous is None else self._guidance(previous)
        size = (len(batch), self.chunk * self.action_size)
        with torch.no_grad():
            # encoded once; only the small velocity network runs in each step
            seen = self.encoder(batch).flatten(1)
            drawn = self._noise(size, generator)
            chain = [drawn if start is None else start.to(drawn).reshape(size)]
            logp = []
            for number in range(self.config.steps):
                mean, std = self._transition(seen, chain[-1], number, ode=greedy, running=running)
                # greedy still draws the noise, so that the generator ends in the same state in both modes
                std = std * (0.0 if greedy else temperature)
                chain.append(mean + std.reshape(len(std), -1) * self._noise(size, generator))
                scored = self._score(chain[-1], mean, std)
                # guided steps are not those that `log_probs` scores
                logp.append(scored if running is None else torch.full_like(scored, math.nan))
        # clamped for the simulator only: the chain keeps the unclamped end, which is what was scored
        actions = chain[-1].clamp(-1, 1).unflatten(1, (self.chunk, self.action_size))
        return ActionChoice(actions, torch.stack(chain, 1), torch.stack(logp, 1))

    def log_probs(self, batch: PolicyInputs, decisions: Tensor, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
        """Score decisions; decisions are (B, S + 1, E), entropies do not depend on the weights."""
        expected = (len(batch), self.config.steps + 1, self.chunk * self.action_size)
        if tuple(decisions.shape) != expected:
            raise ValueError(f"decisions have the shape {tuple(decisions.shape)}; expected {expected}")
        check_temperature(temperature)
        seen, chain = self.encoder(batch).flatten(1), decisions.float()
        logp, entropy = [], []
        # step by step as in sampling: a different batch size rounds differently, and the ratio would not start at 1
        for number in range(self.config.steps):
            mean, std = self._transition(seen, chain[:, number], number)
            logp.append(self._score(chain[:, number + 1], mean, std * temperature))
            spread = (std * temperature).log().reshape(len(std), -1).mean(1)
            entropy.append(self._count * (0.5 * math.log(2 * math.pi * math.e) + spread))
        return torch.stack(logp, 1), torch.stack(entropy, 1)

    def means(self, batch: PolicyInputs, decisions: Tensor) -> Tensor:
        """Means (B, S, E) of the steps of decisions (B, S + 1, E)."""
        seen, chain = self.encoder(batch).flatten(1), decisions.float()
        return torch.stack([self._transition(seen, chain[:, step], step)[0] for step in range(self.config.steps)], 1)

    def divergence(self, batch: PolicyInputs, decisions: Tensor, means_old: Tensor, temperature: float = 1.0) -> Tensor:
        """Divergence (B, S) of steps with fixed noise from steps around other means (B, S, E), reduced like `logp`.

        Gradient: into all trainable weights.
        """
        seen = self.encoder(batch).flatten(1)
        chain = decisions.float()
        found = []
        for number in range(self.config.steps):
            mean, std = self._transition(seen, chain[:, number], number)
            found.append(self._count * gaussian_kl(mean, means_old[:, number], std * temperature))
        return torch.stack(found, 1)

    def bc_loss(
        self, batch: PolicyInputs, actions: Tensor, mask: Tensor, generator: torch.Generator | None = None
    ) -> tuple[Tensor, dict[str, float]]:
        """Behaviour cloning loss: squared error of the prediction at a random time and noise for each row.

        Raises:
            ValueError: no generator.
        """
        clean, noise, weight = clean_and_noise(self, batch, actions, mask, generator)
        assert generator is not None
        # uniform, unlike pi_0; see the module docstring
        time = to_device(draw_rows(torch.rand, (len(batch),), generator), self.device)
        noisy = mix(clean, noise, time, torch.arange(len(batch)))
        found = self.velocity(self.encoder(batch).flatten(1), noisy.latents, time).float()
        wanted = clean if self.config.parameterisation == "x0" else noisy.target
        loss = ((found - wanted).square() * weight).sum() / weight.sum().clamp(min=1)
        return loss, {"bc/loss": float(loss.detach())}

    def _transition(
        self,
        seen: Tensor,
        latents: Tensor,
        number: int,
        ode: bool = False,
        running: tuple[Tensor, Tensor, float] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Mean (B, E) and standard deviation of a step, (B,) if fixed, (B, E) if learned; see `_guidance`."""
        now, later = self.sigmas[number], self.sigmas[number + 1]
        hidden, velocity = self._flow(seen, latents, now)
        if running is not None:
            velocity = guided_velocity(lambda point: self._flow(seen, point, now)[1], latents, now, *running)
        if self.noise is None:
            return (OdeStep() if ode else self._kernel).transition(velocity, latents, now, later)
        return OdeStep().transition(velocity, latents, now, later)[0], self.noise(hidden)

    def _flow(self, seen: Tensor, latents: Tensor, sigma: Tensor) -> tuple[Tensor, Tensor]:
        """Inputs (B, H) to the velocity's last layer, and the velocity (B, E)."""
        hidden = self.velocity.hidden(seen, latents, sigma.expand(len(latents)))
        found = self.velocity.leave(hidden)
        if self.config.parameterisation == "x0":
            # x_sigma = (1 - sigma) x0 + sigma e, so the velocity e - x0 is (x_sigma - x0) / sigma. The last step starts
            # at sigma = 1 / S, so this never divides by 0.
            found = (latents - found) / sigma
        return hidden, found

    def _guidance(self, previous: RunningChunk) -> tuple[Tensor, Tensor, float]:
        """Actions (B, E) and weights (B, E) of the running chunk, and the maximum weight of the pull."""
        actions, weights = previous.padded(self.chunk, self.action_size)
        parts = [part.expand_as(actions).flatten(1).to(self.device) for part in (actions, weights)]
        return parts[0], parts[1], min(previous.limit, self.config.steps)

    def _score(self, following: Tensor, mean: Tensor, std: Tensor) -> Tensor:
        if self.noise is None:
            return self._kernel.log_prob(following, mean, std) * self._count
        squares = ((following.detach() - mean) / std).square()
        return -(squares / 2 + std.log() + LOG_SQRT_2PI).mean(1) * self._count

    def _noise(self, size: tuple[int, ...], generator: torch.Generator) -> Tensor:
        return to_device(draw_rows(torch.randn, size, generator), self.device)


def clean_and_noise(
    policy: ActionPolicy, batch: PolicyInputs, actions: Tensor, mask: Tensor, generator: torch.Generator | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Demonstrated chunks, noise of the same size, and the weight of each number, (B, E) each; see `bc_loss`."""
    check_demonstrations(policy, batch, actions, mask)
    if generator is None:
        raise ValueError(f"a policy of {type(policy).__name__} samples noise in cloning; pass bc_loss a generator")
    # a mask of control steps becomes one of numbers: D neighbouring ones belong to each step
    weight = mask.to(policy.device, torch.float32).repeat_interleave(policy.action_size, 1)
    # actions after the end of a demonstration must not reach the network as input either; 0 means no motion
    clean = actions.to(policy.device, torch.float32).flatten(1).where(weight > 0, 0.0)
    return clean, to_device(draw_rows(torch.randn, clean.shape, generator), policy.device), weight


class ChunkNetwork(nn.Module):
    """A residual network on a noisy chunk, modulated by encoder outputs and time."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        numbers, hidden = config.chunk * config.action_size, config.hidden
        self.enter = nn.Linear(numbers, hidden)
        self.seen = nn.Linear(config.chunk * config.encoder.width, hidden)
        self.time = nn.Linear(2 * FREQUENCIES, hidden)
        self.blocks = nn.ModuleList(_Block(hidden) for _ in range(config.blocks))
        self.norm = nn.LayerNorm(hidden)
        self.leave = nn.Linear(hidden, numbers)

    def forward(self, seen: Tensor, latents: Tensor, sigma: Tensor) -> Tensor:
        """(B, K W), (B, E), (B,) -> (B, E)."""
        return self.leave(self.hidden(seen, latents, sigma))

    def hidden(self, seen: Tensor, latents: Tensor, sigma: Tensor) -> Tensor:
        """Inputs (B, H) to the last layer."""
        condition = functional.silu(self.seen(seen) + self.time(_waves(sigma)))
        hidden = self.enter(latents) + condition
        for block in self.blocks:
            hidden = block(hidden, condition)
        return self.norm(hidden)


class _Noise(nn.Module):
    """Standard deviation of each number of a step, between two bounds, from the inputs of the velocity's last layer.

    Source: pi_RL, arXiv 2510.25889; RLinf/RLinf rlinf/models/embodiment/modules/explore_noise_net.py.
    """

    def __init__(self, config: FlowPolicyConfig) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(config.hidden, config.hidden),
            nn.SiLU(),
            nn.Linear(config.hidden, config.chunk * config.action_size),
        )
        self.low = math.log(config.min_std)
        self.high = math.log(config.max_std)

    def forward(self, hidden: Tensor) -> Tensor:
        """(B, H) -> (B, E) float32."""
        # float32 before tanh and exp: the bounds have to hold exactly
        return (self.low + (self.high - self.low) * (self.layers(hidden).float().tanh() + 1) / 2).exp()


class _Block(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(hidden)
        self.wide = nn.Linear(hidden, 2 * hidden)
        self.narrow = nn.Linear(2 * hidden, hidden)
        self.modulate = nn.Linear(hidden, 2 * hidden)

    def forward(self, hidden: Tensor, condition: Tensor) -> Tensor:
        scale, shift = self.modulate(condition).chunk(2, -1)
        return hidden + self.narrow(functional.silu(self.wide(self.norm(hidden) * (1 + scale) + shift)))


def _waves(sigma: Tensor) -> Tensor:
    """(B,) -> (B, 32), sines and cosines with periods from 4 down to 1/8."""
    rate = torch.logspace(math.log10(math.pi / 2), math.log10(16 * math.pi), FREQUENCIES, device=sigma.device)
    angle = sigma[:, None] * rate
    return torch.cat([angle.sin(), angle.cos()], 1)
