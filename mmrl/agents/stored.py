"""Episodes as plain data that `torch.load(weights_only=True)` reads back to the bit.

Parts that several prompts of an episode share, such as the images of a history, are stored once. Pixels are compressed
without loss; screens are mostly flat, so an image takes some hundredths of its float32 size.
"""

from __future__ import annotations

import math
import zlib
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mmrl.agents.environment import Observation
from mmrl.agents.episode import Episode
from mmrl.agents.tasks import AgentTask
from mmrl.agents.trajectories import Trajectory
from mmrl.vlm.payload import Context, Insert, Prompt

Record = dict[str, Any]
"""Tensors, numbers, texts, and lists and dictionaries of them."""

PIXELS = ("pixel_values", "pixel_values_videos")
GRIDS = ("image_grid_thw", "video_grid_thw")
TABLES = ("input_ids", "mm_token_type_ids", "position_ids", *GRIDS)
DTYPES = {str(dtype): dtype for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.uint8)}
FASTEST = 1
"""Level of zlib; higher ones take several times as long to save a few per cent."""


def store_episode(episode: Episode) -> Record:
    """Turn a finished episode into plain data."""
    if episode.prompt is None:
        raise ValueError("an episode that did not start cannot be stored.")
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
        **{name: record[name] for name in PLAIN},
    )


PLAIN = ("unreadable", "refused", "ending", "reason", "success", "finish")
"""Fields of an episode that are numbers and texts."""


def size_of(record: Any) -> int:
    """Bytes of the tensors and texts of a record."""
    if isinstance(record, Tensor):
        return record.nbytes
    if isinstance(record, dict):
        return sum(size_of(value) for value in record.values())
    if isinstance(record, list):
        return sum(size_of(value) for value in record)
    return len(record) if isinstance(record, str) else 8


class _PromptTable:
    """Prompts by number, each object once and after its parts."""

    def __init__(self) -> None:
        self.records: list[Record] = []
        self._number: dict[int, int] = {}

    def add(self, prompt: Prompt) -> int:
        if id(prompt) not in self._number:
            parts = [self.add(part) for part in prompt.parts]
            record: Record = {"next_position": int(prompt.next_position), "text": prompt.text, "parts": parts}
            for name in (*TABLES, *PIXELS):
                value = getattr(prompt, name)
                if value is not None:
                    value = _compressed(value) if name in PIXELS else value.cpu().clone()
                record[name] = value
            self._number[id(prompt)] = len(self.records)
            self.records.append(record)
        return self._number[id(prompt)]


def _restored_prompts(records: list[Record]) -> list[Prompt]:
    """Prompts by number; the parts of a prompt come before it."""
    found: list[Prompt] = []
    for record in records:
        plain: dict[str, Any] = {name: record[name] for name in TABLES}
        pixels: dict[str, Any] = {name: None if record[name] is None else _expanded(record[name]) for name in PIXELS}
        parts = tuple(found[number] for number in record["parts"])
        found.append(Prompt(**plain, **pixels, next_position=record["next_position"], text=record["text"], parts=parts))
    return found


def _compressed(values: Tensor) -> Record:
    values = values.detach().cpu().contiguous()
    packed = bytearray(zlib.compress(values.flatten().view(torch.uint8).numpy().tobytes(), FASTEST))
    return {
        "data": torch.frombuffer(packed, dtype=torch.uint8).clone(),
        "dtype": str(values.dtype),
        "shape": list(values.shape),
    }


def _expanded(record: Record) -> Tensor:
    dtype, shape = DTYPES[record["dtype"]], tuple(record["shape"])
    if not math.prod(shape):
        return torch.empty(shape, dtype=dtype)
    raw = bytearray(zlib.decompress(record["data"].numpy().tobytes()))
    return torch.from_numpy(np.frombuffer(raw, np.uint8)).view(dtype).reshape(shape)
