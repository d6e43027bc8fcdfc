"""The reward of several answers: the published numbers, and every loophole with the option that closes it."""

import math
from dataclasses import fields

import numpy as np
import pytest

from mmrl.errors import ConfigError, UserError
from mmrl.gui.grounding.answers import answer_text
from mmrl.gui.grounding.coords import Box, CoordinateSpace
from mmrl.gui.grounding.rewards import ACCURACIES, PARTS, AnswerRules, has_collinear, point_reward, score_answer
from mmrl.rewards import REWARDS, RewardConfig, RewardSum

BOX = Box(10, 20, 30, 40)
HIT = (20, 30)
MISSES = [(100, 7), (203, 51), (151, 118), (340, 3), (77, 240), (11, 300)]


def answer(points):
    return answer_text(points, CoordinateSpace.ABS_ORIGINAL)


def ranked(count, rank):
    return answer([HIT if place == rank else MISSES[place] for place in range(1, count + 1)])


def score(text, **rules):
    return score_answer(text, BOX, AnswerRules(**rules), no_think=True)


@pytest.mark.parametrize(
    ("count", "rank", "expected"),
    [(1, 1, 2), (1, 0, 0), (2, 1, 1.7071), (2, 2, 1.5), (2, 0, 0.5), (3, 2, 1.4082), (3, 0, 0.6667), (4, 0, 0.75)],
)
def test_the_published_scores(count, rank, expected):
    found = score(ranked(count, rank))
    assert found.score == pytest.approx(expected, abs=5e-5)
    assert (found.num_pred, found.has_correct, found.first_correct) == (count, int(rank > 0), int(rank == 1))
    assert found.only_correct == int(count == rank == 1)


def test_the_figure_of_the_paper():
    """Efficiencies of four responses and their group-standardised advantages, as printed."""
    values = np.array([ACCURACIES["adaptive"](n, k) for n, k in ((2, 0), (1, 0), (3, 0), (3, 2))])
    assert np.round(values, 2).tolist() == [-0.5, -1.0, -0.33, 0.41]
    assert np.abs((values - values.mean()) / values.std(ddof=1) - [-0.25, -1.10, 0.04, 1.31]).max() < 0.01
    leave_one_out = [value - np.delete(values, i).mean() for i, value in enumerate(values)]
    assert np.abs(leave_one_out - np.array([-0.19, -0.86, 0.03, 1.02])).max() < 0.01


def test_the_baselines():
    assert [score(ranked(3, k), accuracy="any").score for k in (1, 3, 0)] == [2, 2, 0]
    naive = {"accuracy": "first", "max_answers": 1}
    assert [score(text, **naive).score for text in (ranked(1, 1), ranked(1, 0), ranked(2, 1), "no")] == [2, 0, -1, -1]


def test_the_adaptive_accuracy_has_the_intended_order():
    accuracy = ACCURACIES["adaptive"]
    for n in range(1, 8):
        ranks = [accuracy(n, k) for k in range(1, n + 1)]
        assert ranks == sorted(ranks, reverse=True), "an earlier rank is worth more"
        assert all(0 < value <= 1 for value in ranks)
        assert -1 <= accuracy(n, 0) < 0
        assert accuracy(n, 1) > accuracy(n + 1, 1), "certainty is worth more where the first is right"
        assert accuracy(n, 0) < accuracy(n + 1, 0), "exploring is worth more where nothing is found"


def test_many_guesses_are_rewarded_unless_limited():
    rng = np.random.default_rng(0)
    many = answer([tuple(point) for point in rng.integers(50, 5000, (12, 2)).tolist()])
    assert score(many).score == pytest.approx(1 - 1 / 12)
    assert score(many, max_answers=4).score == -1
    assert score(many, max_answers=4).wrong_format == 1
    assert score(ranked(4, 0), max_answers=4).score == 0.75


def test_saying_a_wrong_point_twice_is_paid_unless_duplicates_count_once():
    twice, near = answer([MISSES[0]] * 2), answer([MISSES[0], (MISSES[0][0] + 2, MISSES[0][1])])
    assert score(twice).score == score(near).score == 0.5
    assert score(twice, dedupe_px=1).score == 0
    assert score(near, dedupe_px=1).score == 0.5
    assert score(near, dedupe_px=2).score == 0
    assert score(answer([MISSES[0]] * 2 + [HIT]), dedupe_px=1).score == pytest.approx(1.5), "second of two"


def test_a_jitter_of_a_pixel_evades_the_exact_line_but_not_a_tolerance():
    line, jitter = answer([(0, 100), (100, 200), (200, 300)]), answer([(0, 100), (100, 201), (200, 300)])
    corner = answer([(0, 100), (100, 300), (200, 100)])
    assert [score(text).is_collinear for text in (line, jitter, corner)] == [1, 0, 0]
    assert [score(text, collinear_tol_px=2).is_collinear for text in (line, jitter, corner)] == [1, 1, 0]
    assert score(jitter, collinear_tol_px=2).score == -1
    # the triangle is 1 / sqrt(2) pixels high
    assert [score(jitter, collinear_tol_px=tol).is_collinear for tol in (0.70, 0.71)] == [0, 1]


def test_what_a_line_costs():
    line = answer([(0, 100), (100, 200), HIT, (200, 300)])
    total, accuracy = score(line), score(line, collinear_scope="accuracy")
    assert (total.score, total.format, total.is_collinear, total.wrong_format) == (-1, 0, 1, 0)
    assert (accuracy.score, accuracy.format, accuracy.accuracy, accuracy.is_collinear) == (0, 1, -1, 1)


def test_collinear_points_in_any_order_and_direction():
    for points in ([(0, 0), (5, 0), (9, 0)], [(3, 9), (3, 1), (3, 4)], [(0, 0), (1, 7), (2, 2), (9, 1), (5, 5)]):
        assert has_collinear(points)
        assert has_collinear(points[::-1], tol=0.1)
    assert not has_collinear([(0, 0), (5, 5)])
    assert has_collinear([(1, 1)] * 3, tol=0.5)


def test_an_empty_list_is_a_miss_unless_it_is_malformed():
    for parser in ("reference", "robust"):
        assert score("[]", parser=parser).score == 0
        assert score("[]", parser=parser, empty_is_malformed=True).score == -1


def test_the_parsers_differ_where_they_should():
    text = "As in [1]: [10, 20]"
    assert score(text, parser="reference").score == -1
    assert score(text, parser="robust").score == 2


def test_a_think_block_that_is_requested_is_needed_by_both_parsers():
    for parser in ("reference", "robust"):
        rules = AnswerRules(parser=parser)
        assert score_answer(ranked(1, 1), BOX, rules).score == -1
        assert score_answer(f"<think>left</think>{ranked(1, 1)}", BOX, rules).score == 2
        assert score_answer(f"<think></think>{ranked(1, 1)}", BOX, rules).score == -1


def column(space="abs_resized", original=(1000, 500), model=(2000, 1000), **target):
    sizes = {"original_wh": list(original), "model_wh": list(model)}
    return {"space": space, "no_think": True, **sizes, **(target or {"bbox": [10, 20, 30, 40]})}


@pytest.mark.parametrize(
    ("row", "text", "expected"),
    [
        (column(), "[60, 80]", 2),  # the corner (30, 40), twice as large
        (column(), "[61, 80]", 0),
        (column("rel1000"), "[30, 80]", 2),
        (column("rel1_yx"), "[0.08, 0.03]", 2),
        (column("rel1"), "[0.08, 0.03]", 0),
        (column(refusal=True), "[-1, -1]", 2),
        (column(), "[-1, -1]", 0),
        (column(refusal=True), "[60, 80]", 0),
        (column(boxes=[[0, 0, 5, 5], [10, 20, 30, 40]]), "[60, 80]", 2),
        (column(polygon=[[0, 0], [10, 0], [0, 10]]), "[4, 4]", 2),
        (column(), "[99999, 80]", 0),  # outside the screen is a miss and is not clipped to its edge
        (column(bbox=[990, 0, 1000, 500]), "[99999, 80]", 0),
    ],
)
def test_points_are_compared_in_pixels_of_the_original(row, text, expected):
    assert point_reward([""], [text], grounding=[row]) == [expected]


def test_no_answer_raises_and_scores_stay_in_range():
    rng = np.random.default_rng(1)
    pieces = ['{"point_2d": [', "]}", "[", "]", ",", "1", "NaN", '"a"', "-7", "null", " ", answer([HIT]), "1e400"]
    for _ in range(3000):
        text = "".join(pieces[i] for i in rng.integers(0, len(pieces), rng.integers(0, 12)))
        for parser in ("reference", "robust"):
            found = score(text, parser=parser)
            assert found.score == -1 or 0 <= found.score <= 2
            assert all(math.isfinite(getattr(found, part)) for part in PARTS)


def test_it_is_a_reward_of_the_suite_whose_parts_are_logged():
    assert "point" in REWARDS
    terms = [RewardConfig(name="point"), *(RewardConfig(name=f"its {part}", function="point", weight=0.0,
             options={"part": part}) for part in PARTS)]  # fmt: skip
    rewards = RewardSum(terms)
    found = rewards.score(["", ""], ["[40, 60]", "none"], {"grounding": [column()] * 2})
    assert found.total == [2.0, -1.0]
    assert {name: values[0] for name, values in found.terms.items()} == {
        **{"point": 2, "its score": 2, "its format": 1, "its accuracy": 1, "its num_pred": 1, "its has_correct": 1},
        **{"its first_correct": 1, "its only_correct": 1, "its is_collinear": 0, "its wrong_format": 0},
    }
    assert found.terms["its wrong_format"][1] == 1


def test_wrong_options_are_refused_before_the_run():
    for options, message in [({"accuracy": "best"}, "adaptive"), ({"part": "luck"}, "num_pred"), ({"max": 1}, "max")]:
        with pytest.raises(UserError, match=message):
            RewardSum([RewardConfig(name="point", options=options)])
    with pytest.raises((ConfigError, UserError), match="max_answers"):
        point_reward([""], ["[1, 2]"], grounding=[column()], max_answers=-1)


def test_every_rule_is_an_option_of_the_reward():
    import inspect

    assert {field.name for field in fields(AnswerRules)} <= {*inspect.signature(point_reward).parameters}
