"""Pairs of answers for the preference losses, and TRL's trainer run on them; a trainer without a model gets the
log-probabilities.
"""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import torch

from tests.golden.make.peers import gradient, numbers, package, tensors
from tests.golden.make.tokens import ensure_torchvision

PAIRS, TOKENS = 4, 6
LENGTHS = ([6, 3, 1, 4], [2, 6, 5, 4])
"""Tokens of the preferred and of the rejected sides."""


def pairs() -> dict[str, Any]:
    """Log-probabilities (8, 6) of 4 preferred rows and 4 rejected rows, and scores of the answers."""
    mask = [[1.0] * n + [0.0] * (TOKENS - n) for side in LENGTHS for n in side]
    return {
        "mask": mask,
        "logp": numbers(21, 2 * PAIRS, TOKENS, low=-3.0, high=0.0),
        "logp_ref": numbers(22, 2 * PAIRS, TOKENS, low=-3.0, high=0.0),
        "score": numbers(23, 2 * PAIRS, low=-2.0, high=2.0),
    }


def trl(inputs: dict[str, Any], losses: list[str], weights: list[float], beta: float, smoothing: float) -> Any:
    """The loss of `DPOTrainer._compute_loss` and its gradient with respect to the log-probabilities."""
    ensure_torchvision()
    from trl import DPOTrainer

    b = tensors(inputs)
    logp = b.logp.requires_grad_()
    trainer = DPOTrainer.__new__(DPOTrainer)
    trainer.beta, trainer.label_smoothing, trainer.loss_types, trainer.loss_weights = beta, smoothing, losses, weights
    trainer.model = SimpleNamespace(training=False)
    trainer.aux_loss_enabled, trainer.use_weighting, trainer.ld_alpha = False, False, None
    trainer.f_divergence_type, trainer.precompute_ref_logps = "reverse_kl", True
    trainer.accelerator = SimpleNamespace(device="cpu", gather_for_metrics=lambda x: x, gather=lambda x: x)
    trainer._metrics, trainer._total_train_tokens = {"eval": defaultdict(list)}, 0
    outputs = SimpleNamespace(
        log_probs=logp * b.mask,
        entropy=torch.zeros_like(logp),
        mean_logits=torch.zeros_like(logp),
        is_top1=torch.zeros_like(logp).bool(),
    )
    reference = (b.logp_ref * b.mask).sum(1)
    # the first position is the last token of the prompt, which predicts the first one of the answer
    completion = torch.cat([torch.zeros(len(b.mask), 1, dtype=b.mask.dtype), b.mask], 1)
    given = {
        "input_ids": completion.long(),
        "attention_mask": torch.ones_like(completion),
        "completion_mask": completion,
        "ref_chosen_logps": reference.chunk(2)[0],
        "ref_rejected_logps": reference.chunk(2)[1],
    }
    loss = trainer._compute_loss(lambda **_: outputs, given, False)
    metrics = {name: values[0] for name, values in trainer._metrics["eval"].items() if name.split("/")[0] in SHOWN}
    answer = {"program": package("trl"), "calls": ["trl.DPOTrainer._compute_loss"], "relative": 1e-12}
    return answer | {"loss": loss.detach(), "gradient": gradient(loss, logp), "metrics": metrics}


def single_pairs(inputs: dict[str, Any]) -> list[dict[str, Any]]:
    """The same inputs, a pair at a time."""
    return [{key: [value[n], value[n + PAIRS]] for key, value in inputs.items()} for n in range(PAIRS)]


SHOWN = ("rewards", "logps")
