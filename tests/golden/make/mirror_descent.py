"""Mirror descent policy optimisation by its public code, with the exact divergence, after half of its steps."""

import math
from types import SimpleNamespace
from typing import Any

import torch

from tests.golden.make.by_hand import by_hand, centred, spread
from tests.golden.make.peers import Clone, Made, gradient, numbers, tensors
from tests.golden.make.tokens import Verl, batch, far


def make(path: str) -> Made:
    commit = "c9bd3ba080e34f94e104ffe7633167e246dd63c6"
    clone = Clone(path, "manantomar/Mirror-Descent-Policy-Optimization", commit)
    inputs = batch() | {"kl_old": numbers(6, 12, 6, low=0.0, high=0.4)}
    verl = Verl(inputs)
    advantage = verl.advantage("compute_grpo_outcome_advantage", norm_adv_by_std_in_grpo=False)
    b = tensors(inputs)
    kept, logp = b.mask > 0, b.logp.requires_grad_()
    lines = clone.lines(
        "mdpo_on/mdpo.py",
        195,
        195,
        tf=SimpleNamespace(reduce_mean=torch.mean),
        ratio=(logp - b.logp_old).exp()[kept],
        meankl=b.kl_old[kept].mean(),
        self=SimpleNamespace(atarg=advantage[kept], learning_rate_ph=0.5),
    )
    loss = -lines.surrgain
    peer = {"program": clone.name, "calls": ["mdpo_on/mdpo.py:195"], "relative": 1e-12, "advantage": advantage}
    # the row's own divergence is an estimate of the exact one, and its coefficient after half of the run is 1 / 0.5
    peer |= {"changes": {"kl": {"kind": "full", "coef": 2.0, "importance": False, "anneal": False}}}
    peer |= {"loss": loss.detach(), "gradient": gradient(loss, logp)}
    given = far(inputs)
    return "MDPO, arXiv 2005.09814", inputs, [peer, {"inputs": given} | estimated(inputs | given)], clone


def estimated(inputs: dict[str, Any]) -> dict[str, Any]:
    """Equation 9 with the divergence estimated on the decisions taken, r k3 = 1 - r + r log r, after a quarter of K.

    Its slope by the log-probability is -A r + r log r / t with t = 1 - k / K.
    """
    number, share = sum(map(sum, inputs["mask"])), 0.75
    rows, total, slopes = centred(inputs), 0.0, []
    for a, mask, new, old in zip(rows, inputs["mask"], inputs["logp"], inputs["logp_old"], strict=True):
        slopes.append([0.0] * len(mask))
        for place, (d, trained) in enumerate(zip((n - o for n, o in zip(new, old, strict=True)), mask, strict=True)):
            r = math.exp(d)
            total += trained * (-a * r + (1 - r + r * d) / share) / number
            slopes[-1][place] = trained * (-a * r + r * d / share) / number
    return by_hand(
        "equation 9 of the paper", "mirror_descent", advantage=spread(inputs, rows), loss=total, gradient=slopes
    )
