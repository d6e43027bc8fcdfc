"""Scores of single answers by hand, groups with several values, and intervals of means."""

import math

import pytest

from mmrl.gui.benchmarks.benchmark_recipe import Scored, Share, mean_of_shares, score_answer, tabulate
from mmrl.gui.benchmarks.benchmark_table import BENCHMARKS
from mmrl.gui.grounding.answers import ParsedPoints, parse_answer
from mmrl.gui.grounding.coords import Box, CoordinateSpace
from mmrl.gui.grounding.samples import GroundingSample, Polygon, Refusal
from mmrl.runs.statistics import wilson_interval

ORIGINAL, MODEL = (200, 100), (280, 140)
BOX = Box(50, 20, 100, 40)
RESIZED, THOUSANDTHS = CoordinateSpace.ABS_RESIZED, CoordinateSpace.REL1000


def score(text, target=BOX, space=RESIZED, mode="robust"):
    parsed = parse_answer(text, mode, no_think=True)
    return score_answer(parsed, GroundingSample("x.png", ORIGINAL, "?", target, MODEL), space)


@pytest.mark.parametrize(
    ("text", "first", "any_hit"),
    [
        ('[{"point_2d": [70, 28]}]', True, True),  # the top left corner of the box, times 1.4
        ('[{"point_2d": [140, 56]}]', True, True),  # the bottom right corner
        ('[{"point_2d": [141, 56]}]', False, False),
        ('[{"point_2d": [0, 0]}, {"point_2d": [100, 40]}]', False, True),
        ('[{"bbox_2d": [80, 30, 120, 50]}]', True, True),  # its middle
        ('[{"point_2d": [-1, -1]}]', False, False),
        ('[{"point_2d": [1e9, 40]}]', False, False),
    ],
)
def test_first_and_any_point_in_a_closed_box(text, first, any_hit):
    found = score(text)
    assert (found.first, found.any, found.wrong_format) == (first, any_hit, False)


@pytest.mark.parametrize(
    "text", ["", "the button", "[]", '[{"point_2d": [1]}]', '[{"point_2d": [NaN, 1]}]', "x" * 10**5]
)
def test_an_unreadable_answer_is_wrong_and_counted(text):
    assert score(text) == Scored(first=False, any=False, wrong_format=True)


def test_reference_lets_numbers_as_text_pass_and_the_metric_does_not():
    parsed = parse_answer('[{"point_2d": ["70", "28"]}]', "reference", no_think=True)
    assert parsed.ok
    assert score('[{"point_2d": ["70", "28"]}]', mode="reference").wrong_format


def test_the_space_comes_from_the_caller_not_from_the_numbers():
    text = '[{"point_2d": [0.3, 0.3]}]'
    assert not score(text, space=RESIZED).first
    assert score(text, space=CoordinateSpace.REL1).first
    assert score('[{"point_2d": [300, 300]}]', space=THOUSANDTHS).first


def test_a_refusal_is_right_only_where_there_is_nothing():
    assert score('[{"point_2d": [-1, -1]}]', Refusal()).first
    assert score("[-1, -1]", Refusal(), THOUSANDTHS).first
    assert not score('[{"point_2d": [-1, 5]}]', Refusal()).first
    assert not score('[{"point_2d": [100, 40]}]', Refusal()).first
    assert score("there is none", Refusal()).wrong_format


def test_a_point_in_the_hole_of_a_concave_polygon_misses():
    polygon = Polygon(((0, 0), (100, 0), (100, 100), (50, 50), (0, 100)))
    assert score("[70, 28]", polygon).first  # (50, 20)
    assert not score("[70, 112]", polygon).first  # (50, 80), below the notch


def test_groups_cells_and_the_macro_average():
    def entry(setting, category, hit):
        return Scored(hit, hit, False, ((0.0, 0.0),), {"setting": (setting,), "category": category})

    scored = [entry("basic", ("Browsers",), True)] * 3 + [entry("spatial", ("Browsers", "Education"), False)]
    table = tabulate(BENCHMARKS["ui_vision"], scored)
    assert table.all.first.value == 0.75  # micro
    assert table.macro[0] == 0.5  # of 1 and 0
    assert {row.values[0]: (row.first.hits, row.first.n) for row in table.cells("category")} == {
        "Browsers": (3, 4),
        "Education": (0, 1),
    }
    assert [row.values for row in table.cells("setting", "category")] == [
        ("basic", "Browsers"),
        ("spatial", "Browsers"),
        ("spatial", "Education"),
    ]
    assert tabulate(BENCHMARKS["screenspot_pro"], scored).macro is None


def test_intervals():
    assert Share(3, 4).interval == wilson_interval(3, 4)
    # one share alone keeps its own interval
    assert mean_of_shares([Share(30, 100)]) == pytest.approx((0.3, *wilson_interval(30, 100)))
    # two equal shares: the half widths shrink by the square root of two
    mean, low, high = mean_of_shares([Share(30, 100)] * 2)
    expected = [(end - 0.3) / math.sqrt(2) for end in wilson_interval(30, 100)]
    assert (low - mean, high - mean) == pytest.approx(tuple(expected))
    assert math.isnan(mean_of_shares([])[0])


def test_an_answer_without_points_has_none_to_average():
    table = tabulate(
        BENCHMARKS["ui_i2e"],
        [score_answer(ParsedPoints(error="empty"), GroundingSample("", ORIGINAL, "", BOX), RESIZED)],
    )
    assert math.isnan(table.all.answers)
    assert table.all.wrong_format.value == 1.0
