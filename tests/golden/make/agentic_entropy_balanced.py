"""AEPO (agentic) by its public code: entropies in the advantages, and an upper bound that keeps its gradient."""

import torch

from tests.golden.make.agentic_branching import Code
from tests.golden.make.peers import Clone, Made, numbers, tensors
from tests.golden.make.tokens import batch

REPOSITORY, COMMIT = "mowenruan/ARPO", "410211f8a3ea148dea608a089dd3af392ec8a1d0"
NAME = "compute_policy_loss_entropy_balanced_clipping"


def make(path: str) -> Made:
    clone = Clone(path, REPOSITORY, COMMIT)
    torch.set_default_dtype(torch.float64)  # it makes tensors of lists
    inputs = batch() | {"entropy_old": numbers(10, 12, 6, low=0.1, high=2.5)}
    code = Code(clone, "AEPO/verl_aepo_entropy")
    b = tensors(inputs)
    b.logp.requires_grad_()
    advantage = code.advantage(b)
    policy_loss = clone.function(code.core, NAME, **code.names)
    loss = policy_loss(
        b.logp_old, b.logp, b.entropy_old, advantage, b.mask, True, True, cliprange=0.2, clip_ratio_c=3.0
    )[0]
    peer = code.answer(NAME, b, advantage, loss)
    return "AEPO, arXiv 2510.14545", inputs, [peer], clone
