"""Generative processes: rectified flow, and the paper's DDIM.

Shapes: B rows, C channels, T frames, N x N points. x_0 is an encoded flow, e standard normal noise.

* rectified: x_s = (1 - s) x_0 + s e with s from 1 (noise) to 0, v = e - x_0, as everywhere in `diffusion`. A paper that
  counts the other way, x_tau = (1 - tau) e + tau x_1, has tau = 1 - s and minus this velocity.
* ddim: x_t = sqrt(a_t) x_0 + sqrt(1 - a_t) e with a_t the running product of 1 - beta, t of 0..999, and
  v = sqrt(a_t) e - sqrt(1 - a_t) x_0. The schedule, times and steps are those of diffusers.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any, TypeAlias

import torch
from torch import Tensor

from diffusion.matching.losses import mix
from diffusion.sampling.latent_sampler import euler_ode
from robotics.flow3d.model.world_model_settings import ProcessConfig

FlowProcess: TypeAlias = "RectifiedProcess | DdimProcess"
Predict = Callable[[Tensor, Tensor], Tensor]
"""(noisy (B, C, T, N, N), time (B,)) -> prediction (B, C, T, N, N)."""
BETA_FIRST, BETA_LAST, TRAIN_STEPS = 0.00085, 0.012, 1000


class _Process:
    def __init__(self, parameterisation: str) -> None:
        self.parameterisation = parameterisation


class RectifiedProcess(_Process):
    """Straight paths between noise and flow, followed in even Euler steps.

    Times are s = 1 - U^2 with U uniform: half of them above 3/4, because the goal of the motion is decided near
    the noise.
    """

    def times(self, rows: int, generator: torch.Generator) -> Tensor:
        """(rows,) float32 training times, on the CPU."""
        # on the CPU: the same times on every device
        return 1 - torch.rand(rows, generator=generator).square()

    def noisy(self, clean: Tensor, noise: Tensor, time: Tensor) -> Tensor:
        """Flow (B, C, T, N, N) with the noise of its time (B,)."""
        return mix(clean, noise, time, torch.arange(len(clean))).latents

    def target(self, clean: Tensor, noise: Tensor, time: Tensor) -> Tensor:
        """The network's target (B, C, T, N, N)."""
        # x0 is the default: a nearly deterministic target, where the network need not copy the noise out
        return clean if self.parameterisation == "x0" else noise - clean

    def sample(self, predict: Predict, noise: Tensor, steps: int) -> Tensor:
        """Follow the network's predictions from noise (B, C, T, N, N) to flow."""

        def velocity(latents: Tensor, sigma: Tensor) -> Tensor:
            # the Euler solver follows velocities, whichever quantity the network predicts
            return self.velocity(predict(latents, sigma.expand(len(latents))), latents, sigma)

        return euler_ode(velocity, noise, sigma_grid(steps))

    def velocity(self, found: Tensor, noisy: Tensor, time: Tensor) -> Tensor:
        """The velocity, noise minus flow, implied by a prediction (B, C, T, N, N) at times (B,) above 0."""
        if self.parameterisation == "v":
            return found
        # x_s - x_0 = s (e - x_0); sampling never asks at s = 0, its last step starts above it
        return (noisy - found) / time.reshape(-1, *[1] * (noisy.ndim - 1))

    def network_time(self, time: Tensor) -> Tensor:
        """Times (B,) as numbers in 0..1000, the network's input."""
        # the time embedding is that of diffusers' networks
        return time * TRAIN_STEPS


def sigma_grid(steps: int) -> Tensor:
    """(steps + 1,) times of even Euler steps, from 1 to 0."""
    return torch.linspace(1, 0, steps + 1)


class DdimProcess(_Process):
    """The paper's diffusion: 1000 times, betas on a line from 0.00085 to 0.012, sampled by DDIM without noise.

    Source: Hoyyyaard/3DFlowAction, AnimateDiff's noise_scheduler_kwargs (steps_offset 1, clip_sample false).
    """

    def times(self, rows: int, generator: torch.Generator) -> Tensor:
        """(rows,) float32 training times, on the CPU."""
        return torch.randint(TRAIN_STEPS, (rows,), generator=generator).float()

    def noisy(self, clean: Tensor, noise: Tensor, time: Tensor) -> Tensor:
        """Flow (B, C, T, N, N) with the noise of its time (B,)."""
        found: Tensor = self.scheduler.add_noise(clean, noise, time.long())
        return found

    def target(self, clean: Tensor, noise: Tensor, time: Tensor) -> Tensor:
        """The network's target (B, C, T, N, N)."""
        if self.parameterisation == "v":
            velocity: Tensor = self.scheduler.get_velocity(clean, noise, time.long())
            return velocity
        return clean if self.parameterisation == "x0" else noise

    def sample(self, predict: Predict, noise: Tensor, steps: int) -> Tensor:
        """Follow the network's predictions from noise (B, C, T, N, N) to flow."""
        self.scheduler.set_timesteps(steps)
        flow = noise
        for time in self.scheduler.timesteps.tolist():
            # one time for all rows, as the network expects a time for each
            found = predict(flow, torch.full((len(flow),), float(time), device=flow.device))
            flow = self.scheduler.step(found, time, flow, eta=0.0).prev_sample
        return flow

    def network_time(self, time: Tensor) -> Tensor:
        """Times (B,) as numbers in 0..1000, the network's input."""
        # already 0..999
        return time

    @cached_property
    def scheduler(self) -> Any:
        """The DDIMScheduler of diffusers."""
        from diffusers import DDIMScheduler

        return DDIMScheduler(
            num_train_timesteps=TRAIN_STEPS,
            beta_start=BETA_FIRST,
            beta_end=BETA_LAST,
            beta_schedule="linear",
            # flow in normalised coordinates may leave -1..1, for example for points outside the image
            clip_sample=False,
            steps_offset=1,
            timestep_spacing="leading",
            prediction_type=PREDICTION_TYPES[self.parameterisation],
        )


def guided(without: Tensor, with_text: Tensor, scale: float) -> Tensor:
    """Prediction pushed away from the one without instruction: without + scale (with_text - without).

    Source: Ho and Salimans, arXiv 2207.12598, eq. 6 with scale = 1 + their w.
    """
    return without + scale * (with_text - without)


def make_process(config: ProcessConfig) -> FlowProcess:
    """The process of a configuration."""
    return KINDS[config.kind](config.parameterisation)


PREDICTION_TYPES = {"eps": "epsilon", "v": "v_prediction", "x0": "sample"}
KINDS: dict[str, type[RectifiedProcess | DdimProcess]] = {"rectified": RectifiedProcess, "ddim": DdimProcess}
