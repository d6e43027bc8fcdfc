"""Tutorials run as they are written, in a fresh folder: their files, commands and Python, from top to bottom."""

import json
import os
import shlex
import sys

import pytest

from mmrl.config import load_run
from mmrl.training.run import read_data
from mmrl.workers.interpreters import environment_folder
from tests.pages import PAGES, ROOT
from tests.programs import run_program

TUTORIALS = [page for page in PAGES if page.name.startswith("docs/tutorials/")]
NOT_RUN = {"watch", "options", "serve", "list", "demo"}
"""Commands that go on until they are stopped, only print, or have a test of their own."""
LEARNED = {
    "docs/tutorials/images.md": ("runs/awm", "score/my_rewards.py:right_colour", 0.3),
    "docs/tutorials/real_model.md": ("runs/my_guests", "accuracy/sampled", 0.15),
    "docs/tutorials/robot.md": ("runs/ppo", "success/greedy", 0.1),
    "docs/tutorials/screens.md": ("runs/point", "accuracy/greedy", 0.1),
    "docs/tutorials/text.md": ("runs/sort", "accuracy/greedy", 0.5),
    "docs/tutorials/videos.md": ("runs/clips", "recall/agent", 0.3),
    "docs/tutorials/vlm.md": ("runs/lights", "accuracy/sampled", 0.15),
}
"""Run, metric and the gain in it that a tutorial shows at least."""


def play(page, folder, wanted):
    """Write the files of a tutorial and run its wanted commands, each in a process of its own."""
    options = {"PYTHONPATH": f"{folder}{os.pathsep}{ROOT}"}
    for block in page.blocks:
        if block.file:
            (folder / block.file).write_text(block.text, encoding="utf-8")
        elif block.language == "python" and wanted(["python"]):
            run_program(("-c", block.text), folder, **options)
        elif block.language == "bash":
            for words in (shlex.split(line, comments=True) for line in block.text.splitlines()):
                if words and words[0] in ("mmrl", "python") and wanted(words):
                    run_program([*(["-m", "mmrl.cli"] if words[0] == "mmrl" else []), *words[1:]], folder, **options)


def quick(page):
    """A page, slow where its data need a browser or a hundred encoded clips."""
    slow = "Chromium" in page.text or "write_mp4" in page.text
    return pytest.param(page, id=page.name, marks=pytest.mark.slow if slow else ())


@pytest.mark.parametrize("page", [quick(page) for page in TUTORIALS])
def test_the_data_of_a_tutorial_are_made_and_its_configurations_read_them(page, tmp_path, monkeypatch):
    play(page, tmp_path, lambda words: words[0] == "python" and len(words) > 1)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    try:
        for block in page.shown("yaml"):
            entry, config = load_run(block.file)
            assert read_data(entry, config)
    finally:
        # a page's own module, which the next page has too
        sys.modules.pop("my_rewards", None)


@pytest.mark.slow
@pytest.mark.parametrize("page", TUTORIALS, ids=lambda page: page.name)
def test_a_tutorial_runs_from_top_to_bottom_and_learns(page, tmp_path):
    if "mmrl setup smollm2" in page.text and not (environment_folder("models", "smollm2") / "config.json").is_file():
        pytest.skip("needs the model that `mmrl setup smollm2` brings")
    play(page, tmp_path, lambda words: not NOT_RUN & set(words[:2]))
    if page.name in LEARNED:
        run, metric, gain = LEARNED[page.name]
        rows = [json.loads(line) for line in (tmp_path / run / "evaluations.jsonl").read_text().splitlines()]
        assert rows[-1][metric] - rows[0][metric] >= gain
