"""The demo as users run it; minutes, so only on demand (`make test-slow`)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mmrl.vlm.demo import SPLIT, run


@pytest.mark.slow
def test_reinforcement_learning_adds_ten_points(tmp_path, monkeypatch):
    monkeypatch.chdir(Path(__file__).parents[2])
    lines = run(tmp_path)
    result = json.loads((tmp_path / "papo" / "result.json").read_text())
    first, last = result["first_evaluation"][SPLIT], result["last_evaluation"][SPLIT]
    assert first["n"] >= 400
    for mode in ("greedy", "sampled"):
        assert last[f"accuracy/{mode}"] - first[f"accuracy/{mode}"] >= 0.10
    assert Path(lines[-1].removeprefix("report: ")).is_file()
    again = run(tmp_path)  # finished stages are kept
    assert again[1:4] == lines[1:4]
