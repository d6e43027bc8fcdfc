"""From a flow to noise and back: rectified flow, and the diffusion of the paper.

Shapes: B rows, C channels, T frames, N x N points. x_0 is an encoded flow, e standard normal noise.

* rectified: x_s = (1 - s) x_0 + s e with s from 1 (noise) to 0, v = e - x_0, as everywhere in `diffusion`. A paper that
  counts the other way, x_tau = (1 - tau) e + tau x_1, has tau = 1 - s and minus this velocity.
* ddim: x_t = sqrt(a_t) x_0 + sqrt(1 - a_t) e with a_t the running product of 1 - beta, t of 0..999, and
  v = sqrt(a_t) e - sqrt(1 - a_t) x_0. The schedule, times and steps are those of diffusers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from diffusion.forward_process import mix
from diffusion.guidance import euler_ode
from robotics.flow3d.model.settings import ProcessConfig

Predict = Callable[[Tensor, Tensor], Tensor]
"""(noisy (B, C, T, N, N), time (B,)) -> what the network predicts (B, C, T, N, N)."""
BETA_FIRST, BETA_LAST, TRAIN_STEPS = 0.00085, 0.012, 1000


class FlowProcess(ABC):
    """How clean flow becomes noisy, what the network predicts of it, and how flow is sampled."""

    def __init__(self, parameterisation: str) -> None:
        self.parameterisation = parameterisation

    @abstractmethod
    def times(self, rows: int, generator: torch.Generator) -> Tensor:
        """Times at which rows are trained (rows,) float32, on the CPU."""

    @abstractmethod
    def noisy(self, clean: Tensor, noise: Tensor, time: Tensor) -> Tensor:
        """Flow (B, C, T, N, N) with the noise of its time (B,)."""

    @abstractmethod
    def target(self, clean: Tensor, noise: Tensor, time: Tensor) -> Tensor:
        """What the network is to predict (B, C, T, N, N)."""

    @abstractmethod
    def sample(self, predict: Predict, noise: Tensor, steps: int) -> Tensor:
        """Follow the network's predictions from noise (B, C, T, N, N) to flow."""

    @abstractmethod
    def network_time(self, time: Tensor) -> Tensor:
        """Times (B,) as numbers of 0..1000, as networks were trained to read them."""


class RectifiedProcess(FlowProcess):
    """Straight paths between noise and flow, followed in even Euler steps.

    Times are s = 1 - U^2 with U uniform: half of them above 3/4, because near the noise it is decided where the object
    goes.
    """

    def times(self, rows: int, generator: torch.Generator) -> Tensor:
        """See `FlowProcess.times`."""
        return 1 - torch.rand(rows, generator=generator).square()

    def noisy(self, clean: Tensor, noise: Tensor, time: Tensor) -> Tensor:
        """See `FlowProcess.noisy`."""
        return mix(clean, noise, time, torch.arange(len(clean))).latents

    def target(self, clean: Tensor, noise: Tensor, time: Tensor) -> Tensor:
        """See `FlowProcess.target`."""
        return clean if self.parameterisation == "x0" else noise - clean

    def sample(self, predict: Predict, noise: Tensor, steps: int) -> Tensor:
        """See `FlowProcess.sample`."""

        def velocity(latents: Tensor, sigma: Tensor) -> Tensor:
            return self.velocity(predict(latents, sigma.expand(len(latents))), latents, sigma)

        return euler_ode(velocity, noise, sigma_grid(steps))

    def velocity(self, found: Tensor, noisy: Tensor, time: Tensor) -> Tensor:
        """The velocity that a prediction means.

        Args:
            found: (B, C, T, N, N) what the network predicts.
            noisy: (B, C, T, N, N) what it was given.
            time: (B,) or one number for all, above 0.

        Returns:
            (B, C, T, N, N) noise minus flow.
        """
        if self.parameterisation == "v":
            return found
        return (noisy - found) / time.reshape(-1, *[1] * (noisy.ndim - 1))

    def network_time(self, time: Tensor) -> Tensor:
        """See `FlowProcess.network_time`."""
        return time * TRAIN_STEPS


def sigma_grid(steps: int) -> Tensor:
    """(steps + 1,) times of even Euler steps, from 1 to 0."""
    return torch.linspace(1, 0, steps + 1)


class DdimProcess(FlowProcess):
    """The paper's diffusion: 1000 times, betas on a line from 0.00085 to 0.012, sampled by DDIM without noise.

    Source: Hoyyyaard/3DFlowAction, AnimateDiff's noise_scheduler_kwargs (steps_offset 1, clip_sample false).
    """

    def times(self, rows: int, generator: torch.Generator) -> Tensor:
        """See `FlowProcess.times`."""
        return torch.randint(TRAIN_STEPS, (rows,), generator=generator).float()

    def noisy(self, clean: Tensor, noise: Tensor, time: Tensor) -> Tensor:
        """See `FlowProcess.noisy`."""
        found: Tensor = self.scheduler.add_noise(clean, noise, time.long())
        return found

    def target(self, clean: Tensor, noise: Tensor, time: Tensor) -> Tensor:
        """See `FlowProcess.target`."""
        if self.parameterisation == "v":
            velocity: Tensor = self.scheduler.get_velocity(clean, noise, time.long())
            return velocity
        return clean if self.parameterisation == "x0" else noise

    def sample(self, predict: Predict, noise: Tensor, steps: int) -> Tensor:
        """See `FlowProcess.sample`."""
        self.scheduler.set_timesteps(steps)
        flow = noise
        for time in self.scheduler.timesteps.tolist():
            found = predict(flow, torch.full((len(flow),), float(time), device=flow.device))
            flow = self.scheduler.step(found, time, flow, eta=0.0).prev_sample
        return flow

    def network_time(self, time: Tensor) -> Tensor:
        """See `FlowProcess.network_time`."""
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
KINDS: dict[str, type[FlowProcess]] = {"rectified": RectifiedProcess, "ddim": DdimProcess}
