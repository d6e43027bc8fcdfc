"""SEC by its public code: values and chances of categories after three steps."""

import random
from collections import defaultdict
from types import SimpleNamespace

import torch

from tests.golden.make.peers import Clone, Made

FILE = "sec/verl/verl/utils/auto_curriculum/priority.py"


def make(path: str) -> Made:
    clone = Clone(path, "Vincent-La/cofa", "8b685cbb5ad651a4015df8653ea28fb4ec2c2bbb")
    mean = clone.function("sec/verl/verl/utils/torch_functional.py", "masked_mean")
    names = {"BasePriority": clone.function(FILE, "BasePriority"), "random": random, "defaultdict": defaultdict}
    names["verl_F"] = SimpleNamespace(masked_mean=mean)
    bandit_class = clone.function(FILE, "BanditPriority", **names)
    joint = clone.function(FILE, "JointBandit", BanditPriority=bandit_class)
    categories = ["easy", "hard", "odd", "easy", "hard"]
    # each step: tasks of four groups of two rows, and their rewards; no step has a task of the category "odd" but one
    inputs = {
        "categories": categories,
        "tasks": [[0, 1, 3, 4], [0, 3, 1, 2], [0, 1, 3, 4]],
        "rewards": [
            [1.0, 0.0, 0.0, 0.0, 1.0, 1.0, 0.5, 1.0],
            [1.0, 1.0, 1.0, 0.0, 0.0, 0.25, 0.0, 1.0],
            [0.0, 1.0, 0.75, 0.0, 1.0, 1.0, 0.0, 0.0],
        ],
    }
    dataset = [{"extra_info": {"kind": name}} for name in categories]
    bandit = joint(dataset=dataset, temperature=0.4, lr=0.5, objective="unnormalized_adv", feature="kind")
    for tasks, rewards in zip(inputs["tasks"], inputs["rewards"], strict=True):
        groups = torch.tensor(rewards, dtype=torch.float64).view(4, 2)
        advantage = (groups - groups.mean(1, keepdim=True)).flatten()[:, None].expand(8, 3)
        info = [dataset[task]["extra_info"] for task in tasks for _ in range(2)]
        bandit.update(data_info=info, adv=None, unnormalized_adv=advantage, response_mask=torch.ones(8, 3))
    calls = [f"{FILE}:{name}" for name in ("JointBandit.update", "JointBandit.get_probs")]
    answer = {"q": bandit.q_values, "chances": bandit.get_probs("boltzmann"), "names": list(bandit.group_to_arm)}
    peer = {"program": clone.name, "calls": calls, "relative": 1e-12} | answer
    return "SEC, arXiv 2505.14970", inputs, [peer], clone
