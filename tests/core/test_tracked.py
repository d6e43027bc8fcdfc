"""Estimators that remember earlier steps, and orders of tasks, beside their golden numbers."""

import math
from types import SimpleNamespace

import pytest
import torch

from mmrl.contrib.rows.tracked import (
    BundledRisk,
    CategoryBandit,
    SmoothedEntropy,
    SmoothStandardised,
    TrackedValue,
    Uncertain,
    fields_of,
)
from mmrl.core import PolicyOutputs, Rollouts, get
from mmrl.core.blocks.advantage import GroupMeanStd, group_mean_std
from mmrl.core.blocks.divergence import TargetEntropy
from mmrl.core.rollouts import PLACE
from mmrl.core.state import ObjectiveState
from mmrl.training.trainer import TaskStream

ESTIMATORS = [SmoothStandardised(), TrackedValue()]


def rows(reward, task, group=None):
    group = torch.tensor(task if group is None else group)
    group = torch.unique(group, return_inverse=True)[1]
    ones = torch.ones(len(reward), 2, dtype=torch.float64)
    given = torch.tensor(reward, dtype=torch.float64)
    return Rollouts(group, ones, -ones, given, extras={"task": torch.tensor(task)})


def first_column(block, rollouts, state):
    return block(rollouts, state)[:, 0]


STEP = rows([1.0, 0.0, 0.5, 0.25], [7, 7, 3, 3])


@pytest.mark.parametrize("block", ESTIMATORS, ids=lambda block: block.kind)
def test_a_restored_state_goes_on_as_the_one_that_was_saved(block):
    state, restored = block.state(), block.state()
    block(STEP, state)
    restored.load_state_dict(state.state_dict())
    later = rows([0.0, 0.25, 1.0, 1.0], [7, 7, 9, 9])
    assert torch.equal(block(later, state), block(later, restored))
    assert state.state_dict() == restored.state_dict()
    assert state.state_dict().keys() == {3, 7, 9}


@pytest.mark.parametrize("block", ESTIMATORS, ids=lambda block: block.kind)
def test_tasks_are_kept_apart_and_the_order_of_rows_is_nothing(block):
    together, apart = block.state(), block.state()
    mixed = torch.tensor([2, 0, 3, 1])
    found = first_column(block, STEP.select(mixed), together)
    for part in (STEP.select_groups(torch.tensor([0])), STEP.select_groups(torch.tensor([1]))):
        block(part, apart)
    assert together.state_dict() == apart.state_dict()
    torch.testing.assert_close(found, first_column(block, STEP, block.state())[mixed])


@pytest.mark.parametrize("block", ESTIMATORS, ids=lambda block: block.kind)
def test_rows_that_were_not_scored_leave_no_trace(block):
    state, without = block.state(), block.state()
    holed = rows([1.0, math.nan, 0.5, 0.25, math.nan], [7, 7, 7, 7, 5])
    found = first_column(block, holed, state)
    assert torch.equal(found[[0, 2, 3]], first_column(block, rows([1.0, 0.5, 0.25], [7, 7, 7]), without))
    assert torch.equal(found[[1, 4]], torch.zeros(2, dtype=torch.float64))
    assert state.state_dict() == without.state_dict()


@pytest.mark.parametrize("block", ESTIMATORS, ids=lambda block: block.kind)
def test_a_task_has_to_be_known(block):
    with pytest.raises(ValueError, match=r'rollouts\.extras\["task"\] is missing'):
        block(STEP.replace(extras={}))


def test_the_first_visit_is_that_of_grpo_and_equal_rewards_later_still_teach():
    block = SmoothStandardised()
    state = block.state()
    expected = group_mean_std(STEP.reward, STEP.group, eps=0.0)
    torch.testing.assert_close(first_column(block, STEP, state), expected)
    solved = rows([1.0, 1.0], [7, 7])
    assert not GroupMeanStd()(solved).any()
    assert (first_column(block, solved, state) > 0).all()


def test_equal_rewards_at_every_visit_teach_nothing():
    block = SmoothStandardised()
    state = block.state()
    for _ in range(7):
        assert not block(rows([0.1, 0.1, 0.1], [0, 0, 0]), state).any()


def test_cumulative_numbers_are_those_of_all_rewards_of_visits_of_one_size():
    """With ddof 0 they would be exact; the paper's rule combines variances of ddof 1 as if they were of ddof 0."""
    block = SmoothStandardised()
    state = block.state()
    steps = torch.tensor([[0.0, 1.0, 1.0], [0.5, 0.0, 0.25], [1.0, 1.0, 0.0]], dtype=torch.float64)
    for step in steps:
        block(rows(step.tolist(), [4, 4, 4]), state)
    visits, mean, std = state.of([4])[0].tolist()
    assert (visits, mean) == (3, pytest.approx(float(steps.mean())))
    between = float(steps.mean(1).var(correction=0))
    assert std**2 == pytest.approx(float(steps.var(1).mean()) + between)


def test_the_tracker_follows_a_success_rate_and_forgets():
    block = TrackedValue(keep=0.5)
    state = block.state()
    for _ in range(60):
        block(rows([1.0], [0]), state)
    assert state.of([0])[0].tolist() == pytest.approx([2.0, 0.5 * 0.5**60], abs=1e-12)
    assert float(block(rows([1.0], [0]), state)[0, 0]) == pytest.approx(0.0, abs=1e-9)
    scaled = TrackedValue(low=-1.0, high=3.0)
    assert scaled(rows([3.0, -1.0], [0, 1])).tolist() == [[2.0, 2.0], [-2.0, -2.0]]  # the prior is the middle
    with pytest.raises(ValueError, match=r"advantage\.low 1 must lie below advantage\.high 0\.5"):
        get("single_stream").override({"advantage": {"low": 1.0, "high": 0.5}}).validate()


def papers(seed, places):
    """Four tasks of three answers, drawn in some order."""
    reward = torch.rand(12, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    order = torch.argsort(torch.tensor(places))
    group = torch.arange(4).repeat_interleave(3)
    given = rows(reward.view(4, 3)[order].flatten().tolist(), group.tolist())
    return given.replace(extras=given.extras | {PLACE: torch.tensor(places)[order][group]}), order


def test_bundles_are_those_of_the_order_of_drawing_whichever_process_has_a_task():
    block = BundledRisk(bundle=2)
    one, two = block.state(), block.state()
    for seed in range(3):
        (first, _), (second, order) = papers(seed, [0, 1, 2, 3]), papers(seed, [0, 3, 1, 2])
        second = second.replace(extras=second.extras | {PLACE: torch.arange(4)[order].repeat_interleave(3)})
        found = block(second, two)[:, 0].view(4, 3)
        torch.testing.assert_close(block(first, one)[:, 0].view(4, 3)[order], found)
    assert torch.equal(one.values, two.values)
    later = block.state()
    later.load_state_dict(one.state_dict())
    assert torch.equal(block(first, one), block(first, later))


def test_risk_stays_within_its_bounds():
    given = papers(0, [0, 1, 2, 3])[0]
    for natural, sign in ((True, -1), (False, 1)):
        block = BundledRisk(bundle=2, mix=0.0, credit="uniform", natural=natural)
        assert (sign * block(given) >= 0).all()


def test_papers_end_where_a_task_of_the_bundle_has_no_more_answers():
    holed = papers(0, [0, 1, 2, 3])[0]
    holed.reward[[1, 6, 7, 8]] = math.nan
    block = BundledRisk(bundle=3, credit="uniform")
    state = block.state()
    found = block(holed, state)[:, 0]
    assert not found[[1, 5, 6, 7, 8, 11]].any(), "not scored, or without partners"
    assert found[0] == found[3] == found[9]
    assert found[2] == found[4] == found[10]
    assert (found[0] != 0) | (found[2] != 0)
    unscored = holed.replace(reward=torch.full((12,), math.nan, dtype=torch.float64))
    before = state.values.clone()
    assert not block(unscored, state).any()
    assert torch.equal(state.values, before)


def test_quantiles_move_towards_what_is_seen():
    state = BundledRisk().state()
    state.note(torch.zeros(4))
    for _ in range(200):
        state.note(torch.linspace(0, 1, 1001))
    assert state.at(0.8) == pytest.approx(0.8, abs=0.02)
    with pytest.raises(ValueError, match=r"advantage\.low 0\.8 must lie below advantage\.high 0\.2"):
        get("riskpo").override({"advantage": {"low": 0.8, "high": 0.2}}).validate()


def test_an_order_needs_the_values_that_it_reads():
    with pytest.raises(ValueError, match="order 'uncertain' reads the values that advantage 'tracked_value' tracks"):
        get("grpo").override({"order": {"kind": "uncertain"}}).validate()


def draws(objective, tasks, state, steps, count):
    stream = TaskStream(tasks, seed=1)
    stream.choose = lambda number, generator: objective.order(len(tasks), number, state, generator)
    return [stream.next(count) for _ in range(steps)]


def test_uncertain_tasks_come_more_often():
    objective, state = get("single_stream"), get("single_stream").state()
    for _ in range(30):
        objective.compute_advantages(rows([1.0, 0.0, 1.0, 0.0], [0, 1, 2, 2], [0, 1, 2, 2]), state)
    drawn = torch.tensor(draws(objective, list(range(3)), state, 2000, 1)).flatten().bincount() / 2000
    weights = Uncertain().weights(3, state)
    torch.testing.assert_close(drawn.double(), weights / weights.sum(), atol=0.04, rtol=0)
    assert weights[2] == pytest.approx(0.55)
    assert sorted(draws(objective, list(range(3)), state, 1, 3)[0]) == [0, 1, 2], "each once where there is room"
    assert len(draws(objective, list(range(3)), state, 1, 5)[0]) == 5


def test_a_bandit_draws_categories_as_often_as_their_chance():
    tasks = [SimpleNamespace(category="few", number=0)] + [
        SimpleNamespace(category="many", number=n) for n in (1, 2, 3)
    ]
    objective = get("sec")
    state = objective.state(tasks)
    state.blocks["order"].q = torch.tensor([0.4, 0.0], dtype=torch.float64)
    numbers = torch.tensor([[task.number for task in step] for step in draws(objective, tasks, state, 1000, 3)])
    chance = 1 / (1 + math.exp(-1))
    assert (numbers == 0).double().mean() == pytest.approx(chance, abs=0.03)
    for step in numbers.tolist():
        many = [number for number in step if number]
        assert len(set(many)) == len(many)
    assert objective.state().blocks == {}
    other = objective.state(tasks)
    other.load_state_dict(state.state_dict())
    assert torch.equal(other.blocks["order"].q, state.blocks["order"].q)


def test_categories_are_fields_or_columns_of_tasks():
    question = SimpleNamespace(id="a", columns={"level": 3})
    assert fields_of(question) == {"id": "a", "level": "3"}
    assert fields_of(SimpleNamespace(task=question, query="q")) == {"query": "q", "level": "3"}
    assert fields_of(SimpleNamespace(id="a", task={"name": "maze"})) == {"id": "a", "name": "maze"}
    assert fields_of(SimpleNamespace(task="lift")) == {"task": "lift"}
    with pytest.raises(ValueError, match=r"order\.field: unknown field of the .* 'levle'; did you mean 'level'"):
        CategoryBandit(field="levle").state([question])


def test_an_objective_without_that_block_keeps_what_a_checkpoint_has_of_others():
    state = ObjectiveState({"advantage": TrackedValue().state()})
    state.load_state_dict({"order": {"a": 1.0}})
    assert state.state_dict() == {"advantage": {}}


def test_a_hinge_pulls_the_entropy_back_into_its_band():
    block = SmoothedEntropy(coef=1.0, low=0.5, high=1.5, scale=2.0)
    state = block.state()
    given = rows([0.0, 1.0], [0, 0]).replace(
        entropy=torch.tensor([[1.0, 3.0], [1.0, 3.0]], dtype=torch.float64), turn=torch.tensor([[0, 1], [0, 1]])
    )
    found = block.observe(given, state)
    entropy = torch.tensor([[0.3, 4.0], [1.2, 6.0]], dtype=torch.float64, requires_grad=True)
    bonus = block.of_rollouts(PolicyOutputs(entropy.detach(), entropy=entropy), found)
    assert bonus.tolist() == [[pytest.approx(0.3 - 2 * 0.2), 4.0], [1.2, pytest.approx(6.0 - 2 * 1.5)]]
    (gradient,) = torch.autograd.grad(bonus.sum(), entropy)
    assert gradient.tolist() == [[3.0, 1.0], [1.0, -1.0]]


def test_the_history_is_the_mean_over_the_steps_in_which_a_turn_occurred():
    block = SmoothedEntropy(coef=1.0)
    state, resumed = block.state(), block.state()
    turn = torch.tensor([[0, 1], [0, -1]])
    given = rows([0.0, 1.0], [0, 0]).replace(mask=(turn >= 0).double(), turn=turn)
    for first, second in ((1.0, 2.0), (3.0, 2.0)):
        block.observe(given.replace(entropy=torch.tensor([[first, second], [first + 1, 99.0]]).double()), state)
    block.observe(given.select(torch.tensor([1])).replace(entropy=torch.tensor([[2.0, 99.0]]).double()), state)
    assert state.mean(torch.tensor([0, 1])).tolist() == [pytest.approx((1.5 + 3.5 + 2) / 3), 2.0]
    resumed.load_state_dict(state.state_dict())
    assert torch.equal(resumed.mean(turn.clamp(min=0)), state.mean(turn.clamp(min=0)))
    assert resumed.steps == 3
    with pytest.raises(ValueError, match=r"entropy\.low 3 must lie below entropy\.high 2"):
        get("entropy_smoothing").override({"entropy": {"low": 3.0}}).validate()


def test_the_weight_of_a_target_entropy_climbs_below_it_and_falls_above():
    block = TargetEntropy(coef=0.02, target=1.0, step=0.01)
    objective = get("grpo").replace(entropy=block, kl=None)
    state, shares = objective.state(), []
    for entropy in (0.5, 0.5, 0.5, 0.5, 2.0, 1.0):
        given = rows([0.0, 1.0], [0, 0]).replace(entropy=torch.full((2, 2), entropy, dtype=torch.float64))
        found = objective.compute_advantages(given, state)
        scored = torch.ones(2, 2, dtype=torch.float64, requires_grad=True)
        output = objective.loss(PolicyOutputs(given.logp_old, entropy=scored), found, objective.denominators(found))
        shares.append(-float(output.metrics["loss/entropy"].value))
    assert shares == pytest.approx([0.0, 0.01, 0.02, 0.02, 0.0, 0.01])  # at 2.0 it counts nothing and falls
    assert state.blocks["entropy"].value == pytest.approx(0.0)
    with pytest.raises(ValueError, match=r"entropy\.start 2 must be at most entropy\.coef 1"):
        get("grpo").override({"entropy": {"kind": "target", "start": 2.0}}).validate()
