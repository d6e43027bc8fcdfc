"""Rewards of critiques by Critique-RL's own code."""

import itertools

from tests.golden.make.peers import Clone, Made

FILE = "RL/Critique-RL/reward/reward_func.py"
LINES = {
    "right": "Correctness of the final answer: Correct",
    "wrong": "Correctness of the final answer: Wrong",
    "": "?",
}
MODES = ("refine", "correct", "delta")


class Base:
    def __init__(self, template):
        self.template = template


def make(path: str) -> Made:
    clone = Clone(path, "WooooDyy/Critique-RL", "06283864a725c41f964eaccf2f170b09f9e4d21b")
    cases = list(itertools.product((1.0, 0.0), LINES, (1.0, 0.0)))
    before, critiques = [case[0] for case in cases], [LINES[case[1]] for case in cases]
    names = {"RewardFunc": Base, "BaseChatTemplate": object}
    verdict = clone.function(FILE, "DiscriminationRewardFunc", **names)
    refine = clone.function(FILE, "RefineRewardFunc", **names)

    def verdicts(score):
        raw = {"correctness-origin": before, "dataset_type": ["math"] * len(cases)}
        return verdict(None, discimination_correct_score=score).get_reward(["math"], critiques, raw)["scores"]

    numbers = {"first": verdicts(1.0)}
    source = (clone.path / FILE).read_text().splitlines()
    line = next(n for n, text in enumerate(source, 1) if "scores = [s + d if d" in text)
    for mode in MODES:
        gains = [refine.reward_score_func(None, case[0], case[2], rf_mode=f"r_{mode}") for case in cases]
        given = {"scores": gains, "discrimination_reward": {"scores": verdicts(0.2)}}
        numbers[mode] = clone.lines(FILE, line, line, **given).scores
    inputs = {"before": before, "after": [case[2] for case in cases], "critiques": critiques}
    calls = [f"{FILE}:DiscriminationRewardFunc.get_reward", f"{FILE}:RefineRewardFunc.reward_score_func"]
    peer = {"program": clone.name, "calls": calls, "relative": 1e-12} | numbers
    return "Critique-RL, arXiv 2510.24320", inputs, [peer], clone
