"""Noisy versions of finished images, for the methods that learn from x_0 alone (AWM, DiffusionNFT, ORW-CFM, AC-Flow).

Shapes: B images, K draws of each, R = K * B rows, C channels, H x W latent pixels. sigma runs from 1 (noise) to 0.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mmrl.errors import UserError


@dataclass(frozen=True)
class NoisyRows:
    """K noisy versions of each of B images as one batch, draw by draw: k0b0 k0b1 .. k1b0 .."""

    latents: Tensor
    """x_t = (1 - sigma) x_0 + sigma noise (R, C, H, W)."""
    target: Tensor
    """Velocity to match, noise - x_0 (R, C, H, W)."""
    sigma: Tensor
    """Time (R,) float32."""
    image: Tensor
    """Image that each row is a version of (R,) int64, on the CPU; selects its text rows and its advantage."""

    def __len__(self) -> int:
        return len(self.sigma)

    def select(self, rows: slice) -> NoisyRows:
        """Some of the rows, for a smaller batch; the draws stay what they are."""
        return NoisyRows(self.latents[rows], self.target[rows], self.sigma[rows], self.image[rows])

    def matching_error(self, velocity: Tensor) -> Tensor:
        """Mean squared distance (R,) float32 of velocities (R, C, H, W) to the target."""
        return (velocity.float() - self.target.float()).square().flatten(1).mean(1)


def stack_timesteps(
    images: Tensor,
    draws: int,
    *,
    generator: torch.Generator,
    sigma: Tensor | None = None,
) -> NoisyRows:
    """Draw K pairs of time and noise for each image and stack the noisy images as one batch.

    Args:
        images: x_0 (B, C, H, W).
        draws: K, at least 1.
        generator: source of times and noise; its device decides where they are drawn.
        sigma: times (K,) for all images or (K, B), between 0 and 1; None draws them uniformly, one from each of K
            equal intervals.

    Returns:
        The K * B rows. Cutting them into smaller batches changes none of them.

    Raises:
        UserError: shapes that do not fit, or times outside 0..1.
    """
    if draws < 1 or images.ndim < 2:
        raise UserError(
            f"draws={draws} must be at least 1 and images need a batch, their shape is {tuple(images.shape)}"
        )
    count = len(images)
    times = stratified(draws, count, generator) if sigma is None else _checked(sigma, draws, count)
    noise = torch.randn((draws, *images.shape), generator=generator, device=generator.device).to(images.device)
    times = times.to(images.device)
    clean = images.detach().repeat(draws, *[1] * (images.ndim - 1))
    return mix(clean, noise.flatten(0, 1), times.flatten(), torch.arange(count).repeat(draws))


def mix(clean: Tensor, noise: Tensor, sigma: Tensor, image: Tensor) -> NoisyRows:
    """Noisy versions x_t = (1 - sigma) x_0 + sigma noise of `clean` (R, C, H, W), with the velocities to match.

    `sigma` is (R,) float32; `image` (R,) int64 on the CPU names the image of each row.
    """
    wide, weight = clean.float(), sigma.reshape(-1, *[1] * (clean.ndim - 1))
    return NoisyRows(((1 - weight) * wide + weight * noise).to(clean.dtype), noise - wide, sigma, image)


def stratified(draws: int, count: int, generator: torch.Generator) -> Tensor:
    """One time in each of K equal intervals of 0..1 for each source (K, count)."""
    offset = torch.rand(draws, count, generator=generator, device=generator.device)
    lower = torch.arange(draws, device=generator.device)[:, None]
    return (lower + offset) / draws


def _checked(sigma: Tensor, draws: int, count: int) -> Tensor:
    if sigma.shape not in ((draws,), (draws, count)):
        raise UserError(f"sigma has the shape {tuple(sigma.shape)}; must be ({draws},) or ({draws}, {count})")
    if not bool(((sigma >= 0) & (sigma <= 1)).all()):
        raise UserError(f"sigma must be between 0 and 1, it runs from {sigma.min():.3g} to {sigma.max():.3g}")
    return sigma.float().reshape(draws, -1).expand(draws, count)
