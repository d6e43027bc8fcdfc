"""The objective of AMPO by its public code: GRPO without the standard deviation, and the loss of its train_ampo.sh."""

from collections import defaultdict
from typing import Any

import torch
from torch.nn import functional

from tests.golden.make.forks import fork_names, token_rewards
from tests.golden.make.peers import Clone, Made, gradient, tensors
from tests.golden.make.tokens import batch, far

FOLDER = "ampo/verl/verl"
FILE, NAME = f"{FOLDER}/adaptive_mix_src/mix_core_alg.py", "compute_token_on_seq_off_policy_loss"
CORE, ESTIMATE = f"{FOLDER}/trainer/ppo/core_algos.py", "compute_grpo_outcome_advantage"


class Config(dict):
    """The keys of the script that the loss reads; others have the defaults of its yaml file."""

    __getattr__ = dict.__getitem__


def make(path: str) -> Made:
    clone = Clone(path, "SII-Enigma/AMPO", "b88d365654e03b94d8316226a5a67e0f7b64048f")
    inputs = batch()
    inputs["extras"] = {"source": [0, 2, 0, 2, 0, 0, 0, 0, 2, 0, 0, 1]}
    beyond = far(inputs)
    peers = [update(clone, inputs, 6) | {"changes": {"aggregation": {"length": 6}}}]
    peers.append({"inputs": beyond} | update(clone, inputs | beyond, 8192))  # as long as the script's answers
    return "AMPO, arXiv 2510.02227", inputs, peers, clone


def update(clone: Clone, inputs: dict[str, Any], length: int) -> dict[str, Any]:
    """Advantages and loss of answers with room for `length` tokens."""
    b, names = tensors(inputs), fork_names(clone, "ampo/verl/")
    estimate = clone.function(CORE, ESTIMATE, defaultdict=defaultdict)
    advantage = estimate(token_rewards(inputs), b.mask, b.group.numpy(), norm_adv_by_std_in_grpo=False)[0] * b.mask
    names |= {"AlgoConfig": type("AlgoConfig", (), {}), "agg_loss": clone.function(CORE, "agg_loss", **names)}
    off = dict.fromkeys(("off_policy_max_clip", "off_policy_min_clip", "all_max_clip"), -1)
    bounds = {"clip_ratio": 0.2, "clip_ratio_low": 0.2, "clip_ratio_high": 0.2, "clip_ratio_c": 10.0}
    shaping = {"off_policy_normalize": False, "off_policy_reshape": "p_div_p_0.1", "loss_remove_token_mean": True}
    config, logp = Config(off | bounds | shaping), b.logp.requires_grad_()
    room = (0, length - b.mask.shape[1])
    mask, old, new, wide = (functional.pad(x, room) for x in (b.mask, b.logp_old, logp, advantage))
    given = torch.tensor(inputs["extras"]["source"])[:, None] == 2
    compute = clone.function(FILE, NAME, **names)
    loss = compute(old, new, wide, mask, given & (mask > 0), config=config)["pg_loss"]
    loss = loss / len(b.mask)  # its mean over rows is that of the micro-batches of one row
    answer = {"advantage": advantage, "loss": loss.detach(), "gradient": gradient(loss, logp)}
    calls = [f"{CORE}:{ESTIMATE}", f"{FILE}:{NAME}"]
    return {"program": clone.name, "calls": calls, "relative": 1e-12} | answer
