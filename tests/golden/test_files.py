"""Every method has golden numbers, and every file names their source."""

from __future__ import annotations

import re
from importlib.util import find_spec

import pytest

from mmrl.core import CATALOGUE, PREFERENCES
from tests.golden.numbers import FOLDER, PAPERS, load

SHARED = {"flow_grpo_fast": "flow_grpo"}
"""Rows that differ from another one in constants only."""
WITHOUT_PROGRAM = {"reg_grpo": "the authors' code could not be had, and no other program computes it"}
"""Rows that no program was run for: tests/core/reference.py computes them from the paper's text, and a finite
difference checks the gradient."""


@pytest.mark.parametrize("name", [*CATALOGUE, *PREFERENCES])
def test_every_row_of_the_catalogue_has_a_file(name):
    paper = SHARED.get(name, name)
    if name in WITHOUT_PROGRAM:
        assert paper not in PAPERS, "it has a file now; take it out of WITHOUT_PROGRAM"
        return
    assert paper in PAPERS, f"tests/golden/{paper}.json is missing: see tests/golden/README.md"
    used = [path.name for path in FOLDER.glob("test_*.py") if f'"{paper}"' in path.read_text(encoding="utf-8")]
    assert used, f"no test reads tests/golden/{paper}.json"


@pytest.mark.parametrize("paper", PAPERS)
def test_a_file_names_program_version_and_command(paper):
    file = load(paper)
    assert file.command.startswith(f"python -m tests.golden.make.{paper}")
    assert find_spec(f"tests.golden.make.{paper}")
    assert file.made_with
    assert file.inputs
    for peer in file.peers:
        assert re.search(r"at [0-9a-f]{12}|^[a-z]+ \d+\.\d+", peer["program"]), "a version or a commit"
        assert peer["calls"]
        assert 0 < peer["relative"] <= 1e-12 or peer["because"]
