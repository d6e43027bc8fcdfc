"""Tool calls in the formats of released models, each read on its own and with a status.

A row of `CALL_FORMATS` says where a call begins and ends and what is inside. Calls inside thoughts are skipped. Which
row a model needs follows from its chat template; see `mmrl.agents.rollout.tool_template`.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from mmrl.agents.environments.action_formats import UnreadableError, check_value, decode_json, referenced

OK, CUT_CALL, TOO_MANY = "ok", "cut", "too_many"
STATUSES: dict[str, str] = {
    OK: "The call can be executed.",
    "invalid_json": "A call was started but its content cannot be read, or it is in another model's format.",
    "unclosed": "The call has no end, although the response has one.",
    "missing_name": "The call has no name.",
    "unknown_tool": "The environment has no tool of this name.",
    "bad_arguments": "The arguments do not fit the tool's schema.",
    TOO_MANY: "The response has more calls than actions.max_actions.",
    CUT_CALL: "The response was truncated at the length limit inside the call.",
}
"""Statuses of a call."""
NAME = r"[\w.-]+"
CALL_ID = rf"[A-Za-z0-9]{{9}}|{NAME}:\d+"
"""Ids that chat templates accept: those of Mistral, whose templates refuse any other length, and of Kimi."""


@dataclass(frozen=True)
class ToolCall:
    """A call as a model wrote it."""

    status: str
    """Key of `STATUSES`."""
    name: str = ""
    """Name of the tool, as far as it can be read."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Arguments, converted to the types of the tool's schema."""
    id: str = ""
    """Id that the model gave the call; empty if its format has none."""
    detail: str = ""
    """Why it cannot be executed, in one line."""


@dataclass(frozen=True)
class NativeAnswer:
    """The calls of a response, and the text around them."""

    calls: tuple[ToolCall, ...]
    """Calls in order, those that cannot be executed included."""
    text: str
    """Text outside thoughts and calls."""
    thought: str
    unfinished: bool
    """Whether it ends inside its thought."""


@dataclass(frozen=True)
class CallFormat:
    """How a family of models writes calls."""

    opens: str
    """Pattern of a call's beginning, in which KNOWN stands for the names of the tools; it may have the groups `name`,
    `id`, and `other` for an object that is text."""
    closes: str | None
    """Pattern of its end; None if it ends with the JSON or the list that follows `opens`."""
    body: str
    """Content between them, a key of `BODIES`."""
    argument: str = ""
    """Pattern of one argument with the groups `key` and `value`, for the body `tags`."""
    around: str = r"(?!)"
    """Pattern of marks around calls and texts, which belong to neither."""
    separator: str = ""
    """Pattern of what may separate two calls without an end."""


def read_native(
    answer: str,
    format: str,
    tools: Sequence[Mapping[str, Any]],
    *,
    prompt_end: str = "",
    finish: str = "eos",
    ends: Sequence[str] = (),
) -> NativeAnswer:
    """Read the calls of a response.

    Args:
        answer: the response with its control tokens.
        format: key of `CALL_FORMATS`.
        tools: JSON schemas of the tools, as chat templates take them.
        prompt_end: end of the prompt, which may have opened a thought.
        finish: "length" if the response was truncated at the length limit.
        ends: texts of the tokens that end a response.

    Returns:
        Calls with their statuses; a response in which a call of any format was started always has one.
    """
    spec, known = CALL_FORMATS[format], {tool["function"]["name"]: tool["function"] for tool in tools}
    # an opener of another model's format without a call that can be read is no text for a user
    names = "|".join(map(re.escape, known)) or "(?!)"
    foreign = re.compile(rf"{MARKS}|{ARGUMENTS_FIRST}|\A\s*\[\s*(?:KNOWN)\(".replace("KNOWN", names))
    spec = replace(spec, opens=spec.opens.replace("KNOWN", names))
    thought, calls, text = "", list[ToolCall](), list[str]()
    unfinished = False
    for kind, piece, found in _pieces(answer, spec, _opened_thought(prompt_end, answer, spec), finish):
        for end in ends:
            piece = piece.replace(end, "")
        if kind == "thought":
            thought, unfinished = "\n".join(filter(None, (thought, piece.strip()))), found == "open"
        elif kind == "text":
            shown = re.sub(spec.around, "", piece)
            if mark := foreign.search(shown):
                calls.append(
                    ToolCall("invalid_json", detail=f"a call begins with {shown[mark.start() :].strip()[:40]!r}")
                )
                shown = shown[: mark.start()]
            text.append(shown)
        else:
            calls += found
    checked = tuple(_checked(call, known) if call.status == OK else call for call in calls)
    return NativeAnswer(checked, "".join(text).strip(), thought, unfinished)


def _opened_thought(prompt_end: str, answer: str, spec: CallFormat) -> str:
    """The mark that closes the thought in which a response begins; empty if it begins outside a thought."""
    for opened, closed in THOUGHTS.items():
        if re.search(rf"(?:{opened})\s*\Z", prompt_end):
            return closed
    # a thought that is only closed: some prompts have opened it in another way
    closing = re.search(r"</?think>", answer)
    if closing is None or closing[0] == "<think>":
        return ""
    opens, closes = _Finder(spec.opens, answer), None if spec.closes is None else _Finder(spec.closes, answer)
    head, position = opens.first(0), 0
    while head is not None and head.start() < closing.start():
        found, position = _read_call(answer, head, opens, closes, spec, "eos")
        # inside an argument, the mark is text
        if position > closing.start() and all(call.status == OK for call in found):
            return ""
        head = opens.first(position)
    return "</think>"


def _pieces(answer: str, spec: CallFormat, closing: str, finish: str) -> Iterator[tuple[str, str, Any]]:
    """The thoughts, texts and calls of a response in order; `closing` ends the thought in which it begins."""
    opens, closes = _Finder(spec.opens, answer), None if spec.closes is None else _Finder(spec.closes, answer)
    thoughts = _Finder("|".join(f"({mark})" for mark in THOUGHTS), answer)
    position = 0
    while position < len(answer) or closing:
        if closing:
            end = answer.find(closing, position)
            yield "thought", answer[position : None if end < 0 else end], "open" if end < 0 else ""
            position, closing = len(answer) if end < 0 else end + len(closing), ""
            continue
        thought, call = thoughts.first(position), opens.first(position)
        if thought is not None and (call is None or thought.start() <= call.start()):
            yield "text", answer[position : thought.start()], None
            assert thought.lastindex is not None
            position, closing = thought.end(), [*THOUGHTS.values()][thought.lastindex - 1]
            continue
        yield "text", answer[position : None if call is None else call.start()], None
        if call is None:
            return
        if _group(call, "other"):
            stop = _end_of_value(answer, call.start(), python=False) or call.start() + 1
            yield "text", answer[call.start() : stop], None
            position = stop
            continue
        found, position = _read_call(answer, call, opens, closes, spec, finish)
        yield "calls", "", found


def _read_call(
    answer: str, head: re.Match[str], opens: _Finder, closes: _Finder | None, spec: CallFormat, finish: str
) -> tuple[list[ToolCall], int]:
    """The calls behind an opener, several if its body is a list, and where they end."""
    start, python = head.end(), spec.body == "python"
    end = _end_of_value(answer, start, python) if spec.body != "tags" and spec.body != "gemma" else None
    if closes is None:
        stop = end if end is None else _behind(answer, end, spec.separator)
        # without an end mark, only the end of the turn shows that the call is complete
        if stop is None or (finish == "length" and not answer[stop:].strip()):
            return [_without_end(head, finish)], len(answer)
    else:
        # inside a string, the marks of calls are text
        close = None if end is None else closes.pattern.match(answer, end)
        if close is None:
            close, following = closes.first(start), opens.first(start)
            if following is not None and (close is None or following.start() < close.start()):
                return [_without_end(head, "eos")], following.start()
            if close is None:
                return [_without_end(head, finish)], len(answer)
        end, stop = close.start(), close.end()
    assert end is not None
    body = answer[start:end]
    pieces = _elements(body, python) if spec.body in LISTS else [body]
    return [_read_body(piece, head, spec) for piece in pieces], stop


class _Finder:
    """Matches of a pattern in a text, each searched for once while the position moves on."""

    def __init__(self, pattern: str, text: str) -> None:
        self.pattern = re.compile(pattern, re.MULTILINE)
        self._text = text
        self._found = self.pattern.search(text)

    def first(self, position: int) -> re.Match[str] | None:
        """The first match from a position on, which must not be smaller than the one before."""
        # what is not in the rest of the text is not searched for again, or many calls would take quadratic time
        if self._found is not None and self._found.start() < position:
            self._found = self.pattern.search(self._text, position)
        return self._found


def _without_end(head: re.Match[str], finish: str) -> ToolCall:
    if finish == "length":
        return ToolCall(CUT_CALL, _group(head, "name"), detail="the response was cut at the limit of its length")
    return ToolCall("unclosed", _group(head, "name"), detail="the call has no end")


def _read_body(body: str, head: re.Match[str], spec: CallFormat) -> ToolCall:
    """One call; its name and arguments are not checked yet."""
    given = _group(head, "name").strip()
    try:
        found = BODIES[spec.body](body, spec)
        name = found.get("name", given)
        if not isinstance(name, str) or not name:
            return ToolCall("missing_name", detail="the call has no name")
        arguments = _arguments_of(found)
        _check({name: arguments})
    except UnreadableError as error:
        return ToolCall("invalid_json", given, detail=error.detail)
    except (ValueError, RecursionError) as error:
        return ToolCall(
            "invalid_json", given, detail=f"the call cannot be read: {str(error).partition(chr(10))[0][:120]}"
        )
    if not isinstance(arguments, dict):
        kind = type(arguments).__name__
        return ToolCall("bad_arguments", name, detail=f"the arguments of {name} are a {kind}; expected an object")
    own = str(found.get("id") or _group(head, "id"))
    return ToolCall(OK, name, arguments, own if re.fullmatch(CALL_ID, own) else "")


def _arguments_of(found: Mapping[str, Any]) -> Any:
    arguments: Any = next((found[key] for key in ("arguments", "parameters") if found.get(key) is not None), {})
    # some models write the arguments as JSON inside a string
    return _json(arguments.strip() or "{}") if isinstance(arguments, str) else arguments


def _check(value: Any) -> None:
    """`check_value` for tools, whose arguments may be nanoseconds, ids of 64 bits and nested queries."""
    check_value(value, MOST_BRACKETS, sys.float_info.max)


def _group(head: re.Match[str], name: str) -> str:
    return head.groupdict().get(name) or ""


def _behind(text: str, position: int, pattern: str) -> int:
    match = re.compile(pattern).match(text, position)
    return position if match is None else match.end()


def _end_of_value(text: str, start: int, python: bool) -> int | None:
    """Index after the object or list that begins at `start`, white space aside; None if there is none."""
    depth = 0
    for sign in (PYTHON_SIGNS if python else JSON_SIGNS).finditer(text, start):
        if not depth and (sign[0] not in ("[", "{") or text[start : sign.start()].strip()):
            return None
        depth += (sign[0] in ("[", "{", "(")) - (sign[0] in ("]", "}", ")"))
        if not depth:
            return sign.end()
        # deeper values are refused, and each of many openers would be followed to the end of the text
        if depth > MOST_BRACKETS:
            return None
    return None


def _elements(text: str, python: bool) -> list[str]:
    """The entries of a list as text, so that one that cannot be read does not take the others with it."""
    inner = text.strip().removeprefix("[").removesuffix("]")
    depth, start, found = 0, 0, list[str]()
    for sign in (PYTHON_SIGNS if python else JSON_SIGNS).finditer(inner):
        depth += (sign[0] in ("[", "{", "(")) - (sign[0] in ("]", "}", ")"))
        if sign[0] == "," and not depth:
            found.append(inner[start : sign.start()])
            start = sign.end()
    return [*found, inner[start:]]


def _json(text: str) -> Any:
    """A JSON value; raw newlines in strings are allowed, since models write them in code."""
    value, end = decode_json(text.strip(), strict=False)
    if rest := text.strip()[end:].strip():
        raise UnreadableError("malformed", f"unexpected text after the JSON: {rest[:40]!r}")
    return value


def _object(body: str, spec: CallFormat) -> dict[str, Any]:
    """`{"name": "f", "arguments": {...}}`, also inside an entry `function`, or with the name in it."""
    found = _json(body)
    if isinstance(found, dict) and "name" not in found and "function" in found:
        own = found["function"]
        found = {**found, "name": own} if isinstance(own, str) else own
    if not isinstance(found, dict):
        raise UnreadableError("wrong_shape", f"a call is a {type(found).__name__}, expected an object")
    # None, since the opener of these formats has no name to fall back on
    return {"name": None, **found}


def _only_arguments(body: str, spec: CallFormat) -> dict[str, Any]:
    # some models write nothing if a tool takes no arguments
    return {"arguments": _json(body.strip() or "{}")}


def _gemma(body: str, spec: CallFormat) -> dict[str, Any]:
    """`{a:1,s:<|"|>x<|"|>}`."""
    from transformers.utils.chat_parsing.content_parsers import parse_content

    delimiters = ['<|"|>', '<|"|>']
    return {"arguments": parse_content(body, "json", {"unquoted_keys": True, "string_delims": [delimiters]})}


def _python(body: str, spec: CallFormat) -> dict[str, Any]:
    """`f(a=1, s='x')`."""
    from transformers.utils.chat_parsing.content_parsers import parse_content

    # templates write raw newlines into strings, which Python's grammar does not allow
    text = PYTHON_SIGNS.sub(lambda sign: sign[0].replace("\n", "\\n") if sign[0][0] in "\"'" else sign[0], body)
    (call,) = parse_content(f"[{text}]", "python-call-list", {})
    return dict(call)


def _tags(body: str, spec: CallFormat) -> dict[str, Any]:
    """Arguments in tags, whose values are texts."""
    from transformers.utils.chat_parsing.content_parsers import parse_content

    given = re.findall(spec.argument, body, re.DOTALL)
    found = parse_content(body, "xml-inline", {"tag_pattern": spec.argument})
    if len(given) > len(found):
        raise UnreadableError("duplicate", "an argument is given twice")
    # the parser passes over everything that is not an argument
    if left := re.sub(spec.argument, "", body, flags=re.DOTALL).strip():
        raise UnreadableError("malformed", f"{left[:40]!r} is no argument")
    return {"arguments": found}


def _checked(call: ToolCall, known: Mapping[str, Mapping[str, Any]]) -> ToolCall:
    """The call with arguments of the types that the tool's schema asks for."""
    if call.name not in known:
        there = ", ".join(known) or "none"
        return replace(
            call, status="unknown_tool", detail=f"there is no tool {call.name[:60]!r}; the tools are: {there}"
        )
    schema = known[call.name].get("parameters") or {}
    lacking = [key for key in schema.get("required") or () if key not in call.arguments]
    problem = f"{call.name} lacks the argument {', '.join(lacking)}" if lacking else ""
    arguments = dict(call.arguments)
    for key, value in arguments.items():
        types = [*dict.fromkeys(_types((schema.get("properties") or {}).get(key), schema))]
        fitting = [form for form in _forms(value) if not types or any(_is(form, kind) for kind in types)]
        if not fitting:
            problem = problem or f"the argument {key} of {call.name} is {value!r:.60}; expected {' or '.join(types)}"
        arguments[key] = fitting[0] if fitting else value
    return replace(call, arguments=arguments, status="bad_arguments" if problem else OK, detail=problem)


def _types(schema: Any, root: Mapping[str, Any], followed: tuple[Any, ...] = ()) -> list[str]:
    """Names of the types that a JSON schema inside a root schema allows; empty if it allows all."""
    # a schema may refer to itself
    if not isinstance(schema, Mapping) or schema.get("$ref") in followed:
        return []
    followed = (*followed, schema["$ref"]) if "$ref" in schema else followed
    declared = schema.get("type") or []
    values = schema.get("enum") or ([schema["const"]] if "const" in schema else [])
    found = [declared] if isinstance(declared, str) else list(declared)
    found = found or [kind for kind in TYPES if any(_is(value, kind) for value in values)]
    for part in (referenced(schema, root), *(schema.get("allOf") or ())):
        found = found or _types(part, root, followed)
    for union in ("anyOf", "oneOf"):
        parts = [_types(part, root, followed) for part in schema.get(union) or ()]
        # a part that allows all types allows them for the whole
        found = found or ([kind for part in parts for kind in part] if all(parts) else [])
    # as `get_json_schema` marks an optional argument
    return [*found, "null"] if found and schema.get("nullable") else found


def _is(value: Any, kind: str) -> bool:
    # bool is an int in Python, and no number in JSON
    if isinstance(value, bool):
        return kind == "boolean"
    return isinstance(value, TYPES.get(kind, object))


def _forms(value: Any) -> Iterator[Any]:
    """A value as given, and what it may stand for if the format or the model writes it as text."""
    yield value
    if isinstance(value, float) and value.is_integer():
        yield int(value)
    if not isinstance(value, str):
        return
    if value.strip().lower() in ("true", "false"):
        yield value.strip().lower() == "true"
    # some templates write null with Python's `str`
    if value.strip() == "None":
        yield None
    for read in (_json, _literal):
        try:
            found = read(value)
            _check(found)
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            continue
        yield found
        if isinstance(found, float) and found.is_integer():
            yield int(found)


def _literal(text: str) -> Any:
    """A Python list or dictionary; some templates write arguments with Python's `str`."""
    if text.strip()[:1] not in ("[", "{") or len(text) > MAX_LITERAL_CHARS:
        raise ValueError("no literal")
    return ast.literal_eval(text.strip())


MAX_LITERAL_CHARS = 20_000
MOST_BRACKETS = 40
"""Open brackets at a time."""
JSON_SIGNS = re.compile(r'"(?:[^"\\]|\\.)*"|[\[\]{}(),]', re.DOTALL)
PYTHON_SIGNS = re.compile(r""""(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*'|[\[\]{}(),]""", re.DOTALL)
"""Strings, brackets and commas, by which a value is delimited before it is read."""
TYPES: dict[str, Any] = {
    "string": str,
    "integer": int,
    "number": (int, float),
    "boolean": bool,
    "object": dict,
    "array": list,
    "null": type(None),
}
THOUGHTS = {
    "<think>": "</think>",
    r"\[THINK\]": "[/THINK]",
    "<seed:think>": "</seed:think>",
    r"<\|channel>thought\n": "<channel|>",
    r"(?:<\|start\|>assistant)?<\|channel\|>analysis<\|message\|>": "<|end|>",
    r"(?:<\|start\|>assistant)? to=self<\|message\|>": "<|eom|>",
}
"""Patterns that open a thought, and what closes it."""
BODIES: dict[str, Callable[[str, CallFormat], dict[str, Any]]] = {
    "object": _object,
    "objects": _object,
    "arguments": _only_arguments,
    "gemma": _gemma,
    "python": _python,
    "tags": _tags,
}
LISTS = ("objects", "python")
"""Bodies that are a list of calls."""
LLAMA = r'\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?(?:"function"\s*:\s*\{\s*)?"(?:name|function)"\s*:\s*'
"""An object that is a call, up to its name."""
CALL_FORMATS: dict[str, CallFormat] = {
    # Qwen2.5, Qwen3, Qwen3-VL
    "hermes": CallFormat(r"<tool_call>", r"\s*</tool_call>", "object"),
    # Qwen3-Coder, Qwen3.5 and later, Nemotron 3
    "qwen_xml": CallFormat(
        r"<tool_call>(?:\s*<function=(?P<name>[^>\n]+)>)?",
        r"(?:</function>\s*)?</tool_call>",
        "tags",
        r"<parameter=(?P<key>[^>\n]+)>\n?(?P<value>.*?)\n?</parameter>",
    ),
    # Llama 3.1 and 3.2
    "llama_json": CallFormat(
        # what has a name alone may be an answer, and so may all that is inside of another object
        rf'(?:<\|python_tag\|>\s*)?(?={LLAMA}"(?:[^"\n]*"\s*,\s*"?(?:parameters|arguments)\b|(?:KNOWN)"\s*\}}))'
        r'|(?=(?P<other>\{\s*"))',
        None,
        "object",
        separator=r"\s*;?\s*",
    ),
    # Llama 3.2 and 4
    "pythonic": CallFormat(rf"(?:<\|python_start\|>|^)(?=\[\s*{NAME}\()", None, "python", around=r"<\|python_end\|>"),
    # LFM2 and LFM2.5
    "lfm": CallFormat(r"<\|tool_call_start\|>", r"\s*<\|tool_call_end\|>", "python"),
    # Mistral, tokenizers v11 and later
    "mistral": CallFormat(
        rf"\[TOOL_CALLS\]\s*(?P<name>{NAME})(?:\[CALL_ID\](?P<id>\w+))?(?:\[ARGS\])?\s*(?=\{{)", None, "arguments"
    ),
    # Mistral, tokenizers before v11
    "mistral_list": CallFormat(r"\[TOOL_CALLS\]\s*(?=\[)", None, "objects"),
    # DeepSeek V3.1
    "deepseek": CallFormat(
        rf"<｜tool▁call▁begin｜>(?P<name>{NAME})<｜tool▁sep｜>",
        r"\s*<｜tool▁call▁end｜>",
        "arguments",
        around=r"<｜tool▁calls▁(?:begin|end)｜>",
    ),
    # DeepSeek V3 and R1
    "deepseek_v3": CallFormat(
        rf"<｜tool▁call▁begin｜>function<｜tool▁sep｜>(?P<name>{NAME})\s*```json",
        r"\s*```\s*<｜tool▁call▁end｜>",
        "arguments",
        around=r"<｜tool▁calls▁(?:begin|end)｜>",
    ),
    # GLM-4.5 and later
    "glm": CallFormat(
        rf"<tool_call>\s*(?P<name>{NAME})?",
        r"</tool_call>",
        "tags",
        r"<arg_key>(?P<key>[^<]+)</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>",
    ),
    # gpt-oss; its template and the model itself order recipient and channel differently
    "harmony": CallFormat(
        rf"(?:<\|start\|>assistant)?(?:<\|channel\|>(?:commentary|analysis))? to=functions\.(?P<name>{NAME})"
        r"(?:<\|channel\|>(?:commentary|analysis))?(?:\s*<\|constrain\|>json|\s*json)?<\|message\|>",
        r"\s*<\|call\|>",
        "arguments",
        around=r"(?:<\|start\|>assistant)?<\|channel\|>(?:final|commentary)<\|message\|>|<\|end\|>",
    ),
    "gemma4": CallFormat(rf"<\|tool_call>call:(?P<name>{NAME})", r"<tool_call\|>", "gemma"),
    "minimax": CallFormat(
        r'<invoke name="(?P<name>[^"\n]+)">',
        r"</invoke>",
        "tags",
        r'<parameter name="(?P<key>[^"\n]+)">(?P<value>.*?)</parameter>',
        around=r"</?minimax:tool_call>",
    ),
    # Muse; each of its messages has a recipient
    "muse": CallFormat(
        r'<atem:invoke name="(?P<name>[^"\n]+)">',
        r"</atem:invoke>",
        "tags",
        r'<atem:parameter name="(?P<key>[^"\n]+)">(?P<value>.*?)</atem:parameter>',
        around=rf"(?:<\|start\|>assistant)? to={NAME}<\|message\|>|</?atem:function_calls>|<\|eom\|>",
    ),
    "kimi": CallFormat(
        rf"<\|tool_call_begin\|>\s*(?P<id>(?:functions\.)?(?P<name>{NAME}):\d+)\s*<\|tool_call_argument_begin\|>",
        r"\s*<\|tool_call_end\|>",
        "arguments",
        around=r"<\|tool_calls_section_(?:begin|end)\|>",
    ),
    # Phi-4-mini, in both forms
    "phi": CallFormat(r"functools(?=\[)", None, "objects"),
    "phi_tags": CallFormat(r"<\|tool_call\|>", r"\s*<\|/tool_call\|>", "object"),
}
"""Formats of calls by name."""
MARKS = "|".join(
    (
        "<tool_call>",
        "<function=",
        r"<\|python_tag\|>",
        r"<\|tool_call_start\|>",
        r"\[TOOL_CALLS\]",
        "<｜tool▁call▁begin｜>",
        r"\bto=functions\.",
        r"<\|tool_call\|?>",
        "<(?:atem:)?invoke name=",
        r"<\|tool_call_begin\|>",
        r"functools\[",
        rf'\A\s*{LLAMA}"[^"]*"\s*,\s*"(?:parameters|arguments)"\s*:',
    )
)
"""Beginnings of calls in any format, more general than `opens`, so that a malformed opener is found too."""
ARGUMENTS_FIRST = r'\A\s*\{\s*"(?:parameters|arguments)"\s*:(?s:.*)"(?:name|function)"\s*:\s*"(?:KNOWN)"'
"""A call of a known tool with its entries in another order than any template writes them in."""
