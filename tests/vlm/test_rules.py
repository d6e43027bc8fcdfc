"""Sentences that have to follow rules: what is held out, each rule's check, and rows with a model's own answers."""

import json

import pytest

from mmrl.vlm.toy.answered import build_answered
from mmrl.vlm.toy.rules import RULES, TOPICS, WORDS, build_rules, follows_rules
from mmrl.vlm.toy.tiny_generic import build_tiny_generic

# rule, value, an answer that follows it and one that does not
CASES = [
    ("lowercase", None, "the sea is green today.", "The sea is green today."),
    ("capitals", None, "THE SEA IS GREEN!", "THE SEA is GREEN!"),
    ("no_comma", None, "The sea is green today.", "The sea, today, is green."),
    ("at_most", 6, "The sea is a quiet place.", "The sea is a very quiet place."),
    ("at_least", 6, "It's a well-known and old sea.", "It's a well-known, old sea."),
    ("contains", "green", "So Green, the sea is.", "The evergreen sea is calm."),
    ("first_word", "never", '"Never go to the sea."', "Nevermore go to the sea."),
    ("last_word", "water", "The sea is made of water.", "The sea is water indeed."),
    ("quoted", None, '"The sea is green today."', '"The sea" is "green today."'),
    ("question", None, "Is the sea green today?", "The sea is green today."),
]


def rows_of(file):
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.mark.parametrize(("rule", "value", "right", "wrong"), CASES, ids=lambda case: str(case)[:12])
def test_each_rule_is_checked(rule, value, right, wrong):
    scores = follows_rules(["", ""], [right, wrong], rules=[[rule]] * 2, values=[[value]] * 2)
    assert scores == [1.0, 0.0]


def test_every_rule_has_a_case_and_none_is_earned_by_saying_nothing():
    assert {case[0] for case in CASES} == set(RULES)
    empty = ["", "a b", "one line here today\nand another line here"]
    rules, values = [["lowercase", "no_comma"]] * 3, [[None, None]] * 3
    assert follows_rules(empty, empty, rules=rules, values=values) == [0.0, 0.0, 0.0]
    half = {"rules": [["at_most", "no_comma"]], "values": [[9, None]]}
    assert follows_rules([""], ["One line here, and today."], **half) == [0.5]


def test_topics_words_and_pairs_of_rules_are_held_out(tmp_path):
    train, test = (
        rows_of(build_rules(tmp_path / f"{split}.jsonl", count=800, rules=2, split=split, seed=1))
        for split in ("train", "test")
    )
    assert not {row["kind"] for row in train} & {row["kind"] for row in test}
    said = [" ".join(row["question"] for row in rows) for rows in (train, test)]
    for values in (TOPICS.split(", "), [f'"{word}"' for word in WORDS.split()]):
        uses = [{value for value in values if value in text} for text in said]
        assert uses[0] | uses[1] == set(values)
        assert not uses[0] & uses[1]
    assert {name for row in test for name in row["rules"]} == set(RULES)
    assert rows_of(build_rules(tmp_path / "again.jsonl", count=800, rules=2, split="test", seed=1)) == test
    with pytest.raises(ValueError, match="must be train or test"):
        build_rules(tmp_path / "a.jsonl", split="all")
    with pytest.raises(ValueError, match="must be 1 or 2"):
        build_rules(tmp_path / "a.jsonl", rules=3)
    alone = rows_of(build_rules(tmp_path / "one.jsonl", count=200, seed=1))
    assert {row["kind"] for row in alone} == set(RULES)


def long_enough(prompts, completions, *, least, **_):
    return [float(len(text) >= number) for text, number in zip(completions, least, strict=True)]


def test_rows_are_answered_by_a_model(tmp_path):
    """Greedy ones are transformers' own; sampled ones are those that the function accepts."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = build_tiny_generic(tmp_path / "tiny", corpus=["say one two three four"], hidden=32, layers=1)
    rows = [{"question": f"say {word}", "least": least} for word in ("one", "two") for least in (0, 10**6)]
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    options = {"rows": str(tmp_path / "rows.jsonl"), "model": str(folder), "max_new_tokens": 12}
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    expected = []
    for row in rows:
        chat = [{"role": "user", "content": row["question"]}]
        ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        said = model.generate(**ids, max_new_tokens=12, do_sample=False)[0, ids["input_ids"].shape[1] :]
        if tokenizer.eos_token_id in said.tolist():
            expected.append({**row, "completion": tokenizer.decode(said, skip_special_tokens=True)})
    if expected:
        assert rows_of(build_answered(tmp_path / "greedy.jsonl", **options)) == expected
    accepts = "tests.vlm.test_rules:long_enough"
    kept = rows_of(build_answered(tmp_path / "kept.jsonl", count=64, samples=16, accepts=accepts, **options))
    assert 0 < len(kept) <= 32
    assert {row["least"] for row in kept} == {0}
    one = tmp_path / "one.jsonl"
    one.write_text(json.dumps(rows[1]) + "\n")
    with pytest.raises(ValueError, match="accepts none of the 16 answers"):
        build_answered(tmp_path / "none.jsonl", count=16, samples=16, accepts=accepts, **options | {"rows": str(one)})
