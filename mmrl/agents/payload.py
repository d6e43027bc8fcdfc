"""The payload of agents' rollouts: a row is an episode."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from mmrl.agents.episode import Episode
from mmrl.agents.trajectories import tabulate_tokens
from mmrl.core.payload import per_row
from mmrl.core.rollouts import Rollouts
from mmrl.vlm.payload import Context, Prompt, VlmPayload
from mmrl.vlm.policy import VlmPolicy
from mmrl.vlm.task import VlmTask


@dataclass
class AgentPayload(VlmPayload):
    """Episodes of B rows, after the first prompt of their group."""

    episodes: list[Episode] = per_row(default_factory=list)
    """The episode of each row."""


def pack_episodes(episodes: Sequence[Episode], group: Sequence[int], policy: VlmPolicy) -> Rollouts:
    """Turn finished episodes into rollouts.

    An episode whose first observation is not that of its group continues after a prompt of its own. One without a
    result has no trained decision.

    Returns:
        Rows with the log-probabilities as sampled, the turn of each token, and the reward still NaN. Extras:
        "decision_reward" (B, T), the environment's reward at the last token of each turn; "truncated" (B,), 1 where a
        time limit ended the episode; "bootstrap_mask" (B, T), 1 at `Trajectory.bootstrap_index`.
    """
    prompts = _first_prompts(episodes, group)
    rows = [_with_own_context(episode, prompts[number]) for episode, number in zip(episodes, group, strict=True)]
    table = tabulate_tokens([episode.trajectory for episode in rows], policy.pad_id, policy.device)
    tasks = {number: episode.task for episode, number in zip(episodes, group, strict=True)}
    payload = AgentPayload(
        prompts=prompts,
        tasks=[VlmTask(tasks[number].id, []) for number in range(len(prompts))],
        response_ids=table.ids,
        texts=["\n".join(episode.answers) for episode in rows],
        finish=[episode.finish for episode in rows],
        inserts=table.inserts,
        contexts=table.contexts,
        episodes=list(episodes),
    )
    device = table.mask.device
    rewards, bootstrap_mask = torch.zeros_like(table.logp), torch.zeros_like(table.logp)
    for row, episode in enumerate(episodes):
        index = episode.trajectory.last_tokens()
        rewards[row, index] = torch.tensor(episode.rewards[: len(index)], device=device)
        if episode.trajectory.bootstrap_index is not None:
            bootstrap_mask[row, episode.trajectory.bootstrap_index] = 1.0
    truncated = torch.tensor([float(episode.ending == "truncated") for episode in episodes], device=device)
    return Rollouts(
        group=torch.tensor(list(group), device=device),
        mask=table.mask * torch.tensor([episode.has_result for episode in episodes], device=device)[:, None],
        logp_old=table.logp,
        reward=torch.full((len(episodes),), float("nan"), device=device),
        payload=payload,
        turn=table.turn,
        extras={"decision_reward": rewards, "truncated": truncated, "bootstrap_mask": bootstrap_mask},
    )


def pack_groups(groups: Sequence[Sequence[Episode]], policy: VlmPolicy) -> Rollouts:
    """Turn the episodes of whole groups into rollouts with `pack_episodes`."""
    group = [number for number, own in enumerate(groups) for _ in own]
    return pack_episodes([episode for own in groups for episode in own], group, policy)


def _first_prompts(episodes: Sequence[Episode], group: Sequence[int]) -> list[Prompt]:
    """The first prompt of each group."""
    found: dict[int, Prompt] = {}
    for episode, number in zip(episodes, group, strict=True):
        if episode.prompt is not None:
            found.setdefault(number, episode.prompt)
    missing = sorted(set(group) - found.keys())
    if missing:
        raise ValueError(f"no episode of the groups {missing} started; leave such groups out.")
    return [found[number] for number in range(len(found))]


def _with_own_context(episode: Episode, prompt: Prompt) -> Episode:
    """The episode, with its own first prompt as a context where it is not the group's."""
    if episode.prompt is None or episode.prompt is prompt:
        return episode
    own = dataclasses.replace(episode.trajectory, contexts=[Context(0, episode.prompt), *episode.trajectory.contexts])
    return dataclasses.replace(episode, trajectory=own)
