"""Noisy versions of images, and the losses of methods that learn from x_0 only.

Shapes: B images, K draws of each, R = K * B rows, C channels, H x W latent pixels. sigma runs from 1 (noise) to 0.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from mmrl.errors import UserError

ERROR_FLOOR = 1e-10
NFT_ADVANTAGE_LIMIT = 5.0
NFT_ERROR_FLOOR = 1e-5


@dataclass(frozen=True)
class NoisyRows:
    """K noisy versions of each of B images as one batch, ordered by draw: k0b0 k0b1 .. k1b0 .."""

    latents: Tensor
    """x_t = (1 - sigma) x_0 + sigma noise (R, C, H, W)."""
    target: Tensor
    """Velocity to match, noise - x_0 (R, C, H, W)."""
    sigma: Tensor
    """Time (R,) float32."""
    image: Tensor
    """Index of each row's image (R,) int64, on the CPU; selects its text rows and its advantage."""

    def __len__(self) -> int:
        return len(self.sigma)

    def select(self, rows: slice) -> NoisyRows:
        """Select some rows for a smaller batch, with the same draws."""
        return NoisyRows(self.latents[rows], self.target[rows], self.sigma[rows], self.image[rows])

    def matching_error(self, velocity: Tensor) -> Tensor:
        """Mean squared distance (R,) float32 of velocities (R, C, H, W) to the target."""
        # float32 before the difference: near the target, bfloat16 leaves mostly rounding error
        return (velocity.float() - self.target.float()).square().flatten(1).mean(1)


def stack_timesteps(
    images: Tensor,
    draws: int,
    *,
    generator: torch.Generator,
    sigma: Tensor | None = None,
) -> NoisyRows:
    """Draw K pairs of time and noise per image and stack the noisy images into one batch.

    Args:
        images: x_0 (B, C, H, W).
        draws: K, at least 1.
        generator: source of times and noise, which are drawn on its device.
        sigma: times (K,) for all images or (K, B), between 0 and 1; None draws them uniformly, one from each of K
            equal intervals.

    Returns:
        The K * B rows. Splitting them into smaller batches does not change them.

    Raises:
        UserError: incompatible shapes, or times outside 0..1.
    """
    if draws < 1 or images.ndim < 2:
        raise UserError(
            f"draws={draws} must be at least 1 and images must have a batch dimension, got shape {tuple(images.shape)}"
        )
    count = len(images)
    times = stratified(draws, count, generator) if sigma is None else _checked(sigma, draws, count)
    # one draw for all rows, so that `select` splits a batch without changing any noise
    noise = torch.randn((draws, *images.shape), generator=generator, device=generator.device).to(images.device)
    times = times.to(images.device)
    # draw-major: row k * B + b belongs to image b, which the index below repeats
    clean = images.detach().repeat(draws, *[1] * (images.ndim - 1))
    return mix(clean, noise.flatten(0, 1), times.flatten(), torch.arange(count).repeat(draws))


def mix(clean: Tensor, noise: Tensor, sigma: Tensor, image: Tensor) -> NoisyRows:
    """Noisy versions x_t = (1 - sigma) x_0 + sigma noise of `clean` (R, C, H, W), with the velocities to match.

    `sigma` is (R,) float32; `image` (R,) int64 on the CPU is the index of each row's image.
    """
    # mixed in float32 and then rounded: the target stays exact while x_t has the network's precision
    wide, weight = clean.float(), sigma.reshape(-1, *[1] * (clean.ndim - 1))
    return NoisyRows(((1 - weight) * wide + weight * noise).to(clean.dtype), noise - wide, sigma, image)


def stratified(draws: int, count: int, generator: torch.Generator) -> Tensor:
    """One time in each of K equal intervals of 0..1, for each of `count` images (K, count)."""
    offset = torch.rand(draws, count, generator=generator, device=generator.device)
    lower = torch.arange(draws, device=generator.device)[:, None]
    # the offset of each interval is random, so the K times are stratified and still uniform over 0..1
    return (lower + offset) / draws


def pseudo_log_likelihood(error: Tensor, sigma: Tensor, weighting: str = "ghuber", power: float = 0.25) -> Tensor:
    """Turn matching errors into the pseudo log-likelihoods that AWM uses as log-probabilities.

    With l = error, t = sigma, e = 1e-10 and p = power:

    * uniform: -l, up to a constant the log-likelihood bound of the pretraining loss
    * t: -t l
    * t2: -t^2 l
    * huber: -t (sqrt(l + e) - sqrt(e))
    * ghuber: -(t / p) ((l + e)^p - e^p); its gradient weights rows by t (l + e)^(p - 1), so rows that already match
      have more weight

    Args:
        error: mean squared distance to the target velocity (R,), of `NoisyRows.matching_error`.
        sigma: time (R,).
        weighting: one of `WEIGHTINGS`.
        power: p, above 0; read by ghuber only.

    Returns:
        (R,), float64 if the error is, otherwise float32; computed in float64.

    Raises:
        ValueError: different shapes.

    Gradient: through error.

    Source: AWM, arXiv 2509.25050; scxue/advantage_weighted_matching scripts/train_sd3_awm.py.
    """
    if error.shape != sigma.shape:
        raise ValueError(f"error {tuple(error.shape)} and sigma {tuple(sigma.shape)} must have the same shape, (R,).")
    # (l + e)^p - e^p subtracts numbers of almost equal size when l is small; float32 would lose the result
    likelihood = WEIGHTINGS[weighting](error.double(), sigma.double(), power)
    return likelihood if error.dtype == torch.float64 else likelihood.float()


def nft_weight(advantage: Tensor) -> Tensor:
    """Clip advantages (R,) to +-5 and map them to 0..1: the probability of a good image that `nft_loss` weights by.

    Source: DiffusionNFT, arXiv 2509.16117; NVlabs/DiffusionNFT scripts/train_nft_sd3.py.
    """
    limited = advantage.clamp(-NFT_ADVANTAGE_LIMIT, NFT_ADVANTAGE_LIMIT)
    # advantage 0 becomes 0.5, where good and bad pull equally hard
    return limited / NFT_ADVANTAGE_LIMIT / 2 + 0.5


def nft_loss(
    velocity: Tensor, velocity_old: Tensor, noisy: NoisyRows, clean: Tensor, weight: Tensor, beta: float
) -> Tensor:
    """Loss of DiffusionNFT: good images pull a mixture of new and old velocity, bad ones pull its mirror image.

    With v+ = beta v + (1 - beta) v_old, v- = (1 + beta) v_old - beta v and x+- = x_t - sigma v+-, the loss of a row is
    5 / beta [r mean((x+ - x_0)^2) / w+ + (1 - r) mean((x- - x_0)^2) / w-], where w+- is the mean absolute error of x+-
    (at least 1e-5) and 5 undoes the division of `nft_weight`.

    Args:
        velocity: of the policy (R, C, H, W).
        velocity_old: of the policy that made the images (R, C, H, W).
        noisy: the rows; latents and sigma are read.
        clean: image of each row (R, C, H, W).
        weight: r of each row (R,), 0..1, of `nft_weight`.
        beta: distance of the mixtures from the old velocity, above 0.

    Returns:
        (R,) float32, computed in float64.

    Raises:
        ValueError: incompatible shapes.

    Gradient: through velocity; w+-, r and the old velocity are constants.

    Source: DiffusionNFT, arXiv 2509.16117; NVlabs/DiffusionNFT scripts/train_nft_sd3.py.
    """
    if not velocity.shape == velocity_old.shape == noisy.latents.shape == clean.shape:
        shapes = [tuple(x.shape) for x in (velocity, velocity_old, noisy.latents, clean)]
        raise ValueError(
            f"velocity, velocity_old, latents and clean must have the same shape (R, C, H, W), got {shapes}."
        )
    if weight.shape != noisy.sigma.shape:
        raise ValueError(f"weight has the shape {tuple(weight.shape)}; must be {tuple(noisy.sigma.shape)}.")
    # float64, as the error weights of the public code are
    new = velocity.double()
    old = velocity_old.detach().double()
    r = weight.detach().double()
    good = _nft_error(beta * new + (1 - beta) * old, noisy, clean)
    bad = _nft_error((1 + beta) * old - beta * new, noisy, clean)
    # v+ and v- move by beta times the change of v; 1 / beta makes the gradient independent of beta
    return (NFT_ADVANTAGE_LIMIT / beta * (r * good + (1 - r) * bad)).float()


def _checked(sigma: Tensor, draws: int, count: int) -> Tensor:
    if sigma.shape not in ((draws,), (draws, count)):
        raise UserError(f"sigma has the shape {tuple(sigma.shape)}; must be ({draws},) or ({draws}, {count})")
    if not bool(((sigma >= 0) & (sigma <= 1)).all()):
        raise UserError(f"sigma must be between 0 and 1, but ranges from {sigma.min():.3g} to {sigma.max():.3g}")
    # one time for all images (K,) or one per image (K, B)
    return sigma.float().reshape(draws, -1).expand(draws, count)


def _nft_error(mixed: Tensor, noisy: NoisyRows, clean: Tensor) -> Tensor:
    """Squared error of the predicted clean image divided by its mean absolute error, per row."""
    sigma = noisy.sigma.double().reshape(-1, *[1] * (clean.ndim - 1))
    miss = (noisy.latents.double() - sigma * mixed - clean.detach().double()).flatten(1)
    # detached: the divisor makes rows of all times comparable and must not be trained
    scale = miss.detach().abs().mean(1).clamp(min=NFT_ERROR_FLOOR)
    return miss.square().mean(1) / scale


WEIGHTINGS: dict[str, Callable[[Tensor, Tensor, float], Tensor]] = {
    "uniform": lambda error, sigma, power: -error,
    "t": lambda error, sigma, power: -sigma * error,
    "t2": lambda error, sigma, power: -sigma.square() * error,
    "huber": lambda error, sigma, power: -sigma * ((error + ERROR_FLOOR).sqrt() - ERROR_FLOOR**0.5),
    "ghuber": lambda error, sigma, power: -sigma / power * ((error + ERROR_FLOOR) ** power - ERROR_FLOOR**power),
}
"""Functions that turn matching errors, times and the exponent into pseudo log-likelihoods."""
