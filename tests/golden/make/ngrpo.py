"""NGRPO by its public code: its estimator, and the policy loss of its fork of verl with the bounds of its script."""

from collections import defaultdict

from tests.golden.make.forks import CORE, fork_names, token_rewards
from tests.golden.make.peers import Clone, Made, gradient, tensors
from tests.golden.make.tokens import batch


def make(path: str) -> Made:
    clone = Clone(path, "nangongrui-ngr/NGRPO", "e7a380415a64cd8ac102504c38a5f86069022f35")
    # the second question has no right answer
    inputs = batch() | {"reward": [1.0, 0.0, 0.1, 0.7, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 1.0, 0.25]}
    b, rewards = tensors(inputs), token_rewards(inputs)
    estimate = clone.function(CORE, "compute_ngrpo_outcome_advantage", defaultdict=defaultdict)
    advantage = estimate(rewards, b.mask, inputs["group"])[0]
    compute = clone.function(CORE, "compute_policy_loss", **fork_names(clone))
    bounds = {"cliprange": None, "cliprange_low": 0.16, "cliprange_high": 0.24}
    loss = compute(b.logp_old, b.logp.requires_grad_(), advantage, b.mask, token_level_scores=rewards, **bounds)[0]
    calls = [f"{CORE}:{name}" for name in ("compute_ngrpo_outcome_advantage", "compute_policy_loss")]
    answer = {"advantage": advantage, "loss": loss.detach(), "gradient": gradient(loss, b.logp)}
    peer = {"program": clone.name, "calls": calls, "relative": 1e-12} | answer
    return "NGRPO, arXiv 2509.18851", inputs, [peer], clone
