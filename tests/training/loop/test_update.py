import dataclasses

import pytest
import torch
from torch import nn

from mmrl.core.blocks.credit import Gae, ValueLoss
from mmrl.core.blocks.divergence import FullEntropy, SampledEntropy
from mmrl.core.catalogue import get
from mmrl.errors import UserError
from mmrl.training.processes import _buckets
from mmrl.training.recipe import Recipe, Step
from mmrl.training.update import groups_with_gradient, update_constants
from tests.training.conftest import weights
from tests.training.loop.sharing import SharingRecipe
from tests.training.toy import ToyPolicy, ToyRecipe


def prepared(trainer, solved=()):
    """Rollouts of a step with advantages; the groups named are solved by all of their samples."""
    rollouts, _ = trainer.collect()
    for group in solved:
        rollouts.reward[rollouts.group == group] = 1.0
    rollouts = update_constants(trainer.recipe, trainer.policy, trainer.reference, rollouts, Step())
    return trainer.recipe.advantages(rollouts, trainer.accelerator, Step())


def as_close(first, second):
    for a, b in zip(weights(first), weights(second), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("size", [5, 3])
def test_shared_prefixes_of_micro_batches_are_computed_once_and_change_nothing(make_trainer, size):
    whole, cut = (make_trainer(recipe=SharingRecipe, micro_batch=micro_batch, epochs=2) for micro_batch in (0, size))
    for trainer in (whole, cut):
        start = weights(trainer)
        trainer.updater.update(prepared(trainer), Step(0))
        assert all(not torch.equal(a, b) for a, b in zip(start, weights(trainer), strict=True))
    as_close(whole, cut)
    # the pass for old log-probs and one pass an epoch; the reference is another module
    assert whole.policy.computed == cut.policy.computed == 3
    assert cut.reference.copy.computed == 1


def test_a_prefix_scope_ends_with_the_optimiser_step_even_when_it_fails(make_trainer, monkeypatch):
    trainer = make_trainer(recipe=SharingRecipe, micro_batch=4)
    rollouts = prepared(trainer)
    monkeypatch.setattr(trainer.accelerator, "backward", lambda loss: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        trainer.updater.update(rollouts, Step(0))
    assert trainer.policy.work is None


class PlainRecipe(ToyRecipe):
    loss = Recipe.loss
    own_loss = ""


class Looking(ToyPolicy):
    """`seen` is used by the rows of task 0 only."""

    def __init__(self, tasks):
        super().__init__(tasks)
        self.seen = nn.Parameter(torch.zeros(()))

    def forward(self, rollouts, **options):
        scores = super().forward(rollouts, **options)
        first = (torch.tensor(rollouts.payload.tasks)[rollouts.group] == 0)[:, None].float()
        if not bool(first.any()):
            return scores
        return dataclasses.replace(scores, logp=scores.logp + self.seen * first * (rollouts.payload.ids - 1.5))


class LookingRecipe(PlainRecipe):
    def __init__(self, config):
        super().__init__(config)
        self.policy = Looking(6)


def steps(trainer, solved_by_step):
    """Updates on task 0 and two others with some groups solved; returns the metrics and the rows of each update."""
    trainer.tasks.shuffle = False
    metrics, rows = [], []
    scores = trainer.recipe.scores
    trainer.recipe.scores = lambda policy, chunk, *rest: rows.append(chunk.num_rows) or scores(policy, chunk, *rest)
    for step, solved in enumerate(solved_by_step):
        trainer.tasks.position = 0
        rollouts = prepared(trainer, solved)
        rows.clear()
        metrics.append((trainer.updater.update(rollouts, Step(step, 4)), sum(rows)))
        trainer.step += 1
    return metrics


class SurveyedRecipe(PlainRecipe):
    """BAPO on lopsided advantages; counts the passes over whole minibatches."""

    def __init__(self, config):
        super().__init__(config)
        self.objective = get("bapo").override({"clip": {"target": 1.4, "upper_max": 1.5}})
        self.rows = []

    def scores(self, policy, rollouts, outputs):
        self.rows.append(rollouts.num_rows)
        return super().scores(policy, rollouts, outputs)


@pytest.mark.parametrize("minibatches", [1, 2])
def test_bounds_of_a_step_do_not_depend_on_micro_batches(make_trainer, minibatches):
    # adam_eps, so that the rounding of a gradient near 0 is no whole step
    options = {"epochs": 4, "minibatches_per_step": minibatches, "learning_rate": 2.0, "adam_eps": 1.0}
    trainers = [make_trainer(recipe=SurveyedRecipe, micro_batch=size, **options) for size in (0, 3)]
    found = []
    for trainer in trainers:
        rollouts = prepared(trainer)
        trainer.recipe.rows.clear()
        found.append(trainer.updater.update(rollouts, Step(0)))
    as_close(*trainers)
    # the first of the 4 * minibatches optimiser steps needs no bounds
    assert len(trainers[0].recipe.rows) == 8 * minibatches - 1
    for name in ("policy/bound_low", "policy/bound_high", "policy/clip_fraction_high"):
        assert found[0][name] == pytest.approx(found[1][name], abs=1e-6)
    assert found[0]["policy/bound_high"] > 1.2


@pytest.mark.parametrize("micro_batch", [0, 4])
def test_skipping_dead_groups_is_exact(make_trainer, micro_batch):
    # the second step does not use `seen` once the first group is left out, yet its momentum has to go on
    solved = [[1], [0, 2], [0, 1, 2], []]
    options = {"recipe": LookingRecipe, "preset": "dapo", "weight_decay": 0.1, "micro_batch": micro_batch}
    options |= {"skip_steps_without_gradient": False}
    skipping, whole = make_trainer(**options), make_trainer(skip_zero_advantage_groups=False, **options)
    skipped, kept = steps(skipping, solved), steps(whole, solved)
    as_close(skipping, whole)
    assert float(skipping.policy.seen.detach()) != 0
    assert [rows for _, rows in skipped] == [8, 4, 4, 12]
    assert [rows for _, rows in kept] == [12] * 4
    assert [metrics["update/zero_advantage_groups"] for metrics, _ in skipped] == pytest.approx(
        [1 / 3, 2 / 3, 2 / 3, 0]
    )
    assert [metrics["update/zero_advantage_groups"] for metrics, _ in kept] == [0] * 4
    for name in ("loss/total", "optim/grad_norm", "policy/ratio_mean"):
        expected = pytest.approx([metrics[name] for metrics, _ in kept], rel=1e-5, abs=1e-7)
        assert [metrics[name] for metrics, _ in skipped] == expected


@pytest.mark.parametrize("micro_batch", [0, 4])
def test_steps_without_gradient_leave_no_trace(make_trainer, micro_batch):
    options = {"recipe": LookingRecipe, "preset": "dapo", "weight_decay": 0.1, "micro_batch": micro_batch}
    with_dead, without = make_trainer(**options), make_trainer(**options)
    found = steps(with_dead, [[1], [0, 1, 2], [0, 2], [0, 1, 2], []])
    without.updater._waits = lambda minibatch: False  # none of its minibatches is without a gradient
    for step, solved in ((0, [1]), (2, [0, 2]), (4, [])):
        without.step = step
        steps(without, [solved])
    assert all(torch.equal(a, b) for a, b in zip(weights(with_dead), weights(without), strict=True))
    assert [rows for _, rows in found] == [8, 0, 4, 0, 12]
    assert [metrics["optim/without_gradient"] for metrics, _ in found] == [0, 1, 1, 2, 2]
    assert found[1][0]["update/zero_advantage_groups"] == 1
    assert "optim/grad_norm" not in found[1][0]
    assert with_dead.updater.optimiser_step == without.updater.optimiser_step == 3


def test_steps_without_gradient_move_the_weights_by_momentum_where_they_are_taken(make_trainer):
    trainer = make_trainer(recipe=PlainRecipe, preset="dapo", skip_steps_without_gradient=False)
    steps(trainer, [[1]])
    before = weights(trainer)
    steps(trainer, [[0, 1, 2]])
    assert any(not torch.equal(a, b) for a, b in zip(before, weights(trainer), strict=True))
    assert trainer.updater.optimiser_step == 2


def test_a_loss_with_further_terms_takes_steps_without_advantages(make_trainer):
    trainer = make_trainer(recipe=PlainRecipe, preset="grpo")  # its KL has a gradient
    steps(trainer, [[1], [0, 1, 2]])
    assert (trainer.updater.optimiser_step, trainer.updater.waited) == (2, 0)


def test_the_count_of_steps_without_gradient_is_part_of_the_state(make_trainer):
    trainer, other = (make_trainer(recipe=PlainRecipe, preset="dapo") for _ in range(2))
    steps(trainer, [[0, 1, 2]])
    state = trainer.updater.state_dict()
    other.updater.load_state_dict(state)
    assert other.updater.waited == 1
    other.updater.load_state_dict({name: value for name, value in state.items() if name != "waited"})  # of 0.1.0
    assert other.updater.waited == 0


def test_minibatches_for_which_a_filter_leaves_no_group_count_for_the_decay(make_trainer):
    trainer = make_trainer(recipe=PlainRecipe, preset="grpo", minibatches_per_step=3, schedule="linear")
    kept = prepared(trainer).select_groups(torch.tensor([0]))
    metrics = trainer.updater.update(kept, Step())
    assert (trainer.updater.optimiser_step, metrics["optim/without_gradient"]) == (1, 2)


def test_group_kept_for_a_step_without_gradient_has_scored_rows(make_trainer):
    trainer = make_trainer(recipe=PlainRecipe, preset="dapo", skip_steps_without_gradient=False)
    rollouts, _ = trainer.collect()
    rollouts.reward[:] = 1.0
    rollouts.reward[rollouts.group == 0] = float("nan")
    rollouts = trainer.recipe.advantages(rollouts, trainer.accelerator, Step())
    assert trainer.updater.update(rollouts, Step(0))["policy/ratio_mean"] == 1.0
    assert trainer.updater.optimiser_step == 1


@pytest.mark.parametrize(
    ("preset", "changes", "skips"),
    [
        ("dapo", {}, True),
        ("rloo", {}, True),  # its KL is part of the reward
        ("grpo", {}, False),
        ("grpo", {"kl": None}, True),
        ("dapo", {"entropy": SampledEntropy(0.01)}, False),
        ("dapo", {"entropy": FullEntropy(0.0)}, True),
    ],
)
def test_only_a_loss_without_further_terms_lets_groups_be_skipped(make_trainer, preset, changes, skips):
    trainer = make_trainer(recipe=PlainRecipe)
    rollouts = prepared(trainer)
    rollouts.advantage[rollouts.group == 1] = 0.0
    rollouts.advantage[rollouts.group != 1] = 0.5
    trainer.recipe.objective = get(preset).replace(**changes)
    assert groups_with_gradient(trainer.recipe, rollouts).tolist() == [True, not skips, True]


def test_a_value_loss_or_a_recipes_own_loss_needs_every_group(make_trainer):
    trainer = make_trainer(recipe=PlainRecipe)
    dead = prepared(trainer, solved=[0, 1, 2])
    trainer.recipe.objective = get("dapo").replace(advantage=Gae(), value=ValueLoss(0.5))
    assert groups_with_gradient(trainer.recipe, dead).all()
    trainer.recipe.objective = get("dapo")
    assert not groups_with_gradient(trainer.recipe, dead).any()
    own = make_trainer(preset="dapo").recipe  # declares a loss of its own
    assert groups_with_gradient(own, dead).all()


def test_a_nan_advantage_is_not_skipped(make_trainer):
    trainer = make_trainer(recipe=PlainRecipe, preset="dapo")
    rollouts = prepared(trainer, solved=[0, 1, 2])
    rollouts.advantage[5, 1] = float("nan")
    assert groups_with_gradient(trainer.recipe, rollouts).tolist() == [False, True, False]


def test_messages_hold_neighbours_of_one_type_up_to_a_size(monkeypatch):
    monkeypatch.setattr("mmrl.training.processes.BUCKET_ELEMENTS", 5)
    tensors = [*map(torch.zeros, [2, 3, 1, 9, 1]), torch.zeros(1, dtype=torch.float64)]
    assert [[len(tensor) for tensor in bucket] for bucket in _buckets(tensors)] == [[2, 3], [1], [9], [1], [1]]
    assert list(_buckets([])) == []


class LowPrecisionRecipe(ToyRecipe):
    def __init__(self, config):
        super().__init__(config)
        self.policy.to(torch.bfloat16)


def test_steps_that_low_precision_rounds_away_are_refused(make_trainer):
    with pytest.raises(UserError, match=r"to be trained are bfloat16 and trainer\.learning_rate is 5e-06: .*adapters"):
        make_trainer(recipe=LowPrecisionRecipe, learning_rate=5e-6)
    assert make_trainer(recipe=LowPrecisionRecipe, learning_rate=1e-3).step == 0
    assert make_trainer(learning_rate=5e-6).step == 0
