"""HBPO by its public code: lines of its estimator, and the policy loss of its fork of verl with its own constants."""

from collections import defaultdict

import torch

from tests.golden.make.forks import CORE, fork_loss, token_rewards
from tests.golden.make.peers import Clone, Made, tensors
from tests.golden.make.tokens import batch, far

PI = {"relative": 1e-5, "because": "it writes pi as 3.1416"}


def make(path: str) -> Made:
    clone = Clone(path, "ZJU-REAL/HBPO", "5c8991d66483202d8c30b6f76e2aff7a7d561351")
    inputs = batch() | {"extras": {"budget": [512, 2048] * 4 + [1024, 1024, 2560, 2560]}}
    peers = []
    # the last line adds the term of the budget once more
    # rewards so near that the number added to their deviation shows
    other = far(inputs) | {"extras": {"budget": [512, 6144] * 4 + [1024, 1024, 7168, 7168]}}
    other |= {"reward": [round(0.5 + 1e-4 * x, 6) for x in inputs["reward"]]}
    for last, changes, own in ((192, {}, {}), (193, {"advantage": {"weight": 2.0}}, {}), (192, {}, other)):
        given = inputs | own
        found = clone.lines(
            CORE,
            127,
            last,
            defaultdict=defaultdict,
            token_level_rewards=token_rewards(given),
            budget=torch.tensor(given["extras"]["budget"])[:, None],
            index=inputs["group"],
            epsilon=1e-6,
        )
        advantage = found.scores[:, None] * tensors(given).mask
        loss = fork_loss(clone, given, advantage, "token-mean", 0.2, 0.28, 3.0)
        calls = [f"{CORE}:127-{last}", f"{CORE}:compute_policy_loss"]
        peer = {"program": clone.name, "calls": calls, **PI, "changes": changes, "advantage": advantage} | loss
        peers.append(({"inputs": own} if own else {}) | peer)
    return "HBPO, arXiv 2507.15844", inputs, peers, clone
