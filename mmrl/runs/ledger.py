"""The ledger of an evaluation: a row for each episode or answer, the protocol behind them, and what cannot be right.

`ledger.jsonl` and `protocol.json` lie in the evaluation's folder. The SHA-256 of the protocol covers what defines the
numbers: tasks and initial states with how they were chosen, seeds, horizon, decoding, versions of the suite. Policy and
machine are stored next to it, so policies measured in the same way share the hash.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import math
import sys
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from mmrl.config import as_given
from mmrl.errors import UserError
from mmrl.files import LONGEST_LINE, parse_json, read_json_object, read_lines, write_atomically
from mmrl.runs.fingerprint import content_digest
from mmrl.runs.records import LEDGER, finite_or_none
from mmrl.runs.statistics import with_interval
from mmrl.trust import remember

PROTOCOL = "protocol.json"
ANSWERS = "answers.jsonl"
ANSWER_COLUMNS = (
    *("split", "step", "state", "decoding", "repeat", "answer"),
    *("prompt", "text", "success", "return", "ending", "scores"),
)
KEY = ("split", "measure", "index", "repeat", "decoding", "answer")
"""Columns that identify a row: the measure within the split, the task, the repeat of the task, the answer."""
SETTING = ("suite", "version", "chosen", "horizon", "replan")
"""Columns that repeat entries of the protocol."""
RESULT = ("success", "return", "length", "ending", "scores", "output")
"""Columns compared by a repetition; `output` is a digest of actions, text or pixels."""
COLUMNS = (*KEY, "step", *SETTING, "task", "state", "seed", *RESULT, "parts", "policy", "protocol")
WHOLE, NUMBER, TEXT = (int,), (int, float, type(None)), (str, type(None))
TYPES: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("split", "decoding"), (str,)),
    **dict.fromkeys(("measure", "index", "repeat", "answer"), WHOLE),
    **dict.fromkeys(("task", "state", "ending", "output", "policy", "protocol"), TEXT),
    **dict.fromkeys(("return", "length"), NUMBER),
    "success": (bool, *NUMBER),
    **dict.fromkeys(("scores", "parts"), (dict, type(None))),
}
"""Columns that every row has, with their types; columns of `SETTING` come from the protocol."""
FIRST = "accuracy/first"
"""Score of a screen benchmark that is its success; the first point counts."""
SHOWN = 8
"""Maximum number of rows listed in a message."""
Row = dict[str, Any]


def digest(content: Any) -> str:
    """SHA-256 of content as JSON with sorted keys."""
    # default=str: paths and dates of a configuration have no JSON form
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":"), default=str).encode()).hexdigest()


def protocol_of(recipe: Any, config: Any, step: Any) -> Row:
    """The protocol of an evaluation; call it with the weights loaded that evaluations use."""
    splits = {}
    for split, tasks in recipe.eval_tasks.items():
        # a recipe may have tasks that no entry of eval_data names
        given = getattr(config, "eval_data", {}).get(split)
        measures = [
            {"repeats": measure.repeats, "decodings": {"": 1}, **measure.about()}
            for measure in recipe.measures(recipe.policy, split, step)
        ]
        about = {"tasks": len(tasks), "digest": content_digest(tasks), "chosen": _chosen(given)}
        splits[split] = {**about, "measures": measures}
    # through JSON and back, so that the protocol in memory equals the one that is read from the file
    plain: Row = json.loads(
        json.dumps(as_given({"seed": config.seed, "splits": splits}), default=str), parse_float=_number
    )
    return plain


def _number(text: str) -> float:
    """A number without the difference between 32 and 32.0, which a configuration loses on its way through a file."""
    return int(float(text)) if float(text).is_integer() else float(text)


def _chosen(data: Any) -> str:
    """How the tasks of a split were chosen: common options of its data and those that were set, without files."""
    found = {}
    for item in dataclasses.fields(data) if data is not None else ():
        value = getattr(data, item.name)
        default = item.default if item.default_factory is dataclasses.MISSING else item.default_factory()
        # large or nested values are represented by the digest of the tasks
        common = not item.metadata.get("rare") and isinstance(value, str | int | float | list)
        if item.name not in FILES and (common or value != default) and value not in (None, "", [], {}):
            found[item.name] = value
    return ", ".join(f"{name}={value}" for name, value in found.items())


FILES = ("path", "file", "build", "build_options", "images", "image_folder")
"""Data options that are paths; their contents are represented by the digest of the tasks."""


def write_ledger(folder: Path, rows: Sequence[Row], about: Row) -> Path:
    """Write rows, with `None` for missing columns, and `protocol.json`; an earlier ledger is replaced.

    Args:
        folder: of the evaluation.
        rows: with the columns `KEY`, those of the results, and what else a domain has; trials without one get one.
        about: `protocol`, `policy` with its `sha256` and `step`, `machine`, and the `config` that repeats it.
    """
    about = {"sha256": digest(about["protocol"]), **about}
    ledger = Ledger(folder, [], about)
    same = {"policy": about["policy"]["sha256"], "protocol": about["sha256"], "step": about["policy"]["step"]}
    # a trial that could not be run has no row, and gets one below
    known = {_key(row): row for row in rows}
    lines = []
    # in the order of the protocol, not in that of the rows
    for key in ledger.expected():
        row = known.get(key) or {**dict(zip(KEY, key, strict=True)), "ending": "left out"}
        # later ones win: what a row says of itself over what the protocol fixes
        full = {"seed": about["protocol"]["seed"], **ledger.setting(row), **row, **same}
        lines.append(json.dumps(finite_or_none({name: full.get(name) for name in COLUMNS}), ensure_ascii=False))
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / LEDGER, "".join(line + "\n" for line in lines))
    text = json.dumps(about, indent=2, ensure_ascii=False, default=str) + "\n"
    write_atomically(folder / PROTOCOL, text)
    remember(about.get("config"), text)
    return folder / LEDGER


def write_answers(folder: Path, rows: Sequence[Row], step: int) -> Path | None:
    """Write a model's responses in an evaluation, with prompts; earlier ones are replaced. None without texts."""
    written = [row for row in rows if row.get("text") is not None]
    if not written:
        (folder / ANSWERS).unlink(missing_ok=True)
        return None
    lines = [finite_or_none({name: {"step": step, **row}.get(name) for name in ANSWER_COLUMNS}) for row in written]
    write_atomically(folder / ANSWERS, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))
    return folder / ANSWERS


def read_ledger(path: Path) -> Ledger:
    """Read a ledger, given its file or folder."""
    folder = path if path.is_dir() else path.parent
    for file in (folder / LEDGER, folder / PROTOCOL):
        if not file.exists():
            raise UserError(f"file not found: {file}; it is written by `mmrl evaluate`")
    about = read_json_object(folder / PROTOCOL, **STRICT)
    check_entries(folder / PROTOCOL, _entries(about))
    ledger = Ledger(folder, [], about)
    # one row too many shows that a row is there twice or should not be there; a file may hold any number
    most = min(ledger.size + 1, sys.maxsize)
    return dataclasses.replace(ledger, rows=list(itertools.islice(_rows(folder / LEDGER), most)))


def _rows(file: Path) -> Iterator[Row]:
    for number, line in enumerate(read_lines(file), 1):
        if not line.strip():
            continue
        try:
            if len(line) > LONGEST_LINE:
                raise ValueError(f"it has more than {LONGEST_LINE} bytes")
            yield _checked(parse_json(line.decode("utf-8").strip(), **STRICT))
        except ValueError as error:
            raise UserError(f"{file} line {number} is not a row written by `mmrl evaluate`: {error}") from None


def _unique(pairs: Sequence[tuple[str, Any]]) -> Row:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = next(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
        raise ValueError(f"duplicate key {twice!r:.60}")
    return found


def _refused(name: str) -> float:
    raise ValueError(f"{name} is not a JSON number")


STRICT: dict[str, Any] = {"object_pairs_hook": _unique, "parse_constant": _refused}
"""JSON options that allow only one interpretation of a file."""


def _checked(row: Any) -> Row:
    """A row whose columns have the types that are written; raises ValueError."""
    if not isinstance(row, dict):
        raise ValueError(f"it is a {type(row).__name__}")
    if missing := [name for name in TYPES if name not in row]:
        raise ValueError(f"it lacks {', '.join(missing[:SHOWN])}")
    for name, kinds in TYPES.items():
        _check_type(name, row[name], kinds)
    for column, kinds in (("scores", NUMBER), ("parts", (str, bool, *NUMBER))):
        for name, value in (row[column] or {}).items():
            _check_type(f"{column}.{name}", value, kinds)
    return row


def _check_type(name: str, value: Any, kinds: tuple[type, ...]) -> None:
    # type(), not isinstance: True is an int
    if type(value) not in kinds:
        raise ValueError(f"{name:.60} is {value!r:.60}")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{name:.60} is larger than any number")


Entry = tuple[str, Any, tuple[type, ...], int]
"""Place, value, allowed types and minimum integer value of an entry of a file."""


def check_entries(file: Path, entries: Iterable[Entry]) -> None:
    """Raise UserError for entries of a protocol with a type or value that is never written."""
    for place, value, kinds, least in entries:
        if type(value) not in kinds or (type(value) is int and value < least):
            wanted = " or ".join("null" if kind is type(None) else NAMES[kind] for kind in kinds)
            wanted += f" of at least {least}" if int in kinds else ""
            found = f"{place:.200} is {value!r:.60}, expected {wanted}"
            raise UserError(f"{file} is not a protocol written by `mmrl evaluate`: {found}")


NAMES = {str: "a text", int: "an integer", dict: "an object", list: "a list"}


def _entries(about: Row) -> Iterator[Entry]:
    """Entries that rows are compared with; each is checked before its parts are asked for."""
    yield "protocol", about.get("protocol"), (dict,), 0
    yield "sha256", about.get("sha256"), (str,), 0
    yield "policy", about.get("policy"), (dict,), 0
    yield "policy.sha256", about["policy"].get("sha256"), (str,), 0
    yield "protocol.seed", about["protocol"].get("seed"), WHOLE, 0
    yield "protocol.splits", about["protocol"].get("splits"), (dict,), 0
    for split, given in about["protocol"]["splits"].items():
        place = f"protocol.splits.{split}"
        yield place, given, (dict,), 0
        yield f"{place}.tasks", given.get("tasks"), WHOLE, 0
        yield f"{place}.measures", given.get("measures"), (list,), 0
        for number, measure in enumerate(given["measures"]):
            yield f"{place}.measures.{number}", measure, (dict,), 0
            yield f"{place}.measures.{number}.repeats", measure.get("repeats"), WHOLE, 1
            yield f"{place}.measures.{number}.decodings", measure.get("decodings"), (dict,), 0
            yield f"{place}.measures.{number}.bootstrap", measure.get("bootstrap", 0), WHOLE, 0
            for decoding, answers in measure["decodings"].items():
                yield f"{place}.measures.{number}.decodings.{decoding}", answers, WHOLE, 1


@dataclass(frozen=True)
class Ledger:
    """Rows and protocol of an evaluation."""

    folder: Path
    rows: Sequence[Row]
    about: Mapping[str, Any]
    """Content of protocol.json."""

    @property
    def protocol(self) -> Mapping[str, Any]:
        """The part covered by the hash."""
        return self.about["protocol"]

    def expected(self) -> Iterator[tuple[Any, ...]]:
        """Keys of the rows that the protocol requires, in order; there is no limit on their number."""
        return (
            (split, number, index, repeat, decoding, answer)
            for split, given in self.protocol["splits"].items()
            for number, measure in enumerate(given["measures"])
            for index in range(given["tasks"])
            for repeat in range(measure["repeats"])
            for decoding, answers in measure["decodings"].items()
            for answer in range(answers)
        )

    @cached_property
    def size(self) -> int:
        """Number of rows that the protocol requires."""
        return sum(
            given["tasks"] * measure["repeats"] * sum(measure["decodings"].values())
            for given in self.protocol["splits"].values()
            for measure in given["measures"]
        )

    def _asks_for(self, key: tuple[Any, ...]) -> bool:
        split, number, index, repeat, decoding, answer = key
        given = self.protocol["splits"].get(split)
        if given is None or not 0 <= number < len(given["measures"]):
            return False
        measure = given["measures"][number]
        within = 0 <= index < given["tasks"] and 0 <= repeat < measure["repeats"]
        return within and 0 <= answer < measure["decodings"].get(decoding, 0)

    def setting(self, row: Row) -> Row:
        """Columns of a row that are fixed by the protocol."""
        split = self.protocol["splits"][row["split"]]
        return {name: {**split, **split["measures"][row["measure"]]}.get(name) for name in SETTING}

    def problems(self) -> list[str]:
        """Contradictions and gaps in the ledger, one per line; empty if there are none."""
        about, whole = self.about, digest(self.protocol)
        # a hash that does not fit means that the protocol was edited after the rows were written
        found = [] if whole == about["sha256"] else [f"the protocol's SHA-256 is {whole}, not {about['sha256']}"]
        for name, own in (("protocol", about["sha256"]), ("policy", about["policy"]["sha256"])):
            others = [number for number, row in enumerate(self.rows, 1) if row.get(name) != own]
            found += [f"{_named(others)} from a {name} other than {own}"] if others else []
        counts = Counter(map(_key, self.rows))
        # a repeated row would count twice in every rate
        twice = [number for number, row in enumerate(self.rows, 1) if counts[_key(row)] > 1]
        found += [f"{_named(twice)} duplicated"] if twice else []
        if missing := self.size - sum(map(self._asks_for, counts)):
            first = itertools.islice((key for key in self.expected() if key not in counts), SHOWN)
            listed = ", ".join(f"{key[0]} {key[2]}" for key in first)
            found.append(f"{missing} of {self.size} rows of the protocol are missing: {listed}")
        return found + [f"row {number}: {text}" for number, row in enumerate(self.rows, 1) for text in self._wrong(row)]

    def _wrong(self, row: Row) -> Iterator[str]:
        """Contradictions within a row, or between it and the protocol."""
        if not self._asks_for(_key(row)):
            yield f"the protocol does not include {', '.join(f'{name} {row.get(name)}' for name in KEY)}"
            return
        for name, value in self.setting(row).items():
            if row.get(name) != value:
                yield f"{name} is {row.get(name)!r}, but {value!r} in the protocol"
        success, length, horizon = row.get("success"), row.get("length"), row.get("horizon")
        if success not in (True, False, None):
            yield f"success is {success!r}"
        # more steps than the horizon cannot have been run under this protocol
        if isinstance(horizon, int) and isinstance(length, int) and length > horizon:
            yield f"it has {length} steps, more than the horizon of {horizon}"
        # an episode that has not ended has not succeeded
        if success and (not length or not row.get("ending")):
            yield "it is a success without a length or an ending"
        for name, score in (row.get("scores") or {}).items():
            # one number under two names
            if name in (f"success/{row['decoding']}", f"accuracy/{row['decoding']}", FIRST) and score != success:
                yield f"success is {success}, but its {name} is {score}"

    def success_rates(self) -> list[SuccessRate]:
        """Success rates of each split, measure and decoding whose rows record success."""
        groups: dict[tuple[str, int, str], list[Row]] = {}
        for row in self.rows:
            groups.setdefault((row["split"], row["measure"], row["decoding"]), []).append(row)
        found = [
            SuccessRate(split, decoding, rows, self._bootstrap(split, n))
            for (split, n, decoding), rows in groups.items()
        ]
        return [rate for rate in found if rate.scored]

    def _bootstrap(self, split: str, number: int) -> int:
        measure = self.protocol["splits"][split]["measures"][number]
        return int(measure.get("bootstrap", self.protocol["seed"]))


@dataclass(frozen=True)
class SuccessRate:
    """Success rate of rows, with its interval over initial states."""

    split: str
    decoding: str
    rows: Sequence[Row]
    bootstrap: int
    """Seed of the interval if states were run several times."""

    @property
    def scored(self) -> list[Row]:
        """Rows with a result."""
        return [row for row in self.rows if row["success"] is not None]

    def __str__(self) -> str:
        states: dict[tuple[Any, Any], list[float]] = {}
        for row in self.scored:
            states.setdefault((row["task"], row["state"]), []).append(float(row["success"]))
        n, right = len(self.scored), sum(row["success"] for row in self.scored)
        # repeats of a state are not independent; without repeats Wilson's interval is exact enough and has no noise
        once = all(len(part) == 1 for part in states.values()) or self.decoding.startswith("greedy")
        rng = None if once else np.random.default_rng(self.bootstrap)
        low, high = list(with_interval("success/", list(states.values()), rng).values())[1:]
        tasks = {task for task, _ in states if task}
        starts = f"{_count(len(states), 'initial state')} of {_count(len(tasks), 'task')}"
        distinct = starts if tasks else _count(len(states), "task")
        without = f"; {len(self.rows) - n} without a result" if n < len(self.rows) else ""
        return (
            f"{self.split}, {self.decoding}: {right} of {n} = {right / n:.1%} [{low:.1%}, {high:.1%}], "
            f"{_count(n, 'row')} from {distinct}{without}"
        )


def _key(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(row.get(name) for name in KEY)


def _named(numbers: Collection[int]) -> str:
    listed = ", ".join(map(str, list(numbers)[:SHOWN])) + (", ..." if len(numbers) > SHOWN else "")
    return f"row {listed} is" if len(numbers) == 1 else f"rows {listed} are"


def _count(n: int, unit: str) -> str:
    return f"{n} {unit}" + ("" if n == 1 else "s")
