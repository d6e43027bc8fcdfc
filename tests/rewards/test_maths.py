import pytest

from mmrl.errors import UserError
from mmrl.rewards import RewardConfig, RewardSum


@pytest.fixture(scope="module")
def maths():
    rewards = RewardSum([RewardConfig("math", timeout_s=20.0)], workers=2)
    yield rewards
    rewards.close()


def score(maths, answers, golds):
    result = maths.score(["q"] * len(answers), answers, {"answer": golds})
    return result.terms["math"], result.errors


EQUAL = [
    ("\\boxed{\\frac{1}{2}}", "1/2"),
    ("<answer>0.5</answer>", "\\frac{1}{2}"),
    ("<answer>$\\frac{1}{2}$</answer>", "0.5"),
    ("<answer>\\boxed{2\\sqrt{3}}</answer>", "$\\sqrt{12}$"),
    ("<answer>x = 4</answer>", "4"),
    ("<answer>4.</answer>", "4"),
    ("<answer>It is 4 apples</answer>", 4),
    ("<answer>1,234</answer>", "1234"),
    ("<answer>1 3/4</answer>", "7/4"),
    ("<answer>(x+1)^2</answer>", "x^2+2x+1"),
    ("<answer>{1, 2}</answer>", "\\{2, 1\\}"),
    ("<answer>50\\%</answer>", "0.5"),
    ("<think>\\boxed{9}</think>\\boxed{4}", "4"),
    ("\\boxed{10 cm^2}", "10"),
    ("\\boxed{9.8 m/s^2}", "9.8"),
    ("\\boxed{12}", "12 m/s"),
    ("\\boxed{6m³}", "6"),
    ("\\boxed{90°}", "90"),
    ("\\boxed{90}", "90°"),
    ("\\boxed{60^o}", "60"),
    ("\\boxed{3e8}", "3 \\times 10^8"),
    ("\\boxed{0.001}", "1e-3"),
    ("\\boxed{¾}", "0.75"),
    ("\\boxed{1.5}", "1½"),
    ("\\boxed{even}", "\\text{even}"),
]

NOT_EQUAL = [
    ("", "4"),
    ("4", "4"),
    ("<answer></answer>", "4"),
    ("<answer>four</answer>", "4"),
    ("<answer>3, 4, 5</answer>", "4"),
    ("<answer>3 or 4 or 5</answer>", "5"),
    ("<answer>4 5</answer>", "9"),
    ("<answer>$3$ or $4$</answer>", "4"),
    ("<answer>4</answer><answer>5</answer>", "4"),
    ("\\boxed{4} \\boxed{5}", "5"),
    ("<answer><answer>4</answer></answer>", "4"),
    ("<answer>der</answer>", "4"),
    ("<answer>\\frac{1}{</answer>", "4"),
    ("<answer>4 \\neq 5</answer>", "4"),
    ("<answer>x > 3</answer>", "4"),
    ("<answer>答案</answer>", "4"),
    ("\\boxed{12 km/h}", "12 m/s"),
    ("\\boxed{6x}", "6"),
    ("\\boxed{3e}", "3"),
    ("\\boxed{6}", "6m^3"),
    ("\\boxed{6 m, 7 m}", "6"),
    ("\\boxed{10 cm^3 or 11}", "10"),
    ("\\boxed{-5 m}", "5"),
    ("\\boxed{odd}", "\\text{even}"),
    ("<answer>" + "4" * 2000 + "</answer>", "4"),
]


def test_equal_and_not_equal_answers(maths):
    answers = [answer for answer, _ in EQUAL + NOT_EQUAL]
    values, errors = score(maths, answers, [gold for _, gold in EQUAL + NOT_EQUAL])
    wanted = [1.0] * len(EQUAL) + [0.0] * len(NOT_EQUAL)
    assert list(zip(answers, values, strict=True)) == list(zip(answers, wanted, strict=True))
    assert errors == {}


def test_right_answer_that_cannot_be_parsed_is_counted_and_never_rewarded(maths):
    values, errors = score(maths, ["<answer>red</answer>"] * 3, ["red", "\\frac{", None])
    assert all(value != value for value in values)
    assert errors == {"math/raised": 3}


@pytest.mark.slow
def test_endless_computation_costs_its_own_row_only(maths):
    rewards = RewardSum([RewardConfig("math", timeout_s=10.0)], workers=1)
    answers = ["\\boxed{4}", "\\boxed{10^{10^{10}}}", "\\boxed{5}", "\\boxed{4}"]
    values, errors = score(rewards, answers, ["4"] * 4)
    rewards.close()
    assert [values[0], *values[2:]] == [1.0, 0.0, 1.0]
    assert values[1] != values[1]
    assert errors == {"math/timeout": 1}


def test_last_box_counts_as_in_easyr1():
    rewards = RewardSum([RewardConfig("math", options={"several": "last"})], workers=1)
    values, _ = score(rewards, ["\\boxed{4} \\boxed{5}"], ["5"])
    rewards.close()
    assert values == [1.0]


def test_only_in_worker_processes():
    with pytest.raises(UserError, match="only runs in worker processes"):
        RewardSum([RewardConfig("math", isolate=False)])
