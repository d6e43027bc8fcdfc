"""APO by its public code, View-R1: difficulty weights of the divergence, length factors, and the actor's loss."""

import math
from types import SimpleNamespace

import torch

from tests.golden.make.peers import Clone, Made, doubles, gradient, tensors
from tests.golden.make.tokens import batch, far_reference

COMMIT = "093f2d82eee37e76594486831c122d7d19161c07"


def make(path: str) -> Made:
    clone = Clone(path, "Indolent-Kawhi/View-R1", COMMIT)
    inputs = batch()
    # One question without a right answer; lengths are those of the rows, thousands of tokens where it matters.
    inputs["reward"] = [1.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 1.0, 1.0]
    inputs["lengths"] = [600, 4000, 12000, 900, 30, 4000, 80, 900, 20000, 150, 1000, 300]
    reference = far_reference(inputs)
    peers = [update(clone, inputs), {"inputs": reference} | update(clone, inputs | reference)]
    return "APO, arXiv 2506.21655", inputs, peers, clone


def update(clone: Clone, inputs: dict) -> dict:
    """Factors and loss of a batch."""
    found, b = factors(clone, inputs), tensors(inputs)
    b.logp.requires_grad_()
    advantage = (found.rewards * found.neg_diff_weights).reshape(-1, 1) * b.mask
    weights = kl_weights(clone, advantage, found.difficulties.reshape(-1))
    with doubles():
        loss = actor_loss(clone, b, advantage, weights)
    return {
        "program": clone.name,
        "calls": [
            "openrlhf/trainer/ppo_utils/experience_maker.py:551-567",
            "openrlhf/trainer/ray/ppo_actor.py:407-446",
            "openrlhf/models/loss.py:PolicyLoss",
        ],
        "relative": 1e-12,
        "difficulty": found.difficulties.reshape(-1),
        "length_factor": found.neg_diff_weights.reshape(-1),
        "advantage": advantage,
        "kl_weight": weights,
        "loss": loss.detach(),
        "gradient": gradient(loss, b.logp),
    }


def factors(clone: Clone, inputs: dict) -> SimpleNamespace:
    """Rows of the four answers of each question, as the experience maker holds them."""
    reward, lengths = (torch.tensor(inputs[key], dtype=torch.float64).reshape(3, 4) for key in ("reward", "lengths"))
    return clone.lines(
        "openrlhf/trainer/ppo_utils/experience_maker.py",
        551,
        567,
        rewards=reward,
        complexitys=lengths,
        args=SimpleNamespace(n_samples_per_prompt=4),
    )


def kl_weights(clone: Clone, advantage: torch.Tensor, difficulty: torch.Tensor) -> torch.Tensor:
    file = "openrlhf/trainer/ray/ppo_actor.py"
    weigh = SimpleNamespace(diff2KL_weight=clone.function(file, "calculate_kl_weight", math=math))
    return clone.lines(file, 407, 410, self=weigh, advantages=advantage, difficulties=difficulty).KL_weights


def actor_loss(clone: Clone, b: SimpleNamespace, advantage: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    utils = "openrlhf/models/utils.py"
    masked_mean = clone.function(utils, "masked_mean")
    policy_loss = clone.function("openrlhf/models/loss.py", "PolicyLoss", nn=torch.nn, masked_mean=masked_mean)
    args = SimpleNamespace(use_kl_loss=True, kl_estimator="k3", use_dads=True)
    found = clone.lines(
        "openrlhf/trainer/ray/ppo_actor.py",
        431,
        446,
        self=SimpleNamespace(args=args, initial_model=True),
        compute_approx_kl=clone.function(utils, "compute_approx_kl"),
        masked_mean=masked_mean,
        action_log_probs=b.logp,
        base_action_log_probs=b.logp_ref,
        experience=SimpleNamespace(action_mask=b.mask),
        KL_weights=weights,
    )
    return policy_loss()(b.logp, b.logp_old, advantage, b.mask) + 1e-3 * found.kl_loss
