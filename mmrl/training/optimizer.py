"""The optimiser of a run: its weights, their rates, and whether each process has them whole or a part."""

from __future__ import annotations

import math
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn

from mmrl.errors import UserError
from mmrl.training.recipe import Recipe, Reference
from mmrl.training.settings import SMALLEST_LOW_PRECISION_STEP, BaseTrainerConfig
from mmrl.training.sharding import shard

FACTOR = "learning_rate_factor"
"""Key of an optimiser group whose rate is another than the run's."""


def learning_rate_factor(config: BaseTrainerConfig, optimiser_step: int, waited: int = 0) -> float:
    """Share of the peak learning rate at an optimiser step."""
    if optimiser_step < config.warmup_steps:
        return (optimiser_step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return 1.0
    total = config.steps * config.epochs * config.minibatches_per_step
    progress = min((optimiser_step + waited - config.warmup_steps) / max(total - config.warmup_steps, 1), 1.0)
    floor = config.final_learning_rate / config.learning_rate
    decay = 1.0 - progress if config.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return floor + (1.0 - floor) * decay


def make_optimizer(policy: nn.Module, config: BaseTrainerConfig) -> torch.optim.AdamW:
    """AdamW over the trainable parameters; matrices decay, vectors (norms, biases) do not.

    A policy may have `learning_rate_factors`, name of a child to the factor of its parameters' rate.
    """
    factors: dict[str, float] = getattr(policy, "learning_rate_factors", {})
    trainable = [(name, parameter) for name, parameter in policy.named_parameters() if parameter.requires_grad]
    groups: list[dict[str, Any]] = []
    for factor in dict.fromkeys((1.0, *factors.values())):
        own = [p for name, p in trainable if factors.get(name.partition(".")[0], 1.0) == factor]
        marked = {} if factor == 1 else {FACTOR: factor}
        groups += [
            {"params": [p for p in own if p.ndim >= 2], "weight_decay": config.weight_decay, **marked},
            {"params": [p for p in own if p.ndim < 2], "weight_decay": 0.0, **marked},
        ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=config.learning_rate,
        betas=(config.betas[0], config.betas[1]),
        eps=config.adam_eps,
        fused=True,  # one pass over weights and moments instead of several
    )


def divide(recipe: Recipe[Any, Any], accelerator: Accelerator, reference: Reference) -> None:
    """Leave the trained weights, and those of references, in parts where the configuration asks for it."""
    if recipe.config.trainer.sharding == "none":
        return
    names = frozenset(name for name, weight in recipe.policy.named_parameters() if weight.requires_grad)
    gathered = torch.bfloat16 if recipe.config.trainer.gathered == "bf16" else None
    copies = [each.copy for each in (reference, recipe.start) if each is not None and each.copy is not None]
    for module in dict.fromkeys((recipe.policy, *copies)):
        shard(module, accelerator, names, gathered)


def check_precision(optimizer: torch.optim.Optimizer) -> None:
    """Refuse steps that the weights' own precision cannot take or rounds away; raises UserError."""
    for group in optimizer.param_groups:
        low = {parameter.dtype for parameter in group["params"]} & {torch.bfloat16, torch.float16}
        if torch.float16 in low:
            raise UserError(
                "the weights to be trained are float16, in which their gradients cannot be unscaled; use float32 "
                "weights with trainer.mixed_precision=fp16, or adapters (LoRA)"
            )
        rate = group["lr"] * group.get(FACTOR, 1.0)
        if low and rate < SMALLEST_LOW_PRECISION_STEP:
            kind = str(low.pop()).removeprefix("torch.")
            raise UserError(
                f"the weights to be trained are {kind} and trainer.learning_rate is {rate:g}: {kind} weights "
                "round such steps away; use float32 weights with trainer.mixed_precision=bf16, or adapters (LoRA)"
            )


def actor_weights(policy: nn.Module) -> list[nn.Parameter]:
    """Weights to be trained, without those of a critic, a child that the policy names in `critic_parts`."""
    critics = getattr(policy, "critic_parts", ())
    named = policy.named_parameters()
    found = [weight for name, weight in named if weight.requires_grad and name.partition(".")[0] not in critics]
    if not found:
        raise UserError("the policy has no weight to train: every one is frozen; look at the options of `model`")
    return found
