"""BNPO by its public code: its estimator, and the policy loss of its fork of verl with the constants of its run.sh."""

from collections import defaultdict
from typing import Any

from tests.golden.make.forks import CORE, fork_loss, token_rewards
from tests.golden.make.peers import Clone, Made, tensors
from tests.golden.make.tokens import batch, far

FILE, NAME = "recipe/bnpo/src/bnpo_ray_trainer.py", "compute_bnpo_outcome_advantage"


def make(path: str) -> Made:
    clone = Clone(path, "changyi7231/BNPO", "a9c51b9848283286ff3c51afbba2a867977a2e36")
    inputs = batch()
    beyond = far(inputs)
    peers = [update(clone, inputs), {"inputs": beyond} | update(clone, inputs | beyond)]
    return "BNPO, arXiv 2506.02864", inputs, peers, clone


def update(clone: Clone, inputs: dict[str, Any]) -> dict[str, Any]:
    estimate = clone.function(FILE, NAME, defaultdict=defaultdict)
    advantage = estimate(token_rewards(inputs), tensors(inputs).mask, inputs["group"])[0]
    answer = {"advantage": advantage} | fork_loss(clone, inputs, advantage, "seq-mean-token-sum", 0.2, 0.28, 10.0)
    calls = [f"{FILE}:{NAME}", f"{CORE}:compute_policy_loss"]
    return {"program": clone.name, "calls": calls, "relative": 1e-12} | answer
