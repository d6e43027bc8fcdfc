from fractions import Fraction

import pytest

from mmrl.rewards.answers import number_reward, read_number
from tests.growth import assert_no_worse_than_linear


def score(text, gold=7, prompt="How many?", **options):
    return number_reward([prompt], [text], answer=[gold], **options)[0]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("7", 7),
        ("+7", 7),
        ("-3", -3),
        ("\u22123", -3),
        (" 7. ", 7),
        ("7.0", 7),
        (".5", Fraction(1, 2)),
        ("1,234", 1234),
        ("1,234,567.25", Fraction(4938269, 4)),
        ("1{,}000", 1000),
        ("1.5e3", 1500),
        ("2E-2", Fraction(1, 50)),
        ("1.2 x 10^3", 1200),
        ("3 \\times 10^{2}", 300),
        ("3/4", Fraction(3, 4)),
        ("1 3/4", Fraction(7, 4)),
        ("-3/4", Fraction(-3, 4)),
        ("\\frac{3}{4}", Fraction(3, 4)),
        ("½", Fraction(1, 2)),
        ("2½", Fraction(5, 2)),
        ("1½ cups", Fraction(3, 2)),
        ("-1¾", Fraction(-7, 4)),
        ("12km²", 12),
        ("50%", 50),
        ("50 \\%", 50),
        ("$5", 5),
        ("\\$5", 5),
        ("5 cm", 5),
        ("5 cm^2", 5),
        ("5 cm²", 5),
        ("12\\text{ cm}", 12),
        ("the sum is 12 apples", 12),
        ("seven (7)", 7),
        ("x = -5", -5),
        ("１２", 12),
        ("7 is the sum, so 7", 7),
    ],
)
def test_read_one_number(text, value):
    assert read_number(text) == value


@pytest.mark.parametrize(
    "text",
    [
        "",
        "seven",
        "nan",
        "inf",
        "7, 8",
        "7 or 8",
        "7 7",
        "7, 7",
        "3+4",
        "3 + 4 = 7",
        "3 - 3",
        "2 * 7",
        "10^3",
        "2^3",
        "2³",
        "10²",
        "10⁻²",
        "x^2 = 4",
        "sqrt(4)",
        "\\sqrt{4}",
        "2\\pi",
        "2π",
        "5!",
        "1e1234",
        "0/0",
        "1/0",
        "1/2/3",
        "1,2345",
        "1234,567",
        "3.14.15",
        "2024-01-05",
        "10:30",
        "9" * 70,
        "0 1 2 3 4 5 6 7 8 9",
    ],
)
def test_no_number_several_numbers_or_an_expression(text):
    assert read_number(text) is None


@pytest.mark.parametrize("text", ["<answer>7</answer>", "<think>3 4 9</think><answer>It is 7.</answer>", "\\boxed{7}"])
def test_right_number(text):
    assert score(text) == 1.0


@pytest.mark.parametrize("gold", range(10))
@pytest.mark.parametrize(
    "text",
    [
        "",
        "0 1 2 3 4 5 6 7 8 9",
        "<answer>0 1 2 3 4 5 6 7 8 9</answer>",
        "<answer>0, 1, 2, 3, 4, 5, 6, 7, 8, 9</answer>",
        "<answer>0123456789</answer>",
        "<answer>between 0 and 9</answer>",
        "".join(f"<answer>{digit}</answer>" for digit in range(10)),
        "".join(f"\\boxed{{{digit}}}" for digit in range(10)),
        "<answer>" * 3 + "7" + "</answer>" * 3,
        "<answer>\\boxed{1} or 2, 3, 4, 5, 6, 7, 8, 9, 0</answer>",
        "<answer></answer>",
        "<think>7</think>",
        "How many?",
    ],
)
def test_nothing_for_no_answer_or_all_answers(text, gold):
    assert score(text, gold) == 0.0
    assert score(text, gold, require_block=False) == 0.0


def test_repeated_question_earns_nothing():
    question = "How many dots are there? Write <answer>7</answer> for seven dots."
    assert score(question, 7, question) == 0.0
    assert score(question, 7, question, require_block=False) == 0.0
    assert score(question + "<answer>7</answer>", 7, question) == 1.0


def test_bare_number_needs_permission():
    assert score("The sum is 7.") == 0.0
    assert score("The sum is 7.", require_block=False) == 1.0
    assert score("<think>7", require_block=False) == 0.0
    assert score("3 and 4 make 7", require_block=False) == 0.0
    assert score("<answer>8</answer> 7", require_block=False) == 0.0


def test_tolerances_are_the_larger_of_both_and_include_their_edge():
    assert score("<answer>7.5</answer>", absolute=0.5) == 1.0
    assert score("<answer>7.51</answer>", absolute=0.5) == 0.0
    assert score("<answer>105</answer>", 100, relative=0.05) == 1.0
    assert score("<answer>106</answer>", 100, relative=0.05) == 0.0
    assert score("<answer>-95</answer>", -100, relative=0.05) == 1.0
    assert score("<answer>0.1</answer>", 0, relative=0.05) == 0.0
    assert score("<answer>0.3333333</answer>", "1/3") == 1.0


def test_percent():
    assert score("<answer>25%</answer>", 25) == 1.0
    assert score("<answer>25%</answer>", 0.25) == 0.0
    assert score("<answer>25%</answer>", 0.25, percent="value") == 1.0
    assert score("<answer>25</answer>", "25%", percent="value") == 0.0


@pytest.mark.parametrize("gold", ["7", " 7 ", 7.0, "<answer>7</answer>", "3 and 4 make #### 7"])
def test_forms_of_the_right_answer(gold):
    assert score("<answer>7</answer>", gold) == 1.0


@pytest.mark.parametrize("gold", ["seven", "", None, "7, 8", float("nan"), True])
def test_right_answer_that_is_not_a_number_is_an_error(gold):
    with pytest.raises(ValueError, match="reference answer"):
        score("<answer>7</answer>", gold)


def test_options_are_checked():
    with pytest.raises(ValueError, match="percent"):
        score("<answer>7</answer>", percent="drop")
    with pytest.raises(ValueError, match="tolerances"):
        score("<answer>7</answer>", absolute=-1)


@pytest.mark.parametrize(
    "piece", [" ", "\n", "< ", "< /", "<answer>7", "7", "7 ", "<answer>7</answer>", "\\boxed{7", ",111", "{" * 9, "1/"]
)
def test_time_grows_with_the_length_of_the_input(piece):
    assert_no_worse_than_linear(score, lambda count: "<" + piece * count)
    assert_no_worse_than_linear(score, lambda count: f"<answer>{piece * count}</answer>")
