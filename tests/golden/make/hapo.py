"""HAPO by its public code, with the numbers of its scripts."""

import math
from collections import defaultdict

import numpy as np
import torch

from tests.golden.make.forks import CORE, COUNT_EPS, fork_names, token_rewards
from tests.golden.make.peers import Clone, Made, doubles, gradient, numbers, tensors
from tests.golden.make.tokens import batch, far

NAMES = ("floor", "ceil")
SAMPLER = "vllm/v1/sample/sampler.py"


def make(path: str) -> Made:
    clone = Clone(path, "starriver030515/HAPO", "7671dde3e268779a949954ec75ed3edda45f7e0a")
    inputs = batch() | {"entropy_old": numbers(7, 12, 6, low=0.01, high=2.0)}
    # the short row of the first group has an advantage beyond 5 among its tokens, so that the group counts rows
    inputs["group"], inputs["reward"] = [0] * 8 + [1] * 4, [0.0, 0.0, 1.0, *[0.0] * 5, 0.0, 1.0, 1.0, 0.25]
    # from a certain distribution to an even one, and entropies beyond those of the step
    inputs["logits"] = [[scale * x for x in numbers(8, 5)] for scale in (0.0, 0.5, 2.0, 4.0, 9.0, 40.0)]
    with doubles():
        beyond = far(inputs)
        peers = [run(clone, inputs) | temperatures(clone, inputs), {"inputs": beyond} | run(clone, inputs | beyond)]
    return "HAPO, arXiv 2509.16591", inputs, peers, clone


def temperatures(clone: Clone, inputs: dict) -> dict:
    """The temperature of each distribution by the entropies of the step, with its scale of them."""
    b, names = tensors(inputs), {name: getattr(math, name) for name in NAMES}
    names["torch_quantile"] = clone.function(CORE, "torch_quantile", **names)
    level = clone.function(CORE, "compute_entropy_h", **names)
    _, scale = level(b.entropy_old, response_mask=b.mask, entropy_pivot=0.8)
    adapted = clone.lines(SAMPLER, 109, 134).compute_entropy_based_temperature
    base = torch.ones(len(b.logits), dtype=torch.float64)
    found = adapted(b.logits, base, adaptive_temperature=True, norm_entropys=scale)
    return {"temperature": found}


def run(clone: Clone, inputs: dict) -> dict:
    b = tensors(inputs)
    logp = b.logp.requires_grad_()
    names = fork_names(clone)
    names["verl_F"].masked_sum = lambda x, mask: (x * mask).sum()
    names |= {name: getattr(math, name) for name in NAMES}
    names |= {"defaultdict": defaultdict, "np": np}
    for name in ("torch_quantile", "compute_entropy_h", "ada_clip", "ada_advantage", "agg_loss"):
        names[name] = clone.function(CORE, name, **names)
    names["compute_grpo_outcome_advantage"] = clone.function(CORE, "compute_grpo_outcome_advantage", **names)
    estimate = clone.function(CORE, "compute_hapo_outcome_advantage", **names)
    index = np.array(inputs["group"])
    advantage = estimate(token_rewards(inputs), b.mask, index, entropys=b.entropy_old)[0] * b.mask
    loss = clone.function(CORE, "compute_policy_loss", **names)(
        b.logp_old,
        logp,
        advantage,
        b.mask,
        cliprange_low=0.2,
        cliprange_high=0.2,
        clip_ratio_c=10.0,
        loss_agg_mode="token-mean",
        entropy_pivot=0.8,
        adaptive_clip=True,
        adaptive_advantage=True,
        entropy=b.entropy_old,
    )[0]
    return {
        "program": clone.name,
        "calls": [f"{CORE}:{name}" for name in ("compute_hapo_outcome_advantage", "compute_policy_loss")],
        **COUNT_EPS,
        "changes": {"clip": {"sign": "repo"}},
        "advantage": advantage,
        "loss": loss.detach(),
        "gradient": gradient(loss, logp),
    }
