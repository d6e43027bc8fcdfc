"""The text world: problems whose worked answers are right, disjoint splits, and a verifier that reads expressions."""

from fractions import Fraction

import pytest

from mmrl.runs.records import read_jsonl
from mmrl.vlm.data.dataset import DataConfig, load_tasks
from mmrl.vlm.toy.countdown import build_pairs, build_problems, evaluate, solves


def score(texts, numbers="3 7 12", target=33):
    """Rewards of answers to one problem."""
    count = len(texts)
    return solves(["Make it."] * count, texts, numbers=[numbers] * count, target=[target] * count)


def key(row):
    return tuple(sorted(map(int, row["numbers"].split()))), row["target"]


def test_worked_answers_are_right_and_splits_are_disjoint(tmp_path):
    train = read_jsonl(build_problems(tmp_path / "train.jsonl", count=400, seed=1))
    test = read_jsonl(build_problems(tmp_path / "test.jsonl", count=200, split="test", seed=1))
    assert not {key(row) for row in train} & {key(row) for row in test}
    assert len({key(row) for row in test}) == len(test)
    for row in (*train, *test):
        assert score([row["completion"]], row["numbers"], row["target"]) == [1.0]
        thought = row["completion"].removeprefix("<think>").partition("</think>")[0]
        for step in thought.split():
            computed, _, said = step.partition("=")
            assert evaluate(computed)[0] == int(said)
        assert int(row["operands"]) == len(row["numbers"].split()) == len(thought.split()) + 1
        used = {{"+": "add", "-": "subtract", "*": "multiply", "/": "divide"}[s] for s in row["answer"] if s in "+-*/"}
        assert {row["operator"]} == (used if len(used) == 1 else {"mixed"})
    assert {row["operator"] for row in train} == {"add", "subtract", "multiply", "divide", "mixed"}
    again = build_problems(tmp_path / "again" / "train.jsonl", count=400, seed=1)
    assert read_jsonl(again) == train
    task = load_tasks(DataConfig(path=str(again))).tasks[0]
    assert task.messages == [{"role": "user", "content": [{"type": "text", "text": train[0]["problem"]}]}]
    assert not task.images


def test_one_side_of_a_pair_misses_the_target(tmp_path):
    for row in read_jsonl(build_pairs(tmp_path / "pairs.jsonl", count=50, seed=1)):
        sides = [row["chosen"], row["rejected"]]
        assert score(sides, row["numbers"], row["target"]) == [1.0, 0.0]
        _, used = evaluate(row["rejected"].split("<answer>")[1].removesuffix("</answer>"))
        assert sorted(used) == sorted(map(int, row["numbers"].split()))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"split": "val"}, "allowed: train, test"),
        ({"operands": (1, 2)}, "at least two numbers"),
        ({"operands": (4,), "largest": 30}, "at most 99"),
        ({"operands": (2,), "largest": 3, "split": "test"}, "lower count or raise largest"),
    ],
)
def test_impossible_problems_are_refused(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        build_problems(tmp_path / "x.jsonl", count=100, **options)


def test_the_verifier_reads_the_expression_and_not_the_number():
    right = ["7*3+12", "12 + 3*7", "(7*3)+12"]
    wrong = ["33", "30+3", "7*3+12=33", "12+21", "7*3", "7*3+12+3-3", "3+7+12", "7**3", "12-(0-7*3)", "", "7*3+12)"]
    assert score([f"<think>anything</think><answer>{text}</answer>" for text in right]) == [1.0] * 3
    assert score([f"<answer>{text}</answer>" for text in wrong]) == [0.0] * len(wrong)
    assert score(["7*3+12", "<answer>7*3+12</answer><answer>3</answer>", "<think><answer>7*3+12</answer>"]) == [0.0] * 3
    assert score(["<answer>8/(3-8/3)</answer>"], "3 3 8 8", 24) == [1.0]  # exact fractions between
    assert score(["<answer>8/(3-3)*8</answer>"], "3 3 8 8", 24) == [0.0]


@pytest.mark.parametrize(
    "text", ["3**2", "3//2", "-3+4", "3 4", "1/(2-2)", "٣+1", "3.5", "1+(2", "x", "0x3", "3(4)", ""]
)
def test_other_texts_are_no_expressions(text):
    with pytest.raises(ValueError, match=r"expression|cannot be evaluated|allowed"):
        evaluate(text)


def test_long_texts_end_quickly():
    assert evaluate("(" * 99 + "1" + ")" * 99) == (Fraction(1), [1])
    with pytest.raises(ValueError, match="not an expression"):
        evaluate("9*" * 200 + "9")
