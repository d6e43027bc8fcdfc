"""Sentences about people: what is held out, what a form allows, and the reward; the text demo in small."""

import json
import re

import pytest

from mmrl.vlm.toy import text_demo
from mmrl.vlm.toy.people import CITIES, FORMS, PEOPLE, build_people, person_json
from tests.example_runs import shrink_demo


def rows_of(file):
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.fixture
def splits(tmp_path):
    return {
        split: rows_of(build_people(tmp_path / f"{split}.jsonl", count=300, split=split, seed=3))
        for split in ("train", "test")
    }


def test_no_name_city_or_form_is_in_both_splits(splits):
    for column in ("name", "city", "form"):
        train, test = ({row[column] for row in splits[split]} for split in ("train", "test"))
        assert train
        assert test
        assert not train & test, column
    assert {row["city"] for rows in splits.values() for row in rows} == set(CITIES.split())
    assert {row["name"] for rows in splits.values() for row in rows} == {name for name, _ in PEOPLE}


def test_rows_are_all_different_and_repeat(splits, tmp_path):
    for split, rows in splits.items():
        assert len({row["question"] for row in rows}) == 300
        assert rows_of(build_people(tmp_path / "again.jsonl", count=300, split=split, seed=3)) == rows
    assert rows_of(build_people(tmp_path / "other.jsonl", count=300, seed=4)) != splits["train"]


def test_every_sentence_holds_its_person(splits):
    for row in (row for rows in splits.values() for row in rows):
        sentence = row["question"].splitlines()[0]
        for column in ("name", "age", "city"):
            assert len(re.findall(rf"\b{row[column]}\b", sentence)) == 1


def test_the_first_capitalised_word_is_seldom_the_name_in_training(splits):
    firsts = [re.search(r"\b[A-Z]\w*", row["question"])[0] == row["name"] for row in splits["train"]]
    assert sum(firsts) / len(firsts) < 0.4


def test_a_sentence_has_the_pronouns_of_its_name(splits):
    women = {name for name, pronouns in PEOPLE if pronouns["he"] == "she"}
    for row in (row for rows in splits.values() for row in rows):
        words = set(re.findall(r"\w+", row["question"].splitlines()[0].lower()))
        assert not words & ({"he", "his"} if row["name"] in women else {"she", "her"})


def test_impossible_requests_are_refused(tmp_path):
    with pytest.raises(ValueError, match="split is 'all'; must be one of train, test"):
        build_people(tmp_path / "a.jsonl", split="all")
    with pytest.raises(ValueError, match=r"the split test only has .* distinct rows"):
        build_people(tmp_path / "a.jsonl", split="test", count=10**6)
    assert len(FORMS["train"]) >= 3 * len(FORMS["test"])


def test_the_reward_counts_right_values_of_a_whole_object():
    answers = {
        '{"name": "Anna", "age": 31, "city": "Oslo"}': 1.0,
        ' {"city": "Oslo", "age": "31", "name": "Anna"}\n': 1.0,
        '{"name": "Anna", "age": 32, "city": "Oslo"}': 0.75,
        '{"name": "She", "age": 31.0, "city": "oslo"}': 0.25,
        '{"name": "Anna", "age": 31}': 0.0,
        '{"name": "Anna", "age": 31, "city": "Oslo", "job": ""}': 0.0,
        'Here it is: {"name": "Anna", "age": 31, "city": "Oslo"}': 0.0,
        '["name", "age", "city"]': 0.0,
        "[" * 100_000: 0.0,
        "": 0.0,
    }
    count = len(answers)
    scores = person_json([""] * count, [*answers], name=["Anna"] * count, age=[31] * count, city=["Oslo"] * count)
    assert scores == [*answers.values()]


def test_the_demo_prints_sampled_first_then_greedy_forms_and_answers(tmp_path, monkeypatch):
    model = "{corpus: [Write this person as JSON with the keys name and age and city.], hidden: 32, layers: 1}"
    build = ["model.build=mmrl.vlm.toy.tiny_generic:build_tiny_generic", f"model.build_options={model}"]
    common = [*build, f"model.path={tmp_path / 'tiny'}", "trainer.steps=1", "sampler.max_new_tokens=4"]
    common += ["data.build_options.count=8", "eval_data.heldout.build_options.count=12"]
    common += ["tracking.quiet=true", "tracking.strict=true"]
    shrink_demo(monkeypatch, text_demo, common, {"people_grpo.yaml": []})
    lines = text_demo.run(tmp_path / "demo")
    number = r"\d+\.\d% \[\d+\.\d, \d+\.\d\]"
    for line, protocol in zip(lines[1:3], ("sampled", "greedy"), strict=True):
        assert re.fullmatch(rf"{protocol}: {number} to {number}, change \+?-?\d+\.\d \[.*\]", line)
    text = "\n".join(lines)
    assert text.index("heldout, sampled\n") < text.index("heldout, greedy\n")
    assert len(re.findall(r"^ +This is … from …, who will soon be … +\d", text, re.MULTILINE)) == 2
    assert len(re.findall(r"^  before +reward 0 ", text, re.MULTILINE)) == text_demo.SHOWN
    assert lines[-1] == f"report: {tmp_path / 'demo/grpo/report.html'}"
