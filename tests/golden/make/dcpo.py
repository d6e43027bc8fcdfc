"""DCPO by its public code: statistics of three visits, and its loss."""

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from tests.golden.make.forks import CORE, fork_names, token_rewards
from tests.golden.make.peers import Clone, Made, gradient, tensors
from tests.golden.make.tokens import batch, far


class Options(SimpleNamespace):
    """Options that are read as attributes and by `get`."""

    def get(self, name: str, default: object) -> object:
        return getattr(self, name, default)


def make(path: str) -> Made:
    torch.set_default_dtype(torch.float64)
    clone = Clone(path, "lime-RL/DCPO", "01787b0f61580961162faeb492defeb39f1eba53")
    inputs = batch()
    # the first question was answered alike before, the second one is now
    before = [[0.0] * 4 + [1.0, 0.0, 0.25, 0.0] + [0.0, 0.0, 1.0, 0.3], [0.0] * 4 + [0.5] * 4 + [1.0, 0.0, 1.0, 0.0]]
    inputs |= {"before": before, "extras": {"task": inputs["group"]}}
    b, names = tensors(inputs), fork_names(clone)
    quiet = {"print": lambda *words: None}
    names["LossCalculator"] = clone.function("verl/trainer/ppo/core_name_space.py", "LossCalculator", Enum=object)
    moments = clone.function(CORE, "get_mean_std", **quiet)
    estimate = clone.function(CORE, "compute_dcpo_outcome_advantage", defaultdict=defaultdict, get_mean_std=moments)
    groups = inputs["group"]
    mean, std = dict.fromkeys(groups, 0.0), dict.fromkeys(groups, 0.0)
    for visit, reward in enumerate((*before, inputs["reward"])):
        old = ([visit] * 12, [mean[group] for group in groups], [std[group] for group in groups])
        found = estimate(token_rewards(inputs | {"reward": reward}), b.mask, np.array(groups), *old)
        mean, std = found["uid2mean"], found["uid2std"]
    names["agg_loss"] = clone.function(CORE, "agg_loss", **names)
    names["get_clip_low_high"] = clone.function(CORE, "get_clip_low_high")
    compute = clone.function(CORE, "compute_policy_loss_dcpo", AlgoConfig=type("AlgoConfig", (), {}), **names)
    peers: list[dict[str, Any]] = []
    functions = ("compute_dcpo_outcome_advantage", "compute_policy_loss_dcpo")
    program = {"program": clone.name, "calls": [f"{CORE}:{name}" for name in functions]}
    config = Options(clip_type="dynamic", clip_ratio=0.2, clip_ratio_low=0.16, clip_ratio_high=0.2, clip_ratio_c=10.0)
    beyond = far(inputs)
    # so unlikely a token that its upper bound would be 12, and a ratio beyond it
    beyond["logp_old"][0][0], beyond["logp"][0][0] = -6.5, -3.2
    # so likely a token that its lower bound is above 0.5, and a ratio below it
    beyond["logp_old"][8][2], beyond["logp"][8][2] = -0.1, -1.5
    means = {"seq-mean-token-mean": {}, "only-token-mean": {"changes": {"aggregation": {"kind": "token_mean"}}}}
    for average, changed in (*((name, {}) for name in means), ("seq-mean-token-mean", beyond)):
        own = tensors(inputs | changed)
        logp = own.logp.requires_grad_()
        loss = compute(own.logp_old, logp, found["advantages"], b.mask, average, config)[0]
        answer = {"advantage": found["advantages"], "loss": loss.detach(), "gradient": gradient(loss, logp)}
        exact = {"relative": 1e-8, "because": "it adds 1e-8 to the number of tokens that a mean is taken over"}
        peers.append(program | exact | ({"inputs": changed} if changed else means[average]) | answer)
    return "DCPO, arXiv 2509.02333", inputs, peers, clone
