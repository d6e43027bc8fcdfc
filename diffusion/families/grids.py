"""Times at which pipelines call their networks, and patching of latents, shared by several families."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

from mmrl.errors import UserError

PATCH = 2
"""Size of an image token in latent pixels."""


def scheduler_grid(scheduler: Any, steps: int, *, tokens: int, even: bool = False) -> Tensor:
    """Times of a flow-matching Euler scheduler, spaced by the scheduler or as S equal steps from 1 to 1 / S.

    Both are then shifted by a fixed number or, with `use_dynamic_shifting`, by `dynamic_shift`. Times spaced by the
    scheduler end at its already shifted `sigma_min`, so they are shifted twice.

    Args:
        scheduler: not modified.
        steps: S, at least 1.
        tokens: number of tokens the network gets per sample.
        even: whether to use equal steps.

    Returns:
        (S + 1,) float32 on the CPU, descending, the last 0.

    Source: diffusers FlowMatchEulerDiscreteScheduler.set_timesteps.
    """
    options: dict[str, Any] = {}
    if scheduler.config.use_dynamic_shifting:
        options["mu"] = dynamic_shift(scheduler, tokens)
    if even and not scheduler.config.get("use_flow_sigmas"):
        options["sigmas"] = even_sigmas(steps)
    return grid_of(scheduler, steps, **options)


def grid_of(scheduler: Any, steps: int, **options: Any) -> Tensor:
    """The scheduler's times (S + 1,) after `set_timesteps` with `options`; the scheduler is not changed."""
    own = copy.deepcopy(scheduler)
    own.set_timesteps(steps, **options)
    grid: Tensor = own.sigmas.to("cpu", torch.float32).clone()
    if not grid.isfinite().all():
        raise UserError(f"{type(own).__name__} has no times for steps={steps} with its settings; take more steps")
    if not own.timesteps.is_floating_point():
        called = own.timesteps.cpu()
        # The scheduler truncates before rounding to float32, so 333.999 may become 334 here. Such times are moved to
        # the neighbouring float32 number, after which truncating them gives the scheduler's own number again.
        for up in (0.0, 1.0):
            wrong = (grid[:-1] * 1000).floor() - called
            near = torch.nextafter(grid[:-1], torch.tensor(up))
            grid[:-1] = torch.where(wrong < 0 if up else wrong > 0, near, grid[:-1])
    return grid


def cuts_times(scheduler: Any) -> bool:
    """Whether the scheduler calls the network at whole numbers, as diffusers' multistep solvers do."""
    own = copy.deepcopy(scheduler)
    own.set_timesteps(2, **({"mu": 1.0} if scheduler.config.get("use_dynamic_shifting") else {}))
    return not own.timesteps.is_floating_point()


def even_sigmas(steps: int) -> list[float]:
    """S equal steps from 1 to 1 / S."""
    sigmas: list[float] = torch.linspace(1.0, 1.0 / steps, steps, dtype=torch.float64).tolist()
    return sigmas


def dynamic_shift(scheduler: Any, tokens: int) -> float:
    """Return mu, the logarithm of the shift for a size, by linear interpolation between two sizes in the config.

    Source: diffusers pipelines/flux/pipeline_flux.py, calculate_shift.
    """
    config = scheduler.config
    slope = (config.max_shift - config.base_shift) / (config.max_image_seq_len - config.base_image_seq_len)
    return float(config.base_shift + slope * (tokens - config.base_image_seq_len))


def pack_latents(latents: Tensor) -> Tensor:
    """Cut latents (B, C, H, W) into 2 x 2 patches, row by row; each is a token (B, H/2 * W/2, 4 C), channels first."""
    rows, channels, height, width = latents.shape
    if height % PATCH or width % PATCH:
        raise UserError(f"latents of {height} x {width} cannot be cut into patches of {PATCH} x {PATCH}")
    patches = latents.reshape(rows, channels, height // PATCH, PATCH, width // PATCH, PATCH)
    return patches.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)


def unpack_latents(tokens: Tensor, height: int, width: int) -> Tensor:
    """The inverse of `pack_latents`: tokens (B, H/2 * W/2, 4 C) to latents (B, C, H, W)."""
    rows, count, channels = tokens.shape
    down, across = height // PATCH, width // PATCH
    if height % PATCH or width % PATCH or count != down * across or channels % PATCH**2:
        raise ValueError(f"tokens of shape {tuple(tokens.shape)} are not those of {height} x {width} latent pixels.")
    patches = tokens.reshape(rows, down, across, channels // PATCH**2, PATCH, PATCH)
    return patches.permute(0, 3, 1, 4, 2, 5).reshape(rows, -1, height, width)
