import os
import signal
import subprocess
from types import SimpleNamespace

import pytest
import torch

from mmrl.training import processes as machine


@pytest.fixture
def probes(monkeypatch):
    """A machine that reports AMX and has no GPU; yields the list of started probes."""
    monkeypatch.setattr(machine, "_announces_amx", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv(machine.LIMIT, "")
    monkeypatch.delenv(machine.LIMIT)
    machine.avoid_refused_instructions.cache_clear()
    started = []
    yield started
    machine.avoid_refused_instructions.cache_clear()


def answer(monkeypatch, probes, code):
    run = lambda command, **_: probes.append(command) or SimpleNamespace(returncode=code)  # noqa: E731
    monkeypatch.setattr(subprocess, "run", run)


def test_refused_instructions_are_avoided(monkeypatch, probes, caplog):
    answer(monkeypatch, probes, -signal.SIGILL)
    machine.avoid_refused_instructions()
    machine.avoid_refused_instructions()
    assert len(probes) == 1
    assert os.environ[machine.LIMIT] == "AVX512_CORE_BF16"
    assert "refuses" in caplog.text


def test_a_machine_with_working_features_is_left_alone(monkeypatch, probes):
    answer(monkeypatch, probes, 0)
    machine.avoid_refused_instructions()
    assert len(probes) == 1
    assert machine.LIMIT not in os.environ


def test_a_limit_that_was_set_stays(monkeypatch, probes):
    answer(monkeypatch, probes, -signal.SIGILL)
    monkeypatch.setenv(machine.LIMIT, "AVX2")
    machine.avoid_refused_instructions()
    assert not probes
    assert os.environ[machine.LIMIT] == "AVX2"
