"""Rewards that execute text written by a model."""

import contextlib
import os
import sys
from pathlib import Path

import pytest

from mmrl.errors import UserError
from mmrl.rewards import RewardConfig, RewardSum, isolated
from mmrl.workers import sandbox

USER = str(Path(__file__).with_name("user_functions.py"))
REASON = sandbox.why_not() if sys.platform == "linux" else "not Linux"
strictly = pytest.mark.skipif(REASON is not None, reason=f"no strict processes here: {REASON}")


def score(programs, **options):
    config = RewardConfig("mine", f"{USER}:runs_programs", sandbox="strict", timeout_s=20.0, **options)
    with contextlib.closing(RewardSum([config], workers=1)) as rewards:
        return rewards.score(["q"] * len(programs), programs, {})


@strictly
def test_what_a_model_wrote_changes_nothing_outside(tmp_path, monkeypatch):
    monkeypatch.setenv("MMRL_TEST_SECRET", "sesame")
    programs = [
        "reward = 1.0",
        f"open({str(tmp_path / 'new')!r}, 'w')",
        "import socket; socket.create_connection(('127.0.0.1', 9))",
        "import os; reward = float('MMRL_TEST_SECRET' in os.environ)",
        "import os; reward = float(os.getcwd() == os.environ['TMPDIR']); open('x', 'w').write('x')",
        f"import os; os.kill({os.getpid()}, 9)",
        "import numpy; reward = float(numpy.ones(3).sum())",
    ]
    result = score(programs)
    assert [result.terms["mine"][row] for row in (0, 3, 4, 6)] == [1.0, 0.0, 1.0, 3.0]
    assert result.errors == {"mine/raised": 3}
    assert not list(tmp_path.iterdir())


@strictly
def test_no_process_outlives_the_call(closing):
    rewards = closing(RewardSum([RewardConfig("mine", f"{USER}:runs_programs", sandbox="strict")], workers=1))
    rewards.score(["q"], ["reward = 1.0"], {})
    assert all(not workers._pool.processes() for workers in rewards._workers.values())
    assert rewards.score(["q"], ["reward = 2.0"], {}).total == [2.0]


@strictly
def test_memory_that_a_program_takes_is_bounded():
    result = score(["x = bytearray(3 << 30)", "reward = 1.0"], memory_mb=1024)
    assert result.total[1] == 1.0
    assert sum(result.errors.values()) == 1


@strictly
def test_threads_and_folders_that_a_program_makes_are_bounded():
    threads = """
import threading, time
for _ in range(30):
    threading.Thread(target=time.sleep, args=(30,), daemon=True).start()
time.sleep(30)
"""
    folders = """
import itertools, os, time
for number in itertools.count():
    os.makedirs(f"{number}/x")
"""
    result = score([threads, folders, "reward = 1.0"])
    assert result.total[2] == 1.0
    assert result.errors in ({"mine/limit": 2}, {"mine/limit": 1, "mine/raised": 1})  # setrlimit binds users but root
    assert "at most 10000 are allowed" in result.examples["mine/limit"] or "at most 16" in result.examples["mine/limit"]


def test_strict_needs_its_own_process():
    with pytest.raises(UserError, match="sandbox=strict requires a worker process"):
        score([], isolate=False)


def test_strict_is_refused_where_it_cannot_be_kept(monkeypatch):
    def refuse():
        raise UserError("sandbox: strict cannot guarantee isolation on this machine")

    monkeypatch.setattr(isolated, "require_strict", refuse)
    with pytest.raises(UserError, match="cannot guarantee isolation"):
        score([])
