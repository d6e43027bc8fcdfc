"""The demo as users run it; minutes, so only on demand (`make test-slow`)."""

import json
from pathlib import Path

import pytest

from mmrl.vlm.toy.demo import SPLITS, run


@pytest.mark.slow
def test_reinforcement_learning_adds_ten_points_and_loses_nothing_without_hints(tmp_path, monkeypatch):
    monkeypatch.chdir(Path(__file__).parents[2])
    lines = run(tmp_path)
    result = json.loads((tmp_path / "papo" / "result.json").read_text())
    whole, no_hint = ([result[when][split] for when in ("first_evaluation", "last_evaluation")] for split in SPLITS)
    assert whole[0]["n"] >= 400
    assert whole[1]["accuracy/greedy"] - whole[0]["accuracy/greedy"] >= 0.10
    assert no_hint[1]["accuracy/greedy"] >= no_hint[0]["accuracy/greedy"]
    assert Path(lines[-1].removeprefix("report: ")).is_file()
    again = run(tmp_path)  # finished stages are kept
    assert again[1:4] == lines[1:4]
