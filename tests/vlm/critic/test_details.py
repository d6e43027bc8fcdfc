import numpy as np
import pytest

from mmrl.vlm.critic.critiques import (
    Altered,
    alter_numbers,
    critique_score,
    f1,
    f1_reward,
    insert_errors,
    is_satisfied,
    jaccard,
    jaccard_reward,
    listed_details,
    ordered_pairs,
)


def test_only_the_named_numbers_are_changed():
    for seed in range(50):
        altered = insert_errors("3 cats, 12 dogs and 405 birds", np.random.default_rng(seed), most=2)
        found = [word for word in altered.text.replace(",", "").split() if word.isdigit()]
        changed = [
            f"number {n + 1}" for n, (now, was) in enumerate(zip(found, ["3", "12", "405"], strict=True)) if now != was
        ]
        assert altered.errors == changed
        assert 1 <= len(changed) <= 2
        assert [len(number) for number in found] == [1, 2, 3]


def test_errors_are_as_many_as_drawn_and_never_more_than_there_are():
    counts = [len(insert_errors("1 2 3 4 5 6 7", np.random.default_rng(seed)).errors) for seed in range(200)]
    assert set(counts) == {1, 2, 3, 4, 5}
    assert all(len(insert_errors("1 2", np.random.default_rng(seed), least=5).errors) == 2 for seed in range(5))
    clean = [insert_errors("1 2", np.random.default_rng(seed), least=0, most=1) for seed in range(40)]
    assert {len(altered.errors) for altered in clean} == {0, 1}
    assert all((altered.text == "1 2") == (not altered.errors) for altered in clean)


def test_long_numbers_are_changed_too():
    altered = alter_numbers("12345678901234567890123", 1, np.random.default_rng(0))
    assert altered.text != "12345678901234567890123"
    assert len(altered.text) == 23


def test_errors_of_the_users_own():
    def swap(answer, count, rng):
        return Altered(answer.replace("left", "right"), ["the cat is on the right"])

    altered = insert_errors("The cat is on the left.", np.random.default_rng(0), insert=swap)
    assert altered.errors == ["the cat is on the right"]
    with pytest.raises(ValueError, match="no error was inserted into"):
        insert_errors("The cat is up.", np.random.default_rng(0), insert=swap)


@pytest.mark.parametrize(
    ("answer", "options", "message"),
    [
        ("no digits", {}, "has no number; the built-in errors only replace numbers"),
        ("1", {"least": 3, "most": 2}, "least=3 and most=2"),
        ("1", {"least": -1}, "least=-1"),
        ("1", {"least": 0, "most": 0}, "most at least 1"),
    ],
)
def test_answers_and_bounds_that_cannot_be_used(answer, options, message):
    with pytest.raises(ValueError, match=message):
        insert_errors(answer, np.random.default_rng(0), **options)


@pytest.mark.parametrize(
    ("critique", "listed"),
    [
        ("number 2; number 4", ["number 2", "number 4"]),
        ("#### Critique\n1. Number 2.\n2. The cat is black\n", ["number 2", "the cat is black"]),
        ("- a\n* b\n- a", ["a", "b"]),
        ("<think>number 9</think>\nnumber 1", ["number 1"]),
        ("<think>number 9", []),
        ("none", []),
        ("  ", []),
        ("No errors.", []),
        ("2 dogs", ["2 dogs"]),
    ],
)
def test_what_a_critique_lists(critique, listed):
    assert listed_details(critique) == listed


def test_a_critique_that_finds_nothing_ends_the_rounds():
    assert is_satisfied("none")
    assert is_satisfied("The answer is correct.")
    assert not is_satisfied("The answer is incorrect: number 2")
    assert not is_satisfied("number 2")


def test_scores_by_hand():
    inserted = ["number 1", "number 3"]
    assert jaccard(["number 1", "number 2"], inserted) == pytest.approx(1 / 3)
    assert f1(["number 1", "number 2"], inserted) == 0.5
    assert (jaccard([], []), f1([], [])) == (1.0, 1.0)
    assert (jaccard([], inserted), f1(["a"], [])) == (0.0, 0.0)
    assert critique_score("Number 1; number 2", inserted) == 0.33
    assert critique_score("number 1; number 2", inserted, mark=7.5) == 1.08  # 0.333 + 0.75, not the mark cut to 7
    assert critique_score("number 3; number 1", inserted) == 1.0
    with pytest.raises(ValueError, match="it must be from 0 to 10"):
        critique_score("number 1", inserted, mark=11)


def test_rewards_score_only_rows_with_false_details():
    said = ["number 1", "number 1; number 2", "7 3 5", [{"role": "assistant", "content": "number 2"}]]
    inserted = [["number 1"], ["number 1"], None, ["number 2"]]
    assert f1_reward(said, inserted=inserted) == pytest.approx([1.0, 2 / 3, None, 1.0])
    assert jaccard_reward(said, inserted=inserted) == [1.0, 0.5, None, 1.0]
    assert f1_reward(said) == [None] * 4
    with pytest.raises(ValueError, match="expected the list of an answer's false details"):
        f1_reward(["number 1"], inserted=["number 1"])


def test_pairs_are_all_with_a_higher_and_a_lower_score_that_list_something():
    texts, scores = ["a", "b", "none", "c", ""], [0.5, 1.0, 2.0, 0.5, 3.0]
    assert ordered_pairs(texts, scores) == [(1, 0), (1, 3)]
    assert ordered_pairs(texts, scores, allow_empty=True) == [(1, 0), (1, 3), (2, 0), (2, 1), (2, 3)]
