"""The benchmark of slow tools runs all calls in every way, and with TRL's loop if it is installed."""

from importlib.util import find_spec

import pytest

from benchmarks.agents import slow_tools


@pytest.mark.parametrize("peer", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_every_way_runs_all_calls(monkeypatch, peer):
    if peer:
        pytest.importorskip("trl", reason="pip install 'mmrl-suite[bench]'")
    slept = []
    monkeypatch.setattr(slow_tools, "CASES", {"short": 4})
    monkeypatch.setattr(slow_tools, "WORKERS", 2)
    monkeypatch.setattr(slow_tools, "TURNS", 2)
    monkeypatch.setattr(slow_tools, "find_spec", find_spec if peer else lambda name: None)
    monkeypatch.setattr(slow_tools, "sleep_s", lambda case, seed, turn: slept.append((seed, turn)) or 0.001)
    found = slow_tools.compare("short", rounds=1)
    assert set(found) == {*slow_tools.WAYS, *([slow_tools.PEER] if peer else [])}
    assert all(way["wall_s"] > 0 for way in found.values())
    assert found["in lock-step"]["faster"] == 1
    assert set(slept) == {(seed, turn) for seed in range(4) for turn in range(slow_tools.TURNS)}
