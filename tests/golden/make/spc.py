"""SPC's clipped loss by its public code, with rewards of 1 and -1."""

from types import SimpleNamespace
from typing import Any

import torch

from tests.golden.make.pairs import PAIRS, TOKENS, pairs
from tests.golden.make.peers import Clone, Made, gradient, numbers, tensors

COMMIT = "e2d999d8335d48fca4a5654ce6da52692726ca02"
FILE = "src/trainers.py"
FIRST, LAST = 73, 103
"""The lines of the trainer's `compute_loss` from log-probabilities to the loss, without its metrics."""


def make(path: str) -> Made:
    clone = Clone(path, "chen-judge/SPC", COMMIT)
    inputs, far = pairs(), {"logp": numbers(27, 2 * PAIRS, TOKENS, low=-1.0, high=0.0)}  # ratios beyond both bounds
    far["logp"][PAIRS:] = numbers(28, PAIRS, TOKENS, low=-4.0, high=-3.0)
    peers = [update(clone, inputs), {"inputs": far} | update(clone, inputs | far)]
    return "SPC, arXiv 2504.19162", inputs, peers, clone


def update(clone: Clone, inputs: dict[str, Any]) -> dict[str, Any]:
    b = tensors(inputs)
    logp = b.logp.requires_grad_()
    rewards = torch.tensor([1.0] * PAIRS + [-1.0] * PAIRS, dtype=torch.float64)
    options = SimpleNamespace(debug_mode=False, clip_range=0.2, lm_sft_coeff=0.0, kl_penalty_mode="kl")
    batch = {"rewards": rewards, "sft_mask": torch.zeros_like(rewards), "weights": torch.ones_like(rewards)}
    found = clone.lines(
        FILE,
        FIRST,
        LAST,
        self=SimpleNamespace(args=options, compute_kl_divergence=lambda p, q, kl_penalty: p - q),
        inputs=batch,
        logprobs=logp,
        ref_logprobs=b.logp_ref,
        mask=b.mask,
    )
    peer = {"program": clone.name, "calls": [f"{FILE}:{FIRST}-{LAST}"], "relative": 1e-12, "options": {}}
    loss = found.weighted_loss
    return peer | {"loss": loss.detach(), "gradient": gradient(loss, logp)}
