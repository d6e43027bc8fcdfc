"""The part of an object to grasp for a task, chosen by a vision-language model."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from robotics.flow3d.asking import read_json
from robotics.flow3d.clouds import world_points
from robotics.flow3d.geometry import BoolArray, FloatArray, ImageArray, IndexArray, farthest_points

if TYPE_CHECKING:
    from robotics.flow3d.asking import VlmClient
    from robotics.flow3d.clip import Observation

PartFinder: TypeAlias = "Callable[[Observation, BoolArray], FloatArray]"
"""(observation, mask (H, W) of the object's pixels with depth) -> point (3,) on the part in the world frame."""

PART_SYSTEM = (
    "You choose where a robot grasps an object. The image shows the scene; numbered marks lie on the object that the "
    "robot is to move."
)
PART_QUESTION = (
    "Task: {instruction}\n"
    "At which mark should the gripper take the object, so that it can do the task? Answer with one JSON object and "
    'nothing else: {{"mark": its number, "why": "in a few words"}}'
)
ENLARGED_PX = 512
"""Height to which smaller images are enlarged, so that the numbers can be read."""


class PartUnknown(RuntimeError):  # noqa: N818
    """The model gave no usable answer."""


class AskedPart:
    """Asks a vision-language model at which of the numbered marks on the object to grasp; a `PartFinder`.

    Source: arXiv 2506.06199, whose task-aware grasp lets a vision-language model name the part; numbered marks as in
        ReKep (huangwl18/ReKep vision.py). The prompt is our own, the paper publishes none.
    """

    def __init__(self, client: VlmClient, marks: int = 8) -> None:
        self.client, self.marks = client, marks

    def __call__(self, observation: Observation, mask: BoolArray) -> FloatArray:
        """Point (3,) on the chosen part; raises PartUnknown or NoAnswer."""
        points, _ = world_points(observation)
        pixels = np.argwhere(mask)
        # Starting at the object's center makes the choice of marks deterministic.
        inside = points[mask]
        first = int(np.linalg.norm(inside - inside.mean(0), axis=-1).argmin())
        chosen = pixels[farthest_points(inside, self.marks, first)]
        image = draw_marks(observation.rgb, chosen)
        answer = self.client.ask(PART_SYSTEM, PART_QUESTION.format(instruction=observation.instruction), [image])
        row, column = chosen[read_part(answer, len(chosen)) - 1]
        place: FloatArray = points[row, column]
        return place


def draw_marks(rgb: ImageArray, pixels: IndexArray) -> ImageArray:
    """(H', W', 3) image with marks numbered from 1 at pixels (n, 2), row and column; a small image is enlarged."""
    from PIL import Image, ImageDraw, ImageFont

    factor = max(1, round(ENLARGED_PX / rgb.shape[0]))
    image = Image.fromarray(rgb).resize((rgb.shape[1] * factor, rgb.shape[0] * factor), Image.Resampling.NEAREST)
    draw, size = ImageDraw.Draw(image), max(10, image.height // 36)
    font = ImageFont.load_default(size)
    for number, (row, column) in enumerate(pixels, 1):
        x, y = (column + 0.5) * factor, (row + 0.5) * factor
        draw.ellipse([x - size / 4, y - size / 4, x + size / 4, y + size / 4], fill=(255, 255, 0), outline=(0, 0, 0))
        draw.text((x + size / 3, y - size), str(number), fill=(255, 255, 0), font=font, stroke_width=2, stroke_fill=0)
    return np.asarray(image)


def read_part(answer: str, marks: int) -> int:
    """The number of a mark in a model's answer."""
    try:
        fields = read_json(answer)
    except ValueError:
        raise PartUnknown(f"unusable answer (no JSON): {answer[:160]!r}") from None
    mark = fields.get("mark") if isinstance(fields, dict) else None
    if isinstance(mark, bool) or not isinstance(mark, int) or not 1 <= mark <= marks:
        raise PartUnknown(f"unusable answer (mark is {mark!r}; there are 1 to {marks}): {answer[:160]!r}")
    return mark
