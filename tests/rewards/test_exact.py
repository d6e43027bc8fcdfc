import pytest

from mmrl.rewards.answers import (
    MAX_ANSWER_CHARS,
    answer_blocks,
    boxes,
    exact_reward,
    final_answer,
    final_part,
    overlong_penalty,
)


def score(text, gold="red car", prompt="What is it?", **options):
    return exact_reward([prompt], [text], answer=[gold], **options)[0]


@pytest.mark.parametrize("text", ["red car", "Red  Car.", " RED\ncar ", '"red car"', "**red car**", "ｒｅｄ car"])
def test_equal_after_normalisation(text):
    assert score(f"<answer>{text}</answer>") == 1.0
    assert score(f"\\boxed{{{text}}}") == 1.0


@pytest.mark.parametrize(
    "text",
    [
        "",
        "red car",
        "<answer>car</answer>",
        "<answer>a red car or a blue car</answer>",
        "<answer>red car</answer><answer>blue car</answer>",
        "<answer><answer>red car</answer></answer>",
        "<answer>red car",
        "<think><answer>red car</answer></think><answer>bus</answer>",
        "<answer></answer>",
        "<answer>red car, blue car, bus</answer>",
        "What is it?",
    ],
)
def test_not_equal(text):
    assert score(text) == 0.0


def test_without_block_when_allowed():
    assert score("<think>a bus?</think> Red car.", require_block=False) == 1.0
    assert score("It is a red car.", require_block=False) == 0.0
    assert score("<answer>bus</answer> red car", require_block=False) == 0.0


def test_repeated_question_earns_nothing():
    question = "Answer like this: <answer>red car</answer>"
    assert score(question, prompt=question) == 0.0


def test_several_right_answers_and_unicode():
    assert score("<answer>auto</answer>", ["car", "auto"]) == 1.0
    assert score("<answer>猫 🐈</answer>", "猫 🐈") == 1.0
    assert score("<answer>7</answer>", 7) == 1.0


@pytest.mark.parametrize("gold", ["", None, "...", [], [""]])
def test_empty_right_answer_is_an_error(gold):
    with pytest.raises(ValueError, match="reference answer"):
        score("<answer></answer>", gold)


def test_final_part_and_blocks():
    assert final_part("<think>a</think>b<think>c</think>d") == "d"
    assert final_part("no tags") == "no tags"
    assert final_part("b</think>c") == "c"
    assert final_part("<think>a") is None
    assert answer_blocks("<answer>1</answer> < answer >2</ answer>") == ["1", "2"]
    assert answer_blocks("<answer>1<answer>2</answer></answer>") is None
    assert answer_blocks("1</answer>") is None
    assert boxes("\\boxed{a{b}\\}c} \\boxed{\\boxed{d}} \\boxed{e") == ["a{b}\\}c", "\\boxed{d}"]


def test_several_answers_can_mean_the_last():
    text = "\\boxed{1} or \\boxed{2}"
    assert final_answer(text) is None
    assert final_answer(text, several="last") == "2"


def test_an_essay_is_not_an_answer():
    assert final_answer(f"<answer>{'a' * MAX_ANSWER_CHARS}</answer>") is not None
    assert final_answer(f"<answer>{'a' * (MAX_ANSWER_CHARS + 1)}</answer>") is None


def test_overlong_follows_equation_13_of_dapo():
    lengths = [0, 15, 16, 17, 18, 20, 25]
    values = overlong_penalty([""] * 7, [""] * 7, completion_lengths=lengths, max_tokens=20, buffer_tokens=4)
    assert values == [0.0, 0.0, 0.0, -0.25, -0.5, -1.0, -1.0]


def test_overlong_checks_its_options():
    for buffer_tokens in (0, 21):
        with pytest.raises(ValueError, match="buffer_tokens"):
            overlong_penalty([""], [""], completion_lengths=[3], max_tokens=20, buffer_tokens=buffer_tokens)
