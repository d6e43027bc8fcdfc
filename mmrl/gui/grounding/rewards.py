"""Rewards for grounding responses with one or several points: AEPO's, naive RLVR's and a binary one.

AEPO's efficiency reward is utility over cost: +1 where one of N answers is inside the target and -1 if none is,
over the geometric mean of N proposals and k verifications (k is the rank of the first answer inside, N on failure).
The total is format + accuracy, both of weight 1, and -1 for an answer in another format or with three points on a line.

Source: InfiXAI/InfiGUI-G1 recipe/infigui-g1/reward_fn.py; with parser=reference the defaults are its behaviour.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from mmrl.errors import UserError
from mmrl.fields import bounded, check_fields, choice, rare
from mmrl.gui.grounding.answers import PARSERS, parse_answer, split_think, without_think
from mmrl.gui.grounding.coords import Point, coordinate_space, to_original
from mmrl.gui.grounding.samples import Target, target_of
from mmrl.rewards import RewardConfig
from mmrl.rewards.answers import Chat, completion_text

COLLINEAR_SCOPES = ("total", "accuracy")


@dataclass
class AnswerRules:
    """Format and reward of responses."""

    accuracy: str = choice("adaptive", lambda: ACCURACIES)
    """adaptive: 1/sqrt(N k), or -1/N; any: 1 if any point is inside the target, otherwise -1; first: 1 if the first
    point is inside, otherwise -1."""
    parser: str = choice("reference", lambda: PARSERS, or_function=True)
    """reference (the public code's), or robust, which reads more formats and also rewards broken JSON. A
    `module:function` gets the response without its thinking and returns its points."""
    collinear_scope: str = rare(choice("total", COLLINEAR_SCOPES))
    """Penalty for three points on a line. total: the whole score is -1; accuracy: the format is still rewarded."""
    collinear_tol_px: float = rare(bounded(0.0, at_least=0))
    """Three points are on a line if the height of their triangle is below this, in pixels of the original image. 0
    tests the numbers as written exactly, which a jitter of one pixel evades."""
    max_answers: int = bounded(0, at_least=0)
    """Maximum number of points; more count as a wrong format. 0 means no limit, which rewards a model for guessing
    on."""
    dedupe_px: float = rare(bounded(0.0, at_least=0))
    """Points within this distance of an earlier one, in pixels of the original image, are ignored. 0 counts every
    point, which rewards repeating a wrong point."""
    empty_is_malformed: bool = rare(False)
    """Whether an empty list counts as a wrong format instead of a miss without a penalty."""


@dataclass(frozen=True)
class PointScore:
    """The score of one response and its parts."""

    score: float
    """format + accuracy, or -1."""
    format: float
    """1, or 0 for a response in a wrong format or with three points on a line."""
    accuracy: float
    """-1 to 1."""
    num_pred: int = 0
    """Number of points N; 0 in a wrong format."""
    has_correct: int = 0
    """1 if any point is inside the target."""
    first_correct: int = 0
    """1 if the first point is inside the target."""
    only_correct: int = 0
    """1 if there is a single point and it is inside the target."""
    is_collinear: int = 0
    """1 if three points are on a line."""
    wrong_format: int = 0
    """1 if no list of points could be read."""


WRONG_FORMAT = PointScore(score=-1.0, format=0.0, accuracy=-1.0, wrong_format=1)
PARTS = tuple(PointScore.__dataclass_fields__)


def point_reward(
    prompts: Sequence[Any],
    completions: Sequence[Chat],
    *,
    grounding: Sequence[Mapping[str, Any]],
    part: str = "score",
    accuracy: str = "adaptive",
    parser: str = "robust",
    collinear_scope: str = "total",
    collinear_tol_px: float = 0.0,
    max_answers: int = 0,
    dedupe_px: float = 0.0,
    empty_is_malformed: bool = False,
) -> list[float]:
    """Score responses that point at an element of a screen; see `AnswerRules` for the options.

    Args:
        prompts: Not used.
        completions: B answers.
        grounding: B columns that the GUI recipes add: target, original_wh, model_wh, space, no_think.
        part: field of `PointScore` that is the reward; all but score are for logging with weight 0.
        accuracy: adaptive (AEPO), any or first; naive RLVR is first with max_answers 1.
        parser: robust or reference.
        collinear_scope: total or accuracy.
        collinear_tol_px: height below which a triangle is a line.
        max_answers: most answers.
        dedupe_px: distance below which an answer repeats another.
        empty_is_malformed: whether an empty list is a wrong format.

    Source: InfiXAI/InfiGUI-G1 recipe/infigui-g1/reward_fn.py (`calculate_point_reward`).
    """
    if part not in PARTS:
        raise UserError(f"point reward: part is {part!r}; expected one of {', '.join(PARTS)}")
    rules = AnswerRules(accuracy, parser, collinear_scope, collinear_tol_px, max_answers, dedupe_px, empty_is_malformed)
    check_fields(rules, "point reward")
    found = []
    for completion, row in zip(completions, grounding, strict=True):
        space, sizes = coordinate_space(row["space"]), (row["original_wh"], row["model_wh"])
        locate = functools.partial(to_original, space=space, original_wh=sizes[0], model_wh=sizes[1])
        text = completion_text(completion)
        no_think = without_think(text, asked=not row["no_think"])
        score = score_answer(text, target_of(row), rules, locate, no_think=no_think)
        found.append(float(getattr(score, part)))
    return found


def point_rewards(rules: AnswerRules) -> list[RewardConfig]:
    """The reward as a term of a sum, after its parts as terms of weight 0, which are logged and evaluated."""
    options = asdict(rules)
    parts = [
        RewardConfig(name=part, function="point", weight=0.0, options={"part": part, **options})
        for part in PARTS
        if part != "score"
    ]
    return [*parts, RewardConfig(name="point", options=options)]


def score_answer(
    text: str,
    target: Target,
    rules: AnswerRules,
    locate: Callable[[Any], Point] = lambda point: point,
    *,
    no_think: bool = False,
) -> PointScore:
    """Score one response, given its target in pixels of the original image; never raises for any text.

    `locate` maps a point of the answer to such pixels; with `no_think` the answer has no think block.

    Source: InfiXAI/InfiGUI-G1 recipe/infigui-g1/reward_fn.py (`calculate_point_reward`).
    """
    try:
        return _score(text, target, rules, locate, no_think)
    except (TypeError, ValueError, ArithmeticError):  # the reference parser accepts coordinates that are not numbers
        return WRONG_FORMAT


def _score(text: str, target: Target, rules: AnswerRules, locate: Callable[[Any], Point], no_think: bool) -> PointScore:
    # checked for both parsers: `robust` itself would accept an answer without the block
    if not no_think and split_think(text) is None:
        return WRONG_FORMAT
    parsed = parse_answer(text, rules.parser, no_think=no_think, max_answers=rules.max_answers)
    # an empty list says that nothing is there, which is a miss and no wrong format
    if not parsed.ok and (parsed.error != "empty" or rules.empty_is_malformed):
        return WRONG_FORMAT
    points = parsed.points
    if rules.dedupe_px:
        # the first of several close answers stays, as ranks count
        kept: list[tuple[Any, Point]] = []
        for point, located in zip(points, [locate(point) for point in points], strict=True):
            if all(math.dist(located, other) > rules.dedupe_px for _, other in kept):
                kept.append((point, located))
        points = tuple(point for point, _ in kept)
    # the numbers as written first: the published test is exact
    if has_collinear(points) or (rules.collinear_tol_px and has_collinear(map(locate, points), rules.collinear_tol_px)):
        paid = 1.0 if rules.collinear_scope == "accuracy" else 0.0
        return PointScore(score=paid - 1.0, format=paid, accuracy=-1.0, is_collinear=1)
    # One at a time: points after the first one inside are not converted, so that their errors do not count.
    rank = next((rank for rank, point in enumerate(points, start=1) if target.contains(locate(point))), 0)
    accuracy = ACCURACIES[rules.accuracy](len(points), rank)
    return PointScore(
        score=1.0 + accuracy,
        format=1.0,
        accuracy=accuracy,
        num_pred=len(points),
        has_correct=int(rank > 0),
        first_correct=int(rank == 1),
        only_correct=int(rank == 1 and len(points) == 1),
    )


def adaptive_accuracy(answers: int, rank: int) -> float:
    """1/sqrt(N k) if the point of rank k is the first inside, -1/N if none is; -1 without points.

    Source: AEPO, arXiv 2508.05731; InfiXAI/InfiGUI-G1 recipe/infigui-g1/reward_fn.py (`_accuracy_reward`).
    """
    if rank:
        return 1.0 / math.sqrt(answers * rank)
    return -1.0 / max(answers, 1)


def has_collinear(points: Iterable[Any], tol: float = 0.0) -> bool:
    """Whether three of the points are on a line.

    Source: InfiXAI/InfiGUI-G1 recipe/infigui-g1/reward_fn.py (`_check_collinear`).
    """
    return any(_on_a_line(*triple, tol) for triple in itertools.combinations(points, 3))


def _on_a_line(first: Any, second: Any, third: Any, tol: float) -> bool:
    (x1, y1), (x2, y2), (x3, y3) = first, second, third
    # compares slopes without a division; equal products mean equal slopes
    if not tol:
        return math.isclose((y2 - y1) * (x3 - x1), (y3 - y1) * (x2 - x1))
    longest = max(math.dist(first, second), math.dist(first, third), math.dist(second, third))
    twice_area = abs((y2 - y1) * (x3 - x1) - (y3 - y1) * (x2 - x1))
    # height = 2 area / longest side, without dividing by a length that may be 0
    return twice_area < tol * longest or longest == 0


ACCURACIES: dict[str, Callable[[int, int], float]] = {
    "adaptive": adaptive_accuracy,
    "any": lambda answers, rank: 1.0 if rank else -1.0,
    "first": lambda answers, rank: 1.0 if rank == 1 else -1.0,
}
"""(points N, rank k of the first inside, or 0) -> accuracy."""
