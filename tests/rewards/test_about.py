"""Rewards in the protocol of an evaluation: their code and options count, the folder of their file does not."""

from mmrl.rewards.reward_config import RewardConfig, about_rewards
from mmrl.rewards.reward_loading import named_digests


def test_code_and_options_of_rewards_count_and_places_do_not(tmp_path):
    files = [tmp_path / folder / "mine.py" for folder in ("a", "b")]
    for file in files:
        file.parent.mkdir()
        file.write_text("def score(completions, low=0): return [low] * len(completions)\n")
    here, there = ([RewardConfig("mine", function=f"{file}:score", options={"path": str(file)})] for file in files)
    assert about_rewards(here) == about_rewards(there)
    other = [RewardConfig("mine", function=f"{files[1]}:score", options={"path": str(files[1]), "low": 1})]
    assert about_rewards(here) != about_rewards(other)
    files[1].write_text("def score(completions, low=0): return [1] * len(completions)\n")
    assert about_rewards(here) != about_rewards(there)
    assert about_rewards([RewardConfig("math")])[0]["function"] == "math"


def test_files_and_code_that_options_name_count(tmp_path):
    judge, facts = tmp_path / "judge.py", tmp_path / "facts.json"
    judge.write_text("def judge(text): return 0\n")
    facts.write_text("{}")
    terms = [RewardConfig("math", options={"judges": [f"{judge}:judge"], "facts": str(facts)})]
    found = about_rewards(terms)
    assert list(found[0]["named"]) == ["judges.0", "facts"]
    judge.write_text("def judge(text): return 1\n")
    assert (after := about_rewards(terms)) != found
    facts.write_text("[]")
    assert about_rewards(terms) != after
    assert "named" not in about_rewards([RewardConfig("math", options={"mode": "strict", "size": 3})])[0]


def test_a_plain_word_is_no_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("fast", "fast.json"):
        (tmp_path / name).write_text("1")
    assert list(named_digests({"mode": "fast", "table": "fast.json", "folder": str(tmp_path)})) == ["table"]
