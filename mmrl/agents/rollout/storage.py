"""Folders of recorded episodes, from a run or an expert, as episodes of a policy.

Two formats are read, and a folder may hold both:

* `episodes.jsonl` and its images, as `write_episodes` writes them: a row an episode, with task, seed, reward, success
  and turns, each with images, text, answer and, unless it all comes at the end, reward. It belongs to no model: the
  conversation is written and tokenised for the policy that reads it.
* `episode-*.pt`, as `write_recorded` writes it: the tokens, log-probs and pixels of one model's own episodes.
"""

from __future__ import annotations

import logging
import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mmrl.agents.environments.action_formats import SAY
from mmrl.agents.environments.agent_tasks import AgentTask
from mmrl.agents.environments.environment import ActionConfig, CallResult, Observation
from mmrl.agents.environments.native_calls import OK, read_native
from mmrl.agents.rollout.conversation import Writer
from mmrl.agents.rollout.episodes import Episode, Trajectory
from mmrl.agents.rollout.runner import note_overflow
from mmrl.errors import UserError
from mmrl.files import replaced
from mmrl.hub.foreign import MalformedError, as_flag, as_image
from mmrl.hub.images import ImageError, decode_image, read_image_file
from mmrl.hub.tables import DataRow, good_rows
from mmrl.vlm.data.prompt import Context, Insert, Prompt
from mmrl.vlm.data.task import TaskError
from mmrl.vlm.engine.vlm_policy import VlmPolicy

Record = dict[str, Any]
"""Tensors, numbers, texts, and lists and dictionaries of them."""

TABLES = ("input_ids", "mm_token_type_ids", "position_ids")
OLDER_MEDIA = ("pixel_values", "pixel_values_videos", "image_grid_thw", "video_grid_thw")
"""Media entries that older files store separately from the tables."""
DTYPES = {str(dtype): dtype for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.uint8)}
FASTEST = 1
"""zlib compression level; higher levels take several times as long to save a few percent."""
PLAIN = (
    *("anchors", "seconds", "gains", "errors", "refused", "calls", "ending", "reason", "success", "finish"),
    *("added_reward", "terms", "tool_errors", "overflows"),
)
"""Fields of an episode that are plain data."""
LOGGER = logging.getLogger("mmrl")
ROWS, SINGLE = "episodes.jsonl", "episode-*.pt"


def store_episode(episode: Episode) -> Record:
    """Turn a finished episode into plain data."""
    if episode.prompt is None:
        raise ValueError("an episode that did not start cannot be stored.")
    # prompts share parts, such as images of earlier turns; each object is stored once
    table = _PromptTable()
    steps = episode.trajectory
    return {
        "id": episode.task.id,
        "instruction": episode.task.instruction,
        "first": table.add(episode.prompt),
        "inserts": [[insert.start, table.add(insert.prompt)] for insert in steps.inserts],
        "contexts": [[context.start, table.add(context.prompt)] for context in steps.contexts],
        "prompts": table.records,
        "ids": torch.tensor(steps.ids, dtype=torch.int64),
        "logp": torch.tensor(steps.logp, dtype=torch.float64),
        "turn": torch.tensor(steps.turn, dtype=torch.int32),
        "sampled": torch.tensor(steps.sampled, dtype=torch.bool),
        "turns": steps.turns,
        "bootstrap_index": steps.bootstrap_index,
        "last_text": episode.last.text,
        "last_images": [_compressed(torch.from_numpy(image)) for image in episode.last.images[-1:]],
        **{name: getattr(episode, name) for name in PLAIN},
        "rewards": [float(reward) for reward in episode.rewards],
        "answers": list(episode.answers),
    }


def restore_episode(record: Record, task: AgentTask | None = None) -> Episode:
    """The stored episode, without its video and with only the last image of its end."""
    prompts = _restored_prompts(record["prompts"])
    trajectory = Trajectory(
        ids=record["ids"].tolist(),
        logp=record["logp"].tolist(),
        turn=record["turn"].tolist(),
        sampled=record["sampled"].tolist(),
        inserts=[Insert(start, prompts[number]) for start, number in record["inserts"]],
        contexts=[Context(start, prompts[number]) for start, number in record["contexts"]],
        turns=record["turns"],
        bootstrap_index=record["bootstrap_index"],
    )
    images = tuple(_expanded(image).numpy() for image in record["last_images"])
    return Episode(
        task or AgentTask(record["id"], instruction=record["instruction"]),
        prompts[record["first"]],
        trajectory,
        rewards=list(record["rewards"]),
        answers=list(record["answers"]),
        last=Observation(record["last_text"], images),
        **{name: record[name] for name in PLAIN if name in record},  # older files lack some
    )


def size_of(record: Any) -> int:
    """Bytes of the tensors and texts of a record."""
    if isinstance(record, Tensor):
        return record.nbytes
    if isinstance(record, dict):
        return sum(size_of(value) for value in record.values())
    if isinstance(record, list):
        return sum(size_of(value) for value in record)
    # strings by characters, other plain data as eight bytes: close enough for a limit in megabytes
    return len(record) if isinstance(record, str) else 8


class _PromptTable:
    """Prompts by number, each object once and after its parts."""

    def __init__(self) -> None:
        self.records: list[Record] = []
        self._number: dict[int, int] = {}

    def add(self, prompt: Prompt) -> int:
        if id(prompt) not in self._number:
            # parts first, so that a prompt only refers to smaller numbers
            parts = [self.add(part) for part in prompt.parts]
            record: Record = {"next_position": int(prompt.next_position), "text": prompt.text, "parts": parts}
            record |= {name: getattr(prompt, name).cpu().clone() for name in TABLES}
            record["media"] = {
                # pixels are most of the size; token tables are small
                name: _compressed(value) if value.is_floating_point() else value.cpu().clone()
                for name, value in prompt.media.items()
            }
            self._number[id(prompt)] = len(self.records)
            self.records.append(record)
        return self._number[id(prompt)]


def _restored_prompts(records: list[Record]) -> list[Prompt]:
    """Prompts by number; the parts of a prompt come before it."""
    found: list[Prompt] = []
    for record in records:
        plain: dict[str, Any] = {name: record[name] for name in TABLES}
        stored = record.get("media") or {name: record[name] for name in OLDER_MEDIA if record.get(name) is not None}
        media = {name: value if isinstance(value, Tensor) else _expanded(value) for name, value in stored.items()}
        parts = tuple(found[number] for number in record["parts"])
        found.append(
            Prompt(**plain, next_position=record["next_position"], media=media, text=record["text"], parts=parts)
        )
    return found


def _compressed(values: Tensor) -> Record:
    values = values.detach().cpu().contiguous()
    packed = bytearray(zlib.compress(values.flatten().view(torch.uint8).numpy().tobytes(), FASTEST))
    return {
        # cloned, since `frombuffer` shares the bytes, which are freed
        "data": torch.frombuffer(packed, dtype=torch.uint8).clone(),
        "dtype": str(values.dtype),
        "shape": list(values.shape),
    }


def _expanded(record: Record) -> Tensor:
    dtype, shape = DTYPES[record["dtype"]], tuple(record["shape"])
    # zlib and `view` both fail on tensors without elements
    if not math.prod(shape):
        return torch.empty(shape, dtype=dtype)
    raw = bytearray(zlib.decompress(record["data"].numpy().tobytes()))
    return torch.from_numpy(np.frombuffer(raw, np.uint8)).view(dtype).reshape(shape)


def write_recorded(episodes: Sequence[Episode], folder: Path) -> int:
    """Write the episodes of a model that have a result, one file each; returns their number."""
    folder.mkdir(parents=True, exist_ok=True)
    valid = [episode for episode in episodes if episode.has_result]
    # appended: a folder may hold episodes of several runs
    first = len(list(folder.glob(SINGLE)))
    for number, episode in enumerate(valid, first):
        with replaced(folder / f"episode-{number:06d}.pt") as draft:
            torch.save(store_episode(episode), draft)
    return len(valid)


@dataclass(frozen=True)
class RecordedRow:
    """An episode of `episodes.jsonl`, checked, which belongs to no model yet."""

    task: AgentTask
    turns: Sequence[tuple[Observation, str]]
    """Observation and answer of each turn."""
    rewards: list[float]
    """Reward of each turn."""
    success: bool


@dataclass(frozen=True)
class RecordedFolder:
    """The episodes of a folder, read and checked as far as possible without a model."""

    folder: Path
    rows: Sequence[RecordedRow]
    singles: Mapping[Path, Episode]
    """Episodes of one model, by their files."""

    def episodes(self, policy: VlmPolicy, writer: Writer) -> list[Episode]:
        """The episodes, encoded for a policy; raises UserError if none fits its positions, or a tokenizer differs."""
        replayed = [_replayed(row, policy, writer) for row in self.rows]
        for episode in replayed:
            if not episode.has_result:
                LOGGER.warning("%s: a recorded episode is skipped: %s", self.folder, episode.reason)
        valid = [episode for episode in replayed if episode.has_result]
        valid += [_check_tokenizer(file, episode, policy) for file, episode in self.singles.items()]
        if not valid:
            raise UserError(
                f"{self.folder} has no episodes to learn from: none of its {len(replayed)} episodes fits the model"
            )
        return valid


def read_recorded(folder: Path) -> RecordedFolder:
    """Read the episodes of a folder; raises UserError if a file is not an episode or there are none."""
    table = folder / ROWS
    rows = [_row(row, folder) for row in good_rows(str(table))] if table.is_file() else []
    singles = {file: _read_single(file) for file in sorted(folder.glob(SINGLE))}
    if not rows and not singles:
        reason = f"{ROWS} is empty" if table.is_file() else f"no {ROWS} and no {SINGLE}"
        raise UserError(f"{folder} has no episodes to learn from: {reason}")
    return RecordedFolder(folder, rows, singles)


def _read_single(file: Path) -> Episode:
    try:
        return restore_episode(torch.load(file, map_location="cpu", weights_only=True))
    except Exception as error:  # a damaged file may raise anything in pickle
        raise UserError(f"{file} is not a recorded episode: {type(error).__name__}: {error}") from error


def _check_tokenizer(file: Path, episode: Episode, policy: VlmPolicy) -> Episode:
    steps, own = episode.trajectory, [list[int]() for _ in episode.answers]
    for token, turn, sampled in zip(steps.ids, steps.turn, steps.sampled, strict=True):
        if sampled:
            own[turn].append(token)
    texts = policy.turns.decode(own)
    # the thought that a prompt opens is part of the answer and no token of it
    if any(
        not answer.endswith(text) or answer.removesuffix(text).strip() not in ("", "<think>")
        for answer, text in zip(episode.answers, texts, strict=True)
    ):
        raise UserError(f"{file} was written with a different tokenizer from the one of {policy.config.path}")
    return episode


def replay_episode(
    task: AgentTask, turns: Sequence[tuple[Observation, str]], policy: VlmPolicy, writer: Writer
) -> Episode:
    """Build the episode of given observations and answers as the policy would have read and written it."""
    episode = Episode(task, ending="terminated", finish="eos")
    steps = episode.trajectory
    try:
        conversation = writer.begin(task, turns[0][0])
        episode.prompt = conversation.parts[0].prompt
        read = len(episode.prompt)
        for number, (observation, answer) in enumerate(turns):
            if number:
                seen = _as_result(observation, turns[number - 1][1], writer) if writer.tools else observation
                part, cut = writer.follow(conversation, seen), writer.cut(conversation)
                steps.add_given(part) if cut is None else steps.restart(cut)
                # a cut conversation starts again from the cut prompt
                read = read + len(part) if cut is None else len(cut)
            ids = policy.encode_answer(conversation.parts[-1].prompt, answer)
            writer.answer(conversation, ids)
            # log-probabilities are unknown; methods that learn from such episodes do not read them
            steps.add_turn(ids, [0.0] * len(ids))
            episode.answers.append(answer)
            read += len(ids)
            if read > policy.positions:
                problem = f"turn {number + 1} does not fit in the model's {policy.positions} positions"
                raise TaskError("prompt_too_long", task.id, problem)
    except TaskError as error:
        note_overflow(episode, error)
    return episode


def _as_result(observation: Observation, answer: str, writer: Writer) -> Observation:
    """An observation as the result of the calls of the answer before it; records have it as one."""
    if writer.native:
        calls = [call.name for call in read_native(answer, writer.native, writer.tools).calls if call.status == OK]
    else:
        calls = [action.name for action in ActionConfig(format="tool_call").parse(answer).actions if action.name != SAY]
    if not calls or observation.results:
        return observation
    return replace(observation, results=(CallResult(calls[0], observation.text, len(observation.images)),))


def _replayed(row: RecordedRow, policy: VlmPolicy, writer: Writer) -> Episode:
    episode = replay_episode(row.task, row.turns, policy, writer)
    episode.rewards = list(row.rewards)
    episode.success = row.success
    return episode


def _row(row: DataRow, folder: Path) -> RecordedRow:
    turns: Any = row.cells.get("turns")
    if not isinstance(turns, list) or not turns:
        raise UserError(f"{row.place}: turns must be a list of at least one turn")
    if not all(isinstance(turn, dict) and isinstance(turn.get("answer"), str) for turn in turns):
        raise UserError(f"{row.place}: each turn must have an answer")
    task = row.cells.get("task") or {}
    name = task.get("name", "task") if isinstance(task, Mapping) else str(task)
    seen = [(_observation(turn, folder, row), str(turn["answer"])) for turn in turns]
    rewards, success = _rewards(row, turns), row.cells.get("success")
    try:
        succeeded = sum(rewards) > 0 if success is None else as_flag(success, "success")
    except MalformedError as error:
        raise UserError(f"{row.place}: {error}") from None
    return RecordedRow(AgentTask(f"{name}/{row.cells.get('seed', 0)}"), seen, rewards, succeeded)


def _rewards(row: DataRow, turns: Sequence[Mapping[str, Any]]) -> list[float]:
    """The rewards of the turns; without any, the row's own at the end."""
    try:
        if any("reward" in turn for turn in turns):
            return [float(turn.get("reward", 0.0)) for turn in turns]
        return [0.0] * (len(turns) - 1) + [float(row.cells["reward"])]
    except (KeyError, TypeError, ValueError):
        raise UserError(f"{row.place}: expected a number as the reward of the row or of each turn") from None


def _observation(turn: Mapping[str, Any], folder: Path, row: DataRow) -> Observation:
    try:
        images = tuple(as_image(decode_image(read_image_file(folder / name))) for name in turn.get("images") or ())
    except (OSError, ImageError, MalformedError) as error:
        raise UserError(f"{row.place}: an image cannot be read: {error}") from error
    return Observation(str(turn.get("text") or ""), images)
