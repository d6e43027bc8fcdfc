"""IGPO by its public code: the estimator of the first release, and that of the later one."""

from collections import defaultdict

import numpy as np
import torch

from tests.golden.make.forks import COUNT_EPS, fork_names
from tests.golden.make.gigpo import make_inputs, turns_of
from tests.golden.make.peers import Clone, Made, gradient, numbers, tensors
from tests.golden.make.tokens import far

FIRST = "GuoqingWang1/IGPO", "bff163b72718a8b8f9175ce019ec7114ad6bd59a"
LATER = "debajoycs98/IGPO", "866019637ff3cc61fd093b0e7acbdd2442af0733"
CORE, NAME = "verl/trainer/ppo/core_algos.py", "compute_grpo_outcome_advantage"
GAMMA = 0.9


def make(*paths: str) -> Made:
    clones = [Clone(path, *source) for path, source in zip(paths, (FIRST, LATER), strict=True)]
    torch.set_default_dtype(torch.float64)  # it makes tensors without a type
    inputs = with_gains(make_inputs())
    peers = [
        run(clones[0], inputs) | {"changes": {"advantage": {"kind": "per_position"}}},
        run(clones[1], inputs) | {"changes": {}},
        run(clones[1], inputs, gamma=GAMMA, info_gain_norm_mode="separate")
        | {"changes": {"advantage": {"gamma": GAMMA, "apart": True}}},
    ]
    beyond = far(inputs)
    whole = run(clones[1], inputs)
    peers.append({"inputs": beyond} | whole | actor(clones[1], inputs | beyond, whole["advantage"]))
    return "IGPO, arXiv 2510.14967", inputs, peers, *clones


def with_gains(inputs: dict) -> dict:
    """A gain at the end of every turn but an episode's last, which has the reward."""
    gains, received = np.zeros((12, 6)), np.zeros((12, 6))
    drawn, turns = numbers(8, 12, 3, low=0.01), turns_of(inputs["mask"])
    last = {row: (turn, trained[-1]) for row, turn, trained in turns}
    for row, turn, trained in turns:
        if turn < last[row][0]:
            gains[row, trained[-1]] = drawn[row][turn]
    for row, reward in enumerate(numbers(9, 12)):
        received[row, last[row][1]] = reward
    width = 1 + np.array([last[row][1] for row in range(12)])
    turn = np.where(np.arange(6) < width[:, None], [0, 0, 1, 1, 2, 2], -1)
    extras = {"information_gain": gains.tolist(), "decision_reward": received.tolist()}
    return inputs | {"reward": received.sum(1).tolist(), "turn": turn.tolist(), "extras": extras}


def actor(clone: Clone, inputs: dict, advantage: torch.Tensor) -> dict:
    """Loss of their actor with the constants of train.sh and the defaults of its configuration."""
    b, names = tensors(inputs), fork_names(clone)
    logp, names["agg_loss"] = b.logp.requires_grad_(), clone.function(CORE, "agg_loss", **names)
    compute = clone.function(CORE, "compute_policy_loss", **names)
    policy = compute(b.logp_old, logp, advantage, b.mask, cliprange=0.2, clip_ratio_c=3.0)[0]
    divergence = clone.function(CORE, "kl_penalty")(logp, b.logp_ref, "low_var_kl")
    loss = policy + 0.001 * names["agg_loss"](divergence, b.mask, "token-mean")
    calls = [f"{CORE}:{name}" for name in (NAME, "compute_policy_loss", "kl_penalty")]
    return {"calls": calls, **COUNT_EPS, "loss": loss.detach(), "gradient": gradient(loss, logp)}


def run(clone: Clone, inputs: dict, **options) -> dict:
    """Its responses have no gaps: observations are tokens like others until the loss."""
    b = tensors(inputs)
    rewards = torch.tensor(inputs["extras"]["information_gain"]) + torch.tensor(inputs["extras"]["decision_reward"])
    names = {"defaultdict": defaultdict, "print": lambda *_: None}
    if clone.repository == LATER[0]:
        names["_compute_turn_level_advantage"] = clone.function(CORE, "_compute_turn_level_advantage")
    present = (b.turn >= 0).to(b.mask.dtype)
    advantage = clone.function(CORE, NAME, **names)(rewards, present, np.array(inputs["group"]), **options)[0]
    return {"program": clone.name, "calls": [f"{CORE}:{NAME}"], "relative": 1e-12, "advantage": advantage * b.mask}
