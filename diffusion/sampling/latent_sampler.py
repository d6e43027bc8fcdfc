"""Sampling from a flow model, with classifier-free guidance: trajectories with log-probabilities, or only images.

Shapes: B rows (images), C channels, H x W latent pixels; latents of videos are (B, C, T, H, W). sigma runs from 1
(noise) to 0 (image); velocity = noise - image.

The velocity of a flow model under classifier-free guidance.

Shapes: B rows (images), C channels, H x W latent pixels; latents of videos are (B, C, T, H, W).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from diffusion.data.prompts import DiffusionTask
from diffusion.families.base import Combine, Family, Text, VelocityModel, linear_guidance
from diffusion.models.conditioning import TextRows
from diffusion.sampling.schedule import (
    RANDOM_SOLVERS,
    SOLVERS,
    STAYS,
    Solver,
    make_solver,
    moving_window,
    sde_window,
    trained_steps,
)
from diffusion.sampling.steps import KERNELS, OdeStep, StepKernel, sample_step
from mmrl.core.payload import to_device
from mmrl.errors import UserError
from mmrl.fields import bounded, choice, rare
from mmrl.training.processes import Streams


class GuidedVelocity:
    """Velocity of fixed text rows under guidance, negative + scale (positive - negative).

    The text rows are laid out at the first step and reused at every later one. Scale 1 only needs the positive half and
    scale 0 only the negative half; the other half is not computed then.

    Args:
        model: the flow model.
        text: positive text of B rows.
        negative: negative text of the same B rows, or a single row shared by all; not needed with scale 1.
        scale: guidance scale w; 1 = no guidance.
        together: whether both halves go through the model in one call of 2 B rows or in two calls of B rows.
        detach_negative: exclude the negative half from the gradient. If gradients are enabled, it then gets a separate
            call without a graph, which saves its backward pass.
        combine: custom formula of the family instead of the linear one.

    Raises:
        UserError: the scale is not finite, or guidance lacks a negative prompt for some row.

    Source: Ho and Salimans, Classifier-Free Diffusion Guidance (arXiv 2207.12598), eq. 6 with scale = 1 + their w.
    """

    def __init__(
        self,
        model: VelocityModel,
        text: TextRows,
        negative: TextRows | None = None,
        scale: float = 1.0,
        *,
        together: bool = True,
        detach_negative: bool = False,
        combine: Combine = linear_guidance,
    ) -> None:
        if not math.isfinite(scale):
            raise UserError(f"guidance scale is {scale}; must be finite")
        self.model = model
        self.scale = scale
        self.together = together
        self.detach_negative = detach_negative
        self.combine = combine
        # scale 0 drops the positive half only in the linear formula; a family's own may need it at any scale
        self._positive = None if scale == 0.0 and combine is linear_guidance else text
        # at scale 1 the negative half cancels in the linear formula, and families define 1 as no guidance
        self._negative = None if scale == 1.0 else _negative_rows(negative, text, scale)

    @property
    def halves(self) -> int:
        """Model evaluations per image and step: 1 or 2."""
        return (self._positive is not None) + (self._negative is not None)

    def __call__(self, latents: Tensor, sigma: Tensor) -> Tensor:
        """Evaluate the guided velocity.

        Args:
            latents: x_t (B, C, H, W).
            sigma: time of each row (B,), or () for all rows.

        Returns:
            Velocity (B, C, H, W) in the model's dtype.

        Gradient: through both halves, or with `detach_negative` through the positive one only.
        """
        sigma = sigma.expand(len(latents))  # samplers pass one time for all rows, updates one per row
        if self._negative is None:
            return self.model(latents, sigma, self._positive_text)
        if self._positive is None:
            return self.model(latents, sigma, self._negative_text)
        # without gradients there is nothing to detach, and one call of 2 B rows is faster
        apart = not self.together or (self.detach_negative and torch.is_grad_enabled())
        if apart:
            with torch.set_grad_enabled(torch.is_grad_enabled() and not self.detach_negative):
                negative = self.model(latents, sigma, self._negative_text)
            positive = self.model(latents, sigma, self._positive_text)
        else:
            both = self.model(torch.cat([latents, latents]), torch.cat([sigma, sigma]), self._both_texts)
            # the order of `_both_texts`: negative rows first
            negative, positive = both.chunk(2)
        return self.combine(positive, negative, self.scale, sigma)

    # laid out at first use, so a half that is never evaluated costs no memory
    @cached_property
    def _positive_text(self) -> Text:
        assert self._positive is not None
        return self._positive.expanded()

    @cached_property
    def _negative_text(self) -> Text:
        assert self._negative is not None
        return self._negative.expanded()

    @cached_property
    def _both_texts(self) -> Text:
        assert self._negative is not None
        assert self._positive is not None
        # padded to one length by `followed_by`, as both halves share a call
        return self._negative.followed_by(self._positive).expanded()


def guided(
    policy: Any, velocity_of: Any, text: TextRows, scale: float, negative: str, **options: Any
) -> GuidedVelocity:
    """Velocity of rows under classifier-free guidance, using the policy's embeddings of the negative prompt."""
    # without guidance the negative prompt is never read, so it is not embedded either
    other = None if scale == 1.0 else policy.embeddings.negative(negative)
    linear = type(policy.family).combine is Family.combine
    combine = linear_guidance if linear else policy.family.combine
    return GuidedVelocity(velocity_of, text, other, scale, combine=combine, **options)


def _negative_rows(negative: TextRows | None, text: TextRows, scale: float) -> TextRows:
    if negative is None:
        raise UserError(f"guidance scale {scale} needs a negative prompt (which may be empty), unless the scale is 1")
    if len(negative) == 1:
        # one prompt is shared by all rows, but each row keeps its image to be edited
        return negative.for_rows_of(text)
    if len(negative) != len(text):
        raise UserError(f"there are {len(negative)} negative text rows for {len(text)} rows; must be 1 or {len(text)}")
    return negative


LOGGER = logging.getLogger("mmrl")


def euler_ode(velocity: Callable[[Tensor, Tensor], Tensor], latents: Tensor, sigmas: Tensor) -> Tensor:
    """Follow the flow from noise to image: x <- x + (sigma' - sigma) v(x, sigma).

    Args:
        velocity: (latents (B, C, H, W), sigma ()) -> velocity (B, C, H, W).
        latents: noise (B, C, H, W).
        sigmas: grid (S + 1,) float32, descending from about 1 to 0; `scheduler.sigmas` after `set_timesteps(S)`.

    Returns:
        Latents of the images (B, C, H, W) in the dtype of `latents`; each step is added in float32.
    """
    for sigma, sigma_next in pairwise(sigmas):
        # float32 sums: with 40 small steps, bfloat16 would round parts of them away
        step = (sigma_next - sigma) * velocity(latents, sigma.to(latents.device)).float()
        latents = (latents.float() + step).to(latents.dtype)
    return latents


@dataclass
class LatentSamplerConfig:
    """Sampling of images for training and evaluation."""

    steps: int = bounded(10, at_least=1)
    """Number of denoising steps in a training rollout."""
    guidance: float = bounded(4.5, at_least=0)
    """Classifier-free guidance scale in rollouts and in training; 1 = no guidance, which halves the cost of a step."""
    negative_prompt: str = rare("")
    """Negative prompt of classifier-free guidance."""
    kernel: str = rare(choice("flow_sde", lambda: KERNELS))
    """Transition of the trained steps: flow_sde, dance_sde, cps, ddim or linear_sde; methods that learn from x_0 use
    `solver`."""
    noise_level: float = bounded(0.7, at_least=0)
    """Noise level (eta) of the stochastic steps; the kernel defines its scale (tau for sa_solver). euler and dpm have
    no noise."""
    window: int = rare(bounded(0, at_least=0))
    """Number of consecutive stochastic steps to train; the others are ODE steps. 0 = all steps within `fraction`."""
    window_low: int = rare(bounded(0, at_least=0))
    """First step at which the window may start."""
    window_high: int = rare(bounded(0, at_least=0))
    """Step before which the window ends; 0 = half of the steps, or all but the last for a moving window."""
    window_schedule: str = rare(choice("random", lambda: (*DRAWN_WINDOWS, *STAYS)))
    """Position of the window: random (drawn for each rollout), random_per_task (for each prompt), or moving from noise
    to image during training: progressive, decay or exp_decay (MixGRPO)."""
    window_every: int = rare(bounded(25, at_least=1))
    """Rollouts at each position of a moving window; decay and exp_decay spend fewer at later positions."""
    window_stride: int = rare(bounded(1, at_least=1))
    """Steps by which a moving window moves."""
    window_restart: bool = rare(True)
    """Whether a moving window returns to the noise after its last position; otherwise it stays there."""
    fraction: float = rare(bounded(0.99, above=0, at_most=1))
    """Fraction of the steps to train; 0.99 skips the last one, whose Gaussian is too peaked."""
    random_share: float = rare(bounded(1.0, above=0, at_most=1))
    """Fraction of these steps to train on, drawn at random for each image (DanceGRPO 0.6)."""
    solver: str = choice("euler", lambda: SOLVERS)
    """Solver of rollouts without log-probabilities: euler, sa_solver (2nd order, stochastic), dpm (2nd order), or the
    stochastic steps flow_sde, dance_sde, cps, ddim and linear_sde, of which the last has no noise."""
    same_noise: bool = rare(False)
    """Start all images of a group from the same noise (DanceGRPO)."""
    kept_frames: int = rare(bounded(4, at_least=0))
    """Frames of a video kept for rewards and reports, evenly spaced; 0 = all, which needs a lot of memory."""
    batch_rows: int = bounded(64, at_least=1)
    """Maximum number of images drawn or decoded at once. Affects memory only."""
    eval_steps: int = bounded(40, at_least=1)
    """Number of ODE steps for evaluation images."""
    eval_guidance: float | None = bounded(None, at_least=0)
    """Guidance scale of evaluation images. Default: same as training."""

    def validate(self) -> None:
        """Check that the fields fit together; raises ValueError."""
        if self.negative_prompt and self.guidance == 1.0 and self.eval_guidance in (None, 1.0):
            raise ValueError(
                f"sampler.negative_prompt is {self.negative_prompt!r}, but nothing reads it without guidance, and "
                "sampler.guidance is 1; set sampler.guidance or sampler.eval_guidance above 1, or leave it out"
            )
        lowest = self.window_low + max(self.window, 1)
        highest = f"0, or between window_low + window={lowest} and steps={self.steps}"
        for name, valid, expected in (
            ("window", self.window <= self.steps, f"between 0 and steps={self.steps}"),
            ("window_low", self.window_low <= self.steps - self.window, "between 0 and steps - window"),
            ("window_high", self.window_high == 0 or lowest <= self.window_high <= self.steps, highest),
        ):
            if not valid:
                raise ValueError(f"sampler.{name} is {getattr(self, name)}; must be {expected}")

    def refuse_set(self, names: Sequence[str], reason: str, key: str = "sampler") -> None:
        """Reject options that were changed but have no effect; raises ValueError."""
        for name in names:
            # a dataclass does not record which fields were given, so a default that is spelled out passes
            if getattr(self, name) != getattr(LatentSamplerConfig, name):
                raise ValueError(f"{key}.{name} is {getattr(self, name)}, but {reason}; leave it out")


DRAWN_WINDOWS: tuple[str, ...] = ("random", "random_per_task")
"""Windows at random positions."""
MOVES = ("window_every", "window_stride", "window_restart")
"""Options of windows that move during training."""
WINDOW = ("window", "window_low", "window_high", "window_schedule", *MOVES)
TRAINED_STEPS = ("kernel", *WINDOW, "fraction", "random_share")
"""Options of trained denoising steps; methods that learn from x_0 alone have none."""


@dataclass
class LatentTrajectory:
    """Denoising runs, with the states and times needed to evaluate their trained steps again."""

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
    """(B, T, C, H, W) float32, if requested."""


class SampledStates(NamedTuple):
    """Images and some latents of their paths."""

    latents: Tensor
    """x_0 (B, C, H, W)."""
    states: Tensor
    """Latents kept along the path (B, T, C, H, W)."""
    sigma: Tensor
    """(B, T) float32, their times."""


def row_noise(seeds: Tensor, draws: int, shape: tuple[int, ...]) -> Tensor:
    """Standard normal noise (B, draws, *shape) float32 on the CPU; each row depends only on its own seed (B,)."""
    generator = torch.Generator()
    # one call per row: a draw for the whole batch would give a row other noise in another batch or process
    rows = [torch.randn(draws, *shape, generator=generator.manual_seed(seed)) for seed in seeds.tolist()]
    return torch.stack(rows) if rows else torch.zeros(0, draws, *shape)


def group_seeds(groups: int, size: int, streams: Streams, *, same_noise: bool = False) -> Tensor:
    """Draw the seeds (N * G, 2) of each row's initial noise and of its later noise."""
    # two seeds per row, see `_pairs`
    seeds = streams.seeds(groups, size, 2, purpose="sample")
    if same_noise:
        # only the initial noise is shared; with equal noise in the steps too, a group would be one image G times
        seeds[:, 0] = seeds[::size, 0].repeat_interleave(size)
    return seeds


def text_of(policy: Any, tasks: Sequence[DiffusionTask], rows: Tensor) -> TextRows:
    """Text of rows, with the images to be edited, given the task (B,) of each row; an empty prompt means no caption."""
    images = [task.image for task in tasks]
    embedded: TextRows = policy.embeddings.rows([task.prompt for task in tasks], allow_empty=True, images=images)
    return embedded.select(rows.cpu())  # each prompt is embedded once; its rows share the embedding


def check_sampler(policy: Any, config: LatentSamplerConfig, key: str = "sampler") -> None:
    """Reject guidance on top of distilled guidance, and frames of images; raises UserError."""
    if not policy.family.video and config.kept_frames != LatentSamplerConfig.kept_frames:
        raise UserError(
            f"{key}.kept_frames is {config.kept_frames}, but {policy.family.pipeline_class} generates images, not "
            "videos; leave it out"
        )
    embedded = policy.config.guidance_embedding
    for name in ("guidance", "eval_guidance"):
        scale = getattr(config, name)
        if policy.distilled and embedded != 1.0 and scale not in (None, 1.0):
            raise UserError(
                f"{key}.{name} is {scale}, but guidance is distilled into this transformer and applied by "
                f"model.guidance_embedding={embedded}: guidance would be applied twice; set {key}.{name}=1, or "
                "model.guidance_embedding=1 to use only the negative prompt"
            )


def check_networks(policy: Any, times: Tensor, key: str) -> None:
    """Warn about trained networks that no training time (T,) reaches; raises UserError if none is reached.

    `key` names the options that determine the times.
    """
    which = policy.family.network_of(times)
    if which is None:
        return
    used = {policy.family.networks[index] for index in which.tolist()}
    idle = [name for name in policy.trained_networks if name not in used]
    if not idle:
        return
    names = " and ".join(idle)
    said = f"{key}: none of the training times, {float(times.min()):.3g} to {float(times.max()):.3g}, reaches {names}"
    if len(idle) == len(policy.trained_networks):
        raise UserError(f"{said}, and model.networks contains no other network; change one of the two")
    LOGGER.warning("%s, so its weights will not change; change %s, or remove it from model.networks", said, key)


def times_of(policy: Any, steps: int) -> Tensor:
    """The time grid (S + 1,) that the policy's own pipeline would use."""
    grid: Tensor = policy.family.sigma_grid(steps, policy.latent_shape)
    return grid


def make_kernel(config: LatentSamplerConfig, grid: Tensor) -> StepKernel:
    """Transition of the trained steps on a time grid (S + 1,)."""
    # kernels take the second time as sigma_max: g of flow_sde would be infinite at the first
    return KERNELS[config.kernel](config.noise_level, float(grid[1]))


def sample_trajectories(
    policy: Any,
    text: TextRows,
    seeds: Tensor,
    config: LatentSamplerConfig,
    window: range | Sequence[range],
    *,
    keep_mean: bool = False,
    together: bool = True,
) -> LatentTrajectory:
    """Denoise; the steps in the window are stochastic and recorded, the others deterministic.

    Args:
        policy: a `DiffusionPolicy`.
        text: text of B rows.
        seeds: (B,) int64 or (B, 2): seeds of the initial noise and of the steps' noise.
        config: grid, kernel and guidance.
        window: the trained steps, one range for all rows or one per row, all of equal length.
        keep_mean: whether to return the means of the transitions.
        together: see `GuidedVelocity`.

    Returns:
        The B runs.
    """
    grid = times_of(policy, config.steps)
    # one range means the same window for all rows
    windows = [window] * len(text) if isinstance(window, range) else window
    # equal lengths (checked by the schedule), so the windows of all rows form one tensor (B, T)
    trained = torch.tensor([list(steps) for steps in windows])
    parts = []
    for rows in torch.arange(len(text)).split(config.batch_rows):
        velocity = guided(policy, policy, text.select(rows), config.guidance, config.negative_prompt, together=together)
        kernel = make_kernel(config, grid)
        parts.append(_trajectories(policy, velocity, seeds[rows], grid, kernel, trained[rows], keep_mean))
    means = [part.mean for part in parts if part.mean is not None]
    # chunks only bound memory: every tensor below has rows first
    joined = {name: torch.cat([getattr(part, name) for part in parts]) for name in _JOINED}
    return LatentTrajectory(**joined, mean=torch.cat(means) if means else None)


def _trajectories(
    policy: Any, velocity: GuidedVelocity, seeds: Tensor, grid: Tensor, kernel: Any, trained: Tensor, keep_mean: bool
) -> LatentTrajectory:
    """Denoise; the steps `trained` (B, T) of each row, consecutive ones, are stochastic."""
    pairs = _pairs(seeds)
    latents = _first_latents(policy, pairs, grid)
    count = trained.shape[1]
    # all of a row's noise comes from its own seed, so the image does not depend on `batch_rows`
    noise = to_device(row_noise(pairs[:, 1], count, policy.latent_shape), policy.device)
    states = latents.new_zeros(len(seeds), count + 1, *latents.shape[1:])
    wide = torch.promote_types(latents.dtype, torch.float32)  # clip ranges of 1e-4 need float32 even in bfloat16 runs
    logp = latents.new_zeros(len(seeds), count, dtype=wide)
    means = torch.zeros_like(states[:, 1:], dtype=wide) if keep_mean else None
    for index, (sigma, sigma_next) in enumerate(pairwise(grid)):
        v = velocity(latents, to_device(sigma, latents.device))
        # every row takes the ODE step; rows whose window covers this step overwrite it with a stochastic one
        following = OdeStep().transition(v, latents, sigma, sigma_next)[0].to(latents.dtype)
        # windows may differ between rows: `place` is the position of this step in the row's own window
        rows, place = (trained == index).nonzero(as_tuple=True)
        if len(rows):
            rows, place = to_device(rows, latents.device), to_device(place, latents.device)
            result = sample_step(kernel, v[rows], latents[rows], sigma, sigma_next, noise[rows, place])
            states[rows, place] = latents[rows]
            # the rounded latents, not the float32 draw: the update has to start from the state that was scored
            states[rows, place + 1] = following[rows] = result.previous
            logp[rows, place] = result.logp
            if means is not None:
                means[rows, place] = result.mean
        latents = following
    return LatentTrajectory(
        latents=policy.family.finished(latents, grid[-1]),
        states=states,
        # the grid is indexed per row, because windows may differ between rows
        sigma=to_device(grid[trained], latents.device),
        sigma_next=to_device(grid[trained + 1], latents.device),
        logp=logp,
        mean=means,
    )


def sample_latents(
    policy: Any,
    text: TextRows,
    seeds: Tensor,
    config: LatentSamplerConfig,
    *,
    steps: int | None = None,
    guidance: float | None = None,
    solver: str | None = None,
) -> Tensor:
    """Denoise without log-probabilities.

    Args:
        policy: a `DiffusionPolicy`.
        text: text of B rows.
        seeds: (B,) int64 or (B, 2): seeds of the initial noise and of the solver's noise.
        config: grid, solver and guidance.
        steps: overrides the number of steps.
        guidance: overrides the guidance scale.
        solver: overrides the solver.

    Returns:
        x_0 (B, C, H, W) in the policy's dtype.
    """
    scale = config.guidance if guidance is None else guidance
    # one solver for all chunks: it resets at index 0
    made = _solver(policy, config, solver or config.solver, steps or config.steps)
    parts = []
    for rows in torch.arange(len(text)).split(config.batch_rows):
        velocity = guided(policy, policy, text.select(rows), scale, config.negative_prompt)
        for latents in _solved(policy, velocity, made, seeds[rows]):
            finished = latents  # earlier states are not kept
        parts.append(finished)
    return torch.cat(parts)


def sample_states(
    policy: Any, text: TextRows, seeds: Tensor, config: LatentSamplerConfig, kept: Tensor
) -> SampledStates:
    """Denoise as `sample_latents` does and keep the latents before the steps `kept` (B, T) int64 of each row."""
    made = _solver(policy, config, config.solver, config.steps)
    finished, states = [], []
    for rows in torch.arange(len(text)).split(config.batch_rows):
        velocity = guided(policy, policy, text.select(rows), config.guidance, config.negative_prompt)
        # the whole path first, because each row keeps states of different steps
        path = torch.stack([*_solved(policy, velocity, made, seeds[rows])], 1)
        # row i keeps its own steps kept[i]
        states.append(path[torch.arange(len(rows))[:, None], kept[rows]])
        finished.append(path[:, -1].clone())  # a view would keep the whole path in memory
    latents = torch.cat(finished)
    return SampledStates(latents, torch.cat(states), made.sigmas[kept].to(latents.device))


def _solver(policy: Any, config: LatentSamplerConfig, name: str, steps: int) -> Solver:
    # the default of noise_level is above 0, and deterministic solvers refuse any noise
    noise_level = config.noise_level if name in RANDOM_SOLVERS else 0.0
    return make_solver(name, times_of(policy, steps), noise_level)


def _solved(policy: Any, velocity: GuidedVelocity, solver: Solver, seeds: Tensor) -> Iterator[Tensor]:
    """Latents (B, C, H, W) at each time of the solver, x_0 last."""
    pairs = _pairs(seeds)
    latents = _first_latents(policy, pairs, solver.sigmas)
    yield latents
    # one generator per row: solvers draw noise step by step, and a shared generator would tie rows to their batch
    sources = [torch.Generator().manual_seed(seed) for seed in pairs[:, 1].tolist()]
    for index in range(len(solver.sigmas) - 1):
        v = velocity(latents, to_device(solver.sigmas[index], latents.device))
        latents = solver.step(v, index, latents, sources)
        # only the last state is x_0; families whose paths end before sigma 0 still have to extrapolate to it
        yield latents if index < len(solver.sigmas) - 2 else policy.family.finished(latents, solver.sigmas[-1])


def trained_window(config: LatentSamplerConfig, generator: torch.Generator, done: int = 0) -> range:
    """Steps that are stochastic and trained in a rollout, after `done` earlier rollouts."""
    if not config.window:
        # without a window every step is stochastic, and `fraction` cuts the end
        return trained_steps(config.steps, config.fraction)
    low, high = config.window_low, last_trained(config) + 1
    if config.window_schedule in DRAWN_WINDOWS:
        return sde_window(config.steps, config.window, low, high, generator)
    moves = config.window_schedule, config.window_every, config.window_stride
    return moving_window(done, config.window, low, high, *moves, restart=config.window_restart)


def reachable_times(config: LatentSamplerConfig, grid: Tensor) -> Tensor:
    """Times (T,) of a grid (S + 1,) at which some rollout may train."""
    first = config.window_low if config.window else 0
    # step `last_trained` is included; its time is where the model is called
    return grid[first : last_trained(config) + 1]


def last_trained(config: LatentSamplerConfig) -> int:
    """The last step that `trained_window` may return."""
    if not config.window:
        return trained_steps(config.steps, config.fraction)[-1]
    # Flow-GRPO-Fast draws its window in the first half; a moving window goes on to the last step with noise
    reached = config.steps // 2 if config.window_schedule in DRAWN_WINDOWS else config.steps - 1
    return (config.window_high or max(reached, config.window_low + config.window)) - 1


def _pairs(seeds: Tensor) -> Tensor:
    """Seeds (B, 2) of the initial noise and of the noise of the steps."""
    # one seed per row gives two streams: with equal seeds the first step's noise would repeat the initial noise
    # XOR keeps both seeds functions of one number, which is what records and resumed runs know of a row
    return seeds if seeds.dim() == 2 else torch.stack([seeds, seeds ^ OTHER_STREAM], 1)


def _first_latents(policy: Any, pairs: Tensor, grid: Tensor) -> Tensor:
    """The initial states (B, C, H, W) at the first time of a grid."""
    # drawn on the CPU, so that a seed gives the same image on every device
    noise = row_noise(pairs[:, 0], 1, policy.latent_shape)[:, 0]
    latents: Tensor = policy.family.first_latents(noise, grid[0])
    # families scale the noise before the cast: Stable Diffusion's first sigma is not exactly 1
    return to_device(latents, policy.device).to(policy.dtype)


_JOINED = ("latents", "states", "sigma", "sigma_next", "logp")
OTHER_STREAM = 0x5DEECE66D
"""XOR mask that turns the seed of a row's initial noise into that of its steps."""
