"""The formats in which models write actions, one reader each.

A reader takes the answer without its thinking and whether to be strict; it returns the thought written around the
actions, and the name and arguments of each. It raises only `UnreadableError`, and takes time linear in the answer.
"""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

MAX_CALL_CHARS = 20_000
MAX_DEPTH = 8
"""Nesting of lists and dicts."""
MAX_NUMBER = 1e15
"""Integers up to here are exact as floats; no action needs a larger one."""
NAME = r"[A-Za-z_][A-Za-z_0-9]*"
CALL = re.compile(rf"\s*({NAME})\s*\(")
# Text outside these tokens is refused before Python's parser sees it, so that no expression can nest or chain.
TOKEN = re.compile(
    rf"""\s+ | '(?:[^'\\\n]|\\.)*' | "(?:[^"\\\n]|\\.)*" | [-+]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+)?(?![\w.])
    | (?:True|False|None)\b | {NAME}\s*=(?!=) | [,:] | (?P<open>[(\[{{]) | (?P<close>[)\]}}])""",
    re.VERBOSE | re.DOTALL | re.ASCII,
)


Parameters = Mapping[str, Sequence[str]]
"""Names of an action's parameters in their order, by the action's name."""
NO_PARAMETERS: Parameters = {}


class UnreadableError(ValueError):
    """The response has no readable action."""

    def __init__(self, code: str, detail: str) -> None:
        super().__init__(detail)
        self.code = code
        self.detail = detail


def read_literal(text: str) -> Any:
    """Read text, numbers, None, lists and dicts as Python writes them, without running anything; tuples are lists.

    Raises:
        UnreadableError: it is something else, too long or too deep.
    """
    value = _value(_parse(text.strip(), 0))
    check_value(value)
    return value


def read_call(text: str, parameters: Parameters = NO_PARAMETERS) -> tuple[str, dict[str, Any]]:
    """Read a call such as `click(start_box='(10,20)', times=2)`; `parameters` name the arguments of `click('12')`."""
    name, values, arguments = parse_call(text)
    if not values:
        return name, arguments
    known = parameters.get(name, ())
    if not known:
        raise UnreadableError("wrong_shape", f"{name} has an argument without a name; write {name}(name=value)")
    if len(values) > len(known):
        raise UnreadableError("wrong_shape", f"{name} takes {len(known)} arguments, but {len(values)} are given")
    placed = dict(zip(known, values, strict=False))
    if twice := placed.keys() & arguments.keys():
        raise UnreadableError("duplicate", f"{name} has an argument twice: {', '.join(sorted(twice))}")
    return name, placed | arguments


def parameters_of(tools: Sequence[Mapping[str, Any]]) -> dict[str, tuple[str, ...]]:
    """Names of the parameters of each tool, in the order of its JSON schema."""
    functions = [tool["function"] for tool in tools]
    return {one["name"]: tuple((one.get("parameters") or {}).get("properties") or ()) for one in functions}


def referenced(schema: Mapping[str, Any], root: Mapping[str, Any]) -> Any:
    """The part of the root schema that a `$ref` such as `#/$defs/Unit` points to; None if there is none."""
    first, *keys = str(schema.get("$ref")).split("/")
    found: Any = root if first == "#" else None
    for key in keys:
        # JSON pointers write ~ and / like this
        key = key.replace("~1", "/").replace("~0", "~")
        found = found.get(key) if isinstance(found, Mapping) else None
    return found


def parse_call(text: str) -> tuple[str, list[Any], dict[str, Any]]:
    """Name, arguments without a name, and named arguments of a call."""
    call = CALL.match(text)
    if call is None:
        raise UnreadableError("malformed", f"{text[:80]!r} is no call")
    node = _parse(text, call.end() - 1)
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
        raise UnreadableError("malformed", f"{text[:80]!r} is no call")
    if any(keyword.arg is None for keyword in node.keywords):
        raise UnreadableError("wrong_shape", f"{call[1]} has an argument without a name; write {call[1]}(name=value)")
    names = [str(keyword.arg) for keyword in node.keywords]
    if len(set(names)) < len(names):
        raise UnreadableError("duplicate", f"{call[1]} has an argument twice: {', '.join(names)}")
    values = [_value(value) for value in node.args]
    arguments = {str(keyword.arg): _value(keyword.value) for keyword in node.keywords}
    check_value(values)
    check_value(arguments)
    return call[1], values, arguments


def whole_text(text: str) -> str:
    """The text with U+FFFD for each half of a surrogate pair, as of a text that was cut inside an emoji."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def check_value(value: Any, deepest: int = MAX_DEPTH, largest: float = MAX_NUMBER, depth: int = 0) -> None:
    """Reject numbers that are not finite or beyond `largest`, nesting beyond `deepest`, and halves of characters."""
    if depth > deepest:
        raise UnreadableError("too_deep", f"lists and dicts nest deeper than {deepest}")
    # bool is an int in Python and passes, as it should; no comparison with NaN is true
    if isinstance(value, (int, float)) and not abs(value) <= largest:
        raise UnreadableError("bad_number", f"a number is not finite, or larger than {largest:.2g}")
    # JSON can write half of a surrogate pair, which no tokenizer and no server takes
    if isinstance(value, str) and whole_text(value) != value:
        raise UnreadableError("malformed", f"{value[:80]!a} has half of a character")
    if isinstance(value, dict):
        value = [*value, *value.values()]
    if isinstance(value, (list, tuple)):
        for entry in value:
            check_value(entry, deepest, largest, depth + 1)


def _parse(text: str, start: int) -> ast.expr:
    """Parse an expression after checking that it has only harmless tokens from `start` on."""
    if len(text) > MAX_CALL_CHARS:
        raise UnreadableError("too_long", f"an action of {len(text)} characters; at most {MAX_CALL_CHARS} are read")
    position, depth = start, 0
    while position < len(text):
        token = TOKEN.match(text, position)
        depth += 0 if token is None else bool(token["open"]) - bool(token["close"])
        if token is None:
            raise UnreadableError("malformed", f"{text[position : position + 40]!r} is no literal")
        if depth > MAX_DEPTH + 1:
            raise UnreadableError("too_deep", f"brackets nest deeper than {MAX_DEPTH}")
        # each token matches at least one character, so the scan takes linear time
        position = token.end()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # unknown escapes in strings
            return ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise UnreadableError("malformed", f"{text[:80]!r}: {str(error)[:120]}") from None


def _value(node: ast.expr) -> Any:
    if isinstance(node, ast.Constant) and isinstance(node.value, (str, int, float, type(None))):
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.USub, ast.UAdd)):
        number = _value(node.operand)
        if type(number) in (int, float):
            # Python's parser reads -1 as an operator applied to 1
            return -number if isinstance(node.op, ast.USub) else number
    if isinstance(node, (ast.Tuple, ast.List)):
        # tuples become lists: JSON has no tuples, and both ways of writing should be equal actions
        return [_value(entry) for entry in node.elts]
    if isinstance(node, ast.Dict):
        keys = [None if key is None else _value(key) for key in node.keys]
        if not all(isinstance(key, str) for key in keys):
            raise UnreadableError("wrong_shape", "the keys of a dict must be text")
        if len(set(keys)) < len(keys):
            raise UnreadableError("duplicate", "a dict has a key twice")
        return dict(zip(keys, map(_value, node.values), strict=True))
    raise UnreadableError("wrong_shape", f"a {type(node).__name__} is no value of an action")


NamedAction = tuple[str, dict[str, Any]]
Found = tuple[str, list[NamedAction]]

SAY = "say"
"""Name of the action if the whole response is the action."""
MAX_CANDIDATES = 256
"""Maximum number of possible starts of an object to try in a response."""
MAX_NAME_CHARS = 200
MAX_DIGITS = 20
OBJECT = re.compile(r'\{\s*"')
THOUGHTS = ("thoughts", "thought", "reasoning")
ARGUMENTS = ("arguments", "parameters", "args")
MARKER = re.compile(r"^[ \t]*Action:", re.MULTILINE)
OPEN, CLOSE = re.compile(r"<action>", re.IGNORECASE), re.compile(r"</action>", re.IGNORECASE)


def read_object(text: str, strict: bool, parameters: Parameters = NO_PARAMETERS) -> Found:
    """Read a JSON object with `thoughts` and `action`.

    `action` is a name, a number, or an object with `name` and `arguments`; or a list of these. Strict: the answer is
    this object and nothing else. Tolerant: the first such object in the answer, fenced or not; arguments may also be
    given next to a name, and a name may be written as a call.
    """
    if not strict:
        return _first_object(text, parameters)
    if not text.startswith("{"):
        raise UnreadableError("no_action", f"the answer begins with {text[:20]!r}, not with a JSON object")
    value, end = decode_json(text)
    if end < len(text):
        raise UnreadableError("extra_text", f"unexpected text after the JSON object: {text[end : end + 40]!r}")
    return actions_in(value, strict)


def read_calls(text: str, strict: bool, parameters: Parameters = NO_PARAMETERS) -> Found:
    """Read `Thought: ...` and `Action: name(key=value)`, several calls with a blank line between them.

    Strict: the lines begin with these words, and nothing else is there. Tolerant: the text after the last `Action:`,
    or from the first line that begins with a call; text after the calls is ignored, quotes inside the only argument
    of a call need no escape, and arguments of actions with known `parameters` need no names.
    """
    markers = list(MARKER.finditer(text))
    if strict and len(markers) != 1:
        raise UnreadableError("no_action", f"{len(markers)} lines begin with Action:, expected one")
    if markers:
        before, calls = text[: markers[-1].start()], text[markers[-1].end() :]
    else:
        before, calls = _from_first_call(text)
    thought = before.strip()
    if strict and thought and not thought.startswith("Thought:"):
        raise UnreadableError(
            "extra_text", f"unexpected text before Action: {thought[:40]!r}; only Thought: may come before it"
        )
    pieces = _split_calls(calls.strip().strip("`").strip(), strict)
    return thought.removeprefix("Thought:").strip(), [_call(piece, strict, parameters) for piece in pieces]


def read_text(text: str, strict: bool) -> Found:
    """Take the whole response, stripped of surrounding white space, as the argument `text` of the action `say`."""
    return "", [(SAY, {"text": text})]


def read_tags(text: str, strict: bool, parameters: Parameters = NO_PARAMETERS) -> Found:
    """Read `<action>3</action>`: a name, a number or a call between tags, with thoughts in front of them.

    Strict: each opening tag has its closing one, without text between and after them. Tolerant: any case, text after
    a tag is ignored, a closing tag may be missing at the end of the answer, and arguments of actions with known
    `parameters` need no names.
    """
    opening = OPEN.search(text) if not strict else re.search("<action>", text)
    if opening is None:
        raise UnreadableError("no_action", "there is no <action> in the answer")
    thought = text[: opening.start()].strip()
    found = []
    position = opening.start()
    while opening is not None:
        between = text[position : opening.start()].strip()
        if strict and between:
            raise UnreadableError("extra_text", f"unexpected text between two actions: {between[:40]!r}")
        closing = CLOSE.search(text, opening.end())
        if closing is None and strict:
            raise UnreadableError("malformed", "an <action> is not closed")
        end = len(text) if closing is None else closing.start()
        found.append(_tagged(text[opening.end() : end].strip(), strict, parameters))
        position = end if closing is None else closing.end()
        opening = OPEN.search(text, position)
    if strict and text[position:].strip():
        raise UnreadableError("extra_text", f"unexpected text after the action: {text[position:].strip()[:40]!r}")
    return thought, found


def _first_object(text: str, parameters: Parameters) -> Found:
    """Read the first object that has the shape of an action."""
    position, problem = 0, UnreadableError("no_action", "there is no JSON object with an action in the answer")
    for _ in range(MAX_CANDIDATES):
        candidate = OBJECT.search(text, position)
        if candidate is None:
            break
        # the next candidate may begin inside this one, if this one turns out not to be an object
        position = candidate.start() + 1
        try:
            value, position = decode_json(text, candidate.start())
        except UnreadableError as error:
            if error.code not in ("malformed", "too_deep"):
                raise  # the object could be read but for a number or a repeated key
            problem = error
            continue
        # other objects, such as an example in the thoughts, are passed over
        if isinstance(value, dict) and ("action" in value or "name" in value):
            return actions_in(value, False, parameters)
    raise problem


def actions_in(value: Any, strict: bool, parameters: Parameters = NO_PARAMETERS) -> Found:
    """Thought and actions of a JSON object."""
    check_value(value)
    if not isinstance(value, dict):
        raise UnreadableError("wrong_shape", f"the answer is a {type(value).__name__}, expected an object")
    if not strict and "action" not in value:
        return _thought_in(value, strict), [_named(value, strict, parameters)]
    if "action" not in value:
        raise UnreadableError("wrong_shape", "the object has no action")
    action = value["action"]
    rest = {key: entry for key, entry in value.items() if key != "action" and key not in THOUGHTS}
    if strict and set(rest) - {"arguments"}:
        raise UnreadableError("wrong_shape", f"the object has more than thoughts and action: {', '.join(rest)[:80]}")
    thought = _thought_in(value, strict)
    if isinstance(action, list):
        return thought, [_named(each, strict, parameters) for each in action]
    if rest and not isinstance(action, dict):
        return thought, [_named({"name": action, **rest}, strict, parameters)]
    return thought, [_named(action, strict, parameters)]


def _thought_in(value: Mapping[str, Any], strict: bool) -> str:
    thought = next((value[key] for key in THOUGHTS if key in value), "")
    if strict and not isinstance(thought, str):
        raise UnreadableError("wrong_shape", f"thoughts is a {type(thought).__name__}, expected text")
    return thought.strip() if isinstance(thought, str) else json.dumps(thought)


def _named(value: Any, strict: bool, parameters: Parameters) -> NamedAction:
    """Name and arguments of an action in JSON."""
    if type(value) is int:
        return str(value), {}
    if isinstance(value, str) and value.strip():
        if not strict and CALL.match(value):
            return read_call(value, parameters)
        return _name(value), {}
    if not isinstance(value, dict) or type(value.get("name", value.get("action"))) not in (str, int):
        raise UnreadableError("wrong_shape", "an action is a name, or an object with a name and arguments")
    name = _name(str(value["name"] if "name" in value else value["action"]))
    rest = {key: entry for key, entry in value.items() if key not in ("name", "action", *THOUGHTS)}
    key = "arguments" if strict else next((key for key in ARGUMENTS if key in rest), "arguments")
    # without an `arguments` entry, the other entries are the arguments (tolerant only)
    arguments = rest.pop(key, None if rest and not strict else {})
    if arguments is None:
        return name, rest
    if rest or not isinstance(arguments, dict):
        raise UnreadableError("wrong_shape", f"the action {name} needs its arguments as one object")
    return name, arguments


def _name(text: str) -> str:
    name = text.strip()
    if not name or len(name) > MAX_NAME_CHARS or "\n" in name:
        raise UnreadableError("wrong_shape", f"{name[:40]!r} is no name of an action: one line, {MAX_NAME_CHARS} long")
    return name


def _from_first_call(text: str) -> tuple[str, str]:
    position = 0
    for line in text.splitlines(keepends=True):
        if CALL.match(line):
            return text[:position], text[position:]
        position += len(line)
    raise UnreadableError("no_action", "no line of the answer is a call such as click(x=1)")


def _split_calls(text: str, strict: bool) -> list[str]:
    """Cut before a line that begins a call where the call before it has ended; strict asks for a blank line there."""
    pieces: list[list[str]] = [[]]
    blank = False
    for line in text.splitlines():
        if not line.strip():
            blank = True
            continue
        ended = bool(pieces[-1]) and pieces[-1][-1].rstrip().endswith(")")
        if ended and CALL.match(line) and (blank or not strict):
            pieces.append([])
        elif ended and not strict:
            break
        pieces[-1].append(line)
        blank = False
    return ["\n".join(piece) for piece in pieces]


def _call(text: str, strict: bool, parameters: Parameters) -> NamedAction:
    try:
        return read_call(text, NO_PARAMETERS if strict else parameters)
    except UnreadableError as error:
        only = re.fullmatch(r"\s*(\w+)\(\s*(\w+)\s*=\s*(['\"])(.*)\3\s*\)\s*", text, re.DOTALL)
        if strict or error.code != "malformed" or only is None or re.search(r"['\"]\s*,\s*\w+\s*=", only[4]):
            raise
        return only[1], {only[2]: only[4]}


def _tagged(text: str, strict: bool, parameters: Parameters) -> NamedAction:
    if CALL.match(text):
        return _call(text, strict, parameters)
    return _name(text if strict else text.strip("'\"` \t")), {}


def decode_json(text: str, start: int = 0, *, strict: bool = True) -> tuple[Any, int]:
    """The JSON value at a position and its end; not strict: its strings may contain raw newlines."""
    try:
        return (_DECODER if strict else _TOLERANT).raw_decode(text, start)
    except UnreadableError:
        raise
    except RecursionError:
        raise UnreadableError("too_deep", "the JSON nests too deep") from None
    except ValueError as error:
        raise UnreadableError("malformed", f"the JSON cannot be read: {str(error)[:120]}") from None


def _pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise UnreadableError("duplicate", "an object has a key twice")
    return found


def _whole_number(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise UnreadableError("bad_number", f"a number has {len(digits)} digits")
    return int(digits)


def _refuse_constant(name: str) -> Any:
    raise UnreadableError("bad_number", f"{name} is no number of JSON")


_DECODER, _TOLERANT = (
    json.JSONDecoder(object_pairs_hook=_pairs, parse_constant=_refuse_constant, parse_int=_whole_number, strict=strict)
    for strict in (True, False)
)


def write_object(thought: str, actions: Sequence[NamedAction]) -> str:
    """A JSON object with thoughts and action; an action without arguments is its name."""
    plain = [{"name": name, "arguments": dict(arguments)} if arguments else name for name, arguments in actions]
    body = {"thoughts": thought, "action": plain[0] if len(plain) == 1 else plain}
    return json.dumps(body if thought else {"action": body["action"]}, ensure_ascii=False, allow_nan=False)


def write_calls(thought: str, actions: Sequence[NamedAction]) -> str:
    """`Thought: ...` and `Action: name(key=value)`, with a blank line between several."""
    calls = "\n\n".join(_written_call(name, arguments) for name, arguments in actions)
    return f"Thought: {thought}\nAction: {calls}" if thought else f"Action: {calls}"


def write_tags(thought: str, actions: Sequence[NamedAction]) -> str:
    """The thought, and each action between tags; one with arguments as a call."""
    tags = [f"<action>{_written_call(name, arguments) if arguments else name}</action>" for name, arguments in actions]
    return " ".join([thought, *tags] if thought else tags)


def write_text(thought: str, actions: Sequence[NamedAction]) -> str:
    """The text of the one action `say`, without a thought, which would be read as part of it."""
    if thought or [(name, [*arguments]) for name, arguments in actions] != [(SAY, ["text"])]:
        raise ValueError(f"the format text can only express one action {SAY} with the argument text")
    return str(actions[0][1]["text"])


def _written_call(name: str, arguments: Mapping[str, Any]) -> str:
    for word in (name, *arguments):
        if not re.fullmatch(NAME, word):
            raise ValueError(f"{word!r} cannot be written in a call; a name has letters, digits and underscores")
    return f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"
