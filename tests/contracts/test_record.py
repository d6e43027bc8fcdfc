"""The program that records the tests of several processes, workers and the label of a device."""

import os

import pytest
import torch

from tests.contracts import record


@pytest.fixture
def run_tests(monkeypatch):
    """The tests that the program runs with these arguments."""
    given = []
    monkeypatch.setenv(record.WRITING, os.environ.get(record.WRITING, "1"))  # which the program sets
    monkeypatch.setattr(pytest, "main", lambda arguments: given.append(arguments) or 0)

    def run(*arguments):
        assert record.main(list(arguments)) == 0
        return [name for name in given[-1] if "::" in name]

    return run


def test_without_names_all_tests_run(run_tests):
    assert len(run_tests("label", "workers")) == len(record.TESTS)
    ways = ("label", "workers", "--recipe", "vlm")
    assert [name.partition("[")[2] for name in run_tests(*ways)] == ["vlm]"] * len(record.TESTS)


def test_named_ways_run_alone(run_tests):
    (only,) = run_tests("label", "--recipe", "vlm")
    assert only.endswith(f"{record.TESTS['label'].removeprefix('../')}[vlm]")


def test_what_samples_nothing_has_no_workers(run_tests):
    assert len(run_tests("label", "workers", "--recipe", "sft")) == 1


def test_an_unknown_way_is_named_with_those_there_are(run_tests, capsys):
    with pytest.raises(SystemExit):
        run_tests("four")
    assert "unknown four; there are processes, label, workers" in capsys.readouterr().err


def test_settings_that_are_recorded_are_not_measured_again(monkeypatch, tmp_path):
    measured = []
    distance = record.Distance(1e-6, 2e-6, 3e-3, 1.0)
    found = dict.fromkeys(record.PROCESSES, distance)
    monkeypatch.setattr(record, "ROWS", tmp_path / "rows.jsonl")
    monkeypatch.setattr(record, "measure", lambda name, setting: measured.append((name, setting)) or found)
    record.measure_processes(["sft", "papo"])
    assert len(measured) == len(record.settings_of("sft")) + len(record.SETTINGS)
    assert [name for name, _ in measured[:2]] == ["sft", "papo"]
    record.measure_processes(["sft", "papo"])
    assert len(measured) == len(record.settings_of("sft")) + len(record.SETTINGS)
    assert record.read_processes()["sft"] == dict.fromkeys(record.settings_of("sft"), found)


def test_a_distance_is_zero_for_equal_runs_and_names_what_differs():
    rows = [torch.tensor([[[3.0, 1.0, 0.5]]])]
    begin, weights = torch.zeros(4), torch.tensor([1.0, -2.0, 0.0, 2.0])
    whole = {"begin": begin, "weights": weights, "rows": rows, "gradient": torch.tensor([3.0, 4.0, 0.0, 0.0])}
    assert record.distance(whole, whole) == record.Distance(0.0, 0.0, 0.0, 1.0)
    other = whole | {
        "weights": weights + torch.tensor([0.0, 0.0, 0.3, 0.0]),
        "gradient": torch.tensor([3.0, 4.0, 0.05, 0.0]),
        "rows": [torch.tensor([[[3.0, 0.0, 0.5]]])],
    }
    assert record.distance(other, whole) == pytest.approx((0.01, 0.1, 0.15, 0.0))
