import re

import pytest

from mmrl.rewards.answers import format_reward
from tests.growth import assert_no_worse_than_linear

GOOD = "<think>two and two</think><answer>4</answer>"
EASYR1_TAGS = re.compile(r"<think>.*?</think>\s*<answer>.*?</answer>", re.DOTALL)
EASYR1_BOXED = re.compile(r"<think>.*</think>.*\\boxed\{.*\}.*", re.DOTALL)


def score(text, **options):
    return format_reward(["q"], [text], **options)[0]


@pytest.mark.parametrize(
    "text",
    [
        GOOD,
        "<think>a</think> \n\t <answer>4</answer>",
        "<think>line\nline</think>\n<answer>\n4\n</answer>",
        "<think>思考 ✓</think><answer>四</answer>",
        "before " + GOOD + " after",
    ],
)
def test_one_block_accepts(text):
    assert score(text) == 1.0


@pytest.mark.parametrize(
    "text",
    [
        "",
        "4",
        "<answer>4</answer>",
        "<think>a</think>",
        "<think>a</think><answer></answer>",
        "<think>a</think><answer>  \n </answer>",
        "<think></think><answer>4</answer>",
        "<answer>4</answer><think>a</think>",
        "<think>a</think> so <answer>4</answer>",
        "<think>a<answer>4</answer></think>",
        "<think>a</think><answer>4</answer><answer>5</answer>",
        "<think>a</think><think>b</think><answer>4</answer>",
        "<think>a</think><answer><answer>4</answer></answer>",
        "<think><think>a</think></think><answer>4</answer>",
        "<think>a</think><answer>4",
        "think a /think answer 4 /answer",
    ],
)
def test_one_block_rejects(text):
    assert score(text) == 0.0
    assert score(text, rule="strict") == 0.0


def test_strict_allows_nothing_around():
    assert score(GOOD, rule="strict") == 1.0
    assert score(f"  {GOOD}\n", rule="strict") == 1.0
    assert score("Sure! " + GOOD, rule="strict") == 0.0
    assert score(GOOD + " Done.", rule="strict") == 0.0


def test_boxed_style():
    good = "<think>a</think>It is \\boxed{\\frac{1}{2}}."
    assert score(good, style="boxed") == 1.0
    assert score(good, style="boxed", rule="strict") == 1.0
    assert score(good + "\\boxed{2}", style="boxed") == 0.0
    assert score("\\boxed{1}<think>a</think>", style="boxed") == 0.0
    assert score("<think>a</think>\\boxed{}", style="boxed") == 0.0
    assert score("<think>a</think>\\boxed{1", style="boxed") == 0.0
    assert score("<think>\\boxed{1}</think>", style="boxed") == 0.0
    assert score(GOOD, style="boxed") == 0.0


@pytest.mark.parametrize("rule", ["one_block", "strict", "fullmatch"])
def test_an_answer_block_or_a_box(rule):
    boxed = "<think>a</think>\\boxed{5}"
    assert score(boxed, rule=rule) == score(GOOD, rule=rule) == 1.0
    assert score(boxed, rule=rule, style="answer_tags") == score(GOOD, rule=rule, style="boxed") == 0.0
    assert score("<think>a</think>\\boxed{5}<answer>5", rule=rule) == 0.0, "a block that is begun is not a box"


def test_a_block_of_white_space_holds_no_thought():
    assert score("<think>\n\n</think><answer>4</answer>") == score("<think> </think>\\boxed{4}") == 0.0


FRAGMENTS = ["<think>", "</think>", "<answer>", "</answer>", " ", "4", "\\boxed{", "}", "\n", "< / think >"]


def test_fullmatch_equals_the_regular_expressions_of_easyr1():
    seen = {"answer_tags": set(), "boxed": set()}
    texts = [f"<think>{a}</think>{b}{c}{d}" for a in FRAGMENTS for b in FRAGMENTS for c in FRAGMENTS for d in FRAGMENTS]
    texts += [f"<think>{a}</think><answer>{b}</answer>{c}" for a in FRAGMENTS for b in FRAGMENTS for c in FRAGMENTS]
    texts += [
        f"{a}<think>{b}</think>{c}\\boxed{{4{d}" for a in FRAGMENTS for b in FRAGMENTS for c in "} " for d in "} "
    ]
    for text in texts:
        tight = re.sub(r"\s*(<|>|/)\s*", r"\1", text)
        wanted = {"answer_tags": EASYR1_TAGS.fullmatch(text), "boxed": EASYR1_BOXED.fullmatch(tight)}
        for style, match in wanted.items():
            assert score(text, style=style, rule="fullmatch") == float(match is not None), (style, text)
            seen[style].add(match is not None)
    assert seen == {"answer_tags": {True, False}, "boxed": {True, False}}


@pytest.mark.parametrize("style", ["either", "answer_tags", "boxed"])
@pytest.mark.parametrize("rule", ["one_block", "strict", "fullmatch"])
@pytest.mark.parametrize(
    "piece", [" ", "\n", "< ", "< /", "<think>", "</think>\\boxed{", "<think></think><answer>", "x", " <", "{"]
)
def test_time_grows_with_the_length_of_the_input(style, rule, piece):
    for text in (lambda count: "<think>" + piece * count, lambda count: piece * count + "x"):
        assert_no_worse_than_linear(lambda given: score(given, style=style, rule=rule), text)


def test_chat_completions_and_unknown_options():
    turns = [{"role": "assistant", "content": GOOD}]
    assert format_reward(["q", "q"], [turns, "no"]) == [1.0, 0.0]
    with pytest.raises(ValueError, match="answer_tags, boxed"):
        score(GOOD, style="xml")
    with pytest.raises(ValueError, match="one_block, strict, fullmatch"):
        score(GOOD, rule="loose")
