"""Folders of recorded episodes, of a run or of an expert, as episodes of a policy.

Two formats are read, and a folder may hold both:

* `episodes.jsonl` and its images, as `write_episodes` writes them: a row an episode, with task, seed, reward, success
  and turns, each with images, text, answer and, unless it all comes at the end, reward. It belongs to no model: the
  conversation is written and tokenised for the policy that reads it.
* `episode-*.pt`, as `write_recorded` writes it: the tokens, log-probs and pixels of one model's own episodes.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mmrl.agents.conversation import Writer
from mmrl.agents.environment import Observation
from mmrl.agents.episode import Episode
from mmrl.agents.stored import restore_episode, store_episode
from mmrl.agents.tasks import AgentTask
from mmrl.errors import UserError
from mmrl.files import replaced
from mmrl.hub.tables import Row, read_rows
from mmrl.vlm.policy import VlmPolicy
from mmrl.vlm.task import TaskError

LOGGER = logging.getLogger("mmrl")
ROWS, SINGLE = "episodes.jsonl", "episode-*.pt"


def write_recorded(episodes: Sequence[Episode], folder: Path) -> int:
    """Write the episodes of a model that have a result, one file each; returns how many."""
    folder.mkdir(parents=True, exist_ok=True)
    valid = [episode for episode in episodes if episode.has_result]
    first = len(list(folder.glob(SINGLE)))
    for number, episode in enumerate(valid, first):
        with replaced(folder / f"episode-{number:06d}.pt") as draft:
            torch.save(store_episode(episode), draft)
    return len(valid)


def read_recorded(folder: Path, policy: VlmPolicy, writer: Writer) -> list[Episode]:
    """Read the episodes of a folder."""
    episodes: list[Episode] = []
    if (folder / ROWS).is_file():
        episodes = [_episode(row, folder, policy, writer) for row in read_rows(str(folder / ROWS), "train", None)]
    for episode in episodes:
        if not episode.has_result:
            LOGGER.warning("%s: a recorded episode is left out: %s", folder, episode.reason)
    valid = [episode for episode in episodes if episode.has_result]
    valid += [_read_single(file, policy) for file in sorted(folder.glob(SINGLE))]
    if not valid:
        reason = f"none of its {len(episodes)} fits into the model" if episodes else f"no {ROWS} and no {SINGLE}"
        raise UserError(f"{folder} has no episodes to learn from: {reason}")
    return valid


def _read_single(file: Path, policy: VlmPolicy) -> Episode:
    try:
        episode = restore_episode(torch.load(file, map_location="cpu", weights_only=True))
    except Exception as error:  # a damaged file may raise anything in pickle
        raise UserError(f"{file} is no recorded episode: {type(error).__name__}: {error}") from error
    own = [token for token, sampled in zip(episode.trajectory.ids, episode.trajectory.sampled, strict=True) if sampled]
    text = policy.processor.tokenizer.decode(own, skip_special_tokens=True)
    if text != "".join(episode.answers):
        raise UserError(f"{file} was written with another tokenizer than that of {policy.config.path}")
    return episode


def replay_episode(
    task: AgentTask, turns: Sequence[tuple[Observation, str]], policy: VlmPolicy, writer: Writer
) -> Episode:
    """Build the episode of given observations and answers as the policy would have read and written it."""
    episode = Episode(task, ending="terminated", finish="eos")
    steps, tokenizer = episode.trajectory, policy.processor.tokenizer
    try:
        conversation = writer.begin(task, turns[0][0])
        episode.prompt = conversation.parts[0].prompt
        read = len(episode.prompt)
        for number, (observation, answer) in enumerate(turns):
            if number:
                part, cut = writer.follow(conversation, observation), writer.cut(conversation)
                steps.add_given(part) if cut is None else steps.restart(cut)
                read = read + len(part) if cut is None else len(cut)
            ids = [*tokenizer.encode(answer, add_special_tokens=False), policy.eos_ids[0]]
            writer.answer(conversation, ids)
            steps.add_turn(ids, [0.0] * len(ids))
            episode.answers.append(answer)
            read += len(ids)
            if read > policy.positions:
                problem = f"turn {number + 1} does not fit into the {policy.positions} positions of the model"
                raise TaskError("prompt_too_long", task.id, problem)
    except TaskError as error:
        episode.ending, episode.reason = "overflow", str(error)
    return episode


def _episode(row: Row, folder: Path, policy: VlmPolicy, writer: Writer) -> Episode:
    turns: Any = row.cells.get("turns")
    problem = row.problem
    if problem is None and (not isinstance(turns, list) or not turns):
        problem = "turns must be a list of at least one turn"
    elif problem is None and not all(isinstance(turn, dict) and isinstance(turn.get("answer"), str) for turn in turns):
        problem = "each turn must have an answer"
    if problem is not None:
        raise UserError(f"{row.place}: {problem}")
    task = row.cells.get("task") or {}
    name = task.get("name", "task") if isinstance(task, Mapping) else str(task)
    seen = [(_observation(turn, folder, row), str(turn["answer"])) for turn in turns]
    episode = replay_episode(AgentTask(f"{name}/{row.cells.get('seed', 0)}"), seen, policy, writer)
    episode.rewards = _rewards(row, turns)
    episode.success = bool(row.cells.get("success", sum(episode.rewards) > 0))
    return episode


def _rewards(row: Row, turns: Sequence[Mapping[str, Any]]) -> list[float]:
    """The rewards of the turns; without any, the row's own at the end."""
    try:
        if any("reward" in turn for turn in turns):
            return [float(turn.get("reward", 0.0)) for turn in turns]
        return [0.0] * (len(turns) - 1) + [float(row.cells["reward"])]
    except (KeyError, TypeError, ValueError):
        raise UserError(f"{row.place}: expected a number as reward, of the row or of its turns") from None


def _observation(turn: Mapping[str, Any], folder: Path, row: Row) -> Observation:
    from PIL import Image

    try:
        images = tuple(np.asarray(Image.open(folder / name).convert("RGB")) for name in turn.get("images") or ())
    except OSError as error:
        raise UserError(f"{row.place}: an image cannot be read: {error}") from error
    return Observation(str(turn.get("text") or ""), images)
