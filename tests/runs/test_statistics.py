import itertools
import math

import numpy as np
import pytest

from mmrl.runs.statistics import (
    cluster_bootstrap_interval,
    difference_interval,
    first_reach,
    mean_interval,
    paired_difference,
    pass_at,
    ratio_bounds,
    ratio_interval,
    t_quantile,
    value_at,
    wilson_interval,
)


def test_wilson_equals_published_values():
    # Newcombe 1998 (two-sided confidence intervals for the single proportion), table I, method 3.
    published = {
        (81, 263): (0.2553, 0.3662),
        (15, 148): (0.0624, 0.1605),
        (0, 20): (0.0, 0.1611),
        (1, 29): (0.0061, 0.1718),
    }
    for (successes, n), expected in published.items():
        assert wilson_interval(successes, n) == pytest.approx(expected, abs=5e-5)


def test_wilson_is_symmetric_and_bounded():
    for successes in range(8):
        low, high = wilson_interval(successes, 7)
        mirrored = wilson_interval(7 - successes, 7)
        assert (1 - mirrored[1], 1 - mirrored[0]) == pytest.approx((low, high))
        assert 0 <= low <= successes / 7 <= high <= 1
    assert wilson_interval(7, 7)[1] == 1.0
    assert wilson_interval(0, 0) == (0.0, 1.0)


def test_wilson_solves_its_defining_equation():
    # Both limits p satisfy |share - p| = z sqrt(p (1 - p) / n); z = 1.6448536 for 90%.
    for limit in wilson_interval(30, 90, confidence=0.9):
        assert abs(1 / 3 - limit) == pytest.approx(1.6448536269514722 * math.sqrt(limit * (1 - limit) / 90))


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [((56, 70), (48, 80), (0.2, 0.0524, 0.3339)), ((9, 10), (3, 10), (0.6, 0.1705, 0.8090))],
)
def test_difference_of_proportions_equals_published_values(first, second, expected):
    # Newcombe 1998 (difference between independent proportions), table II, method 10.
    estimates = [(k / n, *wilson_interval(k, n)) for k, n in (first, second)]
    assert difference_interval(*estimates) == pytest.approx(expected, abs=5e-5)


@pytest.mark.parametrize(
    ("confidence", "dof", "expected"),
    [  # scipy.stats.t.ppf(0.5 + confidence / 2, dof), scipy 1.17.1
        (0.95, 1, 12.706204736174694),
        (0.95, 2, 4.302652729749462),
        (0.95, 3, 3.1824463052837078),
        (0.95, 4, 2.7764451051977934),
        (0.95, 7, 2.3646242515927849),
        (0.95, 30, 2.0422724563012378),
        (0.99, 7, 3.4994832973504937),
        (0.80, 5, 1.4758840488244815),
        (0.999, 11, 4.436979338234487),
        (0.95, 399, 1.9659272959208),
    ],
)
def test_t_quantile_equals_scipy(confidence, dof, expected):
    assert t_quantile(confidence, dof) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("right", [[1, 0, 0, 1, 0, 0, 0], [0, 0, 0, 0], [1, 1, 1, 0, 1], [1]])
def test_pass_at_counts_all_subsets(right):
    found = pass_at([float(value) for value in right])
    assert list(found) == [k for k in (2, 4, 8) if k <= len(right)]
    for k, chance in found.items():
        subsets = list(itertools.combinations(right, k))
        assert chance == pytest.approx(sum(map(any, subsets)) / len(subsets))


def test_pass_at_leaves_out_answers_without_a_score():
    assert pass_at([1.0, math.nan, 0.0, math.nan]) == pytest.approx({2: 1.0, 4: math.nan}, nan_ok=True)


def test_mean_interval_by_hand():
    # mean 3, standard deviation sqrt(2.5), standard error sqrt(0.5), t_4 = 2.7764451052
    interval = mean_interval([1, 2, 3, 4, 5])
    assert interval == pytest.approx((3.0, 3 - 2.7764451052 * math.sqrt(0.5), 3 + 2.7764451052 * math.sqrt(0.5), 5))


def test_one_value_has_no_interval():
    interval = mean_interval([0.25])
    assert interval.mean == 0.25
    assert math.isnan(interval.low)
    assert math.isnan(interval.high)


def test_paired_difference_ignores_common_parts_of_pairs():
    seeds = np.array([0.1, 0.5, 0.9, 0.3])
    gain = np.array([0.02, 0.04, -0.01, 0.03])
    paired = paired_difference((seeds + gain).tolist(), seeds.tolist())
    assert paired[:3] == pytest.approx(mean_interval(gain.tolist())[:3])
    assert (paired.n, paired.wins) == (4, 3)
    reverse = paired_difference(seeds.tolist(), (seeds + gain).tolist())
    assert (reverse.low, reverse.high) == pytest.approx((-paired.high, -paired.low))
    assert reverse.wins == 1


def test_t_interval_covers_the_mean_as_often_as_it_says():
    rng = np.random.default_rng(0)
    intervals = [mean_interval(rng.normal(2.0, 1.0, size=6).tolist(), 0.9) for _ in range(1500)]
    covered = np.mean([i.low <= 2.0 <= i.high for i in intervals])
    assert covered == pytest.approx(0.9, abs=0.025)


def test_bootstrap_treats_the_question_as_the_unit():
    # 8 samples that always agree carry the information of one: the interval must not shrink by sqrt(8).
    rng = np.random.default_rng(0)
    outcome = rng.integers(2, size=200)
    single = cluster_bootstrap_interval([[float(x)] for x in outcome], np.random.default_rng(1))
    copied = cluster_bootstrap_interval([[float(x)] * 8 for x in outcome], np.random.default_rng(1))
    assert copied == single
    low, high = single
    expected = 1.96 * math.sqrt(outcome.mean() * (1 - outcome.mean()) / 200)
    assert (high - low) / 2 == pytest.approx(expected, rel=0.1)
    assert low < outcome.mean() < high


def test_bootstrap_repeats_and_does_not_depend_on_its_chunks(monkeypatch):
    values = [[0.0, 1.0], [1.0, 1.0], [0.0, 0.0], [1.0, 0.0]]
    whole = cluster_bootstrap_interval(values, np.random.default_rng(3), resamples=101)
    monkeypatch.setattr("mmrl.runs.statistics._RESAMPLED_CELLS", 40)
    assert cluster_bootstrap_interval(values, np.random.default_rng(3), resamples=101) == whole


@pytest.mark.parametrize(
    ("values", "target", "expected"),
    [
        ([0.0, 0.2, 0.8], 0.5, (15.0, 15.0)),  # half of the way from 10 to 20
        ([0.0, 0.2, 0.8], 0.2, (10.0, 10.0)),
        ([0.0, 0.6, 0.2], 0.3, (5.0, 5.0)),  # the first crossing, though it falls back
        ([0.4, 0.0, 0.8], 0.6, (17.5, 17.5)),  # from the dip, not from the maximum so far
        ([0.0, math.nan, 0.8], 0.4, (10.0, 10.0)),  # joined over
        ([0.0, 0.2, 0.8], 0.9, (20.0, math.inf)),
        ([0.0, 0.8, math.nan], 0.9, (20.0, math.inf)),  # spent all of it
        ([math.nan] * 3, 0.1, (20.0, math.inf)),
        ([0.3, 0.2, 0.8], 0.3, (0.0, 0.0)),
    ],
)
def test_first_reach_by_hand(values, target, expected):
    assert first_reach([0.0, 10.0, 20.0], values, target) == pytest.approx(expected)


def test_first_reach_agrees_with_a_fine_grid_and_with_the_running_maximum():
    rng = np.random.default_rng(0)
    costs = np.cumsum(rng.uniform(0.5, 2.0, size=8))
    grid = np.linspace(costs[0], costs[-1], 200_001)
    for _ in range(20):
        values = rng.normal(size=8)
        curve = np.interp(grid, costs, values)
        target = float(values[0] + 0.9 * (values.max() - values[0]))
        expected = grid[np.argmax(np.maximum.accumulate(curve) >= target)]
        if target > values[0]:
            assert first_reach(costs, values, target)[0] == pytest.approx(expected, abs=2e-4)


def test_a_curve_that_begins_late_bounds_its_crossing():
    assert first_reach([5.0, 10.0], [0.5, 0.6], 0.4) == (0.0, 5.0)
    assert ratio_bounds((20.0, 20.0), (0.0, 5.0)) == (4.0, math.inf)


def test_value_at_interpolates_and_ends_at_the_last_points():
    costs, values = [0.0, 10.0, 20.0], [0.0, 0.2, 0.8]
    assert value_at(costs, values, 15.0) == pytest.approx(0.5)
    assert value_at(costs, values, 20.0) == 0.8
    assert math.isnan(value_at(costs, values, 20.5))
    assert value_at(costs, [0.0, math.nan, 0.8], 10.0) == pytest.approx(0.4)
    assert math.isnan(value_at(costs, [0.0, 0.2, math.nan], 15.0))
    assert math.isnan(value_at(costs, [math.nan] * 3, 15.0))


def test_ratio_bounds_contain_every_ratio_within_the_bounds():
    rng = np.random.default_rng(0)
    for _ in range(200):
        above, below = np.sort(rng.uniform(0, 3, size=(2, 2)), axis=1)
        low, high = ratio_bounds(tuple(above), tuple(below))
        inside = rng.uniform(*above) / rng.uniform(*below)
        assert low <= inside <= high
    assert ratio_bounds((6.0, 6.0), (4.0, math.inf)) == (0.0, 1.5)
    assert ratio_bounds((6.0, math.inf), (4.0, 4.0)) == (1.5, math.inf)
    for pair in [((6.0, math.inf), (4.0, math.inf)), ((0.0, 0.0), (4.0, 4.0)), ((4.0, 4.0), (0.0, 0.0))]:
        assert ratio_bounds(*pair) == (0.0, math.inf)


def test_ratio_interval_is_the_mean_interval_of_the_logs():
    ratios = [1.5, 2.0, 4.5, 0.9]
    found = ratio_interval([(ratio, ratio) for ratio in ratios])
    expected = np.exp(mean_interval(np.log(ratios).tolist())[:3])
    assert found[:3] == pytest.approx(expected)
    assert (found.n, found.at_least, found.at_most) == (4, pytest.approx(expected[0]), pytest.approx(expected[0]))
    inverse = ratio_interval([(1 / ratio, 1 / ratio) for ratio in ratios])
    assert (inverse.ratio, inverse.low, inverse.high) == pytest.approx((1 / found.ratio, 1 / found.high, 1 / found.low))


def test_one_open_ratio_leaves_bounds_only():
    found = ratio_interval([(4.0, 4.0), (0.0, 1.0)])
    assert math.isnan(found.ratio)
    assert math.isnan(found.low)
    assert (found.at_least, found.at_most) == (0.0, pytest.approx(2.0))
    assert ratio_interval([(4.0, 4.0), (9.0, math.inf)])[-2:] == (pytest.approx(6.0), math.inf)
    assert ratio_interval([(0.0, 1.0), (9.0, math.inf)])[-2:] == (0.0, math.inf)
    alone = ratio_interval([(2.0, 2.0)])
    assert alone.ratio == pytest.approx(2.0)
    assert math.isnan(alone.low)


@pytest.mark.parametrize(
    "call",
    [
        lambda: wilson_interval(5, 4),
        lambda: wilson_interval(-1, 4),
        lambda: wilson_interval(1, 4, confidence=95),
        lambda: mean_interval([]),
        lambda: mean_interval([1.0, math.nan]),
        lambda: paired_difference([1.0], [1.0, 2.0]),
        lambda: cluster_bootstrap_interval([], np.random.default_rng(0)),
        lambda: cluster_bootstrap_interval([[1.0], []], np.random.default_rng(0)),
        lambda: t_quantile(0.95, 0),
        lambda: first_reach([], [], 1.0),
        lambda: first_reach([0.0, 2.0, 1.0], [0.0, 1.0, 2.0], 1.0),
        lambda: first_reach([0.0, math.nan], [0.0, 1.0], 1.0),
        lambda: value_at([0.0, 1.0], [0.0], 1.0),
        lambda: ratio_interval([]),
        lambda: ratio_interval([(2.0, 1.0)]),
        lambda: ratio_interval([(math.nan, 1.0)]),
    ],
)
def test_bad_numbers_are_refused(call):
    with pytest.raises(ValueError):
        call()
