"""IGPO by its public code: the estimator of the first release, and that of the later one."""

from collections import defaultdict

import numpy as np
import torch

from tests.golden.make.gigpo import make_inputs, turns_of
from tests.golden.make.peers import Clone, Made, numbers, tensors

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
