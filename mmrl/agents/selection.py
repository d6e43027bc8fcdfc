"""Choosing training tasks by how often the agent solves them before training.

Groups of a task that is never or always solved have no signal. The public code of ARPO trains on tasks that its base
agent solved at least once; `TaskSelector(max_rate=0.9)` also leaves out those that are solved already. The price is
`n_rollouts` episodes of every task.
"""

from __future__ import annotations

import contextlib
import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from accelerate import PartialState

from mmrl.agents.environments.agent_tasks import AgentTask
from mmrl.agents.rollout.storage import write_recorded
from mmrl.errors import UserError
from mmrl.files import replaced
from mmrl.training.processes import stream_seed

if TYPE_CHECKING:
    from mmrl.agents.agent_recipe import AgentRecipe


@dataclass(frozen=True)
class TaskRate:
    """Success rate of a task."""

    task: AgentTask
    successes: int
    rollouts: int
    """Episodes with a result."""

    @property
    def rate(self) -> float:
        """Success rate of the episodes with a result; 0 without any."""
        return self.successes / self.rollouts if self.rollouts else 0.0


@dataclass(frozen=True)
class TaskSelector:
    """Selects the tasks that the agent solves some of the time.

    Source: dvlab-research/ARPO, its list of training tasks (solved by the base agent at least once).
    """

    min_success: int = 1
    n_rollouts: int = 16
    max_rate: float = 1.0

    def __post_init__(self) -> None:
        if self.n_rollouts < 1 or not 0 <= self.min_success <= self.n_rollouts or not 0 < self.max_rate <= 1:
            raise UserError(
                f"min_success={self.min_success}, n_rollouts={self.n_rollouts}, max_rate={self.max_rate}: expected "
                "n_rollouts of at least 1, min_success from 0 to n_rollouts, and max_rate above 0 and at most 1"
            )

    def keeps(self, rate: TaskRate) -> bool:
        """Whether to train on a task; never on one without any result."""
        return rate.rollouts > 0 and rate.successes >= self.min_success and rate.rate <= self.max_rate

    def select(self, rates: Sequence[TaskRate]) -> list[TaskRate]:
        """The kept tasks, in order."""
        return [rate for rate in rates if self.keeps(rate)]


def measure_tasks(
    recipe: AgentRecipe, n_rollouts: int, batch_tasks: int = 16, record: Path | None = None
) -> Iterator[TaskRate]:
    """Run the recipe's policy on its training tasks, sampling as in training."""
    tasks = recipe.train_tasks
    for start in range(0, len(tasks), batch_tasks):
        batch = tasks[start : start + batch_tasks]
        repeated = [task for task in batch for _ in range(n_rollouts)]
        seeds = [
            # by task and number, not by batch: the rates do not depend on `batch_tasks`
            stream_seed(recipe.config.seed, "select", task.id, number)
            for task in batch
            for number in range(n_rollouts)
        ]
        outcomes: dict[int, list[bool]] = defaultdict(list)
        episodes = recipe.run_episodes(recipe.policy, repeated, seeds)
        if record is not None:
            write_recorded(episodes, record)
        for index, episode in enumerate(episodes):
            if episode.has_result:
                outcomes[index // n_rollouts].append(episode.success)
        for number, task in enumerate(batch):
            # one by one, so that the command can show rates before the last task
            yield TaskRate(task, sum(outcomes[number]), len(outcomes[number]))


def open_agent(config: Path | str, overrides: Sequence[str] = ()) -> AgentRecipe:
    """Open the recipe of an agent's configuration, with its policy on the fastest device; the caller closes it."""
    from mmrl.agents.agent_recipe import AgentRecipe
    from mmrl.config import load_run

    entry, settings = load_run(config, overrides)
    kind = entry.load_recipe_class()
    if not issubclass(kind, AgentRecipe):
        raise UserError(f"{config}: recipe '{entry.name}' has no agent, so there are no episodes to count")
    recipe = kind(settings)
    recipe.policy.to(PartialState().device)
    return recipe


def build_tasks(
    path: str | Path,
    *,
    config: str,
    rollouts: int = 16,
    min_success: int = 1,
    max_rate: float = 1.0,
    overrides: Sequence[str] = (),
) -> Path:
    """Select the tasks of a run that has no file of them yet; the function of `data.build`.

    data: {file: runs/tasks.jsonl, build: "mmrl.agents.selection:build_tasks", build_options: {config: start.yaml}}
    """
    selector = TaskSelector(min_success, rollouts, max_rate)
    with contextlib.closing(open_agent(config, overrides)) as recipe:
        rates = list(measure_tasks(recipe, selector.n_rollouts))
    write_tasks(selector.select(rates), Path(path))
    return Path(path)


def write_tasks(rates: Sequence[TaskRate], path: Path) -> None:
    """Write tasks with their rates as a file that `data.file` reads."""
    if path.suffix != ".jsonl":
        raise UserError(f"the tasks are written to {path}; expected a file name that ends in .jsonl")
    if not rates:
        raise UserError("no task is left; lower min_success, raise max_rate, or start from a better agent")
    path.parent.mkdir(parents=True, exist_ok=True)
    with replaced(path) as draft, draft.open("w", encoding="utf-8") as file:
        for rate in rates:
            task = rate.task
            row = {"id": task.id, "task": dict(task.task), "seed": task.seed, "instruction": task.instruction}
            row |= {"success_rate": rate.rate, "rollouts": rate.rollouts}
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
