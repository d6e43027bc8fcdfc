"""AEPO by its public code: RLOO's advantages and the actor's loss, one response a micro-batch, as its script runs."""

from collections import defaultdict
from types import SimpleNamespace

import torch

from tests.golden.make.peers import Clone, Made, gradient, tensors
from tests.golden.make.tokens import batch

REPOSITORY, COMMIT = "InfiXAI/InfiGUI-G1", "22208e4d4826626731292fa08bb73ec9fc6f9b15"
CORE = "verl/trainer/ppo/core_algos.py"


class Script(SimpleNamespace):
    """Loss settings of run_3b.sh and its defaults."""

    def get(self, name, default):
        return getattr(self, name, default)


SCRIPT = Script(clip_ratio=0.2, clip_ratio_low=None, clip_ratio_high=0.4, tis_imp_ratio_cap=-1)


def make(path: str) -> Made:
    clone = Clone(path, REPOSITORY, COMMIT)
    inputs = batch()
    b = tensors(inputs)
    b.logp.requires_grad_()
    rewards = torch.zeros_like(b.mask)
    rewards[torch.arange(len(b.reward)), b.mask.sum(1).long() - 1] = b.reward
    rloo = clone.function(CORE, "compute_rloo_outcome_advantage", defaultdict=defaultdict)
    advantage = rloo(rewards, b.mask, b.group.numpy())[0]
    verl_f = SimpleNamespace(
        masked_mean=clone.function(
            "verl/utils/torch_functional.py",
            "masked_mean",
            masked_sum=clone.function("verl/utils/torch_functional.py", "masked_sum"),
        )
    )
    agg_loss = clone.function(CORE, "agg_loss", verl_F=verl_f)
    names = {"verl_F": verl_f, "agg_loss": agg_loss, "AlgoConfig": type(None)}
    policy_loss = clone.function(CORE, "compute_policy_loss_vanilla", **names)
    rows = [slice(i, i + 1) for i in range(len(b.reward))]
    losses = [policy_loss(b.logp_old[i], b.logp[i], advantage[i], b.mask[i], "token-mean", SCRIPT)[0] for i in rows]
    loss = torch.stack(losses).mean()
    calls = ["compute_rloo_outcome_advantage", "compute_policy_loss_vanilla", "agg_loss"]
    peer = {
        "program": clone.name,
        "calls": [f"{CORE}:{name}" for name in calls],
        "relative": 1e-8,
        "because": "its mean adds 1e-8 to the number of tokens",
        "advantage": advantage,
        "loss": loss.detach(),
        "gradient": gradient(loss, b.logp),
    }
    return "AEPO, arXiv 2508.05731", inputs, [peer], clone
