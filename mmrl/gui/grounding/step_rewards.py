"""Rewards for one step of an agent on a screen, by the rules of GUI-R1 and UI-R1.

Both ask for `<think>...</think><answer>[{...}]</answer>`. The answer is a list in Python's notation, of which the first
action counts. It is read as a literal; nothing in it is run.

GUI-R1 pays 0.8 for the right step and 0.2 for the format. The action must be the expected one. A click must lie
strictly inside the box, or closer than 140 pixels of the image that the model sees to a target that is a point. The
text of type, select and scroll needs an F1 of at least 0.5 between the sets of words. Other actions have no argument
that counts.

UI-R1 pays 1 each for the action, for the coordinate (in whole pixels of the stored image, inside the box or on its
edge) and for the format.

The public code of both finds the action and the point by regular expressions, and GUI-R1's runs the answer with `eval`
to check its format. Reading a literal has other results in these cases: double quotes, tuples and names such as
'close/delete' are read; of several actions the first counts whole, instead of the action of the first and the point of
the last; an answer that is no literal, or has no point, earns no accuracy, where the public code may take the point for
(0, 0).

Source: ritzz-ai/GUI-R1 verl/utils/reward_score/r1gui.py; lll6gg/UI-R1 src/ui_r1/src/open_r1/grpo_json_action_coord.py.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mmrl.agents.environments.action_formats import UnreadableError, read_literal
from mmrl.errors import UserError
from mmrl.gui.grounding.coords import Box, CoordinateSpace, Point, Size, coordinate_space, from_original, to_original
from mmrl.gui.grounding.samples import AnyOf, Spot, Target, target_of
from mmrl.rewards.answers import Chat, completion_text

CLICK = "click"
"""The action whose point is judged."""
TEXTED = ("type", "select", "scroll")
"""Actions whose text is judged (GUI-R1)."""
SPOKEN = ("type", "select", "open_app")
"""Actions that need a text for the right format (GUI-R1)."""
DIRECTIONS = ("left", "right", "up", "down")
NO_TEXT = "no input text"
"""What GUI-R1's prompt asks for in the place of a text."""
RADIUS_PX = 140.0
"""GUI-R1's radius around a target that is a point, in pixels of the image that the model sees."""
LEAST_F1 = 0.5
WHOLE = re.compile(r"<think>.*?</think>\s*<answer>.*?</answer>", re.DOTALL)
ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


@dataclass(frozen=True)
class StepScore:
    """The score of one step and its parts."""

    score: float
    """GUI-R1: 0.8 accuracy + 0.2 format. UI-R1: action + accuracy + format, 0 to 3."""
    format: float = 0.0
    """1 for the right format."""
    action: float = 0.0
    """1 for the expected action."""
    accuracy: float = 0.0
    """1 for the expected action at the right place, or with the right text."""


PARTS = tuple(StepScore.__dataclass_fields__)


@dataclass(frozen=True)
class ExpectedStep:
    """The right step of a row."""

    action: str
    text: str | None
    """Text to type or select, or direction to scroll."""
    target: Target
    """In pixels of the stored image."""
    original_wh: Size
    """(width, height) of the stored image."""
    model_wh: Size
    """(width, height) of the image that the model sees."""
    space: CoordinateSpace
    """Meaning of the model's points."""
    radius: float | None = None
    """Radius around a target that is a point, as a fraction of the diagonal of the image that the model sees."""

    def is_hit(self, point: Point, inside: Callable[[Target, Point], bool]) -> bool:
        """Whether a point of the stored image is on the target, given a rule for areas."""
        if isinstance(self.target, Spot) and (self.radius is not None or not self.target.radius):
            seen = [
                from_original(each, CoordinateSpace.ABS_RESIZED, self.original_wh, self.model_wh)
                for each in (point, self.target.center)
            ]
            within = RADIUS_PX if self.radius is None else self.radius * math.hypot(*self.model_wh)
            # squares, as in GUI-R1: they are exact for whole pixels
            return sum((a - b) ** 2 for a, b in zip(*seen, strict=True)) < within**2
        return inside(self.target, point)


def gui_step_reward(
    prompts: Sequence[Any],
    completions: Sequence[Chat],
    *,
    grounding: Sequence[Mapping[str, Any]],
    action: Sequence[str],
    input_text: Sequence[str | None] | None = None,
    preset: str = "gui_r1",
    part: str = "score",
    radius: float | None = None,
) -> list[float]:
    """Score single steps on screens by the rules of GUI-R1 or UI-R1.

    Args:
        prompts: not used.
        completions: B responses.
        grounding: B columns that the GUI recipes add: target, original_wh, model_wh, space.
        action: B expected actions.
        input_text: B expected texts of type, select and scroll; None for other actions.
        preset: gui_r1 or ui_r1.
        part: field of `StepScore` that is the reward; all but score are for logging with weight 0.
        radius: around targets that are points, as a fraction of the diagonal of the image that the model sees. Default:
            the row's radius, or GUI-R1's 140 pixels of that image.

    Returns:
        B rewards.

    Raises:
        UserError: an option has an unknown value.
        ValueError: a row has no text for an action that needs one.

    Source: GUI-R1, arXiv 2504.10458; UI-R1, arXiv 2503.21620.
    """
    for name, value, known in (("preset", preset, PRESETS), ("part", part, PARTS)):
        if value not in known:
            raise UserError(f"gui_step: {name} is {value!r}; expected one of {', '.join(known)}")
    if radius is not None and not 0 < radius < math.inf:
        raise UserError(f"gui_step: radius is {radius:g}; expected a fraction of the diagonal above 0, such as 0.1")
    texts = input_text if input_text is not None else [None] * len(completions)
    found = []
    for completion, row, name, text in zip(completions, grounding, action, texts, strict=True):
        step = ExpectedStep(
            name,
            text,
            target_of(row),
            tuple(row["original_wh"]),
            tuple(row["model_wh"]),
            coordinate_space(row["space"]),
            radius,
        )
        found.append(float(getattr(score_step(completion_text(completion), step, preset), part)))
    return found


def score_step(text: str, step: ExpectedStep, preset: str = "gui_r1") -> StepScore:
    """Score one response; never raises for any text."""
    return PRESETS[preset](text, step)


def _gui_r1(text: str, step: ExpectedStep) -> StepScore:
    """Source: ritzz-ai/GUI-R1 verl/utils/reward_score/r1gui.py (`r1gui_compute_score`)."""
    if step.action.lower() in TEXTED and step.text is None:
        raise ValueError(f"the expected action is {step.action}, which needs the column input_text")
    actions = _actions(text)
    fractions = step.space in (CoordinateSpace.REL1, CoordinateSpace.REL1_YX)
    good = WHOLE.fullmatch(text) is not None and isinstance(actions, list)
    form = float(good and all(_is_gui_r1(action, fractions) for action in actions))
    first = _first(actions)
    action = float(str(first.get("action", "")).lower() == step.action.lower())
    accuracy = action * float(_has_arguments(first, step))
    return StepScore(0.8 * accuracy + 0.2 * form, form, action, accuracy)


def _has_arguments(action: Mapping[str, Any], step: ExpectedStep) -> bool:
    """Whether the point of a click, or the text of an action that has one, is right."""
    expected = step.action.lower()
    if expected == CLICK:
        point = _point(action.get("point"), step)
        return point is not None and step.is_hit(point, _strictly_inside)
    if expected in TEXTED:
        return token_f1(str(action.get("input_text", NO_TEXT)), step.text or "") >= LEAST_F1
    return True


def _is_gui_r1(action: Any, fractions: bool) -> bool:
    """Whether an action has GUI-R1's keys and types; in spaces of fractions a point may have them."""
    if not isinstance(action, dict) or not {"action", "point", "input_text"} <= set(action):
        return False
    name, point, text = action["action"], action["point"], action["input_text"]
    kinds = (int, float) if fractions else int
    if not isinstance(name, str) or not isinstance(text, str) or not isinstance(point, list) or len(point) < 2:
        return False
    if not all(isinstance(number, kinds) for number in point[:2]) or (name in SPOKEN and text == NO_TEXT):
        return False
    return name != "scroll" or text in DIRECTIONS


def _ui_r1(text: str, step: ExpectedStep) -> StepScore:
    """Source: lll6gg/UI-R1 src/ui_r1/src/open_r1/grpo_json_action_coord.py (the three rewards)."""
    form = float(WHOLE.fullmatch(text) is not None)
    first = _first(_actions(text))
    action = float(bool(step.action) and first.get("action") == step.action)
    accuracy = action
    if action and step.action == CLICK:
        point = _point(first.get("coordinate"), step)
        accuracy = float(point is not None and step.is_hit(point, _inside_in_whole_pixels))
    return StepScore(action + accuracy + form, form, action, accuracy)


def step_points(text: str) -> list[Point]:
    """The point of a response that is a click, in the model's space; empty otherwise."""
    first = _first(_actions(text))
    point = _pair(first.get("point", first.get("coordinate")))
    return [point] if first.get("action") == CLICK and point else []


def _actions(text: str) -> Any:
    """The literal between the first tags; None if there is none that can be read."""
    found = ANSWER.search(text)
    try:
        return None if found is None else read_literal(found[1])
    except UnreadableError:
        return None


def _first(actions: Any) -> Mapping[str, Any]:
    first = actions[0] if isinstance(actions, list) and actions else actions
    return first if isinstance(first, dict) else {}


def _point(value: Any, step: ExpectedStep) -> Point | None:
    """A point of the answer in pixels of the stored image; None if it is none."""
    pair = _pair(value)
    return pair and to_original(pair, step.space, step.original_wh, step.model_wh)


def _pair(value: Any) -> Point | None:
    if not isinstance(value, list) or len(value) != 2:
        return None
    if any(isinstance(number, bool) or not isinstance(number, int | float) for number in value):
        return None
    return value[0], value[1]


def _strictly_inside(target: Target, point: Point) -> bool:
    """Whether a point is inside a box, its edges excluded."""
    if isinstance(target, AnyOf):
        return any(_strictly_inside(part, point) for part in target.targets)
    if isinstance(target, Box):
        return target.x1 < point[0] < target.x2 and target.y1 < point[1] < target.y2
    return target.contains(point)


def _inside_in_whole_pixels(target: Target, point: Point) -> bool:
    """Whether a point without its decimals is inside a box or on its edge."""
    return target.contains((math.trunc(point[0]), math.trunc(point[1])))


def token_f1(prediction: str, reference: str) -> float:
    """F1 of the sets of lower-case words; 1 if both are one word and one contains the other.

    Source: ritzz-ai/GUI-R1 verl/utils/reward_score/r1gui.py (`calculate_f1_score`).
    """
    found, expected = (set(re.sub(r"[\[\]]", "", text).lower().split()) for text in (prediction, reference))
    if len(found) == len(expected) == 1:
        (one,), (other,) = found, expected
        if one in other or other in one:
            return 1.0
    common = len(found & expected)
    # 2PR / (P + R) with P = common / found and R = common / expected
    return 2 * common / (len(found) + len(expected)) if common else 0.0


PRESETS: dict[str, Callable[[str, ExpectedStep], StepScore]] = {"gui_r1": _gui_r1, "ui_r1": _ui_r1}
