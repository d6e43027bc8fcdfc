import json

import pytest

from mmrl.errors import UserError
from mmrl.runs.records import read_jsonl
from mmrl.vlm.critic.critiques import build_false_answers, build_pairs
from mmrl.vlm.data.dataset import DataConfig, load_tasks
from mmrl.vlm.methods.pairs import PairColumns, keep_pairs
from mmrl.vlm.toy.critic_digits import CRITIQUE, REVISION, build_critique_start, build_readings


@pytest.fixture
def false(tmp_path):
    answers = build_readings(tmp_path / "right.jsonl", count=12, digits=3, boxed=False)
    return build_false_answers(tmp_path / "false.jsonl", answers={"path": str(answers)}, template=CRITIQUE, most=2)


def with_critiques(path, critiques, **cells):
    content = [{**row, "critiques": critiques(row), **cells} for row in read_jsonl(path)]
    other = path.with_name("written.jsonl")
    other.write_text("".join(json.dumps(row) + "\n" for row in content))
    return other


def test_false_answers_differ_where_they_say(false):
    right = read_jsonl(false.with_name("right.jsonl"))
    for row, source in zip(read_jsonl(false), right, strict=True):
        numbers = zip(row["false_answer"].split(), source["answer"].split(), strict=True)
        assert row["inserted"] == [f"number {n + 1}" for n, (now, was) in enumerate(numbers) if now != was]
        assert 1 <= len(row["inserted"]) <= 2
        assert row["answer"] == "; ".join(row["inserted"])
        assert f"Answer: {row['false_answer']} Which" in row["prompt"]
    assert all(len(task.load_images()) == 1 for task in load_tasks(DataConfig(path=str(false))).tasks)


def test_answers_may_stay_right(tmp_path):
    answers = build_readings(tmp_path / "right.jsonl", count=30, digits=2, boxed=False)
    made = read_jsonl(build_false_answers(tmp_path / "f.jsonl", answers={"path": str(answers)}, least=0, most=1))
    clean = [row for row in made if not row["inserted"]]
    assert 5 < len(clean) < 25
    assert {row["answer"] for row in clean} == {"none"}


def make_up(row):
    """One right critique, one with an extra detail, an empty one, the right one again in other words."""
    right = "; ".join(row["inserted"])
    return [right, f"{right}; number 9", "none", right.upper()]


def test_pairs_are_ranked_by_the_jaccard_index(false, tmp_path):
    path = build_pairs(
        tmp_path / "pairs.jsonl", questions={"path": str(with_critiques(false, make_up))}, critiques_key="critiques"
    )
    found = read_jsonl(path)
    assert len(found) == 2 * 12, "two right wordings before the worse one; the empty critique is in no pair"
    for row in found:
        count = row["chosen"].lower().count("number")
        assert row["rejected"] == f"{row['chosen'].lower()}; number 9"
        assert (row["score_chosen"], row["score_rejected"]) == (1.0, round(count / (count + 1), 2))
    kept = keep_pairs(load_tasks(DataConfig(path=str(path))), PairColumns("chosen", "rejected"))
    assert len(kept.tasks) == 24


def prefer_last(questions, false_answers, inserted, critiques):
    """A judge for the tests."""
    assert all("Which digits" in text for text in questions)
    return [10.0 if "9" in text else 0.0 for text in critiques]


def too_few(questions, false_answers, inserted, critiques):
    return [1.0]


def test_a_judge_adds_a_tenth_of_its_mark(false, tmp_path):
    source = {"path": str(with_critiques(false, make_up))}
    options = {"questions": source, "critiques_key": "critiques"}
    here = "tests.vlm.critic.test_critiques"
    for row in read_jsonl(build_pairs(tmp_path / "pairs.jsonl", judge=f"{here}:prefer_last", **options)):
        assert row["chosen"].endswith("number 9")
        assert row["score_rejected"] == 1.0
        assert row["score_chosen"] in (1.5, 1.67)
    with pytest.raises(UserError, match=r"returned 1 marks for 48 critiques; expected one per critique"):
        build_pairs(tmp_path / "other.jsonl", judge=f"{here}:too_few", **options)


def test_shuffled_scores_lose_the_order_and_fewer_pairs_can_be_kept(false, tmp_path):
    source = {"path": str(with_critiques(false, lambda row: ["number 1", "number 2", "number 3"]))}
    options = {"questions": source, "critiques_key": "critiques"}
    true = read_jsonl(build_pairs(tmp_path / "a.jsonl", **options))
    mixed = read_jsonl(build_pairs(tmp_path / "b.jsonl", shuffle_scores=True, **options))
    assert len(true) == len(mixed) == 24
    assert [row["chosen"] for row in true] != [row["chosen"] for row in mixed]
    assert sorted(row["score_chosen"] for row in true) == sorted(row["score_chosen"] for row in mixed)
    assert len(read_jsonl(build_pairs(tmp_path / "c.jsonl", pairs_per_answer=1, **options))) == 12


def test_empty_critiques_count_where_that_is_wanted(false, tmp_path):
    source = {"path": str(with_critiques(false, lambda row: ["none", "number 9", ""], inserted=[]))}
    options = {"questions": source, "critiques_key": "critiques"}
    with pytest.raises(UserError, match="none of 12 answers gives a pair"):
        build_pairs(tmp_path / "a.jsonl", **options)
    found = read_jsonl(build_pairs(tmp_path / "b.jsonl", allow_empty=True, **options))
    assert {(row["chosen"], row["rejected"]) for row in found} == {("none", "number 9")}


def test_a_model_writes_the_critiques(false, tmp_path, tiny_folders):
    path = build_pairs(
        tmp_path / "pairs.jsonl",
        questions={"path": str(false), "max_tasks": 6},
        model=str(tiny_folders["qwen2_5_vl"]),
        critiques=3,
        max_new_tokens=4,
        judge="tests.vlm.critic.test_critiques:by_length",
    )
    found = read_jsonl(path)
    assert found
    assert all(row["score_chosen"] > row["score_rejected"] for row in found)


def by_length(questions, false_answers, inserted, critiques):
    return [float(len(text) % 10) for text in critiques]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "set either model, which writes the critiques, or critiques_key"),
        ({"critiques_key": "a", "model": "b"}, "set either model"),
        ({"critiques_key": "missing"}, "column 'missing' is None; expected a list of critiques"),
        ({"critiques_key": "false_answer"}, "expected a list of critiques"),
    ],
)
def test_bad_options_are_named(false, tmp_path, options, message):
    with pytest.raises(UserError, match=message):
        build_pairs(tmp_path / "pairs.jsonl", questions={"path": str(false)}, **options)


def test_questions_without_the_false_details_are_refused(false, tmp_path):
    with pytest.raises(UserError, match="no list in column 'inserted'"):
        build_pairs(tmp_path / "p.jsonl", questions={"path": str(false.with_name("right.jsonl"))}, critiques_key="x")


@pytest.mark.parametrize(
    ("cells", "message"),
    [
        ({"answer": "seven"}, "has no number; the built-in errors only replace numbers"),
        ({"answer": 7}, "column 'answer' is 7; expected the correct answer as text"),
        ({"answer": "7 <image>"}, "column 'answer' contains <image>"),
    ],
)
def test_bad_answers_stop_the_build_or_are_left_out(false, tmp_path, cells, message):
    content = read_jsonl(false.with_name("right.jsonl"))
    content[3] |= cells
    source = tmp_path / "bad.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in content))
    with pytest.raises(UserError, match=message):
        build_false_answers(tmp_path / "f.jsonl", answers={"path": str(source)})
    left = build_false_answers(tmp_path / "f.jsonl", answers={"path": str(source), "on_bad_row": "skip"})
    assert len(read_jsonl(left)) == 11


def test_the_warm_start_has_all_three_turns(tmp_path):
    start = read_jsonl(
        build_critique_start(tmp_path / "start.jsonl", count=90, critique_template=CRITIQUE, revision_template=REVISION)
    )
    kinds = {kind: [row for row in start if row["kind"] == kind] for kind in ("read", "criticise", "revise")}
    assert all(len(found) > 8 for found in kinds.values())
    for row in kinds["revise"]:
        _, answer, asked = row["prompt"]
        wrong = [
            f"number {n + 1}"
            for n, (a, b) in enumerate(zip(answer["content"].split(), row["answer"].split(), strict=True))
            if a != b
        ]
        assert asked["content"].startswith(f"Wrong: {'; '.join(wrong) or 'none'}. ")
    for row in kinds["criticise"]:
        places = row["completion"].removeprefix("<think>").partition("</think>")[0].split()
        assert all((place[0] == place[1]) == (place[2] == "=") for place in places)
        wrong = [f"number {n + 1}" for n, place in enumerate(places) if place[2] == "!"]
        assert row["completion"].endswith(f"</think>{row['answer']}")
        assert row["answer"] == ("; ".join(wrong) or "none")
        assert f"Answer: {' '.join(place[1] for place in places)} Which" in row["prompt"][0]["content"]
    tasks = load_tasks(DataConfig(path=str(tmp_path / "start.jsonl"))).tasks
    assert all(len(task.load_images()) == 1 for task in tasks)
