"""Preview of questions and rewards in `mmrl train CONFIG --dry-run`, before a model is loaded."""

import json
import re
from pathlib import Path

import pytest
from PIL import Image

from mmrl.cli import main
from mmrl.config import load_run
from mmrl.recipes import plan_of
from mmrl.vlm.data.preview import FORMS
from tests.pages import ROOT

CONFIG = """
recipe: vlm
output_dir: runs/mine
model:
  path: runs/tiny
  build: mmrl.vlm.toy.tiny_generic:build_tiny
  build_options: {corpus: [Which lamp is lit?]}
data: {path: train.jsonl}
eval_data: {heldout: {path: owner/name}, later: {path: later.jsonl, build: "mine:build"}}
rewards: [{name: exact}]
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    Image.new("RGB", (84, 56)).save(tmp_path / "0.png")
    row = {"question": "Which lamp is lit?", "image": "0.png", "answer": "red"}
    (tmp_path / "train.jsonl").write_text(json.dumps(row) + "\n")
    (tmp_path / "my_run.yaml").write_text(CONFIG)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("mmrl.training.plan.described", lambda *_: [])
    return tmp_path


def test_questions_and_what_their_answer_earns(folder, capsys):
    assert main(["train", "my_run.yaml", "--dry-run"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "data: train.jsonl: 1 questions"
    assert lines[1] == "  the first: image 84 x 56, 'Which lamp is lit?', answer 'red'"
    assert [line.split()[-1] for line in lines[2:6]] == ["0", "1", "1", "1"]  # exact wants a box or a block
    assert lines[6].startswith(
        "  '\\\\boxed{red}' earns the highest reward, but the prompt does not mention \\boxed; unless"
    )
    assert lines[7].startswith("eval_data.heldout: owner/name: a hub id")
    assert lines[8] == "eval_data.later: later.jsonl: the run builds it"


def test_a_reward_that_fails_says_why(folder, capsys):
    (folder / "my_rewards.py").write_text("def mine(completions, **columns):\n    return [1.0]\n")
    words = 'rewards=[{name: mine, function: "my_rewards.py:mine", isolate: false}]'
    assert main(["train", "my_run.yaml", "--dry-run", words]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[2] == "  'red' earns mine nothing"
    assert lines[6].startswith("  returned 1 value for 4 rows")


def test_a_form_that_the_prompt_asks_for_is_not_named(folder, capsys):
    words = ["rewards=[{name: format, weight: 0.1}, {name: exact}]"]
    asks = "{{ content }} Think inside <think></think>, then answer inside \\\\boxed{}."
    for prompt, named in ((None, True), (asks, False)):
        changes = [] if prompt is None else [f'data.format_prompt="{prompt}"']
        assert main(["train", "my_run.yaml", "--dry-run", *words, *changes]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert lines[4] == "  '<think>why</think>\\\\boxed{red}' earns format 1, exact 1"
        assert (
            any("earns the highest reward, but the prompt does not mention <think>" in line for line in lines) is named
        )


def test_without_answers_an_own_reward_is_called_with_an_empty_response(folder, capsys):
    (folder / "my_rewards.py").write_text(
        "def long(completions, **columns):\n    return [len(t) for t in completions]\n"
    )
    (folder / "train.jsonl").write_text('{"question": "Write."}\n')
    words = 'rewards=[{name: long, function: "my_rewards.py:long", isolate: false}]'
    assert main(["train", "my_run.yaml", "--dry-run", words]) == 0
    assert capsys.readouterr().out.splitlines()[1:3] == ["  the first: 'Write.'", "  an empty response earns long 0"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["data.answer_key=label"], "data.answer_key is 'label', but the columns are question, image, answer"),
        (["rewards=[{name: exat}]"], "unknown reward 'exat'; did you mean 'exact'"),
    ],
)
def test_what_cannot_be_used_is_an_error(folder, capsys, words, said):
    assert main(["train", "my_run.yaml", "--dry-run", *words]) == 2
    assert said in capsys.readouterr().err


def test_a_missing_image_is_an_error(folder, capsys):
    (folder / "0.png").unlink()
    assert main(["train", "my_run.yaml", "--dry-run"]) == 2
    assert "0.png" in capsys.readouterr().err


def test_a_model_that_the_run_builds_is_built_for_its_plan(folder):
    signs = ROOT / "configs/text/signs_masked_sft.yaml"
    for file, words in (("my_run.yaml", []), (signs, ["model.path=runs/signs", "model.build_options={mask: true}"])):
        entry, config = load_run(file, words)
        assert plan_of(entry)(config, passes=False).peak() > 0
        assert Path(config.model.path, "config.json").is_file()


def test_rows_of_masked_models_are_read_too(folder, capsys):
    words = ["sft", str(ROOT / "configs/text/signs_masked_sft.yaml"), "--dry-run", "data.path=train.jsonl"]
    assert main(words) == 2
    assert "has no text in column 'completion'" in capsys.readouterr().err
    row = {"question": "Which lamp is lit?", "answer": "red", "completion": "red"}
    (folder / "train.jsonl").write_text(json.dumps(row) + "\n")
    assert main(words) == 0
    assert capsys.readouterr().out.startswith("data: train.jsonl: 1 questions\n")


def test_the_tutorial_shows_the_formats():
    text = (ROOT / "docs/tutorials/vlm.md").read_text()
    shown = re.findall(r"^  ('.*') earns", text, re.MULTILINE)
    assert shown == [repr(form.format("amber")) for form in FORMS]
