"""Noisy versions of finished images, and a model's velocity on them.

AWM, DiffusionNFT, ORW-CFM-W2 and AC-Flow share it. An image is a row; its T decisions are noisy versions of its latents
x_0, each a time and a noise, on which the model's velocity is compared with the true one. Any solver may have drawn the
image and no trajectory is kept. Times and noises are constants of the rollout (a seed a row), so old policy, anchors
and every pass of the update see the same.

Shapes: B rows (images), T noisy versions of each, M of the B * T whose mask is 1, C x H x W one latent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from diffusion.data import DiffusionTask
from diffusion.decisions import TrainedDecisions, mean_over_decisions
from diffusion.forward_process import NoisyRows, mix
from diffusion.matching import TIME_SAMPLERS, sample_times, velocity_kl
from diffusion.payload import DiffusionPayload
from diffusion.policy import DiffusionPolicy
from diffusion.sampler import SamplerConfig, group_seeds, guided, row_noise, sample_latents, text_of
from diffusion.schedule import sigma_grid
from diffusion.settings import image_trainer
from mmrl.core.aggregation import Denominators
from mmrl.core.metrics import Metric, mean_metric
from mmrl.core.objective import PolicyOutputs
from mmrl.core.rollouts import Rollouts
from mmrl.errors import UserError
from mmrl.fields import bounded, choice
from mmrl.training.loop.reference import Reference
from mmrl.training.loop.settings import TrainerConfig

__all__ = [
    "FlowMatching",
    "Matching",
    "NoisyVersions",
    "TimestepConfig",
    "check_matching",
    "matching_sampler",
    "matching_trainer",
]

SHARING = ("batch", "group", "image")


@dataclass
class TimestepConfig:
    """The noisy versions of an image that are trained on."""

    count: int = bounded(6, at_least=1)
    """Times T of each image in an epoch."""
    times: str = choice("discrete_wo_init", lambda: TIME_SAMPLERS)
    """How they are drawn: discrete, discrete_wo_init, discrete_with_init (of the sampler's grid), logit_normal or
    uniform."""
    fraction: float = bounded(0.9, above=0, at_most=1)
    """Share of the grid that the discrete kinds use, from the noisy end."""
    shift: float = bounded(3.0, above=0)
    """Shift of the continuous kinds towards noise; 1 = none."""
    share_times: str = choice("group", SHARING)
    """Images with the same times: batch (all), group (those of a prompt) or image (each has its own)."""
    share_noise: bool = False
    """Whether the images of a group get the same noises."""


def matching_sampler() -> SamplerConfig:
    """Fourteen steps of SA-Solver without guidance, as published for AWM on GenEval."""
    return SamplerConfig(steps=14, guidance=1.0, solver="sa_solver", noise_level=0.4)


def matching_trainer() -> TrainerConfig:
    """One update an epoch, so that the ratio is 1 and nothing is clipped."""
    trainer = image_trainer()
    trainer.minibatches_per_step = 1
    trainer.old_logp = "recompute"
    return trainer


def check_matching(trainer: TrainerConfig, sampler: SamplerConfig, timesteps: TimestepConfig) -> None:
    """Refuse what a run on noisy versions cannot do, before a model is there; raises ValueError."""
    if trainer.old_logp != "recompute":
        raise ValueError("trainer.old_logp must be 'recompute'; the sampler has no likelihood of noisy versions")
    grid = torch.linspace(1, 0, sampler.steps + 1)  # the scheduler's own has as many times
    source, options = torch.Generator(), timesteps
    try:
        sample_times(options.times, options.count, source, grid=grid, fraction=options.fraction, shift=options.shift)
    except UserError as error:
        raise ValueError(f"timesteps.times is '{timesteps.times}', sampler.steps {sampler.steps}: {error}") from error
    if sampler.solver == "sa_solver" and sampler.steps < 2:
        raise ValueError(f"sampler.steps is {sampler.steps}; sampler.solver 'sa_solver' needs at least 2")


@dataclass(frozen=True)
class NoisyVersions:
    """The noisy versions whose mask is 1 as one batch of M."""

    decisions: TrainedDecisions
    """Their places in (B, T)."""
    rows: NoisyRows
    """The M noisy latents with their times and targets."""


@dataclass(frozen=True)
class Matching:
    """A model's velocity on noisy versions."""

    decisions: TrainedDecisions
    """Places of the noisy versions in (B, T)."""
    noisy: NoisyRows
    """M rows."""
    clean: Tensor
    """x_0 of each row (M, C, H, W) float32."""
    velocity: Tensor
    """(M, C, H, W), carries the gradient."""

    @property
    def error(self) -> Tensor:
        """Mean squared distance of the velocity to its target (M,) float32."""
        return self.noisy.matching_error(self.velocity)

    @property
    def errors(self) -> Tensor:
        """`error` at its places in (B, T), 0 elsewhere."""
        return self.decisions.scatter(self.error)

    def distance(self, anchor: Tensor, kind: str = "uniform") -> Tensor:
        """Distance (B, T) to the velocity (M, C, H, W) of another model, see `velocity_kl`; 0 where not trained."""
        return self.decisions.scatter(velocity_kl(self.velocity, anchor, self.noisy.sigma, kind))


class FlowMatching:
    """Draws images with noisy versions of them, and evaluates models on these.

    Args:
        policy: gives embeddings and grid; the model that is evaluated is an argument of each method.
        sampler: solver and guidance.
        timesteps: the noisy versions.
    """

    def __init__(self, policy: DiffusionPolicy, sampler: SamplerConfig, timesteps: TimestepConfig) -> None:
        self.policy = policy
        self.sampler = sampler
        self.timesteps = timesteps

    def draw(
        self, policy: DiffusionPolicy, tasks: Sequence[DiffusionTask], group_size: int, generator: torch.Generator
    ) -> Rollouts:
        """Draw G images of each task, and the times and noises that they will be trained on.

        Args:
            policy: the policy that samples.
            tasks: N prompts.
            group_size: G images of each.
            generator: seeds the noise of sampler and versions, and draws the times.

        Returns:
            B = N * G rows with T decisions, without images and rewards.
        """
        group = torch.arange(len(tasks)).repeat_interleave(group_size)
        seeds = group_seeds(len(tasks), group_size, generator, same_noise=self.sampler.same_noise)
        latents = sample_latents(policy, text_of(policy, tasks, group), seeds, self.sampler)
        device, rows, count = latents.device, len(group), self.timesteps.count
        noise_seed = torch.randint(2**62, (rows,), generator=generator)
        if self.timesteps.share_noise:
            noise_seed = noise_seed[::group_size].repeat_interleave(group_size)
        return Rollouts(
            group=group.to(device),
            mask=torch.ones(rows, count, device=device),
            logp_old=torch.zeros(rows, count, device=device),
            reward=torch.full((rows,), float("nan"), device=device),
            payload=DiffusionPayload(
                tasks=list(tasks),
                latents=latents,
                images=np.zeros((rows, 0, 0, 3), np.uint8),
                sigma=self.times(len(tasks), group_size, generator).to(device),
                noise_seed=noise_seed.to(device),
            ),
        )

    def times(self, groups: int, group_size: int, generator: torch.Generator) -> Tensor:
        """Draw the times (B, T) of the noisy versions of B = groups * group_size images."""
        options = self.timesteps
        grid = sigma_grid(self.policy.pipeline.scheduler, self.sampler.steps, self.policy.image_tokens)

        def drawn() -> Tensor:
            times = sample_times(
                options.times, options.count, generator, grid=grid, fraction=options.fraction, shift=options.shift
            )
            return times.reshape(options.count)

        distinct = {"batch": 1, "group": groups, "image": groups * group_size}[options.share_times]
        table = torch.stack([drawn() for _ in range(distinct)])
        return table.repeat_interleave(groups * group_size // distinct, 0)

    def noisy(self, rollouts: Rollouts) -> NoisyVersions:
        """Mix the noisy versions whose mask is 1, row by row."""
        payload = DiffusionPayload.of(rollouts)
        assert payload.noise_seed is not None
        decisions = TrainedDecisions.of(rollouts)
        noise = row_noise(payload.noise_seed, self.timesteps.count, tuple(payload.latents.shape[1:]))
        noise = decisions.gather(noise.to(decisions.index.device))
        clean, sigma = payload.latents[decisions.row], decisions.gather(payload.sigma)
        return NoisyVersions(decisions, mix(clean, noise, sigma, decisions.row.cpu()))

    def velocity(self, model: Any, rollouts: Rollouts, noisy: NoisyRows) -> Tensor:
        """Guided velocity (M, C, H, W) of a model on noisy rows.

        Args:
            model: the policy, a wrapper of it, or another model of the same kind.
            rollouts: the images that the rows are versions of; their prompts are read.
            noisy: M rows.

        Gradient: through the positive half of guidance.
        """
        text = text_of(self.policy, DiffusionPayload.of(rollouts).tasks, rollouts.group).select(noisy.image)
        scale, negative = self.sampler.guidance, self.sampler.negative_prompt
        return guided(self.policy, model, text, scale, negative, detach_negative=True)(noisy.latents, noisy.sigma)

    def evaluate(self, model: Any, rollouts: Rollouts, versions: NoisyVersions | None = None) -> Matching:
        """Evaluate a model on the noisy versions of some rows; `versions` is what `noisy` gave, if already called."""
        versions = versions or self.noisy(rollouts)
        velocity = self.velocity(model, rollouts, versions.rows)
        clean = DiffusionPayload.of(rollouts).latents.float()[versions.decisions.row]
        return Matching(versions.decisions, versions.rows, clean, velocity)

    def scores(self, model: Any, rollouts: Rollouts, reference: Reference | None = None) -> PolicyOutputs:
        """Minus the matching error as log-likelihood of each noisy version; the velocity distance to a reference."""
        matching = self.evaluate(model, rollouts)
        anchor = self.reference_velocity(reference, rollouts, matching.noisy)
        return PolicyOutputs(-matching.errors, kl_ref=None if anchor is None else matching.distance(anchor))

    def reference_velocity(self, reference: Reference | None, rollouts: Rollouts, noisy: NoisyRows) -> Tensor | None:
        """Velocity (M, C, H, W) of the reference on noisy rows; None without one."""
        if reference is None:
            return None
        return reference.score(lambda module: self.velocity(module, rollouts, noisy))

    def reference_term(
        self,
        matching: Matching,
        minibatch: Rollouts,
        denominators: Denominators,
        reference: Reference | None,
        coefficient: float,
    ) -> tuple[Tensor, dict[str, Metric]]:
        """Weighted mean velocity distance to the reference and its metrics; 0 without a reference."""
        anchor = self.reference_velocity(reference, minibatch, matching.noisy)
        if anchor is None:
            return matching.velocity.new_zeros(()), {}
        distance = matching.distance(anchor)
        term = coefficient * mean_over_decisions(distance, minibatch, denominators)
        metrics = {"policy/kl_ref": mean_metric(distance, minibatch.loss_mask), "loss/kl": Metric.summed(term.detach())}
        return term, metrics
