"""A run folder that may still grow: its JSON Lines files, its progress, its failures, and the samples of a step."""

from __future__ import annotations

import math
import os
import re
import socket
import time
from array import array
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from mmrl.errors import UserError
from mmrl.files import LONGEST_LINE, is_file, last_line, open_file, read_json_object, read_text, read_yaml
from mmrl.report.gallery import question, readable, readable_answer
from mmrl.runs.folder import DONE, LOCK_FILE, NOTHING_LEARNED
from mmrl.runs.metrics import STAGES, STAGES_BETWEEN, label, measured
from mmrl.runs.records import STEP_NAME, iterate_jsonl, parsed_line, read_warnings
from mmrl.runs.statistics import HEADLINES, SHARES

CHUNK = 2**22
"""Bytes read at a time, so that requests can be answered while a long file is read."""
LARGEST_STEP = 2**53


class Tail:
    """Records that a JSON Lines file has gained since the last read.

    A partial last line is kept until it is complete. A file that was replaced or cut, as by `--resume`, is read again.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.behind = False
        """Whether the file continues after the part read last."""
        self.damaged = 0
        """Number of lines so far that could not be read."""
        self._rest = b""
        self._forget(0)

    def read(self) -> tuple[bool, list[dict[str, Any]]]:
        """Whether the records of earlier reads are obsolete, and the new records."""
        try:
            with open_file(self.path) as file:
                found = os.fstat(file.fileno())
                anew = found.st_ino != self._inode or found.st_size < self._offset
                if anew:
                    self._forget(found.st_ino)
                file.seek(self._offset)
                data = file.read(CHUNK)
        except (OSError, UserError):  # not there yet, moved aside by a run that starts again, or no file
            anew = self._inode != 0
            self._forget(0)
            self.behind = False
            return anew, []
        self._offset += len(data)
        self.behind = self._offset < found.st_size
        *lines, rest = (self._rest + data).split(b"\n")
        # what follows this byte is no JSON: of a line that is too long nothing needs to be kept
        self._rest = rest if len(rest) <= LONGEST_LINE else b"\0"
        records = [record for line in lines if (record := _record(line)) is not None]
        self.damaged += sum(bool(line.strip()) for line in lines) - len(records)
        return anew, records

    def _forget(self, inode: int) -> None:
        """Start again with another file, or with none."""
        self._inode = inode
        self._offset = 0
        self._rest = b""
        self.damaged = 0


def _record(line: bytes) -> dict[str, Any] | None:
    record = parsed_line(line)
    step = record.get("step") if record is not None else None
    return record if type(step) is int and 0 <= step < LARGEST_STEP else None


class Columns:
    """Numbers of a run by metric, one per step; a step that is written again replaces itself and all later ones."""

    def __init__(self) -> None:
        self.steps = array("q")
        self._values: dict[str, array[float]] = {}

    def __len__(self) -> int:
        return len(self.steps)

    def append(self, record: Mapping[str, Any]) -> None:
        """Add the numbers of one step."""
        keep = bisect_left(self.steps, record["step"])
        if keep < len(self.steps):
            del self.steps[keep:]
            for values in self._values.values():
                del values[keep:]
        self.steps.append(record["step"])
        for name, value in record.items():
            if isinstance(value, int | float) and name != "step" and abs(value) < math.inf:
                column = self._values.setdefault(name, array("d"))
                column.extend([math.nan] * (keep - len(column)))
                column.append(min(max(value, -1e300), 1e300))  # a whole number may be larger than any float

    def names(self) -> list[str]:
        """Metrics in order of first appearance."""
        return list(self._values)

    def column(self, name: str) -> np.ndarray:
        """Values of a metric, NaN for steps without one."""
        found = np.full(len(self.steps), math.nan)
        values = self._values.get(name, ())
        found[: len(values)] = values
        return found

    def last(self, name: str) -> float | None:
        """Newest step, or None."""
        column = self._values.get(name, ())
        return column[-1] if column and len(column) == len(self.steps) else None

    def thinned(self, name: str, points: int) -> dict[str, list[float]]:
        """A curve with at most `points` points: the values, or the mean, minimum and maximum of each bucket."""
        values = self.column(name)
        kept = np.isfinite(values)
        steps, values = np.array(self.steps)[kept], values[kept]
        if len(values) <= points:
            return {"step": steps.tolist(), "mean": short(values)}
        starts = np.arange(points) * len(values) // points
        counts = np.diff(np.append(starts, len(values)))
        return {
            "step": steps[starts + counts // 2].tolist(),
            "mean": short(np.add.reduceat(values, starts) / counts),
            "low": short(np.minimum.reduceat(values, starts)),
            "high": short(np.maximum.reduceat(values, starts)),
        }


def short(values: np.ndarray) -> list[float]:
    """Numbers with five significant digits, which is more than a chart shows."""
    return [float(f"{value:.5g}") for value in values]


LOCK_TEXT = re.compile(r"process (\d+) on (\S+)")
RECENT_STEPS = 100
"""Number of recent steps used to estimate the remaining time; earlier ones may precede a pause."""
SERVED = re.compile(r"samples/step-\d+/[\w-]+\.png|videos/step-\d+[\w.=-]*\.mp4")
"""Files of a run folder that the page may request."""
MOST_SAMPLES = 32
MOST_ROWS = 1000
"""Maximum number of warnings or samples read from a file."""
SUMMED = ("reward/errors", "rollers/lost", "rollers/again")
"""Metrics that count events per step; other counters below count from the start of the run."""
COUNTED = ("checkpoint/failed", "optim/skipped", "optim/overflows", "data/skipped", "sim/", "env/")


class WatchedRun:
    """Records of one run; `refresh` reads new records from its folder."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder = folder
        self.name = name
        self.metrics = Columns()
        self.evaluations: list[dict[str, Any]] = []
        self._tails = Tail(folder / "metrics.jsonl"), Tail(folder / "evaluations.jsonl")

    def refresh(self, deadline: float) -> bool:
        """Read until nothing is left or the time is up; returns whether nothing is left."""
        metrics, evaluations = self._tails
        while True:
            anew, records = metrics.read()
            if anew:
                self.metrics = Columns()
            for record in records:
                self.metrics.append(record)
            again, found = evaluations.read()
            self.evaluations = ([] if again else self.evaluations) + [
                record for record in found if record.get("tag") != "evaluate"
            ]
            if not (metrics.behind or evaluations.behind):
                return True
            if time.monotonic() > deadline:
                return False

    def state(self) -> tuple[str, str]:
        """State (running, finished, failed, stopped or waiting) and the reason for a failure."""
        if _is_locked(self.folder / LOCK_FILE):
            return "running", ""
        failed = self._json("experiment_run.json").get("failed")
        if failed:
            return "failed", str(failed)
        result = self._json("result.json")
        if result.get("status") == NOTHING_LEARNED:
            return "failed", str(result.get("reason", ""))
        if result.get("status") == DONE:
            return "finished", ""
        crashes = sorted(self.folder.glob("mmrl-crash-*.txt"))
        if crashes:
            return "failed", f"{_last_line(crashes[-1])} ({crashes[-1].name})"
        return ("stopped" if len(self.metrics) or self.evaluations else "waiting"), ""

    def status(self) -> dict[str, Any]:
        """Facts about the run for the head of the page."""
        state, reason = self.state()
        trainer = self._config().get("trainer")
        steps = trainer.get("steps", 0) if isinstance(trainer, dict) else 0
        step = self.metrics.steps[-1] if self.metrics else max((row["step"] for row in self.evaluations), default=0)
        return {
            "name": self.name,
            "state": state,
            "reason": reason,
            "step": step,
            "steps": steps,
            "left_s": self._seconds_left(steps) if state == "running" else None,
            "updated": max(_stamp(tail.path) for tail in self._tails) or None,
            "headline": self._headline(),
            "stages": self._stages(),
            "notes": self.notes(),
            "sample_steps": self.sample_steps(),
        }

    def notes(self) -> list[str]:
        """Warnings, failure counts, and the reasons why environments failed."""
        notes = [readable(text) for text in read_warnings(self.folder)]
        notes += [f"{tail.path.name}: {tail.damaged} lines cannot be read" for tail in self._tails if tail.damaged]
        for name in self.metrics.names():
            if name.startswith(SUMMED) and (total := float(_sum(self.metrics, name))) > 0:
                notes.append(f"{name}: {total:g} in {len(self.metrics)} steps")
            elif name.startswith(COUNTED) and (self.metrics.last(name) or 0) > 0:
                notes.append(f"{name}: {self.metrics.last(name):g}")
        failures = sorted((self.folder / "failures").glob("*.txt"))
        return notes + [f"{path.name}: {_last_line(path)}" for path in failures[:10]]

    def sample_steps(self) -> list[int]:
        """Steps with samples or videos, in ascending order."""
        paths = [path for kind in ("samples", "videos") for path in (self.folder / kind).glob("step-*")]
        return sorted({int(found[1]) for path in paths if (found := STEP_NAME.match(path.name))})

    def samples(self, step: int) -> dict[str, Any]:
        """Samples and videos of one step."""
        folder = self.folder / "samples" / f"step-{step:06d}"
        splits = {path.stem: _rows(path)[:MOST_SAMPLES] for path in sorted(folder.glob("*.jsonl"))}
        videos = [f"videos/{path.name}" for path in sorted((self.folder / "videos").glob(f"step-{step:06d}*.mp4"))]
        return {
            "step": step,
            "splits": {split: [_sample(row, folder.name) for row in rows] for split, rows in splits.items() if rows},
            "videos": [path for path in videos if SERVED.fullmatch(path)],
        }

    def file(self, path: str) -> Path | None:
        """An image or video in the folder; None for anything else, also for links that lead outside."""
        place = self.folder / path
        if not SERVED.fullmatch(path) or not is_file(place):
            return None
        return place if place.resolve().is_relative_to(self.folder.resolve()) else None

    def settings(self) -> dict[str, str]:
        """Every option with its value."""
        return dict(_flat(self._config()))

    def _headline(self) -> list[tuple[str, str]]:
        """The first split's latest value, then rewards and metrics that show whether anything is learned."""
        shown = []
        for name in measured(self.evaluations, HEADLINES)[:1]:
            rows = [row for row in self.evaluations if name in row]
            row = [row for row in rows if row.get("split") == rows[0].get("split")][-1]
            shown.append((f"{label(name)} on {row.get('split', '')}, step {row['step']}", estimate_text(row, name)))
        for name, title in (
            ("reward/mean", "reward"),
            ("policy/kl_ref", "KL"),
            ("policy/entropy", "entropy"),
            ("reward/zero_variance_groups", "equal groups"),
            ("tokens/per_second", "decisions/s"),
        ):
            value = self.metrics.last(name)
            if value is not None:
                share, large = title == "equal groups", abs(value) >= 1000
                shown.append((title, f"{100 * value:.0f}%" if share else f"{value:,.0f}" if large else f"{value:.4g}"))
        return shown

    def _stages(self) -> list[tuple[str, float]]:
        times = ((stage, self.metrics.last(f"time/{stage}") or 0.0) for stage in (*STAGES, *STAGES_BETWEEN))
        return [(stage, round(seconds, 3)) for stage, seconds in times if seconds > 0]

    def _seconds_left(self, steps: int) -> float | None:
        times = self.metrics.column("time")[-RECENT_STEPS:]
        recent = self.metrics.steps[-RECENT_STEPS:]
        if len(recent) < 2 or not recent[-1] > recent[0] or steps < recent[-1]:
            return None
        seconds = float(times[-1] - times[0]) / (recent[-1] - recent[0]) * (steps - recent[-1])
        return round(seconds) if 0 <= seconds < 1e9 else None

    def _json(self, name: str) -> dict[str, Any]:
        return json_object(self.folder / name)

    def _config(self) -> dict[str, Any]:
        return _yaml_object(str(self.folder / "config.yaml"), _stamp(self.folder / "config.yaml"))


def estimate_text(row: Mapping[str, Any], name: str) -> str:
    """A number of an evaluation with its interval; fractions in percent."""
    return interval_text([row.get(key) for key in (name, f"{name}/low", f"{name}/high")], name.startswith(SHARES))


def interval_text(values: Sequence[Any], share: bool, sign: str = "") -> str:
    """A number and its interval: fractions in percent, differences of fractions in points with a sign."""
    known = [value for value in values if isinstance(value, int | float)]
    texts = [f"{100 * value:{sign}.1f}" if share else f"{value:{sign}.3g}" for value in known]
    interval = f" [{texts[1]}, {texts[2]}]" if len(texts) == 3 else ""
    return f"{texts[0]}{'%' if share and not sign else ''}{interval}" if texts else "–"


def _sample(row: Mapping[str, Any], folder: str) -> dict[str, Any]:
    names = {key: value for key in ("images", "outputs") if isinstance(value := row.get(key), list)}
    paths = {key: [f"samples/{folder}/{name}" for name in value] for key, value in names.items()}
    found = {key: value for key, value in row.items() if isinstance(value, str)}
    texts = {key: (readable_answer if key == "response" else readable)(value) for key, value in found.items()}
    texts["question"] = question(found.get("prompt", ""))
    numbers = {key: row.get(key) for key in ("reward", "advantage", "correct")}
    terms = row.get("terms")
    return {
        **{key: texts.get(key, "") for key in ("id", "question", "prompt", "response", "answer", "finish")},
        **{key: value for key, value in numbers.items() if isinstance(value, int | float)},
        "terms": terms if isinstance(terms, dict) else {},
        **{key: [path for path in value if SERVED.fullmatch(path)] for key, value in paths.items()},
    }


def _is_locked(lock: Path) -> bool:
    """Whether a lock's process is running; assumed true for another machine.

    The lock itself is not tried: a run that starts at that moment would find it taken.
    """
    try:
        found = LOCK_TEXT.match(read_text(lock, errors="replace"))
    except (OSError, UserError):
        return False
    if found is None or found[2] != socket.gethostname():
        return True
    try:
        os.kill(int(found[1]), 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:  # another user's
        pass
    return True


def _stamp(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def json_object(path: Path) -> dict[str, Any]:
    """Content of a JSON file, read again only after a change; empty if it is missing or damaged."""
    return _json_object(str(path), _stamp(path))


@lru_cache(maxsize=1024)
def _json_object(path: str, stamp: float) -> dict[str, Any]:
    try:
        return read_json_object(Path(path)) if stamp else {}
    except UserError:
        return {}


@lru_cache(maxsize=256)
def _yaml_object(path: str, stamp: float) -> dict[str, Any]:
    try:
        found = read_yaml(path, errors="replace")
    except (OSError, UserError):
        return {}
    return found if isinstance(found, dict) else {}


def _flat(content: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    found = []
    for key, value in content.items():
        name = f"{prefix}{key}"
        found += _flat(value, f"{name}.") if isinstance(value, dict) and value else [(name, str(value))]
    return found


def _sum(metrics: Columns, name: str) -> float:
    column = metrics.column(name)
    return float(column[column == column].sum())


def _last_line(path: Path) -> str:
    return readable(last_line(path)[:300])


def _rows(path: Path) -> list[dict[str, Any]]:
    """The first records of a JSON Lines file that a page shows; none if it cannot be read."""
    try:
        return list(islice(iterate_jsonl(path), MOST_ROWS))
    except (OSError, UserError):
        return []
