import pytest

from mmrl.rewards.answers import choice_reward
from tests.growth import assert_no_worse_than_linear

QUESTION = "Which animal is shown?\nA. cat\nB. dog\nC. fish\nD. bird\nAnswer like <answer>B</answer>."


def score(text, gold="B", prompt=QUESTION, **options):
    return choice_reward([prompt], [text], answer=[gold], **options)[0]


@pytest.mark.parametrize(
    "text",
    [
        "B",
        "b",
        "(B)",
        "B.",
        "**B**",
        "It is B.",
        "The answer is (B).",
        "Answer: B",
        "The answer is B because A is wrong",
        "<answer>B</answer>",
        "<answer> (b) </answer>",
        "<answer>B. dog</answer>",
        "<answer>B. A dog</answer>",
        "<answer>B) a dog</answer>",
        "<answer>B</answer> I am sure. <answer>B.</answer>",
        "<think>It could be A or C.</think><answer>B</answer>",
        "<think>First <answer>A</answer>, no.</think><answer>B</answer>",
        "<think>A? C?</think>B",
        "\\boxed{B}",
        "\\boxed{\\text{B}}",
        "<answer>\\boxed{B}</answer>",
        "The fur tells it. $\\boxed{B}$",
        "Ｂ",
    ],
)
def test_right_letter(text):
    assert score(text) == 1.0


@pytest.mark.parametrize("gold", ["A", "B", "C", "D"])
@pytest.mark.parametrize(
    "text",
    [
        "",
        "   ",
        "A B C D",
        "ABCD",
        "A, B, C, D",
        "A/B/C/D",
        "A or B or C or D",
        "(A) (B) (C) (D)",
        "A. cat B. dog C. fish D. bird",
        "A. cat\nB. dog\nC. fish\nD. bird",
        "<answer>A B C D</answer>",
        "<answer>A, B, C, D</answer>",
        "<answer>A. or B. or C. or D.</answer>",
        "<answer>A, maybe B, maybe C, maybe D</answer>",
        "<answer>A</answer><answer>B</answer><answer>C</answer><answer>D</answer>",
        "<answer>A<answer>B<answer>C<answer>D</answer></answer></answer></answer>",
        "\\boxed{A}\\boxed{B}\\boxed{C}\\boxed{D}",
        "\\boxed{A, B, C, D}",
        "The answer is A. The answer is B. The answer is C. The answer is D.",
        "<answer></answer>",
        "<answer>",
        "</answer>",
        "<think>A B C D",
        "<think>B",
        "А",  # Cyrillic
        QUESTION,
        QUESTION + "\n",
        f"<|im_start|>user\n{QUESTION}<|im_end|>\n",
    ],
)
def test_nothing_for_no_choice_or_all_choices(text, gold):
    assert score(text, gold) == 0.0


def test_answer_after_a_repeated_question_counts():
    assert score(QUESTION + "\n<answer>C</answer>", "C") == 1.0
    assert score(QUESTION + "\n<answer>C</answer>", "B") == 0.0


def test_repeated_question_given_as_chat_or_with_special_tokens():
    assert score(QUESTION + " C", prompt="<image>" + QUESTION) == 0.0
    chat = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": QUESTION}]}]
    rendered = f"<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>{QUESTION}<|im_end|>\n"
    for prompt in (chat, rendered):
        assert score(QUESTION, "B", prompt) == 0.0
        assert score(QUESTION + " D", "D", prompt) == 1.0


def test_no_guess_pays_for_every_gold():
    hedges = ["A. maybe B maybe C", "It is B, not A", "<answer>B. dog (not A)</answer>", "I think C; D is odd"]
    for text in hedges:
        assert sum(score(text, gold) for gold in "ABCD") <= 1.0


@pytest.mark.parametrize("gold", ["B", "b", "(B)", "B.", "B. dog", "<answer>B</answer>", "\\boxed{B}", " B "])
def test_forms_of_the_right_answer(gold):
    assert score("<answer>B</answer>", gold) == 1.0
    assert score("<answer>C</answer>", gold) == 0.0


@pytest.mark.parametrize("gold", ["dog", "", None, "Z", 3, "12", True, ["B"]])
def test_right_answer_that_is_not_a_letter_is_an_error(gold):
    with pytest.raises(ValueError, match="reference answer"):
        score("<answer>B</answer>", gold)


def test_require_block_and_letters():
    assert score("B", require_block=True) == 0.0
    assert score("\\boxed{B}", require_block=True) == 1.0
    assert score("<answer>J</answer>", "J", letters="HIJ") == 1.0
    with pytest.raises(ValueError, match=r"options\.letters"):
        score("<answer>J</answer>", "J")


def test_article_is_no_letter():
    assert score("<answer>A dog</answer>", "A") == 0.0
    assert score("<answer>It is a dog, A</answer>", "A") == 1.0


@pytest.mark.parametrize(
    "piece", [" ", "\n", "< ", "< /", "<answer>", "A ", "<answer>B</answer>", "\\boxed{", "</think>", "(", "B. "]
)
def test_time_grows_with_the_length_of_the_input(piece):
    assert_no_worse_than_linear(score, lambda count: piece * count)
    assert_no_worse_than_linear(score, lambda count: "<" + piece * count + "x")
    value = score(piece * 50_000)
    assert value in (0.0, 1.0)
    assert piece == "<answer>B</answer>" or value == 0.0
