"""Pairs of answers for the preference losses, and TRL's trainer run on them; a trainer without a model gets the
log-probabilities.
"""

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import torch

from tests.golden.make.peers import doubles, gradient, numbers, package, tensors
from tests.golden.make.tokens import ensure_torchvision

PAIRS, TOKENS = 4, 6
LENGTHS = ([6, 3, 1, 4], [2, 6, 5, 4])
"""Tokens of the preferred and of the rejected sides."""
OWN = [1.0, 0.0, 1.0, 0.0, 0.0, 1.0, 0.0, 1.0]
"""1 where the policy's answer is meant, 0 where an opponent's."""


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
    trainer.model, trainer.args = SimpleNamespace(training=False), SimpleNamespace(discopop_tau=0.05)
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


def trl_without_reference(inputs: dict[str, Any], trainer_class: type, **settings: Any) -> Any:
    """The loss of TRL's CPO or ORPO trainer and its gradient with respect to the log-probabilities.

    A model of two tokens, of which every text repeats the first, has those log-probabilities.
    """
    b = tensors(inputs)
    logp = b.logp.requires_grad_()
    trainer = trainer_class.__new__(trainer_class)
    trainer.accelerator = SimpleNamespace(device="cpu", gather_for_metrics=lambda x: x)
    trainer.is_encoder_decoder = trainer.aux_loss_enabled = False
    trainer.padding_value = trainer.pad_token_id = 0
    trainer.alpha = trainer.label_smoothing = 0.0
    for name, value in settings.items():
        setattr(trainer, name, value)
    logits = torch.stack([logp, torch.log(-torch.expm1(logp))], -1)
    # the first position is the last token of the prompt; the logits of the last one predict nothing
    logits = torch.cat([logits, torch.zeros(len(logp), 1, 2, dtype=logp.dtype)], 1)
    answer = torch.cat([torch.zeros(len(b.mask), 1), b.mask], 1).bool()
    texts = {
        "concatenated_input_ids": torch.zeros_like(answer).long(),
        "concatenated_attention_mask": torch.cat([torch.ones(len(b.mask), 1), b.mask], 1).long(),
        "concatenated_labels": torch.where(answer, 0, -100),
    }
    trainer.concatenated_inputs = lambda *_, **__: texts
    model = lambda *_, **__: SimpleNamespace(logits=logits)  # noqa: E731
    with doubles():
        loss, _ = trainer.get_batch_loss_metrics(model, {"chosen_labels": torch.zeros(PAIRS)})
    calls = [f"trl.experimental.{trainer_class.__name__}.get_batch_loss_metrics"]
    found = {"program": package("trl"), "calls": calls, "relative": 1e-12}
    return found | {"loss": loss.detach(), "gradient": gradient(loss, logp)}


def trl_unpaired(inputs: dict[str, Any], labels: list[bool], beta: float, desirable: float, undesirable: float) -> Any:
    """The loss of `KTOTrainer._compute_loss`; mismatched answers have `logp_other`, `ref_other`."""
    ensure_torchvision()
    from trl import KTOTrainer

    b = tensors(inputs)
    logp = b.logp.requires_grad_()
    trainer = KTOTrainer.__new__(KTOTrainer)
    trainer.beta, trainer.loss_type, trainer.calculate_KL, trainer.precompute_ref_logps = beta, "kto", True, True
    trainer.desirable_weight, trainer.undesirable_weight = desirable, undesirable
    trainer.model, trainer.aux_loss_enabled = SimpleNamespace(training=False), False
    trainer.accelerator = SimpleNamespace(device="cpu", gather_for_metrics=lambda x: x)
    trainer._metrics, trainer._total_train_tokens = {"eval": defaultdict(list)}, 0
    trainer._compute_kl_logps = lambda *_: b.logp_other
    zeros = torch.zeros_like(logp)
    outputs = SimpleNamespace(log_probs=logp * b.mask, entropy=zeros, mean_logits=zeros)
    completion = torch.cat([torch.zeros(len(b.mask), 1, dtype=b.mask.dtype), b.mask], 1)
    given = {
        "input_ids": completion.long(),
        "attention_mask": torch.ones_like(completion),
        "completion_mask": completion,
        "label": torch.tensor(labels),
        "ref_logps": (b.logp_ref * b.mask).sum(1),
        "ref_KL_logps": b.ref_other,
    }
    loss = trainer._compute_loss(lambda **_: outputs, given, False)
    names = ("rewards/chosen", "rewards/rejected", "logps/chosen", "logps/rejected")
    metrics = {name: trainer._metrics["eval"][name][0] for name in names}
    answer = {"program": package("trl"), "calls": ["trl.KTOTrainer._compute_loss"], "relative": 1e-12}
    answer |= {"labels": labels, "baseline": (b.logp_other - b.ref_other).mean(), "metrics": metrics}
    return answer | {"loss": loss.detach(), "gradient": gradient(loss, logp)}


def single_pairs(inputs: dict[str, Any]) -> list[dict[str, Any]]:
    """The same inputs, a pair at a time."""
    return [{key: [value[n], value[n + PAIRS]] for key, value in inputs.items()} for n in range(PAIRS)]


SHOWN = ("rewards", "logps")
