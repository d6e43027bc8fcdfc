"""IGPO (inpainting) by its public code: advantages, the filter of given tokens, and the loss."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from tests.golden.make.peers import Clone, Made, gradient, numbers, tensors
from tests.golden.make.tokens import batch, far

TRAINER = "trainer_igpo.py"


def make(path: str) -> Made:
    clone = Clone(path, "facebookresearch/igpo", "e85eaea1508c9062991b44ca2e44d5d12ebc64be")
    inputs = batch() | {"mask": [[1.0] * 6] * 12, "entropy_old": numbers(9, 12, 6, low=0.0, high=2.0)}
    hinted = (np.random.RandomState(11).uniform(size=(12, 6)) < 0.5).astype(float)
    hinted[[1, 6, 7]] = 0.0  # own samples
    hinted[2] = 1.0
    inputs["extras"] = {"hinted": hinted.tolist()}
    peers = [update(clone, inputs, hinted, 0.2, 0.0), update(clone, inputs, hinted * 0, 0.2, 0.01)]
    peers += [update(clone, inputs, hinted, 0.5, 0.0)]
    beyond = far(inputs)
    # ratios of whole answers below the lower bound, too
    beyond["logp"][1::2] = [[round(x - 1.0, 3) for x in row] for row in beyond["logp"][1::2]]
    peers += [{"inputs": beyond} | update(clone, inputs | beyond, hinted, 0.2, 0.01)]
    return "IGPO (inpainting), arXiv 2509.10396", inputs, peers, clone


def update(clone: Clone, inputs: dict, hinted: np.ndarray, share: float, beta: float) -> dict[str, Any]:
    """Advantages, and the loss of the whole batch at once, as of one device."""
    b = tensors({key: value for key, value in inputs.items() if key != "extras"})
    b.logp.requires_grad_()
    grouped = clone.lines(
        TRAINER, 1906, 1920, rewards=b.reward, self=SimpleNamespace(num_generations=4), total_unique_prompts=3
    )
    args = SimpleNamespace(entropy_clipping_ratio_inpaint=share, use_gspo=True, epsilon_low=0.2, epsilon_high=0.2)
    me = SimpleNamespace(args=args, num_iterations=1, beta=beta)
    kept = clone.lines(
        TRAINER,
        1769,
        1826,
        self=me,
        masked_token_mask=torch.ones(1, 12, 6, dtype=torch.uint8),
        completion_inpaint_mask=torch.from_numpy(hinted > 0),
        all_per_token_entropy=b.entropy_old[None],
    ).filtered_masked_token_mask[0]
    kl = torch.zeros_like(b.logp)
    if beta:
        kl = clone.lines(TRAINER, 635, 639, ref_per_token_logps=b.logp_ref, per_token_logps=b.logp).per_token_kl
    found = clone.lines(
        TRAINER,
        650,
        679,
        self=me,
        per_token_logps=b.logp,
        old_per_token_logps=b.logp_old,
        per_token_kl=kl,
        advantages=grouped.advantages,
        print=lambda *_: None,
    )
    loss = (found.per_token_loss * kept).sum() / kept.sum()
    changes: dict[str, Any] = {} if share == 0.2 else {"weight": {"share": share}}
    if not hinted.any():
        changes["weight"] = {"kind": "none"}
    return {
        "program": clone.name,
        "calls": [f"{TRAINER}:{lines}" for lines in ("1906-1920", "1769-1826", "635-639", "650-679")],
        "relative": 1e-12,
        "changes": changes if beta else changes | {"kl": {"kind": "none"}},
        "advantage": grouped.advantages[:, None] * b.mask,
        "loss": loss.detach(),
        "gradient": gradient(loss, b.logp),
    }
