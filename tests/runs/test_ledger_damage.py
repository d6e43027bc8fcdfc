"""A damaged ledger is refused with a sentence, whatever the damage is, and takes little memory."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from mmrl.cli.program import main
from mmrl.comparison.verify import verify
from tests.runs.damaged_ledgers import damages, sound

PROJECT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def ends():
    """End of each damaged ledger; one process reads all of them, so that it is started once."""
    program = [sys.executable, "-m", "tests.runs.damaged_ledgers"]
    done = subprocess.run(program, cwd=PROJECT, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()[-2000:]
    return {found["name"]: found for found in map(json.loads, done.stdout.splitlines())}


@pytest.mark.parametrize("name", list(damages()))
def test_a_damaged_ledger_is_refused_with_a_sentence(name, ends):
    assert ends[name]["traceback"] == ""
    assert ends[name]["sentence"]


def test_the_undamaged_ledger_is_accepted(tmp_path):
    sound(tmp_path)
    assert verify(tmp_path, lambda line: None, 0, (), ()) == 0


@pytest.mark.parametrize("damage", ["index is b'4', which nobody asked for", "the protocol asks for 10^12 tasks"])
def test_the_command_ends_with_code_2(damage, tmp_path, capsys):
    sound(tmp_path)
    damages()[damage][0](tmp_path)
    assert main(["evaluate", "--verify", str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith(f"mmrl: error: {tmp_path} is inconsistent: ")
