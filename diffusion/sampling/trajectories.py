"""Denoising trajectories with a log-density per trained step, and their evaluation under another policy.

Shared by DDPO, Flow-GRPO and their variants. An image is a row; each trained denoising step is one decision with a
Gaussian log-density, averaged over the latent's dimensions. Rollouts keep the latents before and after each trained
step, and the update evaluates the model on them again.

Shapes: N groups (prompts), B rows (images), T decisions (denoising steps or draws), C x H x W one latent.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn

from diffusion.data.prompts import DiffusionTask
from diffusion.models.conditioning import TextRows
from diffusion.models.diffusion_policy import DiffusionPolicy
from diffusion.sampling.latent_sampler import (
    DRAWN_WINDOWS,
    MOVES,
    LatentSamplerConfig,
    check_networks,
    group_seeds,
    guided,
    last_trained,
    make_kernel,
    reachable_times,
    sample_trajectories,
    text_of,
    times_of,
    trained_window,
)
from diffusion.sampling.steps import BOUNDED, flow_grpo_head_kl, gaussian_kl, velocity_kl
from mmrl.core.loss import Denominators, token_mean
from mmrl.core.objectives.objective import PolicyOutputs
from mmrl.core.payload import Payload, per_decision, per_group, per_row, to_device
from mmrl.core.rollouts import Rollouts
from mmrl.errors import UserError
from mmrl.fields import choice, rare
from mmrl.training.processes import Streams
from mmrl.training.recipe import Reference


@dataclass
class DiffusionPayload(Payload):
    """Prompts of N groups; images, latents and decisions of B rows."""

    tasks: list[DiffusionTask] = per_group()
    """The task of each group."""
    latents: Tensor = per_row()
    """x_0 (B, C, H, W), the finished latents."""
    images: np.ndarray = per_row()
    """uint8 (B, height, width, 3), of videos (B, K, height, width, 3), the kept frames."""
    sigma: Tensor = per_decision()
    """(B, T) float32, time at which each decision is taken."""
    sigma_next: Tensor | None = per_decision(default=None)
    """(B, T) float32, time after the decision; trajectories only."""
    states: Tensor | None = per_decision(default=None)
    """(B, T + 1, C, H, W), latents at the T times and after the last one, or (B, T, C, H, W), latents at the T times
    only; for methods that learn from the sampler's own states."""
    mean_old: Tensor | None = per_decision(default=None)
    """(B, T, C, H, W) float32, mean of each transition under the sampling policy, for methods that need it."""
    noise_seed: Tensor | None = per_row(default=None)
    """(B,) int64, seed of each row's T noises; only for methods that match noisy versions of x_0."""
    finite: list[bool] = per_row(default_factory=list)
    """Whether each row's image could be decoded."""

    @property
    def prompts(self) -> list[str]:
        """The prompt of each group."""
        return [task.prompt for task in self.tasks]

    def without_nonfinite(self) -> Self:
        """Replace rows without an image by zeros, since infinities would spoil even masked sums."""
        if all(self.finite):
            return self
        bad = torch.tensor([not good for good in self.finite], device=self.latents.device)
        cleaned: dict[str, Any] = {
            name: value.masked_fill(bad.view(-1, *[1] * (value.dim() - 1)), 0)
            for name in ("latents", "states", "mean_old")
            if (value := getattr(self, name)) is not None
        }
        return dataclasses.replace(self, **cleaned)


@dataclass(frozen=True)
class TrainedDecisions:
    """Indices of the M decisions whose mask is 1."""

    index: Tensor
    """(M,) int64, index in the flattened (B, T)."""
    shape: torch.Size
    """(B, T)."""

    @classmethod
    def of(cls, rollouts: Rollouts) -> TrainedDecisions:
        """Read the decisions from the rollouts' mask, row by row."""
        # from the copy on the CPU: `nonzero` of a tensor on the GPU would wait for it
        index = torch.nonzero(rollouts.host.mask.flatten() > 0).flatten()
        # only the index goes to the device; the count M is known on the host without a synchronisation
        return cls(to_device(index, rollouts.mask.device), rollouts.mask.shape)

    @property
    def row(self) -> Tensor:
        """Row of each decision (M,) int64."""
        return self.index // self.shape[1]

    def gather(self, table: Tensor) -> Tensor:
        """Entries (M, ...) of a table (B, T, ...); columns after the first T are ignored."""
        # states have T + 1 columns; without the cut, flat indices into (B, T) would point at other rows
        return table[:, : self.shape[1]].flatten(0, 1)[self.index]

    def scatter(self, values: Tensor) -> Tensor:
        """Scatter values (M,) into (B, T), 0 elsewhere."""
        # `index_copy` keeps the gradient of the values; untrained decisions get a constant 0
        return values.new_zeros(self.shape.numel()).index_copy(0, self.index, values).view(self.shape)


def mean_over_decisions(values: Tensor, minibatch: Rollouts, denominators: Denominators) -> Tensor:
    """Mean of values (B, T) over the trained decisions of the whole optimiser step."""
    mask = minibatch.loss_mask
    # `where` and not a product: 0 times NaN of an untrained decision would be NaN
    return token_mean(torch.where(mask > 0, values, 0.0), mask, denominators)


KL_FORMS = ("exact", "flow_grpo_head", "velocity")


@dataclass
class StepConfig:
    """How the update evaluates the trained steps."""

    kl_form: str = choice("exact", KL_FORMS)
    """KL of a step to the reference: exact, flow_grpo_head (as published, without the step length) or velocity."""
    detach_negative: bool = rare(True)
    """Exclude the negative half of guidance from the gradient, as newer Flow-GRPO code does."""


def check_trajectories(sampler: LatentSamplerConfig) -> None:
    """Reject sampler options for which a step has no log-density; raises ValueError."""
    if sampler.noise_level == 0:
        raise ValueError("sampler.noise_level is 0, but a step without noise has no log-density")
    if sampler.kernel in BOUNDED and sampler.noise_level > 1:
        raise ValueError(f"sampler.noise_level is {sampler.noise_level}; must be at most 1 for {sampler.kernel}")
    if sampler.steps < 2:
        raise ValueError(
            f"sampler.steps is {sampler.steps}; at least 2 are needed, because the last one is not trained"
        )
    sampler.refuse_set(["solver"], "this method samples with sampler.kernel")
    if sampler.window:
        sampler.refuse_set(["fraction"], f"the trained steps are set by sampler.window={sampler.window}")
    else:
        options = ("window_low", "window_high", "window_schedule")
        sampler.refuse_set(options, "sampler.window is 0, so there is no window")
    if sampler.window_schedule in DRAWN_WINDOWS:
        sampler.refuse_set(
            MOVES, (f"sampler.window_schedule '{sampler.window_schedule}' draws the position of the window")
        )
    try:
        # a trial run: the checks of the window's position are made where it is computed
        trained_window(sampler, torch.Generator())
    except UserError as error:
        raise ValueError(f"sampler: {error}") from error
    if sampler.kernel in BOUNDED and last_trained(sampler) == sampler.steps - 1:
        option = "window_high" if sampler.window else "fraction"
        raise ValueError(
            f"sampler.{option} is {getattr(sampler, option)}, which trains the last of {sampler.steps} steps, but that "
            f"step of kernel '{sampler.kernel}' has no noise and so no gradient; use a smaller {option}, or flow_sde"
        )


def _check_lengths(sampler: LatentSamplerConfig, grid: Tensor) -> None:
    """Raise UserError if a step between two equal times (S + 1,) is trained."""
    last = last_trained(sampler)
    if grid[last] == grid[last + 1]:
        raise UserError(
            f"the pipeline's scheduler ends with the time {float(grid[last]):.3g} twice (as with timestep_spacing "
            f"linspace and set_alpha_to_one false), so step {last + 1} of {sampler.steps} has no noise and no "
            f"log-density; use a smaller sampler.{'window_high' if sampler.window else 'fraction'}"
        )


@dataclass(frozen=True)
class TrainedSteps:
    """The steps with mask 1 as one batch of M."""

    decisions: TrainedDecisions
    """Indices of the steps in (B, T)."""
    latents: Tensor
    """Before each step (M, C, H, W)."""
    reached: Tensor
    """After it (M, C, H, W)."""
    sigma: Tensor
    """(M,) float32, time before the step."""
    sigma_next: Tensor
    """(M,) float32, time after it."""
    text: TextRows
    """Text of the M steps."""


@dataclass(frozen=True)
class StepScores:
    """The Gaussian of each trained step under some policy."""

    steps: TrainedSteps
    """The M steps."""
    velocity: Tensor
    """(M, C, H, W), carries the gradient."""
    mean: Tensor
    """(M, C, H, W) float32."""
    std: Tensor
    """(M,) float32, standard deviation of the step."""
    logp: Tensor
    """(M,) float32, log-density of the latents reached."""


class Trajectories:
    """Draws denoising trajectories and evaluates their trained steps under the current policy."""

    def __init__(
        self,
        policy: DiffusionPolicy,
        sampler: LatentSamplerConfig,
        step: StepConfig,
        mixed_precision: str = "none",
        *,
        keep_mean: bool = False,
    ) -> None:
        self.policy = policy
        self.sampler = sampler
        self.step = step
        self.keep_mean = keep_mean
        grid = times_of(policy, sampler.steps)
        _check_lengths(sampler, grid)
        # one kernel for sampling and update: both must use the same sigma_max of the same grid
        self.kernel = make_kernel(sampler, grid)
        # of every step that a window may reach, as a network without any training step is a mistake
        check_networks(policy, reachable_times(sampler, grid), "sampler.window")
        self._low_precision = policy.dtype != torch.float32 or mixed_precision != "none"

    @property
    def halves_together(self) -> bool:
        """Whether the two halves of guidance go through the model in one call."""
        # In the update, a negative half without gradient gets a separate call. In low precision, sampling has to do the
        # same: the rounding of one call and two differs by more than a clip range of 1e-4.
        return not (self._low_precision and self.step.detach_negative)

    def draw(
        self, policy: DiffusionPolicy, tasks: Sequence[DiffusionTask], group_size: int, streams: Streams, done: int = 0
    ) -> Rollouts:
        """Denoise G images per task, stochastic inside the window, after `done` steps of the run."""
        # rows of a group are consecutive; streams and same_noise count on this order
        group = torch.arange(len(tasks)).repeat_interleave(group_size)
        window = self._windows(len(tasks), group_size, streams, done)
        seeds = group_seeds(len(tasks), group_size, streams, same_noise=self.sampler.same_noise)
        text = text_of(policy, tasks, group)
        run = sample_trajectories(
            policy, text, seeds, self.sampler, window, keep_mean=self.keep_mean, together=self.halves_together
        )
        device = run.logp.device
        return Rollouts(
            group=to_device(group, device),
            mask=to_device(_trained_share(run.logp.shape, self.sampler.random_share, group_size, streams), device),
            # rows whose latents overflowed get no reward and so no weight, but NaN would survive the masked sums
            logp_old=run.logp.nan_to_num(0.0, 0.0, 0.0),
            # NaN marks a row as unscored; the recipe fills in the rewards of the rows that have an image
            reward=torch.full((len(group),), float("nan"), device=device),
            payload=DiffusionPayload(
                tasks=list(tasks),
                latents=run.latents,
                images=np.zeros((len(group), 0, 0, 3), np.uint8),  # the recipe decodes them after drawing
                sigma=run.sigma,
                sigma_next=run.sigma_next,
                states=run.states,
                mean_old=run.mean,
            ),
        )

    def _windows(self, tasks: int, group_size: int, streams: Streams, done: int) -> range | list[range]:
        """The trained steps of all rows, or of each."""
        if self.sampler.window_schedule != "random_per_task":
            # the shared stream: every process draws the same window, although each has other tasks
            return trained_window(self.sampler, streams.shared("window"), done)
        # each task draws from its own stream, so its window is the same in any process
        drawn = (trained_window(self.sampler, streams.of(task, "window")) for task in range(tasks))
        # all images of a group train the same steps: their advantages are compared at equal times
        return [window for window in drawn for _ in range(group_size)]

    def evaluate(self, model: Any, rollouts: Rollouts) -> StepScores:
        """Evaluate a model on the trained steps of some rows; steps with mask 0 cost nothing.

        Gradient: through velocity, mean and log-density; see `StepConfig.detach_negative`.
        """
        # the stored states are rounded exactly as drawn, so the ratio is exactly 1 before an update
        steps = self.trained_steps(rollouts)
        velocity, mean, std = self._transition(model, steps, self.step.detach_negative)
        return StepScores(steps, velocity, mean, std, self.kernel.log_prob(steps.reached, mean, std))

    def scores(self, model: nn.Module, rollouts: Rollouts, reference: Reference | None = None) -> PolicyOutputs:
        """Log-density of each trained step, and its divergence from the reference, if any."""
        found = self.evaluate(model, rollouts)
        return PolicyOutputs(found.steps.decisions.scatter(found.logp), kl_ref=self.kl(found, reference))

    def kl(self, scores: StepScores, reference: Reference | None) -> Tensor | None:
        """Divergence (B, T) from the reference by `StepConfig.kl_form`, 0 if not trained; None without a reference."""
        if reference is None:
            return None
        steps = scores.steps

        # the reference is a constant, so its negative half never needs a graph
        velocity, mean, _ = reference.score(lambda module: self._transition(module, steps, detach_negative=True))
        if self.step.kl_form == "velocity":
            divergence = velocity_kl(scores.velocity, velocity, steps.sigma)
        elif self.step.kl_form == "flow_grpo_head":
            divergence = flow_grpo_head_kl(scores.mean, mean, scores.std, steps.sigma, steps.sigma_next)
        # the equal std of both steps makes the exact KL a squared distance of means
        else:
            divergence = gaussian_kl(scores.mean, mean, scores.std)
        return steps.decisions.scatter(divergence)

    def states(self, rollouts: Rollouts) -> tuple[Tensor, Tensor, TrainedDecisions]:
        """States (M, C, H, W) before the steps with mask 1, their times (M,) and their positions in (B, T)."""
        steps = self.trained_steps(rollouts)
        return steps.latents, steps.sigma, steps.decisions

    def trained_steps(self, rollouts: Rollouts) -> TrainedSteps:
        """The steps with mask 1 of some rows of `draw`."""
        payload = DiffusionPayload.of(rollouts)
        assert payload.states is not None
        assert payload.sigma_next is not None
        decisions = TrainedDecisions.of(rollouts)
        return TrainedSteps(
            decisions=decisions,
            latents=decisions.gather(payload.states),
            reached=decisions.gather(payload.states[:, 1:]),  # the state after step t is the one before step t + 1
            sigma=decisions.gather(payload.sigma),
            sigma_next=decisions.gather(payload.sigma_next),
            text=text_of(self.policy, payload.tasks, rollouts.group[decisions.row]),
        )

    def _transition(
        self, model: nn.Module, steps: TrainedSteps, detach_negative: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Velocity, mean and standard deviation of the steps under a model."""
        velocity = guided(
            self.policy,
            model,
            steps.text,
            self.sampler.guidance,
            self.sampler.negative_prompt,
            detach_negative=detach_negative,
            together=self.halves_together,
        )(steps.latents, steps.sigma)
        mean, std = self.kernel.transition(velocity, steps.latents, steps.sigma, steps.sigma_next)
        return velocity, mean, std


def _trained_share(shape: torch.Size, share: float, group_size: int, streams: Streams) -> Tensor:
    """Mask (B, T) of the trained steps: a random fraction of them for each row."""
    rows, steps = shape
    if share >= 1.0:
        return torch.ones(rows, steps)
    # sorting twice gives random ranks: every row trains exactly the same number of steps
    order = streams.uniform(rows // group_size, group_size, steps, purpose="share").argsort(1).argsort(1)
    # at least one step, or a small share of few steps would train nothing
    return (order < max(int(steps * share), 1)).float()
