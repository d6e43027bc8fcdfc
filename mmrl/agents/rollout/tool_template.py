"""Tools in a model's chat template: how it writes calls and results, and what it keeps of earlier turns.

Everything is read from renderings of sample turns, so that a template that loses something is found before a run.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from mmrl.agents.environments.action_formats import SAY
from mmrl.agents.environments.environment import Action
from mmrl.agents.environments.native_calls import CALL_FORMATS, OK, read_native
from mmrl.errors import UserError
from mmrl.vlm.data.turn_template import (
    EARLIER,
    QUESTION,
    THOUGHT,
    Message,
    TemplateError,
    TurnTemplate,
    as_call,
    assistant_turn,
    call_forms,
    call_id,
    hide_control_tokens,
    user_turn,
)

RESULT = "resultof"
"""A sample result, which no template contains."""
SHOWN = 600
"""Maximum characters of a rendering to show."""
WAYS_OUT = (
    "so a conversation with tools would not be what the model knows; remove conversation.tools, or use a model whose "
    "chat template has tools"
)


def call_format(turns: TurnTemplate) -> tuple[str, str]:
    """The only format of `CALL_FORMATS` that reads sample calls of the chat template back as they were.

    Returns:
        Its name, empty if none or several do, and the calls as the template writes them, empty if it writes none.
    """
    first, name = "", PROBE_TOOL["function"]["name"]
    for calls in (*call_forms(PROBES), *call_forms(NUMBERED)):
        try:
            start, body = turns.write_calls(calls, [PROBE_TOOL])
        except TemplateError:
            continue
        if body.count(name) < len(calls):
            continue
        first = first or body
        fitting = [row for row in CALL_FORMATS if _reads_back(row, start, body, turns.stops, len(calls))]
        if len(fitting) == 1:
            return fitting[0], body
    return "", first


def _is_readable(turns: TurnTemplate, tools: Sequence[Any], format: str, name: str) -> bool:
    """Whether a call is read with its name, in one of the forms in which the template can write it."""
    for calls in _forms(name, {}):
        with suppress(TemplateError):
            start, body = turns.write_calls(calls, tools)
            found = read_native(body, format, tools, prompt_end=start, ends=turns.ends).calls
            if [call.name for call in found] == [name]:
                return True
    return False


def _forms(name: str, arguments: dict[str, Any]) -> list[Sequence[Message]]:
    """A call in every form that templates take; Kimi's writes the id of a call and not its name."""
    ids = (call_id(0), f"functions.{name}:0")
    return [calls for id in ids for calls in call_forms([as_call(name, arguments, id)])]


def _reads_back(row: str, start: str, body: str, stops: Sequence[str], count: int) -> bool:
    answer = read_native(body, row, [PROBE_TOOL], prompt_end=start, ends=stops)
    # words around calls belong to a format that is not known; marks of turns do not
    if re.sub(r"<[^<>]*>", "", answer.text).strip() and not start.endswith(QUESTION):
        return False
    found = answer.calls
    given = [call["function"]["arguments"] for call in PROBES[:count]]
    # as JSON, since True equals 1 in Python
    same = [json.dumps(call.arguments, sort_keys=True) for call in found]
    return all(call.status == OK for call in found) and same == [json.dumps(one, sort_keys=True) for one in given]


@dataclass(frozen=True)
class ToolTemplate:
    """The facts about tools in a chat template."""

    format: str
    """Key of `CALL_FORMATS`; empty if the run reads calls by itself."""
    parallel: bool
    """Whether it writes several calls in one turn."""
    result: str
    """Text between a call that was cut off and the next answer, with `RESULT` as the call's result."""
    keeps_thoughts: tuple[bool, bool]
    """Whether the thought of an earlier turn stays once tool results follow it, and once a user message does."""
    keeps_turns: bool
    """Whether an earlier turn stays as it was written, its thought included, once a user message follows it."""

    def lines(self, stops: Sequence[str]) -> list[str]:
        """Lines for `mmrl train --dry-run`, given the tokens at which a response ends."""
        rest = "unchanged" if self.keeps_turns else "rewritten"
        tool, user = ("kept" if kept else "dropped" for kept in self.keeps_thoughts)
        return [
            f"chat template: a response ends at {' or '.join(stops)}",
            f"  tool calls: format {self.format or 'unknown'}, {'several' if self.parallel else 'one'} per turn",
            f"  a tool result: {self.result.replace(RESULT, '...')!r}",
            f"  thoughts of earlier turns: {tool} before tool results, {user} before user messages",
            f"  earlier turns: unchanged before tool results, {rest} before user messages",
        ]


def read_template(turns: TurnTemplate, tools: Sequence[Any], format: str | None = None) -> ToolTemplate:
    """Read the facts, and try results of one and of two calls of the first tool.

    Args:
        turns: the chat template.
        tools: JSON schemas of the tools.
        format: key of `CALL_FORMATS` that the run reads; empty for a reader that is not among them, None for any key.

    Raises:
        UserError: the template shows no tools, rejects or loses results, writes no calls although `format` is None, or
            writes them in another format.
    """
    try:
        return _read(turns, tools, format)
    except TemplateError as error:
        raise UserError(f"{turns.blame} rejects a conversation with tools: {error}") from error


def _read(turns: TurnTemplate, tools: Sequence[Any], format: str | None) -> ToolTemplate:
    name = str(tools[0]["function"]["name"])
    if name not in turns.render([user_turn(QUESTION)], asks=True, tools=tools):
        raise UserError(f"{turns.blame} does not support tools, {WAYS_OUT}")
    found, written = call_format(turns)
    if format is None and not written:
        raise UserError(f"{turns.blame} does not write tool calls, {WAYS_OUT}")
    if format is None and not found:
        raise UserError(
            f"{turns.blame} writes tool calls in none of the formats {', '.join(CALL_FORMATS)}; set actions.format to "
            f"your own module:function that reads them. It writes: {written[:SHOWN]!r}"
        )
    if format and found and format != found:
        raise UserError(
            f"actions.format reads calls in the format {format}, but {turns.blame} writes them in the format {found}; "
            f"set actions.format: native. It writes: {written[:SHOWN]!r}"
        )
    for tool in tools if found else ():
        if not _is_readable(turns, tools, found, called := str(tool["function"]["name"])):
            raise UserError(
                f"the tool {called!r} could never be called: its calls cannot be read in the format {found}, in which "
                f"{turns.blame} writes them; rename the tool or leave it out"
            )
    result = {"role": "tool", "content": [{"type": "text", "text": RESULT}]}
    # two results first: they also show whether each of several is kept
    _, follow = (turns.follow([result] * count, end=None, tools=tools, calls=[name] * count) for count in (2, 1))
    after_tool, _ = _kept(turns, *_answered_call(tools), tools)
    after_user, whole = _kept(turns, assistant_turn(EARLIER, **THOUGHTS), user_turn(RESULT), tools)
    return ToolTemplate(found or format or "", _is_parallel(turns), follow, (after_tool, after_user), whole)


def check_plain_calls(turns: TurnTemplate) -> None:
    """Reject a template whose calls have control tokens, which dropping thoughts would turn into text."""
    body = call_format(turns)[1]
    for stop in turns.stops:
        body = body.partition(stop)[0]
    if hidden := hide_control_tokens([{"content": body}], turns.tokenizer)[0]:
        raise UserError(
            f"conversation.drop_thoughts writes earlier answers again as text, but {turns.blame} writes {hidden[0]} "
            "into tool calls; remove conversation.drop_thoughts"
        )


def write_call(turns: TurnTemplate, tools: Sequence[Any], format: str, action: Action) -> str:
    """The response in which a model of this chat template takes an action, such as an expert's.

    Args:
        turns: the chat template.
        tools: JSON schemas of the tools.
        format: the template's format, key of `CALL_FORMATS`.
        action: a call of a tool, or a plain answer.

    Raises:
        UserError: the template writes the call so that it is read differently, or ends it with another token than an
            answer.
    """
    if action.name == SAY:
        return str(action.arguments["text"])
    arguments, problem = dict(action.arguments), "it would be read differently"
    what = f"the call {action.name}({arguments}) of an expert"
    for calls in _forms(action.name, arguments):
        try:
            start, body = turns.write_calls(calls, tools)
        except TemplateError as error:
            problem = str(error)
            continue
        found = read_native(body, format, tools, prompt_end=start, ends=turns.ends).calls
        if [(call.status, call.name, call.arguments) for call in found] != [(OK, action.name, arguments)]:
            continue
        end = min((place for end in turns.ends if (place := body.find(end)) >= 0), default=len(body))
        if body[end:].startswith(turns.ends[0]):
            return body[:end]
        raise UserError(f"{turns.blame} cannot write {what}: it ends a call with another token than an answer")
    raise UserError(f"{turns.blame} cannot write {what}: {problem}")


def dropped_thoughts(turns: TurnTemplate, tools: Sequence[Any] = ()) -> list[str]:
    """Messages after which the chat template no longer shows the thoughts of earlier responses, if it has any."""
    # a prompt that has closed the thought leaves none to the response
    if turns.parts.begin.rstrip().endswith("</think>"):
        return []
    inline = assistant_turn(f"<think>\n{THOUGHT}\n</think>\n\n{EARLIER}")
    said = [(assistant_turn(EARLIER, **THOUGHTS), user_turn(RESULT)), (inline, user_turn(RESULT))]
    called, answered = _answered_call(tools) if tools else said[0]
    found = {
        "tool results": bool(tools) and _drops(turns, called, answered, tools),
        "user messages": any(_drops(turns, turn, after, tools) for turn, after in said),
    }
    return [kind for kind, drops in found.items() if drops]


def _drops(turns: TurnTemplate, turn: Message, after: Message, tools: Sequence[Any]) -> bool:
    """Whether a turn shows its thought as the last one, but no longer before a further message."""
    try:
        whole = turns.render([user_turn(QUESTION), turn], tools=tools)
    except TemplateError:
        return False
    # templates that drop thoughts inside contents do so in the last turn, too
    shown = THOUGHT in whole or "reasoning_content" not in turn
    return shown and not _kept(turns, turn, after, tools)[0]


def _answered_call(tools: Sequence[Any]) -> tuple[Message, Message]:
    """A call of the first tool, with a thought, and its result."""
    name, result = str(tools[0]["function"]["name"]), {"role": "tool", "content": [{"type": "text", "text": RESULT}]}
    called = assistant_turn("", **THOUGHTS, tool_calls=[as_call(name, {}, call_id(0))])
    return called, result | {"name": name, "tool_call_id": call_id(0)}


def _is_parallel(turns: TurnTemplate) -> bool:
    for calls in call_forms(PROBES):
        try:
            if len(calls) > 1 and turns.write_calls(calls, [PROBE_TOOL])[1].count(str(MANY)) == 1:
                return True
        except TemplateError:
            continue
    return False


def _kept(turns: TurnTemplate, turn: Message, after: Message, tools: Sequence[Any]) -> tuple[bool, bool]:
    """Whether a turn keeps its thought, and everything up to its text, before a further message."""
    try:
        earlier = turns.render([user_turn(QUESTION), turn], tools=tools)
        whole = turns.render([user_turn(QUESTION), turn, after], asks=True, tools=tools)
    except TemplateError:
        return False, False
    return THOUGHT in whole, whole.startswith(earlier.partition(EARLIER)[0])


MANY = 57921
"""A number that shows whether the second of two calls is written."""
PROBE_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "probe",
        "description": "Probe.",
        "parameters": {
            "type": "object",
            "properties": {
                name: {"type": kind, "description": name}
                for name, kind in (
                    ("number", "integer"),
                    ("nested", "object"),
                    ("digits", "string"),
                    ("lines", "string"),
                    ("flag", "boolean"),
                )
            },
            "required": [],
        },
    },
}
PROBES = [
    as_call(
        "probe",
        {"number": 941, "nested": {"c": [1, {"d": "x"}]}, "digits": "007", "lines": "x\n  y", "flag": False},
        call_id(0),
    ),
    as_call("probe", {"number": MANY}, call_id(1)),
]
"""Calls whose arguments a reader of another format would change: text that looks like a number, lines, nesting."""
NUMBERED = [call | {"id": f"functions.probe:{number}"} for number, call in enumerate(PROBES)]
"""The same with ids as of Kimi, whose template writes the id of a call and not its name."""
THOUGHTS = dict.fromkeys(("reasoning_content", "thinking", "reasoning"), THOUGHT)
"""A sample thought under every name that templates use for it."""
