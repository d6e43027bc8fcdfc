"""The diffusion demo in small: the chain of its stages, not its results."""

import re
from pathlib import Path

import pytest
from PIL import Image

from diffusion.toy import diffusion_demo as demo
from mmrl.training import run as stages
from tests.example_runs import shrink_demo

COMMON = [
    *("evaluation.max_tasks=3", "evaluation.samples=2"),
    *("evaluation.every=1", "trainer.steps=2", "tracking.quiet=true", "tracking.strict=true"),
]
SMALL = {
    "demo_pretrain.yaml": ["evaluation.sampler.eval_steps=2"],
    "demo_awm.yaml": [
        *("sampler.eval_steps=2", "sampler.steps=4", "trainer.tasks_per_step=2", "trainer.samples_per_task=2"),
        "trainer.minibatches_per_step=1",
    ],
}


@pytest.fixture
def small(monkeypatch):
    shrink_demo(monkeypatch, demo, COMMON, SMALL)


def test_the_whole_chain_runs_and_a_second_call_repeats_nothing(tmp_path, small, monkeypatch):
    lines = demo.run(tmp_path / "demo")
    assert lines[0] == "mean reward over the images of 3 prompts (95% interval), from the same seeds"
    for line, name in zip(lines[1:4], ("untrained", "before AWM", "after AWM"), strict=True):
        assert re.fullmatch(rf"  {name} +optimised 0\.\d+ \(.*\)   held out 0\.\d+ \(.*\)", line)
    number = r"[+-][\d.e-]+ \[.*\]"
    assert re.fullmatch(
        rf"change from AWM, paired over prompts: class_prob {number}, class_prob_judge {number}", lines[4]
    )
    grid = Path(lines[5].removeprefix("before and after: "))
    with Image.open(grid) as image:
        assert min(image.size) > 200
    report = Path(lines[6].removeprefix("report: ")).read_text(encoding="utf-8")
    # its ten prompts are those of the training
    assert "Scores on training tasks" in report
    assert "class_prob_judge" in report
    monkeypatch.setattr(stages, "train", lambda *arguments, **options: pytest.fail("a finished stage ran again"))
    assert demo.run(tmp_path / "demo")[:5] == lines[:5]
