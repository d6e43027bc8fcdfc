"""Sampling times, the choice of stochastic trained steps, and solvers without log-probabilities.

Shapes: S steps, B rows (images), C channels, H x W latent pixels. A grid (S + 1,) descends from about 1 (noise) to 0.
"""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from diffusion.sampling.steps import KERNELS, OdeStep, StepKernel, sample_step
from mmrl.errors import UserError

Noise = torch.Generator | list[torch.Generator] | None
"""One generator for all rows, or one per row so that images do not depend on their batch."""

RANDOM_FROM, RANDOM_TO = 0.3, 0.9  # times between which SA-Solver may add noise
SA_FIRST_SIGMA = 0.999


def shift_sigmas(sigmas: Tensor, shift: float) -> Tensor:
    """Shift times 0..1 towards the noise, s sigma / (1 + (s - 1) sigma) for the shift s > 0; 1 / s inverts s.

    Source: Stable Diffusion 3, arXiv 2403.03206, eq. 23.
    """
    return shift * sigmas / (1 + (shift - 1) * sigmas)


def sa_solver_grid(sigmas: Tensor) -> Tensor:
    """Adapt a grid (S + 1,), S >= 2, to SA-Solver: start at 0.999 at most, end with half of the time before the last.

    The solver's log-SNR is infinite at pure noise, and a tiny last step is unstable.

    Source: scxue/advantage_weighted_matching, SA-Solver of the rollout (which changes the scheduler in place).
    """
    if len(sigmas) < 3:
        raise UserError(f"the grid has {len(sigmas) - 1} steps; SA-Solver needs at least 2")
    adapted = sigmas.clone()
    # Stable Diffusion's grids begin below it, at a step of training that its UNet knows
    adapted[0] = adapted[0].clamp(max=SA_FIRST_SIGMA)
    return _halved_end(adapted)


def sde_window(steps: int, size: int, low: int, high: int, generator: torch.Generator) -> range:
    """Draw the window of consecutive stochastic steps that are trained; the others follow the ODE.

    Source: Flow-GRPO-Fast, yifan123/flow_grpo scripts/train_sd3_fast.py (low 0, high S // 2).
    """
    if not 1 <= size <= high - low or not 0 <= low < high <= steps:
        raise UserError(
            f"a window of {size} steps within {low}..{high} of {steps} steps; must have 0 <= low, "
            "low + size <= high <= steps and size >= 1"
        )
    drawn = torch.randint(low, high - size + 1, (), generator=generator, device=generator.device)
    # read on the host: the window decides which steps are stochastic, that is, control flow
    start = int(drawn)
    return range(start, start + size)


def moving_window(
    done: int, size: int, low: int, high: int, schedule: str, every: int, stride: int = 1, *, restart: bool = True
) -> range:
    """The window of stochastic trained steps, at a position that moves from noise to image during training.

    The window stays at a position for `every` rollouts (progressive), for a number that falls linearly along the path
    to a quarter of that (decay), or for one that falls by a factor exp(-0.1) per step from step 13 on (exp_decay).

    Args:
        done: rollouts before this one.
        size: number of steps in the window.
        low: first step of the first position.
        high: step before which the last position ends.
        schedule: one of `STAYS`.
        every: rollouts at a position.
        stride: steps from one position to the next.
        restart: whether to return to the first position after the last; otherwise the window stays at the last.

    Source: MixGRPO, arXiv 2507.21802, section 3.3; Tencent-Hunyuan/MixGRPO fastvideo/utils/grpo_states.py, where the
        window also runs past the last position and loses steps there.
    """
    # positions that end at `high` at the latest, so that no step of the window is lost
    starts = range(low, high - size + 1, stride)
    stays = [STAYS[schedule](start, high, every) for start in starts]
    # computed from the number of rollouts alone, so a resumed run needs no saved position
    left = done % sum(stays) if restart else done
    for start, stay in zip(starts, stays, strict=True):
        if left < stay:
            return range(start, start + size)
        left -= stay
    return range(starts[-1], starts[-1] + size)


def _decayed_stay(start: int, high: int, every: int) -> int:
    least = max(1, every // 4)
    # linear in the position, never below a quarter of `every`
    return max(least, int(every * (1 - start / high) + least * start / high))


STAYS: dict[str, Callable[[int, int, int], int]] = {
    "progressive": lambda start, high, every: every,
    "decay": _decayed_stay,
    "exp_decay": lambda start, high, every: math.ceil(every * math.exp(-0.1 * max(0, start - 13))),
}
"""Rollouts that a moving window stays at a position, from (first step, `high`, `every`)."""


def trained_steps(steps: int, fraction: float = 0.99) -> range:
    """Return the steps that an update trains on, the first int(fraction * S).

    The default only skips the last step, whose Gaussian is so narrow that its log-ratio is mostly rounding error.

    Source: yifan123/flow_grpo config/grpo.py, train.timestep_fraction.
    """
    if not 0 < fraction <= 1 or int(steps * fraction) < 1:
        raise UserError(f"fraction={fraction} of {steps} steps trains none; use more steps or a fraction closer to 1")
    return range(int(steps * fraction))


class Solver(ABC):
    """Follows the flow from noise to image on a grid, one model call per step, without log-probabilities.

    For each index in 0..S - 1, evaluate the model at sigmas[index] and call `step`. Multistep solvers reset their
    history at index 0, so one solver can be reused for many rollouts.
    """

    sigmas: Tensor
    """The times of the model calls and 0 (S + 1,) float32."""

    @abstractmethod
    def step(self, velocity: Tensor, index: int, latents: Tensor, generator: Noise = None) -> Tensor:
        """Step from sigmas[index] to sigmas[index + 1], in order; `velocity` is the model's at `latents` (B, C, H, W).

        The result is computed in float32 and returned in the dtype of `latents`. Stochastic solvers need a generator.
        """


class _KernelSolver(Solver):
    """Stochastic steps of a kernel with a final ODE step; without a kernel, Euler's ODE steps."""

    def __init__(self, sigmas: Tensor, noise_level: float, kernel: Callable[[float, float], StepKernel] | None) -> None:
        self.sigmas = sigmas
        self._noise_level = noise_level
        # the last step follows the ODE, so a grid with a single step has no noise
        random = kernel is not None and noise_level and len(sigmas) > 2
        self._kernel = kernel(noise_level, float(sigmas[1])) if kernel is not None and random else OdeStep()

    def step(self, velocity: Tensor, index: int, latents: Tensor, generator: Noise = None) -> Tensor:
        times = self.sigmas[index], self.sigmas[index + 1]
        if isinstance(self._kernel, OdeStep) or index == len(self.sigmas) - 2:
            return OdeStep().transition(velocity, latents, *times)[0].to(latents.dtype)
        if generator is None:
            raise UserError(f"noise_level is {self._noise_level}, so every step needs a generator")
        return sample_step(self._kernel, velocity, latents, *times, _noise_like(latents, generator)).previous


def _noise_like(latents: Tensor, generator: torch.Generator | list[torch.Generator]) -> Tensor:
    """Standard normal noise (B, C, H, W) float32 from one generator, or from one for each row."""
    if isinstance(generator, list):
        # row by row: each row's noise then only depends on its own generator
        return torch.stack([_noise_like(row, source) for row, source in zip(latents, generator, strict=True)])
    return torch.randn(latents.shape, generator=generator, device=generator.device)


class _MultistepSolver(Solver):
    """A diffusers multistep scheduler on a separate grid."""

    def __init__(self, sigmas: Tensor, make_scheduler: Callable[[], Any], noise_level: float) -> None:
        self.sigmas = sigmas.clone()
        self.sigmas[-1] = 0.0  # the last step goes straight to x_0, also in families whose grid ends above 0
        self._make_scheduler = make_scheduler
        self._noise_level = noise_level
        self._next = 0

    def step(self, velocity: Tensor, index: int, latents: Tensor, generator: Noise = None) -> Tensor:
        if index not in (0, self._next):
            raise ValueError(f"step {index} does not follow step {self._next - 1}; the solver remembers earlier steps.")
        if generator is None and self._noise_level:
            raise UserError(f"noise_level is {self._noise_level}, so every step needs a generator")
        if index == 0:
            self._start()
        self._next = index + 1
        # multistep schedulers subtract earlier predictions: in bfloat16, the difference would be rounding error
        v, x = velocity.float(), latents.float()
        if index == len(self.sigmas) - 2:
            # The limit of any data-prediction solver at sigma 0, where its log-SNR is infinite.
            return (x - float(self.sigmas[index]) * v).to(latents.dtype)
        moved: Tensor = self._advance(v, index, x, generator)
        return moved.to(latents.dtype)

    def _start(self) -> None:
        steps = len(self.sigmas) - 1
        self._scheduler = self._make_scheduler()  # a fresh one: the history of the last rollout must not leak in
        self._scheduler.set_timesteps(steps)
        # after `set_timesteps`, which has computed its own grid from its own shift
        self._scheduler.sigmas = self.sigmas.clone()
        # SA-Solver reads its tau from these times; neither scheduler uses them for anything else
        self._scheduler.timesteps = self.sigmas[:-1].clone()
        # otherwise the scheduler searches its timesteps for its position at the first step
        self._scheduler.set_begin_index(0)

    def _advance(self, v: Tensor, index: int, x: Tensor, generator: Noise) -> Tensor:
        # The schedulers draw even if the noise has weight 0; this keeps them off the global generator.
        source = generator or torch.Generator(x.device).manual_seed(0)
        moved: Tensor = self._scheduler.step(v, self._scheduler.timesteps[index], x, generator=source).prev_sample
        if index == 0 and hasattr(self._scheduler, "last_sample"):
            # The first step is not corrected: it spans most of the log-SNR range.
            self._scheduler.last_sample = None
        return moved


def make_solver(name: str, sigmas: Tensor, noise_level: float = 0.0) -> Solver:
    """Build a solver on a grid.

    * euler: first order, deterministic
    * sa_solver: second-order predictor-corrector on `sa_solver_grid`, with noise tau = noise_level for
      0.3 <= sigma <= 0.9; the first step is not corrected and the last one returns the predicted image
    * dpm: second-order DPM-Solver++, deterministic; the last time before 0 is half of the one before it. In the grid's
      own step from 0.28 to 0.009, extrapolating from the previous step overshoots so far that Euler does better
    * flow_sde, dance_sde, cps, ddim, linear_sde: first order, stochastic steps of `diffusion.sampling.steps` at all
      times but the last

    Args:
        name: one of `SOLVERS`.
        sigmas: times (S + 1,) as `Family.sigma_grid` gives them; S is also the number of model calls.
        noise_level: tau of SA-Solver or the noise of a stochastic step, at least 0; 0 for the others.

    Returns:
        The solver.

    Raises:
        UserError: a noise level for a deterministic solver, or too few steps.

    Source: SA-Solver, arXiv 2309.05019, as scxue/advantage_weighted_matching sets it up; DPM-Solver++, arXiv
        2211.01095, as NVlabs/DiffusionNFT does; steps by diffusers.
    """
    return SOLVERS[name](sigmas, noise_level)


def _sa_solver(sigmas: Tensor, noise_level: float) -> Solver:
    def make_scheduler() -> Any:
        from diffusers import SASolverScheduler

        return SASolverScheduler(
            predictor_order=2,
            corrector_order=2,
            prediction_type="flow_prediction",
            use_flow_sigmas=True,
            lower_order_final=True,
            # called with the times that `_start` has set as timesteps
            tau_func=lambda sigma: noise_level if RANDOM_FROM <= sigma <= RANDOM_TO else 0.0,
        )

    return _MultistepSolver(sa_solver_grid(sigmas), make_scheduler, noise_level)


def _dpm_solver(sigmas: Tensor, noise_level: float) -> Solver:
    _refuse_noise("dpm", noise_level)

    def make_scheduler() -> Any:
        from diffusers import DPMSolverMultistepScheduler

        return DPMSolverMultistepScheduler(
            solver_order=2, prediction_type="flow_prediction", use_flow_sigmas=True, algorithm_type="dpmsolver++"
        )

    return _MultistepSolver(_halved_end(sigmas), make_scheduler, 0.0)


def _halved_end(sigmas: Tensor) -> Tensor:
    """The grid with its last time before 0 at half of the one before it."""
    adapted = sigmas.clone()
    # a grid of one step has no time before the last to halve
    if len(adapted) > 2:
        adapted[-2] = adapted[-3] / 2
    return adapted


def _euler_solver(sigmas: Tensor, noise_level: float) -> Solver:
    _refuse_noise("euler", noise_level)
    return _KernelSolver(sigmas, 0.0, None)


def _refuse_noise(name: str, noise_level: float) -> None:
    if noise_level:
        raise UserError(f"noise_level is {noise_level}, but the solver '{name}' adds no noise; set it to 0")


SOLVERS: dict[str, Callable[[Tensor, float], Solver]] = {
    "euler": _euler_solver,
    "sa_solver": _sa_solver,
    "dpm": _dpm_solver,
    **{name: functools.partial(_KernelSolver, kernel=kernel) for name, kernel in KERNELS.items()},
}
RANDOM_SOLVERS = ("sa_solver", *KERNELS)
"""Solvers that add noise if the noise level is above 0."""
