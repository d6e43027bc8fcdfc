"""The demo in small: the chain of its stages and its output, not its results."""

import re
from pathlib import Path

import pytest

from mmrl.training import run as stages
from mmrl.vlm.toy import demo
from tests.example_runs import shrink_demo

ROOT = Path(__file__).parents[2]
MODEL = "{hidden: 32, layers: 1, vision_hidden: 32, vision_depth: 1, min_pixels: 3136, max_pixels: 12544}"
SMALL = {"digits_sft.yaml": [f"model.build_options={MODEL}"], "digits_papo.yaml": ["trainer.samples_per_task=2"]}
COMMON = [
    *("data.build_options.count=24", "eval_data.heldout.build_options.count=16"),
    *("eval_data.no_hint.build_options.count=16", "trainer.steps=2", "trainer.tasks_per_step=4"),
    *("trainer.warmup_steps=0", "evaluation.every=1", "tracking.quiet=true", "tracking.strict=true"),
]


@pytest.fixture
def small(monkeypatch):
    shrink_demo(monkeypatch, demo, COMMON, SMALL)


@pytest.mark.slow
def test_the_demo_reports_the_effects_of_hints_reading_and_blindness(tmp_path, small, monkeypatch, caplog):
    lines = demo.run(tmp_path / "demo")
    text = "\n".join(lines)
    for split in ("heldout", "no_hint"):
        assert f"\n{split}, greedy\n" in text
    head = next(line for line in lines if "before sft" in line)
    assert re.split(r" {3,}", head.strip()) == [
        "tasks",
        "before sft",
        "after sft",
        "after papo",
        "change, 95% interval",
    ]
    for row in ("all", "none", "right", "wrong", "read", "add", "reads", "format"):
        assert re.search(rf"^ +{row} +\d+ +\d+\.\d%", text, re.MULTILINE), row
    blind = next(line for line in lines if line.startswith("text-only strategy that ignores the image"))
    assert re.search(r"\d+\.\d% on heldout, \d+\.\d% on no_hint$", blind)
    assert Path(lines[-1].removeprefix("report: ")).is_file()
    monkeypatch.setattr(stages, "train", lambda *arguments, **options: pytest.fail("a finished stage ran again"))
    again = demo.run(tmp_path / "demo")
    assert again == lines
    demo.run(tmp_path / "demo", seed=1)
    assert "has already finished with different settings and is kept: seed 0 -> 1" in caplog.text


def test_the_two_splits_ask_the_same_questions(tmp_path):
    from mmrl.config import load_run

    for config in ("digits_sft.yaml", "digits_papo.yaml"):
        _, run = load_run(ROOT / "configs/vlm" / config)
        hinted, plain = (run.eval_data[split].build_options for split in demo.SPLITS)
        assert {**hinted, "show_hints": False} == plain
