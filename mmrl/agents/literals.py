"""Calls in Python's notation, read without running anything: literals, lists, tuples and dicts only."""

from __future__ import annotations

import ast
import math
import re
import warnings
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


class UnreadableError(ValueError):
    """The answer has no readable action."""

    def __init__(self, code: str, detail: str) -> None:
        super().__init__(detail)
        self.code, self.detail = code, detail


def read_call(text: str) -> tuple[str, dict[str, Any]]:
    """Read a call such as `click(start_box='(10,20)', times=2)`."""
    call = CALL.match(text)
    if call is None:
        raise UnreadableError("malformed", f"{text[:80]!r} is no call")
    node = _parse(text, call.end() - 1)
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
        raise UnreadableError("malformed", f"{text[:80]!r} is no call")
    if node.args or any(keyword.arg is None for keyword in node.keywords):
        raise UnreadableError("wrong_shape", f"{call[1]} has an argument without a name; write {call[1]}(name=value)")
    names = [str(keyword.arg) for keyword in node.keywords]
    if len(set(names)) < len(names):
        raise UnreadableError("duplicate", f"{call[1]} has an argument twice: {', '.join(names)}")
    arguments = {str(keyword.arg): _value(keyword.value) for keyword in node.keywords}
    check_value(arguments)
    return call[1], arguments


def check_value(value: Any, depth: int = 0) -> None:
    """Refuse numbers that are not finite or beyond `MAX_NUMBER`, and nesting deeper than `MAX_DEPTH`."""
    if depth > MAX_DEPTH:
        raise UnreadableError("too_deep", f"lists and dicts nest deeper than {MAX_DEPTH}")
    if isinstance(value, (int, float)) and not (math.isfinite(value) and abs(value) <= MAX_NUMBER):
        raise UnreadableError("bad_number", "a number is not finite, or larger than 1e15")
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        for entry in value:
            check_value(entry, depth + 1)


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
            return -number if isinstance(node.op, ast.USub) else number
    if isinstance(node, (ast.Tuple, ast.List)):
        return [_value(entry) for entry in node.elts]
    if isinstance(node, ast.Dict):
        keys = [None if key is None else _value(key) for key in node.keys]
        if not all(isinstance(key, str) for key in keys):
            raise UnreadableError("wrong_shape", "the keys of a dict must be text")
        if len(set(keys)) < len(keys):
            raise UnreadableError("duplicate", "a dict has a key twice")
        return dict(zip(keys, map(_value, node.values), strict=True))
    raise UnreadableError("wrong_shape", f"a {type(node).__name__} is no value of an action")
