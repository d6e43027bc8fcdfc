"""DigiRL's two critics: classifiers on states of the policy that predict whether an episode will succeed.

Their inputs are constants, so that no gradient of theirs reaches the policy. Each is trained as a classifier of
Monte-Carlo returns, without bootstrapping and target networks. `label_episodes` adds states and returns to stored
episodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from accelerate import PartialState
from accelerate.utils import gather_object
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from mmrl.agents.rollout.episodes import Episode, pack_episodes
from mmrl.core.payload import to_device, to_host
from mmrl.core.returns import turn_starts
from mmrl.fields import bounded, rare
from mmrl.training.optimizer import load_optimizer
from mmrl.vlm.data.prompt import Prompt
from mmrl.vlm.engine.rows import text_prompt
from mmrl.vlm.engine.vlm_policy import VlmPolicy
from mmrl.vlm.families.family import TEXT

CriticT = TypeVar("CriticT", bound=nn.Module)


@dataclass
class CriticTraining:
    """Optimiser and width of critics on states of the policy."""

    hidden: int = rare(bounded(768, at_least=1))
    """Width of the two hidden layers of a head."""
    learning_rate: float = bounded(1e-4, above=0)
    """Learning rate of Adam."""
    updates: int = bounded(5, at_least=1)
    """Optimiser steps of each critic per step of the run."""
    batch_steps: int = rare(bounded(128, at_least=1))
    """Number of steps drawn per update, with replacement."""
    max_grad_norm: float = rare(bounded(0.01, above=0))
    """Maximum gradient norm; larger gradients are scaled down."""


@dataclass
class DigirlCriticConfig(CriticTraining):
    """The critics and their training, with the public code's defaults."""

    batch_episodes: int = rare(bounded(256, at_least=1))
    """Number of episodes drawn per update of the instruction critic, with replacement."""


class InstructionCritic(nn.Module):
    """Probability that an instruction will be fulfilled, from the state of its text: one linear layer."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.head = nn.Linear(size, 2)

    def forward(self, states: Tensor) -> Tensor:
        """Logits (n, 2) of failure and success."""
        return self.head(states)

    def value(self, states: Tensor) -> Tensor:
        """Probability of success (n,); no gradient."""
        with torch.no_grad():
            return self(states).softmax(-1)[:, 1]


class StepCritic(nn.Module):
    """Probability that an episode succeeds from a given state: the smaller value of two heads."""

    def __init__(self, size: int, hidden: int) -> None:
        super().__init__()
        self.heads = nn.ModuleList([perceptron(size, hidden) for _ in range(2)])

    def forward(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """Logits (M, 2) of failure and success, of each head."""
        return self.heads[0](states), self.heads[1](states)

    def value(self, states: Tensor) -> Tensor:
        """Smaller probability of success (M,); no gradient."""
        with torch.no_grad():
            one, other = self(states)
            # the smaller of two estimates, against overestimation (as in clipped double Q-learning)
            return torch.minimum(one.softmax(-1)[:, 1], other.softmax(-1)[:, 1])


def instruction_loss(logits: Tensor, succeeded: Tensor) -> Tensor:
    """Cross-entropy of episodes.

    Source: DigiRL-agent/digirl digirl/algorithms/digirl/trainer.py, trajectory_critic_loss.
    """
    return cross_entropy(logits, succeeded)


def step_loss(
    logits: tuple[Tensor, Tensor], next_logits: tuple[Tensor, Tensor], has_next: Tensor, succeeds: Tensor
) -> Tensor:
    """Sum of the cross-entropies of both heads (M, 2), before and after the step, with the return from the step on.

    If an episode is over, `has_next` (M,) is False and the state after it is unknown.

    Source: DigiRL-agent/digirl digirl/algorithms/digirl/trainer.py, critic_loss.
    """
    before = [cross_entropy(head, succeeds) for head in logits]
    # no target after the last step, whose state nobody reads
    after = [cross_entropy(head[has_next], succeeds[has_next]) for head in next_logits if bool(has_next.any())]
    return torch.stack([*before, *after]).sum()


class Fitter(Generic[CriticT]):
    """Adam on one critic."""

    def __init__(self, critic: CriticT, config: CriticTraining) -> None:
        self.critic = critic
        self._config = config
        self._optimizer = torch.optim.Adam(critic.parameters(), lr=config.learning_rate)

    def step(self, loss: Tensor) -> float:
        """Take an optimiser step; returns the loss."""
        self._optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.critic.parameters(), self._config.max_grad_norm)
        self._optimizer.step()
        torch.clear_autocast_cache()  # the critics take many steps under one autocast
        return float(loss.detach())

    def state_dict(self) -> dict[str, Any]:
        """Weights and moments."""
        return {"critic": self.critic.state_dict(), "optimizer": self._optimizer.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore `state_dict`."""
        self.critic.load_state_dict(state["critic"])
        load_optimizer(self._optimizer, state["optimizer"])


def perceptron(size: int, hidden: int, outputs: int = 2) -> nn.Sequential:
    """A head with two hidden layers."""
    last = nn.Linear(hidden, outputs)
    return nn.Sequential(nn.Linear(size, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), last)


ROWS = 16
"""Episodes read together by default; more only cost memory."""


@dataclass
class LabelledEpisodes:
    """n episodes of M steps in all; a step is a turn."""

    episodes: list[Episode]
    text_state: Tensor
    """(n, S) float32, the policy's state after the text of the first prompt, without its images."""
    state: Tensor
    """(M, S) float32, the policy's state before each step, after everything up to then."""
    counts: list[int]
    """Steps H of each episode."""
    reward: Tensor
    """(M,) of each step."""
    mc_return: Tensor
    """(M,) discounted return from each step on."""

    @property
    def total(self) -> Tensor:
        """(n,) sum of the rewards of each episode."""
        return torch.stack([rewards.sum() for rewards in self.reward.split(self.counts)])

    @property
    def next_state(self) -> Tensor:
        """(M, S) state before the next step; for the last step, its own state."""
        last = torch.tensor([step == steps - 1 for steps in self.counts for step in range(steps)])
        return torch.where(last[:, None], self.state, self.state.roll(-1, 0))

    @property
    def has_next(self) -> Tensor:
        """(M,) bool."""
        return torch.tensor([step < steps - 1 for steps in self.counts for step in range(steps)])

    @property
    def succeeds(self) -> Tensor:
        """(M,) int64, 1 if the return from the step on is positive."""
        return (self.mc_return > 0).long()


def label_episodes(
    policy: VlmPolicy, episodes: Sequence[Episode], gamma: float, rows: int, *, read: bool = True
) -> LabelledEpisodes:
    """Label episodes, and read them with the policy."""
    counts = [episode.trajectory.turns for episode in episodes]
    if read:
        text_state, state = _shared_states(policy, episodes, rows or ROWS)
    else:
        text_state, state = torch.zeros(len(counts), 0), torch.zeros(sum(counts), 0)
    return LabelledEpisodes(
        episodes=list(episodes),
        text_state=text_state,
        state=state,
        counts=counts,
        reward=torch.cat([torch.tensor(episode.rewards, dtype=torch.float64) for episode in episodes]),
        mc_return=torch.cat([discounted_returns(episode.rewards, gamma) for episode in episodes]),
    )


def _shared_states(policy: VlmPolicy, episodes: Sequence[Episode], rows: int) -> tuple[Tensor, Tensor]:
    """States of the texts (n, S) and before the steps (M, S); each process reads some of the episodes."""
    process = PartialState()
    # every n-th episode, so that long and short ones spread over the processes
    mine = list(range(process.process_index, len(episodes), process.num_processes))
    found = []
    with torch.no_grad():
        for start in range(0, len(mine), rows):
            chunk = mine[start : start + rows]
            found += _states(policy, chunk, [episodes[number] for number in chunk])
    if process.num_processes > 1:
        found = list(gather_object(found))
    # gathered by process, wanted in the order of the episodes: critics index both alike
    found.sort(key=lambda entry: entry[0])
    return torch.stack([text for _, text, _ in found]), torch.cat([states for _, _, states in found])


def _states(policy: VlmPolicy, numbers: Sequence[int], episodes: Sequence[Episode]) -> list[tuple[int, Tensor, Tensor]]:
    """Number, state of the text (S,) and states before the steps (H, S) of each episode."""
    rollouts = pack_episodes(episodes, range(len(episodes)), policy)
    # rewards are still NaN, which would mask the rows out of `turn_starts`
    starts = turn_starts(rollouts.replace(reward=torch.zeros_like(rollouts.reward)))
    # one state per turn: the state before the turn's first sampled token
    before = policy.states(rollouts.replace(mask=starts.to(rollouts.mask.dtype))).float()
    texts = _text_states(policy, [episode.prompt for episode in episodes if episode.prompt is not None])
    states, texts = to_host([before, texts])
    counts = [episode.trajectory.turns for episode in episodes]
    return list(zip(numbers, texts, states.split(counts), strict=True))


def _text_states(policy: VlmPolicy, prompts: Sequence[Prompt]) -> Tensor:
    """States (N, S) after prompts; equal prompts, of tasks that differ in their images only, are read once."""
    # without the image tokens: the instruction critic judges the task by its text
    texts = [text_prompt(prompt.input_ids[prompt.mm_token_type_ids == TEXT]) for prompt in prompts]
    keys = [tuple(text.input_ids.tolist()) for text in texts]
    distinct = dict(zip(keys, texts, strict=True))
    place = {key: number for number, key in enumerate(distinct)}
    states = policy.last_states(list(distinct.values())).float()
    return states[to_device(torch.tensor([place[key] for key in keys]), states.device)]


def discounted_returns(rewards: Sequence[float], gamma: float) -> Tensor:
    """Monte-Carlo return R_t = sum_u gamma^(u - t) r_u of each step of a trajectory, (H,) float64.

    Source: DigiRL-agent/digirl digirl/environment/env_utils.py, add_mc_return.
    """
    found, later = [], 0.0
    for reward in reversed(rewards):
        later = reward + gamma * later
        found.append(later)
    return torch.tensor(found[::-1], dtype=torch.float64)
