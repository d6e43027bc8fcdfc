"""Questions to a vision-language model: one in this process, or one behind an OpenAI-compatible endpoint."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np

from mmrl.errors import UserError
from mmrl.hub.chat_endpoint import ModelRefused, ask_chat, check_url
from robotics.flow3d.clip import Observation
from robotics.flow3d.clouds import farthest_points, world_points
from robotics.flow3d.geometry import BoolArray, FloatArray, ImageArray, IndexArray
from robotics.flow3d.plan.result import PlanFacts, Verdict

if TYPE_CHECKING:
    from mmrl.vlm.engine.vlm_policy import VlmPolicy


FENCE = re.compile(r"^```(?:json)?\s*\n(.*)\n```$", re.DOTALL)
# The prompt is our own; the paper publishes none.
SYSTEM = (
    "You check the plan of a robot before it moves. The first image shows the scene as it is. The second image is a "
    "drawing of the scene after the plan, from the same camera: only the object that the robot handles was moved, "
    "and the drawing may have small holes and blurred spots."
)
QUESTION = (
    "Task: {instruction}\n"
    "Does the second image show this task completed? Answer with one JSON object and nothing else: "
    '{{"object_moved": "which object moved, and where to", "matches_task": true or false, '
    '"confidence": a number from 0 to 1, "what_is_wrong": "empty if nothing"}}'
)
QUOTED = 160
"""Maximum number of characters quoted from an unusable response."""
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


class NoAnswer(RuntimeError):  # noqa: N818
    """The model gave no usable response: it refused, timed out, is down, cannot read the question, or chose no mark."""


class VlmClient(Protocol):
    """Answers questions about images."""

    def ask(self, system: str, text: str, images: Sequence[ImageArray]) -> str:
        """The response to a question about images (H, W, 3); raises NoAnswer."""


@dataclass(frozen=True)
class LocalModel:
    """A Qwen2.5-VL or Qwen3-VL in this process."""

    policy: VlmPolicy
    """For example from `mmrl.vlm.engine.vlm_policy.load_policy`."""
    max_new_tokens: int = 160
    """Maximum response length in tokens."""

    def ask(self, system: str, text: str, images: Sequence[ImageArray]) -> str:
        """The greedy response; see `VlmClient`."""
        from PIL import Image

        from mmrl.vlm.data.task import TaskError, VlmTask
        from mmrl.vlm.engine.vlm_sampler import SamplerConfig, sample

        # images before the text, as in the prompt, which speaks of the first and the second one
        content = [*({"type": "image"} for _ in images), {"type": "text", "text": text}]
        messages: list[dict[str, Any]] = [{"role": "system", "content": system}, {"role": "user", "content": content}]
        task = VlmTask("plan", messages, [Image.fromarray(image) for image in images])
        try:
            prompt = self.policy.encode(task)
            config = SamplerConfig(max_new_tokens=self.max_new_tokens)
            answers = sample(self.policy, [prompt], 1, config, None)
        except (TaskError, UserError) as error:
            raise NoAnswer(f"the model cannot read the question: {error}") from error
        return answers.texts[0]


@dataclass(frozen=True)
class ChatEndpoint:
    """A model behind an OpenAI-compatible chat endpoint; a `url` that is not http or https raises UserError."""

    url: str
    """Server address up to /v1."""
    model: str
    """Model name on the server."""
    timeout_s: float = 60.0
    """Time limit for the whole request in seconds."""
    max_tokens: int = 300
    """Maximum response length in tokens."""
    api_key_env: str = "OPENAI_API_KEY"
    """Environment variable with the API key; optional."""

    def __post_init__(self) -> None:
        check_url(self.url, "endpoint")

    def ask(self, system: str, text: str, images: Sequence[ImageArray]) -> str:
        """The endpoint's response; see `VlmClient`."""
        try:
            return ask_chat(
                self.url,
                self.model,
                text,
                list(images),
                system=system,
                max_tokens=self.max_tokens,
                timeout_s=self.timeout_s,
                api_key=os.environ.get(self.api_key_env, ""),
            )
        # first, because it is a RuntimeError too
        except ModelRefused as error:
            raise NoAnswer(f"refused: {error}") from error
        except TimeoutError as error:
            raise NoAnswer(f"timeout: {error}") from error
        except RuntimeError as error:
            raise NoAnswer(f"down: {error}") from error


def read_json(answer: str) -> object:
    """JSON of a model's response, with or without a Markdown fence; other text raises ValueError."""
    text = answer.strip()
    fenced = FENCE.match(text)
    try:
        return json.loads(fenced.group(1) if fenced else text)
    # deeply nested brackets exhaust the parser
    except RecursionError as error:
        raise ValueError("too deep") from error


def read_verdict(answer: str) -> Verdict:
    """Parse a model's response strictly; an unusable one counts as a rejection."""
    fields: Any
    try:
        fields = read_json(answer)
        problem = _problem(fields)
    except ValueError:
        fields, problem = {}, "no JSON"
    if problem:
        return Verdict(False, 0.0, f"unusable response ({problem}): {answer.strip()[:QUOTED]!r}")
    ok, confidence = fields["matches_task"], float(fields["confidence"])
    reason = fields["object_moved"] if ok else fields["what_is_wrong"] or fields["object_moved"]
    # the score is the confidence that the plan is right, so a confident no is near 0
    return Verdict(ok, confidence if ok else 1.0 - confidence, reason or "no reason given")


def _problem(fields: object) -> str:
    if not isinstance(fields, dict):
        return "no JSON object"
    for key, kind in (("object_moved", str), ("matches_task", bool), ("what_is_wrong", str)):
        if not isinstance(fields.get(key), kind):
            return f"{key} is {fields.get(key)!r}"
    confidence = fields.get("confidence")
    # a bool is an int in Python, and true is no confidence
    if isinstance(confidence, bool) or not isinstance(confidence, int | float) or not 0 <= confidence <= 1:
        return f"confidence is {confidence!r}"
    return ""


class VlmVerifier:
    """Asks a vision-language model: a `LocalModel`, or one behind a `ChatEndpoint`."""

    def __init__(self, client: VlmClient) -> None:
        self.client = client

    def verify(self, before: ImageArray, after: ImageArray, instruction: str, meta: PlanFacts) -> Verdict:
        """Ask the model; see `Verifier`. `ok` is None if it did not respond, for example because the server is down."""
        try:
            answer = self.client.ask(SYSTEM, QUESTION.format(instruction=instruction), [before, after])
        except NoAnswer as error:
            return Verdict(None, 0.0, str(error))
        return read_verdict(answer)


PartFinder: TypeAlias = "Callable[[Observation, BoolArray], FloatArray]"
"""(observation, mask (H, W) of the object's pixels with depth) -> point (3,) on the part in the world frame."""


class AskedPart:
    """Asks a vision-language model at which of the numbered marks on the object to grasp; a `PartFinder`.

    Source: arXiv 2506.06199, whose task-aware grasp lets a vision-language model name the part; numbered marks as in
        ReKep (huangwl18/ReKep vision.py). The prompt is our own, the paper publishes none.
    """

    def __init__(self, client: VlmClient, marks: int = 8) -> None:
        self.client = client
        self.marks = marks

    def __call__(self, observation: Observation, mask: BoolArray) -> FloatArray:
        """Point (3,) on the chosen part; raises NoAnswer."""
        points, _ = world_points(observation)
        pixels = np.argwhere(mask)
        # Starting at the object's center makes the choice of marks deterministic.
        inside = points[mask]
        first = int(np.linalg.norm(inside - inside.mean(0), axis=-1).argmin())
        chosen = pixels[farthest_points(inside, self.marks, first)]
        image = draw_marks(observation.rgb, chosen)
        answer = self.client.ask(PART_SYSTEM, PART_QUESTION.format(instruction=observation.instruction), [image])
        # marks are numbered from 1
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
    """The number of a mark in a model's response."""
    try:
        fields = read_json(answer)
    except ValueError:
        raise NoAnswer(f"unusable response (no JSON): {answer[:QUOTED]!r}") from None
    mark = fields.get("mark") if isinstance(fields, dict) else None
    if isinstance(mark, bool) or not isinstance(mark, int) or not 1 <= mark <= marks:
        raise NoAnswer(f"unusable response (mark is {mark!r}; must be 1 to {marks}): {answer[:QUOTED]!r}")
    return mark
