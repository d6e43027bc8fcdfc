"""From prompts to latents: by any solver, or step by step with a log-probability for each stochastic step.

Shapes: B rows (images), S steps of the grid, T trained steps, C x H x W one latent.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from diffusion.conditioning import TextRows
from diffusion.data import DiffusionTask
from diffusion.guidance import GuidedVelocity
from diffusion.schedule import RANDOM_SOLVERS, SOLVERS, Solver, make_solver, sde_window, sigma_grid, trained_steps
from diffusion.steps import KERNELS, OdeStep, StepKernel, sample_step
from mmrl.fields import bounded, choice, rare


@dataclass
class SamplerConfig:
    """How images are drawn while training, and for evaluation."""

    steps: int = bounded(10, at_least=1)
    """Denoising steps of a training rollout."""
    guidance: float = bounded(4.5, at_least=0)
    """Classifier-free guidance scale in rollouts and in training; 1 = none, one model row a step instead of two."""
    negative_prompt: str = rare("")
    """The other side of guidance."""
    kernel: str = rare(choice("flow_sde", lambda: KERNELS))
    """Transition of the trained steps: flow_sde, dance_sde or cps; methods that learn from x_0 alone use `solver`."""
    noise_level: float = bounded(0.7, at_least=0)
    """Noise of the stochastic steps, eta; the meaning is the kernel's (or sa_solver's tau). euler and dpm have none."""
    window: int = rare(bounded(0, at_least=0))
    """Consecutive stochastic steps that are trained, the others are ODE steps; 0 = all that `fraction` leaves."""
    window_low: int = rare(bounded(0, at_least=0))
    """First step at which the window may start."""
    window_high: int = rare(bounded(0, at_least=0))
    """Step before which the window ends; 0 = half of the steps."""
    fraction: float = rare(bounded(0.99, above=0, at_most=1))
    """Share of the steps that is trained; 0.99 leaves out the last one, whose Gaussian is too peaked."""
    random_share: float = rare(bounded(1.0, above=0, at_most=1))
    """Train on this share of the trained steps, drawn for each image (DanceGRPO 0.6)."""
    solver: str = choice("euler", lambda: SOLVERS)
    """Solver of rollouts without log-probabilities: euler, sa_solver (2nd order, stochastic), dpm (2nd order), or the
    stochastic steps flow_sde, dance_sde and cps, of which the last has no noise."""
    same_noise: bool = rare(False)
    """Whether the images of a group start from the same noise (DanceGRPO)."""
    batch_rows: int = bounded(64, at_least=1)
    """Most images drawn or decoded at a time; for memory only, the images do not depend on it."""
    eval_steps: int = bounded(40, at_least=1)
    """ODE steps of evaluation images."""
    eval_guidance: float | None = bounded(None, at_least=0)
    """Guidance scale of evaluation images; empty = that of training."""

    def validate(self) -> None:
        """Check that the window of steps lies among the steps; raises ValueError."""
        lowest = self.window_low + max(self.window, 1)
        highest = f"0, or between window_low + window={lowest} and steps={self.steps}"
        for name, valid, expected in (
            ("window", self.window <= self.steps, f"between 0 and steps={self.steps}"),
            ("window_low", self.window_low <= self.steps - self.window, "between 0 and steps - window"),
            ("window_high", self.window_high == 0 or lowest <= self.window_high <= self.steps, highest),
        ):
            if not valid:
                raise ValueError(f"sampler.{name} is {getattr(self, name)}; must be {expected}")


@dataclass
class Trajectory:
    """Denoising runs, with the states and times at which their trained steps are evaluated again."""

    latents: Tensor
    """x_0 (B, C, H, W)."""
    states: Tensor
    """(B, T + 1, C, H, W), latents before each trained step and after the last."""
    sigma: Tensor
    """(B, T) float32, time before each trained step."""
    sigma_next: Tensor
    """(B, T) float32, time after it."""
    logp: Tensor
    """(B, T) float32, mean log-density per latent dimension."""
    mean: Tensor | None
    """(B, T, C, H, W) float32, where asked for."""


class SampledStates(NamedTuple):
    """Images and some latents of their paths."""

    latents: Tensor
    """x_0 (B, C, H, W)."""
    states: Tensor
    """(B, T, C, H, W), the latents that were kept."""
    sigma: Tensor
    """(B, T) float32, their times."""


def row_noise(seeds: Tensor, draws: int, shape: tuple[int, ...]) -> Tensor:
    """Standard normal noise (B, draws, *shape) float32 on the CPU that depends on each row's seed (B,) alone."""
    generator = torch.Generator()
    rows = [torch.randn(draws, *shape, generator=generator.manual_seed(seed)) for seed in seeds.tolist()]
    return torch.stack(rows) if rows else torch.zeros(0, draws, *shape)


def group_seeds(groups: int, size: int, generator: torch.Generator, *, same_noise: bool = False) -> Tensor:
    """Draw the seeds (N * G, 2) of each row's initial noise and of its later noise."""
    seeds = torch.randint(2**62, (groups * size, 2), generator=generator)
    if same_noise:
        seeds[:, 0] = seeds[::size, 0].repeat_interleave(size)
    return seeds


def text_of(policy: Any, tasks: Sequence[DiffusionTask], rows: Tensor) -> TextRows:
    """Text of rows, given the task (B,) of each; an empty prompt is one without a caption."""
    embedded: TextRows = policy.embeddings.rows([task.prompt for task in tasks], allow_empty=True)
    return embedded.select(rows.cpu())


def guided(
    policy: Any, velocity_of: Any, text: TextRows, scale: float, negative: str, **options: Any
) -> GuidedVelocity:
    """Velocity of rows under classifier-free guidance, with the policy's embeddings of the negative prompt."""
    other = None if scale == 1.0 else policy.embeddings.negative(negative)
    return GuidedVelocity(velocity_of, text, other, scale, **options)


def make_kernel(config: SamplerConfig, grid: Tensor) -> StepKernel:
    """Transition of the trained steps on a grid (S + 1,) of times."""
    return KERNELS[config.kernel](config.noise_level, float(grid[1]))


def sample_trajectories(
    policy: Any,
    text: TextRows,
    seeds: Tensor,
    config: SamplerConfig,
    window: range,
    *,
    keep_mean: bool = False,
    together: bool = True,
) -> Trajectory:
    """Denoise, with the steps of the window stochastic and recorded and the others deterministic.

    Args:
        policy: a `DiffusionPolicy`.
        text: text of B rows.
        seeds: (B,) int64 or (B, 2): of the initial noise and of the steps' noise.
        config: grid, kernel and guidance.
        window: the trained steps.
        keep_mean: whether the means of the transitions are returned.
        together: of `GuidedVelocity`.

    Returns:
        The B runs.
    """
    grid = sigma_grid(policy.pipeline.scheduler, config.steps, policy.image_tokens)
    parts = []
    for rows in torch.arange(len(text)).split(config.batch_rows):
        velocity = guided(policy, policy, text.select(rows), config.guidance, config.negative_prompt, together=together)
        parts.append(_trajectories(policy, velocity, seeds[rows], grid, make_kernel(config, grid), window, keep_mean))
    means = [part.mean for part in parts if part.mean is not None]
    joined = {name: torch.cat([getattr(part, name) for part in parts]) for name in _JOINED}
    return Trajectory(**joined, mean=torch.cat(means) if means else None)


def _trajectories(
    policy: Any, velocity: GuidedVelocity, seeds: Tensor, grid: Tensor, kernel: Any, window: range, keep_mean: bool
) -> Trajectory:
    pairs = _pairs(seeds)
    latents = _first_latents(policy, pairs)
    noise = row_noise(pairs[:, 1], len(window), policy.latent_shape).to(policy.device)
    states: list[Tensor] = []
    logps, means = [], []
    ode = OdeStep()
    for index, (sigma, sigma_next) in enumerate(pairwise(grid)):
        v = velocity(latents, sigma.to(latents.device))
        if index not in window:
            latents = ode.transition(v, latents, sigma, sigma_next)[0].to(latents.dtype)
            continue
        if not states:
            states.append(latents)
        result = sample_step(kernel, v, latents, sigma, sigma_next, noise[:, index - window.start])
        latents = result.previous
        states.append(latents)
        logps.append(result.logp)
        means += [result.mean] if keep_mean else []
    rows = len(seeds)
    return Trajectory(
        latents=latents,
        states=torch.stack(states, 1),
        sigma=grid[list(window)].expand(rows, -1).to(latents.device),
        sigma_next=grid[[index + 1 for index in window]].expand(rows, -1).to(latents.device),
        logp=torch.stack(logps, 1),
        mean=torch.stack(means, 1) if means else None,
    )


def sample_latents(
    policy: Any,
    text: TextRows,
    seeds: Tensor,
    config: SamplerConfig,
    *,
    steps: int | None = None,
    guidance: float | None = None,
    solver: str | None = None,
) -> Tensor:
    """Denoise without log-probabilities.

    Args:
        policy: a `DiffusionPolicy`.
        text: text of B rows.
        seeds: (B,) int64 or (B, 2): of the initial noise and of the solver's noise.
        config: grid, solver and guidance.
        steps: another number of steps.
        guidance: another guidance scale.
        solver: another solver.

    Returns:
        x_0 (B, C, H, W) in the policy's dtype.
    """
    scale = config.guidance if guidance is None else guidance
    made = _solver(policy, config, solver or config.solver, steps or config.steps)
    parts = []
    for rows in torch.arange(len(text)).split(config.batch_rows):
        velocity = guided(policy, policy, text.select(rows), scale, config.negative_prompt)
        for latents in _solved(policy, velocity, made, seeds[rows]):
            finished = latents  # earlier states are not kept
        parts.append(finished)
    return torch.cat(parts)


def sample_states(policy: Any, text: TextRows, seeds: Tensor, config: SamplerConfig, kept: Tensor) -> SampledStates:
    """Denoise as `sample_latents` does and keep the latents before the steps `kept` (B, T) int64 of each row."""
    made = _solver(policy, config, config.solver, config.steps)
    finished, states = [], []
    for rows in torch.arange(len(text)).split(config.batch_rows):
        velocity = guided(policy, policy, text.select(rows), config.guidance, config.negative_prompt)
        path = torch.stack([*_solved(policy, velocity, made, seeds[rows])], 1)
        states.append(path[torch.arange(len(rows))[:, None], kept[rows]])
        finished.append(path[:, -1].clone())
    latents = torch.cat(finished)
    return SampledStates(latents, torch.cat(states), made.sigmas[kept].to(latents.device))


def _solver(policy: Any, config: SamplerConfig, name: str, steps: int) -> Solver:
    noise_level = config.noise_level if name in RANDOM_SOLVERS else 0.0
    return make_solver(name, policy.pipeline.scheduler, steps, noise_level, policy.image_tokens)


def _solved(policy: Any, velocity: GuidedVelocity, solver: Solver, seeds: Tensor) -> Iterator[Tensor]:
    """Latents (B, C, H, W) at each time of the solver, x_0 last."""
    pairs = _pairs(seeds)
    latents = _first_latents(policy, pairs)
    yield latents
    sources = [torch.Generator().manual_seed(seed) for seed in pairs[:, 1].tolist()]
    for index in range(len(solver.sigmas) - 1):
        v = velocity(latents, solver.sigmas[index].to(latents.device))
        latents = solver.step(v, index, latents, sources)
        yield latents


def trained_window(config: SamplerConfig, generator: torch.Generator) -> range:
    """Steps that are stochastic and trained in one rollout."""
    if not config.window:
        return trained_steps(config.steps, config.fraction)
    high = config.window_high or max(config.steps // 2, config.window_low + config.window)
    return sde_window(config.steps, config.window, config.window_low, high, generator)


def _pairs(seeds: Tensor) -> Tensor:
    """Seeds (B, 2) of the initial noise and of the noise of the steps."""
    return seeds if seeds.dim() == 2 else torch.stack([seeds, seeds ^ OTHER_STREAM], 1)


def _first_latents(policy: Any, pairs: Tensor) -> Tensor:
    """Initial noise (B, C, H, W)."""
    return row_noise(pairs[:, 0], 1, policy.latent_shape)[:, 0].to(policy.device, policy.dtype)


_JOINED = ("latents", "states", "sigma", "sigma_next", "logp")
OTHER_STREAM = 0x5DEECE66D
"""Turns the seed of a row's initial noise into that of its steps."""
