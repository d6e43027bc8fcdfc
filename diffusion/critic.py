"""A cheap value function of noisy latents: the reward expected from x_t.

Source: the size, a small convolutional network with layer norms, as in a public summary of AC-Flow (arXiv 2510.18072);
    the rest of the architecture is ours.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mmrl.fields import bounded, rare
from mmrl.training.loop.distributed import average_gradients, merge_lists

TIME_FEATURES = 16


@dataclass
class CriticConfig:
    """The value function and its training."""

    enabled: bool = True
    """Without it V is 0 everywhere."""
    width: int = rare(bounded(64, at_least=1))
    """Channels of the convolutions and hidden units."""
    learning_rate: float = bounded(1e-3, above=0)
    """Of its own AdamW; 1e-4 for a large latent."""
    updates_per_step: int = bounded(4, at_least=1)
    """Passes over the states of a step."""
    warmup_updates: int = bounded(20, at_least=0)
    """Updates of the critic before the policy is trained."""
    batch_rows: int = rare(bounded(256, at_least=1))
    """States in one update."""
    max_grad_norm: float = rare(bounded(1.0, above=0))
    """Gradient norm above which its gradients are scaled down."""


class Critic(nn.Module):
    """V(x_t, t, c), a small convolutional network on C channels and a pooled text embedding of width P."""

    def __init__(self, channels: int, pooled_width: int, width: int) -> None:
        super().__init__()
        self.image = nn.Sequential(
            nn.Conv2d(channels, width, 3, padding=1),
            nn.GroupNorm(1, width),
            nn.SiLU(),
            nn.Conv2d(width, width, 3, stride=2, padding=1),
            nn.GroupNorm(1, width),
            nn.SiLU(),
            nn.AdaptiveAvgPool2d(2),
            nn.Flatten(),
        )
        self.text = nn.Linear(pooled_width, width)
        self.head = nn.Sequential(
            nn.LayerNorm(4 * width + width + TIME_FEATURES),
            nn.Linear(4 * width + width + TIME_FEATURES, width),
            nn.SiLU(),
            nn.LayerNorm(width),
            nn.Linear(width, 1),
        )
        last: Any = self.head[-1]
        nn.init.zeros_(last.weight)
        nn.init.zeros_(last.bias)

    def forward(self, latents: Tensor, sigma: Tensor, pooled: Tensor) -> Tensor:
        """Expected return (M,) of latents x_t (M, C, H, W) float32 at times (M,) with pooled text (M, P)."""
        frequency = 2.0 ** torch.arange(TIME_FEATURES // 2, device=sigma.device)
        angle = math.pi * sigma[:, None] * frequency
        features = torch.cat([self.image(latents), self.text(pooled), angle.sin(), angle.cos()], 1)
        value: Tensor = self.head(features)[:, 0]
        return value


class CriticTrainer:
    """A critic with its optimiser."""

    def __init__(self, critic: Critic, config: CriticConfig) -> None:
        self.critic = critic
        self.config = config
        self.updates = 0
        self._optimizer = torch.optim.AdamW(critic.parameters(), lr=config.learning_rate)

    @property
    def warm(self) -> bool:
        """Whether the critic has had its warm-up."""
        return self.updates >= self.config.warmup_updates

    @torch.no_grad()
    def values(self, latents: Tensor, sigma: Tensor, pooled: Tensor) -> Tensor:
        """Expected returns (M,) of noisy latents, without gradient."""
        size = self.config.batch_rows
        parts = zip(latents.split(size), sigma.split(size), pooled.split(size), strict=True)
        return torch.cat([self.critic(x.float(), t, c.float()) for x, t, c in parts])

    def train(
        self, inputs: tuple[Tensor, Tensor, Tensor], returns: Tensor, generator: torch.Generator, accelerator: Any
    ) -> float:
        """Regress on returns (M,) from latents (M, C, H, W), times (M,) and pooled text (M, P); returns the mean loss.

        Gradients are averaged over the accelerator's processes, so each must call with rows of its own.
        """
        losses = []
        count = self._batches(len(returns), accelerator)
        for _ in range(self.config.updates_per_step):
            order = torch.randperm(len(returns), generator=generator).to(returns.device)
            for rows in torch.tensor_split(order, count):
                x, sigma, pooled = (value[rows] for value in inputs)
                with torch.enable_grad():
                    loss = (self.critic(x.float(), sigma, pooled.float()) - returns[rows]).square().mean()
                    loss.backward()
                average_gradients(list(self.critic.parameters()), accelerator)
                nn.utils.clip_grad_norm_(self.critic.parameters(), self.config.max_grad_norm)
                self._optimizer.step()
                self._optimizer.zero_grad()
                losses.append(float(loss.detach()))
                self.updates += 1
        return sum(losses) / len(losses)

    def state_dict(self) -> dict[str, Any]:
        """Weights, moments and count."""
        return {
            "critic": self.critic.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "updates": self.updates,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore `state_dict`."""
        self.critic.load_state_dict(state["critic"])
        self._optimizer.load_state_dict(state["optimizer"])
        self.updates = int(state["updates"])

    def _batches(self, rows: int, accelerator: Any) -> int:
        """Updates of one pass, equal on every process."""
        return max(1, -(-max(merge_lists([rows], accelerator)) // self.config.batch_rows))


def explained_variance(returns: Tensor, values: Tensor) -> float:
    """Share of the variance of returns (M,) that values (M,) explain; NaN where the returns do not differ."""
    variance = float(returns.var(correction=0)) if len(returns) else 0.0
    return 1 - float((returns - values).var(correction=0)) / variance if variance > 0 else float("nan")


def _differences(returns: Tensor, values: Tensor) -> Tensor:
    return torch.cat([values[:, 1:], returns[:, -1:]], 1) - values


CREDITS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "return": lambda returns, values: returns - values,
    "difference": _differences,
}
"""From returns and values (B, T) of states in the order of their path to advantages (B, T); see `diffusion.ac_flow`."""
