"""Files that grow are read from where the last look ended, and long curves are thinned."""

import json
import math
import os

import numpy as np
import pytest

from mmrl.cli.watch import runs as tails
from mmrl.cli.watch.runs import Columns, Tail
from tests.cli.watch.runs import append


def steps(found):
    return [record["step"] for record in found[1]]


def test_a_partial_last_line_waits_for_its_end(tmp_path):
    file = tmp_path / "metrics.jsonl"
    tail = Tail(file)
    assert tail.read() == (False, [])
    append(file, {"step": 1}, {"step": 2, "é": 1}, end="")
    assert steps(tail.read()) == [1]
    append(file, {"step": 3}, end='\n{"step"')
    assert steps(tail.read()) == []  # 2 and 3 ended up in one line, which is no record
    append(file, end=": 4}\nnonsense\n[1]\n" + json.dumps({"step": 5}) + "\n")
    assert steps(tail.read()) == [4, 5]
    assert tail.read() == (False, [])


def test_a_file_that_is_replaced_or_cut_is_read_anew(tmp_path):
    file = tmp_path / "metrics.jsonl"
    append(file, {"step": 1}, {"step": 2}, {"step": 3})
    tail = Tail(file)
    assert steps(tail.read()) == [1, 2, 3]
    append(tmp_path / "new", {"step": 1}, {"step": 2}, {"step": 30})
    os.replace(tmp_path / "new", file)  # what a resumed run does, here without a change of size
    assert tail.read() == (True, [{"step": 1}, {"step": 2}, {"step": 30}])
    os.truncate(file, 12)
    assert tail.read() == (True, [{"step": 1}])
    file.unlink()
    assert tail.read() == (True, [])
    assert tail.read() == (False, [])


def test_a_long_file_is_read_in_parts(tmp_path, monkeypatch):
    monkeypatch.setattr(tails, "CHUNK", 64)
    file = tmp_path / "metrics.jsonl"
    append(file, *({"step": step} for step in range(100)))
    tail, found = Tail(file), []
    while not found or tail.behind:
        part = steps(tail.read())
        assert len(part) < 10
        found += part
    assert found == list(range(100))


def test_columns_have_nan_where_a_step_has_no_number():
    columns = Columns()
    for record in (
        {"step": 1, "a": 1},
        {"step": 2, "b": 2.0, "a": None},
        {"step": 3, "a": 3, "text": "x", "huge": 10**400},
    ):
        columns.append(record)
    np.testing.assert_equal(columns.column("a"), [1, math.nan, 3])
    np.testing.assert_equal(columns.column("b"), [math.nan, 2, math.nan])
    assert (columns.last("a"), columns.last("b"), columns.last("c")) == (3, None, None)
    assert columns.names() == ["a", "b", "huge"]
    assert columns.thinned("a", 10) == {"step": [1, 3], "mean": [1, 3]}


def test_a_step_that_is_written_again_replaces_it_and_later_ones():
    columns = Columns()
    for step, value in ((1, 1), (2, 2), (3, 3), (2, 20), (4, 40)):
        columns.append({"step": step, "a": value})
    assert columns.thinned("a", 10) == {"step": [1, 2, 4], "mean": [1, 20, 40]}


def test_a_long_curve_is_drawn_from_bucket_means_with_their_extremes():
    columns = Columns()
    for step in range(1, 20_001):
        columns.append({"step": step, "a": step, "b": 7.0 if step == 10_864 else 0.0})
    curve = columns.thinned("a", 100)
    assert {key: len(values) for key, values in curve.items()} == dict.fromkeys(("step", "mean", "low", "high"), 100)
    assert (curve["low"][0], curve["mean"][0], curve["high"][0]) == (1, 100.5, 200)
    assert (curve["low"][-1], curve["high"][-1]) == (19_801, 20_000)
    assert curve["step"] == sorted(curve["step"])
    spike = columns.thinned("b", 100)
    assert (max(spike["high"]), spike["high"].index(7)) == (7, 54)  # one step of 20,000 is still seen
    assert spike["mean"][54] == pytest.approx(0.035)


def test_a_line_without_end_is_dropped_and_counted(tmp_path, monkeypatch):
    monkeypatch.setattr(tails, "CHUNK", 64)
    monkeypatch.setattr(tails, "LONGEST_LINE", 200)
    file = tmp_path / "metrics.jsonl"
    append(file, {"step": 1}, {"step": 2, "padding": "x" * 5000}, {"step": 3})
    tail = Tail(file)
    found = []
    while not found or tail.behind:
        found += steps(tail.read())
        assert len(tail._rest) <= 200
    assert found == [1, 3]
    assert tail.damaged == 1


def test_damaged_lines_are_shown(tmp_path):
    append(tmp_path / "metrics.jsonl", {"step": 1}, {"step": 2})
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": -1}\n\n\xff\xfe\n{"step": 3}\n')
    run = tails.WatchedRun(tmp_path, "run")
    run.refresh(math.inf)
    assert run.notes() == ["metrics.jsonl: 2 lines cannot be read"]


def test_a_file_that_becomes_a_pipe_has_no_records(tmp_path):
    file = tmp_path / "metrics.jsonl"
    append(file, {"step": 1})
    tail = Tail(file)
    assert steps(tail.read()) == [1]
    file.unlink()
    os.mkfifo(file)
    assert tail.read() == (True, [])
