"""DigiRL's two critics: classifiers on states of the policy that say whether an episode will succeed.

Their inputs are constants, so that no gradient of theirs reaches the policy. Each is trained as a classifier of
Monte-Carlo returns: there is no bootstrapping and no target network.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from mmrl.fields import bounded, rare

CriticT = TypeVar("CriticT", bound=nn.Module)


@dataclass
class CriticConfig:
    """The critics and their training; the defaults are those of the public code."""

    hidden: int = rare(bounded(768, at_least=1))
    """Width of the two hidden layers of the step critic."""
    learning_rate: float = bounded(1e-4, above=0)
    """Of Adam, for both critics."""
    updates: int = bounded(5, at_least=1)
    """Optimiser steps of each critic in every step of the run."""
    batch_steps: int = rare(bounded(128, at_least=1))
    """Steps that an update of the step critic draws, with replacement."""
    batch_episodes: int = rare(bounded(256, at_least=1))
    """Episodes that an update of the instruction critic draws, with replacement."""
    max_grad_norm: float = rare(bounded(0.01, above=0))
    """Norm above which gradients are scaled down."""


@dataclass
class StepData:
    """Steps of stored episodes, M of them."""

    state: Tensor
    """(M, S) before each step."""
    next_state: Tensor
    """(M, S) before the following step; anything where the episode is over."""
    has_next: Tensor
    """(M,) bool."""
    succeeds: Tensor
    """(M,) int64, 1 where the return from the step on is above 0."""

    def __len__(self) -> int:
        """Number of steps M."""
        return len(self.succeeds)

    def select(self, rows: Tensor) -> StepData:
        """Some of the steps (m,) int64, with repetitions."""
        return StepData(self.state[rows], self.next_state[rows], self.has_next[rows], self.succeeds[rows])


class InstructionCritic(nn.Module):
    """Probability that an instruction is carried out, by the state of its text: one linear layer."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.head = nn.Linear(size, 2)

    def forward(self, states: Tensor) -> Tensor:
        """Logits (n, 2) of failure and success."""
        return self.head(states)  # type: ignore[no-any-return]

    def value(self, states: Tensor) -> Tensor:
        """Probability of success (n,); no gradient."""
        with torch.no_grad():
            return self(states).softmax(-1)[:, 1]  # type: ignore[no-any-return]


class StepCritic(nn.Module):
    """Probability that an episode succeeds from a state on: the smaller one of two heads."""

    def __init__(self, size: int, hidden: int) -> None:
        super().__init__()
        self.heads = nn.ModuleList([_perceptron(size, hidden) for _ in range(2)])

    def forward(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """Logits (M, 2) of failure and success, of each head."""
        return self.heads[0](states), self.heads[1](states)

    def value(self, states: Tensor) -> Tensor:
        """Smaller probability of success (M,); no gradient."""
        with torch.no_grad():
            one, other = self(states)
            return torch.minimum(one.softmax(-1)[:, 1], other.softmax(-1)[:, 1])


def instruction_loss(logits: Tensor, succeeded: Tensor) -> Tensor:
    """Cross-entropy of episodes.

    Source: DigiRL-agent/digirl digirl/algorithms/digirl/trainer.py, trajectory_critic_loss.
    """
    return cross_entropy(logits, succeeded)


def step_loss(
    logits: tuple[Tensor, Tensor], next_logits: tuple[Tensor, Tensor], has_next: Tensor, succeeds: Tensor
) -> Tensor:
    """Sum of the cross-entropies of both heads, before and after the step, all with the return from the step on.

    Args:
        logits: (M, 2) of each head, before the steps.
        next_logits: (M, 2) of each head, after them.
        has_next: (M,) bool; where an episode is over, nothing is known of the state after it.
        succeeds: (M,) int64.

    Source: DigiRL-agent/digirl digirl/algorithms/digirl/trainer.py, critic_loss.
    """
    before = [cross_entropy(head, succeeds) for head in logits]
    after = [cross_entropy(head[has_next], succeeds[has_next]) for head in next_logits if bool(has_next.any())]
    return torch.stack([*before, *after]).sum()


class Fitter(Generic[CriticT]):
    """Adam on one critic."""

    def __init__(self, critic: CriticT, config: CriticConfig) -> None:
        self.critic, self._config = critic, config
        self._optimizer = torch.optim.Adam(critic.parameters(), lr=config.learning_rate)

    def step(self, loss: Tensor) -> float:
        """Take an optimiser step; returns the loss."""
        self._optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.critic.parameters(), self._config.max_grad_norm)
        self._optimizer.step()
        return float(loss.detach())

    def state_dict(self) -> dict[str, Any]:
        """Weights and moments."""
        return {"critic": self.critic.state_dict(), "optimizer": self._optimizer.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore `state_dict`."""
        self.critic.load_state_dict(state["critic"])
        self._optimizer.load_state_dict(state["optimizer"])


def _perceptron(size: int, hidden: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(size, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, 2))
