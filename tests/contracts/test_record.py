"""The program that records the tests of several processes, workers and the label of a device."""

import os

import pytest

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


def test_without_names_all_ways_run(run_tests):
    assert len(run_tests()) == len(record.TESTS)
    assert [name.partition("[")[2] for name in run_tests("--recipe", "vlm")] == ["vlm]"] * len(record.TESTS)


def test_named_ways_run_alone(run_tests):
    (only,) = run_tests("label", "--recipe", "vlm")
    assert only.endswith(f"{record.TESTS['label'].removeprefix('../')}[vlm]")


def test_what_samples_nothing_has_no_workers(run_tests):
    assert [name.count("workers") for name in run_tests("--recipe", "sft")] == [0] * (len(record.TESTS) - 1)


def test_an_unknown_way_is_named_with_those_there_are(run_tests, capsys):
    with pytest.raises(SystemExit):
        run_tests("four")
    assert "unknown four; there are two, three, fsdp2, label, workers" in capsys.readouterr().err
