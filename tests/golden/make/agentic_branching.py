"""ARPO (agentic) by its public code: group advantages over all leaves, and the loss of its actor."""

from collections import defaultdict
from types import SimpleNamespace

import torch

from tests.golden.make.peers import Clone, Made, gradient, tensors
from tests.golden.make.tokens import batch

REPOSITORY, COMMIT = "dongguanting/ARPO", "e257337d1f105ba685057cb662c75e509d1c7b34"
FOLDER = "ARPO/verl_arpo_entropy"


def make(path: str) -> Made:
    clone = Clone(path, REPOSITORY, COMMIT)
    torch.set_default_dtype(torch.float64)  # it makes tensors of lists
    inputs = batch()
    code = Code(clone, FOLDER)
    b = tensors(inputs)
    b.logp.requires_grad_()
    advantage = code.advantage(b)
    policy_loss = clone.function(code.core, "compute_policy_loss", **code.names)
    loss = policy_loss(b.logp_old, b.logp, advantage, b.mask, cliprange=0.2, clip_ratio_c=3.0)[0]
    peer = code.answer("compute_policy_loss", b, advantage, loss)
    return "ARPO, arXiv 2507.19849", inputs, [peer], clone


class Code:
    """The core algorithms of a copy of verl inside a clone."""

    def __init__(self, clone: Clone, folder: str) -> None:
        self.clone, self.core = clone, f"{folder}/verl/trainer/ppo/core_algos.py"
        masked = f"{folder}/verl/utils/torch_functional.py"
        masked_sum = clone.function(masked, "masked_sum")
        verl_f = SimpleNamespace(masked_mean=clone.function(masked, "masked_mean", masked_sum=masked_sum))
        self.names = {"verl_F": verl_f, "agg_loss": clone.function(self.core, "agg_loss", verl_F=verl_f)}

    def advantage(self, b: SimpleNamespace) -> torch.Tensor:
        rewards = torch.zeros_like(b.mask)
        rewards[torch.arange(len(b.reward)), b.mask.sum(1).long() - 1] = b.reward
        estimator = self.clone.function(self.core, "compute_grpo_outcome_advantage", defaultdict=defaultdict)
        return estimator(rewards, b.mask, b.group.numpy())[0]

    def answer(self, loss_name: str, b: SimpleNamespace, advantage: torch.Tensor, loss: torch.Tensor) -> dict:
        return {
            "program": self.clone.name,
            "calls": [f"{self.core}:{name}" for name in ("compute_grpo_outcome_advantage", loss_name)],
            "relative": 1e-8,
            "because": "its mean adds 1e-8 to the number of tokens",
            "advantage": advantage,
            "loss": loss.detach(),
            "gradient": gradient(loss, b.logp),
        }
