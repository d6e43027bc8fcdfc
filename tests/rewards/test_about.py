"""Rewards in the protocol of an evaluation: their code and options count, the folder of their file does not."""

from mmrl.rewards.reward_config import RewardConfig, about_rewards


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
