"""Configuration files: YAML over dataclass defaults, dotted overrides, and errors that name the known keys."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import io
import json
import os
import re
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from mmrl.entries import renamed
from mmrl.errors import UserError, did_you_mean
from mmrl.fields import check_fields, default_of, hints_of, options_of, part_of
from mmrl.files import expanded, is_file, own_config, read_text, read_yaml_text, write_atomically
from mmrl.fixed import Fixed, fixed_options
from mmrl.trust import check_foreign, named_code, restricted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from omegaconf import DictConfig

    from mmrl.recipes import RecipeEntry

ConfigT = TypeVar("ConfigT")
TEXTS = {str, type(None)}
MISREAD_NUMBER = re.compile(r"[-+]?(0[0-7_]+|\d[\d_]*(:[0-5]?\d)+(\.[\d_]*)?)")
"""Octal and sexagesimal numbers of YAML 1.1, which are seldom meant as such."""
ODD_NUMBER = re.compile(rf"{MISREAD_NUMBER.pattern}|[-+]?\d+_[\d_]*")
"""They and digits with underscores, which a shell's user seldom means as a number."""


def load_run(path: Path | str, overrides: Sequence[str] = ()) -> tuple[RecipeEntry, Any]:
    """Read a run's configuration with the schema of its recipe."""
    return _filled_run(_merge_sources(Path(path), overrides), str(path))


def run_from_values(values: Mapping[str, Any], where: str) -> tuple[RecipeEntry, Any]:
    """`load_run` for nested values such as a YAML file would contain; literal text must be `escaped`."""
    from omegaconf import OmegaConf

    return _filled_run(OmegaConf.create(dict(values)), where)


@contextlib.contextmanager
def foreign_run(
    path: Path | str, overrides: Sequence[str] = (), allow: Sequence[str] = (), written: Path | None = None
) -> Iterator[tuple[RecipeEntry, Any]]:
    """`load_run` for a file that someone else may have written, such as a run's config.yaml.

    Code that it names is refused unless a run of this user wrote the file, or `allow` or an override names it; inside
    the context nothing else is loaded. `written` is the file that the configuration is a part of, if not `path`.
    """
    from omegaconf import OmegaConf

    merged = _merge_sources(Path(path), overrides)
    # what the user types on the command line is the user's own decision
    own = named_code(OmegaConf.to_container(_with_overrides(OmegaConf.create(), overrides)))
    file = written or own_config(Path(path))
    text = read_text(file, errors="surrogateescape")
    # checked on the merged values: a base file may name code too
    names = check_foreign(OmegaConf.to_container(merged), text, str(file), [*allow, *own])
    with restricted(names):
        yield _filled_run(merged, str(written or path))


def given_values(path: Path | str, overrides: Sequence[str] = ()) -> Any:
    """Plain values of a file and its overrides, before validation and without defaults."""
    from omegaconf import OmegaConf

    return OmegaConf.to_container(_merge_sources(Path(path), overrides))


def _filled_run(merged: Any, path: str) -> tuple[RecipeEntry, Any]:
    from omegaconf.errors import OmegaConfBaseException

    from mmrl.recipes import find_recipe

    try:
        # read before the rest, since the recipe decides which keys exist
        name = merged.get("recipe")
    except OmegaConfBaseException as error:
        raise UserError(f"{path}: 'recipe': {_first_line(error)}") from error
    if name is None:
        raise UserError(f"{path}: no `recipe:` key; `mmrl list recipes` shows the names")
    entry = find_recipe(str(name), where=path)
    return entry, _fill(entry.load_defaults(), merged, where=path)


def load(path: Path | str, schema: type[ConfigT], overrides: Sequence[str] = ()) -> ConfigT:
    """Read a YAML file into an instance of a dataclass."""
    filled: ConfigT = _fill(schema, _merge_sources(Path(path), overrides), where=str(path))
    return filled


def fill(defaults: Any, overrides: Sequence[str], where: str) -> Any:
    """Apply dotted overrides to a dataclass or to an instance of one, without a file."""
    from omegaconf import OmegaConf

    return _fill(defaults, _with_overrides(OmegaConf.create(), overrides), where)


def from_values(schema: type[ConfigT], values: Mapping[str, Any], where: str) -> ConfigT:
    """Make a dataclass from a dictionary, with the checks of a file; texts are taken as they are."""
    from omegaconf import OmegaConf

    filled: ConfigT = _fill(schema, OmegaConf.create(escaped(dict(values))), where)
    return filled


def escaped(values: Any) -> Any:
    """Escape nested values so that OmegaConf reads their text literally: each `${` has a backslash before it."""
    if isinstance(values, dict):
        return {key: escaped(value) for key, value in values.items()}
    if isinstance(values, list | tuple):
        return [escaped(value) for value in values]
    if isinstance(values, str):
        # each backslash before `${` is doubled and one added, or OmegaConf would resolve it
        return re.sub(r"(\\*)\$\{", r"\1\1\\${", values)
    return values


def as_override(key: str, value: Any) -> str:
    """A value of a configuration file as `a.b=c`, quoted if YAML would otherwise misread it; see `escaped`."""
    text = value if isinstance(value, str) else _flow(value)
    same = _reads_as(text) == (value,)
    return f"{key}={text if same else json.dumps(value, ensure_ascii=False)}"


# an experiment writes the same few values for each of its runs
@functools.lru_cache(maxsize=4096)
def _reads_as(text: str) -> tuple[Any, ...]:
    """How OmegaConf reads an override's text, as a tuple of one; empty if it is not YAML at all."""
    from omegaconf import OmegaConf

    try:
        return (OmegaConf.to_container(OmegaConf.from_dotlist([f"x={text}"]))["x"],)  # type: ignore[call-overload,index]
    except Exception:
        return ()


def _flow(value: Any) -> str:
    """YAML in one line."""
    if isinstance(value, list):
        return f"[{', '.join(as_override('', item)[1:] for item in value)}]"
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else repr(value)


def save(config: Any, path: Path) -> None:
    """Write a configuration, as `load` returns it, to a YAML file."""
    from omegaconf import OmegaConf

    write_atomically(path, OmegaConf.to_yaml(OmegaConf.create(to_container(config))))


def to_container(config: Any) -> dict[str, Any]:
    """Plain nested dict of a configuration, as saved with the run and read again by `load_run`.

    A text that was given with `${oc.env:NAME}` is saved as it was given, so that a secret is in no file of the run.
    """
    found: dict[str, Any] = escaped(dataclasses.asdict(config))
    # values that were read from the environment go back to their reference, so that a secret stays out of the file
    for path, given, read in getattr(config, "_given", ()):
        *parents, last = path
        place = functools.reduce(lambda part, key: part[key], parents, found)
        # only if the option still has the value that was read
        if place[last] == escaped(read):
            place[last] = given
    return found


def as_given(content: Any) -> Any:
    """Nested content made from a configuration, with `${oc.env:NAME}` for each text that was given so.

    For files that hold single options, such as a protocol; a whole configuration is written by `to_container`.
    """
    if isinstance(content, Mapping):
        return {key: as_given(value) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [as_given(value) for value in content]
    return _READ[id(content)][1] if id(content) in _READ else content


_READ: dict[int, tuple[str, str]] = {}
"""Texts that configurations have read, kept alive, by their identity, and how each was given.

By identity, since copies of a configuration and dictionaries made of it hold the same objects, while an equal text
from elsewhere is no secret.
"""


def _merge_sources(path: Path, overrides: Sequence[str]) -> Any:
    return _with_overrides(_read_yaml(path, ()), overrides)


def _with_overrides(values: Any, overrides: Sequence[str]) -> Any:
    """`_merged` with dotted overrides."""
    from omegaconf import OmegaConf

    # checked here, because OmegaConf reads a.b as {a: {b: null}}
    for text in overrides:
        key, equals, _ = text.partition("=")
        if not equals or not key.strip():
            raise UserError(f"override '{text}' is not of the form a.b=c")
        _check_override(values, text)
    try:
        # overrides come last, so they win over the file
        return _merged(values, OmegaConf.from_dotlist(list(overrides))) if overrides else values
    except Exception as error:
        raise UserError(f"overrides {list(overrides)} cannot be read: {_first_line(error)}") from error


def _check_override(values: Any, text: str) -> None:
    """Refuse an override of one entry of a list, and whole numbers that YAML 1.1 reads as another one."""
    from omegaconf import ListConfig, OmegaConf

    key, _, value = text.partition("=")
    if ODD_NUMBER.fullmatch(value.strip()):
        quoted = f"'{key}=\"{value.strip()}\"'"
        raise UserError(
            f"override '{text}': YAML reads the value as {_reads_as(value)[0]!r}; for a text write {quoted}"
        )
    *parents, _ = key.replace("[", ".").split(".")
    for number in range(len(parents)):
        parent = ".".join(parents[: number + 1])
        if isinstance(OmegaConf.select(values, parent, throw_on_missing=False), ListConfig):
            raise UserError(f"override '{text}': {parent} is a list, which is replaced as a whole: {parent}=[...]")


def _merged(base: Any, changes: Any) -> Any:
    """Merge changes into a configuration; an empty mapping, which would add nothing, empties what is there.

    Neither may be used afterwards: copies of them would take most of the time of reading a configuration.
    """
    from omegaconf import OmegaConf

    _empty(base, changes)
    return OmegaConf.unsafe_merge(base, changes)


def _empty(base: Any, changes: Any) -> None:
    from omegaconf import DictConfig, OmegaConf

    if not isinstance(changes, DictConfig) or changes._is_none() or changes._is_missing():
        return
    # unresolved: a reference to an environment variable need not be set yet
    for key, change in changes.items_ex(resolve=False):
        there = base._get_node(key) if key in base else None
        if not (isinstance(there, DictConfig) and isinstance(change, DictConfig)):
            continue
        if there._is_none() or there._is_missing() or there._is_interpolation() or change._is_interpolation():
            continue
        # an empty mapping over a filled one means empty, where OmegaConf would merge nothing
        if change._is_none() or len(change):
            _empty(there, change)
        elif not dataclasses.is_dataclass(OmegaConf.get_type(there)):
            base[key] = {}


def _read_yaml(path: Path, parents: tuple[Path, ...]) -> Any:
    from omegaconf import DictConfig
    from omegaconf.errors import OmegaConfBaseException

    path = own_config(path)
    if not is_file(path):
        raise UserError(f"configuration file not found: {path}")
    # resolved paths, so that links cannot lead back unnoticed
    if path.resolve() in parents:
        raise UserError(f"{path}: `extends:` leads back to itself")
    stored = path.name == "config.yaml" and any((path.parent / name).exists() for name in SIGNS_OF_A_RUN)
    content = load_omega(path, renamed if stored else str)
    if not isinstance(content, DictConfig):
        raise UserError(f"{path} contains a list; expected keys and values")
    if stored:
        drop_gone(content)
        content = _followed(content, path.parent.absolute())
    try:
        base = content.pop("extends", None)
        if base is None:
            return content
        if not isinstance(base, str):
            raise UserError(f"{path}: `extends:` is {base}; expected the path of one file")
        # a path in `extends` is relative to the file that names it
        return _merged(_read_yaml(path.parent / str(base), (*parents, path.resolve())), content)
    except (OmegaConfBaseException, TypeError, ValueError) as error:  # omegaconf passes some of Python's own errors on
        raise UserError(f"{path} does not fit the file that it extends: {_first_line(error)}") from error


def load_omega(path: Path, change: Callable[[str], str] = str) -> Any:
    """Load a YAML file into OmegaConf after transforming its text; raises the same errors as `read_yaml_text`."""
    from omegaconf import OmegaConf

    text = change(read_yaml_text(path))
    try:
        _check_numbers(text, path)
        return OmegaConf.load(io.StringIO(text))
    except UserError:
        raise
    except Exception as error:  # those of the parser, of OmegaConf, and Python's own of dates and numbers
        raise UserError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from error


def _check_numbers(text: str, path: Path) -> None:
    """Refuse `0012` and `12:30`, which YAML 1.1 reads as 10 and 750."""
    import yaml

    for event in yaml.parse(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
        if isinstance(event, yaml.ScalarEvent) and event.implicit[0] and MISREAD_NUMBER.fullmatch(event.value):
            raise UserError(
                f"{path}, line {event.start_mark.line + 1}: YAML reads {event.value} as another number, in base 8 or "
                "60; write a text in quotes, and a number in decimal digits"
            )


def _followed(stored: Any, folder: Path) -> Any:
    """The configuration of a run, with paths into its folder updated if the folder has moved since."""
    from omegaconf import OmegaConf

    old = str(OmegaConf.to_container(stored).get("output_dir"))  # type: ignore[union-attr]

    def found(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: found(part) for key, part in value.items()}
        if isinstance(value, list):
            return [found(part) for part in value]
        inside = isinstance(value, str) and value.startswith(f"{old}/") and not os.path.exists(value)
        gone = inside and ".py:" not in value  # code is allowed by its place
        return f"{folder}{value.removeprefix(old)}" if gone else value

    # a name with ${ is stored escaped, and is left as it is
    is_moved = Path(old).is_absolute() and Path(old) != folder and "${" not in f"{old}{folder}"
    return OmegaConf.create(found(OmegaConf.to_container(stored))) if is_moved else stored


def drop_gone(stored: Any) -> None:
    """Remove options of earlier releases from a stored configuration, at any depth; users who set one get an error."""
    if not hasattr(stored, "items"):
        return
    for key, (_, neighbour) in GONE.items():
        if key in stored and neighbour in stored:
            del stored[key]
    for key in list(stored):
        part = stored._get_node(key) if hasattr(stored, "_get_node") else stored[key]
        drop_gone(part)


def _fill(defaults: Any, values: Any, where: str) -> Any:
    """Merge values over the defaults of a dataclass, or over those of an instance of one."""
    from omegaconf import OmegaConf
    from omegaconf.errors import ConfigKeyError, MissingMandatoryValue, OmegaConfBaseException

    schema = defaults if isinstance(defaults, type) else type(defaults)
    structured = _structured(schema) if defaults is schema else OmegaConf.structured(defaults)
    try:
        values = without_fixed(defaults, values)
        # before OmegaConf merges: null in a typed field would be an error there
        given = _without_nulls(schema, values)
        _check_texts(schema, given, "")
    except UserError as error:
        raise UserError(f"{where}: {error}") from None
    try:
        merged = _merged(copy.deepcopy(structured), _with_inherited(schema, given))
        filled: Any = OmegaConf.to_object(merged)
    except ConfigKeyError as error:
        raise UserError(f"{where}: {_unknown_key(error, structured)}") from error
    except MissingMandatoryValue as error:
        raise UserError(f"{where}: '{error.full_key}' must be given") from error
    except (OmegaConfBaseException, TypeError, ValueError) as error:  # omegaconf passes some of Python's own errors on
        key = getattr(error, "full_key", None) or _wrong_key(structured, values)
        raise UserError(f"{where}: '{key}': {_wrong_type(error, structured, key)}") from error
    if getattr(filled, "output_dir", "").startswith("~"):
        filled.output_dir = str(expanded(filled.output_dir))
    try:
        # on what was given: a default need not fit a function that nobody has named
        _check_builds(values, merged)
        # bounds of single fields first, then what fields have to do with each other
        check_fields(filled)
        if hasattr(filled, "validate"):
            filled.validate()
    except ValueError as error:
        raise UserError(f"{where}: {error}") from error
    if "oc.env" in str(values):
        found = tuple(_references(OmegaConf.to_container(merged), dataclasses.asdict(filled)))
        # object.__setattr__, since a configuration may be a frozen dataclass
        object.__setattr__(filled, "_given", found)
        # Python has one object for all equal texts of a character, which may come from anywhere
        _READ.update({id(read): (read, text) for _, text, read in found if isinstance(read, str) and len(read) > 1})
    return filled


@functools.lru_cache(maxsize=64)
def _structured(schema: type[Any]) -> Any:
    """Defaults of a dataclass as OmegaConf nodes, which nothing may change: making them takes longer than a merge."""
    from omegaconf import OmegaConf

    return OmegaConf.structured(schema)


def without_fixed(defaults: Any, values: Any) -> Any:
    """Values without options that have become constants; raises UserError if one differs from its constant."""
    if not any(_set_fixed(defaults, values, "")):
        return values
    kept = copy.deepcopy(values)
    for part, name in list(_set_fixed(defaults, kept, "")):
        part.pop(name)
    return kept


def _set_fixed(defaults: Any, values: Any, where: str) -> Iterator[tuple[Any, str]]:
    """Mappings and the former options in them, of a dataclass, or of an instance of one, and its parts."""
    from omegaconf import DictConfig, ListConfig

    schema = defaults if isinstance(defaults, type) else type(defaults)
    if not isinstance(values, DictConfig) or values._is_none() or values._is_missing() or values._is_interpolation():
        return
    for name, fixed in fixed_options(schema).items():
        if name in values:
            _check_fixed(f"{where}{name}", values[name], fixed)
            yield values, name
    for item in dataclasses.fields(schema):
        part, suffix = part_of(hints_of(schema)[item.name])
        node = values._get_node(item.name)
        if part is None or node is None:
            continue
        if not suffix:
            default = default_of(item) if isinstance(defaults, type) else getattr(defaults, item.name)
            yield from _set_fixed(default if isinstance(default, part) else part, node, f"{where}{item.name}.")
        elif isinstance(node, DictConfig) and not node._is_none() and not node._is_interpolation():
            for key, each in node.items_ex(resolve=False):
                yield from _set_fixed(part, each, f"{where}{item.name}.{key!s}.")
        elif isinstance(node, ListConfig) and not node._is_none() and not node._is_interpolation():
            for index in range(len(node)):
                yield from _set_fixed(part, node._get_node(index), f"{where}{item.name}[{index}].")


def _check_fixed(key: str, given: Any, fixed: Fixed) -> None:
    """Refuse another value than a constant's; of a former part, that of each option that is given."""
    if not isinstance(fixed.value, dict):
        if given != fixed.value:
            raise UserError(f"{key} is fixed at {fixed.value} since 0.3 ({fixed.reason})")
        return
    for name, value in (given or {}).items():
        if name not in fixed.value:
            raise UserError(f"unknown key '{key}.{name}'; {key} has been fixed since 0.3 ({fixed.reason})")
        _check_fixed(f"{key}.{name}", value, fixed.value[name])


def _check_builds(values: Any, merged: Any, where: str = "") -> None:
    """Refuse options of a function that nothing names; a base file's may stay where `build` is set to null."""
    from omegaconf import DictConfig, OmegaConf

    if not isinstance(values, DictConfig) or not isinstance(merged, DictConfig):
        return
    for key, value in values.items_ex(resolve=False):
        _check_builds(value, merged._get_node(key), where + str(key) + ".")
    is_given = dataclasses.is_dataclass(OmegaConf.get_type(merged)) and values._get_node("build_options")
    # `build: null` over a base file's function keeps its options without harm
    if is_given and "build" not in values and merged.build is None:
        raise ValueError(
            f"{where}build_options are set, but {where}build is not; set {where}build, or set build_options to null"
        )


def _references(given: Any, read: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], str, Any]]:
    """Path, given text and value of texts that refer to others, any of which may lead to an environment variable."""
    if isinstance(given, str):
        # the output folder names the run, and is saved as it was read
        # a number is no secret, and a resumed run compares it
        if "${" in given and isinstance(read, str) and path != ("output_dir",):
            yield path, given, read
        return
    pairs = given.items() if isinstance(given, dict) else enumerate(given) if isinstance(given, list) else ()
    for key, value in pairs:
        known = key in read if isinstance(read, dict) else isinstance(read, list) and key < len(read)
        if known:
            yield from _references(value, read[key], (*path, key))


def _without_nulls(schema: type[Any], values: Any) -> Any:
    """Leave out null entries of dictionaries of dataclasses, with which a file removes an entry that it inherits.

    A dictionary that is null itself is empty; one with a block's options is refused, as it could mean two things.
    """
    kept = copy.deepcopy(values)
    _remove_nulls(schema, kept, "")
    return kept


def _remove_nulls(schema: type[Any], values: Any, where: str) -> None:
    from omegaconf import DictConfig

    for item in dataclasses.fields(schema):
        name, hint = item.name, hints_of(schema)[item.name]
        # references are resolved later and may lead anywhere
        if name not in values or values._is_missing() or values._get_node(name)._is_interpolation():
            continue
        part = values.get(name)
        of_dicts = typing.get_origin(hint) is dict
        if isinstance(hint, type) and dataclasses.is_dataclass(hint) and isinstance(part, DictConfig):
            _remove_nulls(hint, part, f"{where}{name}.")
        elif of_dicts and part is None:
            _refuse_null_block(f"{where}{name}", item.metadata.get("kinds"))
            values[name] = {}
        elif of_dicts and dataclasses.is_dataclass(typing.get_args(hint)[1]) and isinstance(part, DictConfig):
            # null removes an inherited entry; it is no entry without values
            for key in [key for key in part if _is_null(part, key)]:
                del part[key]


def _check_texts(hint: Any, node: Any, where: str) -> None:
    """Refuse `yes` and `1.10`, which YAML reads as True and 1.1, where an option or a part of it is a text."""
    from omegaconf import DictConfig, ListConfig

    if node is None or node._is_none() or node._is_missing() or node._is_interpolation():
        return
    options = options_of(hint)
    if isinstance(node, (DictConfig, ListConfig)):
        keys: list[Any] = list(node) if isinstance(node, DictConfig) else list(range(len(node)))
        for option in options:
            known = hints_of(option) if isinstance(option, type) and dataclasses.is_dataclass(option) else {}
            inner = (Any, *typing.get_args(option))[-1]
            for key in keys:
                name = f"[{key}]" if isinstance(node, ListConfig) else f".{key}" if where else str(key)
                _check_texts(known.get(key, inner), node._get_node(key), f"{where}{name}")
    elif TEXTS.issuperset(options):
        value = node._value()
        if isinstance(value, bool | float):
            raise UserError(f"'{where}' is a text, but YAML reads its value as {value!r}; write it in quotes")


def _is_null(part: DictConfig, key: Any) -> bool:
    node = part._get_node(key)
    return node is None or bool(node._is_none())


def _refuse_null_block(key: str, kinds: Any) -> None:
    if kinds is not None and kinds.named:
        off = f"{key}.kind: none disables it; " if "none" in kinds.table() else ""
        raise UserError(f"{key} is null, which is ambiguous; {off}leave it out to use the preset's value")


def _with_inherited(schema: type[Any], values: Any) -> Any:
    """Fill in the options of parts that inherit from another field; options of their own come first."""
    from omegaconf import DictConfig, OmegaConf

    kept = values.copy() if any("inherits" in item.metadata for item in dataclasses.fields(schema)) else values
    for item in dataclasses.fields(schema):
        inherited = item.metadata.get("inherits")  # the field, and options that are not inherited
        # only where both sides were given as mappings
        if inherited is None or not all(isinstance(kept.get(key), DictConfig) for key in (item.name, inherited[0])):
            continue
        # as given, references and escaped dollars included: they are resolved where they end up
        source = OmegaConf.to_container(kept[inherited[0]])
        common = {key: value for key, value in source.items() if key not in inherited[1]}  # type: ignore[union-attr]
        parts = kept[item.name].items_ex(resolve=False)
        kept[item.name] = {
            name: OmegaConf.merge(common, part) if isinstance(part, DictConfig) else part for name, part in parts
        }
    return kept


def _unknown_key(error: Any, structured: Any) -> str:
    """Name the key and its existing siblings, also inside lists and dictionaries."""
    full_key = str(error.full_key)
    parent, _, key = full_key.rpartition(".")
    kind = error.object_type
    known = [item.name for item in dataclasses.fields(kind)] if dataclasses.is_dataclass(kind) else []
    hint = did_you_mean(key, known, f"{parent}." if parent else "")
    there, remark = NAMES_ELSEWHERE.get(key, ("", ""))
    # the same name elsewhere in this configuration is the likeliest mistake
    same_name = [f"{part}.{key}" for part in structured if _exists(structured, f"{part}.{key}")]
    if key in GONE and GONE[key][1] in known:
        return f"the option '{full_key}' was removed: {GONE[key][0]}; leave it out"
    # names of TRL and transformers
    if there and _exists(structured, there):
        hint = f"that is {there} here{remark}; "
    elif same_name:
        hint = f"that is {' or '.join(same_name)} here; "
    under = f" under '{parent}'" if parent else ""
    return f"unknown key '{full_key}'; {hint}known keys{under}: {', '.join(known)}"


def _exists(structured: Any, key: str) -> bool:
    """Whether a configuration has a dotted key, even if its value is null."""
    from omegaconf import DictConfig, OmegaConf

    parent, _, name = key.rpartition(".")
    part = OmegaConf.select(structured, parent) if parent else structured
    return isinstance(part, DictConfig) and name in list(part)


def _wrong_type(error: Exception, structured: Any, key: str) -> str:
    """Describe the values of the key; omegaconf describes lists and nested parts by its own classes."""
    from omegaconf import DictConfig, ListConfig, OmegaConf

    try:
        default = OmegaConf.select(structured, key)
    except Exception:
        default = None
    if isinstance(default, ListConfig):
        return f"expected a list such as [a, b] (default: {default!r})"
    if isinstance(default, DictConfig):
        known = f"; known keys: {', '.join(map(str, default))}"
        is_part = dataclasses.is_dataclass(OmegaConf.get_type(default))
        return f"expected keys and values{known if is_part else ' such as {a: 1}'}"
    named = re.match(r"Invalid type assigned: (\w+) is not a subclass of (\w+)", str(error))
    if named is not None:
        return f"expected keys and values of {named[2]}, got the {named[1]} {str(error).splitlines()[0].split()[-1]!r}"
    if isinstance(default, str) and "'None'" in str(error):
        hint = """write an empty text as "''" on the command line and '' in a file"""
        return f"the value is empty; {hint} (default: {default!r})"
    return f"{_first_line(error)}{'' if default is None else f' (default: {default!r})'}"


def _wrong_key(structured: Any, values: Any) -> str:
    """Dotted key of the first value that does not fit, for errors that do not name it."""
    from omegaconf import DictConfig, OmegaConf

    for name, value in OmegaConf.to_container(values).items():  # type: ignore[union-attr]
        key = str(name)
        part = structured.get(key) if key in structured else None
        try:
            OmegaConf.merge(structured, {key: value})
        except Exception:
            inner = isinstance(value, dict) and isinstance(part, DictConfig) and OmegaConf.get_type(part) is not dict
            return f"{key}.{_wrong_key(part, OmegaConf.create(value))}" if inner else key
    return "?"


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__


NAMES_ELSEWHERE: dict[str, tuple[str, str]] = {
    "lr": ("trainer.learning_rate", ""),
    "gradient_accumulation_steps": ("trainer.micro_batch", ", the number of rows that fit into memory at a time"),
    "per_device_train_batch_size": ("trainer.micro_batch", ", the number of rows that fit into memory at a time"),
    "num_generations": ("trainer.samples_per_task", ""),
    "num_iterations": ("trainer.epochs", ""),
    "max_steps": ("trainer.steps", ""),
    "lr_scheduler_type": ("trainer.schedule", ""),
    "bf16": ("trainer.mixed_precision", ": bf16"),
    "max_completion_length": ("sampler.max_new_tokens", ""),
    "max_prompt_length": ("model.max_prompt_tokens", ""),
    "model_name_or_path": ("model.path", ""),
    "peft_config": ("model.lora", ": {enabled: true, rank: ..., alpha: ...}"),
    "dataset_name": ("data.path", ""),
    "train_dataset": ("data.path", ""),
    "eval_dataset": ("eval_data", ": {name: {path: ...}}"),
    "reward_funcs": ("rewards", ": [{name: ...}]"),
    "reward_weights": ("rewards", ": [{name: ..., weight: ...}]"),
    "eval_steps": ("evaluation.every", ""),
    "save_steps": ("checkpoint.every", ""),
    "save_total_limit": ("checkpoint.keep", ""),
    "report_to": ("tracking", ": {wandb: PROJECT}"),
    "beta": ("objective.kl", ": {kind: k3, coef: ...}"),
    "epsilon": ("objective.clip", ": {low: ..., high: ...}"),
    "epsilon_high": ("objective.clip", ": {high: ...}"),
    "loss_type": ("objective.aggregation", ": {kind: ...}"),
    "scale_rewards": ("objective.advantage", ": {kind: ...}"),
    "importance_sampling_level": ("objective.ratio", ": {kind: ...}"),
}
"""Options of TRL and transformers that have a different name here, with the key and a remark."""

ONE_ENGINE = "every model is loaded through its own transformers modules"
GONE: dict[str, tuple[str, str]] = {"lane": (ONE_ENGINE, "path"), "lean": (ONE_ENGINE, "max_new_tokens")}
"""Options of release 0.2 that no longer exist, with the reason and another option of the same part."""
SIGNS_OF_A_RUN = ("checkpoints", "metrics.jsonl", "evaluations.jsonl", "run.lock")
"""Names next to the config.yaml of a run."""
