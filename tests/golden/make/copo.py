"""COPO by its public code, with the numbers of its run_copo.sh, and with its other forms of the blend."""

import json
import os
import tempfile
from collections import Counter, defaultdict
from types import SimpleNamespace

import numpy as np
import torch

from tests.golden.make.forks import CORE, token_rewards
from tests.golden.make.peers import Clone, Made, doubles, gradient, tensors
from tests.golden.make.tokens import batch

BECAUSE = "entropies of answers are float32 there, and 1e-8 is added to the shares in their logarithm"
OTHERS = {"global_flg": "only-soft", "k": 20, "b": 0.5, "reward_coef_flg": True}
CHANGES = {"clip": {"zeros": "blended", "steepness": 20.0, "threshold": 0.5, "consistent": True}}


def make(path: str) -> Made:
    clone = Clone(path, "hijih/copo-code", "f66883fb89271d4664bfdd9ca98acf6d28d3887b")
    # the answers of the first question differ, those of the second are one, and the third has two
    inputs = batch() | {"extras": {"answer": [0, 1, 2, 3, 0, 0, 0, 0, 0, 1, 1, 0]}}
    # rewards so near that the number added to their deviation shows
    near = {"reward": [round(0.5 + 1e-4 * reward, 6) for reward in inputs["reward"]]}
    with doubles():
        peers = [run(clone, inputs), run(clone, inputs, **OTHERS) | {"changes": CHANGES}]
        peers.append({"inputs": near} | run(clone, inputs | near))
    return "COPO, arXiv 2508.04138", inputs, peers, clone


def run(clone: Clone, inputs: dict, *, global_flg="soft-with-zero", k=5, b=1, reward_coef_flg=False) -> dict:
    given = tensors({key: value for key, value in inputs.items() if key != "extras"})
    logp = given.logp.requires_grad_()
    # only metrics use this mean
    names = {"verl_F": SimpleNamespace(masked_mean=lambda x, mask: (x * mask).sum() / mask.sum())}
    names |= {"Counter": Counter, "defaultdict": defaultdict, "json": json, "os": os, "print": lambda *_: None}
    for name in ("tensor_to_list", "compute_score_global", "agg_loss"):
        names[name] = clone.function(CORE, name, **names)
    estimate = clone.function(CORE, "compute_grpo_outcome_advantage_with_global", **names)
    index, answers = np.array(inputs["group"]), inputs["extras"]["answer"]
    torch.set_default_dtype(torch.float64)
    with tempfile.TemporaryDirectory() as folder:
        own, _, among, entropy, _, reward = estimate(
            reward_coef_flg, token_rewards(inputs), given.mask, index, answers, f"{folder}/answers.jsonl"
        )
    torch.set_default_dtype(torch.float32)
    compute = clone.function(CORE, "compute_policy_loss_with_global", **names)
    bounds = {"cliprange_low": 0.2, "cliprange_high": 0.2, "loss_agg_mode": "seq-mean-token-mean"}
    # the coefficient of 1 counts in a form of the blend that is not used here
    given_rows = (given.logp_old, logp, own, given.mask, among, entropy)
    loss = compute(reward, global_flg, 1.0, *given_rows, b=b, k=k, **bounds)[0]
    calls = ("compute_grpo_outcome_advantage_with_global", "compute_policy_loss_with_global")
    return {
        "program": clone.name,
        "calls": [f"{CORE}:{name}" for name in calls],
        "relative": 1e-6,
        "because": BECAUSE,
        "advantage": own,
        "loss": loss.detach(),
        "gradient": gradient(loss, logp),
    }
