"""Sentences that have to follow rules: what is held out, each rule's check, and rows with a model's own answers."""

import json

import pytest

from mmrl.errors import UserError
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
    scores = follows_rules(["", ""], [right, wrong], topic=["the sea"] * 2, rules=[[rule]] * 2, values=[[value]] * 2)
    assert scores == [1.0, 0.0]


def test_every_rule_has_a_case_and_none_is_earned_by_saying_nothing():
    assert {case[0] for case in CASES} == set(RULES)
    empty = ["", "a train", "trains are here today\nand another line here", "a a a a", "strained and calm faces"]
    rules, values = [["lowercase", "no_comma"]] * 5, [[None, None]] * 5
    assert follows_rules(empty, empty, topic=["trains"] * 5, rules=rules, values=values) == [0.0] * 5
    half = {"topic": ["an old house"], "rules": [["at_most", "no_comma"]], "values": [[9, None]]}
    assert follows_rules([""], ["Two Houses here, and today."], **half) == [0.5]


def test_topics_and_words_are_held_out(tmp_path):
    train, test = (
        rows_of(build_rules(tmp_path / f"{split}.jsonl", count=800, rules=2, split=split, seed=1))
        for split in ("train", "test")
    )
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


def long_enough(completions, *, least, **_):
    return [float(len(text) >= number) for text, number in zip(completions, least, strict=True)]


def test_rows_are_answered_by_a_model(tmp_path):
    """Greedy ones are transformers' own; sampled ones are those that the reward accepts, of other questions by seed."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = build_tiny_generic(tmp_path / "tiny", corpus=["say one two three four"], hidden=32, layers=1)
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    rows = [{"question": f"say {word}", "least": least} for word in ("one", "two") for least in (0, 10**6)]
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    options = {"questions": {"path": str(tmp_path / "rows.jsonl")}, "model": str(folder), "max_new_tokens": 12}

    def said(row):
        chat = [{"role": "user", "content": row["question"]}]
        ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        return model.generate(**ids, max_new_tokens=12, do_sample=False)[0, ids["input_ids"].shape[1] :]

    # a second way to end a turn, as in models whose generation_config lists several
    ends = model.generation_config.eos_token_id = [tokenizer.eos_token_id, int(said(rows[0])[2])]
    model.generation_config.save_pretrained(folder)
    found = [(row["least"], said(row)) for row in rows]
    expected = [(least, tokenizer.decode(ids, skip_special_tokens=True)) for least, ids in found if ids[-1] in ends]
    assert expected
    answered = rows_of(build_answered(tmp_path / "greedy.jsonl", count=4, **options))
    assert sorted((row["least"], row["completion"]) for row in answered) == sorted(expected)
    accepts = {"name": "long", "function": "tests.vlm.test_rules:long_enough", "isolate": False}
    kept = rows_of(build_answered(tmp_path / "kept.jsonl", count=64, samples=16, accepts=accepts, **options))
    assert 0 < len(kept) <= 32
    assert {row["least"] for row in kept} == {0}
    few = {"count": 64, "samples": 64, **options}
    drawn = [rows_of(build_answered(tmp_path / f"{seed}.jsonl", seed=seed, **few))[0] for seed in range(6)]
    assert {row["prompt"] for row in drawn} == {"say one", "say two"}
    unable = {**accepts, "function": "tests.vlm.test_rules:never"}
    with pytest.raises(UserError, match="none of 64 answers"):
        build_answered(tmp_path / "none.jsonl", count=64, samples=16, accepts=unable, **options)
    with pytest.raises(UserError, match="count is 8 and samples is 16, but there are 4 questions"):
        build_answered(tmp_path / "few.jsonl", count=8, samples=16, **options)


def never(completions, **_):
    return [0.0] * len(completions)
