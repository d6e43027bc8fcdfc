"""Values of the states of rollouts and the training of their critic, shared by AC-Flow and Flow-PPO.

Shapes: B rows (images), T states of each, M of the B * T whose mask is 1, C x H x W one latent.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from diffusion.critic import Critic, CriticConfig, CriticTrainer, explained_variance
from diffusion.data import DiffusionTask
from diffusion.decisions import TrainedDecisions
from diffusion.payload import DiffusionPayload
from diffusion.policy import DiffusionPolicy
from diffusion.sampler import text_of
from mmrl.core.rollouts import Rollouts
from mmrl.training.loop.seeds import stream_seed
from mmrl.training.record.stopwatch import stopwatch


class States(NamedTuple):
    """The states of some rollouts whose mask is 1."""

    latents: Tensor
    """x_t (M, C, H, W)."""
    sigma: Tensor
    """t (M,) float32."""
    decisions: TrainedDecisions
    """Their places in (B, T)."""


def make_critic(
    policy: DiffusionPolicy, tasks: Sequence[DiffusionTask], config: CriticConfig, seed: int
) -> CriticTrainer:
    """A critic for the latents and the pooled text of a policy; the global generator is left alone."""
    pooled = text_of(policy, tasks[:1], torch.zeros(1, dtype=torch.int64)).pooled.shape[1]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(stream_seed(seed, "critic"))
        critic = Critic(policy.latent_shape[0], pooled, config.width)
    return CriticTrainer(critic.to(policy.device), config)


def state_values(critic: CriticTrainer, policy: DiffusionPolicy, rollouts: Rollouts, states: States) -> Tensor:
    """V (B, T) float32 of the states, without gradient; 0 where the mask is 0."""
    critic.critic.to(policy.device)  # made before the policy moved to its device
    return states.decisions.scatter(critic.values(*_inputs(policy, rollouts, states)))


def train_critic(
    critic: CriticTrainer,
    policy: DiffusionPolicy,
    rollouts: Rollouts,
    states: States,
    returns: Tensor,
    generator: torch.Generator,
    accelerator: Any,
) -> dict[str, float]:
    """Regress the critic on the returns (B,) of the rows that have a reward; returns its metrics.

    `generator` is a CPU generator for the order; gradients are averaged over the accelerator's processes.
    """
    with stopwatch("critic"):
        row = states.decisions.row
        usable = rollouts.scored[row]
        latents, sigma, pooled = _inputs(policy, rollouts, states)
        kept = (latents[usable], sigma[usable], pooled[usable])
        loss = critic.train(kept, returns[row][usable], generator, accelerator)
    return {"critic/loss": loss, "critic/updates": float(critic.updates)}


def explained_by_time(rollouts: Rollouts, returns: Tensor, values: Tensor) -> dict[str, float]:
    """Share of the variance of returns (B,) that values (B, T) explain: at all states, and in each half of time."""
    sigma, trained = DiffusionPayload.of(rollouts).sigma, rollouts.loss_mask > 0
    wide = returns[:, None].expand_as(values)
    parts = {"critic/explained": trained, "critic/explained/noisy": trained & (sigma > 0.5)}
    parts["critic/explained/clean"] = trained & (sigma <= 0.5)
    return {name: explained_variance(wide[part], values[part]) for name, part in parts.items()}


def _inputs(policy: DiffusionPolicy, rollouts: Rollouts, states: States) -> tuple[Tensor, Tensor, Tensor]:
    text = text_of(policy, DiffusionPayload.of(rollouts).tasks, rollouts.group[states.decisions.row])
    return states.latents.float(), states.sigma, text.expanded()[1].float()
