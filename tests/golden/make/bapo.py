"""BAPO by its public code, with the ranges of its README and of its script, and the lower bound first."""

from types import SimpleNamespace
from typing import Any

import torch

from tests.golden.make.forks import COUNT_EPS
from tests.golden.make.peers import Clone, Made, doubles, gradient, tensors
from tests.golden.make.tokens import Verl, batch

FILE = "recipe/bapo/policy_loss.py"
README = {"lower": (0.6, 0.9, 0.05), "upper": (1.2, 3.0, 0.05), "target": 1.0}
REWARD = [0.15, 0.74, 0.26, 0.53, 0.01, 0.92, 0.9, 0.03, 0.96, 0.14, 0.28, 0.61]
"""Rewards with which the README's target of 1 moves the upper bound half-way."""
SCRIPT = {"lower": (0.8, 0.95, 0.05), "upper": (1.2, 2.0, 0.1), "target": 0.5}


def make(path: str) -> Made:
    clone = Clone(path, "WooooDyy/BAPO", "7287044444d5d578529ea464b45f090a36e8da3a")
    inputs = batch()
    balanced = {"reward": REWARD}
    advantage, other = (Verl(x).advantage("compute_grpo_outcome_advantage") for x in (inputs, inputs | balanced))
    with doubles():
        # the first bounds are enough; the upper one moves half-way; no bounds are enough
        cases = (README, SCRIPT, README | {"target": 1.25}, README | {"target": 1.6}, SCRIPT | {"target": 1.6})
        peers = [run(clone, inputs, advantage, options) for options in cases]
        peers.append({"inputs": balanced} | run(clone, inputs | balanced, other, README))
    return "BAPO, arXiv 2510.18927", inputs, peers, clone


def run(clone: Clone, inputs: dict, advantage: torch.Tensor, options: dict) -> dict:
    b = tensors(inputs)
    logp = b.logp.requires_grad_()

    def mean(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return (x * mask).sum() / (mask.sum() + 1e-8)

    effective = clone.function(FILE, "_compute_effective_advantage")
    loss_of = clone.function(
        FILE,
        "compute_policy_loss_bapo",
        _compute_effective_advantage=effective,
        _append_metric=clone.function(FILE, "_append_metric"),
        verl_F=SimpleNamespace(masked_mean=mean),
        agg_loss=lambda loss_mat, loss_mask, loss_agg_mode: mean(loss_mat, loss_mask),
    )
    lower, upper = options["lower"], options["upper"]
    names = {f"ratio_lower_{name}": value for name, value in zip(("start", "max", "step"), lower, strict=True)}
    names |= {f"ratio_upper_{name}": value for name, value in zip(("start", "max", "step"), upper, strict=True)}
    settings = SimpleNamespace(**names, adv_ratio_target=options["target"], eps=1e-8)
    config = SimpleNamespace(
        policy_loss=settings, clip_ratio_low=0.2, clip_ratio_high=0.2, get=lambda name, other: other
    )
    loss = loss_of(b.logp_old, logp, advantage, b.mask, config=config)[0]
    (found,) = settings._bapo_metrics_buffer
    changes: dict[str, Any] = {"order": "low_first"}
    if upper != README["upper"]:  # which are the row's
        changes |= dict(zip(("lower", "lower_max"), lower, strict=False))  # the steps between change nothing
        changes |= dict(zip(("upper", "upper_max", "upper_step"), upper, strict=True))
    changes |= {} if options["target"] == README["target"] else {"target": options["target"]}
    return {
        "program": clone.name,
        "calls": [f"{FILE}:compute_policy_loss_bapo"],
        **COUNT_EPS,
        "changes": {"clip": changes},
        "advantage": advantage,
        "bounds": [found["clip_low"], found["clip_high"]],
        "loss": loss.detach(),
        "gradient": gradient(loss, logp),
    }
