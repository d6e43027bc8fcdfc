"""The objective of Scaf-GRPO by its public code: GRPO of its fork of verl, with the constants of its script."""

from collections import defaultdict

from tests.golden.make.forks import CORE, COUNT_EPS, fork_loss, fork_names, token_rewards
from tests.golden.make.peers import Clone, Made, tensors
from tests.golden.make.tokens import batch

NAME = "compute_grpo_outcome_advantage"


def make(path: str) -> Made:
    clone = Clone(path, "dvlab-research/Scaf-GRPO", "1085db539b929ea6fed5ec3b71e3ea4c48c27612")
    inputs = batch()
    estimate = clone.function(CORE, NAME, defaultdict=defaultdict, **fork_names(clone))
    advantage = estimate(token_rewards(inputs), tensors(inputs).mask, tensors(inputs).group.numpy())[0]
    answer = {"advantage": advantage} | fork_loss(clone, inputs, advantage, "token-mean", 0.2, 0.2, 3.0)
    calls = [f"{CORE}:{NAME}", f"{CORE}:compute_policy_loss"]
    peer = {"program": clone.name, "calls": calls} | COUNT_EPS | answer
    return "Scaf-GRPO, arXiv 2510.19807", inputs, [peer], clone
