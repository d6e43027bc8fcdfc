"""RiskPO by its public code: estimator, tracker of quantiles and loss."""

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from tests.golden.make.forks import CORE, COUNT_EPS, fork_loss, token_rewards
from tests.golden.make.peers import Clone, Made, numbers, tensors
from tests.golden.make.tokens import batch

NAME = "compute_grpo_bundle_rvar_outcome_advantage_quantile_tracking"
TRAINER = "verl/trainer/ppo/ray_trainer.py"
TRACKS = (1435, 1459)
OPTIONS = {
    "quantile_down": 0.2,
    "quantile_up": 0.8,
    "use_q_track_mode": "track",
    "use_mixing_risk_measure": True,
    "natural_baseline_adv": False,
}
CREDITS = {"share": "sum-mean", "uniform": "uniform", "deviation": "std"}


def steps(clone: Clone, inputs: dict[str, Any], bundle: int = 2, **options: Any) -> torch.Tensor:
    """Advantages of the last of the steps, whose quantiles those before have moved."""
    estimate = clone.function(CORE, NAME, defaultdict=defaultdict)
    levels = torch.arange(1, 20) / 20
    q = torch.nn.Parameter(torch.zeros(19))
    run = SimpleNamespace(alpha_list=levels, q=q, optimizer_q=torch.optim.SGD([q], lr=0.1), is_warmup=False)
    b, tracked = tensors(inputs), (None, None)
    groups = np.array(inputs["group"])
    for reward in (*b.before, b.reward):
        rewards = token_rewards(inputs | {"reward": reward.tolist()})
        bundles = groups // bundle
        advantage, _, papers = estimate(rewards, b.mask, groups, bundles, 1e-6, *tracked, config=OPTIONS | options)
        step = SimpleNamespace(meta_info={"bundle_paper_scores": papers})
        clone.lines(TRAINER, *TRACKS, self=run, batch=step)
        tracked = tuple(float(run.q[(levels - level).abs().argmin()]) for level in (0.2, 0.8))
    return advantage


def make(path: str) -> Made:
    torch.set_default_dtype(torch.float64)
    clone = Clone(path, "RTkenny/RiskPO", "65ec40c935f5726aa2d80160d9056b1236d5551e")
    inputs = batch() | {
        "group": [row // 3 for row in range(12)],
        "reward": [1, 0, 0.1, 0.7, 0.5, 1, 0, 1, 0, 1, 1, 0.25],
    }
    inputs["before"] = [[0.5, 1, 0, 1, 0.2, 0, 0, 1, 1, 0.3, 1, 0], [0, 1, 1, 0, 0, 0.4, 1, 1, 0, 0.6, 0, 0.1]]
    calls = [f"{CORE}:{NAME}", f"{TRAINER}:{TRACKS[0]}-{TRACKS[1]}", f"{CORE}:compute_policy_loss"]
    peers = []
    for credit, theirs in CREDITS.items():
        for natural in (False, True):
            advantage = steps(clone, inputs, credit_assign_mode=theirs, natural_baseline_adv=natural)
            changes = {"advantage": {"bundle": 2, "credit": credit} | ({"natural": True} if natural else {})}
            peers.append(
                {"program": clone.name, "calls": calls, "changes": changes, "advantage": advantage} | COUNT_EPS
            )
    peers[0] |= fork_loss(clone, inputs, peers[0]["advantage"], "token-mean", 0.2, 0.2, 3.0)
    many = questions()
    advantage = steps(clone, inputs | many, bundle=5, credit_assign_mode=CREDITS["share"])
    peers.append({"inputs": many, "program": clone.name, "calls": calls, "advantage": advantage} | COUNT_EPS)
    return "RiskPO, arXiv 2510.00911", inputs, peers, clone


def questions() -> dict[str, Any]:
    """Ten questions of two answers, in bundles of five."""
    rows = {"reward": numbers(40, 20, low=0.0), "before": numbers(41, 2, 20, low=0.0)}
    rows |= {key: numbers(seed, 20, 6, low=-3.0, high=-0.3) for seed, key in ((42, "logp_old"), (43, "logp"))}
    rows |= {key: numbers(44, 20, 6) for key in ("values", "values_new", "logp_ref")}
    return rows | {
        "group": [row // 2 for row in range(20)],
        "mask": [[1.0] * (1 + row % 6) + [0.0] * (5 - row % 6) for row in range(20)],
    }
