"""GRACE by its public code: the objective of its fork of verl, and the reward from embeddings."""

from collections import defaultdict

import torch
from torch.nn import functional

from tests.golden.make.forks import CORE, COUNT_EPS, fork_loss, fork_names, token_rewards
from tests.golden.make.peers import Clone, Made, numbers, tensors
from tests.golden.make.tokens import batch

FILE, CLASS, ESTIMATE = "verl/workers/reward_manager/grace.py", "HiddenRewardManager", "compute_grpo_outcome_advantage"
SETTINGS = {"temperature": 0.1, "clustering_weight": 0.2, "cross_group_weight": 0.2, "exclude_system_prompt": False}


def make(path: str) -> Made:
    clone = Clone(path, "GasolSun36/GRACE", "f636fdc72a3d54c875454193929b130ef15eb698")
    inputs = batch()
    estimate = clone.function(CORE, ESTIMATE, defaultdict=defaultdict, **fork_names(clone))
    given = (token_rewards(inputs), tensors(inputs).mask, tensors(inputs).group.numpy())
    advantage = estimate(*given, norm_adv_by_std_in_grpo=False)[0]
    answer = {"advantage": advantage} | fork_loss(clone, inputs, advantage, "token-mean", 0.2, 0.2, 3.0)
    peer = {"program": clone.name, "calls": [f"{CORE}:{ESTIMATE}", f"{CORE}:compute_policy_loss"]} | COUNT_EPS | answer
    names = ("main", "query", "negative")
    states = {name: torch.tensor(numbers(7 + i, 12, 5)).double() for i, name in enumerate(names)}
    states = {name: functional.normalize(value, dim=1) for name, value in states.items()}
    torch.set_default_dtype(torch.float64)  # it makes new tensors of rewards
    manager = clone.function(
        FILE, CLASS, F=functional, AbstractRewardManager=object, PROMPT2="", default_compute_score=0
    )
    own = manager(None, 0, **SETTINGS)
    groups = {group: [row for row, other in enumerate(inputs["group"]) if other == group] for group in range(3)}
    supervised = own.reward_function_with_scale(states["query"], states["main"], states["negative"], groups, 0.1)[0]
    given = {"query_mean_hidden_states": states["query"], "main_mean_hidden_states": states["main"]}
    lines = clone.lines(FILE, 862, 928, self=own, group_dict=groups, F=functional, **given)
    inputs["reward_parts"] = {name: value.tolist() for name, value in states.items()}
    inputs["reward_parts"] |= {"supervised": supervised.tolist(), "unsupervised": lines.total_rewards.tolist()}
    return "GRACE, arXiv 2510.04506", inputs, [peer], clone
