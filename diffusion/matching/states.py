"""Velocity matching at states of the sampler, instead of re-noised images.

A state x_t lies on a path that ended in the image x_0. Its target is the velocity of the straight line from x_t at
time t to its own image at time 0,

    u = (x_t - x_0) / t,

which is noise - x_0 for the noise that would have led to it, (x_t - (1 - t) x_0) / t. For a re-noised image that is the
noise that was drawn, and on a straight path it is the noise that the path began with. Otherwise it is neither: an ODE's
path bends, and a stochastic sampler forgets where it began.

What the unweighted loss pulls to is E[u | x_t], which depends on how the images were drawn:

* With g^2 = 2 t / (1 - t), the noise of the process that re-noising is, (x_t, x_0) has the law of re-noised images, and
  E[u | x_t] is the velocity that drew them (`sampler.solver: flow_sde` with noise_level sqrt(2), many steps).
* With an ODE solver x_0 is a function of x_t, and u is the mean velocity of the rest of the path. The unweighted loss
  then straightens paths, as reflow does (Rectified flow, arXiv 2209.03003), and moves the model even where all rewards
  are equal. Weights of mean 0 leave that part out.
* With less noise than sqrt(2) the target lies between the two.

Before the last step, which goes straight to x_0, u is the model's own velocity and has no gradient at first;
`timesteps.fraction` leaves that state out.

Shapes: B rows (images), T states of each, M of the B * T whose mask is 1, C x H x W one latent.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from diffusion.data.prompts import DiffusionTask
from diffusion.matching.losses import NoisyRows
from diffusion.matching.times import TimestepConfig, draw_times
from diffusion.matching.velocity import FlowMatching, NoisyVersions, matched_rollouts
from diffusion.models.policy import DiffusionPolicy
from diffusion.sampling.sampler import SamplerConfig, group_seeds, sample_states, text_of
from diffusion.sampling.trajectories import DiffusionPayload, TrainedDecisions
from mmrl.core.rollouts import Rollouts
from mmrl.training.processes import Streams

FIRST_STEP = {"discrete": 0, "discrete_wo_init": 1, "discrete_with_init": 0}
"""Kinds of time that are times of the sampler, and the first step that each can draw."""


def check_states(sampler: SamplerConfig, timesteps: TimestepConfig) -> None:
    """Refuse times at which the sampler has no states, before a model is there; raises ValueError."""
    if timesteps.times not in FIRST_STEP:
        raise ValueError(
            f"timesteps.times is '{timesteps.times}', but states of the sampler exist at its own times alone; use "
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
    """Draws images with some of their sampler's states, and evaluates models on these; see the module."""

    def draw(
        self, policy: DiffusionPolicy, tasks: Sequence[DiffusionTask], group_size: int, streams: Streams
    ) -> Rollouts:
        """Draw G images of each task, with T states of each in the order of its path.

        Args:
            policy: the policy that samples.
            tasks: N prompts.
            group_size: G images of each.
            streams: of the sampler's noise, and of the steps whose states are kept.

        Returns:
            B = N * G rows with T decisions, without images and rewards.
        """
        group = torch.arange(len(tasks)).repeat_interleave(group_size)
        seeds = group_seeds(len(tasks), group_size, streams, same_noise=self.sampler.same_noise)
        numbers = torch.arange(self.sampler.steps + 1.0)  # drawn from in place of times: the number of each step
        kept = draw_times(self.timesteps, numbers, len(tasks), group_size, streams).long()
        run = sample_states(policy, text_of(policy, tasks, group), seeds, self.sampler, kept)
        return matched_rollouts(tasks, group, run.latents, run.sigma, states=run.states)

    def noisy(self, rollouts: Rollouts) -> NoisyVersions:
        """The states whose mask is 1, each with the velocity towards its own image."""
        payload, decisions = DiffusionPayload.of(rollouts), TrainedDecisions.of(rollouts)
        assert payload.states is not None
        states, sigma = decisions.gather(payload.states), decisions.gather(payload.sigma)
        target = towards(payload.latents[decisions.row], states, sigma)
        return NoisyVersions(decisions, NoisyRows(states, target, sigma, decisions.row.cpu()))


def towards(clean: Tensor, states: Tensor, sigma: Tensor) -> Tensor:
    """Velocity (M, ...) float32 of straight lines from states x_t at times t > 0 to x_0 at 0, (x_t - x_0) / t."""
    return (states.float() - clean.float()) / sigma.reshape(-1, *[1] * (clean.ndim - 1))
