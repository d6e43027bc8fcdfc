import io
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from mmrl.errors import UserError
from mmrl.fields import check_config
from robotics.methods.progress import (
    NORM_NAMES,
    NORMS,
    PRESETS,
    ProgressForm,
    ProgressSettings,
    SuccessMemory,
    advantage_correlation,
    cluster_labels,
    progress_rewards,
    rank_agreement,
    shuffled_failures,
)

NEAREST = 0.6 / (1 + math.exp(-5))
FARTHEST = 0.6 / (1 + math.exp(5))


def on_a_line(distances, successes=1, task="a"):
    """Successes at the origin and failures at these distances from it, along one axis of three."""
    latents = np.zeros((successes + len(distances), 3), np.float32)
    latents[successes:, 1] = distances
    success = np.arange(len(latents)) < successes
    return latents, success, np.ones(len(latents), bool), [task] * len(latents)


def random_batch(rng, rows=40, size=5, tasks=4):
    latents = rng.normal(size=(rows, size)).astype(np.float32)
    # Pairs of successes that agree, so that there are clusters as well as single ones.
    latents[1::4] = latents[0::4] + rng.normal(0, 0.01, (rows // 4, size))
    success = rng.random(rows) < 0.5
    success[1::4] = success[0::4]
    labels = (np.arange(rows) // 2 % tasks).tolist()
    return latents, success, rng.random(rows) < 0.9, labels


def plain(latents, success, valid, tasks, eps_per_root=0.5):
    """The reward with loops and without DBSCAN: with two samples a core, clusters are chains of neighbours."""
    reward = [0.0] * len(tasks)
    for row, task in enumerate(tasks):
        if not valid[row]:
            reward[row] = math.nan
            continue
        if success[row]:
            reward[row] = 1.0
            continue
        good = [i for i, t in enumerate(tasks) if t == task and success[i] and valid[i]]
        bad = [i for i, t in enumerate(tasks) if t == task and not success[i] and valid[i]]
        if not good:
            continue
        points = latents[good].astype(float)
        std = points.std(0)
        std[std == 0] = 1
        standard = (points - points.mean(0)) / std
        radius = eps_per_root * math.sqrt(points.shape[1])
        near = np.array([[np.sqrt(((a - b) ** 2).sum()) <= radius for b in standard] for a in standard])
        reach = np.linalg.matrix_power(near.astype(float), len(good)) > 0
        groups = {tuple(line) for line in reach.tolist() if sum(line) > 1}
        centres = [points[list(group)].mean(0) for group in groups] or [points.mean(0)]
        distance = {i: min(np.sqrt(((latents[i] - c) ** 2).sum()) for c in centres) for i in bad}
        low, high = min(distance.values()), max(distance.values())
        share = 0.5 if high - low < 1e-6 else (distance[row] - low) / (high - low)
        reward[row] = 0.6 / (1 + math.exp(-10 * (0.5 - share)))
    return np.array(reward)


def test_nearest_and_farthest_failure_get_the_known_numbers():
    outcome = progress_rewards(*on_a_line([2.0, 8.0, 5.0]), ProgressSettings())
    np.testing.assert_allclose(outcome.reward, [1, 0.595984, 0.004016, 0.3], atol=5e-7)
    np.testing.assert_allclose(outcome.reward[1:3], [NEAREST, FARTHEST], rtol=1e-6)
    np.testing.assert_allclose(outcome.distance, [np.nan, 2, 8, 5])


def test_a_single_failure_gets_half_of_alpha():
    assert progress_rewards(*on_a_line([7.0]), ProgressSettings()).reward[1] == pytest.approx(0.3)
    assert progress_rewards(*on_a_line([7.0, 7.0 + 4e-7]), ProgressSettings()).reward[1:] == pytest.approx(0.3)


@pytest.mark.parametrize("norm", list(NORMS))
def test_without_success_nothing_is_earned(norm):
    latents, success, valid, tasks = on_a_line([1.0, 2.0], successes=0)
    outcome = progress_rewards(latents, success, valid, tasks, ProgressSettings(norm=norm), first=latents)
    assert outcome.reward.tolist() == [0, 0]
    assert (outcome.tasks_without_reference, outcome.fraction_without_reference) == (1, 1.0)
    assert math.isnan(outcome.clusters)
    assert math.isnan(outcome.noise_fraction)


@pytest.mark.parametrize(("invalid", "expected"), [("zero", 0.0), ("nan", math.nan)])
def test_an_invalid_success_earns_nothing_and_is_not_a_reference(invalid, expected):
    latents, success, valid, tasks = on_a_line([1.0, 2.0])
    latents[0], valid[0] = np.nan, False
    outcome = progress_rewards(latents, success, valid, tasks, ProgressSettings(invalid=invalid))
    np.testing.assert_array_equal(outcome.reward, np.float32([expected, 0, 0]))
    assert (outcome.invalid, outcome.tasks_without_reference) == (1, 1)


def test_an_invalid_failure_does_not_move_the_others():
    latents, success, valid, tasks = on_a_line([2.0, 8.0, 1e6])
    valid[3] = False
    outcome = progress_rewards(latents, success, valid, tasks, ProgressSettings())
    np.testing.assert_allclose(outcome.reward, [1, NEAREST, FARTHEST, np.nan], rtol=1e-6)


def test_tasks_do_not_share_references():
    here, there = on_a_line([1.0, 2.0], task="here"), on_a_line([1.0, 2.0], successes=0, task="there")
    batch = [np.concatenate([a, b]) for a, b in zip(here[:3], there[:3], strict=True)]
    outcome = progress_rewards(batch[0], batch[1], batch[2], here[3] + there[3], ProgressSettings())
    np.testing.assert_allclose(outcome.reward, [1, NEAREST, FARTHEST, 0, 0], rtol=1e-6)
    assert (outcome.tasks, outcome.tasks_without_reference, list(outcome.centres)) == (2, 1, ["here"])


@pytest.mark.parametrize("seed", range(5))
def test_agrees_with_a_plain_implementation(seed):
    batch = random_batch(np.random.default_rng(seed))
    outcome = progress_rewards(*batch, ProgressSettings())
    np.testing.assert_allclose(outcome.reward, plain(*batch), rtol=1e-5, atol=1e-7)
    assert outcome.clusters > 0
    assert 0 < outcome.noise_fraction < 1


@pytest.mark.parametrize("norm", list(NORMS))
@pytest.mark.parametrize("squared", [False, True])
def test_the_order_of_rows_does_not_matter(norm, squared):
    rng = np.random.default_rng(3)
    latents, success, valid, tasks = random_batch(rng)
    first = rng.normal(size=latents.shape)
    settings = ProgressSettings(norm=norm, squared=squared)
    straight = progress_rewards(latents, success, valid, tasks, settings, first=first)
    order = rng.permutation(len(tasks))
    labels = [tasks[i] for i in order]
    mixed = progress_rewards(latents[order], success[order], valid[order], labels, settings, first=first[order])
    np.testing.assert_allclose(mixed.reward, straight.reward[order], rtol=1e-5)
    assert mixed.noise_fraction == pytest.approx(straight.noise_fraction)


@pytest.mark.parametrize("norm", list(NORMS))
def test_a_nearer_failure_always_earns_more_and_none_as_much_as_alpha(norm):
    distances = np.sort(np.random.default_rng(0).uniform(0.1, 9, 12))
    latents, success, valid, tasks = on_a_line(distances, successes=2)
    latents[:2, 0] = [-1, 1]
    first = np.full_like(latents, 8)
    earned = progress_rewards(latents, success, valid, tasks, ProgressSettings(norm=norm), first=first).reward[2:]
    assert (np.diff(earned) < 0).all()
    assert earned.min() > 0
    assert earned.max() < 0.6


def test_zscore_is_the_papers_form():
    distances = np.array([1.0, 2.0, 6.0])
    outcome = progress_rewards(*on_a_line(distances), ProgressSettings(norm="zscore"))
    z = (distances - 3) / math.sqrt((4 + 1 + 9) / 3)
    np.testing.assert_allclose(outcome.reward[1:], 0.6 / (1 + np.exp(z)), rtol=1e-6)
    assert progress_rewards(*on_a_line([4.0]), ProgressSettings(norm="zscore")).reward[1] == pytest.approx(0.3)


def test_squared_distances_are_squared_before_they_are_normalised():
    outcome = progress_rewards(*on_a_line([1.0, 2.0, 3.0]), ProgressSettings(squared=True))
    assert outcome.distance[1:].tolist() == [1, 4, 9]
    assert outcome.reward[2] == pytest.approx(0.6 / (1 + math.exp(-10 * (0.5 - 3 / 8))), rel=1e-6)


def test_the_absolute_norm_does_not_depend_on_the_other_failures():
    def earned(distances):
        latents, success, valid, tasks = on_a_line(distances, successes=2)
        latents[:2, 0] = [-2, 2]
        return progress_rewards(latents, success, valid, tasks, ProgressSettings(norm="absolute")).reward[2:]

    # The successes lie 2 from their mean, and so does this failure: it cannot be told from them.
    assert earned([2.0])[0] == pytest.approx(0.3)
    assert earned([2.0, 50.0, 90.0])[0] == pytest.approx(0.3)
    assert earned([6.0])[0] == pytest.approx(0.6 / (1 + math.exp(-10 * (0.5 - 6 / 8))), rel=1e-6)
    # A single success has no spread to measure by.
    single = progress_rewards(*on_a_line([2.0, 8.0]), ProgressSettings(norm="absolute")).reward[1:]
    np.testing.assert_allclose(single, [NEAREST, FARTHEST], rtol=1e-6)


def test_the_initial_norm_counts_the_share_of_the_distance_from_the_first_frame():
    latents, success, valid, tasks = on_a_line([1.0, 4.0, 6.0, 3.0])
    first = np.zeros_like(latents)
    first[1:, 1] = [4.0, 4.0, 4.0, 0.0]
    reward = progress_rewards(latents, success, valid, tasks, ProgressSettings(norm="initial"), first=first).reward
    # three quarters of the way; no step; further away than at the start; and one that began at the goal and left it
    np.testing.assert_allclose(reward, [1, 0.6 * 0.75, 0, 0, 0], rtol=1e-6)
    squared = ProgressSettings(norm="initial", squared=True)
    again = progress_rewards(latents, success, valid, tasks, squared, first=first).reward
    np.testing.assert_allclose(again, [1, 0.6 * 15 / 16, 0, 0, 0], rtol=1e-6)


def test_the_initial_norm_does_not_depend_on_the_other_failures():
    latents, success, valid, tasks = on_a_line([1.0, 2.0, 9.0])
    first = np.full_like(latents, 3)
    settings = ProgressSettings(norm="initial")
    whole = progress_rewards(latents, success, valid, tasks, settings, first=first).reward
    valid[[2, 3]] = False
    alone = progress_rewards(latents, success, valid, tasks, settings, first=first).reward
    assert whole[1] == alone[1] > 0
    # an invalid row's first frame may be anything
    first[[2, 3]] = np.nan
    assert progress_rewards(latents, success, valid, tasks, settings, first=first).reward[1] == alone[1]


def test_the_initial_norm_needs_first_frames():
    latents, success, valid, tasks = on_a_line([1.0, 2.0])
    settings = ProgressSettings(norm="initial")
    with pytest.raises(ValueError, match="needs the latents of first frames; pass `first`"):
        progress_rewards(latents, success, valid, tasks, settings)
    for first in (latents[:2], np.where(latents > 1, np.nan, latents)):
        with pytest.raises(ValueError, match=r"latents of first frames are .*; expected \(3, 3\), finite"):
            progress_rewards(latents, success, valid, tasks, settings, first=first)


def test_presets_set_the_unset_options():
    assert set(NORM_NAMES) == set(NORMS)
    assert ProgressSettings(preset="published").form == ProgressForm("task", 0, "minmax", "absolute", "zero")
    assert ProgressSettings().form == ProgressForm("task", 0, "minmax", "per_sqrt_dim", "nan")
    assert ProgressSettings(preset="initial_state").form == PRESETS["initial_state"]
    own = ProgressSettings(preset="initial_state", memory=0, norm="zscore", invalid="zero").form
    assert own == ProgressForm("initial_state", 0, "zscore", "per_sqrt_dim", "zero")


def test_a_state_that_was_never_solved_borrows_the_successes_of_its_task():
    states = ["push/train/0"] * 2 + ["push/train/1"] * 2 + ["reach/train/0"]
    latents = np.float32([[8, 0], [4, 0], [2, 0], [3, 0], [1, 0]])
    success = np.array([True, False, False, False, False])
    remembered = {"push/train/7": np.float32([[12, 0]]), "reach/train/9": np.float32([[5, 5]])}
    settings = ProgressSettings(preset="initial_state", task_fallback=True)
    first = np.zeros_like(latents)
    given = (latents, success, np.ones(5, bool), states)
    outcome = progress_rewards(*given, settings, remembered, first)
    # state 0 has its own success at 8; state 1 is compared with the mean of 8 and 12, reach with (5, 5)
    far = 1 - math.hypot(4, 5) / math.hypot(5, 5)
    np.testing.assert_allclose(outcome.reward, [1, 0.6 * 4 / 8, 0.6 * 2 / 10, 0.6 * 3 / 10, 0.6 * far], rtol=1e-5)
    assert outcome.fraction_with_fallback == pytest.approx(2 / 3)
    assert outcome.tasks_without_reference == 0
    alone = progress_rewards(*given, replace(settings, task_fallback=False), remembered, first)
    np.testing.assert_allclose(alone.reward, [1, 0.6 * 4 / 8, 0, 0, 0], rtol=1e-5)
    assert (alone.tasks_without_reference, alone.tasks_with_fallback) == (2, 0)


def test_a_fallback_to_the_task_is_refused_where_the_task_is_the_reference():
    with pytest.raises(ValueError, match="references already is task"):
        check_config(ProgressSettings(task_fallback=True))


def test_shuffled_failures_keep_every_groups_rewards():
    rng = np.random.default_rng(0)
    reward = rng.random(40).astype(np.float32)
    reward[[3, 17]] = np.nan
    success, group = rng.random(40) < 0.3, np.arange(40) // 10
    shuffled = shuffled_failures(reward, success, group, np.random.default_rng(1))
    np.testing.assert_array_equal(shuffled[success], reward[success])
    np.testing.assert_array_equal(np.isnan(shuffled), np.isnan(reward))
    for label in range(4):
        np.testing.assert_array_equal(np.sort(shuffled[group == label]), np.sort(reward[group == label]))
    assert (shuffled != reward)[~success & np.isfinite(reward)].mean() > 0.5
    np.testing.assert_array_equal(shuffled, shuffled_failures(reward, success, group, np.random.default_rng(1)))


def test_the_nearest_of_several_centres_counts():
    latents = np.float32([[0, 0], [0, 0], [10, 0], [10, 0], [10, 1], [5, 0]])
    success = np.array([True] * 4 + [False] * 2)
    outcome = progress_rewards(latents, success, np.ones(6, bool), ["t"] * 6, ProgressSettings(eps_mode="absolute"))
    assert outcome.clusters == 2
    assert sorted(outcome.centres["t"].tolist()) == [[0, 0], [10, 0]]
    np.testing.assert_allclose(outcome.distance[4:], [1, 5])


def test_noise_is_not_a_centre_if_there_are_clusters():
    latents = np.float32([[0, 0], [0, 0], [30, 40], [10, 0], [0, 1]])
    success = np.array([True] * 3 + [False] * 2)
    outcome = progress_rewards(latents, success, np.ones(5, bool), ["t"] * 5, ProgressSettings())
    assert outcome.centres["t"].tolist() == [[0, 0]]
    assert outcome.noise_fraction == pytest.approx(1 / 3)


@pytest.mark.parametrize("size", [64, 256, 1408])
@pytest.mark.parametrize("count", [8, 32])
def test_two_clean_modes_cluster_only_where_the_radius_grows_with_the_size(size, count):
    rng = np.random.default_rng(size + count)
    modes = rng.normal(size=(2, size))
    successes = modes[np.arange(count) % 2] + 0.02 * rng.normal(size=(count, size))
    grown = cluster_labels(successes, ProgressSettings())
    assert set(grown[::2]) != set(grown[1::2])
    assert set(grown.tolist()) == {0, 1}
    released = cluster_labels(successes, ProgressSettings(eps_mode="absolute"))
    assert (released < 0).mean() > 0.9


def test_exact_duplicates_cluster_with_either_radius():
    successes = np.random.default_rng(0).normal(size=(6, 500)).astype(np.float32)
    successes[3] = successes[0]
    for mode in ("absolute", "per_sqrt_dim"):
        labels = cluster_labels(successes, ProgressSettings(eps_mode=mode))
        assert labels.tolist() == [0, -1, -1, 0, -1, -1]
    assert cluster_labels(np.ones((4, 7)), ProgressSettings()).tolist() == [0] * 4


def test_entries_that_do_not_vary_do_not_widen_the_radius():
    rng = np.random.default_rng(1)
    successes = rng.normal(size=(12, 6)).astype(np.float32)
    padded = np.concatenate([successes, np.full((12, 994), 3.3, np.float32)], axis=1)
    expected = cluster_labels(successes, ProgressSettings(eps=0.45))
    assert -1 in expected
    assert cluster_labels(padded, ProgressSettings(eps=0.45)).tolist() == expected.tolist()


def test_references_of_earlier_batches_are_used_when_missing():
    latents, success, valid, tasks = on_a_line([2.0, 8.0], successes=0)
    known = {"a": np.zeros((1, 3)), "b": np.ones((2, 3))}
    outcome = progress_rewards(latents, success, valid, tasks, ProgressSettings(), known)
    np.testing.assert_allclose(outcome.reward, [NEAREST, FARTHEST], rtol=1e-6)
    assert outcome.tasks_without_reference == 0


def test_memory_keeps_the_latest_successes_of_each_task():
    memory = SuccessMemory(2)
    memory.add(np.arange(8).reshape(4, 2), [True, True, False, True], ["a", "a", "a", "b"])
    memory.add([[8, 9], [10, 11]], [True, False], ["a", "b"])
    assert {task: kept.tolist() for task, kept in memory.references().items()} == {"a": [[2, 3], [8, 9]], "b": [[6, 7]]}
    nothing = SuccessMemory(0)
    nothing.add([[8, 9]], [True], ["a"])
    assert nothing.references() == {}


def test_memory_survives_a_checkpoint():
    memory = SuccessMemory(3)
    memory.add(np.arange(8).reshape(4, 2), [True] * 4, ["a", "a", "b", "a"])
    file = io.BytesIO()
    torch.save(memory.state_dict(), file)
    file.seek(0)
    restored = SuccessMemory(2)
    restored.load_state_dict(torch.load(file, weights_only=True))
    assert restored.references()["a"].tolist() == [[2, 3], [6, 7]]
    assert restored.references()["b"].tolist() == [[4, 5]]
    restored.add([[0, 0]], [True], ["a"])
    assert memory.references()["a"].tolist() == [[0, 1], [2, 3], [6, 7]]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"alpha": 1.0}, r"alpha is 1.0; must be in \(0, 1\)"),
        ({"alpha": math.nan}, "alpha"),
        ({"eps": 0.0}, "eps is 0.0"),
        ({"steepness": -1.0}, "steepness"),
        ({"offset": math.inf}, "offset"),
        ({"min_samples": 0}, "min_samples is 0; must be at least 1"),
        ({"memory": -1}, "memory"),
        ({"norm": "rank"}, "minmax, zscore, absolute, initial"),
        ({"preset": "paper"}, "preset is 'paper'; allowed: published, task, initial_state"),
        ({"references": "batch"}, "references is 'batch'; allowed: task, initial_state"),
        ({"eps_mode": "auto"}, "per_sqrt_dim, absolute"),
        ({"invalid": "one"}, "nan, zero"),
    ],
)
def test_settings_out_of_range_are_refused(changed, message):
    with pytest.raises(UserError, match=message):
        progress_rewards(*on_a_line([1.0]), ProgressSettings(**changed))


def test_rows_that_do_not_belong_together_are_refused():
    latents, success, valid, tasks = on_a_line([1.0, 2.0])
    with pytest.raises(ValueError, match="do not describe the same rows"):
        progress_rewards(latents, success, valid, tasks[:2], ProgressSettings())
    with pytest.raises(ValueError, match="references of shape"):
        progress_rewards(latents, success, valid, tasks, ProgressSettings(), {"a": np.zeros((1, 4))})
    latents[1] = np.inf
    with pytest.raises(ValueError, match=r"rows \[1\] are not finite"):
        progress_rewards(latents, success, valid, tasks, ProgressSettings())


def test_rank_agreement_is_spearmans_within_groups():
    from scipy.stats import spearmanr

    rng = np.random.default_rng(0)
    reward, told, group = rng.random(20), rng.random(20), np.repeat([3, 5, 9], [10, 7, 3])
    wanted = np.average([spearmanr(reward[group == g], told[group == g])[0] for g in (3, 5, 9)], weights=[10, 7, 3])
    assert rank_agreement(reward, told, group) == pytest.approx(wanted)
    assert rank_agreement(reward, reward**3, group) == pytest.approx(1)
    assert rank_agreement(reward, -reward, group) == pytest.approx(-1)
    # the level of a group says nothing, only the order within it
    assert rank_agreement(reward + 100 * group, -reward, group) == pytest.approx(-1)


def test_groups_without_an_order_do_not_count():
    nan = float("nan")
    reward, group = [0.1, 0.2, 0.3, 0.1, 0.2, 0.5, 0.5, 0.5], [0, 0, 0, 1, 1, 2, 2, 2]
    assert rank_agreement(reward, [1, 2, 3, 9, 1, 1, 2, 3], group) == pytest.approx(1)  # two rows, and equal rewards
    assert np.isnan(rank_agreement(reward, [0] * 8, group))  # a reward of success alone
    assert np.isnan(rank_agreement([nan, *reward[1:]], [1, 2, 3, 9, 1, 1, 2, 3], group))
    assert np.isnan(rank_agreement([], [], []))


def test_advantage_correlation_is_pearsons_over_all_rows():
    mine, other, told = [3.0, -1.0, -1.0, -1.0], [2.0, 0.0, -1.0, -1.0], [1.0, 0.4, 0.1, 0.2]
    failed = [0, 1, 1, 1]
    # deviations: 3, -1, -1, -1 and 2, 0, -1, -1, so the sum of products is 8 and those of squares are 12 and 6
    assert advantage_correlation(mine, other, told, failed) == pytest.approx(8 / math.sqrt(72))
    nan = float("nan")
    assert advantage_correlation([*mine, nan], [*other, 9], [*told, 0], [*failed, 1]) == pytest.approx(
        8 / math.sqrt(72)
    )
    assert np.isnan(advantage_correlation(mine, other, [1, 0, 0, 0], failed))  # a reward of success alone
    assert np.isnan(advantage_correlation([0] * 4, other, told, failed))
    assert np.isnan(advantage_correlation([], [], [], []))
