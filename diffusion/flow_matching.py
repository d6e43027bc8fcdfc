"""Learning from finished images alone: what AWM, DiffusionNFT, ORW-CFM-W2 and AC-Flow share.

An image is a row; its T decisions are noisy versions of its latents x_0, each a time and a noise, on which the model's
velocity is compared with the true one. Any solver may have drawn the image and no trajectory is kept. Times and noises
are constants of the rollout (a seed a row), so old policy, anchors and every pass of the update see the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from diffusion.data import DiffusionTask
from diffusion.forward_process import NoisyRows, mix
from diffusion.matching import TIME_SAMPLERS, sample_times, velocity_kl
from diffusion.payload import DiffusionPayload
from diffusion.recipe import DiffusionConfig, DiffusionRecipe, image_trainer
from diffusion.sampler import SamplerConfig, guided, row_noise, sample_latents
from diffusion.schedule import sigma_grid
from mmrl.core.aggregation import Denominators, token_mean
from mmrl.core.metrics import Metric, mean_metric
from mmrl.core.objective import PolicyOutputs
from mmrl.core.rollouts import Rollouts
from mmrl.fields import bounded, choice
from mmrl.training.loop.settings import TrainerConfig

__all__ = ["FlowMatchingConfig", "FlowMatchingRecipe", "Matching", "TimestepConfig", "mean_over_decisions"]

SHARING = ("batch", "group", "image")


def matched_sampler() -> SamplerConfig:
    """Fourteen steps of SA-Solver without guidance, as published for AWM on GenEval."""
    return SamplerConfig(steps=14, guidance=1.0, solver="sa_solver", noise_level=0.4)


def matched_trainer() -> TrainerConfig:
    """One update an epoch, so that the ratio is 1 and nothing is clipped."""
    trainer = image_trainer()
    trainer.minibatches_per_step = 1
    trainer.old_logp = "recompute"
    return trainer


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
    """Who has the same times: batch (all images), group (those of a prompt) or image (nobody)."""
    share_noise: bool = False
    """Whether the images of a group get the same noises."""


@dataclass
class FlowMatchingConfig(DiffusionConfig):
    """A run that learns from noisy versions of its own images."""

    timesteps: TimestepConfig = field(default_factory=TimestepConfig)
    """The noisy versions."""
    sampler: SamplerConfig = field(default_factory=matched_sampler)
    """How images are drawn."""
    trainer: TrainerConfig = field(default_factory=matched_trainer)
    """Batch sizes, optimiser and guards."""

    def validate(self) -> None:
        """Check that the parts fit together; raises ValueError."""
        super().validate()
        if self.trainer.old_logp != "recompute":
            raise ValueError("trainer.old_logp must be 'recompute'; the sampler knows no likelihood of noisy versions")


@dataclass
class Matching:
    """Noisy versions that count, and what the model says about them."""

    noisy: NoisyRows
    """M rows."""
    clean: Tensor
    """x_0 of each row (M, C, H, W)."""
    velocity: Tensor
    """(M, C, H, W), carries the gradient."""
    chosen: Tensor
    """(M,) int64, place of each row in the flattened (B, T)."""
    shape: torch.Size
    """(B, T)."""

    def placed(self, values: Tensor) -> Tensor:
        """Values (M,) at their places in (B, T), 0 elsewhere."""
        return values.new_zeros(self.shape.numel()).index_copy(0, self.chosen, values).view(self.shape)

    def of(self, table: Tensor) -> Tensor:
        """Entries (M,) of a table (B, T)."""
        return table.flatten()[self.chosen]

    @property
    def error(self) -> Tensor:
        """Matching error of the velocity (M,) float32."""
        return self.noisy.matching_error(self.velocity)


class FlowMatchingRecipe(DiffusionRecipe):
    """Draws images by any solver and evaluates the model on noisy versions of them; a method supplies the loss."""

    config: FlowMatchingConfig

    def sampling_weights(self) -> AbstractContextManager[None]:
        """Weights that images are drawn with; the policy's own unless a method has another sampling policy."""
        return nullcontext()

    def draw(self, tasks: Sequence[DiffusionTask], generator: torch.Generator) -> Rollouts:
        """Draw G images of each task, and the times and noises that they will be trained on."""
        size, timesteps = self.config.trainer.samples_per_task, self.config.timesteps
        group = torch.arange(len(tasks)).repeat_interleave(size)
        seeds = self.seeds_for(len(tasks), generator)
        with self.sampling_weights():
            latents = sample_latents(self.policy, self.text_of(tasks, group), seeds, self.config.sampler)
        device, rows = latents.device, len(group)
        noise_seed = torch.randint(2**62, (rows,), generator=generator)
        if timesteps.share_noise:
            noise_seed = noise_seed[::size].repeat_interleave(size)
        return Rollouts(
            group=group.to(device),
            mask=torch.ones(rows, timesteps.count, device=device),
            logp_old=torch.zeros(rows, timesteps.count, device=device),
            reward=torch.full((rows,), float("nan"), device=device),
            payload=DiffusionPayload(
                tasks=list(tasks),
                latents=latents,
                images=np.zeros((rows, 0, 0, 3), np.uint8),
                sigma=self.times(len(tasks), generator).to(device),
                noise_seed=noise_seed.to(device),
            ),
        )

    def times(self, groups: int, generator: torch.Generator) -> Tensor:
        """Times (B, T) of the noisy versions of each image."""
        timesteps, size = self.config.timesteps, self.config.trainer.samples_per_task
        grid = sigma_grid(self.policy.pipeline.scheduler, self.config.sampler.steps, self.policy.image_tokens)

        def drawn() -> Tensor:
            times = sample_times(
                timesteps.times,
                timesteps.count,
                generator,
                grid=grid,
                fraction=timesteps.fraction,
                shift=timesteps.shift,
            )
            return times.reshape(timesteps.count)

        distinct = {"batch": 1, "group": groups, "image": groups * size}[timesteps.share_times]
        table = torch.stack([drawn() for _ in range(distinct)])
        return table.repeat_interleave(groups * size // distinct, 0)

    def noisy(self, rollouts: Rollouts) -> tuple[NoisyRows, Tensor]:
        """Noisy versions of the rows whose mask is 1, row by row, and their places (M,) in the flattened (B, T)."""
        payload = DiffusionPayload.of(rollouts)
        assert payload.noise_seed is not None
        width = rollouts.num_decisions
        chosen = torch.nonzero(rollouts.mask.flatten() > 0).flatten()
        noise = row_noise(payload.noise_seed, self.config.timesteps.count, tuple(payload.latents.shape[1:]))
        noise = noise[:, :width].flatten(0, 1).to(chosen.device)[chosen]
        sigma = payload.sigma[:, :width].flatten()[chosen]
        return mix(payload.latents[chosen // width], noise, sigma, (chosen // width).cpu()), chosen

    def velocity_of(self, model: Any, rollouts: Rollouts, noisy: NoisyRows) -> Tensor:
        """Guided velocity (M, C, H, W) of a model on noisy rows."""
        payload = DiffusionPayload.of(rollouts)
        text = self.text_of(payload.tasks, rollouts.group).select(noisy.image)
        config = self.config.sampler
        velocity = guided(self.policy, model, text, config.guidance, config.negative_prompt, detach_negative=True)
        return velocity(noisy.latents, noisy.sigma)

    def matched(self, policy: Any, rollouts: Rollouts, drawn: tuple[NoisyRows, Tensor] | None = None) -> Matching:
        """Evaluate a model on the noisy versions of some rows; `drawn` is what `noisy` gave, if it was asked before."""
        noisy, chosen = drawn or self.noisy(rollouts)
        velocity = self.velocity_of(policy, rollouts, noisy)
        clean = DiffusionPayload.of(rollouts).latents.float()[noisy.image.to(chosen.device)]
        return Matching(noisy, clean, velocity, chosen, rollouts.mask.shape)

    def reference_velocity(self, minibatch: Rollouts, noisy: NoisyRows) -> Tensor | None:
        """Velocity (M, C, H, W) of the reference on noisy rows; None where the loss has no such term."""
        if not self.objective.needs_reference:
            return None
        assert self.reference is not None
        return self.reference.score(lambda module: self.velocity_of(module, minibatch, noisy))

    def reference_term(
        self, matching: Matching, minibatch: Rollouts, denominators: Denominators
    ) -> tuple[Tensor, dict[str, Metric]]:
        """Weighted mean velocity distance to the reference, 0 where the objective has no such term."""
        reference = self.reference_velocity(minibatch, matching.noisy)
        if reference is None:
            return matching.velocity.new_zeros(()), {}
        distance = matching.placed(velocity_kl(matching.velocity, reference, matching.noisy.sigma))
        term = self.objective.kl_coef * mean_over_decisions(distance, minibatch, denominators)
        metrics = {"policy/kl_ref": mean_metric(distance, minibatch.loss_mask), "loss/kl": Metric.summed(term.detach())}
        return term, metrics

    def scores(self, policy: nn.Module, rollouts: Rollouts, outputs: frozenset[str]) -> PolicyOutputs:
        """Minus the matching error as log-likelihood of each noisy version."""
        matching = self.matched(policy, rollouts)
        return PolicyOutputs(logp=matching.placed(-matching.error))


def mean_over_decisions(values: Tensor, minibatch: Rollouts, denominators: Denominators) -> Tensor:
    """Mean of (B, T) values over the trained decisions of the whole optimiser step."""
    mask = minibatch.loss_mask
    return token_mean(torch.where(mask > 0, values, 0.0), mask, denominators)
