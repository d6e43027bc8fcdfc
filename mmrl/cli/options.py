"""Options of a configuration's dataclass: key, description, type, default and bounds.

Sentences are the strings under the fields; they are read from the source, since Python does not keep them.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import functools
import inspect
import itertools
import math
import re
import textwrap
import types
import typing
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from mmrl.config import NAMES_ELSEWHERE
from mmrl.errors import UserError
from mmrl.fields import Bounds, Kinds, bounds_of, default_of, hints_of, part_of, readers_of

REQUIRED = "???"
"""Default of a required value, as in OmegaConf."""


@dataclass(frozen=True)
class Option:
    """One key of a configuration."""

    key: str
    """Dotted key; `<name>` is a name chosen by the user and `[]` an index of a list."""
    help: str
    """Its description; empty if the source has none."""
    type: str
    """Its type as written in Python; for a part, the name of its dataclass."""
    default: Any
    """Its default; None if it is empty or the option is required."""
    bounds: str
    """Bounds beyond the type; may be empty."""
    required: bool = False
    """Whether it is required."""
    part: bool = False
    """Whether it only groups the options that follow."""
    kinds: tuple[str, ...] = ()
    """Kinds that have this option; empty if all have it."""
    default_from: str = ""
    """Origin of the default, if it is not fixed."""
    rare: bool = False
    """Whether few users ever set it."""
    on_request: bool = False
    """Whether even `--all` omits it: it belongs to a kind that the preset does not use, or repeats another part's
    option."""
    read_with: str = ""
    """Values of other options that it requires to have an effect."""

    @property
    def facts(self) -> str:
        """Type, bounds, default and the options that it needs, in one line."""
        kinds = f"for {', '.join(self.kinds)}" if self.kinds else ""
        default = "required" if self.required else f"default {self.default_text}"
        needs = f"only with {self.read_with}" if self.read_with else ""
        return "; ".join(filter(None, (self.type, kinds, self.bounds, default, needs)))

    @property
    def default_text(self) -> str:
        """The default as it would be written in a configuration file."""
        return self.default_from or _as_yaml(self.default)


def options_of(defaults: Any) -> list[Option]:
    """List every option of a configuration, each part before its options."""
    is_class = isinstance(defaults, type)
    return _marked(list(_walk(defaults if is_class else type(defaults), None if is_class else defaults, "")))


def _marked(options: list[Option]) -> list[Option]:
    """Mark rare options that repeat those of another part, such as of a second model, as on request."""
    first: dict[tuple[str, ...], str] = {}
    for option in sorted(options, key=lambda each: (each.rare, each.key.count("."))):
        first.setdefault(_sense(option), option.key)
    return [
        dataclasses.replace(option, on_request=True) if option.rare and first[_sense(option)] != option.key else option
        for option in options
    ]


def _sense(option: Option) -> tuple[str, ...]:
    return option.key.rpartition(".")[2], option.help, option.type, option.bounds


def own_first(options: Sequence[Option], defaults: Any) -> list[Option]:
    """Sort the options of a configuration: its own class first, then each base class."""
    lineage = (defaults if isinstance(defaults, type) else type(defaults)).__mro__
    depth = {name: place for place, base in enumerate(lineage) for name in inspect.get_annotations(base)}
    return sorted(options, key=lambda option: depth[re.split(r"[.[]", option.key)[0]])


def of_the_preset(options: Sequence[Option]) -> list[Option]:
    """Drop options shown only on request, and the names of the kinds that share an option of the preset's kind."""
    found = [option for option in options if not option.on_request]
    return [dataclasses.replace(option, kinds=()) if option.default_from else option for option in found]


def select_options(options: Sequence[Option], prefix: str) -> list[Option]:
    """Select the options at or below a dotted key, or else options with a word that begins so in key or description."""
    inside = (f"{prefix}.", f"{prefix}[")
    word = re.compile(rf"(?<![a-z]){re.escape(prefix)}", re.IGNORECASE)
    chosen = [option for option in options if option.key == prefix or option.key.startswith(inside)]
    chosen = chosen or [option for option in options if word.search(f"{option.key} {option.help}")]
    if chosen:
        return chosen
    keys = [option.key for option in options]
    name = prefix.rpartition(".")[2]
    same_name = [key for key in keys if key.rpartition(".")[2] == name or key == NAMES_ELSEWHERE.get(name, ("",))[0]]
    close = same_name or difflib.get_close_matches(prefix, keys, n=3, cutoff=0.5)
    parts = [key for key in keys if "." not in key]
    hint = f"did you mean {', '.join(close[:3])}? " if close else ""
    raise UserError(f"unknown option '{prefix}'; {hint}options begin with: {', '.join(parts)}")


def json_schema(defaults: Any) -> dict[str, Any]:
    """JSON schema (draft 2020-12) of a configuration: keys, types, bounds, sentences and defaults."""
    schema = _object_schema(defaults if isinstance(defaults, type) else type(defaults))
    schema["properties"]["extends"] = {
        "type": "string",
        "description": "File that this one extends; its values are the defaults.",
    }
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def _object_schema(schema: type[Any]) -> dict[str, Any]:
    hints, sentences, properties = hints_of(schema), _sentences(schema), {}
    for item in dataclasses.fields(schema):
        default = default_of(item)
        hint = type(default) if dataclasses.is_dataclass(default) else hints[item.name]
        found = _type_schema(hint, bounds_of(item))
        if not dataclasses.is_dataclass(default) and default not in (dataclasses.MISSING, REQUIRED):
            found["default"] = _plain(default)
        properties[item.name] = {"description": sentences.get(item.name, ""), **found}
    return {"type": "object", "properties": properties, "additionalProperties": False}


def _type_schema(hint: Any, bounds: Bounds | None = None) -> dict[str, Any]:
    """Schema of an annotation, with bounds for its numbers."""
    if bounds is not None and bounds.choices is not None:
        values = [*bounds.allowed, *([None] if type(None) in typing.get_args(hint) else [])]
        named: dict[str, Any] = {"enum": values}
        return {"anyOf": [named, {"type": "string", "pattern": ":"}]} if bounds.or_function else named
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return {"anyOf": [_type_schema(option, bounds) for option in arguments]}
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return _object_schema(hint)
    if origin in (list, tuple) and arguments:
        return {"type": "array", "items": _type_schema(arguments[0], bounds)}
    if origin is dict and arguments:
        return {"type": "object", "additionalProperties": _type_schema(arguments[1])}
    name = {bool: "boolean", int: "integer", float: "number", str: "string", type(None): "null"}.get(hint)
    name = name or {list: "array", dict: "object"}.get(hint)
    found: dict[str, Any] = {} if name is None else {"type": name}
    if bounds is not None and name in ("integer", "number"):
        limits = {
            "minimum": bounds.at_least,
            "exclusiveMinimum": bounds.above,
            "maximum": bounds.at_most,
            "exclusiveMaximum": bounds.below,
            "multipleOf": bounds.multiple_of,
        }
        found |= {key: limit for key, limit in limits.items() if limit is not None and abs(limit) != math.inf}
    return found


def _walk(
    schema: type[Any], instance: Any, prefix: str, rare: bool = False, on_request: bool = False
) -> Iterator[Option]:
    """Options of a dataclass, with the defaults of the instance if there is one."""
    used = instance.kinds() if hasattr(instance, "kinds") else None
    hints = hints_of(schema)
    sentences = _sentences(schema)
    parts = {part_of(hint)[0] for hint in hints.values() if not part_of(hint)[1]}
    for item in dataclasses.fields(schema):
        key, hint = f"{prefix}{item.name}", hints[item.name]
        default = default_of(item) if instance is None else getattr(instance, item.name)
        required = default is dataclasses.MISSING or default == REQUIRED
        part, suffix = part_of(hint)
        bounds, kinds = bounds_of(item), item.metadata.get("kinds")
        hidden = rare or "rare" in item.metadata
        yield Option(
            key=key,
            help=sentences.get(item.name, ""),
            type=_type_words(hint),
            default=None if required or (part is not None and not suffix) else _plain(default),
            bounds="" if bounds is None else str(bounds),
            required=required,
            part=(part is not None and not suffix) or (kinds is not None and kinds.named),
            rare=hidden or kinds is not None,  # the options of its kinds follow
            on_request=on_request,
            read_with=readers_of(item, prefix),
        )
        if kinds is not None:
            yield from _by_kind(kinds, key, hidden, on_request, None if used is None else used.get(item.name, ""))
        if part is not None:
            inside = default if dataclasses.is_dataclass(default) else None
            repeated = suffix == ".<name>" and part in parts  # such as eval_data, whose entries are like `data`
            kind, asked = part if inside is None else type(inside), on_request or repeated
            yield from _walk(kind, inside, f"{key}{suffix}.", hidden or repeated, asked)


def _by_kind(kinds: Kinds, key: str, rare: bool, on_request: bool, used: str | None) -> Iterator[Option]:
    """Options of every kind; one that several kinds share is listed once. `used` is the preset's kind, if known."""
    table = kinds.table()
    if kinds.named and len(table) > 1:
        bounds = f"one of {', '.join(table)}"
        yield Option(
            f"{key}.kind",
            f"Which kind of {key.rpartition('.')[2]} to use.",
            "str",
            None,
            bounds,
            default_from=f"{kinds.default_from}, {used}" if used else kinds.default_from,
            rare=rare,
            on_request=on_request,
        )
    found: dict[Option, list[str]] = {}
    for kind, schema in table.items():
        for option in _walk(schema, None, f"{key}.", rare):
            if option.key.removeprefix(f"{key}.") not in kinds.without:
                default = None if kinds.default_from else _hashable(option.default)
                alike = dataclasses.replace(option, default=default, default_from=kinds.default_from)
                found.setdefault(alike, []).append(kind)
    for option, names in found.items():
        unused = used is not None and used not in names
        yield dataclasses.replace(option, kinds=tuple(names), on_request=on_request or unused)


def _hashable(value: Any) -> Any:
    return tuple(map(_hashable, value)) if isinstance(value, list) else value


def _sentences(schema: type[Any]) -> dict[str, str]:
    """Field to the string under it, of the class and its bases."""
    found: dict[str, str] = {}
    for base in reversed(schema.__mro__):
        if dataclasses.is_dataclass(base):
            found |= _sentences_in(base)
    return found


@functools.cache
def _sentences_in(schema: type[Any]) -> dict[str, str]:
    try:
        (definition,) = ast.parse(textwrap.dedent(inspect.getsource(schema))).body
    except (OSError, TypeError, SyntaxError, ValueError):  # a class without source, such as one made in a notebook
        return {}
    found = {}
    body = getattr(definition, "body", [])
    for statement, below in itertools.pairwise(body):
        if not (isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)):
            continue
        if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
            found[statement.target.id] = " ".join(str(below.value.value).split())
    return found


def _type_words(hint: Any) -> str:
    """An annotation as written in the source, without module names."""
    if hint is type(None):
        return "None"
    arguments = typing.get_args(hint)
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        return " | ".join(map(_type_words, arguments))
    if origin is not None and arguments:
        return f"{origin.__name__}[{', '.join('...' if x is Ellipsis else _type_words(x) for x in arguments)}]"
    return getattr(hint, "__name__", str(hint))


def _plain(value: Any) -> Any:
    """A default as plain JSON values."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {item.name: _plain(getattr(value, item.name)) for item in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {str(key): _plain(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(part) for part in value]
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)


def _as_yaml(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_as_yaml, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key}: {_as_yaml(part)}' for key, part in value.items())}}}"
    return str(value) or "''"
