"""An autoencoder without training: the principal components of image patches as latent channels.

It replaces AutoencoderKL in tiny pipelines, where training one would take longer than everything else. A patch of p x p
pixels becomes one latent pixel with K channels: its coordinates along the K directions in which patches vary most.
Decoding is the linear inverse, which is lossless for K = 3 p^2.
"""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from mmrl.errors import UserError
from mmrl.hub.compat import ensure_torchvision

ensure_torchvision()

from diffusers import ModelMixin  # noqa: E402
from diffusers.configuration_utils import ConfigMixin, register_to_config  # noqa: E402
from diffusers.models.autoencoders.vae import DecoderOutput, DiagonalGaussianDistribution  # noqa: E402

NOISELESS = -60.0
"""Log-variance of the encoder's Gaussian: it is a point."""


def principal_directions(patches: Tensor, count: int) -> tuple[Tensor, Tensor, float]:
    """Mean (D,) of patches (N, D) float64, K directions (K, D) in which they vary most, and their size along them."""
    mean = patches.mean(0)
    directions = torch.linalg.eigh(torch.cov((patches - mean).T, correction=0))[1].flip(1)[:, :count].T
    # a direction and its opposite are equally good; the larger side is made the positive one
    largest = directions.gather(1, directions.abs().argmax(1, keepdim=True))
    deviation = float(((patches - mean) @ directions.T).std(correction=0))
    return mean, directions * largest.sign(), max(deviation, 1e-6)


class PatchAutoencoder(ModelMixin, ConfigMixin):
    """Linear patch autoencoder with the interface of diffusers' AutoencoderKL.

    `patch` p is a power of 2; `block_out_channels` has one entry for each doubling of it and one more, as
    AutoencoderKL.
    """

    @register_to_config
    def __init__(
        self,
        patch: int = 4,
        latent_channels: int = 12,
        scaling_factor: float = 1.0,
        shift_factor: float = 0.0,
        block_out_channels: tuple[int, ...] = (1, 1, 1),
    ) -> None:
        super().__init__()
        if patch < 1 or 2 ** (len(block_out_channels) - 1) != patch:
            raise UserError(f"patch={patch} must be 2 ** {len(block_out_channels) - 1}, from block_out_channels")
        if not 1 <= latent_channels <= 3 * patch * patch:
            raise UserError(f"latent_channels={latent_channels} must be between 1 and {3 * patch * patch}")
        self._patch = patch
        self.basis = nn.Parameter(torch.eye(latent_channels, 3 * patch * patch), requires_grad=False)
        self.mean = nn.Parameter(torch.zeros(3 * patch * patch), requires_grad=False)

    @classmethod
    def fit(cls, images: NDArray[np.uint8], patch: int = 4, latent_channels: int = 12) -> PatchAutoencoder:
        """Find the K directions in which p x p patches of images uint8 (N, h, w, 3) vary most."""
        levels = (1,) * (int(math.log2(patch)) + 1)
        model = cls(patch=patch, latent_channels=latent_channels, block_out_channels=levels)
        pixels = torch.from_numpy(images).permute(0, 3, 1, 2).float() / 127.5 - 1
        patches = model._patches(pixels).transpose(1, 2).reshape(-1, 3 * patch * patch).double()
        mean, directions, deviation = principal_directions(patches, latent_channels)
        model.mean.data.copy_(mean)
        model.basis.data.copy_(directions)
        model.register_to_config(scaling_factor=1.0 / deviation)
        return model.eval()

    def encode(self, x: Tensor, return_dict: bool = True) -> Any:
        """A Gaussian (B, K, h / p, w / p) of no width, from images (B, 3, h, w) in -1..1."""
        patch = self._patch
        coordinates = self.basis @ (self._patches(x) - self.mean[:, None])
        latents = coordinates.unflatten(2, (x.shape[2] // patch, x.shape[3] // patch))
        gaussian = DiagonalGaussianDistribution(torch.cat([latents, torch.full_like(latents, NOISELESS)], 1))
        return SimpleNamespace(latent_dist=gaussian) if return_dict else (gaussian,)

    def decode(self, z: Tensor, return_dict: bool = True, generator: Any = None) -> Any:
        """Images (B, 3, p H, p W) of latents (B, K, H, W); `generator` is not used."""
        patch = self._patch
        patches = self.basis.T @ z.flatten(2) + self.mean[:, None]
        images = nn.functional.fold(patches, (z.shape[2] * patch, z.shape[3] * patch), patch, stride=patch)
        return DecoderOutput(sample=images) if return_dict else (images,)

    def _patches(self, x: Tensor) -> Tensor:
        """Patches of images as columns (B, 3 p^2, patches)."""
        return nn.functional.unfold(x, self._patch, stride=self._patch)
