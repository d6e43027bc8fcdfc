"""GDPO's advantages of two rewards by its public code."""

from types import SimpleNamespace

import torch

from tests.golden.make.peers import Clone, Made, numbers, tensors

COMMIT = "b080e63d0126870ad08acc8ebc3f04b728175a9e"
FILE = "trl-GDPO/trl-0.18.0-gdpo/trl/trainer/grpo_trainer.py"


def make(path: str) -> Made:
    clone = Clone(path, "NVlabs/GDPO", COMMIT)
    inputs = {
        "group": [0] * 4 + [1] * 4 + [2] * 4,
        "right": [1.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 0.0],
        "length": numbers(11, 12, low=0.0, high=30.0),
        "weights": [1.0, 0.3],
    }
    b = tensors(inputs)
    trainer = SimpleNamespace(reward_weights=b.weights, num_generations=4)
    rewards = torch.stack([b.right, b.length], dim=1)
    found = clone.lines(FILE, 1225, 1249, self=trainer, rewards_per_func=rewards, device="cpu")
    peer = {"program": clone.name, "calls": [f"{FILE}:1225-1249"], "relative": 1e-12, "advantage": found.advantages}
    return "GDPO, arXiv 2601.05242", inputs, [peer], clone
