"""Prompts that ask for the position of a target: system turn, question, and a prefix of the response."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mmrl.errors import UserError
from mmrl.fields import choice, rare
from mmrl.files import is_file
from mmrl.gui.grounding.coords import CoordinateSpace, coordinate_space
from mmrl.gui.grounding.grounding_tasks import TEMPLATE, THINK_PROMPT, GroundingSettings, template_fields
from mmrl.gui.grounding.samples import GroundingSample
from mmrl.vlm.data.prompt import Prompt
from mmrl.vlm.data.task import VlmTask
from mmrl.vlm.data.turn_template import TurnTemplate

FROM_RUN = "run"


@dataclass(frozen=True)
class PromptPreset:
    """Texts with {width} and {height} of the resized image; double all other braces."""

    space: CoordinateSpace
    """Meaning of the numbers in a response."""
    user: str
    """The question after the image, with {instruction}."""
    system: str = ""
    """System turn. Empty: none."""
    prefix: str = ""
    """Start of the response, given to the model."""
    refusal: str = ""
    """Added to the question for benchmarks that also ask for absent elements."""


@dataclass
class BenchmarkPrompt:
    """Prompt for the model. Published numbers depend on it: compare only results with the same prompt."""

    preset: str = choice("points", lambda: (*PRESETS, FROM_RUN))
    """points: JSON points as written by InfiGUI-G1; points_think: the same after a think block; tool_call: the
    computer-use call of Qwen2.5-VL; rel1000: JSON points in thousandths, for Qwen3-VL; run: the training question of
    the run folder in model.path."""
    system: str | None = rare(None)
    """System turn to use instead of the preset's; '' = none. {width} and {height} refer to the resized image."""
    user: str | None = rare(None)
    """Question to use instead of the preset's. {instruction}, {width} and {height} are filled in; double other
    braces."""
    prefix: str | None = rare(None)
    """Start of the response to use instead of the preset's; '' = nothing."""
    refusal: str | None = rare(None)
    """Text to add to the question if a benchmark also asks for absent elements; '' = nothing."""
    space: str = rare(choice("", lambda: ("", *CoordinateSpace)))
    """Meaning of the two numbers in a response. Default: the preset's."""

    def validate(self) -> None:
        """Check the templates; raises UserError."""
        for name in ("system", "user", "refusal"):
            if (text := getattr(self, name)) is not None:
                _check_template(f"prompt.{name}", text, asks=name == "user")

    def resolved(self, model_path: str = "") -> PromptPreset:
        """The preset with its texts replaced by the configured ones; `run` reads them from the run folder."""
        base = preset_of_run(model_path) if self.preset == FROM_RUN else PRESETS[self.preset]
        given = {name: getattr(self, name) for name in ("system", "user", "prefix", "refusal")}
        texts = {name: text for name, text in given.items() if text is not None}
        chosen = dataclasses.replace(base, **texts)
        return dataclasses.replace(chosen, space=coordinate_space(self.space)) if self.space else chosen


def preset_of_run(model_path: str) -> PromptPreset:
    """The question that a run was trained with, from its config.yaml."""
    from omegaconf import DictConfig

    from mmrl.config import load_omega

    file = Path(model_path).expanduser() / "config.yaml"
    if not is_file(file):
        raise UserError(f"prompt.preset=run needs a run folder as model.path, but {model_path} contains no config.yaml")
    content: Any = load_omega(file)
    values = content.get("grounding") if isinstance(content, DictConfig) else None
    if not isinstance(values, DictConfig):
        raise UserError(
            f"{file} has no 'grounding' section, so the run was not trained on screens; choose another prompt.preset"
        )
    known = {field.name for field in dataclasses.fields(GroundingSettings)}
    # a run of another version may have further options
    settings = GroundingSettings(**{str(name): value for name, value in values.items() if name in known})
    _check_template(f"{file}: grounding.template", settings.template, asks=True)
    data = content.get("data")
    # system prompt and think instruction are one system turn, as in training
    texts = [data.get("system_prompt") if isinstance(data, DictConfig) else None]
    texts += [settings.think_prompt] if settings.think else []
    # texts of a run are no templates: their braces are literal
    system = "\n".join(text.replace("{", "{{").replace("}", "}}") for text in texts if text)
    return PromptPreset(settings.point_space, settings.template, system=system, refusal=ABSENT)


def question(sample: GroundingSample, preset: PromptPreset, asks_refusals: bool, max_image_pixels: int) -> VlmTask:
    """A sample with `model_wh` as a chat: the resized screen, then the question."""
    assert sample.model_wh is not None
    width, height = sample.model_wh
    text = preset.user.format(instruction=sample.instruction, width=width, height=height)
    if asks_refusals:
        text += preset.refusal.format(width=width, height=height)
    messages = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": text}]}]
    if preset.system:
        system = preset.system.format(width=width, height=height)
        messages.insert(0, {"role": "system", "content": [{"type": "text", "text": system}]})
    return VlmTask(
        id=str(sample.meta["id"]),
        messages=messages,
        images=[str(sample.image) if isinstance(sample.image, Path) else sample.image],
        max_image_pixels=max_image_pixels,
        # the size that the prompt states and the sample's points refer to
        image_wh=[sample.model_wh],
        points_in_pixels=preset.space is CoordinateSpace.ABS_RESIZED,
    )


def begin_answer(prompt: Prompt, text: str, turns: TurnTemplate) -> Prompt:
    """Append the first words of the response to a prompt, as the chat template would begin one."""
    if not text:
        return prompt
    # the turn stays open: the model continues it
    start = turns.write(prompt.text, text, ends=False)
    ids = torch.tensor(turns.tokenizer.encode(start, add_special_tokens=False), dtype=prompt.input_ids.dtype)
    positions = prompt.next_position + torch.arange(len(ids), dtype=prompt.position_ids.dtype)
    return dataclasses.replace(
        prompt,
        input_ids=torch.cat([prompt.input_ids, ids]),
        mm_token_type_ids=torch.cat([prompt.mm_token_type_ids, torch.zeros_like(ids)]),
        # text has the same position on all three rotary axes
        position_ids=torch.cat([prompt.position_ids, positions.expand(3, -1)], dim=1),
        next_position=prompt.next_position + len(ids),
        text=prompt.text + start,
    )


def _check_template(name: str, text: str, asks: bool) -> None:
    allowed = {"width", "height", *(["instruction"] if asks else [])}
    if unknown := template_fields(name, text, asks=asks) - allowed:
        raise UserError(f"{name} contains {{{min(unknown)}}}; it may only use {', '.join(sorted(allowed))}")


COMPUTER_USE = {
    "type": "function",
    "function": {
        "name": "computer_use",
        "description": "Mouse and keyboard of a desktop whose screen is WIDTHxHEIGHT pixels. Click in the middle of "
        "elements, not on their edges.",
        "parameters": {
            "type": "object",
            "properties": {
                "action": {"type": "string", "enum": ["left_click"], "description": "what to do"},
                "coordinate": {"type": "array", "description": "[x, y] in pixels from the top left corner"},
            },
            "required": ["action", "coordinate"],
        },
    },
}
TOOLS = (
    "You are a helpful assistant.\n\n# Tools\n\nThe functions inside <tools></tools> can be called:\n<tools>\n"
    f"{json.dumps(COMPUTER_USE)}\n</tools>\n\nA call is a JSON object with name and arguments inside <tool_call>"
    "</tool_call> tags:\n<tool_call>\n"
    '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
)
CALL = '<tool_call>\n{"name": "computer_use", "arguments": {"action": "left_click", "coordinate": ['
ABSENT = ' If the screen holds nothing of the kind, answer [{{"point_2d": [-1, -1]}}].'
ABSENT_CALL = " If the screen holds nothing of the kind, give the coordinate [-1, -1]."


def _doubled(text: str) -> str:
    return text.replace("{", "{{").replace("}", "}}").replace("WIDTH", "{width}").replace("HEIGHT", "{height}")


POINTS = PromptPreset(CoordinateSpace.ABS_RESIZED, TEMPLATE, refusal=ABSENT)
PRESETS: dict[str, PromptPreset] = {
    "points": POINTS,
    "points_think": dataclasses.replace(POINTS, system=THINK_PROMPT),
    "tool_call": PromptPreset(
        CoordinateSpace.ABS_RESIZED, "{instruction}", system=_doubled(TOOLS), prefix=CALL, refusal=ABSENT_CALL
    ),
    "rel1000": PromptPreset(
        CoordinateSpace.REL1000,
        'Which element of the screen is meant by "{instruction}"? Answer with a JSON list of one point, x and y in '
        'thousandths of the width and height: [{{"point_2d": [x, y]}}]',
        refusal=ABSENT,
    ),
}
