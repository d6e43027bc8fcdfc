"""Actions, and how they are read from a model's answers.

    parsed = parse_answer('{"thoughts": "the door is open", "action": "forward"}', "json")
    parsed.actions[0].name  # forward
    parse_answer("Action: click(x=1, x=2)", "call").error  # duplicate

No part of an answer is ever executed, and no answer makes `parse_answer` raise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mmrl.agents.environments.action_formats import (
    NamedAction,
    UnreadableError,
    read_calls,
    read_object,
    read_tags,
    read_text,
    write_calls,
    write_object,
    write_tags,
    write_text,
)
from mmrl.fields import bounded, choice, rare

MAX_CHARS = 1_000_000
ON_PARSE_ERROR = ("terminate", "noop")


@dataclass(frozen=True)
class Action:
    """An agent's action."""

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Text, finite numbers, bools, None, and lists and dicts of these."""
    text: str = ""
    """The whole answer."""

    def __str__(self) -> str:
        """Name and arguments as a call, for captions."""
        return f"{self.name}({', '.join(f'{name}={value!r}' for name, value in self.arguments.items())})"


@dataclass(frozen=True)
class ParsedAnswer:
    """The actions of an answer, or why it has none."""

    actions: tuple[Action, ...] = ()
    """Actions in the order of execution; empty after an error."""
    thought: str = ""
    """Text of the answer besides its actions."""
    error: str | None = None
    """Key of `PARSE_ERRORS`."""
    detail: str = ""
    """One line about this answer's error."""


@dataclass(frozen=True)
class ActionFormat:
    """One way to write actions."""

    read: Callable[[str, bool], tuple[str, list[NamedAction]]]
    """(answer, strict) to its thought and actions."""
    write: Callable[[str, Sequence[NamedAction]], str]
    """(thought, actions) to an answer."""
    example: str
    """An answer in this format."""
    manual: str
    """Instruction for prompts."""


@dataclass
class ActionConfig:
    """Parsing of actions from answers."""

    format: str = choice("json", lambda: FORMATS)
    """json: an object with thoughts and action; call: Action: click(x=1); tag: <action>3</action>; text: the whole
    answer is the argument `text` of the action `say`."""
    strict: bool = rare(False)
    """Whether the answer must follow the format exactly; otherwise the first unambiguous action counts."""
    max_actions: int = rare(bounded(1, at_least=1, at_most=64))
    """Actions of one answer; more are an error where strict, and ignored otherwise."""
    on_parse_error: str = choice("terminate", ON_PARSE_ERROR)
    """terminate: an answer without action ends the episode; noop: the turn is spent and the agent gets the reason."""

    def parse(self, text: str) -> ParsedAnswer:
        """Read an answer with `parse_answer`."""
        return parse_answer(text, self.format, strict=self.strict, max_actions=self.max_actions)


def parse_answer(text: str, format: str, *, strict: bool = False, max_actions: int = 1) -> ParsedAnswer:
    """Read the actions of an answer; a thinking block in front, <think> to </think>, is part of the thought.

    Args:
        text: the answer, of any length.
        format: key of `FORMATS`.
        strict: whether the answer must follow the format exactly.
        max_actions: of one answer; more are an error where strict, and ignored otherwise.

    Returns:
        Actions or an error, never both.
    """
    thinking, separator, rest = text.rpartition("</think>")
    try:
        if len(text) > MAX_CHARS:
            raise UnreadableError("too_long", f"the answer has {len(text)} characters; at most {MAX_CHARS} are read")
        if not separator and text.lstrip().startswith("<think>"):
            raise UnreadableError("unfinished_thought", "the answer ends before </think>")
        if not rest.strip():
            raise UnreadableError("empty", "there is no text after the thinking")
        thought, named = FORMATS[format].read(rest.strip(), strict)
        if strict and len(named) > max_actions:
            raise UnreadableError("too_many", f"{len(named)} actions; at most {max_actions} in an answer")
    except UnreadableError as error:
        return ParsedAnswer(error=error.code, detail=error.detail)
    actions = tuple(Action(name, arguments, text) for name, arguments in named[:max_actions])
    return ParsedAnswer(actions, "\n".join(filter(None, (thinking.strip().removeprefix("<think>").strip(), thought))))


def write_answer(actions: Sequence[Action], format: str, thought: str = "") -> str:
    """Write actions as a model should, for demonstrations; raises ValueError where the format cannot, as for NaN."""
    named = [(action.name, dict(action.arguments)) for action in actions]
    text = FORMATS[format].write(thought, named)
    found = parse_answer(text, format, strict=True, max_actions=len(named))
    if [(action.name, action.arguments) for action in found.actions] != named or found.thought != thought.strip():
        raise ValueError(f"the format {format} cannot say {named!r:.200} with the thought {thought!r:.80}")
    return text


PARSE_ERRORS: dict[str, str] = {
    "empty": "The answer has no text beside its thinking.",
    "too_long": "The answer or an action is longer than is read.",
    "unfinished_thought": "The answer ends inside its thinking.",
    "no_action": "Nothing in the answer looks like an action of the format.",
    "malformed": "An action is begun and cannot be read.",
    "wrong_shape": "What can be read has no name, or has arguments of another form.",
    "bad_number": "A number is NaN, infinite or larger than 1e15.",
    "duplicate": "A key or an argument is given twice.",
    "too_deep": "Lists and objects nest deeper than 8.",
    "too_many": "The answer has more actions than allowed; strict only.",
    "extra_text": "There is text where the format has none; strict only.",
}

FORMATS: dict[str, ActionFormat] = {
    "json": ActionFormat(
        read_object,
        write_object,
        '{"thoughts": "The door is ahead.", "action": "forward"}',
        'Answer with a JSON object that has "thoughts" and "action"; an action with arguments is an object with "name" '
        'and "arguments".',
    ),
    "call": ActionFormat(
        read_calls,
        write_calls,
        "Thought: The button is below.\nAction: click(x=10, y=20)",
        "Answer with a line that begins with Thought: and a line that begins with Action:, which calls an action with "
        "named arguments.",
    ),
    "tag": ActionFormat(
        read_tags,
        write_tags,
        "The goal is above. <action>up</action>",
        "Think, then give the action between <action> and </action>.",
    ),
    "text": ActionFormat(
        read_text,
        write_text,
        "go north",
        "Answer with the action and nothing else.",
    ),
}
