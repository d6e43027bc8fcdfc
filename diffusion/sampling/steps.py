r"""One sampler step as a Gaussian: mean, standard deviation and the log-probability of the result.

Shapes: B rows (images), C channels, H x W latent pixels. sigma runs from 1 (noise) to 0 (image) and a step goes from
sigma to sigma_next < sigma, so dt = sigma_next - sigma is negative. With x_t = (1 - sigma) x_0 + sigma noise and
velocity v = noise - x_0, a model's v contains x_0 = x - sigma v and noise = x + (1 - sigma) v.

Why an ODE sampler can be made stochastic: for every g, the marginals of dx = v dt stay the same if noise g dW is added
and the drift becomes v - (g^2 / 2) score (Fokker-Planck equation). The score of x_t given x_0 is -noise / sigma;
averaged over x_0 it is -(x + (1 - sigma) v) / sigma, so no second model is needed. One Euler-Maruyama step backwards in
time is then the Gaussian

    mean = x + v dt + (g^2 / 2) (x + (1 - sigma) v) / sigma dt,    std = g sqrt(-dt).

Flow-GRPO and DanceGRPO only differ in g. Everything is computed in float32 (float64 if both velocity and latents are
float64). Log-probabilities are means over pixels rather than sums, which is why clip ranges for these log-ratios are
as small as 1e-4.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from mmrl.core.payload import to_device
from mmrl.fields import bounded, check_fields

ELBO_NOISE_LEVEL = 0.7
ELBO_SIGMA_LIMIT = 0.99
LOG_SQRT_2PI = 0.5 * math.log(2 * math.pi)


@dataclass(frozen=True)
class StepResult:
    """Result of one step and its log-density."""

    mean: Tensor
    """Mean of the step's Gaussian (B, C, H, W) float32."""
    std: Tensor
    """Its standard deviation (B,) float32; sqrt(-dt) is included."""
    previous: Tensor
    """Latents after the step (B, C, H, W) in the dtype of those before it; no gradient."""
    logp: Tensor
    """`StepKernel.log_prob` of `previous` (B,) float32."""


class StepKernel(ABC):
    """The Gaussian that one step draws from."""

    def __post_init__(self) -> None:
        check_fields(self)

    def transition(self, velocity: Tensor, latents: Tensor, sigma: Tensor, sigma_next: Tensor) -> tuple[Tensor, Tensor]:
        """Return the mean and standard deviation of the latents after the step.

        Args:
            velocity: the model's prediction at `latents` (B, C, H, W), any float dtype.
            latents: x at `sigma` (B, C, H, W), any float dtype.
            sigma: time before the step, () for all rows or (B,); above 0 for the SDE steps.
            sigma_next: time after it, () or (B,), smaller than `sigma`.

        Returns:
            mean (B, C, H, W) and std (B,), float32; float64 if velocity and latents are.

        Raises:
            ValueError: incompatible shapes.

        Gradient: through velocity and latents.
        """
        if velocity.shape != latents.shape or latents.ndim < 2:
            shapes = f"velocity {tuple(velocity.shape)} and latents {tuple(latents.shape)}"
            raise ValueError(f"{shapes} must have the same shape, (B, C, H, W).")
        rows = len(latents)
        for time in (sigma, sigma_next):
            if time.shape not in ((), (rows,)):
                raise ValueError(f"a time has the shape {tuple(time.shape)}; must be () or ({rows},).")
        # float16 and bfloat16 lose log-ratios of 1e-4; float64 stays, so that tests can check gradients numerically.
        wide = torch.float64 if velocity.dtype == latents.dtype == torch.float64 else torch.float32
        # one time per row, broadcast over the axes of images and videos alike
        column = (rows, *[1] * (latents.ndim - 1))
        s, s_next = (to_device(t, latents.device).to(wide).expand(rows).reshape(column) for t in (sigma, sigma_next))
        mean, std = self._gaussian(velocity.to(wide), latents.to(wide), s, s_next)
        # kernels work with std (B, 1, ...); everybody else reads one number per row
        return mean, std.flatten()

    @abstractmethod
    def _gaussian(self, v: Tensor, x: Tensor, s: Tensor, s_next: Tensor) -> tuple[Tensor, Tensor]:
        """`transition` in one dtype, with times (B, 1, 1, 1)."""

    def gradient_scale(self, sigma: Tensor, sigma_next: Tensor) -> Tensor:
        """Magnitude (B,) of the gradient of the log-density with respect to the velocity, for unit noise.

        The mean is affine in the velocity, with slope b, so the gradient is |b| / std.

        Source: Flash-GRPO, arXiv 2605.15980.
        """
        # C = 1 is enough: mean and std act on each latent number alone
        none, one = torch.zeros(len(sigma), 1, device=sigma.device), torch.ones(len(sigma), 1, device=sigma.device)
        mean, std = self.transition(one, none, sigma, sigma_next)
        # the difference of two means at x = 0 is the slope b, without a closed form for each kernel
        return (mean - self.transition(none, none, sigma, sigma_next)[0])[:, 0].abs() / std

    def spread(self, sigma: Tensor, sigma_next: Tensor) -> Tensor:
        """Standard deviation (B,) of steps between times (B,)."""
        none = torch.zeros(len(sigma), 1, device=sigma.device)
        return self.transition(none, none, sigma, sigma_next)[1]

    def log_prob(self, previous: Tensor, mean: Tensor, std: Tensor) -> Tensor:
        """Return the log-density (B,) float32 of the drawn latents (B, C, H, W), averaged over C, H and W.

        Mean and standard deviation come from `transition`; the result is NaN if std is 0, because there is no density.

        Gradient: through mean; `previous` is detached.

        Source: yifan123/flow_grpo flow_grpo/diffusers_patch/sd3_sde_with_logprob.py.
        """
        # `previous` is data: a gradient through it would cancel the one through the mean, which carries the learning.
        squares = _row_mean((previous.detach().to(mean.dtype) - mean).square())
        return -squares / (2 * std.square()) - std.log() - LOG_SQRT_2PI


@dataclass(frozen=True)
class OdeStep(StepKernel):
    """Deterministic Euler step of the probability-flow ODE, x + v dt; log-probabilities are NaN."""

    def _gaussian(self, v: Tensor, x: Tensor, s: Tensor, s_next: Tensor) -> tuple[Tensor, Tensor]:
        return x + (s_next - s) * v, torch.zeros_like(s)


@dataclass(frozen=True)
class FlowSdeStep(StepKernel):
    """SDE step with g = noise_level * sqrt(sigma / (1 - sigma)), the noise of Flow-GRPO.

    Source: Flow-GRPO, arXiv 2505.05470, eq. 9; yifan123/flow_grpo flow_grpo/diffusers_patch/sd3_sde_with_logprob.py.
    """

    sigma_max: float = bounded(above=0, below=1)
    """Second time of the grid; replaces sigma in 1 - sigma at the first time, where g would be (nearly) infinite."""
    noise_level: float = bounded(0.7, at_least=0)
    """0 gives the ODE."""

    def _gaussian(self, v: Tensor, x: Tensor, s: Tensor, s_next: Tensor) -> tuple[Tensor, Tensor]:
        # Only the denominator is replaced, and only at the grid's first time (1 or just below): g stays finite there
        # and keeps its form elsewhere.
        first = s > (1 + self.sigma_max) / 2
        spread = self.noise_level * (s / (1 - torch.where(first, self.sigma_max, s))).sqrt()
        return _reverse_sde(v, x, s, s_next, spread)


@dataclass(frozen=True)
class DanceSdeStep(StepKernel):
    """SDE step with constant g = eta, the noise of DanceGRPO.

    Source: DanceGRPO, arXiv 2505.07818; XueZeyue/DanceGRPO fastvideo/train_grpo_flux.py, flux_step.
    """

    eta: float = bounded(0.3, at_least=0)
    """0 gives the ODE."""

    def _gaussian(self, v: Tensor, x: Tensor, s: Tensor, s_next: Tensor) -> tuple[Tensor, Tensor]:
        return _reverse_sde(v, x, s, s_next, torch.full_like(s, self.eta))


@dataclass(frozen=True)
class LinearSdeStep(StepKernel):
    """SDE step with g = noise_level * sigma_max * sigma, the noise of Flash-GRPO.

    Source: Flash-GRPO, arXiv 2605.15980; Shredded-Pork/Flash-GRPO
        flow_grpo/diffusers_patch/wan2_1_pipeline_with_logprob2.py.
    """

    sigma_max: float = bounded(above=0, below=1)
    """Second time of the grid."""
    noise_level: float = bounded(1.0, at_least=0)
    """0 gives the ODE."""

    def _gaussian(self, v: Tensor, x: Tensor, s: Tensor, s_next: Tensor) -> tuple[Tensor, Tensor]:
        return _reverse_sde(v, x, s, s_next, self.noise_level * self.sigma_max * s)


@dataclass(frozen=True)
class CpsStep(StepKernel):
    """Coefficient-preserving step: part of the predicted noise is replaced by fresh noise of the same size.

    mean = (1 - sigma') x_0 + sqrt(sigma'^2 - std^2) noise with std = sigma' sin(noise_level pi / 2), so x_0 and noise
    keep the weights 1 - sigma' and sigma' of the path for any step size. This gives the variance of the path if x_0 is
    the true image. A model predicts a mean over possible images, so the variance between them is lost. The noise also
    does not shrink with the step size.

    Source: Flow-CPS, arXiv 2509.05952; X-GenGroup/Flow-Factory, flow-matching scheduler, dynamics "CPS".
    """

    noise_level: float = bounded(0.8, at_least=0, at_most=1)
    """0 gives the ODE, 1 replaces all of the noise."""

    def _gaussian(self, v: Tensor, x: Tensor, s: Tensor, s_next: Tensor) -> tuple[Tensor, Tensor]:
        angle = self.noise_level * math.pi / 2
        # cos and sin of one angle: the variances of old and fresh noise add up to sigma'^2
        # x - s v is the predicted image, x + (1 - s) v the predicted noise (module docstring)
        mean = (1 - s_next) * (x - s * v) + s_next * math.cos(angle) * (x + (1 - s) * v)
        return mean, s_next * math.sin(angle)

    def log_prob(self, previous: Tensor, mean: Tensor, std: Tensor) -> Tensor:
        """Return -(previous - mean)^2 (B,), averaged over C, H and W; std is not used.

        Like the public code, it omits 1 / (2 std^2) and the constants. All times then have equal weight in the ratio,
        which is no longer a ratio of densities.

        Gradient: through mean; `previous` is detached.
        """
        return -_row_mean((previous.detach().to(mean.dtype) - mean).square())


@dataclass(frozen=True)
class DdimStep(StepKernel):
    """DDIM step as in DDPO for Stable Diffusion 1: the fresh noise has the scale of the true reverse step.

    On the path x_t = sqrt(a) x_0 + sqrt(1 - a) noise of such a model, std = eta sqrt((1 - a') / (1 - a) (1 - a / a')).
    In the coordinates of a flow, `diffusion.families.stable_diffusion`, that is eta sigma' sqrt(1 - (r' / r)^2) with
    r = sigma / (1 - sigma), and the mean is that of `CpsStep`.

    Source: DDIM, arXiv 2010.02502, eq. 12 and 16; kvablack/ddpo-pytorch
        ddpo_pytorch/diffusers_patch/ddim_with_logprob.py.
    """

    eta: float = bounded(1.0, at_least=0, at_most=1)
    """1 is the ancestral sampler of DDPM; 0 is deterministic."""

    def _gaussian(self, v: Tensor, x: Tensor, s: Tensor, s_next: Tensor) -> tuple[Tensor, Tensor]:
        # r' / r, written so that it is 0 (all noise is fresh) from pure noise, where r is infinite
        ratio = s_next * (1 - s) / (s * (1 - s_next))
        fresh = self.eta**2 * (1 - ratio.square())
        # with eta = 1, rounding may leave a difference just below 0
        kept = (1 - fresh).clamp(min=0)
        mean = (1 - s_next) * (x - s * v) + s_next * kept.sqrt() * (x + (1 - s) * v)
        return mean, s_next * fresh.clamp(min=0).sqrt()


def sample_step(
    kernel: StepKernel, velocity: Tensor, latents: Tensor, sigma: Tensor, sigma_next: Tensor, noise: Tensor
) -> StepResult:
    """Take one step with given noise.

    The new latents are rounded to the dtype of the old ones before their log-probability is computed. An update that
    evaluates the stored latents then starts at a ratio of exactly 1, even in bfloat16.

    Args:
        kernel: Gaussian to draw from.
        velocity: the model's prediction at `latents` (B, C, H, W).
        latents: x at `sigma` (B, C, H, W).
        sigma: time before the step, () or (B,).
        sigma_next: time after it, () or (B,).
        noise: standard normal (B, C, H, W); the kernel scales it.

    Returns:
        The new latents, the Gaussian they come from and their log-probability.

    Gradient: mean and log-probability keep the gradient of velocity and latents; `previous` has none.
    """
    mean, std = kernel.transition(velocity, latents, sigma, sigma_next)
    drawn = mean + std.reshape(-1, *[1] * (mean.ndim - 1)) * noise.to(mean)
    previous = drawn.detach().to(latents.dtype)
    # scored after rounding, so the old log-probability is that of the latents that are stored
    return StepResult(mean, std, previous, kernel.log_prob(previous, mean, std))


def gaussian_kl(mean: Tensor, mean_ref: Tensor, std: Tensor) -> Tensor:
    """Exact KL divergence between two steps with equal standard deviation, averaged over C, H and W.

    Args:
        mean: of the policy's step (B, C, H, W).
        mean_ref: of the reference's step (B, C, H, W).
        std: (B,), sqrt(-dt) included, above 0.

    Returns:
        (B,) nats per latent number.

    Gradient: through mean; `mean_ref` is detached.

    Source: Flow-GRPO, arXiv 2505.05470, section 4.1.
    """
    return _row_mean((mean - mean_ref.detach()).square()) / (2 * std.square())


def flow_grpo_head_kl(mean: Tensor, mean_ref: Tensor, std: Tensor, sigma: Tensor, sigma_next: Tensor) -> Tensor:
    """Divergence as in the released Flow-GRPO code: without sqrt(-dt), |dt| times `gaussian_kl`.

    Coefficients published for one form do not suit the other: |dt| is 0.04 to 0.27 on a grid of ten steps. Means are
    (B, C, H, W), std (B,) with sqrt(-dt) included, times () or (B,), the result (B,).

    Gradient: through mean; `mean_ref` is detached.

    Source: yifan123/flow_grpo scripts/train_sd3_fast.py.
    """
    # sigma - sigma_next = |dt|, since times descend
    return gaussian_kl(mean, mean_ref, std) * (sigma - sigma_next).to(std)


def velocity_kl(
    velocity: Tensor, velocity_ref: Tensor, sigma: Tensor, kind: str = "uniform", scale: Tensor | float = 1.0
) -> Tensor:
    """Distance between two velocities at the same noisy latents.

    * uniform: scale^2 mean((v - v_ref)^2) over C, H and W
    * elbo: mean((v - v_ref)^2) / (2 g^2) with g = 0.7 sqrt(sigma / (1 - min(sigma, 0.99))), the noise of Flow-GRPO

    Args:
        velocity: of the policy (R, C, H, W).
        velocity_ref: of the anchor (reference, EMA or old policy), (R, C, H, W).
        sigma: time (R,); above 0 for elbo, which is infinite at 0.
        kind: one of `VELOCITY_KLS`.
        scale: factor of uniform distances (R,), such as `Family.prediction_scale`; 1 for flow models.

    Returns:
        (R,) float32.

    Raises:
        ValueError: different shapes.

    Gradient: through velocity; `velocity_ref` is detached.

    Source: scxue/advantage_weighted_matching scripts/train_sd3_awm.py.
    """
    if velocity.shape != velocity_ref.shape or sigma.shape != (len(velocity),):
        raise ValueError(
            f"velocities {tuple(velocity.shape)} and {tuple(velocity_ref.shape)} must have the same shape, and sigma "
            f"{tuple(sigma.shape)} must have one number per row."
        )
    squares = (velocity.float() - velocity_ref.detach().float()).square().flatten(1).mean(1)
    return squares * VELOCITY_KLS[kind](sigma.float(), scale)


def guard_log_ratio(logp: Tensor, logp_old: Tensor, mean: Tensor, mean_old: Tensor, std: Tensor) -> Tensor:
    """Log-ratio of GRPO-Guard, (logp - logp_old) std + mean((mean - mean_old)^2) / (2 std).

    With the drawn noise z and d = mean - mean_old, the plain log-ratio is mean(z d) / std - mean(d^2) / (2 std^2): its
    average is never 0 and its scale depends on the time. This log-ratio is mean(z d), which averages to 0, so one clip
    range works for all times. Multiplying by std also weights the gradient of each time by std.

    Log-probabilities and std, sqrt(-dt) included, are (B,), means (B, C, H, W), the result (B,).

    Gradient: through logp and mean.

    Source: GRPO-Guard, arXiv 2510.22319; X-GenGroup/Flow-Factory, trainer GRPOGuard.
    """
    moved = _row_mean((mean - mean_old.detach()).square())
    return (logp - logp_old.detach()) * std + moved / (2 * std)


def _reverse_sde(v: Tensor, x: Tensor, s: Tensor, s_next: Tensor, spread: Tensor) -> tuple[Tensor, Tensor]:
    """The step of the module docstring for g = spread."""
    dt = s_next - s
    # (x + (1 - s) v) / s is minus the score; dt < 0 turns the reverse-time drift of the SDE around
    mean = x + dt * v + 0.5 * spread.square() * dt * (x + (1 - s) * v) / s
    # sqrt(-dt) belongs to std here, unlike in the released Flow-GRPO code (`flow_grpo_head_kl`)
    return mean, spread * (-dt).sqrt()


def _row_mean(x: Tensor) -> Tensor:
    # a mean and not a sum: published clip ranges and KL coefficients are for means over latent numbers
    return x.flatten(1).mean(1)


STEPS: dict[str, Callable[..., StepKernel]] = {
    "ode": OdeStep,
    "flow_sde": FlowSdeStep,
    "dance_sde": DanceSdeStep,
    "cps": CpsStep,
    "ddim": DdimStep,
    "linear_sde": LinearSdeStep,
}
KERNELS: dict[str, Callable[[float, float], StepKernel]] = {
    "flow_sde": lambda noise_level, sigma_max: FlowSdeStep(sigma_max, noise_level),
    "dance_sde": lambda noise_level, sigma_max: DanceSdeStep(noise_level),
    "cps": lambda noise_level, sigma_max: CpsStep(noise_level),
    "ddim": lambda noise_level, sigma_max: DdimStep(noise_level),
    "linear_sde": lambda noise_level, sigma_max: LinearSdeStep(sigma_max, noise_level),
}
"""Stochastic steps of a flow model, built from the noise level and the second time of the grid."""
BOUNDED = ("cps", "ddim")
"""Kernels with a noise level of at most 1, whose step to sigma 0 has no noise."""
VELOCITY_KLS: dict[str, Callable[[Tensor, Tensor | float], Tensor | float]] = {
    "uniform": lambda sigma, scale: scale**2,
    # (1 - sigma) / (2 eta^2 sigma) is 1 / (2 g^2); the cap keeps the weight at pure noise above 0
    "elbo": lambda sigma, scale: (1 - sigma.clamp(0, ELBO_SIGMA_LIMIT)) / (2 * ELBO_NOISE_LEVEL**2 * sigma),
}
