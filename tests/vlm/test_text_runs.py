"""Runs of a text-only model as a stranger reads them: console, report and card of finished and of stopped ones."""

import json
import logging
import re

import pytest

from mmrl.cli import main
from mmrl.config import save
from mmrl.recipes import RECIPES
from mmrl.report.folder import read_run
from mmrl.report.page import outcome, write_report
from mmrl.rewards import RewardConfig
from mmrl.runs.folder import MOVED
from mmrl.runs.ledger import write_answers
from mmrl.training.run import evaluate, train
from mmrl.vlm import VlmConfig
from tests.vlm.runs import run_config


@pytest.fixture
def config(tmp_path, language_model):
    """Two steps on questions without images, without evaluations."""
    made = run_config(VlmConfig, tmp_path, language_model)
    rows = [{"question": f"What is {number}?", "answer": str(number)} for number in range(8)]
    for name in ("data", "held_out"):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    made.recipe = "vlm"
    made.data.path = str(tmp_path / "data.jsonl")
    for data in made.eval_data.values():
        data.path = str(tmp_path / "held_out.jsonl")
    made.evaluation.at_start = made.evaluation.at_end = False
    return made


def words_of(text):
    """Visible words of a page, without the configuration and the script."""
    body = text.partition("<body>")[2].partition('id="configuration"')[0]
    return re.sub(r"<[^>]+>", " ", body)


def test_a_language_model_is_called_one_and_the_missing_evaluation_is_said(config, tmp_path, capsys, caplog):
    logging.getLogger("mmrl").addHandler(logging.NullHandler())
    save(config, tmp_path / "run.yaml")
    with caplog.at_level(logging.INFO, "mmrl"):
        assert main(["train", str(tmp_path / "run.yaml")]) == 0
    console = capsys.readouterr().out + caplog.text
    assert "run.yaml: grpo, 2 steps" in console
    assert re.search(r"\blanguage model, processes 1", console)
    run_dir = tmp_path / "run"
    assert json.loads((run_dir / "result.json").read_text())["model_kind"] == "language model"
    page = words_of((run_dir / "report.html").read_text())
    assert "There was no evaluation after the 2 training steps." in page
    assert "kind of model" in page
    assert main(["export", str(run_dir), "--output", str(tmp_path / "model")]) == 0
    card = (tmp_path / "model/README.md").read_text()
    assert "Language model trained with GRPO." in card
    assert "pipeline_tag: text-generation" in card
    for text in (console, page, card.partition("recipe: vlm")[0]):
        assert not re.search(r"\bvlm\b|vision-language", text.replace(str(tmp_path), ""))


def test_a_run_without_its_end_still_has_names(config, tmp_path):
    """As after a crash: neither result.json nor an evaluation after the one at the start."""
    config.evaluation.at_start = True
    run_dir = train(RECIPES["vlm"], config)
    (run_dir / "result.json").unlink()
    run = read_run(run_dir)
    assert run.title == "run · grpo"
    said = " ".join(outcome([run]))
    assert "accuracy (greedy) before training:" in said
    assert "There was no evaluation after the one before training; training continued to step 2." in said
    assert main(["export", str(run_dir), "--output", str(tmp_path / "model")]) == 0
    card = (tmp_path / "model/README.md").read_text()
    assert "Language model trained with GRPO. There is no evaluation at this step." in card
    assert "trained with training" not in card.lower()
    assert "sampled positions" in run.describe("policy/entropy")


def test_what_is_logged_as_a_warning_is_in_the_report(config, tmp_path, monkeypatch):
    config.rewards = [RewardConfig(name="exact")]
    real = VlmConfig.made_objective

    def warns(self):
        logging.getLogger("mmrl").warning("something is odd with %d", 3)
        return real(self)

    monkeypatch.setattr(VlmConfig, "made_objective", warns)
    run_dir = train(RECIPES["vlm"], config)
    page = words_of((run_dir / "report.html").read_text())
    assert "something is odd with 3" in page
    assert not re.search(r"warnings\s+none", page)


def test_answers_of_an_evaluation_are_kept_as_text(config, tmp_path):
    run_dir = train(RECIPES["vlm"], config)
    metrics = evaluate(RECIPES["vlm"], config, run_dir)
    answers = [json.loads(line) for line in (run_dir / "answers.jsonl").read_text().splitlines()]
    ledger = [json.loads(line) for line in (run_dir / "ledger.jsonl").read_text().splitlines()]
    assert len(answers) == len(ledger)
    greedy = [row for row in answers if row["decoding"] == "greedy"]
    split = next(iter(config.eval_data))
    rows = [row for row in greedy if row["split"] == split]
    assert sum(row["success"] for row in rows) / len(rows) == metrics[f"{split}/accuracy/greedy"]
    assert all("What is" in row["prompt"] and isinstance(row["text"], str) for row in answers)
    write_report(run_dir)
    assert f"{len(answers)} with prompts and scores in answers.jsonl" in (run_dir / "report.html").read_text()
    # those of a run before move aside with it, and those of an evaluation before go
    assert "answers.jsonl" in MOVED
    assert write_answers(run_dir, [{"text": None}], 3) is None
    assert not (run_dir / "answers.jsonl").exists()
