"""Blocks that remember earlier steps, and the order of tasks: the same in a resumed run as without an interruption."""

from dataclasses import dataclass

import pytest
import torch

from mmrl.core.blocks.advantage import Advantage
from mmrl.core.blocks.filter import TaskOrder
from mmrl.core.catalogue import get
from mmrl.core.rollouts import TASK, Rollouts
from mmrl.errors import RunError, UserError
from mmrl.training.processes import Streams
from mmrl.training.recipe import Step
from mmrl.training.rollers import Unit, placed
from mmrl.training.trainer import TaskStream
from tests.training.conftest import weights
from tests.training.test_rollers import Ahead
from tests.training.toy import ToyRecipe


class Sums:
    """Sum of the rewards of each task."""

    def __init__(self) -> None:
        self.sums: dict[int, float] = {}

    def state_dict(self):
        return dict(self.sums)

    def load_state_dict(self, state):
        self.sums = dict(state)


@dataclass(frozen=True)
class AgainstSums(Advantage):
    """Rewards less what their tasks have earned so far."""

    def state(self):
        return Sums()

    def __call__(self, rollouts, state=None):
        tasks = rollouts.extras[TASK].tolist()
        rows = torch.tensor([r - state.sums.get(t, 0.0) for t, r in zip(tasks, rollouts.reward.tolist(), strict=True)])
        for task, reward in zip(tasks, rollouts.reward.tolist(), strict=True):
            state.sums[task] = state.sums.get(task, 0.0) + reward
        return rows[:, None] * rollouts.mask

    def formula(self):
        return "A_it = R_i - sum of earlier R of the task"


@dataclass(frozen=True)
class LowestFirst(TaskOrder):
    """The tasks that have earned least, then drawn at random."""

    def __call__(self, tasks, count, state, generator):
        sums = state.blocks["advantage"].sums
        order = sorted(torch.randperm(tasks, generator=generator).tolist(), key=lambda task: sums.get(task, 0.0))
        return torch.tensor(order[:count])

    def formula(self):
        return "tasks in the order of what they earned"


class RememberingRecipe(ToyRecipe):
    def __init__(self, config):
        super().__init__(config)
        self.objective = self.objective.replace(advantage=AgainstSums(), order=LowestFirst())
        self.train_tasks = list(range(6, 12))  # not their own indices

    def rollout(self, policy, tasks, streams, step):
        return super().rollout(policy, [task - 6 for task in tasks], streams, step)

    def score(self, rollouts, step):
        rollouts = super().score(rollouts, step)
        return rollouts.replace(reward=rollouts.reward + 0.1)

    def advantages(self, rollouts, accelerator, step):
        self.seen = rollouts
        return super().advantages(rollouts, accelerator, step)


def test_a_resumed_run_remembers_what_an_uninterrupted_one_does(make_trainer):
    whole = make_trainer(recipe=RememberingRecipe)
    for _ in range(4):
        whole.train_step()
    first = make_trainer("parts", recipe=RememberingRecipe)
    first.train_step()
    first.train_step()
    first.save()
    second = make_trainer("parts", recipe=RememberingRecipe)
    second.resume()
    assert second.recipe.objective_state.state_dict() == first.recipe.objective_state.state_dict()
    second.train_step()
    second.train_step()
    assert second.recipe.objective_state.state_dict() == whole.recipe.objective_state.state_dict()
    assert first.recipe.seen_tasks + second.recipe.seen_tasks == whole.recipe.seen_tasks
    assert all(map(torch.equal, weights(whole), weights(second)))


@pytest.mark.parametrize("kind", ["none", "resample"])
def test_rows_know_their_task(make_trainer, kind):
    options = {"filter": {"kind": "resample", "max_tries": 4}} if kind == "resample" else {}
    trainer = make_trainer(recipe=RememberingRecipe, **options)
    trainer.train_step()
    rollouts = trainer.recipe.seen
    tasks = torch.tensor(rollouts.payload.tasks)[rollouts.group]
    assert torch.equal(rollouts.extras[TASK], tasks)
    assert set(trainer.recipe.objective_state.blocks["advantage"].sums) == set(tasks.tolist())


def test_an_objective_without_memory_leaves_checkpoints_alone(make_trainer):
    trainer = make_trainer()
    trainer.train_step()
    assert "objective" not in trainer.recipe.state_dict()
    assert get("grpo").state().blocks == {}


def rows(groups):
    group = torch.arange(groups).repeat_interleave(2)
    ones = torch.ones(2 * groups, 3)
    return Rollouts(group, ones, logp_old=-ones, reward=torch.arange(2.0 * groups))


def test_tasks_that_were_left_out_are_not_confused(make_trainer):
    recipe, tasks = make_trainer(recipe=RememberingRecipe).recipe, ["a", "b", "a"]
    streams = Streams(0, places=[4, 6, 8])
    unit = Unit(tasks, streams, Step())
    kept = streams.among(tasks, [tasks[1], tasks[2]]).noted(rows(2))
    assert placed(kept, unit, recipe).places == [6, 8]
    assert placed(rows(3), unit, recipe).places == [4, 6, 8]
    with pytest.raises(RunError, match=r"3 tasks has 2 groups.*streams\.among"):
        placed(rows(2), unit, recipe)


def test_tasks_asked_for_ahead_stay_the_next_ones_after_a_resume():
    def stream(offset):
        made = TaskStream(list("abcdef"), seed=0)
        made.choose = lambda count, generator: (torch.arange(count) + offset) % 6
        return made

    ahead = stream(0)
    assert ahead.next(2) == ["a", "b"]
    assert ahead.upcoming(2) == ["a", "b"]
    resumed = stream(3)
    resumed.load_state_dict(ahead.state_dict())
    assert resumed.next(2) == ["a", "b"]
    assert (resumed.drawn, resumed.next(2), resumed.drawn) == ([0, 1], ["d", "e"], [3, 4])


def test_tasks_of_a_step_that_is_sampled_ahead_are_chosen_before_the_update(make_trainer):
    trainer = make_trainer(recipe=RememberingRecipe)
    trainer.rollers = Ahead(trainer.recipe, trainer.accelerator)
    chosen, choose = [], trainer.tasks.choose

    def noted(count, generator):
        chosen.append(sorted(trainer.recipe.objective_state.state_dict()["advantage"]))
        return choose(count, generator)

    trainer.tasks.choose = noted
    for _ in range(3):
        trainer.train_step()  # the rollers compare what was begun with what is asked for
    assert chosen[:2] == [[], []]
    assert len(chosen[2]) == 3
    assert len(trainer.recipe.seen_tasks) == len(chosen) == 4


def test_without_a_state_every_call_is_a_first_step():
    objective = get("grpo").replace(advantage=AgainstSums())
    given = rows(2).replace(extras={TASK: torch.tensor([0, 0, 1, 1])})
    first = objective.compute_advantages(given).advantage
    assert torch.equal(objective.compute_advantages(given).advantage, first)
    state = objective.state()
    assert torch.equal(objective.compute_advantages(given, state).advantage, first)
    later = objective.compute_advantages(given, state).advantage
    assert torch.equal(first - later, torch.tensor([1.0, 1.0, 5.0, 5.0])[:, None].expand(4, 3))


def test_a_recipe_whose_tasks_lack_the_category_is_refused(make_trainer):
    with pytest.raises(UserError, match=r"objective\.order\.field: unknown field of the training tasks 'category'"):
        make_trainer(preset="sec")
