"""The objective of AEPO (arbitrary entropy) by its public code, a fork of EasyR1: GRPO with a clip in log space."""

from collections import defaultdict
from types import SimpleNamespace

from tests.golden.make.forks import COUNT_EPS, token_rewards
from tests.golden.make.peers import Clone, Made, gradient, tensors
from tests.golden.make.tokens import batch

CORE, ESTIMATE, LOSS = "verl/trainer/core_algos.py", "compute_grpo_outcome_advantage", "compute_policy_loss"


def make(path: str) -> Made:
    clone = Clone(path, "597358816/AEPO", "b353a05441e9cedaed154d29aa75bcae472a6a27")
    inputs = batch()
    b, mean = tensors(inputs), clone.function("verl/utils/torch_functional.py", "masked_mean")
    estimate = clone.function(CORE, ESTIMATE, defaultdict=defaultdict)
    advantage = estimate(token_rewards(inputs), b.mask, b.group.numpy())[0]
    compute, logp = clone.function(CORE, LOSS, VF=SimpleNamespace(masked_mean=mean)), b.logp.requires_grad_()
    loss = compute(b.logp_old, logp, advantage, b.mask, 0.2, 0.2, 3.0)[0]
    answer = {"advantage": advantage, "loss": loss.detach(), "gradient": gradient(loss, logp)}
    peer = {"program": clone.name, "calls": [f"{CORE}:{ESTIMATE}", f"{CORE}:{LOSS}"]} | COUNT_EPS | answer
    return "AEPO (arbitrary entropy), arXiv 2510.08141", inputs, [peer], clone
