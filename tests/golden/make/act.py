"""ACT's temporal ensemble by its public code."""

import torch

from tests.golden.make.peers import Clone, Made, doubles, numbers, tensors

COMMIT = "742c753c0d4a5d87076c8f69e5628c79a8cc5488"
CHUNK, SIZE, STEPS = 4, 3, 9


def make(path: str) -> Made:
    clone = Clone(path, "tonyzhaozh/act", COMMIT)
    inputs = {"chunks": numbers(0, STEPS, CHUNK, SIZE, low=0.1, high=2.0)}
    chunks = tensors(inputs).chunks
    table, found = torch.zeros(STEPS, STEPS + CHUNK, SIZE, dtype=torch.float64), []
    for t in range(STEPS):
        names = {"all_time_actions": table, "t": t, "num_queries": CHUNK, "all_actions": chunks[t]}
        with doubles():
            found.append(clone.lines("imitate_episodes.py", 251, 259, **names).raw_action[0].tolist())
    peer = {"program": clone.name, "calls": ["imitate_episodes.py:251-259"], "relative": 1e-12, "actions": found}
    return "ACT, arXiv 2304.13705", inputs, [peer], clone
