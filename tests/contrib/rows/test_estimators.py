"""Properties of the estimators of single papers, beyond their golden numbers."""

import statistics
from itertools import combinations
from types import SimpleNamespace

import pytest
import torch

from mmrl.contrib.rows.estimators import BetaNormalised, RegroupedByLength, VirtualBest, max_variance_rows
from mmrl.core import PolicyOutputs, Rollouts, get
from mmrl.core.blocks.advantage import GroupMean
from mmrl.training import processes

NAN = float("nan")


def rollouts(reward, group, lengths=None, **more):
    """Rows with these rewards, of up to 5 decisions."""
    lengths = torch.tensor(lengths or [1 + i % 5 for i in range(len(reward))])
    mask = (torch.arange(5) < lengths[:, None]).double()
    reward = torch.tensor(reward, dtype=torch.float64)
    return Rollouts(torch.tensor(group), mask, torch.zeros_like(mask), reward, **more)


def rows(advantage):
    return advantage[:, 0].tolist()


GROUPS = [0, 0, 0, 0, 1, 1, 1, 1, 2]


def test_bnpo_with_a_uniform_fit_is_the_group_mean():
    # one group of failures and one of successes have more variance than any Beta distribution
    batch = rollouts([0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0, 0.0, NAN], GROUPS)
    wide = rollouts([0.0, 0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0, 1.0], GROUPS)
    assert rows(BetaNormalised()(wide)) == [0.0] * 9
    alike = rollouts([0.0, 0.0, 1.0, 1.0, 1.0, 0.0, 1.0, 0.0, 0.3], GROUPS)
    torch.testing.assert_close(BetaNormalised()(alike), GroupMean()(alike))
    assert BetaNormalised()(batch).isfinite().all()


def test_bnpo_maps_rewards_to_shares():
    small = BetaNormalised()(rollouts([0.0, 1.0, 0.2, 0.7, 1.0, 0.5, 1.0, 0.0, 1.0], GROUPS))
    moved = BetaNormalised(low=-1.0, high=3.0)
    large = moved(rollouts([-1.0, 3.0, -0.2, 1.8, 3.0, 1.0, 3.0, -1.0, 9.0], GROUPS))
    torch.testing.assert_close(small, large)
    with pytest.raises(ValueError, match=r"advantage\.low 1 must lie below advantage\.high 1"):
        get("bnpo").override({"advantage": {"low": 1.0}}).validate()


@pytest.mark.parametrize("number", [2, 8, 16])
def test_ngrpo_pushes_all_of_a_failed_group_down(number):
    found = rows(VirtualBest(eps=0.0)(rollouts([0.0] * number, [0] * number)))
    assert found == pytest.approx([-((number + 1) ** -0.5)] * number)


def test_ngrpo_leaves_groups_of_successes_and_single_rows_alone():
    found = rows(VirtualBest()(rollouts([1.0, 1.0, 1.0, NAN, 0.0, NAN, NAN, NAN, 0.0], GROUPS)))
    assert found == [0.0] * 9


def test_canon_of_half_and_half_is_dr_grpo():
    batch = rollouts([0.1, 0.9, 0.4, 0.4, 1.0, 0.0, 0.7, 0.2, 1.0], GROUPS)
    torch.testing.assert_close(RegroupedByLength(inter=0.5)(batch), GroupMean()(batch))


def test_canon_compares_with_the_other_half():
    batch = rollouts([1.0, 0.5, 0.0, NAN, 0.3, 0.3, 0.3, 0.3, 1.0], GROUPS, [1, 3, 2, 5, 1, 2, 3, 4, 5])
    # of three scored rows the shortest is one half; rows of length 2 and 3 are the other
    expected = [1.0 - 0.25, 0.5 - 1.0, 0.0 - 1.0, 0.0] + [0.0] * 5
    assert rows(RegroupedByLength()(batch)) == pytest.approx(expected)
    assert rows(RegroupedByLength()(batch))[4:] == [0.0] * 5


@pytest.mark.parametrize("number", range(2, 7))
def test_the_rows_of_largest_variance_are_found_without_trying_all(number):
    values = torch.rand(6, generator=torch.Generator().manual_seed(number)).tolist()
    largest = max(combinations(range(6), number), key=lambda rows: statistics.pvariance([values[row] for row in rows]))
    assert sorted(max_variance_rows(values, number)) == sorted(largest)


def test_down_sampling_relaxes_to_all_decisions():
    objective = get("d3s").override({"weight": {"relax_steps": 2}})
    batch = rollouts([0.0, 1.0, 0.3, 0.2, 0.9, 0.1, 0.6, 0.7, 0.5], GROUPS)
    batch = batch.replace(entropy=torch.rand(9, 5, generator=torch.Generator().manual_seed(0)).double())
    state, mask = objective.state(), batch.loss_mask
    found = [objective.compute_advantages(batch, state) for _ in range(4)]
    kept = [int(each.loss_mask.sum()) for each in found]
    assert kept[0] < kept[1] < kept[2] == kept[3] == int(mask.sum())
    assert all(int(objective.denominators(each).tokens) == number for each, number in zip(found, kept, strict=True))
    torch.testing.assert_close(found[3].mask, batch.mask)


def test_down_sampling_leaves_rows_out_before_they_are_scored():
    objective = get("d3s")
    batch = rollouts([0.0, 1.0, 0.3, 0.2, 0.9, NAN, 0.6, 0.7, 0.5], GROUPS)
    batch = batch.replace(entropy=torch.ones_like(batch.mask))
    thinned = objective.weight.thinned(batch, objective.state().blocks["weight"])
    assert thinned.mask.any(1).tolist() == [True, True, False, False, True, False, True, False, True]
    early, late = (objective.compute_advantages(each) for each in (thinned, batch))
    assert torch.equal(early.mask, late.mask), "the same rows, chosen once"
    # advantages compare all rows of a group
    assert float(early.advantage.max()) == pytest.approx(0.625 / statistics.stdev([0.0, 1.0, 0.3, 0.2]), abs=1e-5)


def test_down_sampling_is_that_of_the_rows_of_all_processes(monkeypatch):
    objective = get("d3s")
    batch = rollouts([0.0, 1.0, 0.3, 0.2, 0.9, 0.1, 0.6, 0.7, 0.5], GROUPS)
    batch = batch.replace(entropy=torch.rand(9, 5, generator=torch.Generator().manual_seed(0)).double())
    first, second = batch.select_groups(torch.tensor([0])), batch.select_groups(torch.tensor([1, 2]))
    monkeypatch.setattr(processes, "merge_lists", lambda own, accelerator: [first, *own])
    accelerator = SimpleNamespace(num_processes=2, process_index=1, device="cpu")
    found = processes.global_advantages(objective.compute_advantages, second, accelerator)
    expected = objective.compute_advantages(batch)
    assert torch.equal(found.mask, expected.mask[4:])
    assert torch.equal(found.advantage, expected.advantage[4:])


def test_copo_gives_groups_of_equal_rewards_a_gradient():
    objective = get("copo")
    batch = rollouts([1.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0, NAN], GROUPS)
    batch = objective.compute_advantages(batch.replace(extras={"answer": torch.tensor([0] * 9)}))
    assert objective.regularised, "an update may not skip groups by their own advantages"
    assert not batch.advantage.any()
    logp = torch.zeros_like(batch.mask).requires_grad_()
    loss = objective.loss(PolicyOutputs(logp), batch, objective.denominators(batch)).loss
    (gradient,) = torch.autograd.grad(loss, logp)
    assert (gradient[:4][batch.mask[:4] > 0] < 0).all(), "towards the answers of the better group"
    assert (gradient[4:8][batch.mask[4:8] > 0] > 0).all()
    assert not gradient[8].any()
