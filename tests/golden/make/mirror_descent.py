"""Mirror descent policy optimisation by its public code, with the exact divergence, after half of its steps."""

from types import SimpleNamespace

import torch

from tests.golden.make.peers import Clone, Made, gradient, numbers, tensors
from tests.golden.make.tokens import Verl, batch


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
    return "MDPO, arXiv 2005.09814", inputs, [peer], clone
