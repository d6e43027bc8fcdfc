"""A run folder with a file that nobody can read: watch, report and doctor go on or say which file it is."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from mmrl.cli.program import main
from tests.report.damaged_runs import FILES, cases, growing, sound

PROJECT = Path(__file__).resolve().parents[2]
REFUSED = "a named pipe", "an endless device", "20 GB of NULs"
"""Damages of which nothing can be shown, so that the file is named."""
NEEDED = "metrics.jsonl", "evaluations.jsonl", "warnings.jsonl"


@pytest.fixture(scope="module")
def ends():
    """What became of each damaged folder; one process reads all of them, so that it is started once."""
    done = subprocess.run([sys.executable, "-m", "tests.report.damaged_runs"], cwd=PROJECT, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()[-2000:]
    return {found["name"]: found for found in map(json.loads, done.stdout.splitlines())}


@pytest.mark.parametrize("name", list(cases()))
def test_a_damaged_file_of_a_run_ends_nothing(name, ends):
    file, _, damage = name.partition(": ")
    assert ends[name]["tracebacks"] == ""
    assert all(file.rpartition("/")[2] in sentence for sentence in ends[name]["sentences"])
    if file in NEEDED and damage in REFUSED:
        assert ends[name]["sentences"]


def test_the_undamaged_folder_is_read(tmp_path, capsys):
    sound(tmp_path)
    assert set(FILES) > {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()}
    assert main(["watch", "--text", "--once", str(tmp_path)]) == 0
    assert "step 2 of 3" in capsys.readouterr().out


def test_a_configuration_that_grows_is_refused(tmp_path, capsys):
    (tmp_path / "config.yaml").write_text(growing())
    assert main(["train", str(tmp_path / "config.yaml")]) == 2
    assert "more than 100000 keys and values, counting those repeated by aliases" in capsys.readouterr().err
    (tmp_path / "again.yaml").write_text("trainer: &a\n  steps: 3\n  again: *a\n")
    assert main(["compare", str(tmp_path / "again.yaml")]) == 2
    assert "the anchor &a contains an alias of itself" in capsys.readouterr().err
