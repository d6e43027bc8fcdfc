"""A small campaign, as `make test-faults` runs a large one."""

import json
import subprocess
import sys

import pytest

from mmrl.recipes import RECIPES
from tests.pages import ROOT


@pytest.mark.slow
def test_every_recipe_input_and_surrounding_without_a_fault(tmp_path):
    sizes = ["--kills", str(len(RECIPES)), "--mutations", "500", "--surroundings", "1"]
    words = [sys.executable, "-m", "tests.faults", *sizes, "--out", str(tmp_path / "faults.json")]
    done = subprocess.run([*words, "--scratch", str(tmp_path / "scratch")], cwd=ROOT, text=True, capture_output=True)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    result = json.loads((tmp_path / "faults.json").read_text())
    assert sum(result["kills"].values()) >= len(RECIPES)
    assert not result["faults"]
