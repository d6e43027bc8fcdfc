"""The evaluation driver: batches, order, several protocols, rows on disk, intervals."""

import contextlib
import functools
import gc
import io
import json
import math
from types import SimpleNamespace
from unittest import mock
from weakref import WeakValueDictionary

import numpy as np
import pytest
import torch
from PIL import Image
from rich.live import Live

from mmrl.runs.records import ResumableRows, SampleRecord, read_jsonl
from mmrl.runs.statistics import cluster_bootstrap_interval, wilson_interval, with_interval
from mmrl.runs.tracking import ConsoleSink, TrackingConfig
from mmrl.training import machines, run
from mmrl.training.evaluation import Measure, evaluate_tasks, unscored
from mmrl.training.processes import make_accelerator


class Squares(Measure):
    """The value of a trial is the square of its task; tasks below 0 cannot be run."""

    batch_size = 3

    def __init__(self, name="square", repeats=1, folder=None, fails=()):
        self.name, self.repeats, self.folder, self.fails = name, repeats, folder, fails
        self.batches, self.finished = [], []

    def run(self, batch, start):
        assert not torch.is_grad_enabled()
        self.batches.append((start, [trial.key for trial in batch]))
        return [
            {"index": t.index, "repeat": t.repeat, "value": t.task**2, "failed": t.key in self.fails, "frames": [1]}
            for t in batch
            if t.task >= 0
        ]

    def metrics(self, rows, tasks):
        return {f"{self.name}/sum": sum(row["value"] for row in rows), "tasks": len(tasks)}

    def record(self, row):
        return SampleRecord(id=str(row["index"]), prompt=self.name, response=str(row["value"]))

    def saved_rows(self, tasks, processes):
        return None if self.folder is None else ResumableRows(self.folder, self.name, {"tasks": tasks}, {"frames"})

    def finish(self, rows, saved):
        self.finished.append((len(rows), saved and saved.path))


def evaluate(*measures, tasks=(1, 2, 3, 4), records=2):
    return evaluate_tasks(measures, list(tasks), records, make_accelerator())


def test_tasks_are_run_in_batches_and_counted():
    measure = Squares()
    found = evaluate(measure, tasks=(1, 2, -3, 4))
    assert measure.batches == [(0, [(0, 0), (1, 0), (2, 0)]), (3, [(3, 0)])]
    assert found.metrics == {"n": 3.0, "square/sum": 21, "tasks": 4}
    assert [record.response for record in found.records] == ["1", "4"]
    assert measure.finished == [(3, None)]


def test_the_first_protocol_gives_the_count_and_the_samples():
    first, second = Squares("one"), Squares("two", repeats=2)
    found = evaluate(first, second, tasks=(1, 2))
    assert found.metrics == {"n": 2.0, "one/sum": 5, "tasks": 2, "two/sum": 10}
    assert [record.prompt for record in found.records] == ["one", "one"]
    assert second.batches == [(0, [(0, 0), (0, 1), (1, 0)]), (3, [(1, 1)])]


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize("training", [None, "bar", "quiet"])
@pytest.mark.parametrize("stream", [Terminal, io.StringIO])
def test_evaluations_show_a_bar_on_a_terminal_alone(training, stream, monkeypatch):
    """Under that of the run, as two live displays on one terminal are refused or draw over each other."""
    monkeypatch.setattr("mmrl.runs.tracking._CONSOLES", WeakValueDictionary())
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "100")
    out = stream()
    monkeypatch.setattr("sys.stdout", out)
    console = None if training is None else ConsoleSink(4, quiet=training == "quiet", stream=out)
    live = mock.patch("rich.live.Live.start", autospec=True, side_effect=Live.start)
    with live as started:
        found = evaluate(Squares())
    if console is not None:
        console.close()
    assert found.metrics["n"] == 4
    shown = stream is Terminal and training != "quiet"
    assert ("evaluation, tasks" in out.getvalue()) == shown
    assert started.call_count == (shown and training is None)


def test_a_run_that_never_ended_does_not_silence_the_bars_of_later_ones(monkeypatch):
    monkeypatch.setattr("mmrl.runs.tracking._CONSOLES", WeakValueDictionary())
    ConsoleSink(4, quiet=True)
    gc.collect()
    out = Terminal()
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setattr("sys.stdout", out)
    evaluate(Squares())
    assert "evaluation, tasks" in out.getvalue()


@pytest.mark.parametrize("quiet", [False, True])
def test_quiet_evaluations_without_training_show_no_bar(quiet, monkeypatch):
    monkeypatch.setattr("mmrl.runs.tracking._CONSOLES", WeakValueDictionary())
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setattr("sys.stdout", out := Terminal())
    recipe = SimpleNamespace(eval_tasks={"held_out": [1]}, policy=torch.nn.Linear(1, 1), close=lambda: None)
    monkeypatch.setattr(run, "_start", lambda config, trains: SimpleNamespace(device="cpu", num_processes=1))
    monkeypatch.setattr(run, "_build", lambda entry, config, accelerator: recipe)
    config = SimpleNamespace(tracking=TrackingConfig(quiet=quiet), trainer=SimpleNamespace(steps=1))
    with run.open_evaluation(None, config, None):
        assert evaluate(Squares()).metrics["n"] == 4
    assert ("evaluation, tasks" in out.getvalue()) is not quiet


def test_processes_of_an_evaluation_watch_each_other(monkeypatch):
    """From before models are loaded to the end; the others would wait for a process that was killed."""
    events, watch = [], SimpleNamespace()

    @contextlib.contextmanager
    def watched(accelerator):
        events.append("watched")
        yield watch
        events.append("over")

    def build(entry, config, accelerator):
        events.append("built")
        close = functools.partial(events.append, "closed")
        return SimpleNamespace(eval_tasks={"held_out": [1]}, policy=torch.nn.Linear(1, 1), close=close)

    monkeypatch.setattr(machines, "watched", watched)
    monkeypatch.setattr(run, "_start", lambda config, trains: SimpleNamespace(device="cpu", num_processes=2))
    monkeypatch.setattr(run, "_build", build)
    with run.open_evaluation(None, SimpleNamespace(trainer=SimpleNamespace()), None):
        assert watch.stage() == "the evaluation"
    assert events == ["watched", "built", "closed", "over"]


def test_without_tasks_nothing_is_run():
    found = evaluate(Squares(), tasks=())
    assert found.metrics == {"n": 0.0, "square/sum": 0, "tasks": 0}
    assert found.records == []


def test_an_interrupted_evaluation_continues_with_whole_batches(tmp_path, caplog):
    tasks = range(1, 10)
    broken = Squares(folder=tmp_path, fails={(1, 0)})
    run = broken.run
    broken.run = lambda batch, start: run(batch, start) if start < 6 else pytest.fail("interrupted")
    with pytest.raises(pytest.fail.Exception):
        evaluate(broken, tasks=tasks)
    path = broken.saved_rows(list(tasks), 1).path
    assert [row["index"] for row in read_jsonl(path)] == list(range(6))
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:5]))  # killed between the rows of a batch
    again = Squares(folder=tmp_path)
    assert evaluate(again, tasks=tasks).metrics["square/sum"] == sum(task**2 for task in tasks)
    # the first batch had a failure, the second one was cut; what is computed together is as without the cut
    assert again.batches == [(start, [(start + row, 0) for row in range(3)]) for start in (0, 3, 6)]
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:6]))
    third = Squares(folder=tmp_path)
    with caplog.at_level("INFO"):
        evaluate(third, tasks=tasks)
    assert third.batches == [(6, [(6, 0), (7, 0), (8, 0)])]
    assert f"6 of 9 tasks were read from {path}" in caplog.text
    assert [(row["index"], row["failed"]) for row in read_jsonl(path)] == [(index, False) for index in range(9)]
    assert "frames" not in read_jsonl(path)[0]
    assert json.loads(path.with_suffix(".protocol.json").read_text()) == {"tasks": list(tasks)}
    assert third.finished == [(9, path)]


def test_samples_of_rows_that_are_taken_over_keep_their_images(tmp_path):
    class Drawn(Squares):
        def record(self, row):
            image = Image.new("RGB", (4, 3), (row["frames"][0], row["index"], 7))
            return SampleRecord(id=str(row["index"]), prompt="p", response="r", outputs=[image], terms={"a": math.nan})

    first = evaluate(Drawn(folder=tmp_path), tasks=(1, 2, 3)).records
    again = Drawn(folder=tmp_path)
    second = evaluate(again, tasks=(1, 2, 3)).records
    assert again.batches == []
    assert [record.id for record in second] == ["0", "1"]
    assert [record.outputs[0].tobytes() for record in second] == [record.outputs[0].tobytes() for record in first]
    assert math.isnan(second[0].terms["a"])


@pytest.mark.parametrize("row", ['{"index": "0", "repeat": 0}', '{"repeat": 0}', '{"index": 7, "repeat": 0}'])
def test_rows_that_name_no_trial_are_run_again(tmp_path, row):
    rows = Squares(folder=tmp_path).saved_rows([1, 2, 3], 1)
    tmp_path.mkdir(exist_ok=True)
    rows.path.write_text(row + "\n")
    again = Squares(folder=tmp_path)
    assert evaluate(again, tasks=(1, 2, 3)).metrics["square/sum"] == 14


def test_rows_of_other_conditions_are_left_alone(tmp_path):
    evaluate(Squares(folder=tmp_path))
    other = Squares(folder=tmp_path)
    evaluate(other, tasks=(5, 6))
    assert other.batches == [(0, [(0, 0), (1, 0)])]
    assert len(list(tmp_path.glob("square-*.jsonl"))) == 2


def test_files_of_several_processes_are_joined(tmp_path):
    rows = ResumableRows(tmp_path, "square", {})
    for process in (0, 1):
        log = rows.appender(process, 2)
        log.append({"index": process, "repeat": 0, "value": process})
        log.close()
    assert not rows.path.exists()
    assert [row["index"] for row in rows.read()] == [0, 1]
    rows.write(rows.read())
    assert [path.name for path in sorted(tmp_path.glob("*.jsonl"))] == [rows.path.name]
    assert [row["index"] for row in rows.read()] == [0, 1]


def test_every_process_runs_its_share(monkeypatch):
    import mmrl.training.evaluation as evaluation

    accelerator = SimpleNamespace(num_processes=2, process_index=1, is_main_process=False)
    monkeypatch.setattr(evaluation, "merge_lists", lambda rows, _: rows)
    measure = Squares()
    evaluate_tasks([measure], [1, 2, 3, 4], 0, accelerator)
    assert measure.batches == [(0, [(1, 0), (3, 0)])]
    assert measure.finished == []


def test_intervals_leave_out_unscored_rows():
    nan = math.nan
    values = [[1.0, nan], [nan], [0.0, 1.0]]
    assert unscored(values) == 2
    found = with_interval("score", values, np.random.default_rng(3))
    low, high = cluster_bootstrap_interval([[1.0], [0.0, 1.0]], np.random.default_rng(3))
    assert found == {"score": pytest.approx(2 / 3), "score/low": low, "score/high": high}
    low, high = wilson_interval(1, 2)
    assert with_interval("share", [[1.0], [0.0]], None) == {"share": 0.5, "share/low": low, "share/high": high}
    assert all(math.isnan(value) for value in with_interval("none", [[nan], []], None).values())
