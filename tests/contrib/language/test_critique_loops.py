"""Data of AutoMathCritique's loop and of SPC's game, by models that say what is wanted."""

import json
from types import SimpleNamespace

import pytest

from mmrl.contrib.language import critique_loops
from mmrl.contrib.language.critique_loops import build_game, build_refinements
from mmrl.errors import UserError
from mmrl.runs.records import read_jsonl
from mmrl.vlm.data.dataset import DataConfig, load_tasks
from mmrl.vlm.toy.critic_digits import CRITIQUE, REVISION, SNEAKY, build_readings

LOOSE = {"options": {"require_block": False}}


@pytest.fixture
def readings(tmp_path):
    path = build_readings(tmp_path / "right.jsonl", count=3, digits=3, boxed=False)
    return {"path": str(path)}, [json.loads(line)["answer"] for line in path.open()]


@pytest.fixture
def said(monkeypatch):
    """What models say, a function of purpose, question and number of the sample."""
    talk = SimpleNamespace(say=None)

    def write(policy, tasks, count, config, seed, purpose):
        def text(task):
            return "".join(item.get("text", "") for turn in task.messages for item in turn["content"])

        return [[talk.say(purpose, text(task), number) for number in range(count)] for task in tasks]

    monkeypatch.setattr(critique_loops, "write_texts", write)
    monkeypatch.setattr(critique_loops, "load_policy", lambda config: config.path)
    return talk


def test_refinements_keep_what_turned_out_well(readings, said, tmp_path):
    questions, right = readings
    lookup = iter(right)
    gold = {}

    def say(purpose, asked, number):
        if purpose == "answers":
            if number == 0:
                gold["now"] = next(lookup)
            return gold["now"] if number == 0 else "0 0 0"
        if purpose == "critiques":
            return ["none", "number 1"][number]
        return right[0]  # so the first wrong answer alone is mended

    said.say = say
    path = build_refinements(
        tmp_path / "sft.jsonl",
        questions=questions,
        model="m",
        critique_template=CRITIQUE,
        revision_template=REVISION,
        **LOOSE,
    )
    found = [(row["kind"], row["completion"]) for row in read_jsonl(path)]
    assert found == [
        *[("answer", text) for text in right],
        *[("criticise", "none")] * 3,
        ("criticise", "number 1"),
        ("revise", right[0]),
    ]
    revised = read_jsonl(path)[-1]
    assert [turn["role"] for turn in revised["prompt"]] == ["user", "assistant", "user"]
    assert "Answer: 0 0 0 Which" in str(read_jsonl(path)[-2]["prompt"])
    assert len(load_tasks(DataConfig(path=str(path))).tasks) == 8
    said.say = lambda *_: "0 0 0"
    with pytest.raises(UserError, match="none of 3 answers led to a correct result"):
        build_refinements(tmp_path / "none.jsonl", questions=questions, model="m", critique_template=CRITIQUE, **LOOSE)


def test_the_game_makes_pairs_for_both_players(readings, said, tmp_path):
    questions, right = readings

    def say(purpose, asked, number):
        if purpose == "sneaky":
            return [f"0 {asked.split('Answer: ')[1][2:5]}", "9 9 9", asked.split("Answer: ")[1][:5], "?"][number]
        if "9 9 9" in asked:
            return "none" if number < 3 else "number 1"  # it is often missed
        return ["none", "number 1", "number 1", "number 2"][number]

    said.say = say
    game = {
        "questions": questions,
        "sneaky": "s",
        "critic": "c",
        "sneaky_template": SNEAKY,
        "critique_template": CRITIQUE,
    }
    critic = read_jsonl(build_game(tmp_path / "critic.jsonl", role="critic", **game, **LOOSE))
    for row in critic:
        honest = any(f"Answer: {text} Which" in row["prompt"] for text in right)
        assert (row["chosen"], row["rejected"]) == (("none", "number 1") if honest else ("number 1", "none"))
    assert len(critic) >= 6
    sneaky = read_jsonl(build_game(tmp_path / "sneaky.jsonl", role="sneaky", **game, **LOOSE))
    assert [(row["chosen"], row["score_chosen"]) for row in sneaky] == [("9 9 9", 0.75)] * 3
    assert {row["score_rejected"] for row in sneaky} == {-1.0}, "what is no error, or no answer"
    with pytest.raises(UserError, match="role is 'judge'; allowed: critic, sneaky"):
        build_game(tmp_path / "x.jsonl", role="judge", **game)
    said.say = lambda purpose, asked, number: "9 9 9" if purpose == "sneaky" else "none"
    with pytest.raises(UserError, match="have the same outcome"):
        build_game(tmp_path / "y.jsonl", role="sneaky", **game, **LOOSE)
