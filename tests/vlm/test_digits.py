import numpy as np
import pytest
from PIL import Image

from mmrl.runs.records import read_jsonl
from mmrl.vlm.data.dataset import DataConfig, load_tasks
from mmrl.vlm.toy.demo import fit_blind
from mmrl.vlm.toy.digits import QUESTIONS, TEST_SCANS, build_hints, build_questions, reads_digits, scan_pool


def test_train_and_test_scans_are_disjoint():
    train, test = set(scan_pool("train", 0).tolist()), set(scan_pool("test", 0).tolist())
    assert not train & test
    assert (len(train), len(test)) == (1797 - TEST_SCANS, TEST_SCANS)
    assert scan_pool("train", 10).tolist() == scan_pool("train", 0)[:10].tolist()
    with pytest.raises(ValueError, match="allowed: train, test"):
        scan_pool("val", 0)


@pytest.mark.parametrize(
    ("kind", "answer"),
    [("read", "480"), ("add", "12"), ("largest", "8"), ("smallest", "0"), ("even", "3"), ("above", "1")],
)
def test_answers_follow_from_the_digits(kind, answer):
    assert QUESTIONS[kind].answer([4, 8, 0]) == answer


def test_questions_are_real_tasks_and_repeat(tmp_path):
    path = build_questions(tmp_path / "a" / "train.jsonl", count=30, seed=5)
    again = build_questions(tmp_path / "b" / "train.jsonl", count=30, seed=5)
    assert path.read_text() == again.read_text()
    assert {row["kind"] for row in read_jsonl(path)} == set(QUESTIONS)
    tasks = load_tasks(DataConfig(path=str(path))).tasks
    for task in tasks:
        (image,) = task.load_images()
        assert image.height == 56
        assert image.width in (56, 112, 168)
        digits = task.columns["completion"].split("</think>")[0].removeprefix("<think>").split()
        assert len(digits) == image.width // 56
        assert QUESTIONS[task.columns["kind"]].answer([int(d) for d in digits]) == task.columns["answer"]


def test_reasoning_may_read_several_times_and_noise_may_vary(tmp_path):
    path = build_questions(tmp_path / "q.jsonl", count=80, noise=[0.1, 1.0], readings=3, seed=5)
    times = set()
    for row in read_jsonl(path):
        said = row["completion"].split("</think>")[0].removeprefix("<think>").split()
        digits = row["digits"].split()
        times.add(len(said) // len(digits))
        assert said == digits * (len(said) // len(digits))
    assert times == {1, 2, 3}
    assert {row["noise"] for row in read_jsonl(path)} == {"0.1", "1"}
    for bad, message in (({"readings": 0}, "at least once"), ({"noise": []}, "empty list")):
        with pytest.raises(ValueError, match=message):
            build_questions(tmp_path / "bad.jsonl", count=1, **bad)


def test_hints(tmp_path):
    wrong = read_jsonl(build_hints(tmp_path / "wrong.jsonl", count=20, hint="wrong"))
    assert all(f"Hint: {row['answer']}." not in row["problem"] for row in wrong)
    none = read_jsonl(build_hints(tmp_path / "none.jsonl", count=5, hint="none", blind=True))
    assert all("Hint: ?." in row["problem"] for row in none)
    assert np.asarray(Image.open(tmp_path / none[0]["images"][0])).max() == 0
    noisy = read_jsonl(build_hints(tmp_path / "noisy.jsonl", count=200, hint="noisy", hint_rate=0.85))
    right = np.mean([f"Hint: {row['answer']}." in row["problem"] for row in noisy])
    assert 0.75 < right < 0.95
    assert right == np.mean([row["hint_right"] for row in noisy])
    with pytest.raises(ValueError, match="allowed: none, mixed, noisy, wrong"):
        build_hints(tmp_path / "x.jsonl", hint="maybe")


def test_the_same_questions_without_their_hints(tmp_path):
    hinted = {"count": 40, "hint_share": 0.75, "hint_rate": 0.5, "seed": 4}
    shown = read_jsonl(build_questions(tmp_path / "a" / "test.jsonl", **hinted))
    plain = read_jsonl(build_questions(tmp_path / "b" / "test.jsonl", **hinted, show_hints=False))
    for with_hint, without in zip(shown, plain, strict=True):
        claim = with_hint["hint_text"]
        assert with_hint["problem"].replace(f"Hint: {claim}. ", "") == without["problem"]
        assert with_hint["hint"] == ("none" if not claim else "right" if claim == with_hint["answer"] else "wrong")
        assert {name: without[name] for name in ("hint", "hint_text")} == {"hint": "none", "hint_text": ""}
        same = ("id", "answer", "kind", "digits", "completion")
        assert [with_hint[name] for name in same] == [without[name] for name in same]
    assert {row["hint"] for row in shown} == {"none", "right", "wrong"}
    for name in ("00000.png", "00039.png"):
        assert (tmp_path / "a" / "test" / name).read_bytes() == (tmp_path / "b" / "test" / name).read_bytes()


def test_reading_is_scored_by_the_reasoning_alone():
    answers = ["<think>8 3</think><answer>0</answer>", "<think>3 8</think><answer>11</answer>", "8 3", "<think>8 3"]
    assert reads_digits(answers, ["8 3"] * 4, kind=["add"] * 4) == [1.0, 0.0, 0.0, 0.0]


def test_the_blind_strategy_takes_the_best_guess_that_the_text_allows():
    def row(kind, hint, answer):
        return {"kind": kind, "hint_text": hint, "answer": answer}

    training = [row("add", "", "9")] * 3 + [row("add", "4", "4")] * 2 + [row("add", "5", "7"), row("even", "1", "2")]
    strategy = fit_blind([*training, *[row("even", "3", "0")] * 6])
    guesses = [strategy.answer(row(*of, "")) for of in (("add", ""), ("add", "5"), ("even", "1"), ("even", "3"))]
    assert guesses == ["9", "5", "0", "0"]
    assert strategy.answer(row("new", "1", "")) == ""
    assert strategy.share([row("add", "4", "4"), row("add", "", "1")]) == 0.5
