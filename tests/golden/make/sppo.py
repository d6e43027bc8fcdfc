"""SPPO with win probabilities by its public code, and with certain wins by TRL."""

from types import SimpleNamespace
from typing import Any

import torch

from tests.golden.make.pairs import pairs, trl
from tests.golden.make.peers import Clone, Made, gradient, tensors

COMMIT = "5e61c4e90822fe526d8bbe1a50a6e85a85c30911"
FILE = "sppo/trainer.py"
FIRST, LAST = 849, 902
"""The lines of `SPPOTrainer.sppo_loss` that turn log-probabilities into losses."""


def make(path: str) -> Made:
    clone = Clone(path, "uclaml/SPPO", COMMIT)
    inputs = pairs()
    peers = [
        fork(clone, inputs, loss_type="sppo", beta=0.05) | {"options": {"beta": 0.05}},
        fork(clone, inputs, loss_type="sppo", beta=0.001) | {"options": {}},
        trl(inputs, ["sppo_hard"], [1.0], beta=0.05, smoothing=0.0) | {"options": {"kind": "sppo_hard", "beta": 0.05}},
    ]
    return "SPPO, arXiv 2405.00675", inputs, peers, clone


def fork(clone: Clone, inputs: dict[str, Any], *, loss_type: str, beta: float, label_smoothing: float = 0.0) -> Any:
    """The mean loss of SPPO's trainer and its gradient with respect to the tokens' log-probabilities."""
    b = tensors(inputs)
    logp = b.logp.requires_grad_()
    (chosen, rejected), (ref_chosen, ref_rejected) = ((x * b.mask).sum(1).chunk(2) for x in (logp, b.logp_ref))
    wins = torch.sigmoid(b.score.chunk(2)[0] - b.score.chunk(2)[1])
    trainer = SimpleNamespace(
        loss_type=loss_type,
        beta=beta,
        label_smoothing=label_smoothing,
        accelerator=SimpleNamespace(device="cpu"),
    )
    found = clone.lines(
        FILE,
        FIRST,
        LAST,
        self=trainer,
        F=torch.nn.functional,
        policy_chosen_logps=chosen,
        policy_rejected_logps=rejected,
        reference_chosen_logps=ref_chosen,
        reference_rejected_logps=ref_rejected,
        chosen_probs=wins,
        chosen_probs_win=wins,
        chosen_probs_lose=1 - wins,
        reference_free=False,
    )
    loss = found.losses.mean()
    answer = {"program": clone.name, "calls": [f"{FILE}:{FIRST}-{LAST}"], "relative": 1e-12}
    return answer | {"loss": loss.detach(), "gradient": gradient(loss, logp)}
