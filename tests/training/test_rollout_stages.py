"""Rollout stages change tasks before and rows after sampling, with the promises of the rest of a step."""

from __future__ import annotations

import pytest
import torch

from mmrl.core.loss import Metric
from mmrl.core.state import Tally
from mmrl.runs.dry_run import model_follows
from mmrl.training import RolloutStage
from mmrl.training.processes import Streams, make_accelerator, merge_in_order
from mmrl.training.recipe import Step
from mmrl.training.rollers import LocalRollers
from mmrl.training.rollout_worker import RolloutWorker
from mmrl.training.settings import TrainerConfig
from tests.training.conftest import weights
from tests.training.toy import ToyConfig, ToyRecipe

CONFIG = ToyConfig(trainer=TrainerConfig(samples_per_task=4, tasks_per_step=4))
STEP = Step(1, 4)


class Shifted(RolloutStage):
    """Asks the next task in half of the cases, and takes a random toll that grows with the mean reward so far."""

    name = "shifted"

    def __init__(self):
        self.seen, self.rewards, self.mean = Tally(), [], 0.0
        self.added = {"shifted": self.seen, "rewards": self.rewards}

    def before(self, policy, tasks, streams, step):
        draws = streams.uniform(len(tasks), 1, purpose="shift").tolist()
        shifted = [draw < 0.5 for draw in draws]
        self.seen["tasks"] += sum(shifted)
        return [(task + move) % 6 for task, move in zip(tasks, shifted, strict=True)]

    def after(self, policy, rollouts, streams, step):
        assert rollouts.reward.isnan().all()
        draws = streams.uniform(rollouts.num_groups, 1, purpose="shift")
        return rollouts.replace(extras=rollouts.extras | {"toll": draws[rollouts.group]})

    def scored(self, policy, rollouts, streams, step):
        assert not torch.is_grad_enabled()
        reward = rollouts.reward - self.mean * rollouts.extras["toll"]
        for group, place in enumerate(streams.places):
            mean = float(reward[rollouts.group == group].mean())
            self.rewards.append(((streams.draw, place), mean))
        return rollouts.replace(reward=reward)

    def formula(self):
        return "R - toll"

    def metrics(self, rollouts, step):
        seen = self.seen["tasks"]
        self.seen.clear()
        return {"toy/shifted": float(seen), "toy/toll": Metric(rollouts.extras["toll"].sum(), rollouts.num_rows)}

    def on_step_end(self, step):
        found = merge_in_order(self.rewards)
        self.mean = 0.5 * self.mean + 0.5 * sum(found) / len(found)
        self.rewards.clear()

    def state_dict(self):
        return {"mean": self.mean}

    def load_state_dict(self, state):
        self.mean = state["mean"]


class ShiftedRecipe(ToyRecipe):
    def make_stages(self):
        return [Shifted()]


def rewarded(unit=0, mean=1.0):
    recipe = ShiftedRecipe(CONFIG)
    recipe.stages[0].mean = mean
    rollers, streams = LocalRollers(recipe, make_accelerator(), unit), Streams(5, [3, 4, 7, 9])
    rows = rollers.score(rollers.rollout([2, 3, 4, 5], streams, STEP), streams, STEP)
    return recipe, rows


def test_tasks_change_before_sampling_and_rewards_after_scoring():
    recipe, rows = rewarded()
    toll = Streams(5, [3, 4, 7, 9]).uniform(4, 1, purpose="shift")
    asked = [(task + int(draw < 0.5)) % 6 for task, draw in zip([2, 3, 4, 5], toll.tolist(), strict=True)]
    assert rows.payload.tasks == asked
    assert asked != [2, 3, 4, 5], "no task was changed"
    torch.testing.assert_close(rows.reward, rows.reward_terms["right"] - toll[rows.group])
    assert recipe.added["shifted"]["tasks"] == int((toll < 0.5).sum())
    assert recipe.describe().endswith("\nR - toll")


def test_units_and_their_order_do_not_change_a_row():
    (whole, expected), (parts, found) = rewarded(), rewarded(unit=1)
    assert torch.equal(found.reward, expected.reward)
    assert torch.equal(found.payload.ids, expected.payload.ids)
    assert whole.added == parts.added


def test_a_resumed_run_equals_one_without_an_interruption(make_trainer):
    whole = make_trainer(recipe=ShiftedRecipe)
    for _ in range(4):
        whole.train_step()
    first = make_trainer("parts", recipe=ShiftedRecipe)
    first.train_step()
    first.train_step()
    first.save()
    second = make_trainer("parts", recipe=ShiftedRecipe)
    second.resume()
    assert second.recipe.stages[0].mean == first.recipe.stages[0].mean != 0.0
    second.train_step()
    second.train_step()
    assert second.recipe.stages[0].mean == whole.recipe.stages[0].mean
    assert all(map(torch.equal, weights(whole), weights(second)))


def test_metrics_of_stages_are_logged(make_trainer):
    trainer = make_trainer(recipe=ShiftedRecipe)
    logged = []
    trainer.log.step = lambda step, metrics, tokens: logged.append(metrics)
    trainer.train_step()
    trainer.train_step()
    assert 0.0 < logged[0]["toy/toll"] < 1.0
    assert 0 <= logged[1]["toy/shifted"] <= 3


def test_workers_take_over_the_state_of_stages():
    worker = RolloutWorker()
    worker._recipe = ShiftedRecipe(CONFIG)
    worker.load_state(None, {"shifted": {"mean": 0.25}})
    assert worker._recipe.stages[0].mean == 0.25


def test_tasks_that_must_stay_together_are_not_shared():
    recipe = ShiftedRecipe(CONFIG)
    assert recipe.rolls_apart(STEP)
    recipe.stages[0].rolls_apart = False
    assert not recipe.rolls_apart(STEP)


def test_stages_refuse_data_before_the_model_is_loaded(monkeypatch):
    recipe, seen = ShiftedRecipe(CONFIG), []
    monkeypatch.setattr(recipe.stages[0], "check_data", seen.append)
    model_follows(recipe)
    assert seen == [recipe.train_tasks]


def test_a_stage_that_drops_a_task_is_refused(monkeypatch):
    recipe = ShiftedRecipe(CONFIG)
    monkeypatch.setattr(recipe.stages[0], "before", lambda policy, tasks, streams, step: tasks[1:])
    with pytest.raises(ValueError, match="stage 'shifted' returned 3 tasks for 4"):
        LocalRollers(recipe, make_accelerator()).rollout([2, 3, 4, 5], Streams(5), STEP)
