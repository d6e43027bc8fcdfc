"""Inputs of the methods whose decisions are steps of an image sampler."""

from typing import Any

import torch
from torch import Tensor

from tests.golden.make.peers import numbers

SHAPE = (3, 2, 4, 4)
"""Rows, channels, height and width of latents."""
STEPS = 3
"""Trained steps of the batch of `update`."""


def latents(seed: int = 20) -> dict[str, Any]:
    """Latents of three images, the model's predictions for them, and the results of the step."""
    return {
        "latents": numbers(seed, *SHAPE, low=-2, high=2),
        "velocity": numbers(seed + 1, *SHAPE, low=-2, high=2),
        "noise": numbers(seed + 2, *SHAPE, low=-2, high=2),
    }


def update(spread: float = 2e-4) -> dict[str, Any]:
    """Three prompts of four images with three trained steps; log-probabilities move by up to `spread`."""
    old = torch.tensor(numbers(30, 12, STEPS, low=-1.5, high=-0.5), dtype=torch.float64)
    moved = old + spread * torch.tensor(numbers(31, 12, STEPS), dtype=torch.float64)
    return {
        "prompts": ["fox"] * 4 + ["pig"] * 4 + ["owl"] * 4,
        "reward": [0.9, 0.1, 0.4, 0.6, 0.5, 0.5, 0.5, 0.5, 0.05, 0.9, 0.8, 0.2],
        "logp_old": old.tolist(),
        "logp": moved.tolist(),
    }


def outlier(spread: float = 2e-4) -> dict[str, Any]:
    """Thirty images of a prompt, one of them so good that its advantage is beyond 5; see `update`."""
    old = torch.tensor(numbers(33, 30, STEPS, low=-1.5, high=-0.5), dtype=torch.float64)
    moved = old + spread * torch.tensor(numbers(34, 30, STEPS), dtype=torch.float64)
    moved[-1] = old[-1] + 0.2 * spread  # within the bounds, so that its loss depends on its advantage
    return {
        "prompts": ["fox"] * 30,
        "reward": [0.0] * 29 + [1.0],
        "logp_old": old.tolist(),
        "logp": moved.tolist(),
    }


def mean_of_steps(losses: list[Tensor]) -> Tensor:
    """The codes make one backward pass a step; their optimiser sees the mean."""
    return torch.stack(losses).mean()
