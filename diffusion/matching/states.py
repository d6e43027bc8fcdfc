"""Velocity matching at states of the sampler, instead of re-noised images.

A state x_t is on a path that ended in the image x_0. Its target is the velocity of the straight line from x_t at time t
to its own image at time 0,

    u = (x_t - x_0) / t,

which is noise - x_0 for the noise that would have led to it, (x_t - (1 - t) x_0) / t. For a re-noised image this is the
drawn noise, and on a straight path it is the initial noise of the path. Otherwise it is neither: the path of an ODE
bends, and a stochastic sampler forgets its initial noise.

The unweighted loss pulls towards E[u | x_t], which depends on how the images were drawn:

* With g^2 = 2 t / (1 - t), the noise of the re-noising process, (x_t, x_0) has the same distribution as re-noised
  images, and E[u | x_t] is the velocity that drew them (`sampler.solver: flow_sde` with noise_level sqrt(2), many
  steps).
* With an ODE solver, x_0 is a function of x_t, and u is the mean velocity over the rest of the path. The unweighted
  loss then straightens paths, as reflow does (Rectified flow, arXiv 2209.03003), and changes the model even if all
  rewards are equal. Weights with mean 0 remove that effect.
* With a noise level below sqrt(2), the target is between the two.

Before the last step, which goes straight to x_0, u is the model's own velocity and has no gradient at first;
`timesteps.fraction` excludes that state.

Shapes: B rows (images), T states of each, M of the B * T with mask 1, C x H x W one latent.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from diffusion.data.prompts import DiffusionTask
from diffusion.matching.losses import NoisyRows
from diffusion.matching.times import TimestepConfig, draw_times
from diffusion.matching.velocity import FlowMatching, NoisyVersions, matched_rollouts
from diffusion.models.diffusion_policy import DiffusionPolicy
from diffusion.sampling.latent_sampler import LatentSamplerConfig, group_seeds, sample_states, text_of
from diffusion.sampling.trajectories import DiffusionPayload, TrainedDecisions
from mmrl.core.rollouts import Rollouts
from mmrl.training.processes import Streams

FIRST_STEP = {"discrete": 0, "discrete_wo_init": 1, "discrete_with_init": 0}
"""Distributions over the sampler's own times, and the first step that each can draw."""


def check_states(sampler: LatentSamplerConfig, timesteps: TimestepConfig) -> None:
    """Reject times at which the sampler has no states, before a model is loaded; raises ValueError."""
    if timesteps.times not in FIRST_STEP:
        raise ValueError(
            f"timesteps.times is '{timesteps.times}', but the sampler only has states at its own times; use "
            f"{', '.join(FIRST_STEP)}"
        )
    states = int(sampler.steps * timesteps.fraction) - FIRST_STEP[timesteps.times]
    if timesteps.count > states:
        raise ValueError(
            f"timesteps.count is {timesteps.count}, but timesteps.fraction={timesteps.fraction:g} of sampler.steps="
            f"{sampler.steps} leaves {states} states with timesteps.times '{timesteps.times}'; use at most {states}"
        )
    if timesteps.share_noise:
        raise ValueError("timesteps.share_noise is about re-noised images; with states of the sampler leave it false")


class StateMatching(FlowMatching):
    """Draws images, keeps some of the sampler's states and evaluates models on these; see the module docstring."""

    def draw(
        self, policy: DiffusionPolicy, tasks: Sequence[DiffusionTask], group_size: int, streams: Streams
    ) -> Rollouts:
        """Draw G images per task and keep T states of each, in path order.

        Args:
            policy: the policy to sample with.
            tasks: N prompts.
            group_size: G, images per prompt.
            streams: random streams for the sampler's noise and the choice of states.

        Returns:
            B = N * G rows with T decisions, without images and rewards.
        """
        group = torch.arange(len(tasks)).repeat_interleave(group_size)
        seeds = group_seeds(len(tasks), group_size, streams, same_noise=self.sampler.same_noise)
        # `draw_times` picks from any grid; a grid of step numbers makes it choose steps instead of times
        numbers = torch.arange(self.sampler.steps + 1.0)
        kept = draw_times(self.timesteps, numbers, len(tasks), group_size, streams).long()
        run = sample_states(policy, text_of(policy, tasks, group), seeds, self.sampler, kept)
        return matched_rollouts(tasks, group, run.latents, run.sigma, states=run.states)

    def noisy(self, rollouts: Rollouts) -> NoisyVersions:
        """The states with mask 1, each with the velocity towards its own image."""
        payload, decisions = DiffusionPayload.of(rollouts), TrainedDecisions.of(rollouts)
        assert payload.states is not None
        states, sigma = decisions.gather(payload.states), decisions.gather(payload.sigma)
        target = towards(payload.latents[decisions.row], states, sigma)
        return NoisyVersions(decisions, NoisyRows(states, target, sigma, decisions.row.cpu()))


def towards(clean: Tensor, states: Tensor, sigma: Tensor) -> Tensor:
    """Velocity (M, ...) float32 of straight lines from states x_t at times t > 0 to x_0 at 0, (x_t - x_0) / t."""
    return (states.float() - clean.float()) / sigma.reshape(-1, *[1] * (clean.ndim - 1))
