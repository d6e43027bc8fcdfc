import pytest
import torch

from mmrl.core import Rollouts
from tests.core.builders import random_rollouts


def same(a, b):
    for name in ("group", "mask", "logp_old", "reward", "logp_ref", "values", "entropy", "turn"):
        assert torch.equal(getattr(a, name), getattr(b, name)), name
    for name in ("reward_terms", "extras"):
        assert all(torch.equal(getattr(a, name)[key], getattr(b, name)[key]) for key in getattr(a, name))
    assert a.payload.prompts == b.payload.prompts
    assert torch.equal(a.payload.ids, b.payload.ids)


def test_select_renumbers_groups_and_drops_unused_prompts():
    rollouts = random_rollouts()
    some = rollouts.select(torch.tensor([10, 3, 4]))
    assert some.group.tolist() == [1, 0, 0]
    assert some.payload.prompts == ["prompt 1", "prompt 3"]
    assert some.payload.ids.tolist() == [10, 3, 4]
    assert torch.equal(some.extras["noise"], rollouts.extras["noise"][[10, 3, 4]])
    assert torch.equal(some.reward_terms["accuracy"], rollouts.reward_terms["accuracy"][[10, 3, 4]])


def test_select_with_bool_rows_equals_select_with_indices():
    rollouts = random_rollouts()
    keep = rollouts.reward > 0
    same(rollouts.select(keep), rollouts.select(torch.nonzero(keep).flatten()))


def test_select_groups_keeps_the_order_given():
    some = random_rollouts().select_groups(torch.tensor([2, 0]))
    assert some.payload.prompts == ["prompt 2", "prompt 0"]
    assert some.group.tolist() == [0, 0, 0, 1, 1, 1]
    assert some.payload.ids.tolist() == [6, 7, 8, 0, 1, 2]


def test_concat_undoes_a_cut_by_groups():
    rollouts = random_rollouts()
    parts = [rollouts.select_groups(torch.tensor(part)) for part in ([0, 1], [2], [3])]
    same(Rollouts.concat(parts), rollouts)


def test_concat_pads_decisions_and_marks_padding_as_no_turn():
    narrow, wide = random_rollouts(width=3), random_rollouts(seed=1, width=5)
    joined = Rollouts.concat([narrow, wide])
    assert joined.num_decisions == 5
    assert joined.num_groups == 8
    assert joined.mask[:12, 3:].sum() == 0
    assert (joined.turn[:12, 3:] == -1).all()
    assert joined.payload.prompts == narrow.payload.prompts + wide.payload.prompts


def test_exchanged_rows_take_places_and_groups_and_widen_the_others():
    rollouts, others = random_rollouts(width=3), random_rollouts(seed=1, width=5).select(torch.tensor([0, 5]))
    found = rollouts.exchanged(torch.tensor([7, 1]), others)
    assert found.group.tolist() == rollouts.group.tolist()
    assert found.payload.prompts == rollouts.payload.prompts
    assert found.payload.ids.tolist() == [0, 5, 2, 3, 4, 5, 6, 0, 8, 9, 10, 11]
    assert torch.equal(found.reward[[7, 1]], others.reward)
    assert torch.equal(found.logp_old[[7, 1]], others.logp_old)
    assert torch.equal(found.mask[:, :3][[0, 2]], rollouts.mask[[0, 2]])
    assert torch.equal(found.host.mask, found.mask)


def test_rows_join_groups_and_leave_them_again():
    rollouts, others = random_rollouts(), random_rollouts(seed=1).select(torch.tensor([0, 1, 2]))
    found = rollouts.joined_by(others, torch.tensor([3, 1, 1]))
    assert found.group.tolist() == [0] * 3 + [1] * 5 + [2] * 3 + [3] * 4
    assert found.payload.ids.tolist() == [0, 1, 2, 3, 4, 5, 1, 2, 6, 7, 8, 9, 10, 11, 0]
    assert found.payload.prompts == rollouts.payload.prompts
    apart = torch.tensor([0] * 3 + [1] * 3 + [4] * 2 + [2] * 3 + [3] * 4)
    moved = found.regrouped(apart, torch.tensor([0, 1, 2, 3, 1]))
    assert moved.payload.prompts == [*rollouts.payload.prompts, "prompt 1"]
    assert moved.group.tolist() == apart.tolist()
    same(moved.regrouped(found.group, torch.arange(4)), found)


def test_minibatches_are_whole_groups_as_even_as_possible():
    rollouts = random_rollouts(groups=7)
    parts = rollouts.minibatches(3, torch.Generator().manual_seed(1))
    assert sorted(part.num_groups for part in parts) == [2, 2, 3]
    assert all((torch.bincount(part.group) == 3).all() for part in parts)
    assert sorted(p for part in parts for p in part.payload.prompts) == sorted(rollouts.payload.prompts)
    assert sorted(torch.cat([part.payload.ids for part in parts]).tolist()) == list(range(21))


def test_minibatches_repeat_with_the_seed_and_shuffle_without_it():
    def order(seed):
        generator = None if seed is None else torch.Generator().manual_seed(seed)
        return [p for part in random_rollouts(groups=8).minibatches(2, generator) for p in part.payload.prompts]

    assert order(5) == order(5)
    assert order(5) != order(6)
    assert order(None) == random_rollouts(groups=8).payload.prompts


def test_more_minibatches_than_groups_gives_one_group_each():
    assert [part.num_groups for part in random_rollouts(groups=2).minibatches(5)] == [1, 1]


def test_micro_batches_cover_all_rows_and_trim_to_their_longest():
    rollouts = random_rollouts()
    chunks = list(rollouts.micro_batches(7))
    assert [chunk.num_rows for chunk in chunks] == [6, 6]
    assert torch.cat([chunk.payload.ids for chunk in chunks]).tolist() == list(range(12))
    for chunk in chunks:
        assert chunk.num_decisions == int(chunk.lengths.max())
        assert chunk.logp_old.shape == chunk.extras["noise"].shape == chunk.mask.shape
    assert torch.equal(torch.cat([chunk.lengths for chunk in chunks]), rollouts.lengths)


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        (1, [[0]] * 5 + [[1]] * 2 + [[2]] + [[3]] * 9),
        (3, [[0]] * 2 + [[1, 2]] + [[3]] * 3),
        (4, [[0]] * 2 + [[1, 2]] + [[3]] * 3),
        (6, [[0], [1, 2], [3], [3]]),
        (8, [[0, 1, 2], [3], [3]]),
        (9, [[0, 1, 2], [3]]),
        (17, [[0, 1, 2, 3]]),
    ],
)
def test_micro_batches_hold_whole_groups_or_a_part_of_one(rows, expected):
    sizes = torch.tensor([5, 2, 1, 9])
    rollouts = Rollouts(
        group=torch.arange(4).repeat_interleave(sizes),
        mask=torch.ones(17, 1),
        logp_old=torch.zeros(17, 1),
        reward=torch.arange(17.0),  # says which rows a chunk holds
    )
    chunks = list(rollouts.micro_batches(rows))
    assert torch.equal(torch.cat([chunk.reward for chunk in chunks]), rollouts.reward)
    assert [rollouts.group[chunk.reward.long()].unique().tolist() for chunk in chunks] == expected
    assert max(chunk.num_rows for chunk in chunks) <= rows


def test_parts_of_a_cut_group_are_even():
    rollouts = random_rollouts(groups=1).select(torch.tensor([0, 1, 2, 0, 1, 2, 0]))
    assert [chunk.num_rows for chunk in rollouts.micro_batches(5)] == [4, 3]
    assert [chunk.num_rows for chunk in rollouts.micro_batches(3)] == [3, 2, 2]


def test_micro_batch_of_empty_rows_keeps_one_column():
    rollouts = random_rollouts()
    empty = rollouts.replace(mask=torch.zeros_like(rollouts.mask))
    assert next(empty.micro_batches(4)).num_decisions == 1


def test_unscored_rows_leave_the_loss_mask():
    rollouts = random_rollouts()
    reward = rollouts.reward.clone()
    reward[2] = float("nan")
    rollouts = rollouts.replace(reward=reward)
    assert not rollouts.scored[2]
    assert rollouts.scored.sum() == 11
    assert rollouts.loss_mask[2].sum() == 0
    assert rollouts.loss_mask.sum() == rollouts.mask.sum() - rollouts.mask[2].sum()


def test_no_group_left_is_an_empty_rollouts():
    empty = random_rollouts().select_groups(torch.zeros(4, dtype=torch.bool))
    assert (empty.num_rows, empty.num_groups) == (0, 0)
    assert empty.minibatches(2) == []
    assert list(empty.micro_batches(2)) == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"group": torch.tensor([0, 0, 2])}, "every number from 0"),
        ({"group": torch.zeros(3)}, "int64"),
        ({"reward": torch.zeros(4)}, "reward"),
        ({"mask": torch.ones(3, 2, dtype=torch.bool)}, r"mask\.float\(\)"),
        ({"mask": torch.full((3, 2), 0.5)}, "only 0 and 1"),
        ({"mask": torch.ones(2, 2)}, "B = 3"),
        ({"mask": torch.ones(3, 0)}, "T = 0"),
        ({"logp_old": torch.zeros(3, 1)}, "logp_old must have the shape of the mask"),
        ({"logp_old": torch.zeros(3, 2, dtype=torch.bfloat16)}, "float32 or float64"),
        ({"values": torch.zeros(3)}, "values"),
        ({"turn": torch.zeros(3, 2)}, "int64"),
        ({"extras": {"odd": torch.zeros(3, 5)}}, "'odd'"),
        ({"reward_terms": {"odd": torch.zeros(2)}}, "'odd'"),
    ],
)
def test_bad_fields_are_named(changes, message):
    fields = {
        "group": torch.zeros(3, dtype=torch.int64),
        "mask": torch.ones(3, 2),
        "logp_old": torch.zeros(3, 2),
        "reward": torch.zeros(3),
    }
    with pytest.raises(ValueError, match=message):
        Rollouts(**(fields | changes))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda r: r.select(torch.tensor([12])), r"0\.\.11"),
        (lambda r: r.select(torch.tensor([0.0])), "int64 or bool"),
        (lambda r: r.select(torch.tensor([True])), r"shape \(12,\)"),
        (lambda r: r.select_groups(torch.tensor([1, 1])), "at most once"),
        (lambda r: r.minibatches(0), "at least 1"),
        (lambda r: list(r.micro_batches(0)), "at least 1"),
        (lambda r: Rollouts.concat([]), "at least one"),
        (lambda r: Rollouts.concat([r, r.replace(values=None)]), "values"),
    ],
)
def test_bad_selections_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call(random_rollouts())
