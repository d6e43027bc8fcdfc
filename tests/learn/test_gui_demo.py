"""The screens demonstration as users run it; minutes and a browser, so only on demand (`make test-slow`)."""

import json
from pathlib import Path

import pytest

from mmrl.gui.browser.browser import find_chromium
from mmrl.gui.toy.gui_demo import run

FUNCTION, NAME = "accuracy/greedy/kind=function", "accuracy/greedy/kind=name"


@pytest.mark.slow
@pytest.mark.skipif(find_chromium() is None, reason="no browser")
def test_names_come_from_examples_and_functions_from_rewards(tmp_path, monkeypatch):
    monkeypatch.chdir(Path(__file__).parents[2])
    lines = run(tmp_path)
    result = json.loads((tmp_path / "aepo" / "result.json").read_text())
    before, after = (result[when]["heldout"] for when in ("first_evaluation", "last_evaluation"))
    assert before[NAME] >= 0.8
    assert before[FUNCTION] <= 0.2
    # five seeds gained 7 to 33 points on functions and lost none to 23 on names
    assert after[FUNCTION] >= before[FUNCTION] + 0.03
    assert after[NAME] >= before[NAME] - 0.35
    assert list((tmp_path / "agent" / "videos").glob("*.mp4"))
    assert Path(lines[-1].partition(": ")[2]).is_file()
