"""Log-probabilities of soft tokens by SofT-GRPO's own code."""

from typing import Any

import torch

from tests.golden.make.peers import Clone, Made, gradient, numbers, tensors

FILE, NAME = "verl-0.4.x/verl/utils/torch_functional.py", "logprobs_from_logits_topk_gumbel"


def make(path: str) -> Made:
    clone = Clone(path, "zz1358m/SofT-GRPO-master", "2b9d8ec6d8f022f2aefe7a1c2512dcb9924cddfe")
    inputs: dict[str, Any] = {
        "logits": numbers(1, 6, 9, low=-4.0, high=4.0),
        "ids": [[3, 1, 8, 5], [0, 2, 7, 4], [6, 5, 1, 2], [8, 3, 4, 0], [2, 0, 0, 0], [7, 6, 5, 1]],
        "scores": numbers(2, 6, 4, low=-4.0, high=2.0),
    }
    b = tensors(inputs)
    b.logits.requires_grad_()
    ordinary = clone.function(FILE, "logprobs_from_logits_v2")
    names = {"FLAH_ATTN_CROSS_ENTROPY_LOSS_AVAILABLE": True}
    names |= {"logprobs_from_logits_flash_attn": lambda logits, labels, **_: ordinary(logits, labels)}
    logp = clone.function(FILE, NAME, **names)(b.logits, b.ids, b.scores, b.ids[:, 0])
    soft = [0, 1, 2, 3, 5]  # the row whose other tokens are 0 is an ordinary one
    answer = {"logp": logp.detach(), "gradient": gradient((logp * torch.arange(1.0, 7.0)).sum(), b.logits)}
    peer = {"program": clone.name, "calls": [f"{FILE}:{NAME}"], "relative": 1e-12, "soft": soft} | answer
    return "SofT-GRPO, arXiv 2511.06411", inputs, [peer], clone
