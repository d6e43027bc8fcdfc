"""Drawing images, and a model's velocity on noisy versions of them: velocity matching with prompts and guidance.

AWM, DiffusionNFT, ORW-CFM-W2 and AC-Flow share it. Any solver may have drawn the image and no trajectory is kept;
`diffusion.state_matching` keeps some of its states.

Shapes: B rows (images), T noisy versions of each, M of the B * T whose mask is 1, C x H x W one latent.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from diffusion.data import DiffusionTask
from diffusion.forward_process import NoisyRows
from diffusion.payload import DiffusionPayload
from diffusion.policy import DiffusionPolicy
from diffusion.sampler import SamplerConfig, group_seeds, guided, sample_latents, text_of
from diffusion.schedule import sigma_grid
from diffusion.velocity_matching import MatchedSamples, TimestepConfig, VelocityMatching, draw_times
from mmrl.core.rollouts import Rollouts


class FlowMatching(VelocityMatching):
    """Draws images with noisy versions of them, and evaluates models on these."""

    def __init__(self, policy: DiffusionPolicy, sampler: SamplerConfig, timesteps: TimestepConfig) -> None:
        super().__init__(timesteps)
        self.policy = policy
        self.sampler = sampler

    def draw(
        self, policy: DiffusionPolicy, tasks: Sequence[DiffusionTask], group_size: int, generator: torch.Generator
    ) -> Rollouts:
        """Draw G images of each task, and the times and noises that they will be trained on."""
        group = torch.arange(len(tasks)).repeat_interleave(group_size)
        seeds = group_seeds(len(tasks), group_size, generator, same_noise=self.sampler.same_noise)
        latents = sample_latents(policy, text_of(policy, tasks, group), seeds, self.sampler)
        noise_seed = torch.randint(2**62, (len(group),), generator=generator)
        if self.timesteps.share_noise:
            noise_seed = noise_seed[::group_size].repeat_interleave(group_size)
        sigma = self.times(len(tasks), group_size, generator).to(latents.device)
        return matched_rollouts(tasks, group, latents, sigma, noise_seed=noise_seed.to(latents.device))

    def times(self, groups: int, group_size: int, generator: torch.Generator) -> Tensor:
        """Draw the times (B, T) of the noisy versions of B = groups * group_size images."""
        grid = sigma_grid(self.policy.pipeline.scheduler, self.sampler.steps, self.policy.image_tokens)
        return draw_times(self.timesteps, grid, groups, group_size, generator)

    def samples(self, rollouts: Rollouts) -> MatchedSamples:
        """The finished latents."""
        payload = DiffusionPayload.of(rollouts)
        return MatchedSamples(payload.latents, payload.sigma, payload.noise_seed)

    def velocity(self, model: Any, rollouts: Rollouts, noisy: NoisyRows) -> Tensor:
        """Guided velocity (M, C, H, W) of a model on noisy rows.

        Gradient: through the positive half of guidance.
        """
        text = text_of(self.policy, DiffusionPayload.of(rollouts).tasks, rollouts.group).select(noisy.image)
        scale, negative = self.sampler.guidance, self.sampler.negative_prompt
        return guided(self.policy, model, text, scale, negative, detach_negative=True)(noisy.latents, noisy.sigma)


def matched_rollouts(
    tasks: Sequence[DiffusionTask],
    group: Tensor,
    latents: Tensor,
    sigma: Tensor,
    *,
    noise_seed: Tensor | None = None,
    states: Tensor | None = None,
) -> Rollouts:
    """Rows of finished latents x_0 (B, C, H, W) whose decisions are noisy versions at times (B, T), unscored.

    The noisy versions are mixed from `noise_seed` (B,) int64 when they are needed, or are `states` (B, T, C, H, W).
    """
    return Rollouts(
        group=group.to(latents.device),
        mask=torch.ones_like(sigma),
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
