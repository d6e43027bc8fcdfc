"""Accuracy by data column, and the score of each question."""

import json

import pytest

from mmrl.errors import UserError
from mmrl.recipes import RECIPES
from mmrl.runs.records import read_outcomes
from mmrl.runs.statistics import wilson_interval
from mmrl.training.evaluation import parts_of_tasks
from mmrl.training.run import train
from mmrl.vlm.vlm_config import VlmConfig
from mmrl.vlm.vlm_recipe import VlmRecipe
from tests.vlm.runs import run_config


def with_columns(folder, **columns):
    """Add a column to the questions of a run, one value a question."""
    path = folder / "data" / "questions.jsonl"
    rows = [json.loads(line) for line in path.open()]
    for name, values in columns.items():
        rows = [row | {name: value} for row, value in zip(rows, values, strict=True)]
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n")


def test_columns_with_few_shared_short_values_are_taken():
    hints = ["none", "right", "wrong", "none", "right", "wrong"]
    columns = [
        {"hint": hint, "answer": "ab"[n % 2], "kind": "add", "note": f"note {n}", "level": n % 2, "long": "x" * 99}
        for n, hint in enumerate(hints)
    ]
    assert parts_of_tasks(columns, None) == [{"hint": hint} for hint in hints]
    labelled = [row | {"label": row["answer"], "worked": f"so {row['answer']}"} for row in columns]
    assert parts_of_tasks(labelled, None, {"answer", "worked"}) == [{"hint": hint} for hint in hints]
    assert parts_of_tasks(labelled, ["label"])[:2] == [{"label": "a"}, {"label": "b"}]
    assert parts_of_tasks(columns, []) == [{}] * 6
    assert parts_of_tasks(columns, ["level"])[:2] == [{"level": "0"}, {"level": "1"}]
    with pytest.raises(ValueError, match=r"evaluation\.by contains 'knid'; columns of the data: hint, answer, kind"):
        parts_of_tasks(columns, ["knid"])
    assert parts_of_tasks([], ["hint"]) == []


def test_accuracy_is_broken_down_and_each_question_is_kept(tmp_path, tiny_folders):
    config = run_config(VlmConfig, tmp_path, tiny_folders["qwen2_5_vl"])
    with_columns(tmp_path, hint=["none", "wrong", "none", "wrong", "none", "wrong"])
    config.output_dir = str(tmp_path / "run")
    config.evaluation.samples = 4
    train(RECIPES["vlm"], config)
    (first, _) = [json.loads(line) for line in (tmp_path / "run" / "evaluations.jsonl").open()]
    outcomes = read_outcomes(tmp_path / "run", 0, "heldout")
    assert list(outcomes) == [f"q{n}" for n in range(6)]
    for value, questions in (("none", ("q0", "q2", "q4")), ("wrong", ("q1", "q3", "q5"))):
        right = [outcomes[question].scores["accuracy/greedy"] for question in questions]
        assert [outcomes[question].parts for question in questions] == [{"hint": value}] * 3
        name = f"accuracy/greedy/hint={value}"
        assert (first[name], first[f"n/hint={value}"]) == (sum(right) / 3, 3)
        assert (first[f"{name}/low"], first[f"{name}/high"]) == wilson_interval(sum(right), 3)
    form = [outcome.scores["terms/format/greedy"] for outcome in outcomes.values()]
    assert first["terms/format/greedy"] == sum(form) / 6
    assert set(read_outcomes(tmp_path / "run", 2, "heldout")) == set(outcomes)
    any_right = [outcome.scores["accuracy/sampled"] > 0 for outcome in outcomes.values()]
    assert first["accuracy/pass_at_4"] == sum(any_right) / 6
    assert first["accuracy/sampled"] <= first["accuracy/pass_at_2"] <= first["accuracy/pass_at_4"]


def test_a_column_that_the_data_lacks_is_refused_before_the_model_is_loaded(tmp_path, monkeypatch):
    config = run_config(VlmConfig, tmp_path, tmp_path / "no-model")
    config.evaluation.by = ["hint"]
    with pytest.raises(UserError, match=r"eval_data\.heldout: evaluation\.by contains 'hint'; columns of the data: "):
        VlmRecipe(config)
