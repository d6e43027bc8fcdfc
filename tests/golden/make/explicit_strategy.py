"""EPO's scores of turns by its own preprocessing."""

import torch

from tests.golden.make.gigpo import turns_of
from tests.golden.make.peers import Clone, Made, numbers
from tests.golden.make.tokens import batch

FILE = "LLaMA-Factory/data_new/utils/preprocessing.py"


def make(path: str) -> Made:
    clone = Clone(path, "lxqpku/EPO", "e363c7619dd259f3717913fca288d2f39f6511d3")
    inputs = batch()
    turns, earned = turns_of(inputs["mask"]), numbers(9, 12, 3)
    inputs["turn"] = [[-1] * 6 for _ in range(12)]
    received = [[0.0] * 6 for _ in range(12)]
    for row, turn, trained in turns:
        received[row][trained[-1]] = earned[row][turn]
        for place in trained:
            inputs["turn"][row][place] = turn
    inputs["extras"] = {"decision_reward": received}
    advantage = torch.zeros(12, 6, dtype=torch.float64)
    for row in range(12):
        own = [(turn, trained) for number, turn, trained in turns if number == row]
        scores = clone.function(FILE, "compute_discounted_scores")([earned[row][turn] for turn, _ in own], 0.99)
        scores = clone.function(FILE, "max_abs_normalize")(scores)
        for score, (_, trained) in zip(scores, own, strict=True):
            advantage[row, trained] = score
    calls = [f"{FILE}:compute_discounted_scores", f"{FILE}:max_abs_normalize"]
    peer = {"program": clone.name, "calls": calls, "relative": 1e-12, "advantage": advantage}
    return "EPO, arXiv 2502.12486", inputs, [peer], clone
