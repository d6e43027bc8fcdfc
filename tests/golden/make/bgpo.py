"""BGPO by the port of its authors' code in DARE, which credits THU-KEG/BGPO; that repository itself could not be had.

A decision is one of the draws of an answer's log-likelihood; all answers have as many. The port is called once for each
draw, as its actor does, with one token for an answer: there all tokens of an answer have the same number."""

from collections import defaultdict
from types import SimpleNamespace

import torch

from tests.golden.make.peers import Clone, Made, gradient, tensors
from tests.golden.make.tokens import COUNT_EPS, NEVER, batch

FOLDER = "verl/trainer/ppo"


def make(path: str) -> Made:
    clone = Clone(path, "yjyddq/DARE", "83ae8a305a53a914cce563aedceeac88566891cb")
    inputs = batch() | {"mask": [[1.0] * 6] * 12}
    b = tensors(inputs)
    b.logp.requires_grad_()
    one = torch.ones(12, 1, dtype=torch.float64)
    mean = clone.function("verl/utils/torch_functional.py", "masked_mean")
    names = {"verl_F": SimpleNamespace(masked_mean=mean)}
    names["agg_loss"] = clone.function(f"{FOLDER}/core_algos.py", "agg_loss", **names)
    normalise = clone.function(f"{FOLDER}/core_algos.py", "compute_grpo_outcome_advantage", defaultdict=defaultdict)
    bound = clone.function(f"{FOLDER}/dllm_core_algos.py", "compute_policy_loss_bgpo", **names)
    kept = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)  # it makes tensors of its own
    advantage, _ = normalise(b.reward[:, None].clone(), one, inputs["group"])
    torch.set_default_dtype(kept)
    sides = [x.unbind(1) for x in (b.logp_old, b.logp)]
    draws = [
        bound(old[:, None], new[:, None], advantage, one, cliprange=NEVER, clip_ratio_c=NEVER)[0]
        for old, new in zip(*sides, strict=True)
    ]
    loss = sum(draws) / len(draws)
    calls = [f"{FOLDER}/core_algos.py:compute_grpo_outcome_advantage"]
    calls += [f"{FOLDER}/dllm_core_algos.py:compute_policy_loss_bgpo, bounds that nothing reaches"]
    peer = {"program": clone.name, "calls": calls, **COUNT_EPS, "advantage": advantage.expand(-1, 6)}
    peer |= {"loss": loss.detach(), "gradient": gradient(loss, b.logp)}
    return "BGPO, arXiv 2510.11683", inputs, [peer], clone
