"""Data files, rows and questions that cannot be used."""

import json

import pytest

from tests.bad_input.conftest import without
from tests.bad_input.supervised import supervised


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("nowhere.jsonl", None, "file not found"),
        ("empty.jsonl", "", "is empty"),
        ("blank.jsonl", "\n\n", "is empty"),
        ("empty.json", "[]", "is empty"),
        ("empty.parquet", "", "cannot be read as parquet"),
        ("rows.xlsx", "x", "unknown extension '.xlsx'; expected .jsonl, .json, .parquet, .csv, .txt"),
        ("rows.csv", "", "is empty"),
        ("rows.csv", '"x', "cannot be read as csv"),
        ("rows.csv", "problem;answer\nx;y\n", "its columns are problem;answer; set data.prompt_key"),
        ("rows.jsonl", '{"text": "x"}\n', "its columns are text; set data.prompt_key"),
        ("rows.jsonl", "{bad\n", "line 1: not valid JSON"),
    ],
)
@pytest.mark.parametrize("place", ["data", "eval_data.heldout"])
def test_data_files_that_cannot_be_used(place, name, content, message, lab, refused):
    path = lab.folder / "data" / name
    if content is not None:
        path.write_text(content)
    line = refused("train", lab.config, f"{place}.path={path}")
    assert message in line
    assert name in line
    assert ("eval_data.heldout: " in line) == (place != "data")


ROWS = {
    "no image": (lambda row: without(row, "images"), "the text has 1 <image> place but the row has 0 images"),
    "no answer": (lambda row: without(row, "answer"), "no answer in column 'answer'"),
    "more places": (
        lambda row: {**row, "problem": "<image><image>What?"},
        "the text has 2 <image> places but the row has 1 image",
    ),
    "fewer places": (lambda row: {**row, "problem": "What?"}, "the text has 0 <image> places but the row has 1 image"),
    "missing image file": (lambda row: {**row, "images": ["nowhere.png"]}, "image file "),
    "not JSON": (lambda row: "{bad", "not valid JSON"),
}


@pytest.mark.parametrize("kind", ROWS)
def test_a_bad_row_is_named(kind, lab, refused):
    change, message = ROWS[kind]
    data = lab.data(*lab.rows[:2], change(lab.rows[2]))
    line = refused("train", lab.config, data)
    assert f"rows.jsonl line 3{'' if kind == 'not JSON' else ' (id q2)'}: {message}" in line
    assert "data.on_bad_row=skip" in line


def test_bad_rows_can_be_skipped_and_are_counted(lab, mmrl):
    bad = [change(lab.rows[2]) for change, _ in ROWS.values()]
    code, lines = mmrl("train", lab.config, lab.data(*lab.rows[:2], *bad), "data.on_bad_row=skip")
    assert code == 0
    assert [row["data/skipped"] for row in lab.metrics()] == [6, 6]
    kinds = {"placeholder_mismatch": 3, "missing_answer": 1, "missing_image": 1, "invalid_json": 1}
    for kind, count in kinds.items():
        (line,) = [line for line in lines if f"({kind})" in line]
        assert line.startswith("mmrl: warning: ")
        assert f"skipped {count} rows" in line
        assert "rows.jsonl line " in line


def test_only_bad_rows_are_an_error_even_when_skipped(lab, refused):
    bad = [change(lab.rows[2]) for change, _ in list(ROWS.values())[:4]]
    line = refused("train", lab.config, lab.data(*bad), "data.on_bad_row=skip")
    assert "no usable rows (skipped: 3 placeholder_mismatch, 1 missing_answer)" in line


def test_columns_without_image_or_answer(lab, refused):
    trl = [without(row, "problem") | {"prompt": "What is 3 plus 4?"} for row in lab.rows[:3]]
    line = refused("train", lab.config, lab.data(*trl[:2], without(trl[2], "images")))
    assert "rows.jsonl line 3 (id q2): the row has no image" in line
    assert "data.text_only=true" in line
    line = refused("train", lab.config, lab.data(*[without(row, "answer") for row in trl]))
    assert "reward 'exact' needs answer" in line
    assert "a reward gets lists named prompts, completions" in line


def culprit(lab, kind):
    """A question whose image or text is found to be faulty only when it is read."""
    row = {**lab.rows[3], "id": "culprit"}
    if kind == "too long":
        return {**row, "problem": "<image>" + "What is 3 plus 4? " * 100}
    png = (lab.folder / "data/3.png").read_bytes()
    content = {"not an image": b"nothing", "truncated": png[: len(png) // 2], "zero bytes": b""}[kind]
    (lab.folder / "data/bad.png").write_bytes(content)
    return {**row, "images": ["bad.png"]}


SKIPPED = {
    "not an image": "(unreadable_image): culprit: image 1 of 1",
    "truncated": "(unreadable_image): culprit: image 1 of 1",
    "zero bytes": "(empty_image): culprit: image 1 of 1",
    "too long": "(prompt_too_long): culprit: the prompt has",
}


@pytest.mark.parametrize("kind", SKIPPED)
def test_unusable_questions_are_skipped_counted_and_named(kind, lab, mmrl):
    data = lab.data(*lab.rows[:3], culprit(lab, kind))
    heldout = f"eval_data.heldout.{data.removeprefix('data.')}"
    small = ["trainer.steps=1", "trainer.tasks_per_step=4", "evaluation.at_end=true", "evaluation.max_tasks=0"]
    code, lines = mmrl("train", lab.config, data, heldout, *small)
    assert code == 0
    (line,) = lines
    assert line.startswith("mmrl: warning: question skipped ")
    assert SKIPPED[kind] in line
    assert ("511" if kind == "too long" else "bad.png") in line
    (metrics,) = lab.metrics()
    assert (metrics["data/skipped"], metrics["samples/total"]) == (1, 3 * 2)
    (evaluation,) = [json.loads(line) for line in (lab.run / "evaluations.jsonl").open()]
    assert (evaluation["n"], evaluation["skipped"]) == (3, 1)


def test_when_no_question_can_be_used_the_run_fails(lab, mmrl):
    code, lines = mmrl("train", lab.config, lab.data(culprit(lab, "zero bytes")))
    assert code == 1
    assert lines[-1].startswith("mmrl: run failed: none of 2 questions could be used")
    assert "bad.png" in lines[-1]


@pytest.mark.parametrize(
    ("options", "message"),
    [("{cnt: 3}", "unexpected keyword argument 'cnt'"), ("{split: tset}", "split is 'tset'; allowed: train, test")],
)
def test_options_that_do_not_fit_the_function_that_builds_the_data(options, message, lab, refused):
    path = lab.folder / "new/questions.jsonl"
    build = ["data.build=mmrl.vlm.toy.digits:build_questions", f"data.build_options={options}"]
    line = refused("train", lab.config, f"data.path={path}", *build)
    assert "data.build 'mmrl.vlm.toy.digits:build_questions' with data.build_options failed" in line
    assert message in line
    assert not path.exists()


def test_supervised_run_without_completions(lab, refused):
    line = refused("sft", supervised(lab), "target_key=solution")
    assert "question q0 has no text in column 'solution' (target_key)" in line
    assert "columns: id, answer, completion" in line
    assert "use `mmrl train`" in refused("sft", lab.config)
