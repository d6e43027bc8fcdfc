"""`mmrl gui screens` writes files for the grounding recipes, and `python -m benchmarks gui` measures."""

import json

import pytest

from benchmarks.gui.comparisons import NAMES, compare
from benchmarks.harness import BenchOptions
from mmrl.cli import main
from mmrl.gui.grounding.samples import GroundingSample, target_of


@pytest.mark.slow
def test_screens_on_disk(browser, tmp_path, capsys):
    browser.close()  # the command starts its own
    arguments = ["gui", "screens", str(tmp_path / "set"), "--count", "5", "--split", "layouts", "--language", "de"]
    assert main(arguments) == 0
    file = tmp_path / "set" / "layouts.jsonl"
    assert str(file) in capsys.readouterr().out
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert len(rows) == len({row["id"] for row in rows}) == 5
    for row in rows:
        sample = GroundingSample(
            file.parent / row["image"], tuple(row["original_wh"]), row["instruction"], target_of(row)
        )
        assert sample.load_image().size == sample.original_wh
        assert sample.target.contains(sample.target.center)
        assert (row["language"], row["split"]) == ("de", "layouts")
    assert main(arguments) == 2
    assert "exists already" in capsys.readouterr().err
    browser.restart(after_failure=False)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_benchmark(browser, name):
    browser.close()
    found = compare(BenchOptions(quick=True, only=[name]))[name]
    assert not found["failed"], found
    rates = next(iter(found["floor"].values()))
    assert set(rates) == set(found["arms"])
    assert all(rate > 0 for rate in rates.values())
    browser.restart(after_failure=False)
