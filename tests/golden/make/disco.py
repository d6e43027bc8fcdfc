"""DisCO by its public code: its losses on log-probabilities and on ratios."""

from typing import Any

import torch
from torch.nn import functional

from tests.golden.make.forks import fork_names
from tests.golden.make.peers import Clone, Made, gradient, tensors
from tests.golden.make.tokens import batch

CORE = "verl/verl/trainer/ppo/core_algos.py"
CONSTANTS = {"delta": 1e-4, "beta": 1e3, "kl_type": "kl"}
FLOOR = {"relative": 1e-11, "because": "it adds 2e-16 to sums of exponentials, and multiplies a divergence by 1000"}


def moved() -> dict[str, Any]:
    """Binary rewards, with a group of successes; the policy has moved beyond the limit of the divergence."""
    inputs = batch() | {"reward": [1.0, 0.0, 1.0, 0.0, 1.0, 1.0, 1.0, 1.0, 0.0, 1.0, 0.0, 0.0]}
    inputs["logp"] = [[round(x - 0.3, 3) for x in row] for row in inputs["logp"]]
    return inputs


def answer(clone: Clone, inputs: dict[str, Any], name: str, room: int = 0, **given: Any) -> dict[str, Any]:
    """The gradient of one of its losses, with `room` for further tokens; the value it reports has another constant."""
    b = tensors(inputs)
    logp, names = b.logp.requires_grad_(), fork_names(clone, "verl/")
    compute = clone.function(CORE, name, **names)
    old, new, mask = (functional.pad(x, (0, room)) for x in (b.logp_old, logp, b.mask))
    options = {"uid": b.group, "seq_level_rewards": b.reward, "eos_mask": mask} | CONSTANTS | given
    loss = compute(old_log_prob=old, log_prob=new, **options)[0]
    return {"program": clone.name, "calls": [f"{CORE}:{name}"], **FLOOR, "gradient": gradient(loss, logp)}


def make(path: str) -> Made:
    clone = Clone(path, "Optimization-AI/DisCO", "bd2b078129347a87c10fbb64df12ed50dce59947")
    inputs, none = moved(), torch.zeros(0)
    ratio = {"changes": {"clip": {"score": "ratio", "temperature": 1.0}}}
    peers = [
        answer(clone, inputs, "compute_policy_loss_disco_logL", tau=10.0, advantages=none),
        answer(clone, inputs, "compute_policy_loss_disco_Lratio", tau=1.0, advantages=none) | ratio,
    ]
    return "DisCO, arXiv 2505.12366", inputs, peers, clone
