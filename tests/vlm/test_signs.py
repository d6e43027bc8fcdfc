"""The signs: worked answers by the letters' meaning or by chance, disjoint splits, hints."""

import pytest

from mmrl.runs.records import read_jsonl
from mmrl.vlm.toy.countdown import evaluate
from mmrl.vlm.toy.signs import LARGEST_VALUE, MEANING, build_problems


def test_worked_answers_follow_the_letters_and_splits_are_disjoint(tmp_path):
    train = read_jsonl(build_problems(tmp_path / "train.jsonl", count=300, seed=1))
    test = read_jsonl(build_problems(tmp_path / "test.jsonl", count=300, split="test", seed=1))
    assert not {row["problem"] for row in train} & {row["problem"] for row in test}
    assert {row["steps"] for row in train} == {"1", "2", "3"}
    for row in (*train, *test):
        first, *rest = row["problem"].removeprefix("Compute ").removesuffix(".").split()
        value = int(first)
        for letter, number, hint in zip(rest[::2], rest[1::2], row["hints"], strict=True):
            computed, _, result = hint.partition("=")
            assert computed == f"{value}{MEANING[letter]}{number}"
            value = int(evaluate(computed)[0])
            assert value == int(result)
            assert 0 <= value <= LARGEST_VALUE
        assert row["answer"] == str(value)
        assert row["completion"] == f"<think>{' '.join(row['hints'])}</think><answer>{value}</answer>"
        assert row["teacher_responses"] == [{"model": "worked", "text": row["completion"]}]


def test_guessed_operations_are_drawn_at_random_in_their_share(tmp_path):
    found = read_jsonl(build_problems(tmp_path / "guessed.jsonl", count=2000, steps=[1], guessed=0.6, seed=1))
    right = 0
    for row in found:
        computed, _, result = row["hints"][0].partition("=")
        assert evaluate(computed)[0] == int(result)
        right += MEANING[row["problem"].split()[2]] in computed
    # 0.4 by the letter and a third of the others, but products that are too large are drawn again
    assert 0.5 < right / len(found) < 0.7


def test_a_share_of_the_problems_ends_in_its_first_hints(tmp_path):
    shown = []
    for row in read_jsonl(build_problems(tmp_path / "hinted.jsonl", hinted=0.5, count=200, steps=[2], seed=1)):
        hints = row["problem"].partition(".")[2].split()
        assert hints == row["hints"][: len(hints)]
        shown.append(len(hints))
    assert 70 < sum(number > 0 for number in shown) < 130
    assert set(shown) == {0, 1, 2}


@pytest.mark.parametrize(
    ("options", "message"),
    [({"split": "dev"}, "split is 'dev'; allowed: train, test"), ({"steps": [0]}, "at least one letter")],
)
def test_bad_options_are_refused(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        build_problems(tmp_path / "problems.jsonl", **options)
