"""A model's velocity on noisy versions of finished samples of any kind.

A sample is a row. Its T decisions are noisy versions of it, each with a time and a noise, on which the model's velocity
is compared with the true one. Times and noises are fixed for the rollout (one seed per row), so the old policy, the
anchors and every pass of the update see the same noisy versions.

Shapes: B rows (samples), T noisy versions of each, M of the B * T with mask 1, `...` the shape of one sample.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from diffusion.data.prompts import DiffusionTask
from diffusion.families.base import Family
from diffusion.matching.losses import NoisyRows, mix
from diffusion.matching.times import TimestepConfig, draw_times, reachable_times
from diffusion.models.diffusion_policy import DiffusionPolicy
from diffusion.models.pipelines import encode_images
from diffusion.sampling.latent_sampler import (
    LatentSamplerConfig,
    check_networks,
    group_seeds,
    guided,
    row_noise,
    sample_latents,
    text_of,
    times_of,
)
from diffusion.sampling.steps import velocity_kl
from diffusion.sampling.trajectories import DiffusionPayload, TrainedDecisions, mean_over_decisions
from mmrl.core.loss import Denominators, Metric, mean_metric
from mmrl.core.objectives.objective import LossOutput, PolicyOutputs
from mmrl.core.payload import to_device
from mmrl.core.rollouts import Rollouts
from mmrl.errors import UserError
from mmrl.training.processes import Streams
from mmrl.training.recipe import Reference


class MatchedSamples(NamedTuple):
    """Finished samples and the noisy versions of them that are trained on."""

    latents: Tensor
    """x_0 (B, ...)."""
    sigma: Tensor
    """Times (B, T) float32."""
    noise_seed: Tensor | None
    """(B,) int64, seed of each row's T noises; None if the noisy versions themselves are stored."""


@dataclass(frozen=True)
class NoisyVersions:
    """The noisy versions with mask 1 as one batch of M."""

    decisions: TrainedDecisions
    """Their indices in (B, T)."""
    rows: NoisyRows
    """The M noisy latents with their times and targets."""


@dataclass(frozen=True)
class Matching:
    """A model's velocity on noisy versions."""

    decisions: TrainedDecisions
    """Indices of the noisy versions in (B, T)."""
    noisy: NoisyRows
    """M rows."""
    clean: Tensor
    """x_0 of each row (M, ...) float32."""
    velocity: Tensor
    """(M, ...), carries the gradient."""
    scale: Tensor | float = 1.0
    """Ratio (M,) of the error of what the network predicts to that of the velocity."""

    @property
    def error(self) -> Tensor:
        """Mean squared error of what the network predicts (M,) float32; of a flow model, that of the velocity."""
        return self.error_of(self.velocity)

    def error_of(self, velocity: Tensor) -> Tensor:
        """`error` of the velocity (M, ...) of another model."""
        return self.noisy.matching_error(velocity) * self.scale**2

    @property
    def errors(self) -> Tensor:
        """`error` scattered into (B, T), 0 elsewhere."""
        return self.decisions.scatter(self.error)

    def distance(self, anchor: Tensor, kind: str = "uniform") -> Tensor:
        """Distance (B, T) to the velocity (M, ...) of another model by `velocity_kl`, 0 if not trained."""
        # scaled like the errors: one coefficient then weighs the two alike at all times
        return self.decisions.scatter(velocity_kl(self.velocity, anchor, self.noisy.sigma, kind, self.scale))

    def loss(
        self,
        losses: Tensor,
        minibatch: Rollouts,
        denominators: Denominators,
        reference: Tensor | None,
        coefficient: float,
        weight: Tensor | None = None,
    ) -> LossOutput:
        """Mean of the losses (B, T) of noisy versions, plus the distance to the velocity (M, ...) of a reference.

        `weight` (B, T) multiplies the distances in addition to the coefficient.
        """
        # denominators count the whole optimiser step, so micro-batches of unequal size add up to the same loss
        policy_term = mean_over_decisions(losses, minibatch, denominators)
        anchor = self.velocity.new_zeros(())
        metrics = {"loss/policy": Metric.summed(policy_term.detach())}
        if reference is not None:
            distance = self.distance(reference)
            weighed = distance if weight is None else weight * distance
            anchor = coefficient * mean_over_decisions(weighed, minibatch, denominators)
            # the metric is the plain distance: it stays comparable between runs with different weights
            metrics["policy/kl_ref"] = mean_metric(distance, minibatch.loss_mask)
            metrics["loss/kl"] = Metric.summed(anchor.detach())
        total = policy_term + anchor
        return LossOutput(total, metrics | {"loss/total": Metric.summed(total.detach())})


class VelocityMatching(ABC):
    """Evaluates models on noisy versions of samples."""

    def __init__(self, timesteps: TimestepConfig) -> None:
        self.timesteps = timesteps

    @abstractmethod
    def samples(self, rollouts: Rollouts) -> MatchedSamples:
        """The samples of some rollouts."""

    @abstractmethod
    def velocity(self, model: Any, rollouts: Rollouts, noisy: NoisyRows) -> Tensor:
        """Velocity (M, ...) of a model on noisy rows."""

    def scale(self, sigma: Tensor) -> Tensor:
        """Ratio (M,) of the error of what the network predicts to that of the velocity, at times (M,)."""
        return torch.ones_like(sigma)

    @property
    def scaling(self) -> str:
        """End of formulas that contain errors or distances; empty for networks that predict the velocity."""
        plain = bool(self.scale(torch.full((1,), 0.5)) == 1)
        return "" if plain else "; |v - ...|^2 is scaled to the error of what the network predicts"

    def noisy(self, rollouts: Rollouts) -> NoisyVersions:
        """Mix the noisy versions with mask 1, row by row."""
        samples = self.samples(rollouts)
        assert samples.noise_seed is not None
        decisions = TrainedDecisions.of(rollouts)
        # all T noises of a row, then those that are trained: a version keeps its noise whichever others are masked out
        noise = row_noise(samples.noise_seed, self.timesteps.count, tuple(samples.latents.shape[1:]))
        noise = decisions.gather(to_device(noise, decisions.index.device))
        # each image is repeated for each of its trained versions
        clean, sigma = samples.latents[decisions.row], decisions.gather(samples.sigma)
        # row numbers from the mask's copy on the CPU, where text rows are selected
        return NoisyVersions(decisions, mix(clean, noise, sigma, torch.nonzero(rollouts.host.mask > 0)[:, 0]))

    def evaluate(self, model: Any, rollouts: Rollouts, versions: NoisyVersions | None = None) -> Matching:
        """Evaluate a model on the noisy versions of some rows; `versions` reuses an earlier result of `noisy`."""
        versions = versions or self.noisy(rollouts)  # given ones, so that several models see the very same rows
        velocity = self.velocity(model, rollouts, versions.rows)
        # float32: losses compare predicted and clean images at small times
        clean = self.samples(rollouts).latents.float()[versions.decisions.row]
        return Matching(versions.decisions, versions.rows, clean, velocity, self.scale(versions.rows.sigma))

    def scores(self, model: Any, rollouts: Rollouts, reference: Reference | None = None) -> PolicyOutputs:
        """Negative matching error as the log-likelihood of each noisy version; velocity distance to a reference."""
        matching = self.evaluate(model, rollouts)
        anchor = self.reference_velocity(reference, rollouts, matching.noisy)
        # the distance at the same noisy versions, with the same noise
        return PolicyOutputs(-matching.errors, kl_ref=None if anchor is None else matching.distance(anchor))

    def reference_velocity(self, reference: Reference | None, rollouts: Rollouts, noisy: NoisyRows) -> Tensor | None:
        """Velocity (M, ...) of the reference on noisy rows; None without one."""
        if reference is None:
            return None
        return reference.score(lambda module: self.velocity(module, rollouts, noisy))


class FlowMatching(VelocityMatching):
    """Draws images, makes noisy versions of them and evaluates models on these."""

    def __init__(self, policy: DiffusionPolicy, sampler: LatentSamplerConfig, timesteps: TimestepConfig) -> None:
        super().__init__(timesteps)
        self.policy = policy
        self.sampler = sampler
        check_networks(policy, reachable_times(timesteps, times_of(policy, sampler.steps)), "timesteps")

    def draw(
        self, policy: DiffusionPolicy, tasks: Sequence[DiffusionTask], group_size: int, streams: Streams
    ) -> Rollouts:
        """Draw G images per task, and the times and noises they will be trained on."""
        group = torch.arange(len(tasks)).repeat_interleave(group_size)
        seeds = group_seeds(len(tasks), group_size, streams, same_noise=self.sampler.same_noise)
        latents = sample_latents(policy, text_of(policy, tasks, group), seeds, self.sampler)
        # a stream apart from "sample": the noise added to an image must not be the noise it was drawn from
        noise_seed = streams.seeds(len(tasks), group_size, purpose="matching")
        if self.timesteps.share_noise:
            # all images of a group are compared on the same noises
            noise_seed = noise_seed[::group_size].repeat_interleave(group_size)
        sigma = to_device(self.times(len(tasks), group_size, streams), latents.device)
        return matched_rollouts(tasks, group, latents, sigma, noise_seed=to_device(noise_seed, latents.device))

    def times(self, groups: int, group_size: int, streams: Streams) -> Tensor:
        """Draw the times (B, T) of the noisy versions of B = groups * group_size images."""
        grid = times_of(self.policy, self.sampler.steps)
        # the noisy version and the network have to agree on the time
        return draw_times(self.timesteps, grid, groups, group_size, streams).clamp(max=self.policy.family.max_time)

    def scale(self, sigma: Tensor) -> Tensor:
        """The family's `prediction_scale`."""
        return self.policy.family.prediction_scale(sigma)

    def errors(self, model: Any, rollouts: Rollouts, kind: str) -> Tensor:
        """Mean squared error (B, T) float32 of a model on noisy versions, 0 elsewhere; `kind` is one of `ERRORS`."""
        matching = self.evaluate(model, rollouts)
        scale = ERRORS[kind](self.policy.family, matching.noisy.sigma)
        return dataclasses.replace(matching, scale=scale).errors

    def error_formula(self, kind: str) -> str:
        """Formula of `errors`."""
        formula = "mean |v(x_t, t, c) - (noise - x_0)|^2"
        # the scale is 1 at all times or at none but the ends
        plain = bool(ERRORS[kind](self.policy.family, torch.full((1,), 0.5)) == 1)
        names = {"noise": "the implied noise", "prediction": "what the network predicts"}
        return formula if plain else f"{formula}, scaled to the error of {names[kind]}"

    def states(self, rollouts: Rollouts) -> tuple[Tensor, Tensor, TrainedDecisions]:
        """Noisy versions (M, C, H, W) with mask 1, their times (M,) and their positions in (B, T)."""
        versions = self.noisy(rollouts)
        return versions.rows.latents, versions.rows.sigma, versions.decisions

    def samples(self, rollouts: Rollouts) -> MatchedSamples:
        """The finished latents."""
        payload = DiffusionPayload.of(rollouts)
        return MatchedSamples(payload.latents, payload.sigma, payload.noise_seed)

    def velocity(self, model: Any, rollouts: Rollouts, noisy: NoisyRows) -> Tensor:
        """Guided velocity (M, C, H, W) of a model on noisy rows.

        Gradient: through the positive half of guidance.
        """
        text = text_of(self.policy, DiffusionPayload.of(rollouts).tasks, rollouts.host.group).select(noisy.image)
        scale, negative = self.sampler.guidance, self.sampler.negative_prompt
        return guided(self.policy, model, text, scale, negative, detach_negative=True)(noisy.latents, noisy.sigma)


ERRORS: dict[str, Callable[[Family, Tensor], Tensor]] = {
    "prediction": lambda family, sigma: family.prediction_scale(sigma),
    "velocity": lambda family, sigma: torch.ones_like(sigma),
    # the noise is x_t + (1 - t) v
    "noise": lambda family, sigma: 1 - sigma,
}
"""Functions that turn times into the ratio of an error to that of the velocity, by what is compared: the network's own
prediction, the velocity, or the noise that it implies."""


def matched_rollouts(
    tasks: Sequence[DiffusionTask],
    group: Tensor,
    latents: Tensor,
    sigma: Tensor,
    *,
    noise_seed: Tensor | None = None,
    states: Tensor | None = None,
) -> Rollouts:
    """Unscored rows of finished latents x_0 (B, C, H, W) whose decisions are noisy versions at times (B, T).

    The noisy versions are mixed from `noise_seed` (B,) int64 when needed, or given as `states` (B, T, C, H, W).
    """
    return Rollouts(
        group=to_device(group, latents.device),
        mask=torch.ones_like(sigma),
        # solvers give no likelihood; a pass of the policy before the update replaces these zeros
        logp_old=torch.zeros_like(sigma),
        reward=torch.full((len(group),), float("nan"), device=latents.device),
        payload=DiffusionPayload(
            tasks=list(tasks),
            latents=latents,
            images=np.zeros((len(group), 0, 0, 3), np.uint8),
            sigma=sigma,
            noise_seed=noise_seed,
            states=states,
        ),
    )


def encode_given(
    policy: DiffusionPolicy, ids: Sequence[str], images: Sequence[np.ndarray], batch: int
) -> tuple[Tensor, np.ndarray]:
    """Latents and pixels (B, h, w, 3) of given images uint8 (h, w, 3) from the rows `ids`.

    Raises UserError for an image that has not the size of the run.
    """
    family, shape = policy.family, policy.latent_shape
    size = [family.frames(shape)] * family.video + [side * family.factor for side in shape[-2:]]
    names = ["frames"] * family.video + ["height", "width"]
    kind = "videos" if family.video else "images"
    for row, image in zip(ids, images, strict=True):
        # `encode_images` rejects images for a video family, and videos for an image family
        if image.ndim != 3 + family.video or [*image.shape[:-1]] == size:
            continue
        found, wanted = (
            ", ".join(f"{name}={side}" for name, side in zip(names, sides, strict=True))
            for sides in (image.shape[:-1], size)
        )
        raise UserError(
            f"{row} has {found}, but the model draws {kind} with {wanted}; resize it, or change "
            f"model.{' and model.'.join(names)}"
        )
    pixels = np.stack(images)
    return encode_images(family, pixels, batch=batch), pixels


def given_rollouts(
    policy: DiffusionPolicy,
    tasks: Sequence[DiffusionTask],
    group: Tensor,
    images: tuple[Tensor, np.ndarray],
    sigma: Tensor,
    noise_seed: Tensor,
) -> Rollouts:
    """Rows of given images, latents (B, C, H, W) and pixels uint8 (B, h, w, 3), with reward and advantage 0."""
    latents, pixels = images
    device = latents.device
    # given images come from the autoencoder in float32
    latents = latents.to(policy.device, policy.dtype)
    rollouts = matched_rollouts(tasks, group, latents, sigma.to(device), noise_seed=noise_seed.to(device))
    payload = dataclasses.replace(DiffusionPayload.of(rollouts), images=pixels, finite=[True] * len(pixels))
    zeros = torch.zeros_like(rollouts.mask)
    # supervised: no reward and no advantage is read, but both fields must be there for the report
    return rollouts.replace(reward=zeros[:, 0], advantage=zeros, payload=payload)
