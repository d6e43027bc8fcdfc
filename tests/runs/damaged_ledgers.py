"""Damaged ledgers by the hundred. As a program, it has each of them verified in little memory."""

import copy
import json
import os
import resource
import sys
import tempfile
import traceback
from pathlib import Path

from mmrl.runs.ledger import SETTING, TYPES, write_ledger

SPARE_BYTES = 400 * 2**20
"""Memory that reading a damaged ledger may take."""
MEASURE = {"repeats": 1, "decodings": {"greedy": 1}, "suite": "line", "version": "1", "horizon": 10, "replan": 2}
PROTOCOL = {"seed": 0, "splits": {"all": {"tasks": 4, "digest": "d", "chosen": "layouts=4", "measures": [MEASURE]}}}
ABOUT = {
    "protocol": PROTOCOL,
    "policy": {"sha256": "p" * 64, "step": 3, "checkpoint": None},
    "machine": {"processes": 1},
    "config": {"recipe": "robot_grpo"},
}
STRANGE = (None, True, -1, 10**299, 1.5, "x" * 100_000, "\0\ud800", [1], {}, {"a": {"b": 1}})


def sound(folder):
    """A ledger of four rows without a mistake."""
    known = {"split": "all", "measure": 0, "repeat": 0, "decoding": "greedy", "answer": 0}
    known |= {"task": "go", "ending": "end"}
    rows = [
        known | {"index": n, "state": f"go/{n}", "success": True, "length": 5, "return": 1.0, "scores": {}, "parts": {}}
        for n in range(4)
    ]
    write_ledger(folder, rows, copy.deepcopy(ABOUT))


def nested(depth):
    return b"[" * depth + b"]" * depth


def in_row(column, text):
    """A damage that writes `text` in place of a column's value in the second row."""

    def damage(folder):
        file = folder / "ledger.jsonl"
        lines = file.read_bytes().splitlines()
        row = json.loads(lines[1]) | {column: "HERE"}
        lines[1] = json.dumps(row).encode().replace(b'"HERE"', text)
        file.write_bytes(b"\n".join(lines) + b"\n")

    return damage


def in_protocol(place, text):
    """A damage that writes `text` in place of an entry of protocol.json."""

    def damage(folder):
        file = folder / "protocol.json"
        content = json.loads(file.read_bytes())
        *parents, last = place
        part = content
        for name in parents:
            part = part[name]
        part[last] = "HERE"
        file.write_bytes(json.dumps(content).encode().replace(b'"HERE"', text))

    return damage


def without(file, names, number=0):
    """A damage that takes keys out of a row or out of protocol.json."""

    def damage(folder):
        path = folder / file
        rows = (
            [json.loads(line) for line in path.read_text().splitlines()] if number else [json.loads(path.read_text())]
        )
        part = rows[max(number - 1, 0)]
        for name in names[:-1]:
            part = part[name]
        del part[names[-1]]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))

    return damage


def content(file, change):
    """A damage that changes the bytes of a file."""

    def damage(folder):
        path = folder / file
        path.write_bytes(change(path.read_bytes()))

    return damage


def replaced_by(file, make):
    """A damage that puts something else in place of a file."""

    def damage(folder):
        path = folder / file
        path.unlink()
        make(path)

    return damage


def sparse(size):
    def make(path):
        with path.open("wb") as file:
            file.truncate(size)

    return make


def second(change):
    """A change of the second line."""

    def apply(data):
        lines = data.splitlines()
        return b"\n".join([lines[0], change(lines[1]), *lines[2:]]) + b"\n"

    return apply


LINES = {
    "a line ends in the middle": second(lambda line: line[: len(line) // 2]),
    "a line ends after a key": second(lambda line: line[: line.index(b":") + 1]),
    "a line has bytes that are not UTF-8": second(lambda line: line.replace(b"greedy", b"gre\xff\xfedy")),
    "a line has a NUL": second(lambda line: line.replace(b"greedy", b"gre\0edy")),
    "a line is NULs": second(lambda line: b"\0" * len(line)),
    "a line is a number": second(lambda line: b"7"),
    "a line is a list": second(lambda line: b"[" + line + b"]"),
    "a line is nested 99999 levels deep": second(lambda line: nested(99_999)),
    "a line is nested 500 levels deep": second(lambda line: nested(500)),
    "a line is null": second(lambda line: b"null"),
    "a line is twice the same object": second(lambda line: line + line),
    "a line is missing": second(lambda line: b""),
    "a line has a key twice": second(
        lambda line: line.replace(b'"success": true', b'"success": false, "success": true')
    ),
    "a line has 40 MB": second(lambda line: line.replace(b"greedy", b"g" * 40_000_000)),
    "a line is 40 MB of brackets": second(lambda line: b"[" * 40_000_000),
    "a line has a number of 5000 digits": second(
        lambda line: line.replace(b'"length": 5', b'"length": ' + b"9" * 5000)
    ),
    "a line has 200,000 further keys": second(
        lambda line: line[:-1] + b"".join(b',"%d":0' % n for n in range(200_000)) + b',"measure":0}'
    ),
    "the lines are cut off": lambda data: data[: len(data) * 2 // 3],
    "the last row is missing": lambda data: b"\n".join(data.splitlines()[:-1]) + b"\n",
    "the rows are there twice": lambda data: data * 2,
    "the rows are there 2000 times": lambda data: data * 2000,
    "there are no rows": lambda data: b"",
    "there are 300,000 empty objects": lambda data: b"{}\n" * 300_000,
    "the line ends are gone": lambda data: data.replace(b"\n", b" "),
    "the file is UTF-16": lambda data: data.decode().encode("utf-16"),
    "the file is gzip": lambda data: b"\x1f\x8b\x08\x00" + data,
    "the file is noise": lambda data: bytes(n * 7919 % 251 for n in range(20_000)),
}
TEXTS = {
    "it is empty": lambda data: b"",
    "it ends in the middle": lambda data: data[: len(data) // 2],
    "it is a list": lambda data: b"[" + data + b"]",
    "it is nested 99999 levels deep": lambda data: b'{"protocol": ' + nested(99_999) + b"}",
    "it is nested 300 levels deep": lambda data: b'{"protocol": ' + nested(300) + b"}",
    "it has bytes that are not UTF-8": lambda data: data.replace(b"line", b"li\xffne"),
    "it has NULs": lambda data: data.replace(b"line", b"\0\0"),
    "it has a key twice": lambda data: data.replace(b'"seed": 0', b'"seed": 1, "seed": 0'),
    "it says NaN": lambda data: data.replace(b'"seed": 0', b'"seed": NaN'),
    "it asks for another seed": lambda data: data.replace(b'"seed": 0', b'"seed": 1'),
    "it has 70 MB": lambda data: data + b" " * (70 * 2**20),
}
ASKED = {
    "10^12 tasks": ("tasks", 10**12),
    "10^299 tasks": ("tasks", 10**299),
    "no task": ("tasks", 0),
    "10^12 repeats": ("repeats", 10**12),
    "10^12 answers": ("decodings", {"greedy": 10**12}),
    "another decoding": ("decodings", {"sampled": 1}),
    "no decoding": ("decodings", {}),
    "another horizon": ("horizon", 4),
}
SPLIT = ("protocol", "splits", "all")
ENTRIES = (
    *(("protocol",), ("sha256",), ("policy",), ("policy", "sha256"), ("protocol", "seed"), ("protocol", "splits")),
    *(SPLIT, (*SPLIT, "tasks"), (*SPLIT, "measures"), (*SPLIT, "measures", 0)),
    *((*SPLIT, "measures", 0, name) for name in ("repeats", "decodings")),
)
REPEATED = (("config",), ("machine",), ("machine", "processes"), ("policy", "checkpoint"))
"""Entries that only a repetition reads."""


def damages():
    """Name of each damage, the damage, and whether a row has to be repeated for it to count."""
    found = {f"ledger.jsonl: {name}": content("ledger.jsonl", change) for name, change in LINES.items()}
    found |= {f"protocol.json: {name}": content("protocol.json", change) for name, change in TEXTS.items()}
    for file in ("ledger.jsonl", "protocol.json"):
        found[f"{file} is missing"] = replaced_by(file, lambda path: None)
        found[f"{file} is a named pipe"] = replaced_by(file, os.mkfifo)
        found[f"{file} is a folder"] = replaced_by(file, Path.mkdir)
        found[f"{file} is a device"] = replaced_by(file, lambda path: path.symlink_to("/dev/zero"))
        found[f"{file} has 20 GB of NULs"] = replaced_by(file, sparse(20 * 10**9))
        found[f"{file} has 300 MB of NULs"] = replaced_by(file, sparse(300 * 10**6))
    for column, kinds in TYPES.items():
        found[f"a row without {column}"] = without("ledger.jsonl", [column], number=2)
        wrong = [value for value in STRANGE if type(value) not in kinds]
        texts = [json.dumps(value).encode() for value in wrong] + [b"NaN", b"-Infinity", b"1e999", nested(300)]
        found |= {f"{column} is {text[:20]!r}": in_row(column, text) for text in texts}
    for column in SETTING:
        found |= {f"{column} is {text!r}": in_row(column, text) for text in (b"-7", b'"other"', b"[]", b"{}", b"NaN")}
    for column, text in (("index", b"4"), ("index", b"-1"), ("measure", b"10000000000000"), ("split", b'"none"')):
        found[f"{column} is {text!r}, which nobody asked for"] = in_row(column, text)
    for column in ("scores", "parts"):
        found |= {f"{column} has {text!r}": in_row(column, b'{"a": %s}' % text) for text in (b"[]", b"{}", b"1e999")}
    found["scores has a text"] = in_row("scores", b'{"a": "b"}')
    for place in ENTRIES:
        name = ".".join(map(str, place))
        found[f"protocol.json without {name}"] = without("protocol.json", place)
        texts = [json.dumps(value).encode() for value in STRANGE] + [b"NaN", nested(300)]
        found |= {f"{name} is {text[:20]!r}": in_protocol(place, text) for text in texts}
    for name, (entry, value) in ASKED.items():
        place = (*SPLIT, entry) if entry == "tasks" else (*SPLIT, "measures", 0, entry)
        found[f"the protocol asks for {name}"] = in_protocol(place, json.dumps(value).encode())
    cases = {name: (damage, False) for name, damage in found.items()}
    for place in REPEATED:
        name = ".".join(map(str, place))
        cases[f"protocol.json without {name}"] = without("protocol.json", place), True
        texts = [json.dumps(value).encode() for value in STRANGE if value is not None]
        cases |= {f"{name} is {text[:20]!r}": (in_protocol(place, text), True) for text in texts}
    return cases


def checked(name, damage, repeats):
    """The sentence that refuses a damaged ledger, and the traceback of another end, here or in the report's reader."""
    from mmrl.comparison.verify import verify
    from mmrl.errors import UserError
    from mmrl.runs.records import read_outcomes

    found = {"name": name, "sentence": "", "traceback": ""}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        sound(folder)
        damage(folder)
        for read in (
            lambda: verify(folder, lambda line: None, int(repeats), (), ()),
            lambda: read_outcomes(folder, 3, "all"),
        ):
            try:
                read()
            except UserError as error:
                found["sentence"] = found["sentence"] or str(error)
            except IsADirectoryError:
                pass
            except Exception:
                found["traceback"] += traceback.format_exc()
    return found


if __name__ == "__main__":
    import mmrl.comparison.verify  # noqa: F401 - loaded before memory is limited

    used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (used + SPARE_BYTES, used + SPARE_BYTES))
    for name, (damage, repeats) in damages().items():
        sys.stdout.write(json.dumps(checked(name, damage, repeats)) + "\n")
        sys.stdout.flush()
