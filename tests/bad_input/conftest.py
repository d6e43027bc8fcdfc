"""A small run on the command line: a mistake gets one clear line and an exit code, or a counted skip."""

import json
import logging
import os
import shutil
import warnings
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from mmrl.cli import main
from mmrl.vlm.toy.tiny import build_tiny_vlm
from tests.vlm.builders import CORPUS
from tests.vlm.runs import write_questions

torch.set_num_threads(1)


CONFIG = """
recipe: vlm
output_dir: {run}
model: {{path: {model}}}
data: {{path: {questions}}}
eval_data:
  heldout: {{path: {questions}}}
rewards:
  - {{name: format}}
  - {{name: exact}}
sampler: {{max_new_tokens: 3}}
objective: {{kl: {{coef: 0.01}}}}  # a gradient also where the untrained model earns the same everywhere
trainer: {{steps: 2, tasks_per_step: 2, samples_per_task: 2, learning_rate: 1.0e-3}}
evaluation: {{max_tasks: 2, at_start: false, at_end: false}}
checkpoint: {{every: 1}}
tracking: {{quiet: true, tensorboard: false, strict: true}}
"""


# each fails for the question whose answer is 1, in a way of its own
REWARDS = """
import os
import time

def raises(prompts, completions, answer):
    if "1" in answer:
        raise RuntimeError("no answer may be 1")
    return [1.0] * len(completions)

def hangs(prompts, completions, answer):
    if "1" in answer:
        with open(os.environ["MMRL_TEST_HANGING"], "a") as file:
            file.write(f"{os.getpid()}\\n")
        time.sleep(600)
    return [1.0] * len(completions)

def gives_nan(prompts, completions, answer):
    return [float("nan") if text == "1" else 1.0 for text in answer]

def always_raises(prompts, completions):
    raise RuntimeError("out of order")

def no_prompts(completions):
    return [1.0] * len(completions)

def needs_colour(prompts, completions, colour):
    return [1.0] * len(completions)

def with_token(prompts, completions, token):
    assert token == "s3cr3t"
    return [float(len(text)) for text in completions]

def copied(path, source, token):
    assert token == "s3cr3t"
    import shutil
    shutil.copytree(source, path.rpartition("/")[0], dirs_exist_ok=True)
"""


@dataclass
class Lab:
    """A tiny model, a few questions and a valid configuration."""

    folder: Path
    model: Path
    config: Path
    rows: list[dict]

    @property
    def run(self) -> Path:
        return self.folder / "run"

    def data(self, *rows, name="rows.jsonl"):
        """Write rows (text as it stands) beside the images."""
        path = self.folder / "data" / name
        path.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows))
        return f"data.path={path}"

    def metrics(self):
        return [json.loads(line) for line in (self.run / "metrics.jsonl").open()]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The files that no test changes, and one finished run."""
    root = tmp_path_factory.mktemp("bad_input")
    model = build_tiny_vlm(root / "model", family="qwen2_5_vl", corpus=CORPUS, max_positions=512)
    questions = write_questions(root / "data", text_only_last=False)
    config = root / "good.yaml"
    config.write_text(CONFIG.format(run=root / "finished", model=model, questions=questions))
    assert main(["train", str(config), "evaluation.at_end=true"]) == 0
    return root


@pytest.fixture(autouse=True)
def _untouched_process(monkeypatch):
    monkeypatch.setattr(os, "environ", os.environ.copy())
    logger = logging.getLogger("mmrl")
    handlers, level = list(logger.handlers), logger.level
    with warnings.catch_warnings():
        yield
    logger.handlers, logger.level = handlers, level


@pytest.fixture
def lab(made, tmp_path):
    shutil.copytree(made / "data", tmp_path / "data")
    (tmp_path / "rewards.py").write_text(REWARDS)
    questions = tmp_path / "data/questions.jsonl"
    config = tmp_path / "run.yaml"
    config.write_text(CONFIG.format(run=tmp_path / "run", model=made / "model", questions=questions))
    return Lab(tmp_path, made / "model", config, [json.loads(line) for line in questions.open()])


OF_THE_TINY_RUN = ("responses hit the limit of 3 tokens", "no weight of the ")
"""Warnings of every run of an untrained model that samples three tokens and earns nothing."""


@pytest.fixture
def mmrl(capsys):
    """Runs a command; returns its exit code and the lines on standard error without those of any tiny run."""

    def call(*arguments):
        capsys.readouterr()
        code = main([str(argument) for argument in arguments])
        lines = capsys.readouterr().err.splitlines()
        assert all(line.startswith("mmrl: ") for line in lines)
        return code, [line for line in lines if not any(text in line for text in OF_THE_TINY_RUN)]

    return call


@pytest.fixture
def refused(mmrl):
    """Runs a command that must end with one line and exit code 2; returns the line."""

    def call(*arguments):
        code, lines = mmrl(*arguments)
        assert code == 2
        (line,) = lines
        assert line.startswith("mmrl: error: ")
        return line

    return call


@pytest.fixture
def unloaded(monkeypatch):
    """Fails where a model is loaded."""
    import diffusion.diffusion_recipe
    import mmrl.vlm.vlm_recipe

    def refuse(*arguments, **options):
        raise AssertionError("a model was loaded")

    for module in (mmrl.vlm.vlm_recipe, diffusion.diffusion_recipe):
        monkeypatch.setattr(module, "load_policy", refuse)


def truncate(path):
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])


def blank(path):
    path.write_bytes(bytes(path.stat().st_size))


def without(row, key):
    return {name: value for name, value in row.items() if name != key}
