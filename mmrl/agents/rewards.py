"""Reward functions of whole episodes: they see the conversation, the images of all turns and the task's entries."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from mmrl.agents.environments.agent_tasks import AgentTask
from mmrl.agents.rollout.episodes import Episode
from mmrl.core.transfer import to_device
from mmrl.errors import UserError
from mmrl.rewards import RewardConfig, RewardResult, RewardSum, TrainerState
from mmrl.rewards.sum import IMAGES, reward_columns, tell_renamed

OWN_TERMS = ("environment", "format")
"""Reward terms that every agent's recipe has."""
GIVEN = ("completion_ids", "completion_lengths", "environment_reward", "success", "final_answer")
"""Columns of episodes that the run passes to reward functions besides the entries of the tasks."""


def check_names(configs: Sequence[RewardConfig]) -> None:
    """Refuse names of the recipe's own terms; raises ValueError."""
    taken = next((config.name for config in configs if config.name in OWN_TERMS), None)
    if taken is not None:
        raise ValueError(
            f"a reward is called '{taken}' like the recipe's own term; give it another name and set "
            f"function: {taken}, or use reward.{taken}"
        )


def tabulate_failed_answers(episodes: Sequence[Episode], like: Tensor) -> Tensor:
    """(B, T), 1 at the last token of each answer of which nothing was executed, in episodes with a result."""
    table = torch.zeros(like.shape, dtype=like.dtype)
    for row, episode in enumerate(episodes):
        ends = zip(episode.trajectory.last_tokens(), episode.errors, strict=False)
        table[row, [end for end, error in ends if error and episode.has_result]] = 1.0
    return to_device(table, like.device)


class EpisodeRewards:
    """Scores finished episodes; functions may need entries of the tasks, which are by the configuration's key."""

    def __init__(self, configs: Sequence[RewardConfig], tasks: Mapping[str, Sequence[AgentTask]]) -> None:
        self._sum = RewardSum(configs)
        self.names = [config.name for config in configs]
        try:
            for key, own in tasks.items() if configs else ():
                try:
                    self._sum.check_columns([*_columns([Episode(task) for task in own]), IMAGES])
                    tell_renamed(key, _names(own), GIVEN)
                except UserError as error:
                    raise UserError(f"{key}: {error}") from None
        except UserError:
            self.close()
            raise

    def score(self, episodes: Sequence[Episode], state: TrainerState) -> RewardResult | None:
        """Add the scores to the episodes that have a result; returns None if there is nothing to score."""
        found = [episode for episode in episodes if episode.transcript is not None]
        if not found:
            return None
        transcripts = [episode.transcript for episode in found if episode.transcript is not None]
        columns = _columns(found)
        if self._sum.reads_images:
            columns[IMAGES] = [[Image.fromarray(image) for image in own.images] for own in transcripts]
        result = self._sum.score(
            [own.prompt for own in transcripts], [own.completion for own in transcripts], columns, state
        )
        for number, episode in enumerate(found):
            episode.added_reward = result.total[number]
            episode.terms = {name: values[number] for name, values in result.terms.items()}
            episode.transcript = None  # its images take much memory
        return result

    def close(self) -> None:
        """Stop the worker processes."""
        self._sum.close()


def _columns(episodes: Sequence[Episode]) -> dict[str, list[Any]]:
    """The entries of the tasks, the tokens that the agent wrote, and what the environment gave."""
    tokens = [episode.trajectory.sampled_ids for episode in episodes]
    own: tuple[list[Any], ...] = (
        tokens,
        [len(ids) for ids in tokens],
        [episode.total for episode in episodes],
        [episode.success for episode in episodes],
        [episode.final_answer for episode in episodes],
    )
    given = dict(zip(GIVEN, own, strict=True))
    passed = reward_columns(_names(episode.task for episode in episodes), given)
    return {other: [episode.task.task.get(name) for episode in episodes] for name, other in passed.items()} | given


def _names(tasks: Iterable[AgentTask]) -> list[str]:
    return sorted({name for task in tasks for name in task.task})
