"""Weights of decisions: by hand, over processes, and what they refuse."""

from types import SimpleNamespace

import pytest
import torch

from mmrl.contrib.rows.adaptive import ConflictTokens, EntropyFiltered
from mmrl.core import Objective, PolicyOutputs, Rollouts, decoupled_advantages, get
from mmrl.core.blocks.clip import PolicyGradient
from mmrl.core.blocks.turns import WEIGHT, Duration, TopEntropy, quantile
from mmrl.core.loss import metric_values
from mmrl.training import processes
from mmrl.training.processes import global_advantages
from tests.core.builders import random_rollouts


def values(weight, mask):
    return [row[m > 0].tolist() for row, m in zip(weight, mask, strict=True)]


def small(**changes):
    mask = torch.tensor([[1.0, 1.0, 1.0], [1.0, 1.0, 0.0]], dtype=torch.float64)
    fields = {"group": torch.tensor([0, 0]), "mask": mask, "logp_old": -mask, "reward": mask[:, 2]}
    return Rollouts(**(fields | changes))


@pytest.mark.parametrize(
    ("share", "expected"),
    [(1.0, [[1.0, 1.0, 1.0], [1.0, 1.0]]), (0.5, [[0.0, 1.0, 0.0], [1.0, 1.0]]), (0.2, [[0.0, 0.0, 0.0], [1.0, 0.0]])],
)
def test_the_highest_entropies_by_hand(share, expected):
    rollouts = small(entropy=torch.tensor([[0.1, 0.6, 0.2], [0.9, 0.5, 7.0]], dtype=torch.float64))
    assert values(TopEntropy(share)(rollouts), rollouts.mask) == expected


@pytest.mark.parametrize("q", [0.0, 0.2, 0.5, 0.99, 1.0])
def test_the_quantile_is_torchs(q):
    rollouts = random_rollouts(seed=3)
    entropy, mask = rollouts.entropy, rollouts.mask
    expected = torch.quantile(entropy[mask > 0], q)
    assert float(quantile(entropy, mask, q)) == pytest.approx(float(expected), rel=1e-12)
    assert quantile(entropy, torch.zeros_like(mask), q).isnan()


def test_durations_are_relative_to_the_mean_of_the_step():
    rollouts = small(extras={"duration": torch.tensor([[1.0, 1.0, 4.0], [2.0, 2.0, 9.0]])})
    assert values(Duration()(rollouts), rollouts.mask) == [[0.5, 0.5, 2.0], [1.0, 1.0]]
    assert bool((Duration()(small(extras={"duration": torch.zeros(2, 3)})) == 1).all())


def test_the_loss_is_weighed_and_still_divided_by_all_decisions():
    rollouts = random_rollouts(advantage=None)
    plain = Objective("plain", clip=PolicyGradient())
    own = plain.replace(weight=TopEntropy(0.5))
    ready = own.compute_advantages(rollouts)
    weight = ready.extras[WEIGHT]
    logp = rollouts.logp_old.clone().requires_grad_()
    output = own.loss(PolicyOutputs(logp), ready, own.denominators(ready))
    (gradient,) = torch.autograd.grad(output.loss, logp)
    other = plain.loss(PolicyOutputs(logp), ready, plain.denominators(ready)).loss
    assert torch.equal(gradient, weight * torch.autograd.grad(other, logp)[0])
    found = metric_values(output.metrics)
    assert found["policy/weight_mean"] == pytest.approx(float((weight * ready.mask).sum() / ready.mask.sum()))
    assert found["policy/weight_zero"] == pytest.approx(1 - found["policy/weight_mean"])


def test_two_processes_have_the_weights_of_one(monkeypatch):
    objective = get("dapo").replace(weight=TopEntropy(0.3))
    whole = random_rollouts(seed=1, payload=None)
    wide, narrow = whole.select_groups(torch.tensor([0, 1])), whole.select_groups(torch.tensor([2, 3]))
    narrow = next(narrow.micro_batches(narrow.num_rows))  # as wide as its own longest row
    joined = objective.compute_advantages(Rollouts.concat([wide, narrow]))
    monkeypatch.setattr(processes, "merge_lists", lambda items, _: [wide, narrow])
    start = 0
    for rank, own in enumerate((wide, narrow)):
        accelerator = SimpleNamespace(num_processes=2, process_index=rank, device="cpu")
        found = global_advantages(objective.compute_advantages, own, accelerator)
        rows = slice(start, start + own.num_rows)
        assert torch.equal(found.extras[WEIGHT], joined.extras[WEIGHT][rows, : own.num_decisions])
        assert torch.equal(found.extras["kl_weight"], own.extras["kl_weight"])
        start += own.num_rows


def test_separate_advantages_of_the_rewards_are_weighed_once():
    objective = get("dapo").replace(weight=TopEntropy(0.3))
    found = decoupled_advantages(objective, random_rollouts(), {"accuracy": 1.0})
    assert torch.equal(found.extras[WEIGHT], objective.compute_advantages(random_rollouts()).extras[WEIGHT])


@pytest.mark.parametrize(
    ("name", "culprit"),
    [("canon_entropy", "advantage 'regrouped_by_entropy'"), ("seed_grpo", "entropy_damped"), ("grpo", "kl.in_reward")],
)
def test_rows_that_are_not_scored_cannot_be_compared_by_scores(name, culprit):
    kl = {"kind": "k1", "coef": 0.1, "in_reward": name == "grpo"}
    with pytest.raises(ValueError, match=f"weight 'down_sampled' leaves rows out .*{culprit}"):
        get(name).override({"weight": {"kind": "down_sampled"}, "kl": kl}).validate()
    get("hapo").override({"weight": {"kind": "down_sampled"}}).validate()


def test_what_is_missing_is_named():
    with pytest.raises(ValueError, match=r"rollouts\.entropy is missing: weight 'top_entropy' selects decisions by it"):
        Objective("mine", weight=TopEntropy()).compute_advantages(small())
    with pytest.raises(ValueError, match=r"extras\['duration'\] is missing: weight 'duration' reads it"):
        Objective("mine", weight=Duration()).compute_advantages(small())
    ready = get("dapo").compute_advantages(random_rollouts())
    own = get("dapo").replace(weight=TopEntropy())
    with pytest.raises(ValueError, match=r"extras\['weight'\] is missing: compute_advantages\(rollouts\) sets it"):
        own.loss(PolicyOutputs(ready.logp_old), ready, own.denominators(ready))
    with pytest.raises(ValueError, match="weight weights decisions, but clip 'group_regression' compares whole rows"):
        get("reg_grpo").replace(weight=TopEntropy()).validate()
    with pytest.raises(ValueError, match=r"weight\.share is 0\.0; must be"):
        get("dapo").replace(weight=TopEntropy(0.0)).validate()


def test_the_formula_has_the_weight():
    text = get("dapo").replace(weight=TopEntropy(0.2)).describe()
    assert "u_it = 1 where the entropy is among the highest 20% of the step" in text
    assert "mean u_it max(-A_it r_it" in text


@pytest.mark.parametrize(
    ("count", "good", "bad"),
    [("both", [2 / 3, 2 / 3, 1 / 3, 2 / 3], [0.0, 0.0, 0.0]), ("longest", [1.0, 1.0, 0.5, 1.0], [0.0, 0.0, 0.0])],
)
def test_shared_beginnings_and_ends_by_hand(count, good, bad):
    """The rows read a b x c and a b c, with a gap in the first: two tokens from the start and one from the end."""
    mask = torch.tensor([[1.0, 0.0, 1.0, 1.0, 1.0], [1.0, 1.0, 1.0, 0.0, 0.0]], dtype=torch.float64)
    tokens = torch.tensor([[7, 9, 8, 5, 3], [7, 8, 3, 0, 0]])
    reward = torch.tensor([1.0, 0.0], dtype=torch.float64)
    rollouts = Rollouts(torch.tensor([0, 0]), mask, -mask, reward, extras={"tokens": tokens})
    found = values(ConflictTokens(count=count)(rollouts), mask)
    assert found[0] == pytest.approx(good)
    # all three tokens of the bad response lie in one of the runs
    assert found[1] == pytest.approx(bad)
    flat = ConflictTokens(count=count)(rollouts.replace(reward=reward * 0))
    assert torch.equal(flat, torch.ones_like(mask)), "responses at the mean of their group are in no conflict"


def test_other_groups_are_in_no_conflict():
    mask = torch.ones(2, 2, dtype=torch.float64)
    rollouts = Rollouts(torch.tensor([0, 1]), mask, -mask, mask[:, 0], extras={"tokens": torch.ones(2, 2).long()})
    assert torch.equal(ConflictTokens()(rollouts), mask)


def test_responses_of_high_entropy_are_left_out():
    rollouts = small(
        entropy=torch.tensor([[0.3, 0.6, 0.6], [0.9, 0.7, 9.0]]).double(), reward=torch.tensor([1.0, 0.0]).double()
    )
    assert values(EntropyFiltered()(rollouts), rollouts.mask) == [pytest.approx([0.45] * 3), [0.0, 0.0]]


@pytest.mark.parametrize("name", ["gepo", "gtpo", "segment_chain", "remax", "hbpo", "copo", "aspo_tir", "ngrpo"])
def test_blocks_that_know_the_total_reward_only_are_refused_where_each_reward_has_advantages(name):
    with pytest.raises(ValueError, match="uses the summed reward, but here each reward has its own advantages"):
        decoupled_advantages(get(name), random_rollouts(), {"accuracy": 1.0})


def test_a_bonus_beside_the_reward_is_refused_where_each_reward_has_advantages():
    halved = get("canon_length")
    decoupled_advantages(halved, random_rollouts(), {"accuracy": 1.0})
    with pytest.raises(ValueError, match="'regrouped_by_length' uses the summed reward"):
        decoupled_advantages(halved.override({"advantage": {"beta": 0.5}}), random_rollouts(), {"accuracy": 1.0})


def test_rewards_of_decisions_are_refused_where_each_reward_has_advantages():
    rollouts = random_rollouts()
    rollouts = rollouts.replace(extras={"decision_reward": torch.zeros_like(rollouts.mask)})
    with pytest.raises(ValueError, match=r"[Rr]ewards of single decisions are not split into terms"):
        decoupled_advantages(get("grpo"), rollouts, {"accuracy": 1.0})


def test_blocks_that_remember_steps_move_with_advantages_of_several_rewards():
    """The sum of rewards moves them; each reward by itself did not."""
    objective = get("entropy_smoothing")
    state = objective.state()
    rollouts = random_rollouts().replace(entropy=torch.rand(random_rollouts().mask.shape, dtype=torch.float64))
    before = str(state.state_dict())
    decoupled_advantages(objective, rollouts, {"accuracy": 1.0}, state)
    assert str(state.state_dict()) != before
