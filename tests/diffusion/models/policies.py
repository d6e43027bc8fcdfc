"""Policies of tiny pipelines for the tests, and what is compared of them."""

from __future__ import annotations

import torch

from diffusion.models.diffusion_policy import DiffusionLora, PipelineConfig
from tests.diffusion.builders import T5_TOKENS

RANK, SCALE = 4, 3
SIGMA = torch.tensor([0.9, 0.3])


def config_of(base, *, enabled=True, dtype="float32", **lora):
    settings = DiffusionLora(**{"enabled": enabled, "rank": RANK, "alpha": SCALE * RANK} | lora)
    return PipelineConfig(path=str(base), dtype=dtype, lora=settings, max_sequence_length=T5_TOKENS)


def noise(seed=0):
    return torch.randn((2, 4, 8, 8), generator=torch.Generator().manual_seed(seed))


def text(policy):
    return policy.embeddings.rows(["a red circle", "a blue square"])


def velocity(policy, seed=0):
    with torch.no_grad():
        return policy(noise(seed), SIGMA, text(policy).expanded())


def disturb(policy, size=0.05, seed=1):
    """Change every trained weight, as training would."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in policy.parameters():
            if weight.requires_grad:
                weight.add_(torch.randn(weight.shape, generator=generator) * size)
    return policy


def trained(policy):
    return {name: weight for name, weight in policy.named_parameters() if weight.requires_grad}


def bits(policy):
    return {name: weight.detach().clone() for name, weight in policy.state_dict().items()}


def same(one, two):
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)
