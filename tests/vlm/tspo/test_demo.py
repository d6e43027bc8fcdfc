"""The video demo in small: the chain of its stages and its output."""

import re
from pathlib import Path

import pytest

from mmrl.runs.records import read_samples
from mmrl.training import run as stages
from mmrl.vlm.toy import video_demo as demo
from tests.example_runs import shrink_demo

MODEL = "{hidden: 32, layers: 1, vision_hidden: 32, vision_depth: 1, min_pixels: 3136, max_pixels: 3136}"
CLIP = "{width: 16, hidden: 16, layers: 1, steps: 1, examples: 1}"
SMALL = {
    "needle_sft.yaml": [
        *(f"model.build_options={MODEL}", "data.build_options.count=8", "trainer.warmup_steps=0"),
        *("eval_data.readings.build_options.count=4",),
    ],
    "needle_tspo_vlm.yaml": [
        *(f"features.build_options={CLIP}", "data.build_options={count: 4, split: train, frames: 26, decoys: 0}"),
        "eval_data.heldout.build_options={count: 4, split: test, frames: 26, decoys: 0}",
    ],
}
COMMON = [
    *("trainer.steps=2", "trainer.tasks_per_step=2", "evaluation.every=1"),
    *("tracking.quiet=true", "tracking.strict=true"),
]


@pytest.fixture
def small(monkeypatch):
    shrink_demo(monkeypatch, demo, COMMON, SMALL)


@pytest.mark.slow
def test_the_demo_compares_selections_and_shows_the_picks(tmp_path, small, monkeypatch):
    lines = demo.run(tmp_path / "demo")
    text = "\n".join(lines)
    share = r"\d+\.\d% \[ *\d+\.\d, +\d+\.\d\]"
    for words, strategy, _ in demo.ROWS:
        recall = "–" if strategy == "needle" else share
        assert re.search(rf"^{re.escape(words)} +{share} +{recall}$", text, re.MULTILINE), words
    assert re.search(rf"^{re.escape(demo.NOTHING)} +{share} +–$", text, re.MULTILINE)
    assert Path(lines[-1].removeprefix("report: ")).is_file()
    for step in (0, 2):
        assert all(record.outputs for record in read_samples(tmp_path / "demo/agent", step, "eval"))
    monkeypatch.setattr(stages, "train", lambda *arguments, **options: pytest.fail("a finished stage ran again"))
    again = demo.run(tmp_path / "demo")
    assert again == lines


def test_who_never_looks_gives_the_usual_answer():
    train = [{"query": "which?", "answer": answer} for answer in "3377737"]
    held_out = [{"query": "which?", "answer": answer} for answer in "7371"]
    assert demo._blind(train, held_out).startswith(" 50.0%")
