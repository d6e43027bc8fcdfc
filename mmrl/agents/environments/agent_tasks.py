"""The tasks of a run and their seeds."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mmrl.errors import UserError
from mmrl.fields import SET, UNSET, bounded, only_with, rare
from mmrl.hub.building import BuiltPath, build_if_missing
from mmrl.hub.tables import DataRow, good_rows

COLUMNS = ("id", "task", "seed", "instruction")
NOTES = ("success_rate", "rollouts")
"""Additional columns that `mmrl select` writes."""
LARGEST_SEED = 2**31 - 1
"""Every random generator takes seeds up to this."""


@dataclass(frozen=True)
class AgentTask:
    """One task; all samples of its group start from it."""

    id: str
    """Unique within a task set, such as `maze/7`."""
    task: Mapping[str, Any] = field(default_factory=dict)
    """Argument of `reset`; plain data."""
    seed: int = 0
    instruction: str = ""
    """Instruction for the agent, unless the first observation contains it."""


@dataclass
class TaskSetConfig:
    """A set of tasks: names times seeds, or the rows of a file."""

    names: list[str] = only_with(field(default_factory=list), file=UNSET)
    """Names of tasks, passed to `reset` as the entry `name`. Default: the environment's only task."""
    seeds: int = only_with(bounded(100, at_least=1, at_most=LARGEST_SEED), file=UNSET)
    """Number of seeds per task."""
    first_seed: int = bounded(0, at_least=0, at_most=LARGEST_SEED)
    """First seed; training and evaluation sets must not share seeds."""
    options: dict[str, Any] = only_with(field(default_factory=dict), file=UNSET)
    """Additional entries of every task."""
    instruction: str = ""
    """Instruction for the agent, unless the first observation contains it."""
    file: str | None = None
    """A .jsonl, .json, .parquet or .csv file to read the tasks from instead, one per row: `task` (an object, or a
    name), `seed`, and optionally `instruction` and `id`."""
    build: str | None = rare(only_with(None, file=SET))
    """`module:function` that writes the file if it does not exist; called with the path and `build_options`."""
    build_options: dict[str, Any] = rare(field(default_factory=dict))
    """Keyword arguments of `build`."""
    max_tasks: int | None = bounded(None, at_least=1)
    """Use only the first N tasks."""
    seen: bool = False
    """Whether an evaluation may contain training tasks, to measure how well they were learned."""

    def validate(self) -> None:
        """Check that names and seeds are allowed; raises UserError."""
        if len(set(self.names)) < len(self.names):
            raise UserError(f"duplicate task names: {', '.join(self.names)}")
        if self.first_seed + self.seeds - 1 > LARGEST_SEED:
            raise UserError(
                f"first_seed={self.first_seed} and seeds={self.seeds} exceed the maximum seed {LARGEST_SEED}"
            )


def list_tasks(config: TaskSetConfig) -> list[AgentTask]:
    """The tasks of a set, cycling through the names, so that the first ones cover all of them."""
    if config.file is not None:
        build_if_missing(BuiltPath(path=config.file, build=config.build, build_options=config.build_options), "data")
        tasks = [_task_in(row, config) for row in good_rows(config.file)]
        if not tasks:
            raise UserError(f"{config.file} has no tasks")
        for name, count in Counter(task.id for task in tasks).items():
            if count > 1:
                raise UserError(f"{config.file}: two tasks have the id {name}; ids must be unique")
        return tasks[: config.max_tasks]
    seeds = range(config.first_seed, config.first_seed + config.seeds)
    pairs = ((seed, name) for seed in seeds for name in config.names or [""])  # product() would store all seeds
    return [
        AgentTask(f"{name or 'task'}/{seed}", _named(name, config.options), seed, config.instruction)
        for seed, name in itertools.islice(pairs, config.max_tasks)
    ]


def check_splits(
    data: TaskSetConfig,
    train: Sequence[AgentTask],
    eval_data: Mapping[str, TaskSetConfig],
    splits: Mapping[str, Sequence[AgentTask]],
) -> None:
    """Reject an evaluation on training tasks unless it is marked `seen`; raises UserError."""
    if data.seen:
        raise UserError("data.seen is only for evaluation sets (eval_data); training tasks are always seen")
    check_disjoint(train, {name: tasks for name, tasks in splits.items() if not eval_data[name].seen})


def check_disjoint(train: Sequence[AgentTask], splits: Mapping[str, Sequence[AgentTask]]) -> None:
    """Raise UserError if a split shares a task with training."""
    known = {_key(task) for task in train}
    for name, tasks in splits.items():
        shared = [task.id for task in tasks if _key(task) in known]
        if shared:
            raise UserError(
                f"{len(shared)} of {len(tasks)} tasks of {name} are also training tasks, such as {shared[0]}; use "
                "different seeds (first_seed) or names, or confirm that this is intended (seen: true)"
            )


def _named(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    return {"name": name, **options} if name else dict(options)


def _task_in(row: DataRow, config: TaskSetConfig) -> AgentTask:
    cells = {key: value for key, value in row.cells.items() if value is not None}
    unknown = [key for key in cells if key not in COLUMNS + NOTES]
    task, seed = cells.get("task", {}), cells.get("seed", config.first_seed)
    texts = {key: cells.get(key, "") for key in ("id", "instruction")}
    problem = ""
    if unknown:
        problem = f"unknown entry {', '.join(unknown[:5])}; a task has {', '.join(COLUMNS)}"
    elif not isinstance(task, (dict, str)):
        problem = f"task is {task!r:.80}; expected an object or a task name"
    elif type(seed) is not int or not 0 <= seed <= LARGEST_SEED:
        problem = f"seed is {seed!r:.80}; expected an integer from 0 to {LARGEST_SEED}"
    elif not all(isinstance(text, str) for text in texts.values()):
        problem = "id and instruction must be text"
    if problem:
        raise UserError(f"{row.place}: {problem}")
    body = _named(task, {}) if isinstance(task, str) else task
    name = str(body.get("name") or row.place.rpartition("/")[2])
    return AgentTask(texts["id"] or f"{name}/{seed}", body, seed, texts["instruction"] or config.instruction)


def _key(task: AgentTask) -> tuple[str, int]:
    return json.dumps(task.task, sort_keys=True, default=str), task.seed
