"""Responses as reward functions get them: TRL's signature, with every column of the data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mmrl.errors import UserError
from mmrl.rewards import RewardResult, RewardSum, TrainerState
from mmrl.vlm.task import VlmTask


def score_texts(
    rewards: RewardSum,
    state: TrainerState,
    tasks: Sequence[VlmTask],
    prompts: Sequence[str],
    texts: Sequence[str],
    tokens: Sequence[list[int]],
) -> RewardResult:
    """Score responses with all rewards."""
    turns = [_conversation(*row) for row in zip(tasks, prompts, texts, strict=True)]
    columns = columns_of(tasks, tokens)
    return rewards.score([prompt for prompt, _ in turns], [reply for _, reply in turns], columns, state)


def columns_of(tasks: Sequence[VlmTask], tokens: Sequence[list[int]]) -> dict[str, list[Any]]:
    """Columns of the rows as lists, one entry a row, for reward functions."""
    names = sorted({name for task in tasks for name in task.columns})
    columns = {name: [task.columns.get(name) for task in tasks] for name in names}
    return columns | {"completion_ids": list(tokens), "completion_lengths": [len(row) for row in tokens]}


def _conversation(task: VlmTask, prompt: str, response: str) -> tuple[Any, Any]:
    """A question and a response as reward functions get them, as in TRL."""
    response = task.answer_start + response
    if not task.conversational:
        return prompt, response
    turns = task.messages
    if not task.images and not task.videos:
        turns = [{**turn, "content": "".join(item["text"] for item in turn["content"])} for turn in turns]
    return turns, [{"role": "assistant", "content": response}]


def check_columns(rewards: RewardSum, data: Mapping[str, Sequence[VlmTask]]) -> None:
    """Make sure that the rewards find their columns in the questions of every data set that they will score."""
    for key, tasks in data.items():
        try:
            rewards.check_columns([*columns_of(tasks, [])])
        except UserError as error:
            raise UserError(f"{key}: {error}") from error


def splits_by_key(splits: Mapping[str, Sequence[VlmTask]]) -> dict[str, Sequence[VlmTask]]:
    """Held-out questions by the key of the configuration that names them."""
    return {f"eval_data.{name}": tasks for name, tasks in splits.items()}
