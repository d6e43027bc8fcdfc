"""Stored episodes with the inputs of DigiRL's critics and filters: states of the policy, returns, totals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from accelerate import PartialState
from accelerate.utils import gather_object
from torch import Tensor

from mmrl.agents.critics import StepData
from mmrl.agents.episode import Episode
from mmrl.agents.filters import discounted_returns
from mmrl.agents.payload import pack_episodes
from mmrl.core.returns import turn_starts
from mmrl.vlm.payload import Prompt
from mmrl.vlm.policy import VlmPolicy
from mmrl.vlm.reading import text_prompt
from mmrl.vlm.rotary import TEXT

ROWS = 16
"""Episodes that are read together by default; more only cost memory."""


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
        """(M, S) state before the next step; after the last step, that of the step itself."""
        last = torch.tensor([step == steps - 1 for steps in self.counts for step in range(steps)])
        return torch.where(last[:, None], self.state, self.state.roll(-1, 0))

    @property
    def has_next(self) -> Tensor:
        """(M,) bool."""
        return torch.tensor([step < steps - 1 for steps in self.counts for step in range(steps)])

    @property
    def steps(self) -> StepData:
        """The steps as data of the step critic."""
        return StepData(self.state, self.next_state, self.has_next, (self.mc_return > 0).long())


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
    """States of the texts (n, S) and before the steps (M, S); each process reads a share."""
    process = PartialState()
    mine = list(range(process.process_index, len(episodes), process.num_processes))
    found = []
    with torch.no_grad():
        for start in range(0, len(mine), rows):
            chunk = mine[start : start + rows]
            found += _states(policy, chunk, [episodes[number] for number in chunk])
    if process.num_processes > 1:
        found = list(gather_object(found))
    found.sort(key=lambda entry: entry[0])
    return torch.stack([text for _, text, _ in found]), torch.cat([states for _, _, states in found])


def _states(policy: VlmPolicy, numbers: Sequence[int], episodes: Sequence[Episode]) -> list[tuple[int, Tensor, Tensor]]:
    """Number, state of the text (S,) and states before the steps (H, S) of each episode."""
    rollouts = pack_episodes(episodes, range(len(episodes)), policy)
    starts = turn_starts(rollouts.replace(reward=torch.zeros_like(rollouts.reward)))
    states = policy.states(rollouts.replace(mask=starts.to(rollouts.mask.dtype))).float().cpu()
    texts = _text_states(policy, [episode.prompt for episode in episodes if episode.prompt is not None])
    counts = [episode.trajectory.turns for episode in episodes]
    return list(zip(numbers, texts, states.split(counts), strict=True))


def _text_states(policy: VlmPolicy, prompts: Sequence[Prompt]) -> list[Tensor]:
    """State (S,) after each prompt; equal prompts, of tasks that differ in their images only, are read once."""
    texts = [text_prompt(prompt.input_ids[prompt.mm_token_type_ids == TEXT]) for prompt in prompts]
    keys = [tuple(text.input_ids.tolist()) for text in texts]
    distinct = dict(zip(keys, texts, strict=True))
    states = policy.encode_prefix(list(distinct.values())).last_state.float().cpu()
    found = dict(zip(distinct, states, strict=True))
    return [found[key] for key in keys]
