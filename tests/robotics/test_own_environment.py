"""A user's own Gymnasium environment and policy, as README and docs show it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs" / "robotics.md"


@pytest.fixture
def example(tmp_path):
    """A folder with the files that the docs show."""
    names = r"my_robot\.py|my_training\.py|my_robot\.yaml"
    blocks = re.findall(rf"```(?:python|yaml)\n# ({names})\n(.*?)```", DOCS.read_text(encoding="utf-8"), re.S)
    assert [name for name, _ in blocks] == ["my_robot.py", "my_training.py", "my_robot.yaml"]
    for name, text in blocks:
        (tmp_path / name).write_text(text, encoding="utf-8")
    return tmp_path


def run(folder: Path, *command: str) -> str:
    done = subprocess.run(
        [sys.executable, *command], cwd=folder, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout + done.stderr


def test_the_example_of_the_docs_trains(example):
    run(example, "my_training.py")
    assert (example / "runs" / "my-robot" / "report.html").is_file()
    rows = (example / "runs" / "my-robot" / "metrics.jsonl").read_text().splitlines()
    assert len(rows) == 20
    last = json.loads((example / "runs" / "my-robot" / "evaluations.jsonl").read_text().splitlines()[-1])
    assert last["success/sampled"] >= 0.8, "the example learns, wherever its new policy begins"


def test_the_example_of_the_docs_runs_from_the_command_line_and_its_folder_can_be_moved(example):
    run(example, "-m", "mmrl.cli", "train", "my_robot.yaml", "trainer.steps=2", "sim.workers=2")
    moved = example / "elsewhere"
    (example / "runs" / "my-robot").rename(moved)
    said = run(example, "-m", "mmrl.cli", "evaluate", "elsewhere")
    assert "20 of 20 episodes are taken from" in said  # those of the last evaluation of the run
    assert not (example / "runs" / "my-robot").exists()
