"""Given answers and what follows them, with the chat templates of released models."""

import json
import logging

import pytest

from mmrl.errors import UserError
from mmrl.rewards.answers import completion_text, exact_reward, final_part, format_reward
from mmrl.rewards.reward_config import RewardConfig, readers_of
from mmrl.vlm.data.turn_template import TemplateError, TurnTemplate
from mmrl.vlm.model.processor import TextProcessor
from tests.vlm.chat_templates import NAMES, TEMPLATES, rendered, tokenizer_of, turns_of

ASKED = {"role": "user", "content": "Q?"}
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer", "description": "x"}}, "required": []},
    },
}
OPENS_THOUGHT = ("deepseek_r1_distill", "nemotron_3_nano")
"""Their prompts end with <think>, which they leave out when they render the answer."""


def user(text):
    return {"role": "user", "content": [{"type": "text", "text": text}]}


def result(text):
    return {"role": "tool", "content": [{"type": "text", "text": text}]}


def written(turns, prompt, text, **options):
    return turns.tokenizer.decode(turns.encode_answer(prompt, text, **options))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("text", ["42", "two\n\nlines, and é", "<answer>7</answer>"])
def test_a_given_answer_is_the_templates_own_rendering(name, text):
    turns = turns_of(name)
    prompt = rendered(name, [ASKED], asks=True)
    whole = rendered(name, [ASKED, {"role": "assistant", "content": text}])
    found = prompt + written(turns, prompt, text)
    if name in OPENS_THOUGHT:
        assert found == f"{prompt}\n</think>\n\n{text}{turns.parts.close}"
    elif name == "glm4moe":  # its own rendering has no end; the next role's mark is where its checkpoints stop
        assert found == f"{whole}<|user|>"
    else:
        assert whole.startswith(found)
        assert whole.removeprefix(found) in ("", "\n", "\n<|endoftext|>"), "all but what follows the end"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("llama3_1", "42<|eot_id|>"),
        ("gemma3", "42<end_of_turn>"),
        ("gemma4", "42<turn|>"),
        ("gptoss", "<|channel|>final<|message|>42<|return|>"),
        ("qwen3", "<think>\n\n</think>\n\n42<|im_end|>"),
        ("qwen3_5_think", "\n</think>\n\n42<|im_end|>"),
        ("glm4moe", "\n<think></think>\n42<|user|>"),
        ("phi3_5", "42<|end|>"),
        ("cohere2", "42<|END_RESPONSE|><|END_OF_TURN_TOKEN|>"),
        ("smolvlm", " 42<end_of_utterance>"),
    ],
)
def test_heads_and_ends_of_families(name, expected):
    turns = turns_of(name)
    assert written(turns, turns.parts.asked, "42") == expected
    end = turns.tokenizer.convert_ids_to_tokens(turns.end_ids([0]))[0]
    assert end == expected[expected.rindex("<") :]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("qwen3", "<think>\nTH\n</think>\n\n42<|im_end|>"),
        ("qwen3_5_think", "TH\n</think>\n\n42<|im_end|>"),
        ("qwen3_8", "TH\n</think>\n\n42<|im_end|>"),
        ("gptoss", "<|channel|>analysis<|message|>TH<|end|><|start|>assistant<|channel|>final<|message|>42<|return|>"),
        ("gemma4_v5", "<|channel>thought\nTH\n<channel|>42<turn|>"),
        ("muse_glimmer", " to=self<|message|>TH<|eom|><|start|>assistant to=user<|message|>42<|eot|>"),
        ("glm4moe", "\n<think>TH</think>\n42<|user|>"),
        ("deepseek_r1_distill", "TH\n</think>\n\n42<｜end▁of▁sentence｜>"),
        ("llama3_1", "<think>\nTH\n</think>\n\n42<|eot_id|>"),
    ],
)
def test_thoughts_get_the_templates_own_marks(name, expected):
    turns = turns_of(name)
    answer = "<think>\nTH\n</think>\n\n42"
    ids = turns.encode_answer(turns.parts.asked, answer)
    assert turns.tokenizer.decode(ids) == expected
    (text,) = turns.decode([ids])
    start = "<think>\n" if turns.parts.begin.endswith("<think>\n") else ""
    assert final_part(start + text).strip() == "42"
    assert exact_reward(["Q?"], [start + text], answer=["42"], require_block=False) == [1.0]
    assert format_reward(["Q?"], [start + text + r"\boxed{42}"], style="boxed") == [1.0]


def test_marks_that_are_special_tokens_are_sampled_taught_and_read(caplog):
    turns = turns_of("gptoss")
    assert turns.kept_tokens == ("<|start|>", "<|end|>", "<|message|>", "<|channel|>")
    native = "<|channel|>analysis<|message|>so<|end|><|start|>assistant<|channel|>final<|message|>42"
    ids = turns.encode_answer(turns.parts.asked, native)
    tokens = turns.tokenizer.convert_ids_to_tokens(ids)
    assert tokens.count("<|channel|>") == 2
    assert turns.tokenizer.decode(ids) == f"{native}<|return|>", "no second head before the given one"
    assert turns.decode([ids]) == [native]
    assert completion_text(native) == "<think>so</think>42"
    assert final_part("<|channel|>analysis<|message|>and then") is None
    assert not caplog.records
    with caplog.at_level(logging.WARNING, "mmrl"):
        forged = turns.tokenizer.convert_ids_to_tokens(turns.encode_answer(turns.parts.asked, "x<|call|>y"))
        turns.encode_answer(turns.parts.asked, "z<|call|>")
    assert forged.count("<|call|>") == 0, "an end of the turn in data stays characters"
    (record,) = caplog.records
    assert "contains the special token <|call|>" in record.getMessage()
    assert "model.answer_tokens" in record.getMessage()


def test_a_run_declares_the_tokens_of_its_answers():
    tokenizer = tokenizer_of("llama3_1")
    tokenizer.add_special_tokens({"extra_special_tokens": ["<think>", "</think>", "<|mark|>"]})
    stops = tokenizer.convert_tokens_to_ids(["<|eot_id|>"])
    text = "<think>a</think><|mark|>3"
    for declared, kept in ((None, "<think>a</think>3"), (["<|mark|>"], "a<|mark|>3"), ([], "a3")):
        turns = TurnTemplate(TextProcessor(tokenizer), {}, stops, "it", declared)
        sampled = tokenizer.encode(f"{text}<|eot_id|>", add_special_tokens=False)
        assert turns.decode([sampled]) == [kept]
        learned = turns.encode_answer(turns.parts.asked, text)
        assert tokenizer.decode(learned) == f"{text}<|eot_id|>"
        for token in ("<think>", "<|mark|>"):
            assert (tokenizer.convert_tokens_to_ids(token) in learned) is (token in kept)
    with pytest.raises(
        UserError, match=r"answer_tokens contains <\|no\|>, which are not special tokens of the tokenizer of it"
    ):
        _ = TurnTemplate(TextProcessor(tokenizer), {}, stops, "it", ["<|no|>"]).kept_tokens


def test_a_reader_of_a_token_that_never_arrives_is_told(tmp_path, caplog):
    (tmp_path / "mine.py").write_text(
        "import re\n\ndef ends(prompts, completions, **_):\n"
        "    return [float(bool(re.search(r'<\\|eot_id\\|>$', text))) for text in completions]\n\n"
        "def thinks(prompts, completions, **_):\n    return [float('</think>' in text) for text in completions]\n"
    )
    tokenizer = tokenizer_of("llama3_1")
    tokenizer.add_special_tokens({"extra_special_tokens": ["<think>", "</think>"]})
    stops, mine = tokenizer.convert_tokens_to_ids(["<|eot_id|>"]), f"{tmp_path}/mine.py"
    rewards = [RewardConfig("format"), RewardConfig("ends", f"{mine}:ends"), RewardConfig("thinks", f"{mine}:thinks")]
    always = [("reward ends", "<|eot_id|>"), ("sampler.stop", "<|eot_id|>")]
    undeclared = [("reward format", "</think>"), ("reward format", "<think>"), ("reward thinks", "</think>")]
    for declared, told in ((None, always), ([], always + undeclared)):
        caplog.clear()
        turns = TurnTemplate(TextProcessor(tokenizer), {}, stops, "it", declared)
        for _ in range(2):
            turns.check_readers(readers_of(rewards, ["<|eot_id|>"]))
        assert sorted(record.args[:2] for record in caplog.records) == sorted(told)
        assert all("add it to model.answer_tokens" in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize("case", json.loads((TEMPLATES / "tails.json").read_text(encoding="utf-8")), ids=str)
def test_results_follow_as_the_template_writes_them(case):
    turns = turns_of(case["template"])
    end = turns.tokenizer.convert_tokens_to_ids(case["last_sampled"])
    results = [result(text) for text in case["results"]]
    assert turns.follow(results, end=end, tools=[TOOL], calls=["add"] * len(results)) == case["tail"]


@pytest.mark.parametrize("name", ["phi3_5", "cohere2"])
def test_a_template_that_loses_results_is_refused(name):
    with pytest.raises(UserError, match=f"the chat template of {name} drops tool results"):
        turns_of(name).follow([result("333")], end=None, tools=[TOOL], calls=["add"])
    with pytest.raises(TemplateError, match="alternate"):
        turns_of("gemma3").follow([result("333")], end=None, tools=[TOOL], calls=["add"])


@pytest.mark.parametrize("name", NAMES)
def test_a_further_question_follows_as_the_template_writes_it(name):
    """Behind a whole answer, and behind one that was cut, which gets the template's closing."""
    turns = turns_of(name)
    further = {"role": "user", "content": "And 3?"}
    whole = rendered(name, [ASKED, {"role": "assistant", "content": "ANS"}, further], asks=True).partition("ANS")[2]
    assert turns.follow([user("And 3?")], end=None) == whole
    end = turns.end_ids([])[0]
    token = turns.tokenizer.convert_ids_to_tokens(end)
    behind = turns.follow([user("And 3?")], end=end)
    assert whole.endswith(behind)
    assert whole.removesuffix(behind) == ("<|end|>" if name == "gptoss" else turns.parts.close)
    assert not behind.startswith(token), "no end twice"


def test_a_thought_behind_a_closed_one_is_said(caplog):
    turns = turns_of("qwen3", enable_thinking=False)
    assert turns.parts.asked.endswith("<think>\n\n</think>\n\n")
    assert written(turns, turns.parts.asked, "42") == "42<|im_end|>"
    with caplog.at_level(logging.WARNING, "mmrl"):
        for _ in range(2):
            turns.encode_answer(turns.parts.asked, "<think>a</think>42")
    (record,) = caplog.records
    assert "has already closed the thought in the prompt; set model.thinking=true" in record.getMessage()


def test_a_template_without_the_assistants_turn_is_refused():
    tokenizer = tokenizer_of("qwen3")
    tokenizer.chat_template = "{{ messages[0].content }}"
    turns = TurnTemplate(TextProcessor(tokenizer), {}, [tokenizer.eos_token_id], "it")
    assert turns.end_ids([5]) == (5,)
    with pytest.raises(UserError, match="the chat template of it cannot write a given answer: it does not show"):
        turns.encode_answer("Q", "42")
    with pytest.raises(UserError, match="shows the assistant's turn 0 times"):
        turns.follow([user("x")], end=None)


def test_the_start_of_an_answer_has_the_head_and_no_end():
    for name, expected in (("gptoss", "<|channel|>final<|message|>[["), ("llama3_1", "[["), ("smolvlm", " [[")):
        turns = turns_of(name)
        assert written(turns, turns.parts.asked, "[[", ends=False) == expected
    turns = turns_of("gptoss")
    assert turns.tokenizer.decode(turns.encode_past("42")) == "<|channel|>final<|message|>42"
    assert turns_of("qwen3").parts.past_head == "", "earlier answers have no empty thought"


def test_an_answer_that_a_prompt_has_begun_goes_on():
    turns = turns_of("gptoss")
    begun = turns.parts.asked + "<|channel|>final<|message|>4"
    assert written(turns, begun, "2") == "2<|return|>"
