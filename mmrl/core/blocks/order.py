"""Choice of the tasks that come next: each once an epoch, or by what the run has learned about them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mmrl.core.block import Block, unknown_name
from mmrl.core.blocks.advantage import Advantage, group_center, group_sum
from mmrl.core.blocks.tracked import TrackedValue, tasks_of
from mmrl.core.rollouts import Rollouts
from mmrl.core.state import ObjectiveState
from mmrl.fields import bounded, rare


@dataclass(frozen=True)
class TaskOrder(Block):
    """Chooses the tasks that come next."""

    def state(self, tasks: Sequence[Any] = ()) -> Any:
        """See `Block.state`; the state may depend on the training tasks."""
        return None

    def __call__(self, tasks: int, count: int, state: ObjectiveState, generator: torch.Generator) -> Tensor | None:
        """Draw tasks.

        Args:
            tasks: Number of training tasks.
            count: Number of tasks to draw.
            state: State of the objective's blocks.
            generator: CPU generator of this draw, the same in every process.

        Returns:
            Their indices (count,) int64; None for each task once an epoch, in an order that is shuffled anew.
        """
        raise NotImplementedError

    def conflicts(self, advantage: Advantage) -> Iterator[str]:
        """Yield why the order does not go with an estimator of advantages."""
        yield from ()


@dataclass(frozen=True)
class Epochs(TaskOrder):
    """Each task once an epoch, in an order that is shuffled anew."""

    kind = "epochs"

    def __call__(self, tasks: int, count: int, state: ObjectiveState, generator: torch.Generator) -> Tensor | None:
        return None

    def formula(self) -> str:
        return ""


@dataclass(frozen=True)
class Uncertain(TaskOrder):
    """Prefers tasks that succeed about half of the time, by the value v that the estimator tracks.

    Source: SPO, arXiv 2509.13232; verl-project/verl-recipe spo/spo_ray_trainer.py prompt2weight, which draws from the
        prompts of one loaded batch.
    """

    kind = "uncertain"
    floor: float = rare(bounded(0.05, above=0))
    """Weight of tasks whose outcome is certain."""

    def weights(self, tasks: int, state: ObjectiveState) -> Tensor:
        """Weight (tasks,) float64 of each task."""
        counts = state.blocks["advantage"].of(range(tasks))
        value = counts[:, 0] / counts.sum(1)
        return (value * (1 - value)).sqrt() + self.floor

    def __call__(self, tasks: int, count: int, state: ObjectiveState, generator: torch.Generator) -> Tensor | None:
        return torch.multinomial(self.weights(tasks, state), count, replacement=count > tasks, generator=generator)

    def conflicts(self, advantage: Advantage) -> Iterator[str]:
        if not isinstance(advantage, TrackedValue):
            yield (
                f"order '{self.kind}' reads the values that advantage '{TrackedValue.kind}' tracks, but advantage is "
                f"'{advantage.kind}'. Use order 'epochs', or that advantage."
            )

    def formula(self) -> str:
        return f"tasks are drawn with weight sqrt(v (1 - v)) + {self.floor:g}, v = a / (a + b) of the task"


class CategoryQ:
    """Estimate of how much can be learned from each category of tasks.

    Args:
        categories: name of each task's category.
    """

    def __init__(self, categories: Sequence[str]) -> None:
        self.names = list(dict.fromkeys(categories))
        numbers = {name: number for number, name in enumerate(self.names)}
        self.of_task = torch.tensor([numbers[name] for name in categories])
        self.q = torch.zeros(len(self.names), dtype=torch.float64)

    def state_dict(self) -> dict[str, float]:
        """Return what a checkpoint has to keep."""
        return dict(zip(self.names, self.q.tolist(), strict=True))

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Continue from a checkpoint."""
        self.q = torch.tensor([state[name] for name in self.names], dtype=torch.float64)


@dataclass(frozen=True)
class CategoryBandit(TaskOrder):
    """Draws categories of tasks by a bandit, whose reward is how far the rewards of a group differ from their mean.

    After a step, Q_c <- (1 - rate) Q_c + rate * mean |R - mean_g R| over the category's rows. A place of the next step
    gets the category c with probability softmax(Q / temperature)_c, and a task of it at random.

    Source: SEC, arXiv 2505.14970; Vincent-La/cofa sec/verl/verl/utils/auto_curriculum/priority.py BanditPriority.
    """

    kind = "category_bandit"
    reads_sum = True
    field: str = "category"
    """Field or column of a task that names its category; the tasks of robots have `task`."""
    rate: float = rare(bounded(0.5, above=0, at_most=1))
    """Weight of a step in Q."""
    temperature: float = rare(bounded(0.4, above=0))
    """Temperature of the choice."""
    forgets: bool = rare(False)
    """Whether the Q of a category that a step had no row of moves towards 0, as in the public code."""

    def state(self, tasks: Sequence[Any] = ()) -> CategoryQ | None:
        """Q of each category; None without tasks."""
        return CategoryQ([self._category(task) for task in tasks]) if tasks else None

    def _category(self, task: Any) -> str:
        said = fields_of(task)
        if self.field not in said:
            raise ValueError(f"order.field: {unknown_name(self.field, said, 'field of the training tasks')}")
        return said[self.field]

    def observe(self, rollouts: Rollouts, state: CategoryQ) -> Rollouts:
        """Move Q by the rows of a step."""
        tasks, place = tasks_of(rollouts)
        row, valid = state.of_task[tasks][place.cpu()], rollouts.scored.cpu()
        distance = group_center(rollouts.reward, rollouts.group, rollouts.scored).abs().double().cpu()
        count = group_sum(valid.double(), row, len(state.q))
        mean = group_sum(distance, row, len(state.q)) / count.clamp(min=1)
        moved = (1 - self.rate) * state.q + self.rate * mean
        state.q = moved if self.forgets else torch.where(count > 0, moved, state.q)
        return rollouts

    def __call__(self, tasks: int, count: int, state: ObjectiveState, generator: torch.Generator) -> Tensor | None:
        bandit: CategoryQ = state.blocks["order"]
        chances = torch.softmax(bandit.q / self.temperature, 0)
        drawn = torch.multinomial(chances, count, replacement=True, generator=generator)
        chosen = torch.empty(count, dtype=torch.int64)
        for category in drawn.unique().tolist():
            (places,), (members,) = torch.where(drawn == category), torch.where(bandit.of_task == category)
            rounds = -(-len(places) // len(members))
            mixed = torch.cat([torch.randperm(len(members), generator=generator) for _ in range(rounds)])
            chosen[places] = members[mixed[: len(places)]]
        return chosen

    def formula(self) -> str:
        return (
            f"tasks are drawn by {self.field}, c with probability softmax(Q / {self.temperature:g}); "
            f"Q_c <- {1 - self.rate:g} Q_c + {self.rate:g} mean_c |R_i - mean_g R|"
        )


def fields_of(task: Any) -> dict[str, str]:
    """Texts and numbers that a task says about itself, in its own fields and in the columns of its data row."""
    inner = getattr(task, "task", None)  # what an environment is reset with, or the question about a video
    found: dict[str, Any] = {}
    for part in (getattr(inner, "columns", inner), getattr(task, "columns", None), getattr(task, "__dict__", None)):
        found |= part if isinstance(part, Mapping) else {}
    return {name: str(value) for name, value in found.items() if isinstance(value, str | int | float)}
