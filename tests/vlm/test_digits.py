from __future__ import annotations

import json

import numpy as np
import pytest
from PIL import Image

from mmrl.vlm.data import DataConfig, load_tasks
from mmrl.vlm.digits import QUESTIONS, TEST_SCANS, _scan_pool, build_hints, build_questions


def rows(path):
    return [json.loads(line) for line in path.open()]


def test_train_and_test_scans_are_disjoint():
    train, test = set(_scan_pool("train", 0).tolist()), set(_scan_pool("test", 0).tolist())
    assert not train & test
    assert (len(train), len(test)) == (1797 - TEST_SCANS, TEST_SCANS)
    assert _scan_pool("train", 10).tolist() == _scan_pool("train", 0)[:10].tolist()
    with pytest.raises(ValueError, match="allowed: train, test"):
        _scan_pool("val", 0)


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
    assert {row["kind"] for row in rows(path)} == set(QUESTIONS)
    tasks = load_tasks(DataConfig(path=str(path))).tasks
    for task in tasks:
        (image,) = task.load_images()
        assert image.height == 56
        assert image.width in (56, 112, 168)
        digits = task.columns["completion"].split("</think>")[0].removeprefix("<think>").split()
        assert len(digits) == image.width // 56
        assert QUESTIONS[task.columns["kind"]].answer([int(d) for d in digits]) == task.columns["answer"]


def test_hints(tmp_path):
    wrong = rows(build_hints(tmp_path / "wrong.jsonl", count=20, hint="wrong"))
    assert all(f"Hint: {row['answer']}." not in row["problem"] for row in wrong)
    none = rows(build_hints(tmp_path / "none.jsonl", count=5, hint="none", blind=True))
    assert all("Hint: ?." in row["problem"] for row in none)
    assert np.asarray(Image.open(tmp_path / none[0]["images"][0])).max() == 0
    noisy = rows(build_hints(tmp_path / "noisy.jsonl", count=200, hint="noisy", hint_rate=0.85))
    right = np.mean([f"Hint: {row['answer']}." in row["problem"] for row in noisy])
    assert 0.75 < right < 0.95
    assert right == np.mean([row["hint_right"] for row in noisy])
    with pytest.raises(ValueError, match="allowed: none, mixed, noisy, wrong"):
        build_hints(tmp_path / "x.jsonl", hint="maybe")
