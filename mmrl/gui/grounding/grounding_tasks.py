"""Questions about screens for a vision-language model: prompt, the one resize, and the target columns for rewards."""

from __future__ import annotations

import logging
import math
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, cast

from mmrl.errors import UserError
from mmrl.fields import bounded, choice, rare
from mmrl.files import expanded, is_file
from mmrl.gui.grounding.answers import answer_text, parse_answer, without_think
from mmrl.gui.grounding.conventions import BoxForm, Convention, FormedBox, fit_convention
from mmrl.gui.grounding.coords import (
    Box,
    CoordinateSpace,
    Resize,
    Size,
    clean_box,
    coordinate_space,
    pointing_families,
)
from mmrl.gui.grounding.rewards import AnswerRules
from mmrl.gui.grounding.samples import (
    TARGET_COLUMNS,
    AnyOf,
    GroundingSample,
    NoTarget,
    Spot,
    draw_answer,
    image_size,
    is_drawable,
    point_of,
    sample_row,
    target_of,
)
from mmrl.gui.grounding.step_rewards import CLICK, step_points
from mmrl.hub.tables import BadRowError
from mmrl.vlm.data.dataset import DataConfig, LoadedTasks
from mmrl.vlm.data.task import TaskError, VideoOptions, VlmTask, image_content
from mmrl.vlm.model.model_config import ModelConfig
from mmrl.vlm.vlm_recipe import Questions

if TYPE_CHECKING:
    from PIL.Image import Image

LOGGER = logging.getLogger("mmrl")

TEMPLATE = (
    'The screen is {width} x {height} pixels. Which element is meant by "{instruction}"? Answer with a JSON list of '
    'points, the most likely first: [{{"point_2d": [x, y]}}, ...]'
)
THINK_PROMPT = (
    "Think about the screen first, inside <think> </think>, and give the answer after it. Every answer starts with "
    "this block."
)


def template_fields(name: str, text: str, *, asks: bool = True) -> set[str]:
    """Fields of a template; if it `asks`, it must use the instruction. Raises UserError."""
    try:
        fields = {field for _, field, _, _ in string.Formatter().parse(text) if field is not None}
    except ValueError as error:
        raise UserError(f"{name}: {error}; write {{{{ and }}}} for literal braces") from None
    if asks and "instruction" not in fields:
        raise UserError(f"{name} never uses {{instruction}}, so the question would be lost")
    return fields


@dataclass
class GroundingSettings:
    """Image size and coordinates of a model that finds points on screens."""

    family: str = choice("qwen2_5_vl", pointing_families)
    """Model family, such as qwen2_5_vl or qwen3_vl; it determines the coordinate space of points and how screens are
    resized."""
    space: str = rare(choice("", lambda: ("", *CoordinateSpace)))
    """Meaning of the two numbers of a point. Default: the family's."""
    factor: int | None = rare(bounded(None, at_least=1))
    """Sides of the resized image are multiples of this. Default: the factor of the family's released models."""
    shrink_to: int | None = bounded(None, at_least=1)
    """Screens with more pixels are first scaled to this area, as in InfiGUI-G1's evaluation. Default: no scaling."""
    template: str = TEMPLATE
    """The question. It may use {width} and {height} of the resized image, {instruction}, and any data column."""
    think: bool = False
    """Whether responses start with a think block; a malformed block counts as a wrong format."""
    think_prompt: str = rare(THINK_PROMPT)
    """System turn for questions that ask for a think block; it follows `data.system_prompt`."""
    seen: list[str] = rare(field(default_factory=list))
    """Splits of `eval_data` that may use the training file, to measure accuracy on training data."""

    def validate(self) -> None:
        """Check the template; raises UserError."""
        template_fields("grounding.template", self.template)

    @property
    def point_space(self) -> CoordinateSpace:
        """The coordinate space of the model's points."""
        return coordinate_space(self.space or pointing_families()[self.family].points)

    def resize(self, model: ModelConfig) -> Resize:
        """The resize for a model: the pixel budget is the model's own, `model.min_pixels` and `model.max_pixels`."""
        factor = self.factor or pointing_families()[self.family].image_factor
        return Resize(factor, model.min_pixels, model.max_pixels, self.shrink_to)


def sample_of(task: VlmTask) -> GroundingSample:
    """The screen, instruction and target of a task whose columns are those of `mmrl.gui.grounding.samples`."""
    if len(task.images) != 1:
        raise TaskError(
            "bad_screen", task.id, f"a grounding question needs exactly one image, found {len(task.images)}"
        )
    try:
        target = target_of(task.columns)
    except (TypeError, ValueError) as error:
        raise TaskError("bad_target", task.id, str(error)) from None
    texts = [item["text"] for item in task.messages[-1]["content"] if item["type"] == "text"]
    # everything else of the row may be used in the template
    meta = {name: value for name, value in task.columns.items() if name not in (*TARGET_COLUMNS, "original_wh")}
    image: Any = task.images[0]
    size = _size(task)
    if isinstance(target, Spot) and not Box(0, 0, *size).contains(target.center):
        x, y = target.center
        raise TaskError(
            "bad_target", task.id, f"the point [{x:g}, {y:g}] is outside the image of {_shown(size)} pixels"
        )
    if isinstance(target, NoTarget) and str(task.columns.get("action")).lower() == CLICK:
        raise TaskError("bad_target", task.id, "the action is click, which needs a target, but no_target is set")
    return GroundingSample(image, size, "".join(texts).strip(), target, meta={"id": task.id, **meta})


def _shown(size: Size) -> str:
    return f"{size[0]} x {size[1]}"


def _size(task: VlmTask) -> Size:
    """The size of the image, by its header; one that the column gives has to agree with it."""
    given, source = _given_size(task), task.images[0]
    is_path = isinstance(source, str) and not source.startswith("data:")
    content: Any = source if is_path else image_content(source, task.id, "the image", task.max_image_pixels)[1]
    try:
        size = image_size(content)
    except Exception as error:  # Pillow raises OSError, ValueError, SyntaxError, DecompressionBombError, ...
        named = str(source) if is_path else "the image"
        raise TaskError("unreadable_image", task.id, f"cannot read {named}: {error}") from None
    if given is not None and given != size:
        swapped = " (the sides are swapped: width comes first)" if given[::-1] == size else ""
        message = f"original_wh is {_shown(given)}, but the image has {_shown(size)} pixels{swapped}"
        raise TaskError("wrong_size", task.id, message)
    return size


def _given_size(task: VlmTask) -> Size | None:
    """The column `original_wh`; None without one."""
    given = task.columns.get("original_wh")
    if given is None:
        return None
    try:
        width, height = map(int, given)
    except (TypeError, ValueError):
        message = f"original_wh is {given!r:.60}; expected [width, height] in pixels"
        raise TaskError("wrong_size", task.id, message) from None
    return width, height


def grounding_task(task: VlmTask, settings: GroundingSettings, resize: Resize) -> VlmTask:
    """Write the question about a screen."""
    sample = sample_of(task)
    try:
        sample = sample.fitted(resize)
    except ValueError as error:
        raise TaskError("unusable_image", task.id, str(error)) from None
    assert sample.model_wh is not None
    needs = {
        # as plain data: these columns go to the reward's processes
        **sample_row(replace(sample, meta={}, instruction="")),
        "model_wh": sample.model_wh,
        "space": settings.point_space.value,
        "no_think": not settings.think,
    }
    columns = dict(task.columns) | {"grounding": needs}
    if task.columns.get("answers") is not None:
        columns["completion"] = _worked_answer(task, sample, settings)
    content = [{"type": "image"}, {"type": "text", "text": _question(sample, settings)}]
    messages = [*_system(task, settings), {"role": "user", "content": content}]
    # the processor then has to report the size at which the model sees the image
    in_pixels = settings.point_space is CoordinateSpace.ABS_RESIZED
    return replace(task, messages=messages, columns=columns, image_wh=[sample.model_wh], points_in_pixels=in_pixels)


def _worked_answer(task: VlmTask, sample: GroundingSample, settings: GroundingSettings) -> str:
    """The given answers, which are in pixels of the image as its boxes are, in the model's space."""
    answers, labels = task.columns["answers"], task.columns.get("labels")
    try:
        points = [sample.from_original(point_of(point), settings.point_space) for point in answers]
        return answer_text(points, settings.point_space, labels)
    except (TypeError, ValueError):
        found = f"{answers!r:.60}" + ("" if labels is None else f" with labels {labels!r:.60}")
        message = f"answers is {found}; expected a list of points [[x, y], ...], with one label each if there are any"
        raise TaskError("bad_target", task.id, message) from None


def _question(sample: GroundingSample, settings: GroundingSettings) -> str:
    assert sample.model_wh is not None
    width, height = sample.model_wh
    known = {**sample.meta, "width": width, "height": height, "instruction": sample.instruction}
    try:
        return settings.template.format(**known)
    except (KeyError, IndexError) as error:
        raise UserError(
            f"grounding.template contains {error}; it may use width, height, instruction and the columns "
            f"{', '.join(sorted(sample.meta)) or '(none)'}"
        ) from None


def _system(task: VlmTask, settings: GroundingSettings) -> list[dict[str, Any]]:
    texts = [item["text"] for turn in task.messages[:-1] if turn["role"] == "system" for item in turn["content"]]
    if settings.think:
        texts.append(settings.think_prompt)
    return [{"role": "system", "content": [{"type": "text", "text": "\n".join(texts)}]}] if texts else []


@dataclass
class WrittenTasks:
    """The questions of a dataset, and all problems with its rows."""

    tasks: list[VlmTask]
    """Usable questions; training questions have clipped boxes."""
    bad: list[BadRowError]
    """Rows that cannot be asked about."""
    dropped: list[TaskError]
    """Rows that training skips because of their box."""
    convention: Convention | None
    """Test of the boxes of all rows; None without boxes."""

    @property
    def refusal(self) -> str:
        """Why no run can use the dataset: its first bad row, or the convention of its boxes; empty if it is usable."""
        if self.bad:
            return str(self.bad[0])
        found = self.convention
        if found is None or not found.is_refused:
            return ""
        return f"{found.sentence}; bbox and boxes are [left, top, right, bottom] in pixels of the image"

    @property
    def doubts(self) -> list[str]:
        """Warnings about a dataset that can still be used."""
        found = self.convention
        if found is None or self.refusal:
            return []
        wrong = [found.sentence] if found.verdict in ("wrong", "thousandths") else []
        return [*wrong, *filter(None, [found.doubt])]


def write_tasks(
    tasks: Sequence[VlmTask], settings: GroundingSettings, resize: Resize, *, training: bool
) -> WrittenTasks:
    """Write the questions of a dataset, as runs and `mmrl gui validate` read it; never raises for a row."""
    written = LoadedTasks(on_bad_row="skip")
    written.take(tasks, lambda task: grounding_task(task, settings, resize))
    found = WrittenTasks([], written.problems, [], convention_of(written.tasks))
    for task in written.tasks:
        cleaned = _cleaned(task, settings) if training else task
        if cleaned is None:
            found.dropped.append(TaskError("unusable_box", task.id, GROUNDING_ERRORS["unusable_box"]))
        else:
            found.tasks.append(cleaned)
    return found


def prepare_tasks(loaded: LoadedTasks, settings: GroundingSettings, resize: Resize, *, training: bool) -> LoadedTasks:
    """Write the questions of a dataset; raises UserError for a bad row and for boxes in another convention."""
    written = write_tasks(loaded.tasks, settings, resize, training=training)
    if written.refusal:
        raise UserError(written.refusal)
    for doubt in written.doubts:
        LOGGER.warning("%s", doubt)
    if loaded.tasks and not written.tasks:
        raise UserError(f"all {len(loaded.tasks)} training boxes are too small or outside their screens; see min_side")
    if written.dropped:
        first = written.dropped[0]
        LOGGER.warning("%d training boxes were dropped, the first of %s", len(written.dropped), first)
    return replace(loaded, tasks=written.tasks, problems=[*loaded.problems, *written.dropped])


def check_held_out(data: DataConfig, eval_data: Mapping[str, DataConfig], seen: Sequence[str]) -> None:
    """Reject held-out screens from the training file, unless they are marked as seen; raises UserError."""
    unknown = [name for name in seen if name not in eval_data]
    if unknown:
        raise UserError(
            f"grounding.seen contains {unknown[0]!r}, which is not a split of eval_data; splits: {', '.join(eval_data)}"
        )
    for name, held_out in eval_data.items():
        if name not in seen and _place(held_out) == _place(data):
            raise UserError(
                f"eval_data.{name}.path is {held_out.path}, which is also the training file; use another file or "
                f"split, or confirm that this is intended (grounding.seen: [{name}])"
            )


def _place(data: DataConfig) -> tuple[object, ...]:
    path = expanded(data.path)
    # a file has one split, so the option has no effect on it
    return (path.resolve(),) if is_file(path) else (data.path, data.split, data.subset)


def convention_of(tasks: Sequence[VlmTask]) -> Convention | None:
    """Test whether boxes are corners in pixels of their images, as far as the whole set shows it."""
    boxes: list[FormedBox] = []
    places: list[str] = []
    for task in tasks:
        needs = task.columns["grounding"]
        target = target_of(needs)
        targets = target.targets if isinstance(target, AnyOf) else (target,)
        found = [(box, BoxForm.XYXY, tuple(needs["original_wh"])) for box in targets if isinstance(box, Box)]
        boxes += found
        places += [task.id] * len(found)
    return fit_convention(BoxForm.XYXY, boxes, places)


def _cleaned(task: VlmTask, settings: GroundingSettings) -> VlmTask | None:
    """The task with its box sorted and clipped; None if too little of it is on the screen. Other shapes are kept."""
    needs = task.columns["grounding"]
    target = target_of(needs)
    if not isinstance(target, Box):
        return task
    width, height = needs["original_wh"]
    box = clean_box(target, width, height)
    return box and replace(task, columns=task.columns | {"grounding": needs | {"bbox": list(box)}})


@dataclass
class GroundingParts:
    """Options of recipes that ask about screens; inherit from it before the configuration of the recipe."""

    grounding: GroundingSettings = field(default_factory=GroundingSettings)
    """Image size and coordinates of the model."""
    answer: AnswerRules | None = field(default_factory=AnswerRules)
    """Required format of a response and its reward: `point`, with its parts at weight 0. null: only `rewards` count,
    such as gui_step."""

    def check_screens(self) -> None:
        """Reject video options, which screens do not have, and training on held-out screens; raises ValueError."""
        config: Any = self
        check_held_out(config.data, config.eval_data, config.grounding.seen)
        for data in (config.data, *config.eval_data.values()):
            if data.video != VideoOptions():
                raise ValueError("data.video is set, but a grounding question has one image and no video; remove it")


FIRST_CORRECT = "first_correct"
"""Reward term used to score correctness: the first point is inside the target."""
BROKEN_DOWN = ("has_correct", "num_pred", "wrong_format")
"""Parts of the reward that evaluations also report by kind of instruction."""
UNPAID = {
    NoTarget: "no_target is set, so the reward point would never be paid",
    Spot: "the point has no radius, which the reward point needs",
}
"""Why a run that pays for points cannot use a target."""


class Screens(Questions):
    """Questions about screens.

    Args:
        config: of a recipe that asks about screens.
    """

    def __init__(self, config: Any) -> None:
        self.settings: GroundingSettings = config.grounding
        self.rules: AnswerRules | None = config.answer
        self.model: ModelConfig = config.model
        self.broken_down = BROKEN_DOWN if self.rules else ()

    def prepare(self, loaded: LoadedTasks, *, training: bool) -> LoadedTasks:
        """Write the questions with the model's own pixel budget; raises UserError for targets that are never paid."""
        prepared = prepare_tasks(loaded, self.settings, self.settings.resize(self.model), training=training)
        for task in prepared.tasks if self.rules else ():
            target = target_of(task.columns["grounding"])
            if type(target) in UNPAID and not getattr(target, "radius", 0):
                raise UserError(f"{task.id}: {UNPAID[type(target)]}; set answer: null and use the reward gui_step")
        return prepared

    def draw(self, task: VlmTask, text: str, right: bool) -> Image:
        """The screen of a question with its target and the points of a response."""
        needs, image = task.columns["grounding"], cast(Any, task.images[0])
        sample = GroundingSample(image, needs["original_wh"], "", target_of(needs), model_wh=needs["model_wh"])
        settings = self.settings
        if self.rules is None:
            pairs = step_points(text)
        else:
            parsed = parse_answer(text, self.rules.parser, no_think=without_think(text, settings.think))
            # the reference parser lets anything through
            pairs = [pair for pair in parsed.points if all(isinstance(number, int | float) for number in pair)]
        # one that cannot be drawn keeps its place, as the others are marked with their ranks
        shown = [pair if is_drawable(pair) else (math.nan, math.nan) for pair in pairs]
        points = [sample.to_original((x, y), settings.point_space) for x, y in shown]
        return draw_answer(sample.load_image(), sample.target, points, right)


GROUNDING_ERRORS: dict[str, str] = {
    "bad_screen": "A grounding question does not have exactly one image.",
    "bad_target": "A row has no target, several targets, or one of the wrong shape.",
    "wrong_size": "The column original_wh does not match the size of the image.",
    "unusable_box": "The box has a side below 2 pixels, or less than half of it is on screen.",
}
"""Additional kinds of `TaskError` and of dropped rows for screens."""
