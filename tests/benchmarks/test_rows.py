"""The benchmark of the catalogue gives every row what it needs."""

from benchmarks import rows
from mmrl.core import all_objectives


def test_every_row_is_measured(monkeypatch):
    monkeypatch.setattr(rows, "TIMES", 1)
    monkeypatch.setattr(rows, "model_seconds", lambda: 1e-3)
    found = {row: rows.compare(row, 16, 32) for row in all_objectives()}
    decisions = float(rows.batch(16, 32)[0].mask.sum())
    for cost in found.values():
        assert cost["model_s"] == 1e-3 * decisions
        assert cost["share"] == (cost["advantages_s"] + cost["update_s"]) / cost["model_s"]
