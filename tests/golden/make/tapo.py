"""TAPO by its public code: GRPO of its fork of verl with the constants of its scripts, and the reward of texts."""

import random
import re
from collections import defaultdict
from typing import Any

import Levenshtein

from tests.golden.make.forks import CORE, COUNT_EPS, fork_loss, fork_names, token_rewards
from tests.golden.make.peers import Clone, Made, package, tensors
from tests.golden.make.tokens import batch, far

NAME, REWARD = "compute_grpo_outcome_advantage", "verl/utils/reward_score/tool_dapo.py"
FOUND = "<search>capital of Peru</search>\n\n<response>Lima</response>\n\n"
TEXTS: list[list[Any]] = [
    ["<think>It is Lima.</think><answer>Lima</answer>", "Lima", "nq"],
    [f"<think>I search.</think>{FOUND}<answer> the city of Lima </answer>", ["Cusco", "lima"], "nq"],
    [f"{FOUND}<answer>Limas</answer>", "Lima", "nq"],
    [f"{FOUND}<answer>Quito</answer>", "Lima", "nq"],
    [f"{FOUND}<answer>limo</answer>", "Lima", "nq"],
    [f"{FOUND}<answer>Lima</answer> I think.", "Lima", "nq"],
    [f"well {FOUND} so <answer>Lima</answer>", "Lima", "default"],
    ["<think>no answer</think>", "Lima", "default"],
    ["<tool>x</tool><answer>Lima</answer>", "Lima", "default"],
    ["<answer>Lima</answer><think>done</think>", "Lima", "default"],
    ["<answer>Cusco</answer><answer>Lima</answer>", "Lima", "default"],
    ["<answer>1,234</answer>", "1234", "gsm8k"],
    ["<answer>Seven</answer>", "7", "aime2024"],
    ["<answer>8</answer>", "7", "dapo_math"],
    ["<code>print(2/3)</code><response>0.6667</response><answer>0.6667</answer>", "0.66666", "calculator"],
    ["<answer>0.67</answer>", "0.66666", "calculator"],
    ["<answer>about 0.67</answer>", "0.66666", "calculator"],
    ["<answer>8104.4 people/km2</answer>", "8000", "complex"],
    ["<answer>about 104 people</answer>", "100", "complex"],
    ["<answer>106</answer>", "100", "complex"],
    [f"<answer>{'x' * 120}Lima</answer>", f"{'y' * 96}Lima", "nq"],
]
"""Whole texts, right answers and sources."""


def make(path: str) -> Made:
    clone = Clone(path, "Goer17/TAPO", "81cfe3980d9545df7a8fce1e1fae6007bd694fb3")
    inputs = batch() | {"texts": [dict(zip(("text", "truth", "source"), row, strict=True)) for row in TEXTS]}
    estimate = clone.function(CORE, NAME, defaultdict=defaultdict, **fork_names(clone))
    answers = []
    for given in (inputs, inputs | far(inputs)):
        b = tensors({key: value for key, value in given.items() if key != "texts"})
        advantage = estimate(token_rewards(given), b.mask, b.group.numpy())[0]
        answers.append({"advantage": advantage} | fork_loss(clone, given, advantage, "token-mean", 0.2, 0.28, 10.0))
    names: dict[str, Any] = {"re": re, "random": random, "Levenshtein": Levenshtein}
    for name in ("normalize_answer", "_check_score", "_get_score", "check_format", "compute_score"):
        names[name] = clone.function(REWARD, name, **names)
    scores = [names["compute_score"](text, truth, data_source=source)["score"] for text, truth, source in TEXTS]
    calls = [f"{CORE}:{NAME}", f"{CORE}:compute_policy_loss", f"{REWARD}:compute_score"]
    peer = {"program": clone.name, "calls": calls, "with": package("Levenshtein")} | COUNT_EPS
    peers = [peer | answers[0] | {"scores": scores}, {"inputs": far(inputs)} | peer | answers[1]]
    return "TAPO, arXiv 2510.07038", inputs, peers, clone
