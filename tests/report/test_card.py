"""Cards of exported models: their numbers, their text from users' data, and what they keep to themselves."""

import json
import re
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import yaml
from huggingface_hub import DatasetCard, ModelCard, ModelCardData

from mmrl.errors import UserError
from mmrl.hub.building import BuiltPath, build_if_missing
from mmrl.hub.cards import card_text, code, fenced, plain, portable, table, without_paths, write_dataset_card
from mmrl.recipes import RECIPES, find_recipe
from mmrl.report.export import at_step, export_run, model_card, start_of
from mmrl.report.folder import read_run
from mmrl.runs.export import Exported
from tests.report.test_summary import RESULT, make_run

EXPORTED = Exported("library.load", "load = folder", "use = load", task="text-generation")


@dataclass
class Config:
    recipe: str = "vlm"
    seed: int = 3
    data: dict = field(default_factory=dict)


def card_of(run, step, config=None, **options):
    return model_card(RECIPES["vlm"], config or Config(), run.folder, step, EXPORTED, **options)


@pytest.fixture
def run(tmp_path):
    return make_run(tmp_path / "a_run", [0.0] * 30 + [1.0] * 20, [1.0] * 40 + [0.0] * 10, ["wrong", "right"] * 25)


def test_numbers_are_those_of_the_exported_step(run):
    card = card_of(run, 9)
    (result,) = ModelCard(card).data.eval_results
    assert (result.metric_value, result.metric_args["n"], result.dataset_name) == (0.8, 50, "test")
    assert "| test | greedy | 40.0% " in card
    assert "GRPO raised held-out accuracy (greedy) from 40.0 to 80.0%" in card
    before = ModelCard(card_of(run, 0))
    assert before.data.eval_results[0].metric_value == 0.4
    assert "80.0" not in before.text
    assert at_step(run, 5).evaluations == []
    assert "There is no evaluation at this step" in card_of(run, 5)


def test_the_card_of_a_best_step_says_that_it_was_chosen(run):
    (run.folder / "config.yaml").write_text("checkpoint: {every: 3}\n")
    content = RESULT | {"best_checkpoint": {"step": 9, "metric": "accuracy/greedy"}}
    (run.folder / "result.json").write_text(json.dumps(content))
    assert "was selected by its accuracy/greedy" in card_of(run, 9)
    assert "was selected" not in card_of(run, 0)


def test_a_repository_names_the_card_and_the_snippet(run):
    card = ModelCard(card_of(run, 9, repository="someone/good-model"))
    assert (card.data.model_name, card.data.library_name) == ("good-model", "mmrl-suite")
    assert 'folder = snapshot_download("someone/good-model")' in card.text
    with pytest.raises(UserError, match="expected a repository id"):
        export_run(RECIPES["vlm"], Config(), run.folder, run.folder / "out", repository="no-owner")


@pytest.mark.parametrize("text", ["a|b", "```\n# end", "<b>&amp;[x](y)", "*_`$#", "---\nlicense: mit", "two\nlines"])
def test_no_text_of_a_user_ends_its_place(text):
    from markdown_it import MarkdownIt

    reader = MarkdownIt("commonmark").enable("table")
    body = [*table(["name", "text"], [[plain(text), code(text)]]), *fenced(text)]
    card = ModelCard(card_text(ModelCardData(model_name=text, tags=[text]), body))
    assert card.data.tags == [text]
    tokens = reader.parse(card.text)
    cells = [token for token in tokens if token.type == "inline"]
    wanted = " ".join(text.split())
    assert ["".join(part.content for part in cell.children) for cell in cells[2:]] == [wanted, wanted]
    assert [token.content for token in tokens if token.type == "fence"] == [f"{text}\n"]


def test_paths_of_the_machine_and_secrets_stay_behind(tmp_path):
    (tmp_path / "my models/base").mkdir(parents=True)
    settings = {
        "path": str(tmp_path / "data.jsonl"),
        "model": str(tmp_path / "my models/base"),
        "reward": "/home/me/rewards.py:score",
        "kept": ["Qwen/Qwen2.5-VL-3B-Instruct", "runs/x", "/no_think {{ content }}"],
        "options": {"api_key": "abc", "prompt_key": "question"},
    }
    assert portable(settings) == {
        "path": "data.jsonl",
        "model": "base",
        "reward": "rewards.py:score",
        "kept": settings["kept"],
        "options": {"api_key": "removed", "prompt_key": "question"},
    }
    assert without_paths("see /home/me/x.txt, https://a.b/c/d and a/b/c") == "see x.txt, https://a.b/c/d and a/b/c"


def test_facts_of_an_export_name_no_folder_of_the_machine(run):
    exported = replace(EXPORTED, facts={"environment": "/home/me/talk.py:Talk", "cameras": "front, wrist"})
    card = model_card(RECIPES["vlm"], Config(), run.folder, 20, exported)
    assert "| environment | talk.py:Talk |" in card
    assert "| cameras | front, wrist |" in card


def test_the_card_of_a_chain_names_its_runs_and_the_licence_of_its_base(tmp_path):
    base, first, second = (tmp_path / name for name in ("base", "first", "second"))
    for folder, path in ((first, base), (second, first / "checkpoints/step-000040/model")):
        (folder / "checkpoints/step-000040/model").mkdir(parents=True)
        (folder / "config.yaml").write_text(yaml.safe_dump({"recipe": "sft", "model": {"path": str(path)}}))
    base.mkdir()
    (base / "README.md").write_text("---\nlicense: apache-2.0\nbase_model: someone/older\n---\n")
    found = start_of({"model": {"path": str(second)}}, tmp_path / "third")
    assert found.earlier == ("`sft` in `first` at step 40", "`sft` in `second`")
    assert (found.text, found.hub_id, found.licence) == ("`base`", "someone/older", "apache-2.0")
    assert start_of({"model": {"path": "gone/model"}}, tmp_path).hub_id == ""  # may be a folder that was deleted


def test_papers_of_an_objective_are_cited_without_invented_titles(run):
    (run.folder / "result.json").write_text(json.dumps(RESULT | {"objective": "grpo"}))
    assert card_of(run, 9).count("@misc{") == 1
    papo = model_card(RECIPES["papo"], Config("papo"), run.folder, 9, EXPORTED)
    assert "  title = {Perception-Aware Policy Optimization},\n  year = {2025},\n  eprint = {2507.06448}" in papo
    hnpg = model_card(find_recipe("hnpg"), Config("hnpg"), run.folder, 9, EXPORTED)
    assert "note = {HNPG}" in hnpg


def test_a_data_set_card_that_a_person_wrote_stays(tmp_path):
    write_dataset_card(tmp_path, "One", ["first"], tags=["mmrl"])
    write_dataset_card(tmp_path, "One", ["second"], tags=["mmrl"])
    text = (tmp_path / "README.md").read_text()
    assert "second" in text
    assert "first" not in text
    assert re.search("^pretty_name: One$", text, re.MULTILINE)
    (tmp_path / "README.md").write_text("mine")
    write_dataset_card(tmp_path, "One", ["third"])
    assert (tmp_path / "README.md").read_text() == "mine"


def test_a_card_of_an_unreadable_run_is_written_all_the_same(tmp_path):
    assert read_run(tmp_path).result == {}
    assert "# " in model_card(RECIPES["vlm"], Config(), tmp_path, 1, EXPORTED)


def write_rows(path, count):
    Path(path).write_text("".join(json.dumps({"problem": "a|b", "answer": n}) + "\n" for n in range(count)))


def build(path, count):
    function = "tests.report.test_card:write_rows"
    build_if_missing(BuiltPath(path=str(path), build=function, build_options={"count": count}))


def test_generated_files_share_a_card_and_other_folders_get_none(tmp_path):
    folder = tmp_path / "made"
    for name, count in (("train", 3), ("test", 2)):
        build(folder / f"{name}.jsonl", count)
    card = DatasetCard.load(folder / "README.md")
    assert [file["path"] for file in card.data.configs[0]["data_files"]] == ["train.jsonl", "test.jsonl"]
    assert card.data.files["train.jsonl"]["rows"] == 3
    assert "with `{'count': 2}`" in card.text
    assert "| columns | `problem`, `answer` |" in card.text
    (tmp_path / "mine").mkdir()
    build(tmp_path / "mine/train.jsonl", 1)
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["train.jsonl"]
