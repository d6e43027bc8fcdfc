import importlib.util

import pytest

from benchmarks.harness import BenchOptions
from benchmarks.robotics import comparisons, reading
from mmrl.errors import UserError

pytest.importorskip("av", reason="needs pip install 'mmrl-suite[vla]'")


def test_both_readers_return_the_same_pixels():
    assert "reading-64" in comparisons.NAMES
    found = reading.compare_reading(BenchOptions(quick=True), 64)
    assert not [arm for arm in found["arms"].values() if "error" in arm]
    assert [entry["passed"] for entry in found["checks"].values()] == [True]
    assert all(entry["median"] > 0 for entry in found["ratios"].values())


@pytest.mark.slow
def test_one_frame_too_early_would_be_seen(monkeypatch):
    read = reading.read_clip
    monkeypatch.setattr(reading, "read_clip", lambda path, start, *given: read(path, max(0.0, start - 0.1), *given))
    found = reading.compare_reading(BenchOptions(quick=True), 64)
    assert [name for name, entry in found["checks"].items() if not entry["passed"]] == [
        "read_clip/pixels, difference to PyAV's own loop"
    ]


def test_without_pyav_the_others_run(monkeypatch):
    found = {name: (lambda options, backend, name=name: {"notes": []}) for name in comparisons.NAMES}
    monkeypatch.setattr(comparisons, "COMPARISONS", found)
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "av" else real(name))
    assert not [name for name in comparisons.compare(BenchOptions(quick=True)) if name.startswith("reading")]
    with pytest.raises(UserError, match="need av, which is not installed"):
        comparisons.compare(BenchOptions(quick=True, only=["reading-64"]))
