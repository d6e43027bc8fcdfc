"""Directional Preference Alignment: directions, their words, and the answers that are kept."""

import math
from types import SimpleNamespace

import numpy as np
import pytest

from mmrl.contrib.language import directions
from mmrl.contrib.language.directions import build_directed, build_stated, draw_direction, rating, stated
from mmrl.errors import UserError
from mmrl.runs.records import read_jsonl
from mmrl.vlm.data.dataset import DataConfig, load_tasks
from mmrl.vlm.toy.countdown import build_problems, length
from tests.golden.numbers import load

REWARDS = [
    {"name": "solves", "function": "mmrl.vlm.toy.countdown:solves", "isolate": False},
    {"name": "length", "function": "tests.contrib.language.test_directions:known_length", "isolate": False},
]


def known_length(prompts, completions, completion_lengths, **columns):
    """Tenths of the tokens; nothing of an answer that fails."""
    values = length(prompts, completions, completion_lengths=completion_lengths, longest=10)
    return [None if text == "fails" else value for text, value in zip(completions, values, strict=True)]


@pytest.fixture
def questions(tmp_path):
    return {"path": str(build_problems(tmp_path / "asked.jsonl", count=5, bare=0.5, seed=4))}


def test_words_are_those_of_the_public_model():
    peer = load("directions").peers[0]
    for degree, prompt in zip(load("directions").inputs["degrees"], peer["prompts"], strict=True):
        direction = [math.cos(math.radians(degree)), math.sin(math.radians(degree))]
        assert f"maximize weighted rating = {rating(['helpfulness', 'verbosity'], stated(direction))}" in prompt


@pytest.mark.parametrize("size", [2, 4])
def test_directions_have_a_uniform_angle_to_the_first_axis(size):
    rng = np.random.default_rng(0)
    drawn = np.array([draw_direction(rng, size, spread=45) for _ in range(4000)])
    assert np.allclose((drawn**2).sum(1), 1)
    angle = np.degrees(np.arccos(drawn[:, 0]))
    assert angle.max() <= 45
    assert np.histogram(angle, bins=5, range=(0, 45))[0] == pytest.approx([800] * 5, abs=100)
    assert abs(drawn[:, 1:].mean(0)).max() < 0.03


def test_questions_are_asked_once_with_each_angle(questions, tmp_path):
    path = build_stated(tmp_path / "s.jsonl", questions=questions, rewards=["solves", "length"], angles=[-45, 90])
    found = read_jsonl(path)
    assert [row["direction"] for row in found[:2]] == ["solves*71 + length*-71", "solves*0 + length*100"]
    assert len(found) == 10
    assert all(row["direction"] in row["prompt"] and row["completion"] for row in found)
    assert len(load_tasks(DataConfig(path=str(path))).tasks) == 10
    with pytest.raises(UserError, match="angles need exactly two rewards, but there are 3"):
        build_stated(tmp_path / "x.jsonl", questions=questions, rewards=["a", "b", "c"], angles=[0])


def test_the_best_answer_along_the_direction_is_kept(questions, tmp_path, monkeypatch):
    """A right answer, a wrong one that is longer, and one on which a reward fails."""
    right = [row["completion"] for row in read_jsonl(tmp_path / "asked.jsonl")]
    given = [[text, "<think>" + "1 " * 9 + "</think>", "fails"] for text in right]
    encode = lambda begin, text: [1] * (100 if "1 1" in text else 4)  # noqa: E731
    policy = SimpleNamespace(turns=SimpleNamespace(parts=SimpleNamespace(begin=""), encode_answer=encode))
    monkeypatch.setattr(directions, "load_policy", lambda config: policy)
    monkeypatch.setattr(directions, "write_texts", lambda policy, asked, *_: given)
    options = {"questions": questions, "model": "m", "rewards": REWARDS, "answers": 3}
    found = read_jsonl(build_directed(tmp_path / "d.jsonl", spread=80, seed=1, **options))
    for row, own in zip(found, right, strict=True):
        solves, long = (float(part.split("*")[1]) / 100 for part in row["direction"].split(" + "))
        expected = max((solves + 0.4 * long, own), (10 * long, given[0][1]))
        assert (row["score"], row["completion"]) == (pytest.approx(expected[0]), expected[1])
        assert row["rewards"] == {"solves": float(expected[1] == own), "length": 0.4 if expected[1] == own else 10}
    assert len({row["completion"] in right for row in found}) == 2, "both kinds of answers are best somewhere"

    with pytest.raises(UserError, match="a direction needs at least two rewards; given: solves"):
        build_directed(tmp_path / "x.jsonl", **(options | {"rewards": REWARDS[:1]}))
    with pytest.raises(UserError, match="unexpected keyword argument 'wieght'"):
        build_directed(tmp_path / "x.jsonl", **(options | {"rewards": [*REWARDS, {"name": "a", "wieght": 2}]}))
