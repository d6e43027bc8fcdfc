"""EPO by its public code: the penalty with a history of three steps, and the losses of its fork of verl."""

from collections import defaultdict

import numpy as np
import torch

from tests.golden.make.forks import CORE, COUNT_EPS, fork_names, token_rewards
from tests.golden.make.peers import Clone, Made, gradient, numbers, tensors
from tests.golden.make.tokens import batch, far_reference

ACTOR = "verl/workers/actor/dp_actor.py"
PENALTY, PHASE = (300, 381), (79, 121)
ROWS = [row % 3 for row in range(12)]
"""Step of the environment in which each row was sampled: a row is a step there."""


def make(path: str) -> Made:
    torch.set_default_dtype(torch.float64)
    clone = Clone(path, "WujiangXu/EPO", "5b6fa98e034639b95afbfb24f98d1cb1e5197542")
    inputs = batch()
    mask = np.array(inputs["mask"])
    inputs |= {
        "turn": np.where(mask > 0, np.array(ROWS)[:, None], -1).tolist(),
        "before": [inputs["reward"], inputs["reward"]],
        "entropy_before": numbers(6, 2, 12, 6, low=0.2, high=2.0),
        "entropy_old": numbers(7, 12, 6, low=0.2, high=2.0),
        "entropy": numbers(8, 12, 6, low=0.2, high=2.0),
    }
    b, steps = tensors(inputs), [*inputs["entropy_before"], inputs["entropy_old"]]
    history = [[np.array(s)[(mask > 0) & (np.array(ROWS) == k)[:, None]].mean() for k in range(3)] for s in steps]
    quiet = {"print": lambda *words: None}
    penalise = clone.lines(ACTOR, *PENALTY, **quiet).generate_entropy_penalty
    phase = clone.lines(ACTOR, *PHASE)._calculate_epoch_based_entropy_weight
    names = fork_names(clone)
    names["agg_loss"] = clone.function(CORE, "agg_loss", **names)
    estimate = clone.function(CORE, "compute_grpo_outcome_advantage", defaultdict=defaultdict)
    advantage = estimate(token_rewards(inputs), b.mask, inputs["group"], list(range(12)))[0] * b.mask
    compute = clone.function(CORE, "compute_policy_loss", **names)
    logp, peers = b.logp.requires_grad_(), []
    other = far_reference(inputs) | {"entropy": [[0.05, *row[1:]] for row in inputs["entropy"]]}  # far below the usual
    cases = ((0.0, 2.0, None, {}), (0.8, 1.2, None, {}), (0.8, 1.2, 10, {}), (0.0, 2.0, None, other))
    for low, high, epochs, changed in cases:
        vars(b).update(vars(tensors(changed)))
        policy = compute(b.logp_old, logp, advantage, b.mask, cliprange=0.2, clip_ratio_c=3.0)[0]
        kl = clone.function(CORE, "kl_penalty")(logp, b.logp_ref, "low_var_kl")
        usual = np.mean(np.array(history), axis=0)
        penalty = penalise(None, usual, b.entropy, np.array(ROWS), "token", low, high, 0.1)[0]
        penalty = penalty * (1.0 if epochs is None else phase(None, 2, epochs))
        bonus, cost, divergence = (names["agg_loss"](x, b.mask, "token-mean") for x in (b.entropy, penalty, kl))
        loss = policy - (bonus - cost * 1.0) * 0.001 + divergence * 0.01
        changes = {"penalty": "indicator", "phase_steps": epochs} | ({"low": low, "high": high} if low else {})
        calls = [f"{ACTOR}:{first}-{last}" for first, last in (PENALTY, PHASE)]
        calls += [f"{CORE}:{name}" for name in ("compute_grpo_outcome_advantage", "compute_policy_loss", "kl_penalty")]
        found = {"advantage": advantage, "loss": loss.detach(), "gradient": gradient(loss, logp)}
        peers.append(
            ({"inputs": changed} if changed else {})
            | {"program": clone.name, "calls": calls, "changes": {"entropy": changes}}
            | COUNT_EPS
            | found
        )
    peers[2]["phase"] = [phase(None, step, 15) for step in range(17)]
    return "EPO, arXiv 2509.22576", inputs, peers, clone
