"""BESO: imitation by a denoiser of action chunks with few steps and guidance by the goal.

    recipe: robot_clone
    model: {kind: beso, chunk: 8, options: {guidance: 2.0}}

A network F sees a chunk of actions x + sigma n at a scale that does not depend on the noise, and predicts what is
missing at the same scale (the preconditioning of Karras et al., with the standard deviation s of actions):

    c_skip = s^2 / (sigma^2 + s^2),   c_out = sigma s / sqrt(sigma^2 + s^2),   c_in = 1 / sqrt(sigma^2 + s^2),
    D(x_sigma) = c_skip x_sigma + c_out F(c_in x_sigma, log(sigma) / 4),
    loss = mean (F - (x - c_skip x_sigma) / c_out)^2,

log sigma from a logistic distribution around log s, cut off at the two bounds of sigma. A chunk is denoised from
sigma_max n along a straight line of noise levels, by DDIM:

    x_(sigma') = (sigma' / sigma) x_sigma + (1 - sigma' / sigma) D(x_sigma).

The goal is the instruction. It is dropped in a fraction of the training rows, so that the difference it makes can be
scaled (classifier-free guidance): D = D_0 + guidance (D_goal - D_0).

This policy only imitates: its actions have no likelihood here. It can be steered by `robot_dsrl` and improved by
`robot_residual`.

Shapes: B rows, K control steps, D entries of an action.

Source: Reuss et al., BESO, arXiv 2304.02532; intuitive-robots/beso, k_diffusion/score_wrappers.py, gc_sampling.py
(sample_ddim, get_sigmas_linear), classifier_free_sampler.py and configs/agents/beso_block_push.yaml; preconditioning:
Karras et al., arXiv 2206.00364, table 1.

Differences: goals are instructions and not later observations of play data, and are dropped as a whole and not entry
by entry; the network is that of `robotics.policies.flow` on one observation, where the authors have a transformer over
the last five; with a guidance of 1, the network without a goal is not asked.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from itertools import pairwise

import torch
from torch import Tensor

from mmrl.core.payload import to_device
from mmrl.errors import ConfigError, UserError
from mmrl.fields import bounded, check_config, rare
from robotics.policies.base.action_policy import ActionChoice, ActionPolicy, PolicyInputs
from robotics.policies.base.action_tokens import draw_rows
from robotics.policies.base.encoder import EncodedPolicy, EncoderConfig, ObservationEncoder, Vocabulary
from robotics.policies.flow import ChunkNetwork, clean_and_noise


@dataclass
class BesoPolicyConfig:
    """Sizes and settings of the policy."""

    action_size: int = rare(bounded(at_least=1))
    """D, number of entries of an action."""
    chunk: int = rare(bounded(8, at_least=1))
    """K, control steps predicted at once."""
    steps: int = bounded(3, at_least=1)
    """Number of denoising steps."""
    guidance: float = bounded(1.0, at_least=0)
    """Weight of the difference that the instruction makes; 1 = none added, 2 in the paper's block pushing."""
    goal_dropout: float = bounded(0.1, at_least=0, below=1)
    """Fraction of the training rows without an instruction."""
    sigma_data: float = rare(bounded(0.5, above=0))
    """s, standard deviation of the actions."""
    sigma_min: float = rare(bounded(0.05, above=0))
    """Lowest noise level."""
    sigma_max: float = rare(bounded(1.0, above=0))
    """Highest noise level."""
    hidden: int = rare(bounded(256, at_least=1))
    """Width of the network."""
    blocks: int = rare(bounded(3, at_least=1))
    """Residual blocks of the network."""
    encoder: EncoderConfig = rare(field(default_factory=EncoderConfig))
    """Sizes of the observation encoder."""

    def validate(self) -> None:
        """Check that the options fit together; raises ConfigError."""
        if self.sigma_min >= self.sigma_max:
            raise ConfigError(f"sigma_min is {self.sigma_min:g}; must be below sigma_max={self.sigma_max:g}")
        if self.guidance != 1 and not self.goal_dropout:
            raise ConfigError(f"guidance is {self.guidance:g}, but no row is trained without a goal; set goal_dropout")


class BesoPolicy(EncodedPolicy, ActionPolicy):
    """Maps image, instruction and state to a chunk of actions by a few steps of denoising."""

    kind = "beso"
    config_class = BesoPolicyConfig
    by_step = False
    decisions = 1

    def __init__(self, config: BesoPolicyConfig, vocabulary: Vocabulary, seed: int = 0) -> None:
        super().__init__()
        check_config(config)
        self.config = config
        self.vocabulary = vocabulary
        self.chunk = config.chunk
        self.action_size = config.action_size
        self.noise_shape = (config.chunk, config.action_size)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.encoder = ObservationEncoder(config.encoder, vocabulary, config.chunk)
            self.network = ChunkNetwork(config)

    def act(
        self,
        batch: PolicyInputs,
        generator: torch.Generator,
        temperature: float = 1.0,
        greedy: bool = False,
        start: Tensor | None = None,
    ) -> ActionChoice:
        """Denoise a chunk of actions for each row, from `start` (B, K, D) or from random noise.

        Greedy starts from random noise too, as in the paper; a temperature of 1 is the only one. The chunk has no
        log-probability: NaN.

        Raises:
            UserError: another temperature.
        """
        if temperature != 1:
            raise UserError(f"acting.temperature is {temperature:g}, but a policy of kind beso has no temperature")
        config = self.config
        size = (self.chunk, self.action_size)
        noise = to_device(draw_rows(torch.randn, (len(batch), *size), generator), self.device)
        chunk = config.sigma_max * (noise if start is None else start.to(noise)).flatten(1)
        with torch.no_grad():
            # encoded once; only the small network runs in each step
            seen = [self.encoder(batch).flatten(1)]
            if config.guidance != 1:
                seen.append(self.encoder(_without_goal(batch)).flatten(1))
            levels = [*torch.linspace(config.sigma_max, config.sigma_min, config.steps).tolist(), 0.0]
            for now, later in pairwise(levels):
                clean = [denoised(self.network, one, chunk, chunk.new_tensor(now), config.sigma_data) for one in seen]
                aim = clean[0] if len(clean) == 1 else clean[1] + config.guidance * (clean[0] - clean[1])
                chunk = later / now * chunk + (1 - later / now) * aim
        decisions = chunk.unflatten(1, size)
        return ActionChoice(decisions.clamp(-1, 1), decisions, torch.full((len(batch), 1), math.nan))

    def log_probs(self, batch: PolicyInputs, decisions: Tensor, temperature: float = 1.0) -> tuple[Tensor, None]:
        """Refuse: chunks have no log-probability; raises UserError."""
        raise UserError(
            "a policy of kind beso only imitates, because its actions have no log-probability; use model.kind flow, or "
            "improve this policy by robot_dsrl or robot_residual"
        )

    def bc_loss(
        self, batch: PolicyInputs, actions: Tensor, mask: Tensor, generator: torch.Generator | None = None
    ) -> tuple[Tensor, dict[str, float]]:
        """Behaviour cloning loss: squared error of the network at a random noise level for each row.

        Raises:
            ValueError: no generator.
        """
        clean, noise, weight = clean_and_noise(self, batch, actions, mask, generator)
        assert generator is not None
        config, rows = self.config, len(batch)
        level, dropped = draw_rows(torch.rand, (rows, 2), generator).unbind(1)
        sigma = to_device(noise_levels(level, config.sigma_data, config.sigma_min, config.sigma_max), self.device)
        seen = self.encoder(_without_goal(batch, (dropped < config.goal_dropout).tolist())).flatten(1)
        error = denoising_error(self.network, seen, clean, noise, sigma, config.sigma_data)
        loss = (error * weight).sum() / weight.sum().clamp(min=1)
        return loss, {"bc/loss": float(loss.detach())}


def scalings(sigma: Tensor, data: float) -> tuple[Tensor, Tensor, Tensor]:
    """c_skip, c_out and c_in for noise levels of any shape and the standard deviation of clean data.

    Source: arXiv 2206.00364, table 1; intuitive-robots/beso GCDenoiser.get_scalings.
    """
    total = sigma.square() + data**2
    return data**2 / total, sigma * data / total.sqrt(), total.rsqrt()


def denoised(network: ChunkNetwork, seen: Tensor, noisy: Tensor, sigma: Tensor, data: float) -> Tensor:
    """D: the clean chunks (B, N) of noisy ones (B, N) at the level () or (B,), given encoded observations."""
    skip, out, scale = (part.expand(len(noisy))[:, None] for part in scalings(sigma, data))
    found = network(seen, noisy * scale, sigma.expand(len(noisy)).log() / 4).float()
    return found * out + noisy * skip


def denoising_error(
    network: ChunkNetwork, seen: Tensor, clean: Tensor, noise: Tensor, sigma: Tensor, data: float
) -> Tensor:
    """Squared error (B, N) of F for clean chunks (B, N), noise (B, N) and levels (B,).

    Gradient: into the network and the encoded observations.
    """
    skip, out, scale = (part[:, None] for part in scalings(sigma, data))
    noisy = clean + noise * sigma[:, None]
    found = network(seen, noisy * scale, sigma.log() / 4).float()
    return (found - (clean - skip * noisy) / out).square()


def noise_levels(uniform: Tensor, data: float, low: float, high: float) -> Tensor:
    """Levels of uniform numbers in 0..1: log-logistic around `data` with the scale 0.5, within the bounds.

    Source: intuitive-robots/beso k_diffusion/utils.py rand_log_logistic.
    """
    centre, scale = math.log(data), 0.5
    first, last = (torch.tensor((math.log(bound) - centre) / scale).double().sigmoid() for bound in (low, high))
    within = first + uniform.double() * (last - first)
    return (within.logit() * scale + centre).exp().float()


def _without_goal(batch: PolicyInputs, rows: list[bool] | None = None) -> PolicyInputs:
    """A batch in which some rows, by default all, have no instruction."""
    dropped = [True] * len(batch) if rows is None else rows
    texts = tuple("" if drop else text for drop, text in zip(dropped, batch.instructions, strict=True))
    return replace(batch, instructions=texts)
